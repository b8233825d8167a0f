"""The few things of Linux that emulation needs: rights, `ip` and `tc`, network namespaces, and processes named without doubt.

A process number is used again by the kernel once its process has ended, so a process is identified by its number and its start
time, and signalled through a file descriptor of the process (pidfd), which can never mean another one.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from meshwright.errors import MeshwrightError
from meshwright.host import process_start

NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000
NET_ADMIN, SYS_ADMIN = 12, 21  # numbers of capabilities: network devices; namespaces
COMMAND_TIMEOUT_S = 20.0
GRACE_S = 3.0  # between SIGTERM and SIGKILL
PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # where `ip` and `tc` are if a user's PATH leaves them out

Result = TypeVar("Result")


def check_rights() -> None:
    """Raise unless this is Linux, `ip` and `tc` are installed, and this process may make namespaces and links."""
    code = "MW-EMU-001"
    if not sys.platform.startswith("linux"):
        why = f"This is {sys.platform}, which has no network namespaces"
        raise MeshwrightError(code, "emulated clusters need Linux", why=why)
    missing = " and ".join(name for name in ("ip", "tc") if find_tool(name) is None)
    if missing:
        raise MeshwrightError(code, f"'{missing}' not found", why="They make the links", fix="install iproute2")
    needed = {"CAP_NET_ADMIN": NET_ADMIN, "CAP_SYS_ADMIN": SYS_ADMIN}
    lacking = " and ".join(name for name, number in needed.items() if not effective_capabilities() >> number & 1)
    if lacking:
        what = f"no permission to make network namespaces ({lacking} missing)"
        why, fix = "Namespaces and links of chosen rates need the rights of root", "run the command as root, with sudo"
        raise MeshwrightError(code, what, why=why, fix=fix)


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":" + PATH)


def effective_capabilities() -> int:
    """The bit mask of what this process may do; 0 where it cannot be read."""
    try:
        status = Path("/proc/self/status").read_text("ascii", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)


def call(tool: str, *arguments: str) -> str:
    """Run `ip` or `tc` and return its output. The arguments are a list: no shell reads them."""
    command = [find_tool(tool) or tool, *arguments]
    shown = " ".join([tool, *arguments])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeshwrightError("MW-EMU-005", f"`{shown}` failed", why=str(error)[:300]) from error
    if done.returncode:
        raise MeshwrightError("MW-EMU-005", f"`{shown}` failed", why=done.stderr.strip()[:300])
    return done.stdout


def namespace_exists(name: str) -> bool:
    return (NAMESPACES / name).exists()


def delete_namespace(name: str) -> None:
    """Delete a namespace with all its links; nothing happens if it is gone."""
    if namespace_exists(name):
        try:
            call("ip", "netns", "delete", name)
        except MeshwrightError:
            if namespace_exists(name):  # another `down` did not delete it in between
                raise


def in_namespace(name: str, function: Callable[[], Result]) -> Result:
    """Call a function in a network namespace. Linux lets a single thread enter one: it is a new thread, which ends with the
    call. Sockets and devices that the function opens stay in that namespace."""

    def enter() -> Result:
        with (NAMESPACES / name).open() as file:
            set_namespace(file.fileno())
        return function()

    with ThreadPoolExecutor(1, f"namespace {name}") as thread:
        return thread.submit(enter).result()


def set_namespace(file: int) -> None:
    """Move the calling thread into the network namespace of an open file (Python has `os.setns` from 3.12 on)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_running(process: dict[str, int] | None) -> bool:
    """Whether the process {"pid", "started"} runs."""
    return bool(process) and process_start(process["pid"]) == process["started"] != 0  # type: ignore[index]


def end_process(process: dict[str, int] | None) -> None:
    """End the process {"pid", "started"}: SIGTERM, and SIGKILL after the grace. No other process is ever signalled."""
    if not process:
        return
    try:
        handle = os.pidfd_open(process["pid"])
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not is_running(process):
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            select.select([handle], [], [], GRACE_S)  # readable when the process has ended
    finally:
        os.close(handle)
