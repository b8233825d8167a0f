"""Compressed reduce-scatter under ZeRO: `fully_shard` hands over a unit's gradients, and gets its rank's shard of the sum.

torch lays a unit's gradients out as one matrix [P, C]: row r is what rank r owns, the r-th ⌈rows/P⌉ rows of every
parameter one after the other, padded with zeros; of one cut along its second dimension, the parts of that one below the
other. `set_custom_reduce_scatter` lets us send that matrix our way: rows are
compressed and go to their owners (`Compressor.scatter`), each of which adds up what came. The sum is wide; of several
replicas of the shards (hybrid sharding) torch then sums it exactly.

Errors are fed back whole: each rank keeps what it did not send of all C·P numbers, as large as the gradients that ZeRO
saved. Compression under ZeRO trades that memory for bytes on the link.

Two kinds of gradients go exactly, in a reduce-scatter of their own, and so they do without ZeRO: partial sums over
another axis (a norm's under sequence parallelism), since compressed before they are whole they would lose what cancels;
and those of parameters that all ranks of a tensor-parallel group hold alike, since each of those ranks has other
neighbours in its messages, would lose something else, and the copies would drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from meshwright.describe.sharding import padding, shape_in_transit, shard_dim
from meshwright.parallel import exchange
from meshwright.parallel.numerics.compress.compressors import Compressor, Layout, Running


def chunked(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """[rows, …] → [ranks, ⌈rows/ranks⌉ · …], padded with zeros."""
    if shard_dim(whole.shape, ranks):
        whole = torch.cat(whole.chunk(ranks, 1))
    each = -(-whole.shape[0] // ranks)
    padded = whole.new_zeros(each * ranks, *whole.shape[1:])
    padded[: whole.shape[0]] = whole
    return padded.reshape(ranks, -1)


def put_together(rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What `chunked` took apart."""
    whole = rows.flatten()[: math.prod(shape)].view(shape_in_transit(shape, len(rows)))
    return torch.cat(whole.chunk(len(rows)), 1) if shard_dim(shape, len(rows)) else whole


def width_of(shape: Sequence[int], ranks: int) -> int:
    """Numbers of one parameter in a row."""
    return (math.prod(shape) + padding(shape, ranks)) // ranks


def columns_of(shapes: Sequence[Sequence[int]], ranks: int) -> Layout:
    """Where each parameter's numbers start in a row, and its shape before its rows were cut."""
    starts = accumulate((width_of(shape, ranks) for shape in shapes), initial=0)
    return [(start, torch.Size(shape_in_transit(shape, ranks))) for start, shape in zip(starts, shapes, strict=False)]


def managed(unit: nn.Module) -> list[nn.Parameter]:
    """A unit's own parameters in torch's order: a module's after those of the modules in it; no inner unit's."""
    out: dict[nn.Parameter, None] = {}
    for child in unit.children():
        if not hasattr(child, "set_custom_reduce_scatter"):
            out |= dict.fromkeys(managed(child))
    return [*out, *(p for p in unit.parameters(recurse=False) if p.requires_grad and p not in out)]


class CompressedScatter:
    """In the place of torch's reduce-scatter of one unit. `exact` parameters are not compressed."""

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

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        rows = input_tensor.view(group.size(), -1)
        lossy, exact = (columns.to(rows.device) for columns in self.columns)
        if len(exact):
            mine = output_tensor.new_empty(len(exact))
            exchange._reduce_scatter(mine, rows[:, exact].flatten(), group=group)
            output_tensor[exact] = mine
        if len(lossy):
            out = output_tensor.new_empty(len(lossy)) if len(exact) else output_tensor
            given = rows[:, lossy] if len(exact) else rows
            running = Running(self.compressor.scatter(0, given, self.layout, group.rank(), out), group)
            while running.wait():
                pass
            if len(exact):
                output_tensor[lossy] = out
