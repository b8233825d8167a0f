"""Which rank computes Muon's update of which matrix.

Muon's update is a function of a whole matrix, and under tensor parallelism and ZeRO each rank holds a box of it. The ranks that hold one
matrix divide the matrices among them, so that each matrix is computed once:

    there    every rank sends its box of each matrix to the *owner* of the matrix: one all-to-all over the ZeRO axis, then one over the
             tensor-parallel axis
    update   the owner computes the update of the whole matrix
    back     the owner returns to every rank its box of the update: the same two, in reverse

Gathering every matrix on every rank instead would send P times the bytes and compute P times as much. Ranks that hold copies (data parallel
replicas without ZeRO, context parallelism) compute the same update each, and send nothing.

A stack of experts [expert, out, in] is several matrices. Cut over ep, or by ZeRO between experts, each of them is whole where it is.

The heaviest matrix is assigned first, each to the rank with the least work so far (`assign`). Where a matrix is cut over one axis only, the
ranks of the other axis do the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from meshwright.describe.sharding.boxes import Box
from meshwright.describe.sharding.rules import DATA_AXES, KV_COPIES, Degrees, even_range, rule_of
from meshwright.describe.sharding.zero import shard_range

NEWTON_SCHULZ_STEPS = 5
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
    """A matrix (or a stack of experts' matrices) that Muon updates: how it is cut, ZeRO's cut first, and the index of its owner on the axis
    of each cut."""

    box: Box
    cuts: tuple[Cut, ...]
    owner: tuple[int, ...] = ()

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
    """The matrices of a rank that Muon updates, with their owners; the same owners on every rank that holds one."""
    found = [Matrix(box, cuts_of(box, d)) for box in boxes if box.learns and box.parameter.role == "matrix"]
    out: dict[int, Matrix] = {}
    for group, (_, shard, _) in DATA_AXES.items():
        own = [(i, m) for i, m in enumerate(found) if m.box.group == group]
        axes = shard, TENSOR_AXES[group]
        sizes = tuple(max((len(c.ranges) for _, m in own if (c := m.cut_over(axis))), default=1) for axis in axes)
        on_axes = [tuple(m.cut_over(axis) is not None for axis in axes) for _, m in own]
        owners = assign([work(m.box) for _, m in own], on_axes, sizes)
        for (i, m), places, on in zip(own, owners, on_axes, strict=True):
            out[i] = replace(m, owner=tuple(place for place, is_cut in zip(places, on, strict=True) if is_cut))
    return [out[i] for i in range(len(found))]


def cuts_of(box: Box, d: Degrees) -> tuple[Cut, ...]:
    """How a matrix is cut: by ZeRO, then over the tensor-parallel axis. A cut between the experts of a stack leaves matrices whole."""
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
    """FLOPs of the update of a box's whole matrices. Before ZeRO: every rank of the ZeRO axis must find the same number."""
    experts = box.shape[0] if len(box.shape) > 2 else 1
    return experts * newton_schulz_flops(*box.full_shape[-2:])


def assign(
    works: Sequence[float], on_axes: Sequence[tuple[bool, ...]], sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The owner of each matrix as its place on both axes, of which only those count on which the matrix is cut.

    `load[i, j]` is the work of the rank at place i of the ZeRO axis and place j of the tensor-parallel axis. A matrix that is cut over one
    axis only is computed at all places of the other."""
    load = np.zeros(sizes)
    out: list[tuple[int, ...]] = [(0, 0)] * len(works)
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        on = on_axes[i]
        seen = load.max(axis=tuple(k for k, is_cut in enumerate(on) if not is_cut), keepdims=True)
        at = tuple(int(k) for k in np.unravel_index(int(seen.argmin()), seen.shape))
        load[tuple(place if is_cut else slice(None) for place, is_cut in zip(at, on, strict=True))] += works[i]
        out[i] = at
    return out
