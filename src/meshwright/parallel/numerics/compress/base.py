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
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

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
