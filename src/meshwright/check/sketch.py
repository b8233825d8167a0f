"""A few numbers that stand for a tensor which is too large to store: a linear sketch.

Every element of the whole tensor has a bucket and a sign, from its index alone; a sketch is the signed sums of the buckets, in float64. It is linear:
the sketch of a sum is the sum of the sketches, and the sketches of the parts that ranks hold sum to that of the whole. So a factor, a missing sum or
the step before are seen in sketches as in the tensors themselves, and the length of the difference of two sketches is, up to chance, that of
the tensors' difference: an element that is off by d is off by d in one bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BUCKETS = 64
CHUNK = 1 << 22  # elements at a time


def sketch(
    part: torch.Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int], first: int = 0
) -> torch.Tensor:
    """The sketch of a part of a tensor of a shape: of the box at `start`, or of its elements from `first` on."""
    flat = part.detach().reshape(-1)
    out = torch.zeros(BUCKETS, dtype=torch.float64, device=flat.device)
    whole = tuple(size) == tuple(shape)
    for begin in range(0, flat.numel(), CHUNK):
        values = flat[begin : begin + CHUNK]
        index = torch.arange(first + begin, first + begin + values.numel(), device=flat.device)
        if not whole:
            index = index_in_whole(index, shape, start, size)
        mixed = (index * -7046029254386353131) ^ (index >> 17)  # odd: a permutation of the 64-bit integers
        signs = 1.0 - 2.0 * ((mixed >> 61) & 1)
        out.index_add_(0, (mixed >> 40) & (BUCKETS - 1), values.double() * signs)
    return out


def index_in_whole(
    index: torch.Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> torch.Tensor:
    """The flat index in the whole tensor of elements of a box, given by their flat index in it."""
    out, stride = torch.zeros_like(index), 1
    for n, first, length in zip(reversed(shape), reversed(start), reversed(size), strict=True):
        out += (index % length + first) * stride
        index, stride = index // length, stride * n
    return out
