"""Compare two training runs and find the first difference that is larger than rounding.

float64. Both do the same arithmetic in another order, so they agree to about 1e-15. The bound is 1e-9 of each tensor's largest
element. For a tensor that is nearly zero (the gradient of a key's bias) it is relative to 1e-4 of the largest element of the model.

float32. The bound comes from one device: its float32 run differs from its float64 run by a rounding error e, and a parallel run,
which rounds at other places, may differ from float64 by a small multiple of e. AdamW divides a gradient by its magnitude, so noise δ
in a gradient g moves its parameter by up to min(2, δ/|g|) of a step. This is added to the bound, element by element, with the δ of the
bound of the gradients. Muon makes a matrix orthogonal, which enlarges noise in its small singular values: the bound has that too.

16 bits. The bound comes in the same way from a run of one device in 16 bits: it finds a wrong factor, but not a wrong rounding (updates
are replayed exactly, `emulation.update`). For gradients that several ranks sum in 16 bits, the bound is the effect of the order of the sum.

The first difference is reported: in the earliest step, in the order loss, gradients, gradient norm, parameters. Among gradients the
last layer comes first, since backward starts there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.describe.optimizer import Optimizer
from meshwright.proof.records import Trace

FP64_BOUND = 1e-9
# A tensor below this share of the model's largest is measured against that share: smaller values are rounding noise.
NEARLY_ZERO = {"fp64": 1e-4, "fp32": 0.1, "fp16": 0.1, "bf16": 0.1}
MARGIN = {"fp32": 30.0, "fp16": 6.0, "bf16": 6.0}  # how much more than one device's own rounding
FLOOR = {"fp32": 32 * 2.0**-24, "fp16": 4 * 2.0**-11, "bf16": 4 * 2.0**-8}
SLOPE = 3.4445**5  # how much Muon's iteration enlarges a small change of its matrix, at most
ORDER = ("loss", "gradient", "norm", "parameter")


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
    one: Trace | None = field(default=None, repr=False)  # what was compared
    many: list[Trace] = field(default_factory=list, repr=False)
    oracle: str = ""  # plain formulas that one device was compared with; empty: ranks were compared with one device

    @property
    def label(self) -> str:
        return self.oracle or self.dtype


def compare(
    one: Trace, many: list[Trace], bounds: dict[tuple[str, int], float] | None = None, rounded: str = ""
) -> Agreement:
    """Compare the ranks of a plan with one device, in one dtype. `bounds` are by (kind, step); None: float64's. `rounded` is the
    dtype that gradients are rounded to when they are sent."""
    if one.replicas:
        by_replica = [
            [trace for trace in many if trace.coordinates["replicate"] == i] for i in range(len(one.replicas))
        ]
        parts = [compare(*pair, bounds, rounded) for pair in zip(one.replicas, by_replica, strict=True)]
        worst = {what: max(part.errors[what] for part in parts) for what in ORDER}
        losses = np.mean([part.losses for part in parts], axis=0).tolist()
        return Agreement(many[0].dtype, worst, [b for part in parts for b in part.breaks], losses, one, many)
    dtype = many[0].dtype
    position = {piece.name: i for i, piece in enumerate(one.pieces)}
    whole = {piece.name: piece for piece in one.pieces}
    errors = dict.fromkeys(ORDER, 0.0)
    breaks: list[tuple[tuple, Break]] = []

    def judge(step: int, what: str, name: str, rank: int, error: float, ratio: float = float("nan")) -> None:
        bound = FP64_BOUND if bounds is None else bounds[what, step]
        errors[what] = max(errors[what], error)
        if not error <= bound:
            key = (step, ORDER.index(what), -position.get(name, 0), rank)
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
                    here = tuple(slice(a, a + n) for a, n in zip(piece.start, got.shape, strict=True))
                    error, ratio = tensor_error(got, expected[here], expected, floors[what][step])
                    if what == "parameter" and bounds is not None and bounds[what, step] < error < np.inf:
                        how = moved_matrix if full.orthogonal else moved_by_noise
                        moved = how(full.gradients[: step + 1], floors["gradient"], bounds)[here]
                        beyond = np.maximum(np.abs(got - expected[here]) - moved, 0.0)
                        error = tensor_error(beyond, np.zeros_like(beyond), expected, floors[what][step])[0]
                    judge(step, what, piece.name, trace.rank, error, ratio)
    ordered = [b for _, b in sorted(breaks, key=lambda pair: pair[0])]
    return Agreement(dtype, errors, ordered, many[0].losses, one, many)


def number_error(got: float, expected: float) -> tuple[float, float]:
    return abs(got - expected) / max(abs(expected), 1e-300), got / expected if expected else float("nan")


def moved_by_noise(
    gradients: list[np.ndarray], floors: list[float], bounds: dict[tuple[str, int], float]
) -> np.ndarray:
    """Bound how far noise in the gradients may have moved each element of a parameter after these steps."""
    moved = np.zeros(gradients[0].shape)
    for step, gradient in enumerate(gradients):
        size = np.abs(gradient.astype(np.float64))
        noise = bounds["gradient", step] * max(float(size.max(initial=0.0)), floors[step])
        moved += Optimizer().learning_rate * np.minimum(2.0, noise / np.maximum(size, 1e-300))
    return moved


def moved_matrix(gradients: list[np.ndarray], floors: list[float], bounds: dict[tuple[str, int], float]) -> np.ndarray:
    """The same for a matrix that Muon updates: noise in the matrix u = (1−μ)g + μm, as a share of its norm, is enlarged by at most `SLOPE`, and
    the update of no element by more than 2."""
    share, moved, momentum = Optimizer().momentum, np.zeros(gradients[0].shape), np.zeros(gradients[0].shape)
    for step, gradient in enumerate(gradients):
        momentum = (1 - share) * gradient + share * momentum
        ahead = (1 - share) * gradient + share * momentum
        noise = bounds["gradient", step] * max(float(np.abs(gradient).max(initial=0.0)), floors[step])
        elements = gradient.shape[-2] * gradient.shape[-1]
        norms = np.sqrt((ahead.astype(np.float64) ** 2).sum(axis=(-2, -1), keepdims=True))
        change = np.minimum(2.0, SLOPE * noise * np.sqrt(elements) / np.maximum(norms, 1e-300))
        moved += Optimizer().learning_rate * 0.2 * np.sqrt(max(gradient.shape[-2:])) * change
    return moved


def tensor_error(got: np.ndarray, box: np.ndarray, expected: np.ndarray, floor: float) -> tuple[float, float]:
    """The largest difference over the tensor's largest element (at least `floor`), and the factor between the two."""
    if got.size == 0:
        return 0.0, float("nan")
    scale = max(float(np.abs(expected).max()), floor, 1e-300)
    error = float(np.abs(got - box).max()) / scale
    square = float((box.astype(np.float64) ** 2).sum())
    ratio = float((got * box).sum()) / square if square > 0 else float("nan")
    return (error if np.isfinite(error) else float("inf")), ratio


