"""Compare two recordings of the same steps: usually one device, and many.

What decides is what trains: gradients after the reduction, their norm, clipped gradients, optimizer states and parameters, in this order,
step by step. The first that is off by more than rounding is a difference. Losses of ranks are only shown: each framework divides them in
its own way.

What the modules computed then says where it began: the first module whose output is not the reference's (forward), or the last one whose
output has another gradient (backward), or none of them (reduction). The pattern of the numbers and its usual causes are `verify`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.check.folder import RankStep, RecordedValue, Recording
from meshwright.check.match import Match, nearest, rows_of
from meshwright.check.merge import Merged, merge
from meshwright.check.names import renamed
from meshwright.errors import MeshwrightError
from meshwright.proof.diagnosis import Diagnosis
from meshwright.proof.patterns import Copy, Pattern, pattern_of, ratio
from meshwright.proof.result import finite
from meshwright.proof.tolerance import FLOOR, FP64_BOUND, MARGIN, NEARLY_ZERO, tensor_error

DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
UNTOLD = (
    1000  # without a perturbed reference: an error above the smallest bound may be rounding up to this many times it
)
DECIDING = (
    "gradient",
    "norm",
    "clipped gradient",
    "state exp_avg",
    "state exp_avg_sq",
    "state momentum_buffer",
    "parameter",
)
PHASES = {"norm": "clipping", "clipped gradient": "clipping", "parameter": "update"}


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


@dataclass
class RunComparison:
    """The verdict on two recordings."""

    steps: int
    compared: dict[str, int]  # tensors by kind
    errors: dict[str, float]  # the largest by kind
    differences: list[TensorDifference]
    diagnosis: Diagnosis | None
    modules: list[
        tuple[str, float, float]
    ]  # of the first step that differs, or of the first: name, error forward and backward
    losses: list[tuple[float, float]]  # by step: reference, candidate
    unmapped: list[str]
    untold: str = ""

    @property
    def verdict(self) -> str:
        return (
            "differs"
            if self.differences and not self.untold
            else "cannot be told"
            if self.untold
            else "equal within rounding"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "reason": self.untold,
            "steps": self.steps,
            "compared": self.compared,
            "errors": finite(self.errors),
            "diagnosis": self.diagnosis and self.diagnosis.as_dict(),
            "differences": [finite(asdict(difference)) for difference in self.differences],
            "modules": [finite({"name": n, "forward": f, "backward": b}) for n, f, b in self.modules],
            "losses": [finite({"reference": a, "candidate": b}) for a, b in self.losses],
            "not_compared": self.unmapped,
        }


@dataclass
class Bounds:
    """How far a tensor may be off by rounding: from the spread of perturbed references (`proof.tolerance`)."""

    dtype: str
    spread: dict[tuple[str, str], float] = field(default_factory=dict)

    def of(self, kind: str, name: str) -> float:
        if self.dtype == "fp64":
            return FP64_BOUND
        usual = self.usual.get(kind, 0.0)
        return MARGIN[self.dtype] * max(self.spread.get((kind, name), 0.0), usual) + FLOOR[self.dtype]

    @cached_property
    def usual(self) -> dict[str, float]:
        kinds = {kind for kind, _ in self.spread}
        return {k: float(np.median([s for (kind, _), s in self.spread.items() if kind == k])) for k in kinds}


def compare(
    reference: Recording,
    candidate: Recording,
    perturbed: Sequence[Recording] = (),
    names: Mapping[str, str] | None = None,
) -> RunComparison:
    """Compare the steps that both have. `names`: patterns of the candidate's names, and what the reference calls them."""
    steps = min(reference.steps, candidate.steps)
    if steps == 0:
        raise MeshwrightError("MW-CHECK-006", "no step was recorded to its end", fix="record it again with more steps")
    rename = renamed(
        {name for rank in candidate.ranks for name in (*rank["parameters"], *rank["modules"])}, dict(names or {})
    )
    check_same_start(reference, candidate, rename)
    compared, errors = dict[str, int](), dict[str, float]()
    unmapped, losses = list[str](), list[tuple[float, float]]()
    shown: StepPair | None = None
    for step in range(steps):
        pair = StepPair(reference, candidate, step, rename, [p.step(step) for p in perturbed if step < p.steps])
        losses.append((pair.loss(pair.one), pair.loss(pair.many)))
        differences = pair.differences()
        for kind, count in pair.compared.items():
            compared[kind] = compared.get(kind, 0) + count
            errors[kind] = max(errors.get(kind, 0.0), pair.errors[kind])
        unmapped += [name for name in pair.unmapped if name not in unmapped]
        shown = shown if shown is not None and not differences else pair
        if differences:
            untold = "" if perturbed or pair.dtype == "fp64" else pair.untold(differences)
            diagnosis = pair.diagnose(differences[0])
            return RunComparison(
                step + 1, compared, errors, differences, diagnosis, pair.strip(), losses, unmapped, untold
            )
    assert shown is not None
    return RunComparison(steps, compared, errors, [], None, shown.strip(), losses, unmapped)


