"""Start ranks on this machine, receive their messages, end all of them in every case, and start them again after a failure.

Processes are forked from a *forkserver* that has already imported torch, so a set of new ranks starts in a quarter of a
second instead of ten. They rendezvous through a file (no port to collide on) and are scheduled as batch work, which
makes gloo several times faster when ranks outnumber cores: its loop thread no longer starves the workers.

What can go wrong with a rank, and what is reported:

    it raises      its traceback, sent before its sockets close: the earliest one is the root cause, whatever the other
                   ranks report afterwards about closed connections
    it dies        the signal and the Python stack that `faulthandler` left in its log
    it hangs       `run`: no rank sent a message for `silence` seconds, or its peers timed out: it prints its stack and is killed.
                   In a training the watchdog of the other ranks finds it, and writes its failure to the run folder

The first root cause is raised; all other output is in `rank-N.log` of the run folder, if there is one. A rank whose parent has
ended exits too: it reads a pipe that closes with the parent.

**A training** (`run_restarting`) is started again after a failure. Each attempt has new processes and a new rendezvous. SIGTERM and SIGUSR1
are passed on to the ranks, which have `STOP_S` to save and to end. Ranks are ended with SIGTERM, and killed if they still run after `STUCK_S`.

**The user's script.** `multiprocessing` also runs the script in every process that it starts, so that functions of the script can be
called there. A script without an `if __name__ == "__main__":` guard would then start processes in every process. Ours import what they call
from a module, so the script is hidden from them (`main_hidden`).
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from meshwright.describe import plugins
from meshwright.describe.run_folder import rank_log
from meshwright.errors import IO_ERROR, MeshwrightError
from meshwright.host import replaced
from meshwright.training.launch.rank import (
    GROUP_TIMEOUT_S,
    INTERNAL_ERROR,
    Attempt,
    Failure,
    Start,
    error_of,
    main,
    read_failures,
    remove_failures,
    root_cause,
)
from meshwright.training.launch.temporary import temporary_folder
from meshwright.training.machine import resolve_backend, resolve_device


def main_hidden(unless: bool = False) -> AbstractContextManager[None]:
    """Processes that are started meanwhile do not run the caller's script: they import their target by name and do not need it."""
    main = sys.modules["__main__"]
    names = () if unless else ("__file__", "__spec__")
    return replaced(*((main, name, None) for name in names if hasattr(main, name)))


PRELOAD = ["meshwright.training.launch.preload"]
GRACE_S = 1.0  # after the first failure, the time the other ranks have to report theirs
STUCK_S = 5.0  # for ranks that were told to end
STOP_S = 30.0  # for ranks that save after SIGTERM
REPEAT_S = 1.0  # signals within this time are one
POLL_S = 0.1
LAST_LINES = 60  # of a log, in the report of a failure


@dataclass
class Rank:
    """One process, as its parent sees it."""

    index: int
    process: Any
    pipe: Connection
    log: Path
    state: str = "running"  # running | done | failed
    told: bool = False  # to end, by us
    result: Any = None
    failure: Failure | None = None

    def fail(self, state: str, text: str) -> None:
        self.state, self.failure = "failed", Failure(self.index, state, text, time.time())


def run(
    target: str,
    world: int,
    *args: Any,
    silence: float = 300.0,
    group_timeout: float = 120.0,
    folder: Path | None = None,
    listen: Callable[[int, Any], None] = lambda rank, message: None,
    device: str = "cpu",
    backend: str = "auto",
) -> list[Any]:
    """Run `module:function(context, *args)` on `world` new ranks and return their results, by rank.

    `listen(rank, message)` is called with each message that a rank sends while it runs. No process and no temporary
    folder is left behind, however the run ends.
    """
    device = resolve_device(device, world)
    backend = resolve_backend(backend, device)
    with started(target, world, args, folder, False, group_timeout, device, backend) as ranks:
        _receive_until_done(ranks, silence, listen)
        _collect_stacks([r for r in ranks if r.state == "running"])
        failures = [r.failure for r in ranks if r.failure is not None]
        if failures:
            raise error_of(failures, folder)
        return [r.result for r in ranks]