def floor_of(one: Trace, what: str, dtype: str) -> list[float]:
    """The smallest scale a tensor is measured against at each step: a share of the model's largest gradient or parameter."""
    lists = [piece.gradients if what == "gradient" else piece.parameters for piece in one.pieces]
    largest = [max(float(np.abs(values[step]).max()) for values in lists) for step in range(len(one.losses))]
    return [NEARLY_ZERO[dtype] * size for size in largest]


def bounds_from_rounding(single: Trace, double: Trace, rounded: str = "") -> dict[tuple[str, int], float]:
    """Bounds for a narrower dtype, from one device's run in it against its float64 run; or for gradients `rounded` to it when they
    are sent, from two runs that sum in another order."""
    dtype = rounded or single.dtype
    if single.replicas:
        parts = [bounds_from_rounding(*pair, rounded) for pair in zip(single.replicas, double.replicas, strict=True)]
        return {key: max(part[key] for part in parts) for key in parts[0]}
    steps = range(len(double.losses))
    worst: dict[str, list[float]] = {what: [] for what in ORDER}
    for step in steps:
        worst["loss"].append(number_error(single.losses[step], double.losses[step])[0])
        worst["norm"].append(number_error(single.norms[step], double.norms[step])[0])
        for what in ("gradient", "parameter"):
            floor = floor_of(double, what, dtype)[step]
            pairs = [
                (s.gradients[step], d.gradients[step])
                if what == "gradient"
                else (s.parameters[step], d.parameters[step])
                for s, d in zip(single.pieces, double.pieces, strict=True)
            ]
            worst[what].append(max(tensor_error(s, d, d, floor)[0] for s, d in pairs))
    # Rounding only accumulates: a step's bound is never below an earlier one's.
    margin, floor = MARGIN[dtype], FLOOR[dtype]
    return {(what, s): margin * max(worst[what][: s + 1]) + floor for what in ORDER for s in steps}
