"""Compare two training runs and find the first difference that is larger than rounding (`tolerance`).

The first difference is reported: in the earliest step, in the order loss, gradients, gradient norm, parameters. Among gradients the
last layer comes first, since backward starts there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.proof.judge import ComparedStep, Tensors
from meshwright.proof.parts import Beside, RecordedValue, merge
from meshwright.proof.records import PieceTrace, Trace
from meshwright.proof.tolerance import (
    KINDS,
    Tolerance,
    at_least_usual,
    moved_elements,
    moved_matrix,
    spread_of,
    verdict_of,
)

NARROWER = "narrow operation"
INITIAL = "initial weights"


@dataclass(frozen=True)
class Break:
    """One value that differs from one device, or from `than`. `ratio` is the least-squares factor between the two."""

    step: int
    what: str
    name: str
    rank: int
    error: float
    bound: float
    dtype: str
    ratio: float = float("nan")
    than: str = "one device's"

    def __str__(self) -> str:
        if self.what == NARROWER:
            return f"{self.name} is computed in {self.dtype} on rank {self.rank}, and in wider numbers on one device"
        where = f"{self.what} of {self.name}" if self.name else self.what
        factor = f", {self.ratio:.4g} times {self.than}" if np.isfinite(self.ratio) else ""
        return (
            f"step {self.step}: {where} on rank {self.rank} is off by {self.error:.1e} (bound {self.bound:.0e}, "
            f"{self.dtype}){factor}"
        )


@dataclass
class Agreement:
    """The largest differences by kind, and those above their bound, in order."""

    dtype: str
    errors: dict[str, float]
    breaks: list[Break]
    losses: list[float] = field(default_factory=list)  # of the ranks, step by step
    untold: str = ""  # why gradients and parameters could not be compared in this dtype
    one: Trace | None = field(default=None, repr=False)  # what was compared
    many: list[Trace] = field(default_factory=list, repr=False)
    oracle: str = ""  # plain formulas that one device was compared with; empty: ranks were compared with one device
    # The first step that differs, with the outputs of modules: one device, the ranks, one device with the weights of the step before.
    rerun: tuple[Trace, list[Trace], Trace | None] | None = field(default=None, repr=False)
    phase: str = ""  # of a run that is evaluated, saved and resumed: what was compared with what

    @property
    def verdict(self) -> str:
        return verdict_of(bool(self.breaks), self.untold)

    @property
    def label(self) -> str:
        return self.phase or self.oracle or self.dtype


class TraceStep(ComparedStep):
    """One step of one device and of the ranks of a plan."""

    backwards = ("gradient", "parameter")
    previous: "TraceStep | None"

    def __init__(self, one: Trace, many: list[Trace], number: int, dtype: str, previous: "TraceStep | None") -> None:
        super().__init__()
        self.one, self.many, self.number, self.dtype, self.previous = one, many, number, dtype, previous
        self.coordinates = {trace.rank: trace.coordinates for trace in many}

    def read(self, kind: str) -> tuple[Tensors, Tensors]:
        one = merge(self.values([self.one], kind, {}))
        shapes = {name: tensor.parts[0].size for name, tensor in one.items()}
        return one, merge(self.values(self.many, kind, shapes))

    def values(self, traces: list[Trace], kind: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[RecordedValue]:
        """The values of a kind; a tensor without a shape is whole."""
        for trace in traces:
            if kind in ("loss", "norm"):
                number = np.array([(trace.losses if kind == "loss" else trace.norms)[self.number]])
                yield RecordedValue(kind, "", trace.rank, number, shape=(1,), start=(0,), size=(1,))
                continue
            for piece in trace.pieces:
                if (value := piece.value(kind, self.number)) is not None:
                    shape = shapes.get(piece.name, value.shape)
                    yield RecordedValue(
                        kind, piece.name, trace.rank, value, shape=shape, start=piece.start, size=value.shape
                    )

    def noise(self, pair: Beside, name: str, tolerance: Tolerance) -> Any:
        """Of all steps until now: the optimizer adds them up."""
        full, part = next(piece for piece in self.one.pieces if piece.name == name), pair.part
        assert part is not None
        gradients, noises = full.gradients[: self.number + 1], self.gradient_noises(full, tolerance)
        if tolerance.spread:
            moved = (
                moved_matrix(gradients, noises) if full.orthogonal else moved_elements(gradients, noises, full.epsilon)
            )
            return moved[part.here]
        if not full.epsilon:
            return 0.0
        pieces = (piece for trace in self.many if trace.rank == part.rank for piece in trace.pieces)
        piece = next(p for p in pieces if p.name == name and p.start == part.start)
        own = [gradient[part.here] for gradient in gradients]
        seen = [
            2 * np.minimum(np.abs(got - g), most) for got, g, most in zip(piece.gradients, own, noises, strict=False)
        ]
        return moved_elements(own, seen, full.epsilon)

    def gradient_noises(self, full: PieceTrace, tolerance: Tolerance) -> list[float]:
        """Of one device's gradient in every step until now."""
        earlier = self.previous.gradient_noises(full, tolerance) if self.previous is not None else []
        largest = max(float(np.abs(full.gradients[self.number]).max(initial=0.0)), self.floor("gradient"))
        return [*earlier, tolerance.bound("gradient", self.number, full.name) * largest]


