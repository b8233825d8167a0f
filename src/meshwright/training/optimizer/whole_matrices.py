"""Bring the boxes of a matrix together on the rank that computes its update, and return the boxes of the update.

`describe.sharding.matrices` says how each matrix is cut and who owns it. Here the same table moves tensors: one all-to-all over each axis that
cuts a matrix, for all matrices together, and the same in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import distributed

from meshwright.describe.sharding import DATA_AXES, Cut, Matrix
from meshwright.describe.sharding.matrices import TENSOR_AXES
from meshwright.parallel.mesh import Mesh

AXES = tuple(axis for group, data in DATA_AXES.items() for axis in (data.shard, TENSOR_AXES[group]))
MOST_STACKED = 2**24  # elements of matrices of equal shape that are computed together: larger ones fill a GPU alone
Shape = Sequence[int]


class WholeMatrices:
    """Applies a function of whole matrices, or of stacks of them, to matrices of which each rank holds a box; boxes are sent in `dtype`."""

    def __init__(self, matrices: Sequence[Matrix], mesh: Mesh, dtype: torch.dtype) -> None:
        self.matrices, self.mesh, self.dtype = matrices, mesh, dtype
        self.axes = [axis for axis in AXES if any(m.cut_over(axis) for m in matrices)]

    def apply(self, boxes: list[torch.Tensor], function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """This rank's boxes of function(matrix), given its boxes of each matrix."""
        here, ways = dict(enumerate(boxes)), list[tuple[str, dict[int, Shape]]]()
        for axis in self.axes:
            moving = {i: here.pop(i) for i in list(here) if self.matrices[i].cut_over(axis)}
            ways.append((axis, {i: box.shape for i, box in moving.items()}))
            here |= self._to_owners(axis, moving)
        for same in equal_shapes(here):
            results = function(torch.stack([here[i] for i in same])) if len(same) > 1 else [function(here[same[0]])]
            here |= {i: result.to(self.dtype) for i, result in zip(same, results, strict=True)}
        for axis, shapes in reversed(ways):
            here |= self._to_holders(axis, {i: here.pop(i) for i in shapes if i in here}, shapes)
        return [here[i] for i in range(len(boxes))]

    def _to_owners(self, axis: str, boxes: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Send each box to the owner of its matrix on this axis; returns the matrices that this rank owns, whole along the axis."""
        ranks, own = range(self.mesh.size(axis)), self.mesh.index(axis)
        owner = {i: self.matrices[i].owner_on(axis) for i in boxes}
        mine = {i: self._cut(i, axis) for i in boxes if owner[i] == own}
        arrived = self._exchange(
            axis,
            [[boxes[i] for i in boxes if owner[i] == rank] for rank in ranks],
            [[resized(boxes[i].shape, cut.dim, length(cut, rank)) for i, cut in mine.items()] for rank in ranks],
        )
        out = {i: boxes[i].new_empty(resized(boxes[i].shape, cut.dim, cut.length)) for i, cut in mine.items()}
        for rank in ranks:
            for box, (i, cut) in zip(arrived[rank], mine.items(), strict=True):
                box_of(out[i], cut, rank).copy_(box)
        return out

    def _to_holders(
        self, axis: str, wholes: dict[int, torch.Tensor], shapes: dict[int, Shape]
    ) -> dict[int, torch.Tensor]:
        """Send to each rank its box of the matrices that this rank owns; returns this rank's boxes of all of them, which have `shapes`."""
        ranks = range(self.mesh.size(axis))
        of_owner = [[i for i in shapes if self.matrices[i].owner_on(axis) == rank] for rank in ranks]
        arrived = self._exchange(
            axis,
            [[box_of(whole, self._cut(i, axis), rank) for i, whole in wholes.items()] for rank in ranks],
            [[shapes[i] for i in owned] for owned in of_owner],
        )
        return {
            i: box for owned, boxes in zip(of_owner, arrived, strict=True) for i, box in zip(owned, boxes, strict=True)
        }

    def _exchange(
        self, axis: str, leaving: list[list[torch.Tensor]], shapes: list[list[Shape]]
    ) -> list[list[torch.Tensor]]:
        """One all-to-all of the tensors for each rank; returns those of each rank, of which `shapes` are known."""
        flat = [box.to(self.mesh.device, self.dtype).flatten() for boxes in leaving for box in boxes]
        sent = torch.cat(flat) if flat else torch.empty(0, dtype=self.dtype, device=self.mesh.device)
        sizes = [[prod(shape) for shape in of_rank] for of_rank in shapes]
        received = sent.new_empty(sum(map(sum, sizes)))
        out, into = [sum(box.numel() for box in boxes) for boxes in leaving], [sum(of_rank) for of_rank in sizes]
        distributed.all_to_all_single(received, sent, into, out, group=self.mesh.group(axis))
        parts = iter(received.split([size for of_rank in sizes for size in of_rank]))
        return [[next(parts).view(tuple(shape)) for shape in of_rank] for of_rank in shapes]

    def _cut(self, i: int, axis: str) -> Cut:
        cut = self.matrices[i].cut_over(axis)
        assert cut is not None
        return cut


def equal_shapes(matrices: dict[int, torch.Tensor]) -> list[list[int]]:
    """The matrices in stacks of equal shape, of at most `MOST_STACKED` elements: a few batched products instead of many small ones."""
    stacks: dict[Shape, list[list[int]]] = {}
    for i, matrix in matrices.items():
        open_stacks = stacks.setdefault(tuple(matrix.shape), [[]])
        if open_stacks[-1] and (len(open_stacks[-1]) + 1) * matrix.numel() > MOST_STACKED:
            open_stacks.append([])
        open_stacks[-1].append(i)
    return [stack for same in stacks.values() for stack in same]


def length(cut: Cut, rank: int) -> int:
    start, stop = cut.ranges[rank]
    return stop - start


def resized(shape: Shape, dim: int, size: int) -> tuple[int, ...]:
    """The shape with another length of one dimension."""
    return *shape[:dim], size, *shape[dim + 1 :]


def box_of(whole: torch.Tensor, cut: Cut, rank: int) -> torch.Tensor:
    """The part of a tensor, whole along the cut, that a rank of the axis holds."""
    start, stop = cut.ranges[rank]
    return whole.narrow(cut.dim, start, stop - start)
