"""Compressed reduce-scatter under ZeRO: takes a unit's gradients from `fully_shard` and returns this rank's shard of the sum.

torch lays out a unit's gradients as one matrix [P, C]: row r is what rank r owns, the r-th ⌈rows/P⌉ rows of every
parameter one after the other, padded with zeros; a parameter cut along its second dimension is laid out as its P parts,
one below the other. `set_custom_reduce_scatter` lets us send that matrix: rows are compressed and go to their owners
(`Compressor.scatter`), each of which adds up what it received, in full precision. Under hybrid sharding torch then sums
the shards over replicas uncompressed.

Every rank keeps the error of all C·P numbers, as much memory as the gradients that ZeRO saved. Compression under ZeRO
trades that memory for bytes on the link.

Two kinds of gradients are not compressed (with or without ZeRO) and have a separate reduce-scatter: partial sums
over another axis (a norm's under sequence parallelism), because compressing them before they are complete would lose
what cancels; and parameters that all ranks of a tensor-parallel group hold whole, because each of those ranks would
lose something else, and the copies would drift apart.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.describe.sharding import padding, shape_in_transit
from meshwright.parallel import operators
from meshwright.parallel.numerics.compress.base import Compressor, Layout, RunningReduction


def width_of(shape: Sequence[int], ranks: int) -> int:
    """Elements of one parameter in a row."""
    return (math.prod(shape) + padding(shape, ranks)) // ranks


def columns_of(shapes: Sequence[Sequence[int]], ranks: int) -> Layout:
    """Offset of each parameter in a row, and its shape before its rows were cut."""
    starts = accumulate((width_of(shape, ranks) for shape in shapes), initial=0)
    return [(start, torch.Size(shape_in_transit(shape, ranks))) for start, shape in zip(starts, shapes, strict=False)]


def unit_parameters(unit: nn.Module) -> list[nn.Parameter]:
    """The parameters of one unit in torch's order: those of child modules before a module's own, without inner units."""
    out: dict[nn.Parameter, None] = {}
    for child in unit.children():
        if not hasattr(child, "set_custom_reduce_scatter"):
            out |= dict.fromkeys(unit_parameters(child))
    return [*out, *(p for p in unit.parameters(recurse=False) if p.requires_grad and p not in out)]


class CompressedScatter:
    """Replaces torch's reduce-scatter of one unit. `exact` parameters are not compressed."""

    def __init__(
        self,
        compressor: Compressor,
        parameters: Sequence[nn.Parameter],
        axis: str,
        ranks: int,
        exact: set[nn.Parameter],
    ) -> None:
        self.compressor, self.axis = compressor, axis
        self.lossy = [p for p in parameters if p not in exact]
        self.layout = columns_of([p.shape for p in self.lossy], ranks)
        widths = [width_of(p.shape, ranks) for p in parameters]
        kinds = torch.tensor([p in exact for p in parameters]).repeat_interleave(torch.tensor(widths))
        self.columns = (~kinds).nonzero()[:, 0], kinds.nonzero()[:, 0]

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        rows = input_tensor.view(group.size(), -1)
        lossy, exact = (columns.to(rows.device) for columns in self.columns)
        if len(exact):
            mine = output_tensor.new_empty(len(exact))
            operators.scatter_into(mine, rows[:, exact].flatten(), group=group)
            output_tensor[exact] = mine
        if len(lossy):
            out = output_tensor.new_empty(len(lossy)) if len(exact) else output_tensor
            given = rows[:, lossy] if len(exact) else rows
            running = RunningReduction(self.compressor.scatter(0, given, self.layout, group.rank(), out), group)
            while running.wait():
                pass
            if len(exact):
                output_tensor[lossy] = out
