"""The interpreter over point-to-point messages that do not fit an envelope: one loop over a flat list of operations.

An all-reduce of 64 MiB moves data through the caches all the time, so each Python function between two messages is fetched from memory again:
a small addition by torch takes 3 µs in a loop, and about 40 µs here. On one host the copies of the kernel and the additions share the cores with
this code. So everything that is the same in every call is found once for each schedule: tags, which receive is posted when, and where it goes.
A message costs one call of torch to post it and one to wait for it:

    send      one contiguous piece
    receive   one contiguous piece: into its target where that is free, else into a staging buffer, and stored or reduced when it is complete

Data is reduced as arrays of numpy where numpy has the dtype (`reductions`). A step with messages of several pieces or with local copies is
done by `run.Run`. Order, tags and bytes are the same on both ways.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from meshwright.comm.call import Call, Lost, Place
from meshwright.comm.reductions import array_of, combiner, has_arrays
from meshwright.comm.run import Prepared, Run
from meshwright.comm.schedule import FINISH, POST, SEND, WAIT, Operation, Span
from meshwright.comm.transport.point_to_point import PointToPoint, data_tag, reason

OTHER = -1  # an operation that `Run` performs


class Message(NamedTuple):
    """One operation on one message: to post a send or a receive, or to wait for it."""

    kind: int
    operation: Operation
    number: int = -1  # of the message
    peer: int = -1
    tag: int = 0
    view: int = -1  # what is sent, or where received data goes
    staging: int = -1  # where data is received first; −1: in the view
    base: int = -1  # the view that received data is combined with; −1: it is stored


class MessagePlan:
    """A prepared schedule over point-to-point messages: its operations, and the ranges and staging buffers that they use."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.dtype, self.itemsize = prepared, prepared.dtype, prepared.dtype.itemsize
        reduction = prepared.begin.call.reduction
        self.arrays = has_arrays(self.dtype)
        self.combine = combiner(reduction, self.dtype, self.arrays) if reduction else None
        self.numbers: dict[Span, int] = {}  # range → number of its view
        self.slots: list[int] = []  # elements of each staging buffer
        self.free: list[int] = []  # slots that no receive uses
        self.stagings: dict[tuple[int, int], int] = {}  # (slot, elements) → number of that staging view
        self.received: dict[tuple[int, int, int], Message] = {}  # (step, lane, receive) → the receive that was posted
        self.sent: dict[tuple[int, int], list[Message]] = {}
        self.count = 0  # messages
        self.messages = [message for operation in prepared.order for message in self.messages_of(operation)]
        self.spans = list(self.numbers)
        reduced = {view for message in self.messages if message.base >= 0 for view in (message.view, message.base)}
        self.operands = {view: self.spans[view] for view in reduced}

    def run(self, buffers: tuple[Any, ...], call: Call) -> None:
        MessageRun(self, buffers, call).run()

    def messages_of(self, operation: Operation) -> list[Message]:
        """The operation on each of its messages."""
        kind, step, lane, number, direct = operation
        now = self.prepared.schedule.lanes[lane][step]
        if kind in (POST, FINISH):
            if now.copies or any(len(receive.targets) > 1 for receive in now.receives):
                return [Message(OTHER, operation)]
            if kind == POST:
                return self.post(operation, step, lane, number, direct)
            posted = [self.received.pop((step, lane, k)) for k, receive in enumerate(now.receives) if receive.elements]
            self.free += [self.slot_of(message) for message in posted if message.staging >= 0]
            return [message._replace(kind=FINISH, operation=operation) for message in posted]
        if any(len(send.spans) > 1 for send in now.sends):
            return [Message(OTHER, operation)]
        if kind == WAIT:
            return [message._replace(kind=WAIT, operation=operation) for message in self.sent.pop((step, lane))]
        pairs = [(send.spans[0], peer) for send in now.sends if send.spans for peer in send.peers]
        self.sent[step, lane] = [
            Message(SEND, operation, self.next(), peer, self.tag(step, lane, span), self.view(span))
            for span, peer in pairs
        ]
        return self.sent[step, lane]

    def post(self, operation: Operation, step: int, lane: int, number: int, direct: bool) -> list[Message]:
        """Post a receive: nothing if it is empty."""
        receive = self.prepared.schedule.lanes[lane][step].receives[number]
        if not receive.elements:
            return []
        into, base = receive.targets[0]
        staging = -1 if direct else self.staging(receive.elements)
        views = self.view(into), staging, -1 if base is None else self.view(base)
        message = Message(POST, operation, self.next(), receive.peer, self.tag(step, lane, into), *views)
        self.received[step, lane, number] = message
        return [message]

    def staging(self, elements: int) -> int:
        """A staging view of a slot that is free now: the smallest that is large enough, or else the largest, enlarged."""
        if not self.free:
            self.free.append(len(self.slots))
            self.slots.append(elements)
        slot = min(self.free, key=lambda slot: (self.slots[slot] < elements, abs(self.slots[slot] - elements)))
        self.free.remove(slot)
        self.slots[slot] = max(self.slots[slot], elements)
        return self.stagings.setdefault((slot, elements), len(self.stagings))

    def slot_of(self, message: Message) -> int:
        return list(self.stagings)[message.staging][0]

    def next(self) -> int:
        self.count += 1
        return self.count - 1

    def view(self, span: Span) -> int:
        return self.numbers.setdefault(span, len(self.numbers))

    def tag(self, step: int, lane: int, span: Span) -> int:
        """The tag of a message; it does not depend on the number of the call."""
        number = self.prepared.schedule.lanes[lane][step].number
        place = Place(self.prepared.transport.rank, self.prepared.begin.call, number, lane)
        return data_tag(place, (span.stop - span.start) * self.itemsize)


