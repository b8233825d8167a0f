"""The interpreter: execute one rank's schedule of a collective program on tensors, through a transport.

All (step, lane) pairs are executed in one order (`Schedule.order`), which is the same on all ranks. So the messages between two ranks are
sent and expected in the same order, and need no tags.

    begin (step, lane)    post the sends and the receives
    finish (step, lane)   wait for the receives and apply them: store or reduce; wait for the sends

The order is lane by lane: lane t begins step 0, lane t − 1 finishes it and begins step 1, lane t − 2 finishes step 1, … While one
lane's data is reduced, the data of the others is in transfer; only a few slices are in transit, and they stay in the caches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.comm.call import Call, CallPlace
from meshwright.comm.schedule import BufferSpan, RankSchedule
from meshwright.comm.transport.base import (
    Combine,
    Destination,
    Pending,
    TargetPart,
    Transport,
    combiner,
    divide,
    name_of,
)
from meshwright.errors import MeshwrightError


class Prepared(NamedTuple):
    """A schedule for one dtype, reduction and transport: everything that does not change from call to call."""

    schedule: RankSchedule
    transport: Transport
    call: Call  # with the number 0
    combine: Combine | None
    sent: dict[int, int]  # bytes to each peer
    received: dict[int, int]


def prepare(schedule: RankSchedule, transport: Transport, dtype: torch.dtype, call: Call) -> Prepared:
    """Prepare the executions of a schedule."""
    combine = combiner(call.reduction, dtype) if call.reduction else None
    size = dtype.itemsize
    sent, received = ({peer: n * size for peer, n in table.items()} for table in (schedule.sent, schedule.received))
    return Prepared(schedule, transport, call, combine, sent, received)


def execute(prepared: Prepared, source: torch.Tensor, result: torch.Tensor, call: Call) -> None:
    """Run a collective: `source` and `result` are contiguous, one-dimensional, of one dtype, and may be the same tensor."""
    schedule, transport = prepared.schedule, prepared.transport
    check_sizes(schedule, source, result, call)
    scratch = torch.empty(schedule.scratch, dtype=source.dtype, device=source.device)
    transport.begin(call, prepared.sent, prepared.received)
    Execution(prepared, (source, result, scratch), call).run()
    transport.end()
    if source is not result:
        for at, to in schedule.unmoved:
            result[to.start : to.stop].copy_(source[at.start : at.stop])
    if call.reduction == "avg" and schedule.outputs:
        divide(result, transport.size)


def check_sizes(schedule: RankSchedule, source: torch.Tensor, result: torch.Tensor, call: Call) -> None:
    for tensor, elements, name in ((source, schedule.inputs, "input"), (result, schedule.outputs, "output")):
        if elements and (tensor.numel() != elements or tensor.dim() != 1 or not tensor.is_contiguous()):
            raise MeshwrightError(
                "MW-COMM-001",
                f"the {name} of {call.operation} needs {elements} contiguous elements in one dimension, not shape {tuple(tensor.shape)}",
            )
    if source.dtype != result.dtype and schedule.inputs and schedule.outputs:
        raise MeshwrightError(
            "MW-COMM-001",
            f"input and output have different dtypes: {name_of(source.dtype)} and {name_of(result.dtype)}",
        )


class Execution:
    """One execution: what is posted and not complete."""

    def __init__(self, prepared: Prepared, buffers: tuple[torch.Tensor, ...], call: Call) -> None:
        self.schedule, self.transport, self.combine = prepared.schedule, prepared.transport, prepared.combine
        self.buffers, self.call = buffers, call
        self.posted: dict[tuple[int, int], tuple[list[Pending], list[Pending]]] = {}  # (step, lane) → sends, receives

    def run(self) -> None:
        for begins, step, lane in self.schedule.order:
            (self.begin if begins else self.finish)(step, lane)

    def begin(self, step: int, lane: int) -> None:
        """Post the sends and the receives of a step."""
        now = self.schedule.lanes[lane][step]
        place = CallPlace(self.transport.rank, self.call, now.number, lane)
        sends = [
            pending
            for peers, spans in now.sends
            for pending in self.transport.send(peers, [self.view(span) for span in spans], place)
        ]
        receives = []
        for peer, targets, direct in now.receives:
            parts = [self.part(into, base) for into, base in targets]
            receives.append(self.transport.receive(peer, Destination(parts, self.combine, direct), place))
        self.posted[step, lane] = sends, receives

    def finish(self, step: int, lane: int) -> None:
        """Apply the receives of a step, and the local copies; complete its sends."""
        now = self.schedule.lanes[lane][step]
        sends, receives = self.posted.pop((step, lane))
        if now.sends_first:
            wait_for(sends)
        for source, (into, base) in now.copies:
            Destination([self.part(into, base)], self.combine, False).apply(self.view(source))
        wait_for(receives)
        if not now.sends_first:
            wait_for(sends)

    def part(self, into: BufferSpan, base: BufferSpan | None) -> TargetPart:
        target = self.view(into)
        return TargetPart(target, target if base == into else None if base is None else self.view(base))

    def view(self, span: BufferSpan) -> torch.Tensor:
        return self.buffers[span.buffer][span.start : span.stop]


def wait_for(pending: Sequence[Pending]) -> None:
    for one in pending:
        one.wait()
