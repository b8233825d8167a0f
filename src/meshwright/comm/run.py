"""The interpreter: execute one rank's schedule of a collective program on tensors, through a transport.

All (step, lane) pairs are executed in one order, which is the same on all ranks. So the messages between two ranks are
sent and expected in the same order, and need no tags.

    begin (step, lane)    wait for sends that a receive would overwrite, post the sends
    finish (step, lane)   wait for the receives and apply them: store or reduce

`finish (t, lane)` is followed by `begin (t + 1, lane)`: while one lane's data is reduced, the data of the following lanes
is in transfer. The order differs by transport:

    over a network     step by step, and lane by lane within a step: as much as possible is in transfer. Receives are posted up to
                       `window` pairs early, because a receive that is posted after the send has reached the receiver costs
                       gloo one more trip over the network
    shared memory      lane by lane: lane t begins step 0, lane t − 1 finishes it and begins step 1, lane t − 2 finishes step 1, …
                       Only a few slices are in transit, and they stay in the caches
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from meshwright.comm.call import Call, Place
from meshwright.comm.schedule import FINISH, POST, SEND, Operation, Schedule, Span
from meshwright.comm.transport.base import (
    Begin,
    Destination,
    Pending,
    Piece,
    Transport,
    array_of,
    combiner,
    divide,
    name_of,
)
from meshwright.errors import MeshwrightError

WINDOW = 4  # (step, lane) pairs whose receives are posted early
STAGED = 64 * 1024  # a receive up to this size goes through a staging buffer if its target is not free yet


class Prepared(NamedTuple):
    """A schedule for one dtype, reduction and transport: everything that does not change from call to call."""

    schedule: Schedule
    transport: Transport
    dtype: torch.dtype
    reduction: str
    begin: Begin  # with the call of the first execution
    order: list[Operation]


def prepare(schedule: Schedule, transport: Transport, dtype: torch.dtype, call: Call, largest: int = -1) -> Prepared:
    """Prepare the executions of a schedule. `largest` is the number of elements of the largest message of any rank; −1 if ranks
    cannot know it."""
    arrays, size = transport.arrays, dtype.itemsize
    combine = combiner(call.reduction, dtype, arrays) if call.reduction else None
    sent, received = ({peer: n * size for peer, n in table.items()} for table in (schedule.sent, schedule.received))
    begin = Begin(call, combine, np.copyto if arrays else torch.Tensor.copy_, sent, received, largest * size)
    order = schedule.network_order(WINDOW, STAGED // size) if transport.posts_early else schedule.lane_order
    return Prepared(schedule, transport, dtype, call.reduction, begin, order)


def execute(prepared: Prepared, source: torch.Tensor, result: torch.Tensor, call: Call) -> None:
    """Run a collective: `source` and `result` are contiguous, one-dimensional, of one dtype, and may be the same tensor."""
    schedule, transport = prepared.schedule, prepared.transport
    check_sizes(schedule, source, result, call)
    transport.begin(prepared.begin._replace(call=call))
    if transport.arrays:
        mine = array_of(source)
        scratch = np.empty(schedule.scratch, dtype=mine.dtype)
        buffers: tuple[Any, ...] = (mine, mine if result is source else array_of(result), scratch)
        with np.errstate(all="ignore"):  # sums that overflow are the caller's, as in torch
            Run(prepared, buffers, call).run()
    else:
        room = torch.empty(schedule.scratch, dtype=source.dtype, device=source.device)
        Run(prepared, (source, result, room), call).run()
    transport.end()
    if source is not result:
        for at, to in schedule.unmoved:
            result[to.start : to.stop].copy_(source[at.start : at.stop])
    if prepared.reduction == "avg" and schedule.outputs:
        divide(result, transport.size)


def check_sizes(schedule: Schedule, source: torch.Tensor, result: torch.Tensor, call: Call) -> None:
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


class Run:
    """One execution: what is posted and not complete."""

    def __init__(self, prepared: Prepared, buffers: tuple[Any, ...], call: Call) -> None:
        self.lanes, self.order, self.buffers = prepared.schedule.lanes, prepared.order, buffers
        self.transport, self.call = prepared.transport, call
        self.combine, self.store = prepared.begin.combine, prepared.begin.store
        self.sends: dict[tuple[int, int], list[Pending]] = {}  # (step, lane) → sends that may not be complete
        self.posted: dict[tuple[int, int, int], Pending] = {}  # (step, lane, number of the receive) → receive
        self.seen: dict[Span, Piece] = {}  # views of the buffers: most are sent, received and reduced

    def run(self) -> None:
        for operation in self.order:
            self.perform(operation)
        for key in list(self.sends):
            self.wait_for_sends(*key)

    def perform(self, operation: Operation) -> None:
        kind, step, lane, number, direct = operation
        if kind == POST:
            self.posted[step, lane, number] = self.post(step, lane, number, direct)
        elif kind == SEND:
            self.begin(step, lane)
        elif kind == FINISH:
            self.finish(step, lane)
        else:
            self.wait_for_sends(step, lane)

    def begin(self, step: int, lane: int) -> None:
        """Post the sends of a step."""
        now = self.lanes[lane][step]
        if now.sends:
            place = self.place(step, lane)
            posted = [self.transport.send(send.peers, self.views(send.spans), place) for send in now.sends]
            pending = [send for send in posted if send is not None]
            if pending:
                self.sends[step, lane] = pending

    def finish(self, step: int, lane: int) -> None:
        """Apply the receives of a step, and the local copies."""
        now = self.lanes[lane][step]
        if self.sends and not self.transport.posts_early:  # otherwise the order says when to wait
            self.wait_for_sends(step - 1, lane)
            if now.copies or any(receive.after_sends for receive in now.receives):
                self.wait_for_sends(step, lane)
        combine, store = self.combine, self.store
        for source, (into, base) in now.copies:
            if base is None:
                store(self.view(into), self.view(source))
            else:
                assert combine is not None
                combine(self.view(base), self.view(source), self.view(into))
        for k in range(len(now.receives)):
            posted = self.posted.pop((step, lane, k), None) or self.post(step, lane, k, True)
            posted.wait()

    def post(self, step: int, lane: int, number: int, direct: bool) -> Pending:
        """Post one receive of a step."""
        receive = self.lanes[lane][step].receives[number]
        targets = [
            Destination(self.view(into), None if base is None else self.view(base)) for into, base in receive.targets
        ]
        return self.transport.receive(receive.peer, targets, self.place(step, lane), direct)

    def place(self, step: int, lane: int) -> Place:
        """Return where this rank is, for the headers of messages and for errors."""
        return Place(self.transport.rank, self.call, self.lanes[lane][step].number, lane)

    def wait_for_sends(self, step: int, lane: int) -> None:
        for pending in self.sends.pop((step, lane), ()):
            pending.wait()

    def views(self, spans: Sequence[Span]) -> list[Piece]:
        return [self.view(span) for span in spans]

    def view(self, span: Span) -> Piece:
        found = self.seen.get(span)
        if found is None:
            found = self.seen[span] = self.buffers[span.buffer][span.start : span.stop]
        return found
