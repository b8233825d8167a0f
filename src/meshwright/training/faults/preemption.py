"""A preemption signal (SIGTERM, SIGUSR1): finish the step, save, and exit cleanly, all ranks after the same step.

The scheduler may signal only some ranks, and at different moments. They must agree on the last step, without a collective in every step:

    before step s    a rank that was signalled writes the request "stop after step s" where all ranks can read it
    after step s     every rank reads it

This suffices: no rank can finish step s before the signalled rank has entered it, since every step sums its loss over all ranks. So when a
rank looks after step s, the request is there. A rank that sees it earlier waits for step s. Replicas of local SGD
meet only when they average, so there the request names the next step that averages.

The request is a file where all ranks are on one host. Between hosts it is a key of the process group's store: a file system of
a network may show a new file only seconds later.

A launcher also sends SIGTERM to end ranks whose peer has died. Such a rank is blocked in a collective and never reaches its next step: Python
runs no handler there. The kernel's part of the handler writes a byte to a socket at once; the watchdog reads it (`arrived`), and ends a rank
that makes no progress after a signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from meshwright.training.hooks import Hook
from meshwright.training.records import StepRecord

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
AGENT_S = 10.0  # for an agent of torchrun to notice that a node joins; it looks every few seconds at most


class StopRequests(Protocol):
    """A place for the step after which all ranks stop. The first request stays."""

    def request(self, step: int) -> None: ...
    def requested(self) -> int | None: ...


class StopFile:
    """The request as a file, for ranks of one host: reading it before it exists takes a microsecond."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def request(self, step: int) -> None:
        new = f"{self.path}.{os.getpid()}"
        Path(new).write_text(str(step), "ascii")
        with contextlib.suppress(FileExistsError):
            os.link(new, self.path)  # unlike a rename, this fails if the file exists
        os.unlink(new)

    def requested(self) -> int | None:
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return int(os.read(descriptor, 32))
        finally:
            os.close(descriptor)


class StopKey:
    """The request as a key of a torch.distributed store, for ranks of several hosts."""

    def __init__(self, store: Any, key: str = "stop-after-step") -> None:
        self.store, self.key = store, key

    def request(self, step: int) -> None:
        self.store.compare_set(self.key, "", str(step))

    def requested(self) -> int | None:
        return int(self.store.get(self.key)) if self.store.check([self.key]) else None


class StopOnSignal(Hook):
    """Stops the training after a signal. The checkpoint's `finish` saves the last step, as at the end of any training."""

    def __init__(self, requests: StopRequests, signals: tuple[signal.Signals, ...] = SIGNALS) -> None:
        self.requests, self.signals = requests, signals
        self.received: signal.Signals | None = None
        self.stop_step: int | None = None
        self.previous: dict[signal.Signals, Any] = {}
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)

    def start(self, trainer: Any) -> None:
        for number in self.signals:
            self.previous[number] = signal.signal(number, self.receive)
        signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)

    def arrived(self) -> bool:
        """Whether one of the signals arrived since the last call, also if the main thread is blocked; for another thread."""
        try:
            return any(number in self.signals for number in self.reader.recv(64))
        except BlockingIOError:
            return False

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

    def before_step(self, trainer: Any) -> None:
        if self.received is not None and self.stop_step is None:
            self.stop_step = next_common_step(trainer)
            self.requests.request(self.stop_step)

    def after_step(self, trainer: Any, record: StepRecord) -> None:
        stop = self.requests.requested()
        if stop is not None and record.step >= stop:
            self.stop_step, trainer.stopped = stop, True

    def finish(self, trainer: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if self.previous:
            signal.set_wakeup_fd(-1)
        self.previous.clear()


def await_agent() -> NoReturn:
    """End a rank of torchrun that stopped because of a signal to another node.

    Its agent would take a normal exit as the end of the job, and leave. If a node joins, the agent ends this process a moment later, and
    restarts it. If a node leaves, the agent does not know of it: an exit code makes it restart this rank, with the nodes that remain."""
    time.sleep(AGENT_S)
    raise SystemExit(128 + signal.SIGTERM)


def default_store() -> Any:
    """The store of the default process group. Private name of torch: `distributed_c10d._get_default_store`."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def next_common_step(trainer: Any) -> int:
    """The next step in which all ranks communicate: the coming one, or under local SGD the one that averages."""
    local = trainer.parallel.local
    return int(trainer.step) if local is None else int(trainer.step + local.every - 1 - local.since)