class MessageRun(Run):
    """One execution over point-to-point messages."""

    def __init__(self, plan: MessagePlan, buffers: tuple[Any, ...], call: Call) -> None:
        super().__init__(plan.prepared, buffers, call)
        self.plan = plan

    def run(self) -> None:
        """Execute all operations in order."""
        plan, transport = self.plan, self.transport
        assert isinstance(transport, PointToPoint)
        taken = [transport.pool.take(elements * plan.itemsize) for elements in plan.slots]
        views = [self.buffers[buffer][start:stop] for buffer, start, stop in plan.spans]
        staged = [taken[slot].view(plan.dtype)[:elements] for slot, elements in plan.stagings]
        operands: Any = views
        received: list[Any] = staged
        if plan.operands and plan.arrays:
            arrays = [array_of(buffer) for buffer in self.buffers]
            operands = {view: arrays[buffer][start:stop] for view, (buffer, start, stop) in plan.operands.items()}
            received = [array_of(view) for view in staged]
        with np.errstate(all="ignore"):  # sums that overflow are the caller's, as in torch
            self.execute(views, staged, operands, received)
        for buffer in taken:
            transport.pool.give(buffer)

    def execute(self, views: list[Any], staged: list[Any], operands: Any, received: list[Any]) -> None:
        plan, transport = self.plan, self.transport
        assert isinstance(transport, PointToPoint)
        send, receive, timeout, headers = (
            transport.group.send, transport.group.recv, transport.timeout, transport.headers
        )  # fmt: skip
        combine: Any = plan.combine
        works: list[Any] = [None] * plan.count
        try:
            for kind, operation, number, peer, tag, view, staging, base in plan.messages:
                if kind == SEND:
                    works[number] = send([views[view]], peer, tag)
                elif kind == POST:
                    works[number] = receive([views[view] if staging < 0 else staged[staging]], peer, tag)
                elif kind == OTHER:
                    self.perform(operation)
                else:
                    if headers:
                        transport.compare(peer, self.place(operation.step, operation.lane))
                    works[number].wait(timeout)
                    if staging < 0:
                        continue
                    if base < 0:
                        views[view].copy_(staged[staging])
                    else:
                        combine(operands[base], received[staging], operands[view])
        except RuntimeError as error:
            raise Lost(self.place(operation.step, operation.lane), peer, reason(error)) from error
