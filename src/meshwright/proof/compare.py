"""Compare two training runs and find the first difference that is larger than rounding (`tolerance`).

The first difference is reported: in the earliest step, in the order loss, gradients, gradient norm, parameters. Among gradients the
last layer comes first, since backward starts there.
"""

from dataclasses import dataclass, field

import numpy as np

from meshwright.proof.parts import box_at
from meshwright.proof.records import Trace
from meshwright.proof.tolerance import (
    KINDS,
    Tolerance,
    error_beyond,
    floor_of,
    moved,
    number_error,
    tensor_error,
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
    position = {piece.name: i for i, piece in enumerate(one.pieces)}
    whole = {piece.name: piece for piece in one.pieces}
    errors = dict.fromkeys(KINDS, 0.0)
    breaks: list[tuple[tuple, Break]] = []

    def judge(step: int, what: str, name: str, rank: int, error: float, ratio: float = float("nan")) -> None:
        bound = tolerance.bound(what, step, name)
        errors[what] = max(errors[what], error)
        if not error <= bound:
            key = (step, KINDS.index(what), -position.get(name, 0), rank)
            breaks.append((key, Break(step, what, name, rank, error, bound, dtype, ratio)))

    floors = {what: floor_of(one, what, rounded or dtype) for what in ("gradient", "parameter")}
    for trace in many:
        for step in range(len(one.losses)):
            judge(step, "loss", "", trace.rank, *number_error(trace.losses[step], one.losses[step]))
            judge(step, "norm", "", trace.rank, *number_error(trace.norms[step], one.norms[step]))
            for piece in trace.pieces:
                full = whole[piece.name]
                for what, got, expected in (
                    ("gradient", piece.gradients[step], full.gradients[step]),
                    ("parameter", piece.parameters[step], full.parameters[step]),
                ):
                    here = box_at(piece.start, got.shape)
                    error, ratio = tensor_error(got, expected[here], expected, floors[what][step])
                    limit = tolerance.bound(what, step, piece.name)
                    if what == "parameter" and limit < error < np.inf:
                        allowed = moved(full, piece, here, step, floors["gradient"], tolerance)
                        error = error_beyond(allowed, got, expected[here], expected, floors[what][step])
                    judge(step, what, piece.name, trace.rank, error, ratio)
    ordered = [b for _, b in sorted(breaks, key=lambda pair: pair[0])]
    return Agreement(dtype, errors, ordered, many[0].losses, one=one, many=many)
