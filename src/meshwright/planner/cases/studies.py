"""Case studies: published training runs, estimated with the published plan and compared with the planner's choice.

Each case in `cases.toml` has the published settings, our assumptions, and figures to compare the estimate with. The figures are of
several kinds, and each is compared with the matching quantity:

    step_s, tokens_per_s_per_gpu, mfu, hfu    of a step, as estimated
    days, gpu_hours                           step · tokens / (batch · sequence): a run without failures, ramps or evaluation
    flops                                     of the model, 3 × forward, causal attention counted half

A training run takes longer than its steps: published GPU-hours include restarts, batch ramps and evaluation, so a correct estimate of the
steps is slightly below them. The planner's choice (`chosen`) is kept in `case_choices.toml`, written by `kept`, so that reading a case
takes milliseconds and not a search.
"""

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.errors import unknown
from meshwright.planner.advice.alternatives import USABLE_MEMORY, exposed, fits, step
from meshwright.planner.search.leaders import solve
from meshwright.planner.search.space import Space
from meshwright.predict.estimate import Estimate, estimate

DAY, HOUR = 86400.0, 3600.0
UNITS = {
    "step_s": "s a step",
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "mfu": "MFU",
    "hfu": "HFU",
    "days": "days",
    "gpu_hours": "GPU-hours",
    "flops": "FLOPs of the whole training",
    "memory_gib": "GiB used",
}


@dataclass(frozen=True)
class PublishedFigure:
    """One published figure."""

    what: str
    value: float
    source: str


@dataclass(frozen=True)
class CaseStudy:
    """A training as published; `config` is what we evaluate."""

    name: str
    title: str
    by: str
    story: str
    config: Config
    settings: tuple[str, ...]  # settings that the authors published
    assumed: tuple[str, ...]
    sources: tuple[str, ...]
    corrections: tuple[str, ...]  # corrections to the account in the introductory texts
    difference: str  # why our estimate differs from the published figures
    published: tuple[PublishedFigure, ...]


@dataclass(frozen=True)
class FigureRow:
    """A published figure and our estimate of it."""

    what: str
    unit: str
    published: float
    ours: float
    low: float
    high: float
    source: str

    @property
    def ratio(self) -> float:
        return self.ours / self.published

    @property
    def within(self) -> bool:
        """Whether the published figure lies in our band."""
        return self.low <= self.published <= self.high


@dataclass(frozen=True)
class Evaluated:
    """A case, its estimate, and the planner's choice where there is one."""

    case: CaseStudy
    estimate: Estimate
    rows: tuple[FigureRow, ...]
    choice: Estimate | None

    @property
    def days(self) -> float:
        return days(self.estimate)

    def as_dict(self) -> dict[str, Any]:
        c = self.case
        return {
            "case": c.name,
            "title": c.title,
            "by": c.by,
            "told": list(c.settings),
            "assumed": list(c.assumed),
            "sources": list(c.sources),
            "published": [
                {"what": r.what, "published": r.published, "ours": r.ours, "within_band": r.within, "source": r.source}
                for r in self.rows
            ],
            "plan": c.config.plan.as_dict(),
            **self.estimate.prediction.as_dict(),
            "days": self.days,
            "gpu_hours": gpu_hours(self.estimate),
            "choice": None
            if self.choice is None
            else {"plan": self.choice.plan.as_dict(), **self.choice.prediction.as_dict()},
        }


@cache
def tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("meshwright.planner.cases").joinpath("cases.toml").read_text("utf-8"))


CASES: tuple[str, ...] = tuple(tables())


@cache
def load(name: str) -> CaseStudy:
    """A case by its name."""
    known = tables()
    if name not in known:
        raise unknown("MW-CASE-001", "case", name, known, "--case {}")
    raw = dict(known[name])
    parts = {part: raw.pop(part) for part in ("model", "cluster", "stack", "workload", "plan")}
    published = tuple(PublishedFigure(**row) for row in raw.pop("published"))
    words: dict[str, Any] = {key: tuple(raw.pop(key)) for key in ("settings", "assumed", "sources", "corrections")}
    return CaseStudy(name, config=Config.from_parts(**parts).check(), published=published, **words, **raw)


