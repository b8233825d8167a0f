"""Find each activation of a rank in those of another run: nobody says which samples, positions or features a rank computes.

Rows are matched by their content. A rank's output [b, s, f] is cut into samples along its batch dimension, and each must be one of the
samples that the reference computed in the same module, or a block of one: a part of the sequence (sequence and context parallelism) or
of the features (tensor parallelism). Of all blocks the nearest is taken; how far it is away is the error of the row.

    rank 1, layers.0.up [1, 32, 128]    →    reference, layers.0.up [4, 32, 256]: sample 1, features 128 to 255
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from meshwright.check.folder import RecordedValue


@dataclass(frozen=True)
class Match:
    """A row of a rank, and the block of the reference that is nearest to it."""

    got: np.ndarray
    expected: np.ndarray
    sample: int
    start: tuple[int, ...]
    scale: float  # the factor between the two runs that is right: of gradients before the reduction

    @property
    def error(self) -> float:
        size = float(np.abs(self.expected).max(initial=0.0))
        return float(np.abs(self.got / self.scale - self.expected).max(initial=0.0)) / max(size, 1e-300)


def rows_of(entry: RecordedValue, batch_dim: int) -> Iterator[np.ndarray]:
    """The samples of an activation; of one without a batch dimension, the whole."""
    if entry.value.ndim < 2:
        yield entry.value
    elif entry.sketched is not None:
        yield from entry.value
    else:
        yield from np.moveaxis(entry.value, min(batch_dim, entry.value.ndim - 2), 0)


def blocks_of(whole: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Every block of a shape that the whole is cut into evenly, with its start."""
    if len(shape) != whole.ndim or any(n == 0 or size % n for size, n in zip(whole.shape, shape, strict=True)):
        return
    for place in product(*(range(0, size, n) for size, n in zip(whole.shape, shape, strict=True))):
        yield place, whole[tuple(slice(a, a + n) for a, n in zip(place, shape, strict=True))]


def nearest(row: np.ndarray, samples: Sequence[np.ndarray], hint: Match | None, scale: float) -> Match | None:
    """The block of the reference's samples that is nearest to a row; None if no block has its shape. `hint`: where a row of the same samples
    was found, which is taken if several are as near."""
    matches = [
        Match(row, block, i, start, scale)
        for i, sample in enumerate(samples)
        for start, block in blocks_of(sample, row.shape)
    ]
    if not matches:
        return None
    best = min(matches, key=lambda match: match.error)
    if hint is not None:
        same = next((m for m in matches if (m.sample, m.start) == (hint.sample, hint.start)), None)
        if same is not None and same.error <= 2 * best.error:
            return same
    return best
