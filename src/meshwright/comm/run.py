"""The interpreter: execute one rank's schedule of a collective program on tensors, through a transport.

All (step, lane) pairs are executed in one order, which is the same on all ranks. So the messages between two ranks are
sent and expected in the same order, and need no tags.

    begin (step, lane)    wait for sends that a receive would overwrite, post the sends
    finish (step, lane)   wait for the receives and apply them: store or reduce

`finish (t, lane)` is followed by `begin (t + 1, lane)`: while one lane's data is reduced, the data of the following lanes
is in transfer. The order differs by transport:

    over a network     step by step, and lane by lane within a step: as much as possible is in transfer. Receives are posted up to
                       WINDOW pairs early, because a receive that is posted after the send has reached the receiver costs
                       gloo one more trip over the network
    shared memory      lane by lane: lane t begins step 0, lane t − 1 finishes it and begins step 1, lane t − 2 finishes step 1, …
                       Only a few slices are in transit, and they stay in the caches. `run_shared` does it in one loop
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from meshwright.comm.call import Call, Place
from meshwright.comm.reductions import array_of, combiner, divide, name_of
from meshwright.comm.schedule import Receive, Schedule, Span
from meshwright.comm.transport.base import Begin, Destination, Pending, Piece, Transport
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
    order: list[tuple[bool, int, int]]  # empty over a network
    shared: Any = None  # run_shared.SharedPlan, between ranks of one host


def prepare(schedule: Schedule, transport: Transport, dtype: torch.dtype, call: Call, largest: int = -1) -> Prepared:
    """Prepare the executions of a schedule. `largest` is the number of elements of the largest message of any rank; −1 if ranks
    cannot know it."""
    arrays, size = transport.arrays, dtype.itemsize
    combine = combiner(call.reduction, dtype, arrays) if call.reduction else None
    sent, received = ({peer: n * size for peer, n in table.items()} for table in (schedule.sent, schedule.received))
    begin = Begin(call, combine, np.copyto if arrays else torch.Tensor.copy_, sent, received, largest * size)
    order = [] if transport.posts_early else schedule.lane_order
    return Prepared(schedule, transport, dtype, call.reduction, begin, order)


def execute(prepared: Prepared, source: torch.Tensor, result: torch.Tensor, call: Call) -> None:
    """Run a collective: `source` and `result` are contiguous, one-dimensional, of one dtype, and may be the same tensor."""
    schedule, transport = prepared.schedule, prepared.transport
    check_sizes(schedule, source, result, call)
    if transport.arrays:
        transport.begin(prepared.begin)
        mine = array_of(source)
        scratch = np.empty(schedule.scratch, dtype=mine.dtype)
        buffers: tuple[Any, ...] = (mine, mine if result is source else array_of(result), scratch)
        with np.errstate(all="ignore"):  # sums that overflow are the caller's, as in torch
            Run(prepared, buffers, call).run()
    else:
        transport.begin(prepared.begin._replace(call=call))
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
    """One execution: the position of each lane, and what is posted and not complete."""

    def __init__(self, prepared: Prepared, buffers: tuple[Any, ...], call: Call) -> None:
        schedule = prepared.schedule
        self.lanes, self.order, self.buffers = schedule.lanes, prepared.order, buffers
        self.transport, self.call = prepared.transport, call
        self.combine, self.store = prepared.begin.combine, prepared.begin.store
        self.steps = len(schedule.lanes[0]) if schedule.lanes else 0
        self.begun = [-1] * len(self.lanes)  # the step that each lane has begun
        self.sends: dict[tuple[int, int], list[Pending]] = {}  # (step, lane) → sends that may not be complete
        self.posted: dict[tuple[int, int, int], Pending] = {}  # (step, lane, number of the receive) → receive

    def run(self) -> None:
        if self.transport.posts_early:
            self.run_by_steps()
        else:
            self.run_by_lanes()
        for key in list(self.sends):
            self.wait_for_sends(*key)

    def run_by_steps(self) -> None:
        count = len(self.lanes)
        for lane in range(count if self.steps else 0):
            self.begin(0, lane)
        for pair in range(self.steps * count):
            for ahead in range(pair + 1, min(pair + WINDOW + 1, self.steps * count)):
                self.free_targets(pair, *divmod(ahead, count))
                self.post_receives(*divmod(ahead, count))
            step, lane = divmod(pair, count)
            self.finish(step, lane)
            if step + 1 < self.steps:
                self.begin(step + 1, lane)

    def run_by_lanes(self) -> None:
        for is_begin, step, lane in self.order:
            if is_begin:
                self.begin(step, lane)
            else:
                self.finish(step, lane)

    def begin(self, step: int, lane: int, first: int = 0) -> None:
        """Post the receives and the sends of a step, from send number `first` on."""
        self.begun[lane] = step
        if self.transport.posts_early:
            self.post_receives(step, lane)
        now = self.lanes[lane][step]
        if now.sends:
            place = self.place(step, lane)
            posted = [self.transport.send(send.peers, self.views(send.spans), place) for send in now.sends[first:]]
            pending = [send for send in posted if send is not None]
            if pending:
                self.sends[step, lane] = pending

    def finish(self, step: int, lane: int) -> None:
        """Apply the receives of a step, and the local copies."""
        now = self.lanes[lane][step]
        if self.sends:
            self.wait_for_sends(step - 1, lane)
        if self.transport.posts_early:
            self.post_receives(step, lane)  # all of them now: a peer's send completes only when its receive is posted
        if self.sends and (now.copies or any(receive.after_sends for receive in now.receives)):
            self.wait_for_sends(step, lane)
        combine, store = self.combine, self.store
        for source, (into, base) in now.copies:
            if base is None:
                store(self.view(into), self.view(source))
            else:
                assert combine is not None
                combine(self.view(base), self.view(source), self.view(into))
        for k in range(len(now.receives)):
            posted = self.posted.pop((step, lane, k)) if self.transport.posts_early else self.post(step, lane, k, True)
            posted.wait()

    def post(self, step: int, lane: int, number: int, direct: bool) -> Pending:
        """Post one receive of a step."""
        receive = self.lanes[lane][step].receives[number]
        targets = [
            Destination(self.view(into), None if base is None else self.view(base)) for into, base in receive.targets
        ]
        return self.transport.receive(receive.peer, targets, self.place(step, lane), direct)

    def place(self, step: int, lane: int) -> Place:
        """Where this rank is, for the headers of messages and for errors."""
        return Place(self.transport.rank, self.call, self.lanes[lane][step].number, lane)

    def post_receives(self, step: int, lane: int) -> None:
        """Post the receives of a step that are not posted yet and can be."""
        now = self.lanes[lane][step]
        for k, receive in enumerate(now.receives):
            if (step, lane, k) in self.posted:
                continue
            direct = receive.stores and self.is_free(receive, lane)
            if receive.stores and not direct and receive.elements * self.buffers[0].itemsize > STAGED:
                continue
            self.posted[step, lane, k] = self.post(step, lane, k, direct)

    def is_free(self, receive: Receive, lane: int) -> bool:
        """Whether nothing that this rank has begun still uses the target of a receive that stores. No step stores what it sends."""
        begun = self.begun[lane]
        return receive.last_write < begun >= receive.last_send and not self.sends.get((receive.last_send, lane))

    def free_targets(self, pair: int, step: int, lane: int) -> None:
        """Wait for the sends that keep the receives of a later step from being posted, where they belong to pairs before `pair`.

        All ranks finish pairs in one order, so such a send needs nothing that this rank has not posted. With two ranks the second half of a
        ring stores into what the first half sends: without this wait its receives would be posted one by one.
        """
        for receive in self.lanes[lane][step].receives:
            sent = receive.last_send
            if receive.stores and sent * len(self.lanes) + lane < pair and receive.last_write < self.begun[lane]:
                self.wait_for_sends(sent, lane)

    def wait_for_sends(self, step: int, lane: int) -> None:
        for pending in self.sends.pop((step, lane), ()):
            pending.wait()

    def views(self, spans: Sequence[Span]) -> list[Piece]:
        return [self.view(span) for span in spans]

    def view(self, span: Span) -> Piece:
        return self.buffers[span.buffer][span.start : span.stop]
