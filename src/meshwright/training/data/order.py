"""The order of samples: a pure function of the seed and the number of the sample in the whole training.

Sample g = step · batch + index is drawn from a mixture of sources. Both questions, which source and which of its sequences, are
answered by arithmetic on g, without a shuffle buffer, a list of indices or any state. So the order is the same for every number
of ranks, every layout and every restart, and a resumed training needs only its step.

**Which source.** With weights w₁, w₂, … and W = Σ w, the first g samples contain ⌊g·w₁/W⌋ of source 1. Sample g belongs to
source 1 if this number grows from g to g + 1; else it is sample g − ⌊g·w₁/W⌋ of the mixture of the other sources, and the rule
repeats. Any run of consecutive samples is mixed by the weights to within one sample per source.

**Which sequence.** The n-th draw from a source of size N is in epoch ⌊n/N⌋, and its sequence is a permutation of n mod N with a
key from (seed, source, epoch). The permutation is a Feistel network on the smallest power of four that is at least N: a number
is cut into halves, and in each round one half is changed by a hash of the other, which can be undone whatever the hash is. A
result outside 0 … N − 1 is permuted again until it is inside (fewer than four times on average). It needs no memory,
where a shuffled list of indices takes 8 bytes for each sequence on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

ROUNDS = 6
MASK = 2**64 - 1
PRECISION = 2**40  # weights are compared as whole numbers of this precision, so that sums are exact


def mix(x: int) -> int:
    """Mix the 64 bits of a number (the finaliser of SplitMix64)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


@lru_cache(64)
def round_keys(*key: int) -> tuple[int, ...]:
    """The keys of the rounds of one permutation."""
    words = hashlib.blake2b(":".join(map(str, key)).encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(words[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


def permuted(index: int, size: int, *key: int) -> int:
    """The image of `index` under a permutation of 0 … size − 1."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, keys = (1 << half) - 1, round_keys(*key)
    while True:
        left, right = index >> half, index & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        index = left << half | right
        if index < size:
            return index


class Order:
    """Draws from sources of these sizes, mixed by weights. Without `shuffle` the sequences of a source are drawn in file order."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True) -> None:
        self.sizes, self.seed, self.shuffle = list(sizes), seed, shuffle
        total = sum(weights)
        exact = [weight for weight in weights if isinstance(weight, int)]
        scaled = [max(1, round(weight / total * PRECISION)) for weight in weights]
        self.weights = exact if len(exact) == len(weights) else scaled

    def locate(self, sample: int) -> tuple[int, int]:
        """The source of a sample of the training, and how many samples of this source come before it."""
        total = sum(self.weights)
        for source, weight in enumerate(self.weights[:-1]):
            before = sample * weight // total
            if (sample + 1) * weight // total > before:
                return source, before
            sample, total = sample - before, total - weight
        return len(self.weights) - 1, sample

    def draw(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and the number of its sequence in it."""
        source, drawn = self.locate(sample)
        epoch, index = divmod(drawn, self.sizes[source])
        if self.shuffle:
            index = permuted(index, self.sizes[source], self.seed, source, epoch)
        return source, index

    def epochs(self, samples: int) -> list[float]:
        """How often each source was read after this number of samples."""
        drawn = [0] * len(self.sizes)
        total, left = sum(self.weights), samples
        for source, weight in enumerate(self.weights[:-1]):
            drawn[source] = left * weight // total
            left, total = left - drawn[source], total - weight
        drawn[-1] = left
        return [n / size for n, size in zip(drawn, self.sizes, strict=True)]
