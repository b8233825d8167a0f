"""The result of a search: the winner, leaders, strategies, Pareto front and reasons; a plan file.

`Result` computes on first use what is not always needed: predictions of leaders, the explanation, the comparison with the user's plan.
"""

import re
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from meshwright.cost.band import indistinguishable
from meshwright.cost.walked import walk_step
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.result import MEMORY_BAND, Prediction, values_of
from meshwright.describe.shown import Shown
from meshwright.errors import MeshwrightError
from meshwright.planner.advice import explain as why
from meshwright.planner.advice.near_misses import NearMiss, near_misses
from meshwright.planner.advice.reasons import batch_arithmetic, reasons
from meshwright.planner.advice.sensitivity import scaling, sensitivities
from meshwright.planner.goodput import Reliability, young_interval
from meshwright.planner.question import runs_in
from meshwright.planner.search.branch_and_bound import SearchOutcome
from meshwright.planner.search.leaders import Ranking
from meshwright.planner.search.space import Space
from meshwright.planner.search.strategies import Candidate
from meshwright.planner.sites import LATENCY, Crossing, crossing
from meshwright.predict.estimate import Estimate
from meshwright.units import Json, format_seconds

RIVALS = 10  # leaders whose worst cases are compared


@dataclass(frozen=True)
class PlanComparison:
    """The user's plan compared with the winner."""

    user: Estimate | None
    best: Estimate
    refused: str = ""  # why the user's plan is not legal here

    @property
    def slower(self) -> float:
        """Return how much longer the user's plan takes, as a share of the winner's step; below 0 it is faster."""
        assert self.user is not None
        return self.user.prediction.step_time_s / self.best.prediction.step_time_s - 1

    @property
    def parts(self) -> list[tuple[str, float]]:
        assert self.user is not None
        return why.difference(self.user.prediction, self.best.prediction)

    @property
    def fields(self) -> dict[str, tuple[Any, Any]]:
        """Fields in which the plans differ: (the user's, the winner's)."""
        assert self.user is not None
        a, b = self.user.plan.model_dump(), self.best.plan.model_dump()
        return {name: (a[name], b[name]) for name in a if a[name] != b[name]}

    def as_dict(self) -> Json:
        if self.user is None:
            return {"legal": False, "refused": self.refused}
        p = self.user.prediction
        return {
            "legal": True,
            "plan": self.user.plan.as_dict(),
            **p.as_dict(),
            "slower": self.slower,
            "difference_s": dict(self.parts),
            "fields": {name: {"mine": a, "best": b} for name, (a, b) in self.fields.items()},
        }


