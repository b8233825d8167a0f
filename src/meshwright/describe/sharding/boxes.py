"""One rank's part of every parameter: a box of the full tensor, who holds copies of it, and how ZeRO shards it.

Tensor and expert parallelism cut ranges of dimensions (`rules`), ZeRO then cuts a range of rows or columns of what is left (`rules`), so
that a rank always holds a box: `start` and `shape` before ZeRO, `local_start` and `local_shape` after it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.module_names import PROJECT, TOKENS
from meshwright.describe.plan import Plan
from meshwright.describe.sharding.parameters import Parameter, parameters
from meshwright.describe.sharding.rules import (
    DATA_AXES,
    KV_COPIES,
    Degrees,
    ShardingRule,
    even_range,
    local_shape,
    padding,
    partial_over,
    rule_of,
    shape_in_transit,
    shard_range,
)


@dataclass(frozen=True)
class ZeroShard:
    """A ZeRO shard of a box: the axis, the dimension, and this rank's rows, counted from the start of the box."""

    axis: str
    parts: int
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Box:
    """One rank's part of a parameter."""

    parameter: Parameter
    start: tuple[int, ...]  # in the full tensor, before ZeRO
    shape: tuple[int, ...]  # before ZeRO
    copies: tuple[str, ...]  # axes (of more than one rank) whose ranks hold the same elements, after ZeRO
    first_copy: bool  # this rank is the first of all that hold the same elements: a norm counts it once
    partial: str = ""  # axis over which the gradient is a partial sum after data parallelism has reduced it
    learns: bool = True
    tied: bool = False  # one of the two copies of a tied embedding on different pipeline stages
    zero: ZeroShard | None = None
    later_stage: bool = False  # an earlier pipeline stage holds it too: that one counts and saves it

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def source(self) -> str:
        """Name of the parameter in the unsharded model; a tied head's copy has the embedding's name."""
        return TOKENS if self.tied else self.name

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.parameter.shape

    @property
    def expert(self) -> bool:
        return self.parameter.expert

    @property
    def group(self) -> str:
        """dense or expert: the key of `DATA_AXES`."""
        return "expert" if self.expert else "dense"

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @cached_property
    def size(self) -> int:
        """Elements before ZeRO."""
        return math.prod(self.shape)

    @property
    def compressible(self) -> bool:
        """Whether a lossy compression may send its gradient (`rules.compressible`)."""
        return not self.partial and "tp" not in self.copies

    @cached_property
    def padded_size(self) -> int:
        """Elements of all ZeRO shards of the box together."""
        return self.size + (padding(self.shape, self.zero.parts) if self.zero else 0)

    @property
    def shape_in_transit(self) -> tuple[int, ...]:
        return shape_in_transit(self.shape, self.zero.parts) if self.zero else self.shape

    @property
    def local_start(self) -> tuple[int, ...]:
        """After ZeRO."""
        z = self.zero
        return self.start if z is None else tuple(a + (z.start if d == z.dim else 0) for d, a in enumerate(self.start))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """After ZeRO."""
        z = self.zero
        return (
            self.shape if z is None else tuple(z.stop - z.start if d == z.dim else n for d, n in enumerate(self.shape))
        )

    @property
    def local_size(self) -> int:
        return math.prod(self.local_shape)


