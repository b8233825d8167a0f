"""Start the ranks of a run on this machine with torch elastic, and restart them after a failure.

The agent of torch elastic starts the processes with the variables that torchrun sets, so a rank joins here as it does under
torchrun (`join`). It notices within a tenth of a second that a process has ended, and ends the others. What is added here:

    forkserver   ranks are forked from the server of `local`, which has imported torch: 0.3 s instead of 10
    attempts     each has a new agent with a new store, and may have another number of ranks. The restart of torchrun keeps its store,
                 in which new ranks find the addresses of processes that have ended
    root cause   the agent names the first ended process that it finds; here the failures of all ranks are compared (`rank.root_cause`)
    signals      SIGTERM is passed on to the ranks, which have `STOP_S` to save and to end
    stuck ranks  the agent waits 30 s for a process that does not react to SIGTERM; here it is killed after `STUCK_S`

Private names of torch: `LocalElasticAgent._start_workers`, `._monitor_workers` and `._shutdown`, which its base class documents for
subclasses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from meshwright.describe.run_folder import rank_log
from meshwright.errors import IO_ERROR
from meshwright.host import end_with_parent
from meshwright.training.job import Attempt
from meshwright.training.launch import local
from meshwright.training.launch.local import main_hidden
from meshwright.training.launch.rank import (
    INTERNAL_ERROR,
    Failure,
    error_of,
    function_of,
    read_failures,
    remove_failures,
    root_cause,
)

LOOPBACK = "127.0.0.1"
MONITOR_S = 0.1
GRACE_S = 1.0  # after a failure that may be a consequence, the time for its cause to appear
STUCK_S = 5.0
STOP_S = 30.0
REPEAT_S = 1.0  # signals within this time are one
LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # by torch's agent


def run(
    target: str,
    world: int,
    *args: Any,
    folder: Path,
    restarts: int = 0,
    poll: Callable[[], None] = lambda: None,
    resize: Callable[[int, Sequence[Failure]], int] = lambda world, failures: world,
    restarting: Callable[[Failure], bool] = lambda cause: True,
) -> Any:
    """Run `module:function(attempt, *args)` on `world` new ranks, and return the result of rank 0.

    If a rank fails, all ranks are ended and started again, at most `restarts` times, unless the input is wrong or `restarting`, which
    receives the root cause, returns false; `resize` returns the number of ranks of the next attempt. The error of the root cause is
    raised in the end. `poll` is called about ten times per second; what it raises ends the ranks. After SIGTERM, `SystemExit` is raised
    when the ranks have ended.
    """
    attempt = Attempt()
    while True:
        remove_failures(folder)
        results, failures = run_attempt(target, world, attempt, args, folder, poll)
        if not failures:
            return results[0]
        cause = root_cause(failures)
        wrong_input = cause.error is not None and cause.error["exit_code"] != INTERNAL_ERROR
        if attempt.number == restarts or wrong_input or not restarting(cause):
            raise error_of(failures, folder)
        attempt = Attempt(attempt.number + 1, cause.summary, cause.at)
        world = resize(world, failures)


def run_attempt(
    target: str, world: int, attempt: Attempt, args: tuple, folder: Path, poll: Callable[[], None]
) -> tuple[dict[int, Any], list[Failure]]:
    """Start ranks and wait until all have returned (their results), or until one has failed and all have ended (the failures)."""
    files = local.temporary_folder()
    try:
        with quiet(), kept_handlers():
            spec = WorkerSpec(
                role="rank",
                local_world_size=world,
                entrypoint=call,
                args=(target, (attempt._replace(files=files), *args), files),
                rdzv_handler=OneMachine(),
                max_restarts=0,
                monitor_interval=MONITOR_S,
                local_addr=LOOPBACK,
            )
            agent = Agent(spec, files, folder, target.partition(":")[0], poll)
            try:
                result = agent.run()
            finally:
                agent.ending.set()
        poll()
        if agent.stopped:
            for failure in agent.failures():
                if failure.error is not None and failure.error["exit_code"] == IO_ERROR:  # what could not be saved
                    raise error_of([failure], folder)
            raise SystemExit(128 + signal.SIGTERM)
        return result.return_values, agent.failures() if result.is_failed() else []
    finally:
        shutil.rmtree(files, ignore_errors=True)


def call(target: str, args: tuple, files: Path) -> Any:
    """The entry point of a rank."""
    end_with_parent(files)
    return function_of(target)(*args)


class OneMachine(RendezvousHandler):
    """The rendezvous of one agent: a new store, and no other agent to wait for. The rendezvous of torchrun for several agents would take half
    a second at every start, for rounds of voting and records of its call stack."""

    def __init__(self) -> None:
        self.store = distributed.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.store.port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "one-machine"

    def get_run_id(self) -> str:
        return "one-machine"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is no other agent that could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class Agent(LocalElasticAgent):
    """The agent of one attempt on one machine: local ranks are global ranks."""

    def __init__(self, spec: WorkerSpec, files: Path, folder: Path, module: str, poll: Callable[[], None]) -> None:
        super().__init__(spec=spec, logs_specs=DefaultLogsSpecs(log_dir=str(files)), start_method="forkserver")
        self.folder, self.files, self.module, self.poll = folder, files, module, poll
        self.processes: list[Any] = []
        self.found: dict[int, tuple[int, float]] = {}  # rank → exit code of a failed process, and when it was noticed
        self.ending = threading.Event()  # the ranks are being ended
        self.stopped, self.stop_until = False, float("inf")

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        before = {number: signal.getsignal(number) for number in HANDLED}
        with main_hidden():
            local.ensure_forkserver(self.module)
            try:
                pids = super()._start_workers(worker_group)
            except (EOFError, OSError) as error:
                raise local.not_started(error) from error
        context: Any = self._pcontext
        self.processes = list(context._pc.processes)  # by rank; active_children() lacks those that have ended already
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, self._stop if number == signal.SIGTERM else handler)
        threading.Thread(target=kill_stuck, args=(list(pids.values()), self.ending), daemon=True).start()
        return pids

    def _monitor_workers(self, worker_group: Any) -> Any:
        self.poll()
        if time.monotonic() > self.stop_until:
            raise SystemExit(128 + signal.SIGTERM)
        self._note_exits()
        until = time.monotonic() + GRACE_S
        while self.found and all(f.is_consequence for f in self.failures()) and time.monotonic() < until:
            time.sleep(MONITOR_S / 4)
            self._note_exits()
        return super()._monitor_workers(worker_group)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.ending.set()
        context: Any = self._pcontext
        if context is not None:  # a rank that has returned waits until its result is read, which no one does now
            # `set` wakes the ranks that wait and blocks until they run: without end if one was killed
            waker = threading.Thread(target=context._worker_finished_event.set, daemon=True)
            waker.start()
            waker.join(GRACE_S)
        super()._shutdown(*args, **kwargs)

    def _note_exits(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.exitcode and rank not in self.found:
                self.found[rank] = process.exitcode, time.time()

    def _stop(self, number: int, frame: object) -> None:
        """Pass SIGTERM on to the ranks; at a later one, end at once. `timeout` and schedulers signal the process and its group: the
        two arrive together and count once."""
        if self.stopped and time.monotonic() > self.stop_until - STOP_S + REPEAT_S:
            raise SystemExit(128 + number)
        if self.stopped:
            return
        self.stopped, self.stop_until = True, time.monotonic() + STOP_S
        for process in self.processes:
            if process.is_alive():
                process.terminate()

    def failures(self) -> list[Failure]:
        """Return how ranks failed: as they wrote it, or by the exit code of their process. Ranks that the agent ended are left out."""
        written = {failure.rank: failure for place in (self.folder, self.files) for failure in read_failures(place)}
        if not self.found and not written:  # it ended after the last look, and the agent has ended the others
            self._note_exits()
        died = [
            Failure(rank, "died", f"{local.exit_name(code)}\n{local.last_lines(self.folder / rank_log(rank))}", at)
            for rank, (code, at) in self.found.items()
            if rank not in written
        ]
        return [*written.values(), *died]


def kill_stuck(pids: Sequence[int], ending: threading.Event) -> None:
    """Kill processes that still run `STUCK_S` after the first of them has ended, or after the agent began to end them: they are
    stopped, or do not react to SIGTERM."""
    if not hasattr(os, "pidfd_open"):
        return  # the agent itself kills them after 30 s
    handles = []
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handles.append(os.pidfd_open(pid))
        running = list(handles)
        while len(running) == len(pids) and not ending.is_set() and not wait(handles, MONITOR_S):
            pass
        until = time.monotonic() + STUCK_S
        while running and time.monotonic() < until:
            running = [handle for handle in running if handle not in wait(running, MONITOR_S)]
        for handle in running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        for handle in handles:
            os.close(handle)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch elastic from printing each failure: the root cause is printed once, by the caller."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.propagate, logger.handlers[:]) for logger in loggers]
    for logger in loggers:
        logger.propagate, logger.handlers = False, [logging.NullHandler()]
    try:
        yield
    finally:
        for logger, (propagate, handlers) in zip(loggers, before, strict=True):
            logger.propagate, logger.handlers = propagate, handlers


@contextlib.contextmanager
def kept_handlers() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
