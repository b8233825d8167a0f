"""Compare two recordings of the same steps: usually one device, and many.

What decides is what trains: gradients after the reduction, their norm, clipped gradients, optimizer states and parameters, in this order,
step by step. The first that is off by more than rounding is a difference. Losses of ranks are only shown: each framework divides them in
its own way.

What the modules computed then says where it began: the first module whose output is not the reference's (forward), or the last one whose
output has another gradient (backward), or none of them (reduction). Bounds, patterns and their usual causes are `verify`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meshwright.check.expected import CollectiveFinding, between_members
from meshwright.check.folder import RankStep, Recording
from meshwright.check.match import Match
from meshwright.check.merge import Beside, Merged, beside
from meshwright.check.names import UserTable
from meshwright.check.translate import NameMap
from meshwright.check.where import StepModules, cut_modules
from meshwright.errors import MeshwrightError
from meshwright.proof.diagnosis import Diagnosis
from meshwright.proof.parts import Copy
from meshwright.proof.patterns import Pattern, pattern_of
from meshwright.proof.result import finite
from meshwright.proof.tolerance import (
    NEARLY_ZERO,
    Tolerance,
    at_least_usual,
    error_beyond,
    moved_elements,
    tensor_error,
    verdict_of,
)
from meshwright.units import counted

DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
UNTOLD = (
    1000  # without a perturbed reference, an error above the smallest bound may be rounding up to this many times it
)
STATES = ("state exp_avg", "state exp_avg_sq", "state momentum_buffer")
DECIDING = ("gradient", "norm", "clipped gradient", *STATES, "parameter")
PHASES = {"gradient": "reduction", "norm": "clipping", "clipped gradient": "clipping"}
LINEAR = ("zero", "stale", "missing sum", "factor", "counted twice", "noise")  # patterns that sketches show too


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs: on which ranks, by how much."""

    step: int
    kind: str
    name: str
    ranks: tuple[int, ...]
    error: float
    bound: float

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks[:8]))}{' …' if len(self.ranks) > 8 else ''}"
        of = f" of {self.name}" if self.name else ""
        return f"step {self.step}: {self.kind}{of} on {ranks} is off by {self.error:.1e} (bound {self.bound:.1e})"


class ErrorAndBound(NamedTuple):
    """Of a module's output or the gradient in it, or of a parameter's tensor; NaN: not seen."""

    error: float = float("nan")
    bound: float = float("nan")

    @property
    def is_off(self) -> bool:
        return self.error > self.bound


@dataclass
class RunComparison:
    """The verdict on two recordings."""

    steps: int
    compared: dict[str, int]  # tensors by kind
    errors: dict[str, float]  # the largest by kind
    differences: list[TensorDifference]
    diagnosis: Diagnosis | None
    modules: list[
        tuple[str, ErrorAndBound, ErrorAndBound]
    ]  # of the step that differs, or of the last: output, gradient of it
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
        errors |= {kind: max(error, errors.get(kind, 0.0)) for kind, error in pair.errors.items()}
        unmapped |= dict.fromkeys(pair.unmapped)
        if differences or step == steps - 1:
            break
        pair.previous = None
    assert pair is not None
    assert tolerance is not None
    untold = "" if perturbed or pair.dtype == "fp64" else small_only(differences)
    if not compared["gradient"] and not differences:
        untold = "no gradient of the candidate could be compared"
    diagnosis = pair.diagnose(differences[0], tolerance) if differences else None
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
    kind = "initial parameter"
    ones, others = naming.reference(reference.step(0), kind), naming.candidate(candidate.step(0), kind)
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
        error = max((error_of(pair, 0.0) for pair in beside(one, other)), default=0.0)
        if error > 2.0**-7:
            raise MeshwrightError(
                "MW-CHECK-009", f"{name} begins with other values in the two recordings (off by {error:.1e})",
                why="Both runs must start with the same weights", fix="load one checkpoint in both, or set the same seed before the model is built",
            )  # fmt: skip


