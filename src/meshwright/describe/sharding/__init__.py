"""The sharding table: for every parameter of a model, which rank holds which box of it, which ranks hold copies, and which ranks sum its gradient.

It is built in three steps, one file each, and every other room reads it instead of restating a part of it:

    parameters   the named tensors of a model in the order the network registers them, each with a *style*
    rules        style → which dimension is cut over which axis, and over which axis the gradient is a partial sum
                 and how ZeRO cuts, pads and sends what tensor and expert parallelism left
    boxes        all of it for one rank: the `Box` of each parameter, and which rank computes Muon's update of a matrix that several hold

The rules are data, and the functions that evaluate them take Python integers (one rank) or numpy arrays (a batch of plans):

    boxes(model, plan, layout, rank, layers)          one rank: start and stop per dimension, copies, partial sums, ZeRO shard
    local_shape(style, shape, degrees)                any number of plans: the box of the first rank of each group, which is the fullest
"""

from meshwright.describe.module_names import PROJECT, TOKENS
from meshwright.describe.sharding.boxes import (
    Box,
    Cut,
    Matrix,
    ZeroShard,
    boxes,
    degrees_of,
    matrices,
    newton_schulz_flops,
)
from meshwright.describe.sharding.parameters import (
    Parameter,
    block_parameters,
    module_styles,
    parameters,
    tied_copy,
)
from meshwright.describe.sharding.rules import (
    DATA_AXES,
    KV_COPIES,
    RULES,
    DataAxes,
    Degrees,
    ShardingRule,
    compressible,
    even_range,
    local_shape,
    padding,
    partial_over,
    rule_of,
    shape_in_transit,
    shard_dim,
    shard_range,
    share,
)

__all__ = [
    "DATA_AXES",
    "KV_COPIES",
    "PROJECT",
    "RULES",
    "TOKENS",
    "Box",
    "Cut",
    "DataAxes",
    "Degrees",
    "Matrix",
    "Parameter",
    "ShardingRule",
    "ZeroShard",
    "block_parameters",
    "boxes",
    "compressible",
    "degrees_of",
    "even_range",
    "local_shape",
    "matrices",
    "module_styles",
    "newton_schulz_flops",
    "padding",
    "parameters",
    "partial_over",
    "rule_of",
    "shape_in_transit",
    "shard_dim",
    "shard_range",
    "share",
    "tied_copy",
]
