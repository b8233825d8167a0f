"""The groups of ranks of an axis: their shapes, and the bandwidth that a device gets between nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshwright.describe.cluster import Cluster
from meshwright.lower.program import Column

LARGEST_TABLE = 2**20  # entries of the lookup table of shapes; with more keys, sorting finds the shapes


class Group(NamedTuple):
    """The distinct group shapes of an axis: P ranks on N nodes, g per node, and the bytes/s of a device between nodes, while all devices send
    (`outside`) and in a ring or tree (`ring_outside`). `of_plan` is the index of the shape of each plan of the batch."""

    ranks: Column
    per_node: Column
    nodes: Column
    outside: Column
    ring_outside: Column
    of_plan: Column

    @classmethod
    def of(
        cls, ranks: Column, per_node: Column, level: Column, rates: list[float], ring_rates: Column | None = None
    ) -> Group:
        """Find the distinct shapes. Many plans share a shape, so constants are computed per shape and looked up per plan.

        `level` is the highest level above the node that the groups of each plan span; `rates` are the bytes/s of a device at these levels.
        `ring_rates` are the bytes/s of a device in a ring, by plan, where they are not those of the level.
        """
        if ring_rates is not None:
            return cls._of_rings(ranks, per_node, level, rates, ring_rates)
        key = ((ranks * (np.floor(per_node.max()) + 1) + per_node) * len(rates) + level).astype(np.int64)
        if key.max() < LARGEST_TABLE and all((np.floor(x) == x).all() for x in (ranks, per_node)):
            first = np.full(int(key.max()) + 1, -1)  # for each key, the index of a plan with this key
            first[key] = np.arange(len(key))
            levels = np.flatnonzero(first >= 0)
            shape_index = np.empty_like(first)
            shape_index[levels] = np.arange(len(levels))
            first, of_plan = first[levels], shape_index[key]
        else:
            columns = np.stack(np.broadcast_arrays(ranks, per_node, level))
            _, first, of_plan = np.unique(columns, axis=1, return_index=True, return_inverse=True)
            of_plan = of_plan.ravel()
        ranks, per_node = ranks[first], per_node[first]
        outside = np.array(rates)[np.broadcast_to(level, key.shape)[first]]
        return cls(ranks, per_node, ranks / per_node, outside, outside, of_plan)

    @classmethod
    def _of_rings(cls, ranks: Column, per_node: Column, level: Column, rates: list[float], ring_rates: Column) -> Group:
        columns = np.stack(np.broadcast_arrays(ranks, per_node, np.array(rates)[level], ring_rates))
        rings, of_plan = np.unique(columns, axis=1, return_inverse=True)
        return cls(rings[0], rings[1], rings[0] / rings[1], rings[2], rings[3], of_plan.ravel())


def ring_rates(cluster: Cluster, size: Column, per_node: Column, members: Callable[[int], Column]) -> Column | None:
    """Bytes/s of a device between nodes in a ring or tree; None if no level is slower than the one below it.

    A ring visits every unit of a level once. Of the m ranks of a group in a unit, g on each node, only the g cards of one node send to another
    unit. So the uplinks of a level, of which each device gets B_k while all send, leave B_k·m/g to each card: min(B₁, B_k·m/g). `members` are
    the ranks of a group in a unit of this many devices.
    """
    rates = [cluster.device_bandwidth(k) for k in range(1, len(cluster.levels))]
    if len(set(rates)) < 2:
        return None
    out = np.full(np.shape(size), rates[0])
    for rate, span in zip(rates[1:], cluster.spans[1:], strict=False):
        inside = members(span)
        out = np.where(inside < size, np.minimum(out, rate * inside / per_node), out)
    return out
