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

The update runs in **rounds** (`in_rounds`), so that messages overlap with products: while the owners compute the matrices of one round, the
boxes of the next round travel there and those of the round before travel back. In a round each rank computes at most `ROUND` elements,
or one larger matrix: enough that messages are long and that matrices of equal shape fill a GPU together. Matrices that are whole
everywhere come last: their products hide the last messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from meshwright.describe.sharding.boxes import Box
from meshwright.describe.sharding.rules import DATA_AXES, KV_COPIES, Degrees, even_range, rule_of
from meshwright.describe.sharding.zero import shard_range

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
    found = [Matrix(box, cuts_of(box, d)) for box in boxes if box.learns and box.parameter.role == "matrix"]
    groups = [(axes_of(group), [i for i, m in enumerate(found) if m.box.group == group]) for group in DATA_AXES]
    for axes, own in groups:
        for i, owner in zip(own, owners_of([found[i] for i in own], axes), strict=True):
            found[i] = replace(found[i], owner=owner)
    first = 0
    in_order: list[tuple[Sequence[str], list[int]]] = []
    in_order += [(axes, [i for i in own if found[i].cuts]) for axes, own in groups]
    in_order.append(((), [i for i, m in enumerate(found) if not m.cuts]))
    for cut_over, some in in_order:
        rounds = in_rounds([found[i] for i in some], cut_over)
        for i, index in zip(some, rounds, strict=True):
            found[i] = replace(found[i], round=first + index)
        first += 1 + max(rounds, default=-1)
    return found


def axes_of(group: str) -> tuple[str, str]:
    """The axes over which matrices of a group are cut: ZeRO's, and that of tensor parallelism."""
    return DATA_AXES[group].shard, TENSOR_AXES[group]


def sizes_of(found: Sequence[Matrix], axes: Sequence[str]) -> tuple[int, ...]:
    """The ranks of each axis that holds parts of these matrices; 1 for an axis that cuts none of them."""
    return tuple(max((len(cut.ranges) for m in found if (cut := m.cut_over(axis))), default=1) for axis in axes)


def owners_of(found: Sequence[Matrix], axes: Sequence[str]) -> list[tuple[int, ...]]:
    """The owner of each matrix on the axes of its cuts."""
    on_axes = [tuple(m.cut_over(axis) is not None for axis in axes) for m in found]
    owners = assign([work(m.box) for m in found], on_axes, sizes_of(found, axes))
    return [
        tuple(place for place, is_cut in zip(places, on, strict=True) if is_cut)
        for places, on in zip(owners, on_axes, strict=True)
    ]


def in_rounds(found: Sequence[Matrix], axes: Sequence[str]) -> list[int]:
    """The round of each matrix, matrices of equal shape one after the other: no earlier than the rounds of its owners so far, and one in
    which each of them has room for it."""
    last, filled = np.zeros(sizes_of(found, axes), int), np.zeros(sizes_of(found, axes))
    out = [0] * len(found)
    for i in sorted(range(len(found)), key=lambda i: (*found[i].box.full_shape, i)):
        m = found[i]
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