def degrees_of(model: Model, plan: Plan) -> Degrees:
    """The group sizes of one plan, as the rules read them."""
    copies = max(1, plan.tp // model.kv_groups) if model.kind == "transformer" else 1
    return Degrees(plan.tp, plan.ep, plan.etp, copies, plan.sp, plan.tp_form == "all-gather")


def boxes(
    model: Model, plan: Plan, layout: Layout, rank: int, layers: range, frozen: frozenset[str] = frozenset()
) -> list[Box]:
    """This rank's box of every parameter of the stage that holds `layers`; parameters named in `frozen` do not learn."""
    d = degrees_of(model, plan)
    index = indices(layout, rank, d.kv_copies, bool(model.experts))
    whole_model = layers.start == 0 and layers.stop == model.layers
    return [
        _box(p, d, layout, index, model.tied and not whole_model and p.name in (TOKENS, PROJECT), frozen)
        for p in parameters(model, layers)
    ]


def _box(p: Parameter, d: Degrees, layout: Layout, index: Mapping[str, int], tied: bool, frozen: frozenset[str]) -> Box:
    rule = rule_of(p.style, d.all_gather)
    shape = tuple(local_shape(p.style, p.shape, d, index))
    learns = p.learns and p.name not in frozen and not (tied and TOKENS in frozen)
    partial = next((axis for axis, on in partial_over(p.style, d).items() if on), "") if learns else ""
    later = tied and p.name == PROJECT
    whole = p.frozen and layout.plan.zero < 3  # only gradients and states are sharded, and it has none
    box = Box(p, _start(rule, p.shape, d, index), shape, (), True, partial, learns, tied, later_stage=later)
    return place(box, rule, layout, index, d.kv_copies, whole)


def place(
    box: Box, rule: ShardingRule, layout: Layout, index: Mapping[str, int], kv_copies: int, whole: bool = False
) -> Box:
    """The box with its ZeRO shard, unless ZeRO leaves it `whole`, and with the axes whose ranks hold copies."""
    zero = None if whole else _zero_shard(rule, box.shape, layout, index)
    copies = tuple(
        a for a in _copy_axes(rule, zero, layout.plan) if (kv_copies if a == KV_COPIES else layout.size(a)) > 1
    )
    first = not box.later_stage and all(index[axis] == 0 for axis in copies)
    return replace(box, zero=zero, copies=copies, first_copy=first)


def _start(rule: ShardingRule, shape: tuple[int, ...], d: Degrees, index: Mapping[str, int]) -> tuple[int, ...]:
    start = [0] * len(shape)
    for dim, axis in rule.cuts:
        copies = d.kv_copies if rule.partial == KV_COPIES else 1
        start[dim] = even_range(shape[dim], getattr(d, axis) // copies, index[axis] // copies)[0]
    return tuple(start)


def _zero_shard(
    rule: ShardingRule, shape: tuple[int, ...], layout: Layout, index: Mapping[str, int]
) -> ZeroShard | None:
    """Experts are sharded only where a shard group holds several copies of one."""
    axis = DATA_AXES[rule.group].shard
    parts = layout.size(axis)
    if layout.plan.zero == 0 or layout.size("shard_cp") == 1 or parts == 1:
        return None
    return ZeroShard(axis, parts, *shard_range(shape, parts, index[axis]))


def _copy_axes(rule: ShardingRule, zero: ZeroShard | None, plan: Plan) -> list[str]:
    """The axes whose ranks hold the same elements; replicas that train alone between averages (local SGD) do not."""
    cut_over = {axis for _, axis in rule.cuts}
    if rule.group == "expert":
        inner = [] if "expert_tp" in cut_over else ["expert_tp"]
        return [*inner, "expert_replicate" if zero else "expert_dp"]
    inner = [KV_COPIES] if rule.partial == KV_COPIES else [] if "tp" in cut_over else ["tp"]
    data = [] if zero else ["cp", "shard"]
    return [*inner, *data, *([] if plan.average_every else ["replicate"])]


def indices(layout: Layout, rank: int, kv_copies: int, experts: bool) -> dict[str, int]:
    """The rank's place in its group of every axis that the rules name."""
    out = dict(layout.coordinates(rank))
    axes = [
        "shard_cp",
        *(["ep", "expert_tp", "expert_dp", "expert_shard", "expert_replicate"] if experts else []),
    ]
    out |= {axis: layout.group_of(axis, rank).index(rank) for axis in axes}
    out[KV_COPIES] = out["tp"] % kv_copies
    return out


# --- Which rank computes Muon's update of which matrix.
#
# Muon's update is a function of a whole matrix, and under tensor parallelism and ZeRO each rank holds a box of it. The ranks that hold one
# matrix divide the matrices among them, so that each matrix is computed once:
#
#     there    every rank sends its box of each matrix to the *owner* of the matrix: one all-to-all over the ZeRO axis, then one over the
#              tensor-parallel axis
#     update   the owner computes the update of the whole matrix
#     back     the owner returns to every rank its box of the update: the same two, in reverse
#
# Gathering every matrix on every rank instead would send P times the bytes and compute P times as much. Ranks that hold copies (data parallel
# replicas without ZeRO, context parallelism) compute the same update each, and send nothing.
#
# A stack of experts [expert, out, in] is several matrices. Cut over ep, or by ZeRO between experts, each of them is whole where it is.
#
# The heaviest matrix is assigned first, each to the rank with the least work so far (`assign`). Where a matrix is cut over one axis only, the
# ranks of the other axis do the same work.
#
# The update runs in **rounds** (`in_rounds`), so that messages overlap with products: while the owners compute the matrices of one round, the
# boxes of the next round travel there and those of the round before travel back. In a round each rank computes at most `ROUND` elements,
# or one larger matrix: enough that messages are long and that matrices of equal shape fill a GPU together. Matrices that are whole
# everywhere come last: their products hide the last messages.

NEWTON_SCHULZ_STEPS = 5
ROUND = 2**24  # elements of the matrices that a rank computes together
TENSOR_AXES = {"dense": "tp", "expert": "expert_tp"}


class Cut(NamedTuple):
    """A dimension of a matrix that is cut over an axis: (start, stop) of each rank of the axis. Ranks that hold copies have equal ranges."""

    axis: str
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return max(stop for _, stop in self.ranges)


@dataclass(frozen=True)
class Matrix:
    """A matrix (or a stack of experts' matrices) that Muon updates: how it is cut, ZeRO's cut first, the index of its owner on the axis
    of each cut, and in which round of the update it is computed."""

    box: Box
    cuts: tuple[Cut, ...]
    owner: tuple[int, ...] = ()
    round: int = 0

    def cut_over(self, axis: str) -> Cut | None:
        return next((cut for cut in self.cuts if cut.axis == axis), None)

    def owner_on(self, axis: str) -> int:
        return next(index for cut, index in zip(self.cuts, self.owner, strict=True) if cut.axis == axis)


def newton_schulz_flops(rows: float, columns: float) -> float:
    """FLOPs of the orthogonalisation of one matrix: per step two products with the short side s and the long side l, X·Xᵀ and B·X, and one
    of s × s with s × s: 4s²l + 2s³."""
    short, long = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4.0 * short**2 * long + 2.0 * short**3)


def matrices(boxes: Sequence[Box], d: Degrees) -> list[Matrix]:
    """The matrices of a rank that Muon updates, with their owners and rounds; the same ones on every rank that holds one."""
    all_matrices = [Matrix(box, cuts_of(box, d)) for box in boxes if box.learns and box.parameter.role == "matrix"]
    groups = [(axes_of(group), [i for i, m in enumerate(all_matrices) if m.box.group == group]) for group in DATA_AXES]
    for axes, own in groups:
        for i, owner in zip(own, owners_of([all_matrices[i] for i in own], axes), strict=True):
            all_matrices[i] = replace(all_matrices[i], owner=owner)
    first = 0
    in_order: list[tuple[Sequence[str], list[int]]] = []
    in_order += [(axes, [i for i in own if all_matrices[i].cuts]) for axes, own in groups]
    in_order.append(((), [i for i, m in enumerate(all_matrices) if not m.cuts]))
    for cut_over, some in in_order:
        rounds = in_rounds([all_matrices[i] for i in some], cut_over)
        for i, index in zip(some, rounds, strict=True):
            all_matrices[i] = replace(all_matrices[i], round=first + index)
        first += 1 + max(rounds, default=-1)
    return all_matrices


def axes_of(group: str) -> tuple[str, str]:
    """The axes over which matrices of a group are cut: ZeRO's, and that of tensor parallelism."""
    return DATA_AXES[group].shard, TENSOR_AXES[group]


def sizes_of(group: Sequence[Matrix], axes: Sequence[str]) -> tuple[int, ...]:
    """The ranks of each axis that holds parts of these matrices; 1 for an axis that cuts none of them."""
    return tuple(max((len(cut.ranges) for m in group if (cut := m.cut_over(axis))), default=1) for axis in axes)


def owners_of(group: Sequence[Matrix], axes: Sequence[str]) -> list[tuple[int, ...]]:
    """The owner of each matrix on the axes of its cuts."""
    on_axes = [tuple(m.cut_over(axis) is not None for axis in axes) for m in group]
    owners = assign([work(m.box) for m in group], on_axes, sizes_of(group, axes))
    return [
        tuple(place for place, is_cut in zip(places, on, strict=True) if is_cut)
        for places, on in zip(owners, on_axes, strict=True)
    ]


def in_rounds(group: Sequence[Matrix], axes: Sequence[str]) -> list[int]:
    """The round of each matrix, matrices of equal shape one after the other: no earlier than the rounds of its owners so far, and one in
    which each of them has room for it."""
    last, filled = np.zeros(sizes_of(group, axes), int), np.zeros(sizes_of(group, axes))
    out = [0] * len(group)
    for i in sorted(range(len(group)), key=lambda i: (*group[i].box.full_shape, i)):
        m = group[i]
        at = tuple(m.owner_on(axis) if m.cut_over(axis) else slice(None) for axis in axes)
        size = elements(m.box)
        out[i] = int(np.max(last[at] + ((filled[at] > 0) & (filled[at] + size > ROUND))))
        filled[at] = np.where(last[at] < out[i], 0, filled[at]) + size
        last[at] = out[i]
    return out


def cuts_of(box: Box, d: Degrees) -> tuple[Cut, ...]:
    """Return the cuts of a matrix: by ZeRO, then over the tensor-parallel axis. A cut between the experts of a stack leaves matrices whole."""
    first = len(box.full_shape) - 2
    cuts = []
    zero = box.zero
    if zero is not None and zero.dim >= first:
        ranges = tuple(shard_range(box.shape, zero.parts, i)[1:] for i in range(zero.parts))
        cuts.append(Cut(zero.axis, zero.dim, ranges))
    rule = rule_of(box.parameter.style, bool(d.all_gather))
    copies = d.kv_copies if rule.partial == KV_COPIES else 1
    for dim, axis in rule.cuts:
        parts = getattr(d, axis) // copies
        if dim >= first and parts > 1:
            ranges = tuple(even_range(box.full_shape[dim], parts, i // copies) for i in range(parts * copies))
            cuts.append(Cut(axis, dim, ranges))
    return tuple(cuts)


def work(box: Box) -> float:
    """FLOPs to update the whole matrices of a box. Counted before ZeRO, so that every rank of the ZeRO axis gets the same number."""
    experts = box.shape[0] if len(box.shape) > 2 else 1
    return experts * newton_schulz_flops(*box.full_shape[-2:])


def elements(box: Box) -> int:
    """Elements of a box's whole matrices; before ZeRO, as `work`."""
    return prod(box.shape[:-2]) * prod(box.full_shape[-2:])


def assign(
    works: Sequence[float], on_axes: Sequence[tuple[bool, ...]], sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Assign each matrix an owner: its index on both axes; only the axes over which the matrix is cut matter.

    `load[i, j]` is the work of the rank at place i of the ZeRO axis and place j of the tensor-parallel axis. A matrix that is cut over one
    axis only is computed at all positions of the other."""
    load = np.zeros(sizes)
    out: list[tuple[int, ...]] = [(0, 0)] * len(works)
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        on = on_axes[i]
        seen = load.max(axis=tuple(k for k, is_cut in enumerate(on) if not is_cut), keepdims=True)
        at = tuple(int(k) for k in np.unravel_index(int(seen.argmin()), seen.shape))
        load[tuple(place if is_cut else slice(None) for place, is_cut in zip(at, on, strict=True))] += works[i]
        out[i] = at
    return out
