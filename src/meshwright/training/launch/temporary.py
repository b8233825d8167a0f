"""Temporary folders for a rendezvous or a run: in shared memory where it has room, and removed where their process was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RENDEZVOUS_BYTES = 2**24  # the store and the logs of a rendezvous fit into this
PREFIX = "meshwright-"  # of a temporary folder; the number of its process follows
STALE_S = 3600.0


@contextlib.contextmanager
def temporary_folder(shared: str = "/dev/shm") -> Iterator[Path]:
    """A new folder for a rendezvous or a run, for the time of a `with` block. Folders that are left of processes killed together with all their
    ranks are removed here."""
    parent = memory_folder(shared)
    if parent is not None:
        remove_stale(Path(parent))
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