def run_restarting(
    target: str,
    world: int,
    *args: Any,
    folder: Path,
    device: str = "cpu",
    backend: str = "gloo",
    append: bool = False,
    restarts: int = 0,
    poll: Callable[[], None] = lambda: None,
    restarting: Callable[[Failure], bool] = lambda cause: True,
) -> Any:
    """Run `module:function(context, attempt, *args)` on `world` new ranks, and return the result of rank 0.

    If a rank fails, all ranks are ended and started again, at most `restarts` times, unless the input is wrong or `restarting`, which
    receives the root cause, returns false. The error of the root cause is raised in the end. `poll` is called about ten times per second;
    what it raises ends the ranks. After SIGTERM, `SystemExit` is raised when the ranks have ended.
    """
    attempt = Attempt()
    while True:
        remove_failures(folder)
        again = append or attempt.number > 0
        with (
            started(target, world, (attempt, *args), folder, again, GROUP_TIMEOUT_S, device, backend) as ranks,
            SignalsToRanks(ranks) as stop,
        ):
            _receive_until_done(ranks, float("inf"), polls=(poll, stop.check))
        poll()
        failures = [r.failure for r in ranks if r.failure is not None]
        if stop.requested:
            unsaved = [f for f in failures if f.error is not None and f.error["exit_code"] == IO_ERROR]
            raise error_of(unsaved[:1], folder) if unsaved else SystemExit(128 + signal.SIGTERM)
        if not failures:
            return ranks[0].result
        failures = list({f.rank: f for f in (*failures, *read_failures(folder))}.values())
        cause = root_cause(failures)
        wrong_input = cause.error is not None and cause.error["exit_code"] != INTERNAL_ERROR
        if attempt.number == restarts or wrong_input or not restarting(cause):
            raise error_of(failures, folder)
        attempt = Attempt(attempt.number + 1, cause.summary, cause.at)


class SignalsToRanks:
    """Inside the `with` block SIGTERM and SIGUSR1, which schedulers send before they end a job, are passed on to the ranks as SIGTERM; `check` raises
    when they have not ended `STOP_S` later.

    `timeout` and schedulers signal the process and its group: the two signals arrive together and count once. A later one ends at once."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks, self.requested, self.since = ranks, False, 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> SignalsToRanks:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.receive) for number in (signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame: object) -> None:
        if self.requested and time.monotonic() > self.since + REPEAT_S:
            raise SystemExit(128 + number)
        if not self.requested:
            self.requested, self.since = True, time.monotonic()
            _terminate(self.ranks)

    def check(self) -> None:
        if self.requested and time.monotonic() > self.since + STOP_S:
            raise SystemExit(128 + signal.SIGTERM)


@contextlib.contextmanager
def started(
    target: str,
    world: int,
    args: tuple,
    folder: Path | None,
    append: bool,
    group_timeout: float,
    device: str,
    backend: str,
) -> Iterator[list[Rank]]:
    """New ranks, which end with the block: those that still run get SIGTERM, and are killed after `STUCK_S`."""
    if multiprocessing.current_process().daemon:
        raise MeshwrightError(
            "MW-RANK-013",
            "a rank starts ranks",
            why="The script runs again in every rank, and starts a proof or a training when it is imported",
            fix='put that call under if __name__ == "__main__":',
        )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with temporary_folder() as rendezvous:
        logs = folder or rendezvous
        start = Start(target, args, world, rendezvous, logs, append, group_timeout, device, backend, plugins.LOADED)
        ranks: list[Rank] = []
        try:
            for index in range(world):
                ranks.append(_start(start, index))
            yield ranks
        finally:
            try:
                _terminate(ranks)
                _receive_until_done(ranks, STUCK_S)
            finally:  # also after a second signal
                _end(ranks)


def _terminate(ranks: list[Rank]) -> None:
    for r in ranks:
        if r.state == "running" and r.process.is_alive():
            r.told = True
            r.process.terminate()


def _end(ranks: list[Rank]) -> None:
    for r in ranks:
        r.pipe.close()  # a finished rank exits when its pipe closes
    for r in ranks:
        if r.state == "done":
            r.process.join(timeout=GRACE_S)
        if r.process.is_alive():
            r.process.kill()
        r.process.join()


def _start(start: Start, index: int) -> Rank:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(start, index, theirs), daemon=True)
    with main_hidden(unless=start.target.startswith("__main__:")):
        ensure_forkserver(start.target.partition(":")[0])
        try:
            process.start()
        except (EOFError, OSError) as error:
            raise not_started(error) from error
    theirs.close()
    return Rank(index, process, ours, start.logs / rank_log(index))


def not_started(error: EOFError | OSError) -> MeshwrightError:
    """The error to raise when processes cannot be started."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
        return MeshwrightError(
            "MW-RANK-012",
            f"/dev/shm has no space for the semaphores of new processes ({error.strerror})",
            why="A semaphore between processes is a small file in /dev/shm",
            fix="delete files in /dev/shm that no process uses; in a container: docker run --shm-size=1g",
        )
    time.sleep(GRACE_S)  # if Ctrl-C ended the forkserver, it is about to arrive here too
    what = "the forkserver, from which ranks are forked, has ended"
    return MeshwrightError("MW-RANK-003", what, exit_code=INTERNAL_ERROR)


