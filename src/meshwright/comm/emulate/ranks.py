"""Run a command once per rank, each inside the namespace of its node, with the environment that torchrun gives.

Every process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and NODE_RANK, MASTER_ADDR and MASTER_PORT, so that
`init_process_group` with `env://` joins. With `per_node` the command is started once per node and starts the ranks itself: then the
variables PET_… give torchrun its number of nodes and processes, its rank and the rendezvous, so that `torchrun script.py` needs no
option.

Output comes line by line, prefixed with the rank. When one process fails, or on Ctrl-C, SIGTERM or the time limit, the others are
ended: SIGTERM first, SIGKILL to what is left after a grace. Each process leads its own process group, which is what is signalled, so
that processes it started end too; if this process is killed, the kernel kills them.
"""

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

from meshwright.comm.emulate import system
from meshwright.comm.emulate.topology import (
    INTERFACE,
    RankPlace,
    Topology,
    address,
    check_range,
    namespace,
    places,
    refused,
)
from meshwright.errors import MeshwrightError
from meshwright.units import Json

GRACE_S = 5.0
LEFT_OVER_S = 0.5  # for output that a process still has in its pipe when it ends
TIMED_OUT = 124  # exit code, as that of `timeout`
PR_SET_PDEATHSIG = 1
CLONE_NEWUTS = 0x04000000  # a namespace of host names
Line = Callable[[int, str, bool], None]  # rank or node, text, whether it is stderr


@dataclass(frozen=True)
class RunSettings:
    """Options of running a command. 0 nodes or ranks: those of the emulation. `line` receives each line of output."""

    placement: str = "blocks"
    per_node: bool = False
    nodes: int = 0
    ranks_per_node: int = 0
    timeout_s: float | None = None
    line: Line | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Member:
    """One process, and the threads that pass on what it prints."""

    number: int
    node: int
    process: subprocess.Popen[bytes]
    readers: list[threading.Thread] = field(default_factory=list)


def run(name: str, topology: Topology, command: Sequence[str], settings: RunSettings) -> None:
    """Run the command everywhere; return when all have ended well, raise when the first one fails."""
    nodes = settings.nodes or topology.nodes
    per_node = settings.ranks_per_node or topology.ranks_per_node
    check_range("nodes", nodes, topology.nodes)
    check_range("ranks-per-node", per_node, 256 // nodes)
    if not command:
        raise refused("there is no command to run", "meshwright emulate run -- python train.py")
    if shutil.which(command[0]) is None:
        why = "It is not on PATH, or not a program"
        raise MeshwrightError("MW-EMU-009", f"command '{command[0]}' not found", why=why)
    members: list[Member] = []
    unit = "node" if settings.per_node else "rank"
    try:
        port = free_port(name)
        for place in places(nodes, per_node, settings.placement):
            if settings.per_node and place.local_rank:
                continue
            variables = environment(place, nodes, per_node, port, settings)
            number = place.node if settings.per_node else place.rank
            members.append(Member(number, place.node, start(name, place.node, command, variables)))
        watch(members, unit, settings)
    finally:
        end(members)


def environment(place: RankPlace, nodes: int, per_node: int, port: int, settings: RunSettings) -> dict[str, str]:
    """The variables of one process, on top of those of this one."""
    node, master = {"NODE_RANK": place.node}, {"MASTER_ADDR": address(0), "MASTER_PORT": port}
    common: Json = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE, "PYTHONUNBUFFERED": 1}
    common |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "GROUP_RANK": place.node, **node, **master}
    if settings.per_node:
        elastic = {"NNODES": nodes, "NPROC_PER_NODE": per_node, "LOCAL_ADDR": address(place.node), **node, **master}
        common |= {f"PET_{key}": value for key, value in elastic.items()}
    else:
        common |= {"RANK": place.rank, "WORLD_SIZE": nodes * per_node, "GROUP_WORLD_SIZE": nodes}
        common |= {"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": per_node}
    return {**os.environ, **{name: str(value) for name, value in common.items()}, **settings.environment}


def free_port(name: str) -> int:
    """A port on which nothing listens in the namespace of node 0."""

    def bind() -> int:
        with socket.create_server((address(0), 0)) as server:
            return int(server.getsockname()[1])

    return system.in_namespace(namespace(name, 0), bind)


