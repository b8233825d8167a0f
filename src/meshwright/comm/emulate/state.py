"""What is known of an emulation between commands: one small file per name, which only its owner can read.

`up` writes the file before it makes anything, with the names of all namespaces it is going to make. So `down` finds everything,
also after an `up` that was killed in the middle. Two locks keep commands apart; the kernel frees them when a process ends:

    NAME.lock   held by `up` and `down` while they change something
    NAME.use    shared by every `run`; taken alone by `down` and by a measurement, which a run would disturb
"""

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshwright.comm.emulate.topology import NAME
from meshwright.errors import MeshwrightError, cannot_write
from meshwright.host import replace_file
from meshwright.units import Json


def runtime_folder() -> Path:
    """The folder of state files, with mode 0700. For root it is under /run, which lives as long as namespaces do: until the
    next boot. (`/run/user/0` ends with root's last login.)"""
    user = os.geteuid()
    folder = Path(tempfile.gettempdir()) / f"meshwright-{user}"
    for parent in ["/run"] if user == 0 else [os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"]:
        if parent and os.path.isdir(parent) and os.stat(parent).st_uid == user:
            folder = Path(parent) / "meshwright"
            break
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise cannot_write(folder, error) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        why = "State files of emulations must not be written by others"
        raise MeshwrightError(
            "MW-EMU-011", f"'{folder}' is not a folder that only you can open", why=why, fix=f"remove '{folder}'"
        )
    return folder


def state_file(name: str) -> Path:
    return runtime_folder() / f"emulate-{name}.json"


def log_file(name: str) -> Path:
    """Return the path of the switch process's log."""
    return runtime_folder() / f"emulate-{name}.log"


def names() -> list[str]:
    """The emulations that have a state file."""
    found = (path.stem.removeprefix("emulate-") for path in runtime_folder().glob("emulate-*.json"))
    return sorted(name for name in found if NAME.fullmatch(name))


def read(name: str) -> Json | None:
    """The state of an emulation; None if there is none."""
    path = state_file(name)
    try:
        state = json.loads(path.read_text("utf-8"))
        if not isinstance(state, dict) or not {"topology", "namespaces", "phase"} <= state.keys():
            raise ValueError("it lacks a field that `emulate up` writes")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise MeshwrightError("MW-EMU-011", f"state file '{path}' cannot be read", why=str(error)[:200]) from error
    return state


def write(name: str, state: Json) -> None:
    """Replace the state file; a reader sees the old content or the new."""
    path = state_file(name)
    try:
        replace_file(path, json.dumps(state), mode=0o600)
    except OSError as error:
        raise cannot_write(path, error) from error


def remove(name: str) -> None:
    """Remove the state and the log of an emulation."""
    state_file(name).unlink(missing_ok=True)
    log_file(name).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(name: str, kind: str, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Hold a lock of an emulation. The value is False if another process has it and `wait` is not set.

    The file is removed when its last holder leaves, so that nothing is left behind. A process that waited may then hold
    the lock of a removed file: it tries again with the new one."""
    path = runtime_folder() / f"emulate-{name}.{kind}"
    mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, mode)
            if _same_file(file, path):
                break
            os.close(file)
        except BlockingIOError:
            os.close(file)
            yield False
            return
        except BaseException:
            os.close(file)
            raise
    try:
        yield True
    finally:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # alone: no other holder, so the file can go
            if _same_file(file, path):
                path.unlink()
        os.close(file)


def _same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