def check_same_start(reference: Recording, candidate: Recording, rename: Mapping[str, str]) -> None:
    """Runs that begin with other weights train other models: that is an error of the comparison, not of the training."""
    ones, others = (merge(r.step(0), "initial parameter", n) for r, n in ((reference, {}), (candidate, dict(rename))))
    if not set(ones) & set(others):
        raise MeshwrightError(
            "MW-CHECK-007", "the two recordings have no parameter in common",
            why=f"{next(iter(ones), 'nothing')} there, {next(iter(others), 'nothing')} here", fix="give a table of names with --names",
        )  # fmt: skip
    for name in (n for n in ones if n in others):
        one, other = ones[name].whole, others[name].whole
        if one is None or other is None:
            continue
        if one.shape != other.shape:
            raise MeshwrightError(
                "MW-CHECK-008", f"{name} has shape {one.shape} in one recording and {other.shape} in the other"
            )
        error = tensor_error(other, one, one, 0.0)[0]
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
        rename: dict[str, str],
        perturbed: list[list[RankStep]],
    ) -> None:
        self.number, self.rename = step, rename
        self.one, self.many = reference.step(step), candidate.step(step)
        self.coordinates, self.axes = candidate.coordinates, candidate.axes
        self.single = reference.world == 1
        self.compared: dict[str, int] = {}
        self.errors: dict[str, float] = {}
        self.unmapped: list[str] = []
        self.perturbed = perturbed
        self.batch_dims = reference.batch_dim, candidate.batch_dim

    @cached_property
    def dtype(self) -> str:
        """The narrowest that a module computes in."""
        seen = {DTYPES.get(e.dtype, "fp32") for s in (*self.one, *self.many) for e in s.of("output") + s.of("gradient")}
        return next((d for d in ("bf16", "fp16", "fp32", "fp64") if d in seen), "fp32")

    @cached_property
    def bounds(self) -> Bounds:
        bounds = Bounds(self.dtype)
        for steps in self.perturbed:
            for kind in DECIDING:
                expected, got = merge(self.one, kind), merge(steps, kind)
                floor = floor_of(expected, self.dtype)
                for name, tensor in expected.items():
                    whole, other = tensor.whole, got[name].whole if name in got else None
                    if whole is not None and other is not None:
                        error = tensor_error(other, whole, whole, floor)[0]
                        bounds.spread[kind, name] = max(error, bounds.spread.get((kind, name), 0.0))
            for name, forward, backward in StepModules(self.one, steps, {}, (self.batch_dims[0],) * 2).errors():
                bounds.spread["output", name] = max(forward, bounds.spread.get(("output", name), 0.0))
                bounds.spread["output gradient", name] = max(
                    backward, bounds.spread.get(("output gradient", name), 0.0)
                )
        return bounds

    def loss(self, steps: list[RankStep]) -> float:
        """The mean over ranks of what backward began with, summed over micro-batches."""
        sums = [float(sum(e.value[0] for e in step.of("loss"))) for step in steps if step.of("loss")]
        return float(np.mean(sums)) if sums else float("nan")

    # What decides

    def differences(self) -> list[TensorDifference]:
        out: list[TensorDifference] = []
        for kind in DECIDING:
            expected, got = merge(self.one, kind), merge(self.many, kind, self.rename)
            order = list(reversed(expected)) if kind == "gradient" else list(expected)
            floor = floor_of(expected, self.dtype)
            self.unmapped += [f"{kind} of {n}: only in the {who}" for n, who in lonely(expected, got)]
            for name in (n for n in order if n in got):
                if (difference := self.judge(kind, name, expected[name], got[name], floor)) is not None:
                    out.append(difference)
        return out

    def judge(self, kind: str, name: str, expected: Merged, got: Merged, floor: float) -> TensorDifference | None:
        whole = expected.whole
        if whole is None or any(part.shape != whole.shape for part in got.parts):
            self.unmapped.append(f"{kind} of {name}: it is not known which part a rank holds")
            return None
        if got.whole is None:
            self.unmapped.append(f"{kind} of {name}: some elements are on no rank")
        bound = self.bounds.of(kind, name)
        off = {part.rank: self.error_of(kind, name, part, whole, floor, bound) for part in got.parts}
        error = max(off.values(), default=0.0)
        self.compared[kind] = self.compared.get(kind, 0) + 1
        self.errors[kind] = max(self.errors.get(kind, 0.0), error)
        wrong = tuple(sorted(rank for rank, e in off.items() if not e <= bound))
        return TensorDifference(self.number, kind, name, wrong, error, bound) if wrong else None

    def error_of(
        self, kind: str, name: str, part: RecordedValue, whole: np.ndarray, floor: float, bound: float
    ) -> float:
        error = tensor_error(part.value, part.of(whole), whole, floor)[0]
        if kind != "parameter" or not bound < error < np.inf:
            return error
        beyond = np.maximum(np.abs(part.value - part.of(whole)) - self.movable(name, part), 0.0)
        return tensor_error(beyond, np.zeros_like(beyond), whole, floor)[0]

    def movable(self, name: str, part: RecordedValue) -> np.ndarray:
        """How far noise in its gradient may move a parameter that Adam updates: Adam divides by the gradient's size (`proof.tolerance`)."""
        gradients = merge(self.one, "clipped gradient") or merge(self.one, "gradient")
        rates = [float(e.value[0]) for step in self.one for e in step.of("learning rate")]
        whole = gradients[name].whole if name in gradients else None
        if whole is None or not any(step.of("state exp_avg") for step in self.one):
            return np.zeros(())
        size = np.abs(part.of(whole))
        noise = self.bounds.of("gradient", name) * max(
            float(np.abs(whole).max(initial=0.0)), floor_of(gradients, self.dtype)
        )
        return max(rates, default=0.0) * (self.number + 1) * np.minimum(2.0, noise / np.maximum(size, 1e-300))

    def untold(self, differences: list[TensorDifference]) -> str:
        if all(d.error <= UNTOLD * d.bound for d in differences):
            return (
                "the differences are small, and how far rounding alone goes in this model is not known: "
                "record the reference with --perturbed 2"
            )
        return ""

    # Where it began

    @cached_property
    def step_modules(self) -> StepModules:
        return StepModules(self.one, self.many, self.rename, self.batch_dims)

    def strip(self) -> list[tuple[str, float, float]]:
        return list(self.step_modules.errors()) if self.single else []

    def diagnose(self, first: TensorDifference) -> Diagnosis:
        if (unread := self.unread_samples()) is not None:
            return Diagnosis("forward", "inputs", unread, "samples")
        if self.single and first.kind == "gradient":
            if (place := self.first_module("output")) is not None:
                return Diagnosis("forward", place, self.pattern_of_rows(place, "output"), "output")
            if (place := self.first_module("output gradient")) is not None:
                return Diagnosis(
                    "backward", place, self.pattern_of_rows(place, "output gradient"), "gradient of the output"
                )
        expected, got = merge(self.one, first.kind), merge(self.many, first.kind, self.rename)
        whole = expected[first.name].whole
        assert whole is not None
        copies = [
            Copy(self.coordinates[p.rank], (*p.start, *(p.flat or ())), p.value.astype(np.float64), p.of(whole))
            for p in got[first.name].parts
        ]
        return Diagnosis(
            PHASES.get(first.kind, "reduction" if first.kind == "gradient" else "update"),
            first.name,
            self.pattern(copies),
        )

    def unread_samples(self) -> Pattern | None:
        """Samples of the reference that no rank reads; None if all are read, or ranks read parts of samples."""
        expected, got = (
            Counter(row.tobytes() for s in steps for row in samples_read(s)) for steps in (self.one, self.many)
        )
        lengths = {len(row) for row in (*expected, *got)}
        missing = [row for row in expected if row not in got]
        if len(lengths) != 1 or not missing:
            return None
        return Pattern("part", f"{len(missing)} of {len(expected)} samples are read by no rank")

    def pattern(self, copies: list[Copy]) -> Pattern:
        return pattern_of(copies, {**self.axes, "micro-batches": max(len(s.of("loss")) for s in self.many)}, self.axes)

    def first_module(self, kind: str) -> str | None:
        """The first module in the order of computation whose rows are not the reference's."""
        wrong = [name for name, matches in self.step_modules.rows[kind].items() if self.is_off(kind, name, matches)]
        order = list(self.step_modules.rows[kind])
        ordered = sorted(wrong, key=order.index)
        return ordered[0] if ordered else None

    def is_off(self, kind: str, name: str, matches: list[tuple[int, Match]]) -> bool:
        return any(not match.error <= self.bounds.of(kind, name) for _, match in matches)

    def pattern_of_rows(self, name: str, kind: str) -> Pattern:
        rows = self.step_modules.rows[kind][name]
        return self.pattern(
            [
                Copy(self.coordinates[r], (m.sample, *m.start), (m.got / m.scale)[None], m.expected[None])
                for r, m in rows
            ]
        )


