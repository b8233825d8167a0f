"""Compare two recordings of the same steps: usually one device, and many.

What decides is what trains: gradients after the reduction, their norm, clipped gradients, optimizer states and parameters, in this order,
step by step. The first that is off by more than rounding is a difference. Losses of ranks are only shown: each framework divides them in
its own way.

What the modules computed then says where it began: the first module whose output is not the reference's (forward), or the last one whose
output has another gradient (backward), or none of them (reduction). Bounds, patterns and their usual causes are `verify`'s.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshwright.check.diagnose import StepDiagnosis
from meshwright.check.expected import CollectiveFinding, between_members
from meshwright.check.folder import RankStep, Recording
from meshwright.check.names import UserTable
from meshwright.check.pair import ErrorAndBound, StepPair, TensorDifference
from meshwright.check.translate import NameMap
from meshwright.errors import MeshwrightError
from meshwright.proof.diagnosis import Diagnosis
from meshwright.proof.judge import error_of
from meshwright.proof.parts import INITIAL_VALUE, beside
from meshwright.proof.result import finite
from meshwright.proof.tolerance import Tolerance, verdict_of

# Without a perturbed reference, an error above the smallest bound may be rounding up to this many times it
UNTOLD = 1000


@dataclass
class RunComparison:
    """The verdict on two recordings."""

    steps: int
    compared: dict[str, int]  # tensors by kind
    errors: dict[str, float]  # the largest by kind
    differences: list[TensorDifference]
    diagnosis: Diagnosis | None
    # Of the step that differs, or of the last: output, gradient of it
    modules: list[tuple[str, ErrorAndBound, ErrorAndBound]]
    gradients: dict[str, ErrorAndBound]  # of that step
    losses: list[tuple[float, float]]  # by step: reference, candidate
    unmapped: list[str]
    collectives: list[CollectiveFinding]  # of the candidate: ranks of a group that issue others than the rest
    untold: str = ""

    @property
    def verdict(self) -> str:
        return verdict_of(bool(self.differences) and not self.untold, self.untold)

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "reason": self.untold,
            "steps": self.steps,
            "compared": self.compared,
            "errors": finite(self.errors),
            "diagnosis": self.diagnosis and self.diagnosis.as_dict(),
            "differences": [finite(asdict(difference)) for difference in self.differences],
            "modules": [finite({"name": n, "forward": f.error, "backward": b.error}) for n, f, b in self.modules],
            "losses": [finite({"reference": a, "candidate": b}) for a, b in self.losses],
            "not_compared": self.unmapped,
            "collectives": [asdict(finding) for finding in self.collectives],
        }


def compare(
    reference: Recording,
    candidate: Recording,
    perturbed: Sequence[Recording] = (),
    table: UserTable | None = None,
) -> RunComparison:
    """Compare the steps that both have. `table`: what the user tells of the candidate's names and of what its ranks hold."""
    table = table or UserTable()
    candidate = table.applied(candidate)
    steps = min(reference.steps, candidate.steps)
    if steps == 0:
        raise MeshwrightError("MW-CHECK-006", "no step was recorded to its end", fix="record it again with more steps")
    naming = NameMap.of(reference, candidate, table.names)
    check_same_start(reference, candidate, naming)
    compared, errors = Counter[str](), dict[str, float]()
    unmapped, losses = dict[str, None](), list[tuple[float, float]]()
    tolerance: Tolerance | None = None
    pair: StepPair | None = None
    for step in range(steps):
        pair = StepPair(reference, candidate, step, naming, pair)
        tolerance = pair.measure([p.step(step) for p in perturbed if step < p.steps], tolerance)
        losses.append((loss_of(pair.one), loss_of(pair.many)))
        differences = pair.differences(tolerance)
        compared.update(pair.compared)
        errors |= {kind: max(error, errors.get(kind, 0.0)) for kind, error in pair.errors_by_kind.items()}
        unmapped |= dict.fromkeys(pair.unmapped)
        if differences or step == steps - 1:
            break
        pair.previous = None
    assert pair is not None
    assert tolerance is not None
    untold = "" if perturbed or pair.dtype == "fp64" else small_only(differences)
    if not compared["gradient"] and not differences:
        untold = "no gradient of the candidate could be compared"
    diagnosis = StepDiagnosis(pair, tolerance).named(differences[0]) if differences else None
    return RunComparison(
        step + 1, dict(compared), errors, differences, diagnosis, list(pair.module_errors(tolerance)), pair.gradients, losses, list(unmapped),
        list(between_members(candidate, pair.many)), untold,
    )  # fmt: skip


def small_only(differences: list[TensorDifference]) -> str:
    if not differences or any(not d.error <= UNTOLD * d.bound for d in differences):
        return ""
    return (
        "the differences are small, and how far rounding alone goes in this model is not known: "
        "record the reference with --perturbed 2"
    )


def check_same_start(reference: Recording, candidate: Recording, naming: NameMap) -> None:
    """Runs that begin with other weights train other models: that is an error of the comparison, not of the training."""
    ones = naming.reference(reference.step(0), INITIAL_VALUE)
    others = naming.candidate(candidate.step(0), INITIAL_VALUE)
    if not set(ones) & set(others):
        raise MeshwrightError(
            "MW-CHECK-007", "the two recordings have no parameter in common",
            why=f"{next(iter(ones), 'nothing')} there, {next(iter(others), 'nothing')} here", fix="give a table of names with --table",
        )  # fmt: skip
    for name in (n for n in ones if n in others):
        one, other = ones[name], others[name]
        if one.shape is not None and other.shape is not None and one.shape != other.shape:
            raise MeshwrightError(
                "MW-CHECK-008", f"{name} has shape {one.shape} in one recording and {other.shape} in the other",
                fix="record the same model in both; if ranks hold parts that nothing says, give a table with --table",
            )  # fmt: skip
        error = max((error_of(pair, 0.0)[0] for pair in beside(one, other)), default=0.0)
        if error > 2.0**-7:
            raise MeshwrightError(
                "MW-CHECK-009", f"{name} begins with other values in the two recordings (off by {error:.1e})",
                why="Both runs must start with the same weights", fix="load one checkpoint in both, or set the same seed before the model is built",
            )  # fmt: skip


def loss_of(steps: list[RankStep]) -> float:
    """The mean over ranks of what backward began with, summed over micro-batches."""
    sums = [float(sum(e.value[0] for e in step.of("loss"))) for step in steps if step.of("loss")]
    return float(np.mean(sums)) if sums else float("nan")