def ensure_forkserver(module: str) -> None:
    """Start the forkserver, which imports `PRELOAD` and the module of the first target.

    Ctrl-C is blocked meanwhile: a terminal sends it to every process, and until `preload` has installed its handler, the
    forkserver would print a traceback."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the forkserver, before torch reads it
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, module])
    resource_tracker.ensure_running()  # unblocks Ctrl-C when it starts, so it comes first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive_until_done(
    ranks: list[Rank],
    silence: float,
    listen: Callable[[int, Any], None] = lambda rank, message: None,
    polls: Sequence[Callable[[], None]] = (),
) -> None:
    """Receive messages until every rank has returned or failed, until `GRACE_S` after the first failure, or until no rank sent a
    message for `silence` seconds."""
    last = time.monotonic()
    deadline = float("inf")
    while running := [r for r in ranks if r.state == "running"]:
        left = min(last + silence, deadline) - time.monotonic()
        if left <= 0:
            return
        for ready in wait([r.pipe for r in running], timeout=min(left, POLL_S) if polls else left):
            rank = next(r for r in running if r.pipe is ready)
            last = time.monotonic()
            _receive(rank, listen)
            if rank.state == "failed":
                deadline = min(deadline, last + GRACE_S)
        for poll in polls:
            poll()


def _receive(rank: Rank, listen: Callable[[int, Any], None]) -> None:
    try:
        kind, message = rank.pipe.recv()
    except (EOFError, OSError):  # between two messages, or within one
        rank.process.join(timeout=5)
        state = "ended" if rank.told else "died"  # what we ended is no cause
        rank.fail(state, f"{exit_name(rank.process.exitcode)}\n{last_lines(rank.log)}")
        return
    if kind == "message":
        listen(rank.index, message)
    elif kind == "done":
        rank.state, rank.result = "done", message
    else:
        rank.state, rank.failure = "failed", message


def _collect_stacks(running: list[Rank]) -> None:
    """Make hung ranks write their Python stacks to their logs."""
    for r in running:
        if r.process.is_alive():
            os.kill(r.process.pid, signal.SIGUSR2)
    if running:
        time.sleep(0.3)
    for r in running:
        r.fail("hung", last_lines(r.log))


def exit_name(code: int | None) -> str:
    """Return how a process ended: the name of a signal, or its exit code."""
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def last_lines(log: Path) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-LAST_LINES:])
