"""Normal distributions of the numbers of a stack: products, sums and their covariances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUMBERS = ("launch", "products", "attention", "elementwise", "network", "exposed")


def covariance(own: Sequence[float], common: float) -> np.ndarray:
    """diag(own²) + common²·11ᵀ; the share of exposed compute is not a time, so it has no part in what is common."""
    together = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    return np.diag(np.square(own)) + common**2 * np.outer(together, together)


@dataclass(frozen=True)
class Normal:
    """A normal distribution by its precision matrix and shift = precision · mean; a message of one may be singular. Several distributions have
    one array of both: (…, numbers, numbers) and (…, numbers)."""

    precision: np.ndarray
    shift: np.ndarray

    @classmethod
    def of(cls, mean: np.ndarray, covariance: np.ndarray) -> Normal:
        precision = np.linalg.inv(covariance)
        return cls(precision, times(precision, mean))

    @classmethod
    def flat(cls) -> Normal:
        return cls(np.zeros((len(NUMBERS), len(NUMBERS))), np.zeros(len(NUMBERS)))

    @property
    def mean(self) -> np.ndarray:
        return np.linalg.solve(self.precision, self.shift[..., None])[..., 0]

    @property
    def covariance(self) -> np.ndarray:
        return np.linalg.inv(self.precision)

    def __mul__(self, other: Normal) -> Normal:
        return Normal(self.precision + other.precision, self.shift + other.shift)

    def through(self, spread: np.ndarray) -> Normal:
        """The distribution of the sum with an independent normal of mean 0 and covariance `spread`."""
        gain = self.precision @ np.linalg.inv(self.precision + np.linalg.inv(spread))
        return Normal(self.precision - gain @ self.precision, self.shift - gain @ self.shift)


def times(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Matrices times vectors, one or several."""
    return (matrix @ vector[..., None])[..., 0]


def product(parts: Sequence[Normal]) -> Normal:
    out = Normal.flat()
    for part in parts:
        out = out * part
    return out
