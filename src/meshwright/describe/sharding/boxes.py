"""One rank's part of every parameter: a box of the full tensor, who holds copies of it, and how ZeRO shards it.

Tensor and expert parallelism cut ranges of dimensions (`rules`), ZeRO then cuts a range of rows or columns of what is left (`zero`), so
that a rank always holds a box: `start` and `shape` before ZeRO, `local_start` and `local_shape` after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding.parameters import PROJECT, TOKENS, Parameter, parameters
from meshwright.describe.sharding.rules import (
    DATA_AXES,
    KV_COPIES,
    Degrees,
    Rule,
    even_range,
    local_shape,
    partial_over,
    rule_of,
)
from meshwright.describe.sharding.zero import padding, shape_in_transit, shard_range


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
    box = Box(p, _start(rule, p.shape, d, index), shape, (), True, partial, learns, tied, later_stage=later)
    return place(box, rule, layout, index, d.kv_copies)


def place(box: Box, rule: Rule, layout: Layout, index: Mapping[str, int], kv_copies: int, whole: bool = False) -> Box:
    """The box with its ZeRO shard, unless ZeRO leaves it `whole`, and with the axes whose ranks hold copies."""
    zero = None if whole else _zero_shard(rule, box.shape, layout, index)
    copies = tuple(
        a for a in _copy_axes(rule, zero, layout.plan) if (kv_copies if a == KV_COPIES else layout.size(a)) > 1
    )
    first = not box.later_stage and all(index[axis] == 0 for axis in copies)
    return replace(box, zero=zero, copies=copies, first_copy=first)


def _start(rule: Rule, shape: tuple[int, ...], d: Degrees, index: Mapping[str, int]) -> tuple[int, ...]:
    start = [0] * len(shape)
    for dim, axis in rule.cuts:
        copies = d.kv_copies if rule.partial == KV_COPIES else 1
        start[dim] = even_range(shape[dim], getattr(d, axis) // copies, index[axis] // copies)[0]
    return tuple(start)


def _zero_shard(rule: Rule, shape: tuple[int, ...], layout: Layout, index: Mapping[str, int]) -> ZeroShard | None:
    """Experts are sharded only where a shard group holds several copies of one."""
    axis = DATA_AXES[rule.group].shard
    parts = layout.size(axis)
    if layout.plan.zero == 0 or layout.size("shard_cp") == 1 or parts == 1:
        return None
    return ZeroShard(axis, parts, *shard_range(shape, parts, index[axis]))


def _copy_axes(rule: Rule, zero: ZeroShard | None, plan: Plan) -> list[str]:
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
