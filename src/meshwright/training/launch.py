"""Start local ranks, hear from them, and end them: all of them, always.

Processes are forked from a *forkserver* that has torch imported already, so a set of fresh ranks costs a quarter of a
second instead of ten. They meet through a file (no port to collide on) and are scheduled as batch work, which makes
gloo several times faster when ranks outnumber cores: its loop thread no longer starves the workers.

What can go wrong with a rank, and what is told:

    it raises      its traceback, sent before its sockets close: the earliest one is the root cause, whatever the others
                   then say about closed connections
    it dies        the signal and the Python stack that `faulthandler` left in its log
    it hangs       no rank was heard for `silence` seconds, or its peers timed out: it is asked for its stack and killed

The first root cause is raised; the others stay in `rank-N.log` of the run folder where one was given. A rank whose
parent is gone ends by itself: it reads a pipe that nobody writes to and that closes with the parent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, unknown

DEVICES = ("auto", "cpu", "cuda")
PRELOAD = ["meshwright.training.preload"]
FAULT = 70  # exit code: not the fault of what was asked for
GRACE_S = 1.0  # what the other ranks get after a failure to tell their own
AFTERMATH = ("Connection closed by peer", "Connection reset", "Timed out waiting", "Broken pipe", "Connection refused")


@dataclass
class Rank:
    """The parent's view of one process."""

    index: int
    process: Any
    pipe: Connection
    log: Path
    state: str = "running"  # running | done | raised | died | hung
    result: Any = None
    text: str = ""
    at: float = 0.0
    error: dict[str, Any] | None = None

    @property
    def aftermath(self) -> bool:
        """Whether this failure only follows from another rank's."""
        return self.state == "raised" and any(words in self.text for words in AFTERMATH)


class RankFailure(MeshwrightError):
    """A rank raised, died or hung; `text` is its traceback, `others` those of the ranks that failed after it."""

    def __init__(self, rank: int, state: str, text: str, others: dict[int, str], logs: Path | None) -> None:
        self.rank, self.state, self.text, self.others = rank, state, text.rstrip(), others
        more = f"\n{len(others)} more of the ranks failed after it" if others else ""
        super().__init__(
            "MW-RANK-001",
            f"rank {rank} {state}:\n{self.text}{more}",
            fix=f"the ranks' own words are in {logs}" if logs else "",
            exit_code=FAULT,
        )


def run(
    target: str,
    world: int,
    *args: Any,
    silence: float = 300.0,
    group_timeout: float = 120.0,
    folder: Path | None = None,
    listen: Callable[[int, Any], None] | None = None,
    device: str = "cpu",
) -> list[Any]:
    """Run `module:function(context, *args)` on `world` fresh ranks and return what each returned, by rank.

    `listen(rank, message)` hears what a rank tells while it runs. Nothing is left behind, however it ends.
    """
    if device not in DEVICES:
        raise unknown("MW-RANK-002", "device", device, DEVICES, "--device {}")
    meeting = Path(tempfile.mkdtemp(prefix="meshwright-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    logs = folder or meeting
    logs.mkdir(parents=True, exist_ok=True)
    ranks: list[Rank] = []
    try:
        for index in range(world):
            ranks.append(_start(target, index, world, args, meeting, logs, group_timeout, device))
        _hear(ranks, silence, listen or (lambda rank, message: None))
        failed = [r for r in ranks if r.state != "done"]
        if failed:
            _raise_root_cause(failed, folder)
        return [r.result for r in ranks]
    finally:
        for r in ranks:
            r.pipe.close()  # who is done leaves at that
        for r in ranks:
            if r.state == "done":
                r.process.join(timeout=GRACE_S)
            if r.process.is_alive():
                r.process.kill()
            r.process.join()
        shutil.rmtree(meeting, ignore_errors=True)


def _start(
    target: str, index: int, world: int, args: tuple, meeting: Path, logs: Path, group_timeout: float, device: str
) -> Rank:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the forkserver, before torch reads it
    context = multiprocessing.get_context("forkserver")
    # Read when the forkserver starts, once a parent: what the first target needs, and what the caller adds to PRELOAD.
    context.set_forkserver_preload([*PRELOAD, target.partition(":")[0]])
    from meshwright.training.rank import main

    ours, theirs = context.Pipe()
    log = logs / f"rank-{index}.log"
    process = context.Process(
        target=main,
        args=(target, index, world, args, str(meeting / "store"), str(log), group_timeout, device, theirs),
        daemon=True,
    )
    with _main_hidden(unless=target.startswith("__main__:")):
        _ensure_server()
        try:
            process.start()
        except (EOFError, OSError) as error:
            time.sleep(GRACE_S)  # a Ctrl-C that ended the forkserver is on its way here
            raise MeshwrightError(
                "MW-RANK-003", "the process that ranks are forked from has ended", exit_code=FAULT
            ) from error
    theirs.close()
    return Rank(index, process, ours, log)


def _ensure_server() -> None:
    """Start the forkserver deaf to Ctrl-C, which a terminal sends to every process: until `preload` has made it end
    without a word, it would end with a traceback of its own."""
    resource_tracker.ensure_running()  # listens to Ctrl-C again once it has started, so it comes first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _main_hidden(unless: bool) -> Iterator[None]:
    """Ranks are told their target by name, so they need not run the caller's script again, guarded or not."""
    main = sys.modules["__main__"]
    names = () if unless else ("__file__", "__spec__")
    hidden = {name: getattr(main, name) for name in names if hasattr(main, name)}
    for name in hidden:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


def _hear(ranks: list[Rank], silence: float, listen: Callable[[int, Any], None]) -> None:
    """Until every rank is done, or the first failure and a moment more."""
    last = time.monotonic()
    deadline = float("inf")
    while running := [r for r in ranks if r.state == "running"]:
        left = min(last + silence, deadline) - time.monotonic()
        if left <= 0:
            _ask_stacks(running)
            return
        for ready in wait([r.pipe for r in running], timeout=left):
            rank = next(r for r in running if r.pipe is ready)
            last = time.monotonic()
            _receive(rank, listen)
            if rank.state in ("raised", "died") and deadline == float("inf"):
                deadline = last + GRACE_S


def _receive(rank: Rank, listen: Callable[[int, Any], None]) -> None:
    try:
        kind, *message = rank.pipe.recv()
    except (EOFError, ConnectionResetError):
        rank.process.join(timeout=5)
        code = rank.process.exitcode
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        rank.state, rank.at = "died", time.monotonic()
        rank.text = f"{name}\n{_tail(rank.log)}"
        return
    if kind == "tell":
        listen(rank.index, message[0])
    elif kind == "done":
        rank.state, rank.result = "done", message[0]
    else:
        rank.state = "raised"
        rank.at, rank.text, rank.error = message


def _ask_stacks(running: list[Rank]) -> None:
    for r in running:
        if r.process.is_alive():
            os.kill(r.process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    for r in running:
        r.state, r.at, r.text = "hung", time.monotonic(), _tail(r.log)


def _tail(log: Path, lines: int = 60) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-lines:])


def _raise_root_cause(failed: list[Rank], folder: Path | None) -> None:
    """A death or an error of its own comes before a hang, a hang before what only followed; then the earliest."""

    def weight(r: Rank) -> tuple[int, float]:
        return (2 if r.aftermath else 1 if r.state == "hung" else 0, r.at)

    root = min(failed, key=weight)
    if root.error is not None:
        raise MeshwrightError(**root.error)
    raise RankFailure(root.index, root.state, root.text, {r.index: r.text for r in failed if r is not root}, folder)