def evaluate(name: str) -> Evaluated:
    """Estimate a case, and compare published figures with ours and the published plan with the planner's choice, if one is stored."""
    case = load(name)
    e = estimated(case, case.config.plan)
    choice = chosen(name)
    return Evaluated(case, e, tuple(rows(case, e)), estimated(case, choice) if choice else None)


def estimated(case: CaseStudy, plan: Plan) -> Estimate:
    return estimate(case.config.but(plan=plan, assumed=case.assumed))


def days(e: Estimate) -> float:
    """Days of the token budget at this step time, without restarts or evaluation."""
    return step(e) * e.workload.tokens / e.workload.tokens_per_step / DAY


def gpu_hours(e: Estimate) -> float:
    return days(e) * 24 * e.plan.world


def rows(case: CaseStudy, e: Estimate) -> Iterator[FigureRow]:
    """Each published figure with ours; the band is that of the prediction."""
    p = e.prediction
    ours = {
        "step_s": p.step_time_s,
        "days": days(e),
        "gpu_hours": gpu_hours(e),
        "tokens_per_s_per_gpu": (p.tokens_per_s or 0.0) / e.plan.world,
        "mfu": p.mfu or 0.0,
        "hfu": p.hfu or 0.0,
        "memory_gib": p.memory_gib or 0.0,
        "flops": e.model.model_flops(e.workload.seq) * e.workload.tokens,
    }
    slow, fast = p.step_time_high_s / p.step_time_s, p.step_time_low_s / p.step_time_s
    for figure in case.published:
        value = ours[figure.what]
        if figure.what in ("step_s", "days", "gpu_hours"):
            low, high = value * fast, value * slow
        elif figure.what in ("flops", "memory_gib"):
            low, high = 0.9 * value, 1.1 * value
        else:
            low, high = value / slow, value / fast
        yield FigureRow(figure.what, UNITS[figure.what], figure.value, value, low, high, figure.source)


# The planner's choice


@cache
def choices() -> dict[str, dict[str, Any]]:
    path = files("meshwright.planner.cases").joinpath("case_choices.toml")
    return tomllib.loads(path.read_text("utf-8")) if path.is_file() else {}


def chosen(name: str) -> Plan | None:
    """The plan that the search chose for a case when `case_choices.toml` was written."""
    fields = choices().get(name)
    return Plan(**fields) if fields else None


def choose(name: str) -> Plan | None:
    """Run the search: the fastest plan for the case's devices, batch, stack and dtypes that leaves 5% of the memory free."""
    c = load(name).config
    dtypes = ("param_dtype", "grad_dtype", "state_dtype", "comm_dtype")
    base = Plan(**{field: getattr(c.plan, field) for field in dtypes})
    _, ranking = solve(Space(c.but(plan=base)), headroom=1 - USABLE_MEMORY)
    return ranking.best.plan if ranking else None


def gains(was: Estimate, now: Estimate, least: float = 0.01) -> list[tuple[str, float]]:
    """Return the seconds that one plan saves over another, by part, largest first."""
    parts = {*was.prediction.exposed_s, *now.prediction.exposed_s}
    saved = {part: exposed(was, part) - exposed(now, part) for part in parts}
    large = [(part, s) for part, s in saved.items() if abs(s) >= least * step(was)]
    return sorted(large, key=lambda item: -abs(item[1]))


def verdict(was: Estimate, now: Estimate) -> str:
    """One line that compares the choice with the published plan."""
    if not fits(was):
        used = was.prediction.memory_gib or 0.0
        return f"by our memory model the published plan needs {used:.0f} of {was.prediction.memory_limit_gib:.0f} GiB"
    ratio = step(now) / step(was)
    if ratio >= 0.99:
        return "the published plan is within 1% of the planner's"
    return f"the planner's plan takes {1 - ratio:.0%} less time"


def kept() -> str:
    """Return the text of `case_choices.toml`: the search's choice for every case."""
    import tomli_w

    head = "# What the search chose for each case; written by `python -m meshwright.planner.cases.studies FILE`, some minutes of searching.\n\n"
    chosen_now = {name: plan.as_dict() for name in CASES if (plan := choose(name)) is not None}
    return head + tomli_w.dumps(chosen_now)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(kept(), "utf-8")