@dataclass(repr=False)
class Result(Shown):
    """The answer of the planner."""

    __repr__ = Shown.__str__

    config: Config  # model, cluster, stack and workload; its plan is the winner
    space: Space
    found: SearchOutcome
    ranking: Ranking
    headroom: float
    seconds: float
    top: int = 10
    worst_case: bool = False  # the winner is the plan with the best worst case
    reliability: Reliability | None = None  # failures and checkpoints, where given
    sites: int = 0  # number of clusters, 0: one …
    line: float = 0.0  # … and bytes/s of the line between them

    @property
    def plan(self) -> Plan:
        """The winner."""
        return self.ranking.best.plan

    @property
    def searched(self) -> int:
        """Legal plans: each costed, or proved slower or too large."""
        return self.found.legal

    @property
    def runs_in(self) -> str:
        """Name what runs the plan: the framework of the stack, or our own trainer."""
        return runs_in(self.config)

    @property
    def chosen_from(self) -> str:
        """Say of how many plans the winner is the best."""
        if self.worst_case:
            what = (
                "the best worst case of the leaders"
                if self.choice
                else "the fastest, and the best worst case of the leaders,"
            )
        else:
            what = "the best choice within 1% of the fastest" if self.choice else "the fastest"
        return f"{what} of {self.searched:,} legal plans that leave {100 * self.headroom:g}% of the memory free"

    @property
    def choice(self) -> str:
        """Say why the winner was preferred to a faster plan; empty if it is the fastest."""
        if self.worst_case:
            return why.worst_case_choice(self.ranking.best, self.ranking.fastest)
        return why.choice(self.ranking.best, self.ranking.fastest)

    @cached_property
    def estimate(self) -> Estimate:
        """The winner's estimate, its pipeline simulated."""
        return why.walked_estimate(self.space, self.plan, self.ranking.best.time)

    @property
    def prediction(self) -> Prediction:
        return self.estimate.prediction

    @cached_property
    def leaders(self) -> list[tuple[Candidate, Prediction]]:
        """The winner and the fastest plans of other shapes, with their predictions."""
        return [(self.ranking.best, self.prediction), *map(self._predicted, self.ranking.leaders[1 : self.top])]

    def _predicted(self, c: Candidate) -> tuple[Candidate, Prediction]:
        return c, why.walked_estimate(self.space, c.plan, c.time).prediction

    @cached_property
    def ties(self) -> list[bool]:
        """Marks leaders the cost model cannot tell apart from the winner."""
        return [indistinguishable(self.prediction.exposed_s, p.exposed_s) for _, p in self.leaders]

    @cached_property
    def robust(self) -> tuple[Candidate, Prediction]:
        """The leader with the best worst case (the lowest upper edge of its band) among the first `RIVALS`, shown or not."""
        others = map(self._predicted, self.ranking.leaders[self.top : RIVALS])
        return min([*self.leaders, *others], key=lambda leader: leader[1].step_time_high_s)

    @cached_property
    def why_not(self) -> list[why.WhyNot]:
        return why.why_not(self.space, self.found, self.ranking.best, self.estimate, self.ranking.strategies)

    @cached_property
    def explanation(self) -> why.Explanation:
        e, best = self.estimate, self.ranking.best
        rivals = [*self.ranking.leaders[1:], *self.ranking.strategies.values()]
        return why.Explanation(
            estimate=e,
            batch=batch_arithmetic(e),
            bound=why.bound(e.prediction),
            reasons=reasons(e),
            training=why.training(e),
            scaling=scaling(self.space, best),
            sensitivities=sensitivities(self.space, best, rivals),
            why_not=self.why_not,
            memory_band=tuple((e.prediction.memory_gib or 0.0) * b for b in MEMORY_BAND),  # type: ignore[arg-type]
            critical=e.critical_batch.reason,
            calibrated=e.prediction.calibrated,
            assumed=list(self.config.assumed),
        )

    @cached_property
    def near_misses(self) -> list[NearMiss]:
        """Batch sizes, GPU counts or shapes close to the user's that allow a clearly faster plan."""
        return near_misses(self.space, self.estimate, self.headroom)

    @cached_property
    def crossing(self) -> Crossing | None:
        """The traffic between several clusters that each run the winner."""
        return crossing(self.estimate, self.sites, self.line, LATENCY) if self.sites else None

    def compare(self, plan: Plan) -> PlanComparison:
        """Compare the user's plan with the winner; both simulated."""
        try:
            user = self.space.estimate(plan)
        except MeshwrightError as refused:
            return PlanComparison(None, self.estimate, str(refused))
        if plan.pp > 1:
            walked = why.as_walked(user.prediction, walk_step(user.cost, plan).time)
            user = why.replace(user, prediction=walked)
        return PlanComparison(user, self.estimate)

    # JSON

    def as_dict(self) -> Json:
        return {
            "runs_in": self.runs_in,
            "searched": self.searched,
            "costed": self.found.costed,
            "seconds": self.seconds,
            "memory_headroom": self.headroom,
            "plans": self._plans(),
            "robust": {"plan": self.robust[0].plan.as_dict(), "step_time_high_s": self.robust[1].step_time_high_s},
            "strategies": self._strategies(),
            "fastest": {
                "plan": self.ranking.fastest.plan.as_dict(),
                "step_time_s": self.ranking.fastest.time,
                "memory_gib": why.gib(self.ranking.fastest.memory),
            },
            "choice": self.choice,
            "near_misses": [asdict(m) | {"plan": m.plan.as_dict() if m.plan else None} for m in self.near_misses],
            "front": [
                {"plan": c.plan.as_dict(), "step_time_s": c.time, "memory_gib": why.gib(c.memory)}
                for c in self.ranking.front
            ],
            "explanation": self._explanation(),
        } | self._survival()

    def _plans(self) -> list[Json]:
        """The leaders, each with its prediction."""
        return [
            {
                "plan": c.plan.as_dict(),
                "title": c.plan.title(),
                "strategy": c.strategy,
                "closed_form_s": c.closed,
                "tied_with_winner": tie,
                **p.as_dict(),
            }
            for (c, p), tie in zip(self.leaders, self.ties, strict=True)
        ]

    def _strategies(self) -> Json:
        """The best plan of each strategy: the winner's, and why the others lost."""
        best = {"fits": True, "slower": 0.0, "why_not": "", "plan": self.plan.as_dict(), "proved": True}
        return {self.ranking.best.strategy: best} | {
            w.strategy: {
                "fits": w.fits,
                "slower": w.slower if w.fits else None,
                "why_not": w.words,
                "plan": w.plan.as_dict(),
                "proved": w.proved,
            }
            for w in self.explanation.why_not
        }

    def _explanation(self) -> Json:
        x = self.explanation
        return {
            **values_of(x, "batch", "bound", "reasons"),
            "critical_batch": x.estimate.critical_batch.sequences,
            "critical_batch_reason": x.critical,
            "bubble_fraction": x.estimate.bubble_fraction,
            "memory_low_gib": x.memory_band[0],
            "memory_high_gib": x.memory_band[1],
            "training": asdict(x.training) if x.training else None,
            "scaling": asdict(x.scaling),
            "sensitivities": [asdict(s) for s in x.sensitivities],
            "calibrated": x.calibrated,
            "assumed": x.assumed,
        }

    def _survival(self) -> Json:
        """Goodput and sites, where the question has them."""
        out: Json = {}
        if (rel := self.reliability) is not None:
            x = self.explanation.training
            out["goodput"] = {
                "goodput": rel.goodput,
                "mtbf_s": rel.mtbf,
                "checkpoint_s": rel.save,
                "restart_s": rel.restart,
                "save_every_s": rel.interval,
                "young_s": young_interval(rel.save, rel.mtbf),
                "mfu": (self.prediction.mfu or 0.0) * rel.goodput,
                "days": x.days / rel.goodput if x and rel.goodput else None,
                "assumed": list(rel.assumed),
            }
        if self.crossing is not None:
            out["sites"] = asdict(self.crossing) | {"slowdown": self.crossing.slowdown}
        return out

    # A plan file

    def to_toml(self) -> str:
        """A plan file that every command reads, with the reasons as comments."""
        opening = "".join(f"# {line}\n" if line else "#\n" for line in self._opening())
        return f"{opening}\n{commented(self.config.to_toml(), self.explanation.reasons)}"

    def _opening(self) -> list[str]:
        p, x, own = self.prediction, self.explanation, self.estimate.own_trainer
        lines = [
            self.plan.title(),
            f"By `meshwright plan`: {self.chosen_from}.",
            f"For {self.runs_in}.",
            *([f"It is {self.choice}."] if self.choice else []),
            f"step {format_seconds(p.step_time_s)} ({format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)}), "
            f"MFU {100 * (p.mfu or 0):.1f}%, memory {why.memory_words(p)}",
            *([own.sentence] if own else []),
            f"bound by {x.bound}",
            f"constants: {x.calibrated}",
            *(f"assumed: {item}" for item in x.assumed),
        ]
        lost = [f"{w.strategy}: " + (f"{100 * w.slower:+.1f}%, " if w.fits else "") + w.words for w in x.why_not[:6]]
        return [*lines, "", "Why not …", *lost] if lost else lines


KEY = re.compile(r"^(\w+) =", re.ASCII)
COMMENT_COLUMN = 28  # column of the comments, if the line is shorter


def commented(text: str, reasons: dict[str, str]) -> str:
    """The text of a plan file with the reasons as comments after their keys in [plan]."""
    out, inside = [], False
    for line in text.splitlines():
        inside = line.startswith("[plan") if line.startswith("[") else inside
        key = KEY.match(line)
        reason = reasons.get(key[1], "") if inside and key else ""
        out.append(f"{line:<{COMMENT_COLUMN}}  # {reason}" if reason else line)
    return "\n".join(out) + "\n"