def trace_steps(one: Trace, many: list[Trace], dtype: str = "") -> list[TraceStep]:
    steps: list[TraceStep] = []
    for number in range(len(one.losses)):
        steps.append(TraceStep(one, many, number, dtype or many[0].dtype, steps[-1] if steps else None))
    return steps


def tolerance_of(exact: Trace, *others: Trace, rounded: str = "") -> Tolerance:
    """From runs of one device against an exact one: in a narrower dtype, or `rounded` to it when gradients are sent, in another order."""
    dtype = rounded or others[0].dtype
    pairs = [
        pair
        for other in others
        for pair in (zip(exact.replicas, other.replicas, strict=True) if exact.replicas else [(exact, other)])
    ]
    spread = spread_of(errors_of(double, single, dtype) for double, single in pairs)
    return Tolerance(dtype, at_least_usual(spread, ("gradient", "parameter")))


def errors_of(double: Trace, single: Trace, dtype: str) -> dict[tuple[str, str], list[float]]:
    """The relative error of every number and tensor, step by step."""
    steps = [step.errors(KINDS) for step in trace_steps(double, [single], dtype)]
    return {key: [step[key] for step in steps] for key in steps[0]}


def compare(one: Trace, many: list[Trace], tolerance: Tolerance | None = None, rounded: str = "") -> Agreement:
    """Compare the ranks of a plan with one device, in one dtype. `tolerance`: None is float64's. `rounded` is the dtype that gradients are rounded
    to when they are sent."""
    tolerance = tolerance or Tolerance()
    if one.replicas:
        by_replica = [
            [trace for trace in many if trace.coordinates["replicate"] == i] for i in range(len(one.replicas))
        ]
        parts = [compare(*pair, tolerance, rounded) for pair in zip(one.replicas, by_replica, strict=True)]
        worst = {what: max(part.errors[what] for part in parts) for what in KINDS}
        losses = np.mean([part.losses for part in parts], axis=0).tolist()
        return Agreement(many[0].dtype, worst, [b for part in parts for b in part.breaks], losses, one=one, many=many)
    dtype = many[0].dtype
    errors = dict.fromkeys(KINDS, 0.0)
    breaks: list[Break] = []
    for step in trace_steps(one, many, rounded):
        for tensor in step.judge(KINDS, tolerance):
            errors[tensor.kind] = max(errors[tensor.kind], tensor.error)
            for part in tensor.wrong:
                where = step.number, tensor.kind, tensor.name, part.pair.ranks[0]
                breaks.append(Break(*where, part.error, tensor.bound, dtype, part.ratio))
    return Agreement(dtype, errors, breaks, many[0].losses, one=one, many=many)
