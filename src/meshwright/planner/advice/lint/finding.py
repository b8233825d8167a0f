"""A finding of `lint`: one anti-pattern in a plan, what it costs and the fix; and what a rule receives to look for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.result import values_of
from meshwright.planner.advice.alternatives import PlanTrials, fits, settings, step
from meshwright.predict.estimate import Estimate
from meshwright.units import Json

Severity = Literal["error", "warning", "note"]
SAVES = 0.01  # share of the step a fix must save to be a warning
COSTS = 0.10  # share of the step that is a warning even without a better plan
SHOWN = 0.001  # share of the step below which a pattern is not reported


@dataclass(frozen=True)
class Finding:
    """One pattern found in a plan."""

    code: str
    name: str
    severity: Severity
    what: str
    cost_s: float | None = None
    share: float | None = None  # of the step
    fix: str = ""
    saves_s: float | None = None  # by the fix; negative: it is slower
    fixed: Plan | None = None
    still_best: str = ""

    @property
    def weighs(self) -> bool:
        return self.severity != "note"

    def as_dict(self) -> Json:
        return values_of(self, "code", "name", "severity", "what", "cost_s", "share", "fix", "saves_s", "still_best")


@dataclass(frozen=True)
class Seen:
    """The input of a rule: the configuration, its estimate, and a `PlanTrials` of other plans."""

    config: Config
    now: Estimate
    trial: PlanTrials

    @property
    def plan(self) -> Plan:
        return self.now.plan

    @property
    def step(self) -> float:
        return step(self.now)

    def faster(self, plans: Iterable[Plan | None], spare: float = 1.0) -> Estimate | None:
        """The fastest of some plans that fit (`PlanTrials.fastest`), if it is faster than the plan."""
        best = self.trial.fastest(plans, spare)
        return best if best is not None and step(best) < self.step else None


Rule = Callable[[Seen], Finding | None]


def finding(
    seen: Seen,
    code: str,
    name: str,
    what: str,
    cost: float,
    fixed: Estimate | None = None,
    words: str = "",
    saves: float | None = None,
) -> Finding | None:
    """A finding with its severity; None if it costs almost nothing."""
    if fixed is not None:
        saves = seen.step - step(fixed)
        words = settings(seen.plan, fixed.plan) if saves > 0 else ""
        cost = max(cost, saves)
    share = cost / seen.step
    if share < SHOWN:
        return None
    worth = (saves or 0.0) / seen.step >= SAVES or share >= COSTS
    return Finding(
        code, name, "warning" if worth else "note", what, cost, share, words, saves, fixed.plan if fixed else None
    )


def larger_batch(seen: Seen, enough: Callable[[Estimate], bool]) -> tuple[str, float | None]:
    """Return the option for the smallest sufficient batch (or the largest tried), and the time it saves per step of the old batch."""
    words, saves = "", None
    for factor in (2, 4, 8, 16):
        workload = seen.config.workload.but(batch=seen.config.workload.batch * factor)
        e = seen.trial.with_changes(seen.plan, workload=workload)
        if e is not None and fits(e):
            words, saves = f"--set workload.batch={workload.batch}", seen.step - step(e) / factor
            if enough(e):
                break
    return words, saves
