"""The rules of tensor and expert parallelism: what each style does to a parameter.

    style               cut                      gradient is a partial sum over          example
    column              dim 0 over tp            —                                       q, gate, up; biases with them
    per-head            dim 0 over tp            —                                       attention sinks
    keys                dim 0 over tp, by whole  kv_copies: neighbours on tp that hold   k, v
                        KV heads                 the same head, if heads < tp
    row                 dim 1 over tp            —                                       o, down
    row-bias            —                        tp, with sequence parallelism           bias of o, down
    vocabulary, logits  dim 0 over tp, uneven    —                                       token embedding, output projection
    between, positions  —                        tp, with sequence parallelism           norms, learned positions
    inside              —                        tp, always                              router, norms of heads
    experts             dim 0 over ep, dim 1     —                                       gate, up of experts
                        over expert_tp
    experts-row         dim 0 over ep, dim 2     —                                       down of experts
                        over expert_tp
    experts-row-bias    dim 0 over ep            expert_tp                               bias of down of experts
    experts-inside      dim 0 over ep            expert_tp                               A of an adapter of gate and up, B of one of down

A parameter *between* the tensor-parallel regions is whole on every rank, and with sequence parallelism each rank sees a part of the
tokens only, so that its gradient is a partial sum. One *inside* a region sees this rank's heads or tokens always. In the all-gather
form of tensor parallelism (`plan.tp_form`) a row-split product is split by columns as well, its bias with it.

A cut is even, except of the vocabulary: of n rows over P ranks the first n mod P ranks hold one more. Rank i therefore holds
⌈(n − i)/P⌉ rows, and rank 0 is the fullest; the same formula serves integers and arrays.

After the backward pass the gradients of dense parameters are summed over dp_cp, those of experts over expert_dp (`DATA_AXES`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Number = Any  # an integer, or a numpy array over a batch of plans
KV_COPIES = "kv_copies"


@dataclass(frozen=True)
class ShardingRule:
    """The effect of one style: (dimension, axis) cuts, and the axis over which the gradient is a partial sum."""

    cuts: tuple[tuple[int, str], ...] = ()
    even: bool = True  # the length must divide; else the first ranks hold one row more
    partial: str = ""
    partial_needs_sp: bool = False  # a partial sum only with sequence parallelism
    all_gather: str = ""  # the style that takes its place in the all-gather form of tensor parallelism
    group: str = "dense"  # which of `DATA_AXES` hold copies and sum the gradient


ROWS_OVER_TP = ((0, "tp"),)
RULES: dict[str, ShardingRule] = {
    "column": ShardingRule(ROWS_OVER_TP),
    "per-head": ShardingRule(ROWS_OVER_TP),
    "keys": ShardingRule(ROWS_OVER_TP, partial=KV_COPIES),
    "row": ShardingRule(((1, "tp"),), all_gather="column"),
    "row-bias": ShardingRule(partial="tp", partial_needs_sp=True, all_gather="column"),
    "vocabulary": ShardingRule(ROWS_OVER_TP, even=False),
    "logits": ShardingRule(ROWS_OVER_TP, even=False),
    "between": ShardingRule(partial="tp", partial_needs_sp=True),
    "positions": ShardingRule(partial="tp", partial_needs_sp=True),
    "inside": ShardingRule(partial="tp"),
    "experts": ShardingRule(((0, "ep"), (1, "expert_tp")), group="expert"),
    "experts-row": ShardingRule(((0, "ep"), (2, "expert_tp")), group="expert"),
    "experts-inside": ShardingRule(((0, "ep"),), partial="expert_tp", group="expert"),
    "experts-row-bias": ShardingRule(((0, "ep"),), partial="expert_tp", group="expert"),
}


class DataAxes(NamedTuple):
    """The axes of data parallelism for one group of parameters: all its copies, ZeRO's shards among them, copies of one shard."""

    whole: str
    shard: str
    replicas: str


DATA_AXES = {
    "dense": DataAxes("dp_cp", "shard_cp", "replicate"),
    "expert": DataAxes("expert_dp", "expert_shard", "expert_replicate"),
}


