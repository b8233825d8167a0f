"""Robust fits of T(n) = α + n·β to measured points: relative errors, weights by Huber, no negative constants.

Sizes span six decades, so errors count relative to the measured time: a 10% error at 1 KB weighs as much as one at 1 GB. Each round solves
the least squares of the relative residuals rᵢ = fitᵢ/tᵢ − 1 with weights

    wᵢ = min(1, c·s/|rᵢ|)      s = 1.4826 · median |r|, c = 1.345

so the influence of a stalled measurement is bounded by c·s, about twice the median error, however far off it is. The first rounds use
wᵢ = 1/|rᵢ| (the median regression), from which a minority of outliers cannot move the start. A constant that comes out negative is
set to zero and the others are fitted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

SPARE_POINTS = (
    3  # beyond one for each constant: a fit through as many points as constants always has a residual of zero
)
HUBER, MAD, LEAST_SCALE = 1.345, 1.4826, 1e-6
MEDIAN_ROUNDS, ROUNDS = 20, 60


@dataclass(frozen=True)
class Line:
    """T(n) = alpha + n·beta, and how well the points follow it."""

    alpha: float
    beta: float
    points: int
    residual: float  # median of |fit/measured − 1|
    deviation: float  # largest |fit/measured − 1| of the medians by size: curvature, a switch of protocol, caches
    deviates_at: int  # bytes where the deviation is largest

    @property
    def bandwidth(self) -> float:
        return 1.0 / self.beta if self.beta else float("inf")

    @property
    def crossover(self) -> float:
        """n* = α/β: below it latency dominates."""
        return self.alpha / self.beta if self.beta else float("inf")

    def time(self, n: float) -> float:
        return self.alpha + n * self.beta

    def as_dict(self) -> dict[str, Any]:
        return self.__dict__.copy()


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line through measured points."""
    n, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    basis = np.stack([np.ones_like(n), n], axis=1)
    alpha, beta = robust_fit(basis, t)
    error = (alpha + beta * n) / t - 1
    by_size = {int(size): float(np.median(error[n == size])) for size in np.unique(n)}
    worst = max(by_size, key=lambda size: abs(by_size[size]))
    return Line(float(alpha), float(beta), len(n), float(np.median(np.abs(error))), abs(by_size[worst]), worst)


def robust_fit(basis: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients c ≥ 0 of basis·c ≈ seconds, by relative error; a column of zeros has coefficient 0."""
    relative = basis / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    columns = relative / scale  # of order 1, so that constants of 1e-6 s and 1e-11 s/byte solve exactly
    weights = np.ones(len(seconds))
    found = np.zeros(basis.shape[1])
    for k in range(ROUNDS):
        before, found = found, non_negative(columns, weights)
        error = np.abs(columns @ found - 1)
        if k < MEDIAN_ROUNDS:
            weights = 1 / np.maximum(error, 1e-3)
            continue
        bound = HUBER * max(MAD * float(np.median(error)), LEAST_SCALE)
        weights = np.minimum(1.0, bound / np.maximum(error, LEAST_SCALE))
        if np.allclose(found, before, rtol=1e-9, atol=0):
            break
    return found / scale


def non_negative(columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted least squares of columns·c ≈ 1 with c ≥ 0: the best over all sets of columns that give no negative coefficient."""
    count = columns.shape[1]
    best, least = np.zeros(count), np.inf
    root = np.sqrt(weights)
    for size in range(count, 0, -1):
        for chosen in map(list, combinations(range(count), size)):
            solved, *_ = np.linalg.lstsq(columns[:, chosen] * root[:, None], root, rcond=None)
            if (solved < 0).any():
                continue
            error = float(np.sum(weights * (columns[:, chosen] @ solved - 1) ** 2))
            if error < least:
                best, least = np.zeros(count), error
                best[chosen] = solved
        if least < np.inf:
            break  # fewer columns fit no better
    return best