def start(name: str, node: int, command: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    tool = system.find_tool("ip") or "ip"
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if not libc.unshare(CLONE_NEWUTS):  # a host name for each node: tools tell hosts apart by it
            socket.sethostname(f"node{node}")
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
        with contextlib.suppress(OSError):  # gloo's loop thread starves the workers otherwise
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    return subprocess.Popen(
        [tool, "netns", "exec", namespace(name, node), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables,
        start_new_session=True,
        preexec_fn=prepare,
    )


def watch(members: list[Member], unit: str, settings: RunSettings) -> None:
    """Pass output on until all processes have ended; raise when one fails or the time is over."""
    deadline = time.monotonic() + settings.timeout_s if settings.timeout_s else float("inf")
    line = settings.line or print_line(unit, len(members))
    with selectors.DefaultSelector() as selector:
        for member in members:
            for stream in (member.process.stdout, member.process.stderr):
                told = (stream, member.number, stream is member.process.stderr, line)
                member.readers.append(threading.Thread(target=pass_on, args=told, daemon=True))
                member.readers[-1].start()
            selector.register(os.pidfd_open(member.process.pid), selectors.EVENT_READ, member)
        try:
            while selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise timed_out(members, unit, settings.timeout_s or 0.0)
                for key, _ in selector.select(min(left, 3600.0)):
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    if key.data.process.wait():
                        raise failed(key.data, unit, len(members))
        finally:
            for key in list(selector.get_map().values()):
                os.close(key.fd)
            until = time.monotonic() + LEFT_OVER_S
            for member in members:
                for reader in member.readers if member.process.poll() is not None else ():
                    # A process that outlives its rank keeps a pipe open
                    reader.join(max(0.0, until - time.monotonic()))


def pass_on(stream: IO[bytes], number: int, is_error: bool, line: Line) -> None:
    """Pass on what a process prints, line by line, until its output ends or the run closes it."""
    with contextlib.suppress(ValueError):
        for text in stream:
            line(number, text.decode("utf-8", "replace").rstrip("\r\n"), is_error)


def end(members: list[Member]) -> None:
    """End what still runs, by the process groups that this process started. Ctrl-C during the grace ends it at once."""
    for number, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        running = [member for member in members if member.process.poll() is None]
        for member in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.process.pid, number)
        deadline = time.monotonic() + seconds
        with contextlib.suppress(KeyboardInterrupt):
            for member in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    member.process.wait(max(0.0, deadline - time.monotonic()))
    for member in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(member.process.pid, signal.SIGKILL)  # what the process started and left behind
        for stream, reader in zip((member.process.stdout, member.process.stderr), member.readers, strict=False):
            if stream is not None and not reader.is_alive():  # closing what a thread reads would wait for it
                stream.close()


def failed(member: Member, unit: str, count: int) -> MeshwrightError:
    code = member.process.returncode
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    others = f"The other {count - 1} {unit}s were ended" if count > 1 else ""
    where = "" if unit == "node" else f" on node {member.node}"
    exit_code = 128 - code if code < 0 else code
    return MeshwrightError("MW-EMU-007", f"{unit} {member.number}{where} {how}", why=others, exit_code=exit_code)


def timed_out(members: list[Member], unit: str, seconds: float) -> MeshwrightError:
    late = [str(member.number) for member in members if member.process.poll() is None]
    who = f"{unit} {', '.join(late)}" if len(late) < 9 else f"{len(late)} {unit}s"
    what, fix = f"{who} still ran after {seconds:g} s", f"--timeout {2 * seconds:g}"
    return MeshwrightError("MW-EMU-008", what, fix=fix, exit_code=TIMED_OUT)


def print_line(unit: str, count: int) -> Line:
    """Print lines with their rank to stdout and stderr, each line in one call."""
    width = len(str(count - 1))

    def line(number: int, text: str, is_error: bool) -> None:
        stream: IO[str] = sys.stderr if is_error else sys.stdout
        stream.write(f"[{unit} {number:>{width}}] {text}\n")
        stream.flush()

    return line
