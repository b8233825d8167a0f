"""Start local ranks, receive their messages, and end all of them in every case.

Processes are forked from a *forkserver* that has already imported torch, so a set of new ranks starts in a quarter of a
second instead of ten. They rendezvous through a file (no port to collide on) and are scheduled as batch work, which
makes gloo several times faster when ranks outnumber cores: its loop thread no longer starves the workers.

What can go wrong with a rank, and what is reported:

    it raises      its traceback, sent before its sockets close: the earliest one is the root cause, whatever the other
                   ranks report afterwards about closed connections
    it dies        the signal and the Python stack that `faulthandler` left in its log
    it hangs       no rank sent a message for `silence` seconds, or its peers timed out: it prints its stack and is killed

The first root cause is raised; all other output is in `rank-N.log` of the run folder, if there is one. A rank whose parent has
ended exits too: it reads a pipe that closes with the parent.

Start processes from a user's script that has no `if __name__ == "__main__":` guard.

`multiprocessing` also runs the script in every process that it starts, so that functions of the script can be called there. A script
without the guard would then start processes in every process. Ours import what they call from a module, so the script is hidden from them.
"""

from __future__ import annotations

import contextlib
import errno
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

from meshwright.describe import plugins
from meshwright.errors import MeshwrightError
from meshwright.training.launch.rank import INTERNAL_ERROR, Failure, error_of
from meshwright.training.machine import resolve_backend, resolve_device


@contextlib.contextmanager
def main_hidden(unless: bool = False) -> Iterator[None]:
    """Processes that are started meanwhile do not run the caller's script: they import their target by name and do not need it."""
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


PRELOAD = ["meshwright.training.launch.preload"]
RENDEZVOUS_BYTES = 2**24  # the store and the logs of a rendezvous fit into this
PREFIX = "meshwright-"  # of a temporary folder; the number of its process follows
STALE_S = 3600.0
GRACE_S = 1.0  # after the first failure, the time the other ranks have to report theirs


@dataclass
class Rank:
    """One process, as its parent sees it."""

    index: int
    process: Any
    pipe: Connection
    log: Path
    state: str = "running"  # running | done | raised | died | hung
    result: Any = None
    text: str = ""
    at: float = 0.0
    error: dict[str, Any] | None = None


def run(
    target: str,
    world: int,
    *args: Any,
    silence: float = 300.0,
    group_timeout: float = 120.0,
    folder: Path | None = None,
    listen: Callable[[int, Any], None] | None = None,
    device: str = "cpu",
    backend: str = "auto",
) -> list[Any]:
    """Run `module:function(context, *args)` on `world` new ranks and return their results, by rank.

    `listen(rank, message)` is called with each message that a rank sends while it runs. No process and no temporary
    folder is left behind, however the run ends.
    """
    if multiprocessing.current_process().daemon:
        raise MeshwrightError(
            "MW-RANK-013",
            "a rank starts ranks",
            why="The script runs again in every rank, and starts a proof or a training when it is imported",
            fix='put that call under if __name__ == "__main__":',
        )
    device = resolve_device(device, world)
    backend = resolve_backend(backend, device)
    rendezvous = temporary_folder()
    logs = folder or rendezvous
    logs.mkdir(parents=True, exist_ok=True)
    ranks: list[Rank] = []
    try:
        for index in range(world):
            ranks.append(_start(target, index, world, args, rendezvous, logs, group_timeout, device, backend))
        _receive_until_done(ranks, silence, listen or (lambda rank, message: None))
        failed = [r for r in ranks if r.state != "done"]
        if failed:
            raise error_of([Failure(r.index, r.state, r.text, r.at, r.error) for r in failed], folder)
        return [r.result for r in ranks]
    finally:
        for r in ranks:
            r.pipe.close()  # a finished rank exits when its pipe closes
        for r in ranks:
            if r.state == "done":
                r.process.join(timeout=GRACE_S)
            if r.process.is_alive():
                r.process.kill()
            r.process.join()
        shutil.rmtree(rendezvous, ignore_errors=True)


def temporary_folder(shared: str = "/dev/shm") -> Path:
    """A new folder for a rendezvous or a run, which its process removes. Folders that are left of processes killed together with all their ranks
    are removed here."""
    parent = memory_folder(shared)
    if parent is not None:
        remove_stale(Path(parent))
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))


def remove_stale(parent: Path) -> None:
    """Remove this user's folders whose process has ended. A container that shares the memory folder may have other process numbers: only
    folders are removed that nothing has changed for `STALE_S`."""
    for folder in parent.glob(f"{PREFIX}*-*"):
        with contextlib.suppress(OSError, ValueError):
            status = folder.lstat()
            owner = int(folder.name.removeprefix(PREFIX).partition("-")[0])
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > STALE_S and not is_running(owner):
                shutil.rmtree(folder, ignore_errors=True)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True


def memory_folder(shared: str = "/dev/shm") -> str | None:
    """The folder for a rendezvous: in shared memory, or None (the system's temporary folder) if that is missing, full or read-only."""
    try:
        status = os.statvfs(shared)
    except OSError:
        return None
    roomy = status.f_bavail * status.f_frsize >= RENDEZVOUS_BYTES and status.f_favail > 1000
    return shared if roomy and os.access(shared, os.W_OK) else None


def _start(
    target: str,
    index: int,
    world: int,
    args: tuple,
    rendezvous: Path,
    logs: Path,
    group_timeout: float,
    device: str,
    backend: str,
) -> Rank:
    context = multiprocessing.get_context("forkserver")
    from meshwright.training.launch.rank import main

    ours, theirs = context.Pipe()
    log = logs / f"rank-{index}.log"
    process = context.Process(
        target=main,
        args=(
            target,
            index,
            world,
            args,
            str(rendezvous / "store"),
            str(log),
            group_timeout,
            device,
            backend,
            plugins.LOADED,
            theirs,
        ),
        daemon=True,
    )
    with main_hidden(unless=target.startswith("__main__:")):
        ensure_forkserver(target.partition(":")[0])
        try:
            process.start()
        except (EOFError, OSError) as error:
            raise not_started(error) from error
    theirs.close()
    return Rank(index, process, ours, log)


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


def _receive_until_done(ranks: list[Rank], silence: float, listen: Callable[[int, Any], None]) -> None:
    """Receive messages until every rank is done, or until `GRACE_S` after the first failure."""
    last = time.monotonic()
    deadline = float("inf")
    while running := [r for r in ranks if r.state == "running"]:
        left = min(last + silence, deadline) - time.monotonic()
        if left <= 0:
            _collect_stacks(running)
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
        rank.state, rank.at = "died", time.monotonic()
        rank.text = f"{exit_name(code)}\n{last_lines(rank.log)}"
        return
    if kind == "message":
        listen(rank.index, message[0])
    elif kind == "done":
        rank.state, rank.result = "done", message[0]
    else:
        rank.state = "raised"
        rank.at, rank.text, rank.error = message


def _collect_stacks(running: list[Rank]) -> None:
    """Make hung ranks write their Python stacks to their logs."""
    for r in running:
        if r.process.is_alive():
            os.kill(r.process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    for r in running:
        r.state, r.at, r.text = "hung", time.monotonic(), last_lines(r.log)


def exit_name(code: int | None) -> str:
    """Return how a process ended: the name of a signal, or its exit code."""
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def last_lines(log: Path, lines: int = 60) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-lines:])