class StepModules:
    """The outputs of modules of both runs, matched row by row; `rows[kind][name]` are (rank, match), in the order of computation."""

    def __init__(
        self, one: list[RankStep], many: list[RankStep], rename: Mapping[str, str], batch_dims: tuple[int, int]
    ) -> None:
        self.rename, self.batch_dim = rename, batch_dims[1]
        self.samples = {kind: samples_of(one, kind, batch_dims[0]) for kind in ("output", "output gradient")}
        self.rows: dict[str, dict[str, list[tuple[int, Match]]]] = {"output": {}, "output gradient": {}}
        self.unmatched: list[str] = []
        places: dict[tuple, Match] = {}
        for step in many:
            for entry in step.of("output"):
                for i, (key, match) in enumerate(self.match_rows(entry)):
                    places[step.rank, key, entry.call, entry.index, i] = match
                    self.rows["output"].setdefault(key, []).append((step.rank, match))
        for step in many:
            scale = None
            for entry in step.of("output gradient"):
                for i, row in enumerate(rows_of(entry, self.batch_dim)):
                    key = self.key(entry)
                    place = places.get((step.rank, key, entry.call, entry.index, i))
                    samples = self.samples["output gradient"].get(key, [])
                    if place is None or place.sample >= len(samples):
                        continue
                    sample = samples[place.sample]
                    box = tuple(slice(a, a + n) for a, n in zip(place.start, row.shape, strict=False))
                    if sample.ndim != row.ndim or sample[box].shape != row.shape or entry.partial:
                        continue
                    scale = scale or ratio(row, sample[box]) or 1.0
                    match = Match(row, sample[box], place.sample, place.start, scale)
                    self.rows["output gradient"].setdefault(key, []).append((step.rank, match))

    def key(self, entry: RecordedValue) -> str:
        name = self.rename.get(entry.name, entry.name)
        return f"{name} [{entry.index}]" if entry.index else name

    def match_rows(self, entry: RecordedValue) -> Iterator[tuple[str, Match]]:
        key, hint = self.key(entry), None
        if entry.partial:
            return
        for row in rows_of(entry, self.batch_dim):
            hint = nearest(row, self.samples["output"].get(key, []), hint, 1.0)
            if hint is not None:
                yield key, hint
            elif key not in self.unmatched:
                self.unmatched.append(key)

    def errors(self) -> Iterator[tuple[str, float, float]]:
        """By module, in the order of forward: the largest error of its output, and of the gradient in it."""
        for name, rows in self.rows["output"].items():
            backward = [match.error for _, match in self.rows["output gradient"].get(name, [])]
            yield name, max(match.error for _, match in rows), max(backward, default=float("nan"))


