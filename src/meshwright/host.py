"""What the operating system says about this machine and its processes; files and attributes that are replaced."""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any


def usable_cores() -> float:
    """Cores that this process may use: its affinity, or the quota of its control group if that is less."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        return min(cores, max(float(quota) / float(period), 0.1))
    except (OSError, ValueError):  # no such group, or "max"
        return cores


def usable_processes() -> int:
    """The number of processes that can compute at the same time: `usable_cores` rounded down, at least one."""
    return max(1, int(usable_cores()))


def end_with_parent(folder: Path | None = None, parent_ended: Callable[[], object] | None = None) -> threading.Thread:
    """Start a thread that ends this process, made by `multiprocessing`, as soon as its parent has ended, or `parent_ended` returns. It
    removes the parent's temporary `folder`, because a parent that was killed (SIGKILL) cannot. Works on every system: the parent holds one
    end of a pipe, which the kernel closes with it."""
    parent = multiprocessing.parent_process()

    def end() -> None:
        if parent_ended is not None:
            parent_ended()
        elif parent is not None:
            wait([parent.sentinel])
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        # The destructor of a process group may wait for peers that have ended; the kernel closes its sockets at once.
        os._exit(0)

    thread = threading.Thread(target=end, name="meshwright-parent", daemon=True)
    thread.start()
    return thread


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C wait for the end of the block: a process that starts in it is known before its parent is told to end."""
    received: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()  # only there signals are handled
    numbers = (signal.SIGTERM, signal.SIGINT) if in_main else ()
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)


def process_start(pid: int) -> int:
    """Return the start time of a process, in clock ticks since boot. With the pid it identifies a process. 0 if there is no such process, if only its
    exit code is left, or if the system does not list processes in /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def replace_file(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file that others may be reading: they see the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside the `with` block these attributes (owner, name, value) have other values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for change in changes:
        setattr(*change)
    try:
        yield
    finally:
        for change in before:
            setattr(*change)
