"""Which communication of tensor and context parallelism runs beside compute, and beside how much of it."""

import numpy as np

from meshwright.cost.collective import CollectiveTimes
from meshwright.describe.cluster import Cluster
from meshwright.describe.stack import Stack
from meshwright.lower.program import Array, Batch, Op


def axis_overlap(b: Batch, axis: str, cluster: Cluster) -> Array:
    """1 where the communication of an axis overlaps with compute (`PlanFields.overlapped`)."""
    if axis != "tp" or not b.stack.overlap_in_pieces:
        return b.overlap[axis]
    return np.where(b.stack_overlap & (b.tp > cluster.node_size), 0.0, b.overlap[axis])


def in_pieces(b: Batch, network: CollectiveTimes, ops: list[Op], products: dict[str, Array]) -> Array:
    """Seconds of the collectives that run piece by piece beside the product of their layer, each at most as long as it: of tp pieces the first has
    nothing to run beside."""
    hidden: Array = 0.0
    for op in ops:
        if op.axis == "tp" and op.product in products and (b.stack.overlap_sums or not sums_products(op)):
            beside = (1 - 1 / b.tp) * b.stack.hides * products[op.product]
            hidden = hidden + np.minimum(op.count * network.time(op), beside)
    return hidden


def sums_products(op: Op) -> bool:
    """Whether a collective reduces the sum of several products: the gradient of the input of q, k and v, or of gate and up."""
    return op.product.endswith("-dgrad") and not op.own_shard


def behind_products(b: Batch, network: CollectiveTimes, ops: list[Op], products: dict[str, Array]) -> Array:
    """Seconds of the collectives of linear layers that run behind one product of their layer (`Stack.async_linears`), each at most as long as
    it. Backward of a column layer has two products of equal size and up to two collectives, the gather of the input and the reduction of its
    gradient: each runs behind the other one's product, and counts here with the product of its phase."""
    hidden: Array = 0.0
    for op in ops:
        if op.product not in products or (op.own_shard and not reads_own_shard(b.stack, op)):
            continue
        longest = products[op.product] / (b.tp if op.own_shard else 1.0)
        hidden = hidden + np.minimum(op.count * network.time(op), longest)
    return hidden


def reads_own_shard(stack: Stack, op: Op) -> bool:
    """Whether a product starts with the rank's own shard of what this collective gathers."""
    return op.own_shard and op.collective == "all_gather" and stack.async_linears == "own-shard"


def split_launches(b: Batch) -> Array:
    """Launches that a product takes more where the rank's own shard is multiplied first: the shards before it, and those after it."""
    return np.minimum(b.tp, 3.0) - 1.0
