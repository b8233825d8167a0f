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
    run_steps(prepared, (source, result, scratch), call)
    transport.end()
    if source is not result:
        for at, to in schedule.unmoved:
            result[to.start : to.stop].copy_(source[at.start : at.stop])
    if call.reduction == "avg" and schedule.outputs:
        divide(result, transport.size)


def check_sizes(schedule: RankSchedule, source: torch.Tensor, result: torch.Tensor, call: Call) -> None:
    for tensor, elements, name in ((source, schedule.inputs, "input"), (result, schedule.outputs, "output")):
        if elements and (tensor.numel() != elements or tensor.dim() != 1 or not tensor.is_contiguous()):
            needed = f"{elements} contiguous elements in one dimension, not shape {tuple(tensor.shape)}"
            raise MeshwrightError("MW-COMM-001", f"the {name} of {call.operation} needs {needed}")
    if source.dtype != result.dtype and schedule.inputs and schedule.outputs:
        dtypes = f"{name_of(source.dtype)} and {name_of(result.dtype)}"
        raise MeshwrightError("MW-COMM-001", f"input and output have different dtypes: {dtypes}")


def run_steps(prepared: Prepared, buffers: tuple[torch.Tensor, ...], call: Call) -> None:
    """Begin and finish all steps in order: post the sends and the receives of one, then wait for them and apply what was received."""
    schedule, transport, combine = prepared.schedule, prepared.transport, prepared.combine
    posted: dict[tuple[int, int], tuple[list[Pending], list[Pending]]] = {}  # (step, lane) → sends, receives

    def view(span: BufferSpan) -> torch.Tensor:
        return buffers[span.buffer][span.start : span.stop]

    def part(into: BufferSpan, base: BufferSpan | None) -> TargetPart:
        target = view(into)
        return TargetPart(target, target if base == into else None if base is None else view(base))

    for begins, step, lane in schedule.order:
        now = schedule.lanes[lane][step]
        if begins:
            place = CallPlace(transport.rank, call, now.number, lane)
            sends = [one for peers, spans in now.sends for one in transport.send(peers, list(map(view, spans)), place)]
            receives = []
            for peer, targets, direct in now.receives:
                to = Destination([part(*target) for target in targets], combine, direct)
                receives.append(transport.receive(peer, to, place))
            posted[step, lane] = sends, receives
            continue
        sends, receives = posted.pop((step, lane))
        if now.sends_first:
            wait_for(sends)
        wait_for(receives)
        if not now.sends_first:
            wait_for(sends)


def wait_for(pending: Sequence[Pending]) -> None:
    for one in pending:
        one.wait()
