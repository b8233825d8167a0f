"""One emulated cluster: make it, measure it, run commands in it, remove it.

    with Emulation(Topology(nodes=4, ranks_per_node=2, rate=25e6, delay=1e-3)) as cluster:
        cluster.run(["python", "train.py"])

`up` either succeeds or leaves nothing: whatever it made is removed when it fails or is interrupted, and if it is killed the next
`up` or `down` of the same name removes it. `down` may be called at any time.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from meshwright.comm.emulate import hosts, kernel_links, ranks, state, system
from meshwright.comm.emulate.measure import LinkMeasurement, measure
from meshwright.comm.emulate.topology import (
    INTERFACE,
    MTU,
    Topology,
    address,
    check_name,
    namespace,
    switch_namespace,
)
from meshwright.errors import MeshwrightError, unknown
from meshwright.host import process_start
from meshwright.units import Json

LINKS = ("auto", "kernel", "process")
READY_S = 20.0
WINDOW_BYTES, WINDOW_S = 256 * 2**10, 1e-2


def tcp_settings(topology: Topology) -> dict[str, str]:
    """Settings of TCP in every node, which make it behave as the transport of a lossless fabric.

    Nothing is lost, so Reno's window grows to its limit at once and stays there: connections start at full rate, also after a
    pause, and share a link evenly. (Cubic takes a longer queue for a reason to grow slowly; BBR probes.) The limit is what fills
    the link four times over, so that the queue before a shared link stays short."""
    window = max(WINDOW_BYTES, int(4 * topology.rate * (topology.round_trip + WINDOW_S)))
    buffer = f"4096 {2 * window} {2 * window}"  # the kernel counts its own records as half of a buffer
    return {
        "net/ipv4/tcp_congestion_control": "reno",
        "net/ipv4/tcp_slow_start_after_idle": "0",
        "net/ipv4/tcp_no_metrics_save": "1",
        "net/ipv4/tcp_rmem": buffer,
        "net/ipv4/tcp_wmem": buffer,
        "net/ipv6/conf/all/disable_ipv6": "1",
    }


class Emulation:
    """An emulated cluster of a name. `links`: "kernel" (tbf, netem), "process" (the switch process), or "auto": the process only
    if there is a delay and the kernel lacks netem."""

    def __init__(self, topology: Topology, name: str = "default", links: str = "auto") -> None:
        check_name(name)
        if links not in LINKS:
            raise unknown("MW-EMU-002", "kind of links", links, LINKS, "--links {}")
        self.topology, self.name, self.links = topology, name, links

    def __enter__(self) -> Emulation:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def namespaces(self) -> list[str]:
        return [switch_namespace(self.name), *(namespace(self.name, node) for node in range(self.topology.nodes))]

    def up(self) -> None:
        """Make the namespaces and the links."""
        system.check_rights()
        with state.locked(self.name, "lock"):
            found = state.read(self.name)
            if found is not None and found["phase"] == "up":
                raise MeshwrightError(
                    "MW-EMU-003", f"emulation '{self.name}' is already up", fix=down_command(self.name)
                )
            if found is not None:
                remove(self.name, found)  # of an `up` that was killed
            taken = [name for name in self.namespaces if system.namespace_exists(name)]
            if taken:
                what = f"network namespace '{taken[0]}' exists, and no emulation of ours made it"
                raise MeshwrightError("MW-EMU-003", what, fix=f"--name {self.name[:8]}2")
            record: Json = {"phase": "starting", "topology": asdict(self.topology), "namespaces": self.namespaces}
            record |= {"links": self.links, "switch": None}
            state.write(self.name, record)
            try:
                self._build(record)
            except BaseException:
                remove(self.name, record)
                raise

    def _build(self, record: Json) -> None:
        for name in self.namespaces:
            system.call("ip", "netns", "add", name)
            system.call("ip", "-n", name, "link", "set", "lo", "up")
            hosts.write(name, self.topology.nodes)
        if self.links == "auto":
            by_kernel = self.topology.delay == 0 or kernel_links.has_netem(self.name)
            self.links = "kernel" if by_kernel else "process"
        record["links"] = self.links
        if self.links == "kernel":
            kernel_links.build(self.name, self.topology)
            self._configure_nodes()
            state.write(self.name, {**record, "phase": "up"})
        else:
            self._start_switch(record)

    def _start_switch(self, record: Json) -> None:
        """Start the switch process. It carries frames once its number is in the state file, where `down` finds it."""
        command = [sys.executable, "-m", "meshwright.comm.emulate.switch", self.name, json.dumps(asdict(self.topology))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        log, pipe = state.log_file(self.name), subprocess.PIPE
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as errors:
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True, cwd="/", env=environment
            )
        record["switch"] = {"pid": process.pid, "started": process_start(process.pid)}
        assert process.stdin is not None
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], READY_S)
        if not ready or process.stdout.readline() != b"ready\n":
            lines = log.read_text("utf-8", errors="replace").split("\n")
            why = next((line[:300] for line in reversed(lines) if line.strip()), "")
            raise MeshwrightError("MW-EMU-005", "the switch process did not start", why=why)
        self._configure_nodes()
        state.write(self.name, {**record, "phase": "up"})
        process.stdin.write(b"carry\n")
        process.stdin.close()
        process.stdout.close()
        process.returncode = 0  # it outlives this process: no warning when the object is deleted

    def _configure_nodes(self) -> None:
        for node in range(self.topology.nodes):
            name = namespace(self.name, node)
            system.in_namespace(name, lambda: write_settings(tcp_settings(self.topology)))
            system.call("ip", "-n", name, "addr", "add", f"{address(node)}/24", "dev", INTERFACE)
            system.call("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(MTU), "up")

    def down(self) -> bool:
        """Remove everything; False if there was nothing to remove. Raises while a `run` uses the emulation."""
        return take_down(self.name)

    def measure(self) -> LinkMeasurement:
        """Measure rates and round trips; raises while a `run` uses the emulation."""
        with state.locked(self.name, "use", wait=False) as free:
            if not free:
                raise in_use(self.name)
            require_up(self.name)
            return measure(self.name, self.topology)

    def run(self, command: Sequence[str], settings: ranks.RunSettings | None = None) -> None:
        """Run a command on every rank, or on every node; raises with the exit code of the first one that fails."""
        with state.locked(self.name, "use", shared=True):
            require_up(self.name)
            ranks.run(self.name, self.topology, command, settings or ranks.RunSettings())


def write_settings(settings: dict[str, str]) -> None:
    """Write kernel settings in the namespace of this thread. A kernel without one of them keeps its own behaviour."""
    for path, value in settings.items():
        try:
            Path("/proc/sys", path).write_text(value, "ascii")
        except OSError:
            continue


def find(name: str) -> tuple[Emulation, Json]:
    """The emulation of this name that is up, and its state."""
    check_name(name)
    found = require_up(name)
    return Emulation(Topology(**found["topology"]), name, found["links"]), found


def require_up(name: str) -> Json:
    """The state of an emulation; raises if it is not up or its switch process has ended."""
    found = state.read(name)
    if found is None or found["phase"] != "up":
        names = [other for other in state.names() if other != name]
        fix = f"--name {names[0]}" if names else "meshwright emulate up --nodes 2 --between 200Mb/s,1ms"
        raise MeshwrightError("MW-EMU-004", f"there is no emulation '{name}'", valid=names, fix=fix)
    if found["switch"] and not system.is_running(found["switch"]):
        what = f"the switch process of emulation '{name}' has ended, and no node reaches another"
        raise MeshwrightError("MW-EMU-010", what, fix=down_command(name))
    missing = [space for space in found["namespaces"] if not system.namespace_exists(space)]
    if missing:
        what = f"network namespace '{missing[0]}' of emulation '{name}' is gone"
        raise MeshwrightError("MW-EMU-010", what, fix=down_command(name))
    return found


def down_command(name: str) -> str:
    return f"meshwright emulate down --name {name}"


def take_down(name: str) -> bool:
    """Remove the emulation of a name; False if there is none."""
    check_name(name)
    if state.read(name) is None:
        return False
    system.check_rights()
    with state.locked(name, "lock"), state.locked(name, "use", wait=False) as free:
        found = state.read(name)
        if found is None:
            return False
        if not free:
            raise in_use(name)
        remove(name, found)
    return True


def remove(name: str, found: Json) -> None:
    """End the switch process, delete the namespaces (their links go with them), then the state that names them."""
    system.end_process(found["switch"])
    for space in found["namespaces"]:
        hosts.remove(space)
        system.delete_namespace(space)
    state.remove(name)


def in_use(name: str) -> MeshwrightError:
    what, fix = (
        f"emulation '{name}' is in use by an `emulate run` or a measurement",
        "wait until it has ended, or end it with Ctrl-C",
    )
    return MeshwrightError("MW-EMU-006", what, fix=fix)
