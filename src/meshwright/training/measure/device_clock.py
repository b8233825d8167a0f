"""The clock of recorded steps on a GPU: marks are events of the stream that is current, read after the step.

The host only issues kernels, so its time says nothing. What counts is when the compute stream is idle:

    synchronous call     NCCL runs on the current stream: the two marks around the call enclose it
    asynchronous call    NCCL runs on its stream; `wait` makes the current stream wait: the marks around `wait` enclose that.
                         The end of the operation is marked on a third stream that waits for nothing else
    `fully_shard`        gathers on its streams, and lets the computing stream wait for an event of those: the stream's
                         `wait_event` is wrapped, and blocks for the last operation that was issued on the event's stream

At the end of a step the loss is read on the host, so the device is idle: there the origin of the next step's marks is set.
**Run** on one H200 with a group of one rank; between several GPUs it is modelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from meshwright.comm.work import Work
from meshwright.training.hooks import CommEvent

MESSAGES = ("send", "receive")


class HostClock:
    """The clock of a run on the host: marks are seconds. All operations block the one thread that issues them."""

    def mark(self) -> Any:
        return time.perf_counter()

    def place(self, running: Any) -> None:
        """Note on which stream an operation was issued."""

    def attach(self, replace: Callable[[Any, str, Any], None]) -> None:
        """Wrap what else can block, with the recorder's `replace`."""

    def watch(self, running: Any, work: Any) -> None:
        """Note when an asynchronous operation is complete. Our handles know it; gloo's messages have no future."""
        if isinstance(work, Work) or running.operation in MESSAGES:
            return

        def note(_: Any) -> None:
            running.done = time.perf_counter()

        work.get_future().add_done_callback(note)

    def unfinished(self, events: list[Any]) -> tuple[Any, bool]:
        """The first operation that is not finished, and whether it has been started. The host knows what it is inside of."""
        return None, True

    def seconds(self, mark: Any) -> float:
        return float("nan") if mark is None else mark

    def events(self, operations: list[Any]) -> list[CommEvent]:
        """The operations of a step, with seconds for their marks."""
        marks = ((e, map(self.seconds, (e.issued, e.returned, e.waited, e.resumed, e.done))) for e in operations)
        return [CommEvent(e.axis, e.operation, e.bytes, e.peer, *seconds) for e, seconds in marks]

    def begin_step(self) -> None:
        """Align the marks with the host's clock."""


class DeviceClock(HostClock):
    """Marks are CUDA events; `seconds` converts them to the host's clock."""

    def __init__(self) -> None:
        self.computing = torch.cuda.current_stream()
        self.observing = torch.cuda.Stream()
        self.origin, self.origin_s = torch.cuda.Event(enable_timing=True), 0.0
        self.last_on: dict[int, Any] = {}  # stream → the last operation that was issued on it
        self.awaited: dict[int, tuple[Any, Any]] = {}  # event → itself, and the last operation before it

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def watch(self, running: Any, work: Any) -> None:
        """Mark the end of an asynchronous operation, without a wait of the computing stream. Handles of our backend know it."""
        if isinstance(work, Work):
            return
        with torch.cuda.stream(self.observing):
            type(work).wait(work)
            running.done = self.mark()

    def place(self, running: Any) -> None:
        """An operation that was issued on another stream blocks the computing one only where that waits for it."""
        stream = torch.cuda.current_stream()
        if stream != self.computing:
            running.done = running.returned
            running.returned = running.waited = running.resumed = running.issued
            self.last_on[stream.cuda_stream] = running

    def attach(self, replace: Callable[[Any, str, Any], None]) -> None:
        """Wrap the two methods by which streams wait for one another, with the recorder's `replace`."""
        record, wait = torch.cuda.Stream.record_event, torch.cuda.Stream.wait_event

        def record_event(stream: Any, event: Any = None) -> Any:
            event = record(stream, event)
            if stream.cuda_stream in self.last_on:
                self.awaited[id(event)] = event, self.last_on[stream.cuda_stream]
            return event

        def wait_event(stream: Any, event: Any) -> None:
            _, running = self.awaited.pop(id(event), (None, None))
            if running is None or stream != self.computing:
                wait(stream, event)
                return
            running.waited = self.mark()
            wait(stream, event)
            running.resumed = self.mark()

        replace(torch.cuda.Stream, "record_event", record_event)
        replace(torch.cuda.Stream, "wait_event", wait_event)

    def unfinished(self, events: list[Any]) -> tuple[Any, bool]:
        """The first operation that the device has not finished, and whether it has started it. The host runs ahead and does not know."""
        for running in list(events):
            end = running.done if running.done is not None else running.returned
            if isinstance(end, torch.cuda.Event) and not end.query():
                return running, bool(running.issued.query())
        return None, True

    def seconds(self, mark: Any) -> float:
        if mark is None or isinstance(mark, float):  # of the host's clock, from a handle of our backend
            return super().seconds(mark)
        mark.synchronize()  # the host may have run ahead of the last one
        return self.origin_s + self.origin.elapsed_time(mark) / 1e3

    def begin_step(self) -> None:
        self.last_on.clear()
        self.awaited.clear()
        torch.cuda.synchronize()
        self.origin, self.origin_s = self.mark(), time.perf_counter()
