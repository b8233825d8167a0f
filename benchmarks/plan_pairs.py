"""Does a change of settings that a project merged as a speed-up look like one to us? `plan_pairs.toml` lists the pairs with their sources.

Both sides are predicted. *Right*: whether the second side is predicted to be faster. *In band*: whether the told ratio of speeds lies in our band
for two plans of one training (nine of ten, `cost.band.difference_doubt`); a sign is *sure* if that band excludes 1. The term that *decides* is the
part of the step that changes most, in hundredths of the first step and for the same number of tokens. Aim: 85% of the signs right.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

from meshwright.cost.band import difference_doubt
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import FIELDS
from meshwright.describe.result import Prediction
from meshwright.describe.workload import Workload
from meshwright.predict.prediction import predict

NINE_OF_TEN = 1.645  # standard deviations to either side


def side(data: dict[str, Any], pair: dict[str, Any], name: str) -> Prediction:
    """Predict one side of a pair. What neither it nor its family tells has the default of `Plan`."""
    told = {**data["families"][pair["family"]], **pair, **pair[name]}
    model, stack = catalog.load("models", told["model"]), catalog.load("stacks", told["stack"])
    model = model.but(layers=told["layers"]) if "layers" in told else model
    stack = stack.but(dispatch=told["dispatch"]) if "dispatch" in told else stack
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


def deciding(before: Prediction, after: Prediction) -> str:
    """The part of the step that changes most, per token."""
    tokens = rate(after) * after.step_time_s / (rate(before) * before.step_time_s)
    parts = {*before.exposed_s, *after.exposed_s}
    change = {p: after.exposed_s.get(p, 0.0) / tokens - before.exposed_s.get(p, 0.0) for p in parts}
    part = max(change, key=lambda p: abs(change[p]))
    return f"{part} {100 * change[part] / before.step_time_s:+.0f}"


def judge(pair: dict[str, Any], before: Prediction, after: Prediction) -> dict[str, bool]:
    """Print the row of a pair, and return what the summary counts."""
    told, ratio = told_ratio(pair), rate(after) / rate(before)
    width = math.exp(NINE_OF_TEN * difference_doubt(before.exposed_s, after.exposed_s))
    low, high, right = ratio / width, ratio * width, ratio > 1
    within, sure = low <= told <= high, not low <= 1 <= high
    words = (f"{told:.2f}", "yes" if within else "no") if told else ("-", "-")
    row = f"{pair['id']:<36}{words[0]:>6}{ratio:>11.2f}{f'{low:.2f} to {high:.2f}':>14}{'yes' if right else 'NO':>7}"
    print(f"{row}{words[1]:>9}  {deciding(before, after)}")
    alone = not {"with", "release"} & pair.keys()  # nothing else is known to have changed
    counts = {"right": right, "sure": sure, "sure and right": sure and right, "told": bool(told), "in band": within}
    return {"alone": alone} | counts


def main() -> None:
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    print(f"{'pair':<36}{'told':>6}{'predicted':>11}{'band':>14}{'right':>7}{'in band':>9}  decides")
    rows = [judge(pair, *(side(data, pair, name) for name in ("before", "after"))) for pair in data["pair"]]
    for name, chosen in (("all", rows), ("settings alone", [row for row in rows if row["alone"]])):
        counts = (f"{key} {sum(row[key] for row in chosen)}" for key in rows[0])
        print(f"{name}: pairs {len(chosen)}", *counts, sep=", ")


if __name__ == "__main__":
    main()
