"""How far two trainings may differ by rounding alone: the one place that decides, for every comparison.

float64. Both do the same arithmetic in another order, so they agree to about 1e-15. The bound is 1e-9 of each tensor's largest
element. For a tensor that is nearly zero (the gradient of a key's bias) it is relative to 1e-4 of the largest element of the model.

float32 and 16 bits. The bound of a tensor comes from one device, tensor by tensor. Its run in the dtype differs from its float64 run by a
rounding error e; a run that starts with weights moved by one unit in their last place, and sums micro-batches in the other order, differs by the
amplification a of such a unit through the layers. A parallel run rounds at other places, not more often: it may be off by a small multiple of
the larger of the two, `MARGIN`. A tensor that happened to round well has the usual error of all tensors. Rounding only accumulates: a step's bound
is never below an earlier one's.

Parameters. AdamW divides a gradient by its magnitude, so noise δ in a gradient g moves its parameter by up to min(2, δ/(|g| + ε)) of a step. This is
added to the bound, element by element, with the δ of the bound of the gradient; in float64 with twice the difference of the two gradients, which
was judged before (g/(|g| + ε) changes by at most 2δ/(|g| + ε)): a factor of PowerSGD leaves rounding noise where the gradient is zero. Muon makes a
matrix orthogonal, which enlarges noise in its small singular values: the bound has that too.

What cannot be judged this way is said: a router, fp8 or a lossy sum may round to another expert or another code, after which nothing is near.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.describe.optimizer import Optimizer

FP64_BOUND = 1e-9
# A tensor below this share of the model's largest is measured against that share: smaller values are rounding noise.
NEARLY_ZERO = {"fp64": 1e-4, "fp32": 0.1, "fp16": 0.1, "bf16": 0.1}
# How much more than one device's spread. Over the parity matrix tensors of ranks were off by at most 0.52 of it in 16 bits, and in fp32 by 1.8
# beyond the smallest bound; losses and norms, which are means and may come near by chance, by 1.7 and 0.82.
MARGIN = {"fp32": 3.0, "fp16": 2.0, "bf16": 2.0}
NUMBER_MARGIN = 6.0
FLOOR = {"fp32": 4 * 2.0**-24, "fp16": 4 * 2.0**-11, "bf16": 4 * 2.0**-8}
NUMBER_FLOOR = {"fp32": 4 * 2.0**-24, "fp16": 2.0**-14, "bf16": 2.0**-11}
UNMEASURED = {"fp32": 10 * 2.0**-24}  # the spread of a training that was not repeated with moved weights
SLOPE = 3.4445**5  # how much Muon's iteration enlarges a small change of its matrix, at most
KINDS = ("loss", "gradient", "norm", "parameter")


@dataclass
class Tolerance:
    """The bound of every loss, norm, gradient and parameter, by step. Without `spread` that of float64."""

    dtype: str = "fp64"
    spread: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # by kind and tensor: of one device

    def bound(self, what: str, step: int, name: str = "") -> float:
        if self.dtype == "fp64":
            return FP64_BOUND
        margin, floor = (MARGIN[self.dtype], FLOOR) if name else (NUMBER_MARGIN, NUMBER_FLOOR)
        unknown = 0.0 if self.spread else UNMEASURED.get(self.dtype, 0.0)
        return margin * max(self.spread.get((what, name), [unknown])[: step + 1]) + floor[self.dtype]


def verdict_of(differs: bool, untold: str) -> str:
    """One of three words; `untold` says why it cannot be told whether two trainings differ."""
    return "differs" if differs else "cannot be told" if untold else "equal within rounding"


def spread_of(runs: Iterable[Mapping[tuple[str, str], list[float]]]) -> dict[tuple[str, str], list[float]]:
    """The largest error of every tensor over several runs, by kind and name, step by step."""
    spread: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for key, errors in run.items():
            known = spread.setdefault(key, [0.0] * len(errors))
            spread[key] = [max(pair) for pair in zip(known, errors, strict=True)]
    return spread


def at_least_usual(
    spread: dict[tuple[str, str], list[float]], kinds: Iterable[str]
) -> dict[tuple[str, str], list[float]]:
    """Spreads by kind and tensor, none below the median of its kind: a tensor that happened to round well has the usual error."""
    for what in kinds:
        of_kind = [spread[key] for key in spread if key[0] == what]
        usual = np.median(of_kind, axis=0).tolist() if of_kind else []
        spread |= {key: [*map(max, spread[key], usual)] for key in spread if key[0] == what}
    return spread


def tensor_error(got: np.ndarray, box: np.ndarray, expected: np.ndarray, floor: float) -> tuple[float, float]:
    """The largest difference over the tensor's largest element (at least `floor`), and the factor between the two."""
    if got.size == 0:
        return 0.0, float("nan")
    scale = max(float(np.abs(expected).max()), floor, 1e-300)
    error = float(np.abs(got - box).max()) / scale
    square = float((box.astype(np.float64) ** 2).sum())
    ratio = float((got * box).sum()) / square if square > 0 else float("nan")
    return (error if np.isfinite(error) else float("inf")), ratio


def error_beyond(allowed: Any, got: np.ndarray, box: np.ndarray, expected: np.ndarray, floor: float) -> float:
    """The error without what is allowed of each element."""
    beyond = np.maximum(np.abs(got - box) - allowed, 0.0)
    return tensor_error(beyond, np.zeros_like(beyond), expected, floor)[0]


def moved_elements(
    gradients: list[np.ndarray], noises: list[Any], epsilon: float = 0.0, rate: float = Optimizer().learning_rate
) -> np.ndarray:
    """How far noise in the gradients of the steps until now moves the elements that Adam updates."""
    sizes = (np.maximum(np.abs(gradient.astype(np.float64)) + epsilon, 1e-300) for gradient in gradients)
    return rate * np.sum([np.minimum(2.0, noise / size) for size, noise in zip(sizes, noises, strict=True)], axis=0)


def moved_matrix(gradients: list[np.ndarray], noises: list[float]) -> np.ndarray:
    """The same for a matrix that Muon updates: noise in the matrix u = (1−μ)g + μm, as a share of its norm, is enlarged by at most `SLOPE`, and
    the update of no element by more than 2."""
    share, out, momentum = Optimizer().momentum, np.zeros(gradients[0].shape), np.zeros(gradients[0].shape)
    for gradient, noise in zip(gradients, noises, strict=True):
        momentum = (1 - share) * gradient + share * momentum
        ahead = (1 - share) * gradient + share * momentum
        elements = gradient.shape[-2] * gradient.shape[-1]
        norms = np.sqrt((ahead.astype(np.float64) ** 2).sum(axis=(-2, -1), keepdims=True))
        change = np.minimum(2.0, SLOPE * noise * np.sqrt(elements) / np.maximum(norms, 1e-300))
        out += Optimizer().learning_rate * 0.2 * np.sqrt(max(gradient.shape[-2:])) * change
    return out
