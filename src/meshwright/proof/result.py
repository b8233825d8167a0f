"""The result of a proof: one part per small copy of the plan, and the JSON of all."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any

from meshwright.describe.shown import Shown
from meshwright.errors import MeshwrightError
from meshwright.proof.compare import Agreement
from meshwright.proof.diagnosis import Diagnosis, diagnose
from meshwright.proof.records import Row, Trace
from meshwright.proof.small import ProvedCopy

# Predicted over observed peak memory; outside of these the cost model does not describe the step.
MEMORY_RATIOS = (0.5, 2.0)


@dataclass
class CopyProof:
    """The proof of one small copy."""

    small: ProvedCopy
    steps: int
    agreements: list[Agreement]
    traces: list[Trace]  # of the ranks, in the dtype that was watched
    blamed: str = ""
    oracles: dict[str, str] = field(default_factory=dict)  # what each part was compared with
    exact_losses: tuple[float, ...] = ()  # of one device without the plan's loss of precision, where it has one

    @property
    def parity(self) -> bool:
        return not any(agreement.breaks for agreement in self.agreements)

    @property
    def communication(self) -> bool:
        return not any(row.unexplained for _, row in self.rows) and not self.unknown

    @property
    def passed(self) -> bool:
        return self.parity and self.communication

    @property
    def rows(self) -> list[tuple[int, Row]]:
        return [(trace.rank, row) for trace in self.traces for row in trace.traffic]

    @property
    def collectives(self) -> dict[str, int]:
        """The numbers of rows (one per rank, axis and collective) that are equal, that are data-dependent, and that differ."""
        rows = [row for _, row in self.rows]
        return {
            "equal": sum(row.equal for row in rows),
            "explained": sum(bool(row.explained) for row in rows),
            "unexplained": sum(row.unexplained for row in rows),
        }

    @property
    def convergence(self) -> dict[str, float]:
        """The loss of the last step as this plan trains, as one device trains exactly, and their relative difference."""
        if not self.exact_losses:
            return {}
        lossy, exact = self.agreements[0].losses[-1], self.exact_losses[-1]
        return {"loss": lossy, "exact_loss": exact, "difference": (lossy - exact) / exact}

    @property
    def unknown(self) -> list[str]:
        return sorted({name for trace in self.traces if trace.observed for name in trace.observed.unknown})

    @property
    def warnings(self) -> list[MeshwrightError]:
        """Warn about the prediction of a plan that trains the right model: the rank whose memory was predicted worst."""
        low, high = MEMORY_RATIOS
        ratios = {t.rank: t.predicted_bytes / max(t.observed.peak_bytes, 1) for t in self.traces if t.observed}
        rank = max(ratios, key=lambda r: max(ratios[r] / high, low / max(ratios[r], 1e-9)), default=None)
        if rank is None or low <= ratios[rank] <= high:
            return []
        what = f"the predicted memory of rank {rank} is {ratios[rank]:.3g} times the observed peak"
        why = f"the cost model does not describe the memory of this step ({self.small.plan.title()}), so its memory of the plan may be as wrong"
        return [MeshwrightError("MW-VERIFY-007", what, why=why)]

    @property
    def first_break(self) -> dict[str, Any] | None:
        first = next((b for a in self.agreements for b in a.breaks), None)
        return None if first is None else finite(asdict(first)) | {"axis": self.blamed}

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """What the first difference means."""
        plan = self.small.plan
        axes = {axis: getattr(plan, axis) for axis in ("dp", "tp", "cp", "pp", "ep", "replicate", "shard")}
        return diagnose(self.agreements, {**axes, "micro-batches": (1, *self.small.microbatches)[-1]})

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "plan": self.small.plan.title(),
            "ranks": self.small.plan.world,
            "folded": {axis: {"plan": a, "proved": b} for axis, (a, b) in self.small.folded.items()},
            "microbatches": dict(zip(("plan", "proved"), self.small.microbatches, strict=False)),
            "changes": list(self.small.changes),
            "steps": self.steps,
            "oracles": self.oracles,
            "errors": {a.label: finite(a.errors) for a in self.agreements},
            "verdicts": {a.label: {"verdict": a.verdict, "reason": a.untold} for a in self.agreements},
            "first_break": self.first_break,
            "diagnosis": self.diagnosis and self.diagnosis.as_dict(),
            "convergence": finite(self.convergence),
            "collectives_compared": self.collectives,
            "collectives": [{"rank": rank, **asdict(row)} for rank, row in self.rows],
            "memory": [
                {"rank": t.rank, "peak_bytes": t.observed.peak_bytes, "predicted_bytes": t.predicted_bytes}
                for t in self.traces
                if t.observed
            ],
            "warnings": [warning.as_dict() for warning in self.warnings],
        }


@dataclass(repr=False)
class Proof(Shown):
    """The proof of a plan: of all its copies, until one fails. The first copy has every axis and every dtype."""

    title: str  # the plan that was asked for
    copies: list[CopyProof]
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"Proof({self.title}, {'passed' if self.passed else 'failed'})"

    @property
    def passed(self) -> bool:
        return all(copy.passed for copy in self.copies)

    @property
    def parity(self) -> bool:
        return all(copy.parity for copy in self.copies)

    @property
    def decisive(self) -> CopyProof:
        """The copy that failed, or the first."""
        return next((copy for copy in self.copies if not copy.passed), self.copies[0])

    @property
    def small(self) -> ProvedCopy:
        return self.copies[0].small

    @property
    def agreements(self) -> list[Agreement]:
        return self.decisive.agreements

    @property
    def rows(self) -> list[tuple[int, Row]]:
        return [row for copy in self.copies for row in copy.rows]

    @property
    def blamed(self) -> str:
        return self.decisive.blamed

    @property
    def convergence(self) -> dict[str, float]:
        return self.copies[0].convergence

    @property
    def warnings(self) -> list[MeshwrightError]:
        return [warning for copy in self.copies for warning in copy.warnings]

    @property
    def collectives(self) -> dict[str, int]:
        counts = [copy.collectives for copy in self.copies]
        return {key: sum(count[key] for count in counts) for key in counts[0]}

    def as_dict(self) -> dict[str, Any]:
        """The numbers of the first copy, the largest differences of all copies, and the numbers of each copy under `copies`."""
        errors: dict[str, dict[str, float]] = {}
        for agreement in (a for copy in self.copies for a in copy.agreements):
            worst = errors.setdefault(agreement.label, dict.fromkeys(agreement.errors, 0.0))
            errors[agreement.label] = {what: max(worst[what], error) for what, error in agreement.errors.items()}
        copies = [copy.as_dict() for copy in self.copies]
        return {
            **copies[0],
            "passed": self.passed,
            "plan": self.title,
            "ranks": max(copy["ranks"] for copy in copies),
            "errors": {dtype: finite(worst) for dtype, worst in errors.items()},
            "first_break": self.decisive.first_break,
            "diagnosis": self.decisive.diagnosis and self.decisive.diagnosis.as_dict(),
            "collectives_compared": self.collectives,
            "warnings": [warning.as_dict() for warning in self.warnings],
            "copies": copies,
            "seconds": self.seconds,
        }


def finite(numbers: Mapping[str, object]) -> dict[str, Any]:
    """Values for JSON: null if a number is infinite or NaN, as a broken plan may produce."""
    return {name: None if isinstance(x, float) and not isfinite(x) else x for name, x in numbers.items()}