class StepPair:
    """One step of both runs."""

    def __init__(
        self,
        reference: Recording,
        candidate: Recording,
        step: int,
        naming: NameMap,
        previous: StepPair | None,
    ) -> None:
        self.number, self.naming, self.previous = step, naming, previous
        self.one, self.many = reference.step(step), candidate.step(step)
        self.coordinates, self.axes = candidate.coordinates, candidate.axes
        self.cut = cut_modules([rank["parameters"] for rank in candidate.ranks])
        self.single = reference.world == 1
        self.batch_dims = reference.batch_dim, candidate.batch_dim
        self.compared: dict[str, int] = {}
        self.errors: dict[str, float] = {}
        self.gradients: dict[str, ErrorAndBound] = {}
        self.growth = 1.0  # how many times further parameters were moved by rounding than in the perturbed references
        self.unmapped: list[str] = []
        self.tensors: dict[str, tuple[dict[str, Merged], dict[str, Merged]]] = {}
        self.check_same_batch()

    def of(self, kind: str) -> tuple[dict[str, Merged], dict[str, Merged]]:
        """The tensors of a kind of the reference and of the candidate, by the reference's names."""
        if kind not in self.tensors:
            self.tensors[kind] = self.naming.reference(self.one, kind), self.naming.candidate(self.many, kind)
        return self.tensors[kind]

    @cached_property
    def dtype(self) -> str:
        """The narrowest that a module computes in."""
        one, many = narrowest(self.one), narrowest(self.many)
        if one != many:
            raise MeshwrightError(
                "MW-CHECK-015", f"the reference computes in {one} and the candidate in {many}",
                why="Two dtypes round by different amounts", fix="record both with the same precision",
            )  # fmt: skip
        return one

    def check_same_batch(self) -> None:
        expected, got = self.samples_read
        if self.alike and expected and got and not set(expected) & set(got):
            raise MeshwrightError(
                "MW-CHECK-014", f"the two recordings read different samples in step {self.number}",
                why="Both runs must read the same global batch", fix="the same data, seed and global batch in both",
            )  # fmt: skip

    @cached_property
    def samples_read(self) -> tuple[Counter[bytes], Counter[bytes]]:
        one, many = (
            Counter(row.tobytes() for s in steps for row in samples_read(s)) for steps in (self.one, self.many)
        )
        return one, many

    @property
    def alike(self) -> bool:
        """Whether samples of both runs have one length: ranks of context parallelism read parts of them."""
        return len({len(row) for rows in self.samples_read for row in rows}) == 1

    # How much is rounding

    def measure(self, perturbed: list[list[RankStep]], so_far: Tolerance | None) -> Tolerance:
        """The bounds of this step: from the spread of the perturbed references, and never below an earlier step's.

        Adam may move a parameter with a small gradient by a whole step because of rounding: that has been judged (`beyond_noise`). What the next
        step computes from such parameters is further off in the same proportion."""
        spread: dict[tuple[str, str], float] = {}
        for steps in perturbed:
            for kind in DECIDING:
                expected, got = self.of(kind)[0], self.naming.reference(steps, kind)
                for name in (n for n in expected if n in got):
                    scale = self.floor(kind, expected[name].sketched)
                    for pair in beside(expected[name], got[name]):
                        spread[kind, name] = max(error_of(pair, scale), spread.get((kind, name), 0.0))
            for name, forward, backward in StepModules(self.one, steps, {}, (self.batch_dims[0],) * 2).errors():
                for kind, error in (("output", forward), ("output gradient", backward)):
                    spread[kind, name] = max(np.nan_to_num(error), spread.get((kind, name), 0.0))
        earlier = so_far.spread if so_far is not None else {}
        growth = self.previous.growth if self.previous is not None else 1.0
        lists = {key: [*earlier.get(key, [0.0] * self.number), error * growth] for key, error in spread.items()}
        return Tolerance(self.dtype, at_least_usual(lists, {kind for kind, _ in spread}))

    def floor(self, kind: str, sketched: bool) -> float:
        """The smallest scale that a tensor is measured against: a share of the largest of its kind."""
        values = (
            part.value for tensor in self.of(kind)[0].values() if tensor.sketched == sketched for part in tensor.parts
        )
        return NEARLY_ZERO[self.dtype] * max((float(np.abs(v).max(initial=0.0)) for v in values), default=0.0)

    # What decides

    def differences(self, tolerance: Tolerance) -> list[TensorDifference]:
        out: list[TensorDifference] = []
        for kind in DECIDING:
            expected, got = self.of(kind)
            order = list(reversed(expected)) if kind == "gradient" else list(expected)
            self.unmapped += [f"{kind} of {n}: only in the {who}" for n, who in lonely(expected, got)]
            for name in (n for n in order if n in got):
                if (difference := self.judge(kind, name, tolerance)) is not None:
                    out.append(difference)
        return out

    def judge(self, kind: str, name: str, tolerance: Tolerance) -> TensorDifference | None:
        expected, got = (side[name] for side in self.of(kind))
        if not expected.complete or any(part.shape != expected.shape for part in got.parts):
            self.unmapped.append(f"{kind} of {name}: it is not known which part a rank holds")
            return None
        if not got.complete:
            self.unmapped.append(f"{kind} of {name}: some elements are on no rank")
        bound, floor = tolerance.bound(kind, self.number, name), self.floor(kind, expected.sketched)
        error, wrong = 0.0, set[int]()
        for pair in beside(expected, got):
            off = error_of(pair, floor)
            if kind == "parameter" and bound < off < np.inf:
                raw, off = off, self.beyond_noise(pair, name, floor, tolerance)
                self.growth = max(self.growth, raw / max(tolerance.spread[kind, name])) if tolerance.spread else 1.0
            error = max(error, off)
            wrong |= set() if off <= bound else set(pair.ranks)
        self.compared[kind] = self.compared.get(kind, 0) + 1
        if kind == "gradient":
            self.gradients[name] = ErrorAndBound(error, bound)
        self.errors[kind] = max(self.errors.get(kind, 0.0), error)
        return TensorDifference(self.number, kind, name, tuple(sorted(wrong)), error, bound) if wrong else None

    def beyond_noise(self, pair: Beside, name: str, floor: float, tolerance: Tolerance) -> float:
        """The error of a parameter without what noise in its gradient explains: Adam divides by the gradient's size (`proof.tolerance`)."""
        kind = "clipped gradient" if self.of("clipped gradient")[0] else "gradient"
        expected, got = self.of(kind)[0].get(name), self.of("parameter")[1][name]
        whole = expected.whole if expected is not None else None
        part = next((p for p in got.parts if (p.rank,) == pair.ranks and p.place == pair.place), None)
        adam = any(step.of("state exp_avg") for step in self.one)
        if whole is None or part is None or pair.sketched or not adam:
            return error_of(pair, floor)
        noise = tolerance.bound("gradient", self.number, name) * max(
            float(np.abs(whole).max(initial=0.0)), self.floor(kind, False)
        )
        rate = max((float(e.value[0]) for step in self.one for e in step.of("learning rate")), default=0.0)
        steps = self.number + 1
        moved = moved_elements([part.of(whole)] * steps, [noise] * steps, rate=rate)
        return error_beyond(moved, pair.got, pair.expected, pair.whole, floor)

    # Where it began

    @cached_property
    def modules(self) -> StepModules:
        return StepModules(
            self.one, self.many, self.naming.rename, self.batch_dims, cut=self.cut, places=self.coordinates
        )

    def module_errors(self, tolerance: Tolerance) -> Iterator[tuple[str, ErrorAndBound, ErrorAndBound]]:
        for name, forward, backward in self.modules.errors() if self.single else ():
            bounds = (tolerance.bound(kind, self.number, name) for kind in ("output", "output gradient"))
            yield name, ErrorAndBound(forward, next(bounds)), ErrorAndBound(backward, next(bounds))

    def diagnose(self, first: TensorDifference, tolerance: Tolerance) -> Diagnosis:
        if (unread := self.unread_samples()) is not None:
            return Diagnosis("forward", "inputs", unread, "samples")
        if (clipped := self.clipped_too_early()) is not None and first.kind in ("gradient", "norm"):
            return Diagnosis("clipping", first.name, clipped)
        if self.single and first.kind == "gradient":
            for kind, phase, what in (
                ("output", "forward", "output"),
                ("output gradient", "backward", "gradient of the output"),
            ):
                if (place := self.first_module(kind, tolerance)) is not None:
                    return Diagnosis(phase, place, self.pattern_of_rows(place, kind), what)
        phase = PHASES.get(first.kind, "update")
        if phase == "update" and (rate := self.other_learning_rate()) is not None:
            return Diagnosis(phase, first.name, rate)
        return Diagnosis(phase, first.name, self.pattern(list(self.copies(first.kind, first.name))))

    def copies(self, kind: str, name: str) -> Iterator[Copy]:
        """What the ranks hold of a tensor: of a parameter the change of this step, of a norm its square."""
        expected, got = (side[name] for side in self.of(kind))
        before = {(b.ranks, b.place): b for b in self.before(kind, name)}
        for pair in beside(expected, got):
            then = before.get((pair.ranks, pair.place))
            coordinates = self.place_of(pair.ranks[0], name) if len(pair.ranks) == 1 else {}
            old = None if then is None else (then.got, then.expected)
            yield Copy.of(kind, coordinates, pair.place, (pair.got, pair.expected), old)

    def place_of(self, rank: int, name: str) -> dict[str, int]:
        """A rank's place among those with a parameter: the axis of experts is made of others, which is where other parameters are."""
        return {axis: at for axis, at in self.coordinates[rank].items() if axis != "ep" or "experts" in name}

    def before(self, kind: str, name: str) -> Iterator[Beside]:
        source, kind = (
            (self.previous, kind)
            if self.previous is not None
            else (self, "initial parameter" if kind == "parameter" else "")
        )
        expected, got = source.of(kind) if kind else ({}, {})
        if name in expected and name in got and expected[name].shape == got[name].shape:
            yield from beside(expected[name], got[name])

    def other_learning_rate(self) -> Pattern | None:
        one, *many = (
            {float(e.value[0]) for s in steps for e in s.of("learning rate")}
            for steps in (self.one, *([s] for s in self.many))
        )
        other = {rank: rates - one for rank, rates in enumerate(many) if rates - one}
        if not other or not one:
            return None
        rank, rates = next(iter(other.items()))
        return Pattern(
            "factor", f"learning rate × {max(rates) / max(one):.4g} on rank {rank}" if max(one) else "learning rate"
        )

    def clipped_too_early(self) -> Pattern | None:
        """Gradients that the candidate clips before its last backward, and the reference does not."""
        one, many = (max(len(step.of("early clipping")) for step in steps) for steps in (self.one, self.many))
        return Pattern("other", f"clipped {counted(many, 'time')} before the last micro-batch") if many > one else None

    def unread_samples(self) -> Pattern | None:
        """Samples of the reference that no rank reads; None if all are read, or ranks read parts of samples."""
        expected, got = self.samples_read
        missing = [row for row in expected if row not in got]
        if not self.alike or not missing:
            return None
        return Pattern("part", f"{len(missing)} of {len(expected)} samples are read by no rank")

    def pattern(self, copies: list[Copy]) -> Pattern:
        micro_batches = max(len(step.of("loss")) for step in self.many)
        pattern = pattern_of(copies, {**self.axes, "micro-batches": micro_batches}, self.axes)
        sketched = any(entry.sketched is not None for step in (*self.one, *self.many) for entry in step.entries)
        return (
            pattern
            if pattern.kind in LINEAR or not sketched
            else Pattern("other", "seen in sketches only: raise --limit for the pattern")
        )

    def first_module(self, kind: str, tolerance: Tolerance) -> str | None:
        """The first module in the order of computation whose rows are not the reference's."""
        return next(
            (name for name, rows in self.modules.rows[kind].items() if self.is_off(kind, name, rows, tolerance)), None
        )

    def is_off(self, kind: str, name: str, rows: list[tuple[int, Match]], tolerance: Tolerance) -> bool:
        return any(not match.error <= tolerance.bound(kind, self.number, name) for _, match in rows)

    def pattern_of_rows(self, name: str, kind: str) -> Pattern:
        rows = self.modules.rows[kind][name]
        return self.pattern(
            [
                Copy(self.coordinates[r], (m.sample, *m.start), (m.got / m.scale)[None], m.expected[None])
                for r, m in rows
            ]
        )


def error_of(pair: Beside, floor: float) -> float:
    return tensor_error(pair.got, pair.expected, pair.whole, floor)[0]


def narrowest(steps: list[RankStep]) -> str:
    seen = {DTYPES.get(e.dtype) for s in steps for e in s.of("output") + s.of("gradient")}
    return next((dtype for dtype in ("bf16", "fp16", "fp32", "fp64") if dtype in seen), "fp32")


def loss_of(steps: list[RankStep]) -> float:
    """The mean over ranks of what backward began with, summed over micro-batches."""
    sums = [float(sum(e.value[0] for e in step.of("loss"))) for step in steps if step.of("loss")]
    return float(np.mean(sums)) if sums else float("nan")


def samples_read(step: RankStep) -> Iterator[np.ndarray]:
    """The rows of the first input of every call of the model: token ids, or whatever it reads."""
    inputs = step.of("input")
    for entry in inputs:
        if entry.index == 0 and entry.value.ndim >= 2 and entry.name == inputs[0].name:
            yield from entry.value


def lonely(expected: Mapping[str, Any], got: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((name, "reference") for name in expected if name not in got)
    yield from ((name, "candidate") for name in got if name not in expected)