class Degrees(NamedTuple):
    """The fields of a plan, or of a batch of plans, that the rules read: group sizes, and two switches of tensor parallelism."""

    tp: Number = 1
    ep: Number = 1
    expert_tp: Number = 1
    kv_copies: Number = 1
    sp: Number = False
    all_gather: Number = False


def local_shape(style: str, shape: Sequence[int], d: Degrees, index: Mapping[str, int] | None = None) -> list[Number]:
    """The shape of a rank's box, before ZeRO. `index` is the rank's place in its groups; by default the first, which is the fullest."""
    rule = RULES[style]
    out = _cut(rule, shape, d, index or {})
    if rule.all_gather and np.count_nonzero(d.all_gather):
        by_columns = _cut(RULES[rule.all_gather], shape, d, index or {})
        out = [_where(d.all_gather, a, b) for a, b in zip(by_columns, out, strict=True)]
    return out


def _cut(rule: ShardingRule, shape: Sequence[int], d: Degrees, index: Mapping[str, int]) -> list[Number]:
    out: list[Number] = list(shape)
    for dim, axis in rule.cuts:
        parts, at = getattr(d, axis), index.get(axis, 0)
        if rule.partial == KV_COPIES:
            parts, at = parts // d.kv_copies, at // d.kv_copies
        out[dim] = share(shape[dim], parts, at)
    return out


def rule_of(style: str, all_gather: bool) -> ShardingRule:
    """The rule of one plan, whose form of tensor parallelism is known."""
    rule = RULES[style]
    return RULES[rule.all_gather] if all_gather and rule.all_gather else rule


def partial_over(style: str, d: Degrees) -> dict[str, Number]:
    """Axis → whether the gradient is a partial sum over it. At most one axis."""
    rule = RULES[style]
    if not rule.partial:
        return {}
    on = getattr(d, rule.partial) > 1
    on = on & d.sp if rule.partial_needs_sp else on
    return {rule.partial: _and_not(on, d.all_gather) if rule.all_gather else on}


def compressible(style: str, d: Degrees) -> Number:
    """Whether a lossy compression may send the gradient.

    Not if it is still a partial sum over another axis: terms that cancel would be lost. And not if all
    ranks of a tp group hold the same parameter: each would lose another part, and the copies would diverge.
    """
    rule = RULES[style]
    on = next(iter(partial_over(style, d).values()), False)
    if rule.group == "dense" and not rule.cuts:
        same = d.tp > 1
        on = on | (_and_not(same, d.all_gather) if rule.all_gather else same)
    return ~on if isinstance(on, np.ndarray) else not on


def share(length: Number, parts: Number, index: int = 0) -> Number:
    """Number of the `length` rows that the index-th of `parts` ranks holds, as evenly as possible: ⌈(length − index)/parts⌉."""
    if isinstance(parts, np.ndarray) or isinstance(length, np.ndarray):
        return np.ceil((length - index) / parts)
    return -(-(length - index) // parts)


def even_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """First and last+1 row of the index-th of `parts` ranks: the first `length mod parts` hold one row more."""
    base, extra = divmod(length, parts)
    start = index * base + min(index, extra)
    return start, start + share(length, parts, index)


def _where(condition: Number, a: Number, b: Number) -> Number:
    return np.where(condition, a, b) if isinstance(condition, np.ndarray) else a if condition else b


def _and_not(a: Number, b: Number) -> Number:
    return a & ~b if isinstance(b, np.ndarray) else a & (not b)


# --- How ZeRO shards one parameter over P ranks, after tensor and expert parallelism have cut it.
#
# The first dimension is cut: ⌈rows/P⌉ rows per rank, the last ranks hold fewer or none, and every rank's part is padded to ⌈rows/P⌉
# rows when it is gathered or reduced. A tensor with fewer rows than ranks (few experts over many ranks) would be mostly padding, and the
# first ranks would hold all of it: there the second dimension is cut, if it divides by P (`shard_dim`). Then nothing is padded, and the
# P parts are stacked along rows for sending (`shape_in_transit`).
#
# All functions take integers, or numpy arrays over a batch of plans.


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
