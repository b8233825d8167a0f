"""The interpreter over point-to-point messages that do not fit an envelope: one loop over a flat list of operations.

An all-reduce of 64 MiB moves data through the caches all the time, so each Python function between two messages is fetched from memory again.
On one host, where the copies of the kernel and the additions share the cores with this code, the functions of a ring with two ranks took a
tenth of its time. So everything that is the same in every call is found once for each schedule (tags, views, which receive may be posted when),
and a message costs one call of torch to post it and one to wait for it:

    send      one contiguous piece
    receive   one contiguous piece: into its target where that is free, else into a staging buffer, and stored or reduced when it is complete

A step with messages of several pieces or with local copies is done by `run.Run`. Order, tags and bytes are the same on both ways.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.comm.call import Call, Lost, Place
from meshwright.comm.run import Prepared, Run
from meshwright.comm.schedule import FINISH, POST, SEND, Operation, Span, Step
from meshwright.comm.transport.point_to_point import PointToPoint, data_tag, reason


class QuickSend(NamedTuple):
    view: int
    peer: int
    tag: int


class QuickReceive(NamedTuple):
    peer: int
    tag: int
    into: int  # views
    base: int  # −1: the data is stored
    size: int  # bytes


class MessagePlan:
    """A prepared schedule over point-to-point messages: its operations, and the ranges of the buffers that they use."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.itemsize = prepared, prepared.dtype.itemsize
        self.numbers: dict[Span, int] = {}  # range → number of its view
        self.operations = [(operation, self.quick(operation)) for operation in prepared.order]
        self.spans = list(self.numbers)

    def run(self, buffers: tuple[Any, ...], call: Call) -> None:
        MessageRun(self, buffers, call).run()

    def quick(self, operation: Operation) -> Any:
        """The operation with tags and views; None if `Run` does it."""
        kind, step, lane, number, _ = operation
        now = self.prepared.schedule.lanes[lane][step]
        if kind in (POST, FINISH):
            if now.copies or any(len(receive.targets) > 1 for receive in now.receives):
                return None
            receives = [self.receive(now, lane, k) for k in range(len(now.receives))]
            return receives[number] if kind == POST else receives
        if any(len(send.spans) > 1 for send in now.sends):
            return None
        sends = [(send.spans[0], peer) for send in now.sends if send.spans for peer in send.peers]
        return [QuickSend(self.view(span), peer, self.tag(now, lane, span)) for span, peer in sends]

    def receive(self, now: Step, lane: int, number: int) -> QuickReceive:
        receive = now.receives[number]
        if not receive.targets:
            return QuickReceive(receive.peer, 0, -1, -1, 0)
        into, base = receive.targets[0]
        size = receive.elements * self.itemsize
        numbers = self.view(into), -1 if base is None else self.view(base)
        return QuickReceive(receive.peer, self.tag(now, lane, into), *numbers, size)

    def view(self, span: Span) -> int:
        return self.numbers.setdefault(span, len(self.numbers))

    def tag(self, now: Step, lane: int, span: Span) -> int:
        """The tag of a message; it does not depend on the number of the call."""
        place = Place(self.prepared.transport.rank, self.prepared.begin.call, now.number, lane)
        return data_tag(place, (span.stop - span.start) * self.itemsize)


class MessageRun(Run):
    """One execution over point-to-point messages."""

    def __init__(self, plan: MessagePlan, buffers: tuple[Any, ...], call: Call) -> None:
        super().__init__(plan.prepared, buffers, call)
        self.plan, self.dtype = plan, plan.prepared.dtype

    def run(self) -> None:
        """Execute all operations in order."""
        transport, buffers, peer = self.transport, self.buffers, -1
        assert isinstance(transport, PointToPoint)
        send, receive, timeout, pool, headers = (
            transport.group.send, transport.group.recv, transport.timeout, transport.pool, transport.headers
        )  # fmt: skip
        views = [buffers[buffer][start:stop] for buffer, start, stop in self.plan.spans]
        works: dict[tuple[int, int], list[Any]] = {}
        posted: dict[tuple[int, int, int], Any] = {}
        for operation, quick in self.plan.operations:
            kind, step, lane, number, direct = operation
            if quick is None:
                self.perform(operation)
                continue
            try:
                if kind == SEND:
                    sent = works[step, lane] = []
                    for view, peer, tag in quick:
                        sent.append((peer, send([views[view]], peer, tag)))
                elif kind == POST:
                    peer, tag, into, _, size = quick
                    if size:
                        staged = None if direct else pool.take(size)
                        posted[step, lane, number] = receive([views[into] if direct else staged], peer, tag), staged
                elif kind == FINISH:
                    for k, (peer, _, into, base, size) in enumerate(quick):
                        if size:
                            if headers:
                                transport.compare(peer, self.place(step, lane))
                            work, staged = posted.pop((step, lane, k))
                            work.wait(timeout)
                            if staged is None:
                                continue
                            if base < 0:
                                views[into].copy_(staged.view(self.dtype))
                            else:
                                self.combine(views[base], staged.view(self.dtype), views[into])  # type: ignore[misc]
                            pool.give(staged)
                else:
                    for peer, work in works.pop((step, lane)):
                        if headers:
                            transport.compare(peer, self.place(step, lane))
                        work.wait(timeout)
            except RuntimeError as error:
                raise Lost(self.place(step, lane), peer, reason(error)) from error
