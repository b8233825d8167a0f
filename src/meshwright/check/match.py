"""Find each activation of a rank in those of another run: nobody says which samples, positions or features a rank computes.

Rows are matched by their content. A rank's output [b, s, f] is cut into samples along its batch dimension, and each must be one of the
samples that the reference computed in the same module, or a block of one: a part of the sequence (sequence and context parallelism) or
of the features (tensor parallelism). Of all blocks the nearest is taken; how far it is away is the error of the row.

    rank 1, layers.0.up [1, 32, 128]    →    reference, layers.0.up [4, 32, 256]: sample 1, features 128 to 255
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.proof.parts import RecordedValue

UNLIKE = 0.01  # of a row that was computed of other values, not rounded


@dataclass(frozen=True)
class Match:
    """A row of a rank, and the block of the reference that is nearest to it."""

    got: np.ndarray
    expected: np.ndarray
    sample: int
    start: tuple[int, ...]
    scale: float  # the factor between the two runs that is right: of gradients before the reduction
    parts: int = 1  # of the features, each of which is cut over the ranks: a gate and what it gates in one matrix

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


def nearest(row: np.ndarray, samples: Sequence[np.ndarray], hint: Match | None, scale: float) -> Match | None:
    """The block of the reference's samples that is nearest to a row; None if no block has its shape. `hint`: where a row of the same samples
    was found, which is taken if several are as near."""
    best = nearest_block(row, samples, hint, scale)
    if best is None or best.error < UNLIKE or row.shape[-1:] == samples[best.sample].shape[-1:]:
        return best
    two = nearest_block(row, [by_rank(sample, row.shape[-1], 2) for sample in samples], hint, scale)
    return best if two is None or best.error <= two.error else replace(two, parts=2)


def by_rank(sample: np.ndarray, features: int, parts: int) -> np.ndarray:
    """A sample whose features are in parts that are each cut over the ranks, with the features of each rank side by side."""
    ranks, rest = divmod(sample.shape[-1], features) if features else (0, 1)
    if rest or features % parts:
        return sample
    shape = sample.shape[:-1]
    return np.swapaxes(sample.reshape(*shape, parts, ranks, features // parts), -3, -2).reshape(sample.shape)


def nearest_block(row: np.ndarray, samples: Sequence[np.ndarray], hint: Match | None, scale: float) -> Match | None:
    best: Match | None = None
    for shape in dict.fromkeys(sample.shape for sample in samples):
        if len(shape) != row.ndim or any(n == 0 or size % n for size, n in zip(shape, row.shape, strict=True)):
            continue
        numbers = [i for i, sample in enumerate(samples) if sample.shape == shape]
        errors = errors_of_blocks(row / scale, np.stack([samples[i] for i in numbers]))
        at = np.unravel_index(int(errors.argmin()), errors.shape)
        error = float(errors[at])
        if hint is not None and hint.sample in numbers and len(hint.start) == row.ndim:
            here = numbers.index(hint.sample), *(a // n for a, n in zip(hint.start, row.shape, strict=True))
            if all(i < n for i, n in zip(here, errors.shape, strict=True)) and errors[here] <= 2 * error:
                at = here
        if best is None or error < best.error:
            start = tuple(int(i) * n for i, n in zip(at[1:], row.shape, strict=True))
            block = samples[numbers[at[0]]][tuple(slice(a, a + n) for a, n in zip(start, row.shape, strict=True))]
            best = Match(row, block, numbers[at[0]], start, scale)
    return best


def errors_of_blocks(row: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """How far a row is from every block of its shape that samples of one shape are cut into evenly: [sample, block along each dimension]."""
    sizes = [(size // n, n) for size, n in zip(samples.shape[1:], row.shape, strict=True)]
    blocks = samples.reshape(len(samples), *(n for pair in sizes for n in pair))
    inner = tuple(range(2, 2 * row.ndim + 1, 2))  # the dimensions inside of a block
    spread = row.reshape([n for size in row.shape for n in (1, size)])
    far = np.abs(blocks - spread).max(axis=inner, initial=0.0)
    return np.asarray(far / np.maximum(np.abs(blocks).max(axis=inner, initial=0.0), 1e-300))
