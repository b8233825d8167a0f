"""One step of two recordings, tensor by tensor: how far rounding goes, and what differs by more.

Bounds are those of `verify` (`proof.tolerance`): of perturbed references where the dtype is not float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.check.expected import ranks_text
from meshwright.check.folder import RankStep, Recording, of_ranks
from meshwright.check.translate import NameMap
from meshwright.check.where import StepModules, cut_modules
from meshwright.errors import MeshwrightError
from meshwright.proof.judge import ComparedStep, Tensors
from meshwright.proof.parts import Beside
from meshwright.proof.tolerance import Tolerance, at_least_usual, moved_elements, spread_of

DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
STATES = ("state exp_avg", "state exp_avg_sq", "state momentum_buffer")
DECIDING = ("gradient", "norm", "clipped gradient", *STATES, "parameter")


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
        of = f" of {self.name}" if self.name else ""
        return f"step {self.step}: {self.kind}{of} on {ranks_text(self.ranks)} is off by {self.error:.1e} (bound {self.bound:.1e})"


class ErrorAndBound(NamedTuple):
    """Of a module's output or the gradient in it, or of a parameter's tensor; NaN: not seen."""

    error: float = float("nan")
    bound: float = float("nan")

    @property
    def is_off(self) -> bool:
        return self.error > self.bound


class StepPair(ComparedStep):
    """One step of both runs."""

    previous: StepPair | None

    def __init__(
        self,
        reference: Recording,
        candidate: Recording,
        step: int,
        naming: NameMap,
        previous: StepPair | None,
    ) -> None:
        super().__init__()
        self.number, self.naming, self.previous = step, naming, previous
        self.one, self.many = reference.step(step), candidate.step(step)
        self.coordinates, self.axes = dict(enumerate(candidate.coordinates)), candidate.axes
        self.cut = cut_modules([rank["parameters"] for rank in candidate.ranks])
        self.single = reference.world == 1
        self.batch_dims = reference.batch_dim, candidate.batch_dim
        self.compared: dict[str, int] = {}
        self.errors_by_kind: dict[str, float] = {}
        self.gradients: dict[str, ErrorAndBound] = {}
        self.growth = 1.0  # how many times further parameters were moved by rounding than in the perturbed references
        self.unmapped: list[str] = []
        self.check_same_batch()

    def read(self, kind: str) -> tuple[Tensors, Tensors]:
        return self.naming.reference(self.one, kind), self.naming.candidate(self.many, kind)

    @cached_property
    def dtype(self) -> str:  # type: ignore[override]
        """The narrowest that a module computes in."""
        one, many = narrowest(self.one), narrowest(self.many)
        if one != many:
            raise MeshwrightError(
                "MW-CHECK-015", f"the reference computes in {one} and the candidate in {many}",
                why="Two dtypes round by different amounts", fix="record both with the same precision",
            )  # fmt: skip
        return one

    def check_same_batch(self) -> None:
        expected, got = map(set, self.samples_read)
        if self.alike and expected and got and not (expected & rows_read(self.many) or got & rows_read(self.one)):
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
        growth = self.previous.growth if self.previous is not None else 1.0
        earlier = so_far.spread if so_far is not None else {}
        lists = {
            key: [*earlier.get(key, [0.0] * self.number), error * growth]
            for key, (error,) in spread_of(map(self.errors_against, perturbed)).items()
        }
        return Tolerance(self.dtype, at_least_usual(lists, {kind for kind, _ in lists}))

    def errors_against(self, steps: list[RankStep]) -> dict[tuple[str, str], list[float]]:
        """How far a perturbed reference is off, by kind and tensor."""
        out = self.errors(DECIDING, lambda kind: self.naming.reference(steps, kind))
        for name, forward, backward in StepModules(self.one, steps, {}, (self.batch_dims[0],) * 2).errors():
            out["output", name] = float(np.nan_to_num(forward))
            out["output gradient", name] = float(np.nan_to_num(backward))
        return {key: [error] for key, error in out.items()}

    # What decides

    def differences(self, tolerance: Tolerance) -> list[TensorDifference]:
        out: list[TensorDifference] = []
        for tensor in self.judge(DECIDING, tolerance):
            kind, name, error = tensor.kind, tensor.name, tensor.error
            self.compared[kind] = self.compared.get(kind, 0) + 1
            self.errors_by_kind[kind] = max(self.errors_by_kind.get(kind, 0.0), error)
            if kind == "gradient":
                self.gradients[name] = ErrorAndBound(error, tensor.bound)
            for part in tensor.parts if tolerance.spread and kind == "parameter" else ():
                if tensor.bound < part.raw < np.inf:
                    self.growth = max(self.growth, part.raw / max(tolerance.spread[kind, name]))
            if ranks := sorted({rank for part in tensor.wrong for rank in part.pair.ranks}):
                out.append(TensorDifference(self.number, kind, name, tuple(ranks), error, tensor.bound))
        for kind in DECIDING:
            one, many = self.of(kind)
            for side, own, other in (("reference", one, many), ("candidate", many, one)):
                self.unmapped += [f"{kind} of {name}: only in the {side}" for name in own if name not in other]
        return out

    def comparable(self, kind: str, name: str) -> bool:
        expected, got = (side[name] for side in self.of(kind))
        if not expected.complete or any(part.shape != expected.shape for part in got.parts):
            self.unmapped.append(f"{kind} of {name}: it is not known which part a rank holds")
            return False
        if not got.complete:
            self.unmapped.append(f"{kind} of {name}: some elements are on no rank")
        return True

    def noise(self, pair: Beside, name: str, tolerance: Tolerance) -> np.ndarray | None:
        """Adam divides by the gradient's size (`proof.tolerance`)."""
        kind = "clipped gradient" if self.of("clipped gradient")[0] else "gradient"
        expected = self.of(kind)[0].get(name)
        whole = expected.whole if expected is not None else None
        if (
            whole is None
            or pair.part is None
            or pair.sketched
            or not any(step.of("state exp_avg") for step in self.one)
        ):
            return None
        largest = max(float(np.abs(whole).max(initial=0.0)), self.floor(kind))
        noise = tolerance.bound("gradient", self.number, name) * largest
        rate = max((float(e.value[0]) for e in of_ranks(self.one, "learning rate")), default=0.0)
        steps = self.number + 1
        return moved_elements([pair.part.of(whole)] * steps, [noise] * steps, rate=rate)

    def place_of(self, ranks: tuple[int, ...], name: str) -> Mapping[str, int]:
        """The axis of experts is made of others, which is where other parameters are."""
        return {axis: at for axis, at in super().place_of(ranks, name).items() if axis != "ep" or "experts" in name}

    @cached_property
    def modules(self) -> StepModules:
        return StepModules(
            self.one, self.many, self.naming.rename, self.batch_dims, cut=self.cut, places=self.coordinates
        )

    def module_errors(self, tolerance: Tolerance) -> Iterator[tuple[str, ErrorAndBound, ErrorAndBound]]:
        for name, forward, backward in self.modules.errors() if self.single else ():
            bounds = (tolerance.bound(kind, self.number, name) for kind in ("output", "output gradient"))
            yield name, ErrorAndBound(forward, next(bounds)), ErrorAndBound(backward, next(bounds))


def narrowest(steps: list[RankStep]) -> str:
    seen = {DTYPES.get(e.dtype) for s in steps for e in s.of("output") + s.of("gradient")}
    return next((dtype for dtype in ("bf16", "fp16", "fp32", "fp64") if dtype in seen), "fp32")


def samples_read(step: RankStep) -> Iterator[np.ndarray]:
    """The rows of the first input of every call of the model: token ids, or whatever it reads."""
    inputs = step.of("input")
    for entry in inputs:
        if entry.index == 0 and entry.value.ndim >= 2 and entry.name == inputs[0].name:
            yield from entry.value


def rows_read(steps: list[RankStep]) -> set[bytes]:
    """Of all inputs: labels may be the first of one framework and the last of another."""
    return {
        row.tobytes() for step in steps for entry in step.of("input") if entry.value.ndim >= 2 for row in entry.value
    }
