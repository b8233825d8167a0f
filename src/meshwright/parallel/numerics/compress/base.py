"""What all compressors share: the collectives they ask for, the error they keep, and the driver over a process group.

A compressor is a generator that *yields* the collectives it needs (`Exchange`). One driver issues them over a process
group (`RunningReduction`); another (`proof.emulation.lossy_sum`) runs them on one device over the gradients of many
ranks: the proof of a lossy reduction is that the two agree. In torch's own DDP they run as a communication hook
(`ddp_hook`).

Error feedback: what a rank did not send, it adds to its next gradient, so nothing is lost, only delayed:

    x ← g + e      sent = decode(encode(x))      e ← x − sent      Σ_ranks x = result + Σ_ranks e, always

A number that is not finite must reach every rank in the same step, so that all of them skip it; it is not kept as an
error, else it would spoil every later step. Where the loss is scaled, gradients are scaled and so are their errors:
`rescale` adjusts them when the scale changes.

Buckets are sent during backward and completed after it, so the buffers of all of them add up (`lower.compression_memory` counts them).
Compressors therefore work in place, make x the new error as soon as they know what is sent, and free what no later line reads.

Compressed reduce-scatter under ZeRO: takes a unit's gradients from `fully_shard` and returns this rank's shard of the sum.

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

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from meshwright.describe.sharding import padding, shape_in_transit
from meshwright.errors import MeshwrightError
from meshwright.parallel import operators

Layout = list[tuple[int, torch.Size]]  # where each parameter of a message starts, and its shape


@dataclass
class Exchange:
    """One collective a compressor asks for: `out` is filled from all ranks' `given` (of an all-reduce the same tensor)."""

    operation: str  # all_reduce | all_gather | all_to_all | reduce_scatter
    out: Tensor
    given: Tensor


class Feedback:
    """The error of each message: what has not been sent yet."""

    def __init__(self, on: bool) -> None:
        self.on, self.claimed = on, False
        self.errors: dict[int, Tensor] = {}

    def claim(self) -> None:
        """Called by the one buffer that uses this compressor: errors are stored by message number, which a second buffer
        would reuse."""
        if self.claimed:
            raise MeshwrightError(
                "MW-COMP-003",
                "one compressor for two buffers of gradients",
                why="The error kept for a message of one would be added to the other",
                fix="make a compressor for each buffer",
            )
        self.claimed = True

    def corrected(self, index: int, message: Tensor) -> Tensor:
        """A copy of the message plus the error of its last reduction."""
        return message + self.errors[index] if index in self.errors else message.clone()

    def keep(self, index: int, error: Tensor) -> None:
        if self.on:
            self.errors[index] = error.nan_to_num_(0.0, 0.0, 0.0)

    def rescale(self, factor: float) -> None:
        """The loss scale was multiplied by `factor`."""
        for error in self.errors.values():
            error.mul_(factor)


class Compressor(Protocol):
    """A lossy sum over ranks. Each rank has one object for each buffer: it stores the rank's errors, by message."""

    aligned: bool  # whether a message must hold whole parameters
    feedback: Feedback

    def reduce(self, index: int, message: Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]: ...

    def scatter(self, index: int, rows: Tensor, layout: Layout, rank: int, out: Tensor) -> Iterator[Exchange]:
        """Rows [ranks, C]: `out` becomes the sum of all ranks' row `rank`. The layout describes the columns: where each
        parameter's part of a row starts, and the parameter's shape before it was cut into rows."""
        ...


def generator(device: torch.device, *key: int) -> torch.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


class RunningReduction:
    """A reduction over a process group: its first collective starts at once, each `wait` completes one."""

    def __init__(self, steps: Iterator[Exchange], group: ProcessGroup) -> None:
        self.steps, self.group = steps, group
        self.work: Any = None
        self._next()

    def _next(self) -> bool:
        request = next(self.steps, None)
        self.work = None if request is None else issue(request, self.group)
        return request is not None

    def wait(self) -> bool:
        """Wait for the current collective and start the next. Returns False once there is none left."""
        if self.work is None:
            return False
        self.work.wait()
        self.work = None  # it holds the tensors of its collective
        return self._next()


def issue(request: Exchange, group: ProcessGroup) -> Any:
    """Start one collective; returns torch's work handle."""
    out, given = request.out.view(-1), request.given.view(-1)
    if request.operation == "all_reduce":
        return distributed.all_reduce(request.given, group=group, async_op=True)
    if request.operation == "all_to_all":
        return distributed.all_to_all_single(request.out, request.given, group=group, async_op=True)
    send = operators.scatter_into if request.operation == "reduce_scatter" else operators.gather_into
    return send(out, given, group=group, async_op=True)


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
