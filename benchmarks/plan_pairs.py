"""Does a change of settings that a project merged as a speed-up look like one to us? `plan_pairs.toml` lists the pairs with their sources.

Both sides are predicted. *Right*: whether the second side is predicted to be faster. *In band*: whether the told ratio of speeds lies in our band
for two plans of one training (nine of ten, `cost.band.difference_doubt`); a sign is *sure* if that band excludes 1. The term that *decides* is the
part of the step that changes most, in hundredths of the first step and for the same number of tokens. Aim: 85% of the signs right, half of the told
ratios in band.
"""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cost.band import NINE_INSIDE, difference_doubt
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import FIELDS
from meshwright.describe.result import Prediction
from meshwright.describe.workload import Workload
from meshwright.predict.prediction import predict


def side(data: dict[str, Any], pair: dict[str, Any], name: str) -> Prediction:
    """Predict one side of a pair. What neither it nor its family tells has the default of `Plan`."""
    told = {**data["families"][pair["family"]], **pair, **pair[name]}
    model, stack = catalog.load("models", told["model"]), catalog.load("stacks", told["stack"])
    model = model.but(layers=told["layers"]) if "layers" in told else model
    stack = stack.but(**{key: told[key] for key in ("dispatch", "graphs") if key in told})
    cluster = catalog.load("clusters", told["cluster"]).with_gpus(told["gpus"])
    workload = Workload(**{key: told[key] for key in Workload.model_fields if key in told})
    fields = {"expert_tp": 1 if model.experts else 0} | {key: told[key] for key in FIELDS if key in told}
    others = math.prod(fields.get(axis, 1) for axis in ("replicate", "tp", "cp", "pp"))
    schedule = "interleaved" if fields.get("virtual", 1) > 1 else "1f1b"
    derived = {"shard": told["gpus"] // others, "sp": fields.get("tp", 1) > 1, "schedule": schedule}
    return predict(Config(model, cluster, Plan(**(derived | fields)), workload, stack))


def told_ratio(pair: dict[str, Any]) -> float:
    """The told speed after over that before; 0 where only the direction is told."""
    before, after = pair.get("speed") or pair.get("seconds", (0.0, 1.0))[::-1]
    return float(after / before)


def rate(prediction: Prediction) -> float:
    """Tokens per second."""
    return prediction.tokens_per_s or math.nan


@dataclass
class PairResult:
    """What is told of a pair, and what we predict."""

    pair: dict[str, Any]
    source: str
    told: float  # 0: only the direction
    ratio: float
    width: float
    decides: str

    @property
    def band(self) -> tuple[float, float]:
        return self.ratio / self.width, self.ratio * self.width

    @property
    def right(self) -> bool:
        return self.ratio > 1

    @property
    def within(self) -> bool:
        return self.band[0] <= self.told <= self.band[1]

    @property
    def sure(self) -> bool:
        return not self.band[0] <= 1 <= self.band[1]

    @property
    def alone(self) -> bool:
        """Whether nothing else is known to have changed."""
        return not {"with", "release"} & self.pair.keys()


def compared(pair: dict[str, Any], source: str, before: Prediction, after: Prediction) -> PairResult:
    """Compare the two sides for the same number of tokens."""
    tokens = rate(after) * after.step_time_s / (rate(before) * before.step_time_s)
    parts = {part: seconds / tokens for part, seconds in after.exposed_s.items()}
    change = {p: parts.get(p, 0.0) - before.exposed_s.get(p, 0.0) for p in {*before.exposed_s, *parts}}
    part = max(change, key=lambda p: abs(change[p]))
    width = math.exp(NINE_INSIDE * difference_doubt(before.exposed_s, parts))
    decides = f"{part} {100 * change[part] / before.step_time_s:+.0f}"
    return PairResult(pair, source, told_ratio(pair), rate(after) / rate(before), width, decides)


def results() -> list[PairResult]:
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    out = []
    for pair in data["pair"]:
        before, after = (side(data, pair, name) for name in ("before", "after"))
        out.append(compared(pair, data["families"][pair["family"]]["source"], before, after))
    return out


def summary(rows: list[PairResult]) -> str:
    """Counts of signs and sizes."""
    told, sure = [r for r in rows if r.told], [r for r in rows if r.sure]
    right, inside = sum(r.right for r in rows), sum(r.within for r in told)
    return (
        f"{len(rows)} pairs: sign right in {right} ({right / len(rows):.0%}); where our band excludes 1, in "
        f"{sum(r.right for r in sure)} of {len(sure)}; "
        f"size in our band in {inside} of {len(told)} ({inside / len(told):.0%})"
    )


def section(rows: list[PairResult]) -> str:
    """The part of the page about pairs."""
    lines = [
        "## Merged speed-ups\n",
        "Settings before and after a merged change that claims to be faster, from the frameworks' pull requests and performance pages "
        "(`benchmarks/plan_pairs.toml` has sources, settings and what is assumed; the list was closed before the first prediction). *Told* and "
        "*predicted*: speed after over before. *Band*: nine of ten for two plans of one training. *Decides*: the part of the step that changes most, "
        "in hundredths of the step before.\n",
        f"**{summary(rows)}** (aims: 85% and half). Settings alone, nothing else known to have changed: {summary([r for r in rows if r.alone])}.\n",
        "| pair | source | told | predicted | band | sign | in band | decides |",
        "| --- | --- | ---: | ---: | ---: | --- | --- | --- |",
    ]
    for r in rows:
        told = (f"{r.told:.2f}", "yes" if r.within else "**no**") if r.told else ("faster", "–")
        source = f"{r.source}, {r.pair['source'].split(';')[0].split(':')[0]}"
        band, sign = "{:.2f} to {:.2f}".format(*r.band), "right" if r.right else "**wrong**"
        cells = (r.pair["id"], source, told[0], f"{r.ratio:.2f}", band, sign, told[1], r.decides)
        lines.append(f"| {' | '.join(cells)} |")
    wrong = [r.pair for r in rows if not r.right]
    lines.append("\nWhere the sign is wrong:\n")
    lines += [f"- {pair['id']}: {pair.get('why', 'not explained')}." for pair in wrong]
    return "\n".join(lines) + "\n"


def main() -> None:
    print(f"{'pair':<36}{'told':>6}{'predicted':>11}{'band':>14}{'right':>7}{'in band':>9}  decides")
    rows = results()
    for r in rows:
        told, within = (f"{r.told:.2f}", "yes" if r.within else "no") if r.told else ("-", "-")
        band = "{:.2f} to {:.2f}".format(*r.band)
        print(
            f"{r.pair['id']:<36}{told:>6}{r.ratio:>11.2f}{band:>14}{'yes' if r.right else 'NO':>7}{within:>9}  {r.decides}"
        )
    print("all:", summary(rows))
    print("settings alone:", summary([r for r in rows if r.alone]))


if __name__ == "__main__":
    main()