def samples_of(steps: list[RankStep], kind: str, batch_dim: int) -> dict[str, list[np.ndarray]]:
    """The samples that a run computed in each module, in their order over calls."""
    out: dict[str, dict[tuple[int, int], list[np.ndarray]]] = {}
    for step in steps:
        for entry in step.of(kind):
            key = f"{entry.name} [{entry.index}]" if entry.index else entry.name
            out.setdefault(key, {})[entry.call, step.rank] = list(rows_of(entry, batch_dim))
    return {key: [row for _, rows in sorted(calls.items()) for row in rows] for key, calls in out.items()}


def samples_read(step: RankStep) -> Iterator[np.ndarray]:
    """The rows of the first input of every call of the model: token ids, or whatever it reads."""
    for entry in step.of("input"):
        if entry.index == 0 and entry.value.ndim >= 2 and entry.name == "":
            yield from entry.value


def floor_of(tensors: Mapping[str, Merged], dtype: str) -> float:
    """The smallest scale that a tensor is measured against: a share of the largest of its kind."""
    return NEARLY_ZERO[dtype] * max(
        (float(np.abs(p.value).max(initial=0.0)) for t in tensors.values() for p in t.parts), default=0.0
    )


def lonely(expected: Mapping[str, Any], got: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((name, "reference") for name in expected if name not in got)
    yield from ((name, "candidate") for name in got if name not in expected)
