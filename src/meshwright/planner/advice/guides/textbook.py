"""The recommendations of the textbook guides compared with the winner of the search, in seconds per step and days.

The guides (`planner.advice.guides`) are rules of thumb: size against memory, topology, batch, architecture, typical configurations, when to
use each ZeRO stage, the tensor and pipeline guides, the practical tree, "start simple", inference. Each has a plan, the reason with
the figures of this problem, the wording of its text, and a correction where the wording is wrong.
`compare` estimates every recommended plan with the same
model as the winner, so that the difference is known in seconds per step and, with a token budget, in days.

On a common cluster several rules of thumb are within a few percent of the optimum. Where one is not, the reason column says which of
its assumptions is false.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.planner.advice.alternatives import PlanTrials, fits, step
from meshwright.planner.advice.guides import axes, general
from meshwright.planner.advice.guides.problem import Guide, GuideProblem, Recommendation
from meshwright.predict.estimate import Estimate
from meshwright.units import Json

GUIDES: tuple[Guide, ...] = (
    general.size_against_memory,
    general.topology,
    general.batch_size,
    general.architecture,
    general.typical_configuration,
    axes.zero_stage,
    axes.tensor,
    axes.pipeline,
    axes.three_dimensions,
    axes.zero3_network,
    general.practical_tree,
    general.start_simple,
    axes.inference,
)


@dataclass(frozen=True)
class Compared:
    """A recommendation compared with the winner."""

    recommendation: Recommendation
    estimate: Estimate | None
    fits: bool
    ratio: float | None  # its step over the winner's
    costs_s: float | None  # seconds per step above the winner
    costs_days: float | None  # days above the winner over the token budget, if one is given
    same: bool  # the winner itself

    def as_dict(self) -> Json:
        made = self.recommendation.as_dict()
        if self.estimate is not None:
            p = self.estimate.prediction
            made |= {"step_time_s": p.step_time_s, "memory_gib": p.memory_gib, "mfu": p.mfu}
        return made | {"fits": self.fits, "ratio": self.ratio, "costs_s": self.costs_s, "costs_days": self.costs_days}


def recommend(config: Config) -> list[Recommendation]:
    """The recommendation of every guide, in the order of `GUIDES`."""
    problem = GuideProblem(config)
    return [guide(problem) for guide in GUIDES]


def compare(recommendations: Iterable[Recommendation], winner: Estimate) -> list[Compared]:
    """Estimate each recommended plan for the winner's problem."""
    trial = PlanTrials(winner.config)
    return [compare_one(r, trial, winner) for r in recommendations]


def compare_one(r: Recommendation, trial: PlanTrials, winner: Estimate) -> Compared:
    e = trial.of(r.plan)
    if e is None:
        return Compared(r, None, False, None, None, None, False)
    more = step(e) - step(winner)
    steps = winner.workload.tokens / winner.workload.tokens_per_step
    days = more * steps / 86400 if winner.workload.tokens else None
    return Compared(r, e, fits(e), step(e) / step(winner), more, days, r.plan == winner.plan)


def differences(a: Plan, b: Plan) -> str:
    """The fields in which two plans differ: `tp 8 → 4, zero 1 → 3`."""
    left, right = a.model_dump(), b.model_dump()
    words = {"bucket": lambda x: f"{x / 1e6:,.0f} MB"}
    shown = [
        f"{k} {words.get(k, _plain)(left[k])} → {words.get(k, _plain)(right[k])}" for k in left if left[k] != right[k]
    ]
    return ", ".join(shown) or "the same plan"


def _plain(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "-".join(str(v) for v in value) or "as the stack"
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
