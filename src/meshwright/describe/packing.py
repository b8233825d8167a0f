"""Documents of different lengths in packed sequences: what attention computes of a sequence, and how far the slowest rank is above the mean.

Documents are joined, cut into sequences of s tokens, and masked from each other. Pieces of l₁, l₂, … tokens attend to Σ lᵢ²/2 pairs instead of s²/2,
as if the sequence had Σ lᵢ²/s tokens. A sequence with one long document costs more than one with many short ones: over n sequences a rank's
work varies by their deviation times √n, and the step takes as long as the slowest of the data-parallel ranks (the expected largest of as many
normal numbers).

A document of l tokens is cut every s tokens from a random place on, so that the squares of its pieces sum to l²(1 − l/3s), or to sl − s²/3 if l > s.
The deviation is that of many sequences of documents in random order, always the same one.
"""

from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

SEQUENCES, DRAWS = 4096, 1 << 17  # that are drawn at most, and documents
MANY = 2_000  # documents in a sequence above which all sequences have the same work


class PackedSequence(NamedTuple):
    """Tokens of a sequence without masks with the same work of attention, and the standard deviation of that work over its mean."""

    attended: float
    deviation: float


@lru_cache(maxsize=64)
def packed(lengths: tuple[int, ...], seq: int) -> PackedSequence:
    """The work of attention in sequences of `seq` tokens packed from documents of these lengths."""
    if not lengths:
        return PackedSequence(float(seq), 0.0)
    documents = np.array(lengths, float)
    short = np.minimum(documents, seq)
    squares = np.where(documents < seq, short**2 * (1 - short / (3 * seq)), seq * documents - seq**2 / 3)
    attended, mean = float(squares.sum() / documents.sum()), float(documents.mean())
    if seq > MANY * mean:
        return PackedSequence(attended, 0.0)
    count = max(2, min(SEQUENCES, int(DRAWS * mean / seq)))
    ends = np.cumsum(np.random.default_rng(0).choice(np.array(lengths), int(2 * count * seq / mean) + len(lengths)))
    # Ends of documents and of sequences
    edges = np.union1d(ends[ends < count * seq], np.arange(seq, count * seq + 1, seq))
    work = np.bincount((edges - 1) // seq, np.diff(edges, prepend=0).astype(float) ** 2, count)
    return PackedSequence(attended, float(work.std() / work.mean()))


def slowest(deviation: float, ranks: Sequence[float] | np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """Work of the slowest of `ranks`, each with so many sequences, over the mean."""
    largest = np.array([NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0 for n in ranks])
    return 1 + largest * deviation / np.sqrt(np.maximum(sequences, 1.0))
