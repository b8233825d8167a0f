"""How ZeRO shards one parameter over P ranks, after tensor and expert parallelism have cut it.

The first dimension is cut: ⌈rows/P⌉ rows per rank, the last ranks hold fewer or none, and every rank's part is padded to ⌈rows/P⌉
rows when it is gathered or reduced. A tensor with fewer rows than ranks (few experts over many ranks) would be mostly padding, and the
first ranks would hold all of it: there the second dimension is cut, if it divides by P (`shard_dim`). Then nothing is padded, and the
P parts are stacked along rows for sending (`shape_in_transit`).

All functions take integers, or numpy arrays over a batch of plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshwright.describe.sharding.rules import Number, share


def shard_dim(shape: Sequence[Number], parts: Number) -> Number:
    """The dimension that ZeRO cuts: 0, or 1 where there are fewer rows than ranks and the second dimension divides."""
    if len(shape) < 2:
        return 0
    return ((shape[0] < parts) & (shape[1] % parts == 0)) + 0


def shape_in_transit(shape: Sequence[int], parts: int) -> tuple[int, ...]:
    """The shape as it is sent, cut by rows: parts of the second dimension are stacked along rows."""
    if shard_dim(shape, parts):
        return parts * shape[0], shape[1] // parts, *shape[2:]
    return tuple(shape)


def padding(shape: Sequence[Number], parts: Number) -> Number:
    """Elements added so that all ranks' shards are equally long."""
    missing = share(shape[0], parts) * parts - shape[0]
    if not np.count_nonzero(missing):
        return 0
    return missing * math.prod(shape[1:]) * (shard_dim(shape, parts) == 0)


def shard_range(shape: Sequence[int], parts: int, index: int) -> tuple[int, int, int]:
    """(dimension, start, stop) of the index-th rank's shard."""
    dim = shard_dim(shape, parts)
    each = share(shape[dim], parts)
    return dim, min(index * each, shape[dim]), min((index + 1) * each, shape[dim])
