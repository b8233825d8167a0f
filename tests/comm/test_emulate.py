"""Emulated clusters on this machine: what `up` makes works and goes away, however it ends. Needs root; skipped without.

Every test uses a different name, so that tests and other emulations on this machine do not interfere. Timings are not asserted;
that a link is never faster than asked is no timing, but what a limit means.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from meshwright.comm.emulate import hosts, kernel_links, measure, ranks, state, system
from meshwright.comm.emulate.emulation import Emulation, find, take_down
from meshwright.comm.emulate.page import bring_up
from meshwright.comm.emulate.ranks import RunSettings
from meshwright.comm.emulate.topology import Topology, namespace, switch_namespace
from meshwright.errors import MeshwrightError
from meshwright.host import process_start


def missing_rights() -> str:
    try:
        system.check_rights()
        probe = f"mw-probe{uuid.uuid4().hex[:4]}-n0"
        system.call("ip", "netns", "add", probe)  # a container may have the capabilities and still refuse mounts
        system.delete_namespace(probe)
    except MeshwrightError as error:
        return str(error)
    return ""


REFUSED = missing_rights()
pytestmark = pytest.mark.skipif(bool(REFUSED), reason=REFUSED or "has the rights")
TOPOLOGY = Topology(nodes=2, ranks_per_node=2, rate=25e6)


@pytest.fixture
def name() -> Iterator[str]:
    name = "t" + uuid.uuid4().hex[:8]
    yield name
    deadline = time.monotonic() + 60
    while True:
        try:
            take_down(name)
            break
        except MeshwrightError:  # a run that was killed is still ending
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    assert left_over(name) == []


def left_over(name: str) -> list[str]:
    """Namespaces, files and processes of an emulation."""
    spaces = [path.name for path in system.NAMESPACES.glob(f"mw-{name}-*")]
    files = [path.name for path in state.runtime_folder().glob(f"emulate-{name}.*")]
    named = [path.name for path in hosts.FOLDER.glob(f"mw-{name}-*")]
    return spaces + files + named + processes_with(name)


def processes_with(text: str) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    line = file.read().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if text in line and process_start(int(entry)):
                found.append(line)
    return found


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Lines:
    """Collects the output of a run."""

    def __init__(self) -> None:
        self.text: list[tuple[int, str]] = []

    def __call__(self, number: int, text: str, is_error: bool) -> None:
        self.text.append((number, text))


@pytest.mark.parametrize("links", ["kernel", "process"])
def test_links_limit_and_delay_and_go_away(name: str, links: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARMUP_S", 0.2)
    monkeypatch.setattr(measure, "STREAM_S", 0.4)
    delay = 2e-3 if links == "process" else 0.0
    topology = Topology(nodes=2, ranks_per_node=1, rate=5e6, delay=delay, oversubscription=2, nodes_per_switch=1)
    with Emulation(topology, name, links) as emulation:
        found = emulation.measure()
        assert found.round_trip_s >= 2 * delay
        assert {rate.pattern for rate in found.rates} == {"alone", "ring", "across"}
        for rate in found.rates:
            assert rate.asked == pytest.approx(
                2.5e6 * 1448 / 1514
            )  # one node under a switch: its uplink is half its rate
            assert 0 < rate.slowest < 1.6 * rate.asked
        assert bool(state.read(name)["switch"]) == (links == "process")
        with pytest.raises(MeshwrightError, match="MW-EMU-003"):
            Emulation(topology, name).up()
    assert left_over(name) == []


def test_auto_takes_the_kernel_where_it_can(name: str) -> None:
    with Emulation(TOPOLOGY, name) as emulation:
        assert emulation.links == "kernel"
        assert find(name)[0].links == "kernel"
    delayed = Emulation(Topology(2, 1, 25e6, 1e-3), name)
    with delayed:
        kept = "kernel" if kernel_links.has_netem(name) else "process"
        assert delayed.links == kept


def test_every_rank_gets_its_environment(name: str) -> None:
    keys = "RANK LOCAL_RANK NODE_RANK WORLD_SIZE MASTER_ADDR"
    code = f"import os, socket; print(*(os.environ.get(k) for k in '{keys}'.split()), socket.gethostname())"
    with Emulation(TOPOLOGY, name) as emulation:
        lines = Lines()
        emulation.run([sys.executable, "-c", code], RunSettings("round-robin", line=lines))
        places = ["0 0 0", "1 0 1", "2 1 0", "3 1 1"]
        expected = [(rank, f"{place} 4 10.77.0.1 node{place[-1]}") for rank, place in enumerate(places)]
        assert sorted(lines.text) == expected
        lines = Lines()
        keys = "PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK RANK"
        code = f"import os; print(*(os.environ.get(k) for k in '{keys}'.split()))"
        emulation.run([sys.executable, "-c", code], RunSettings(per_node=True, line=lines))
        assert sorted(lines.text) == [(0, "2 2 0 None"), (1, "2 2 1 None")]


def test_nodes_reach_each_other_and_not_the_host(name: str) -> None:
    code = "; ".join(
        (
            "import os, socket, sys",
            "names = [name for _, name in socket.if_nameindex()]",
            "assert {'lo', 'eth0'} <= set(names) and len(names) < 8, names",
            "rank, port = int(os.environ['RANK']), int(os.environ['MASTER_PORT'])",
            "s = socket.create_server(('node0', port)) if rank == 0 else None",
            "print(socket.gethostbyaddr(s.accept()[1][0])[0]) if s else None",
        )
    )
    knock = """
import os, socket, time
for _ in range(200):
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        break
    except OSError:
        time.sleep(0.05)
"""
    program = f"import os\nexec({code!r} if os.environ['RANK'] == '0' else {knock!r})"
    with Emulation(TOPOLOGY, name) as emulation:
        lines = Lines()
        emulation.run([sys.executable, "-c", program], RunSettings(ranks_per_node=1, timeout_s=100, line=lines))
        assert lines.text == [(0, "node1")]


def test_the_first_failure_ends_the_others_and_is_returned(name: str) -> None:
    code = "import os, sys, time; print('begun', end=''); sys.exit(7) if os.environ['RANK'] == '2' else time.sleep(600)"
    with Emulation(TOPOLOGY, name) as emulation:
        lines = Lines()
        with pytest.raises(MeshwrightError) as failed:
            emulation.run([sys.executable, "-c", code, name], RunSettings(line=lines))
        assert (failed.value.code, failed.value.exit_code) == ("MW-EMU-007", 7)
        assert failed.value.what == "rank 2 on node 1 exited with code 7"
        assert (2, "begun") in lines.text
        assert processes_with(f"{code} {name}") == []
        with pytest.raises(MeshwrightError, match="ended by SIGKILL") as killed:
            emulation.run(["sh", "-c", "kill -9 $$"], RunSettings(ranks_per_node=1))
        assert killed.value.exit_code == 128 + signal.SIGKILL


def test_a_run_stops_at_its_time_limit_with_all_that_it_started(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 1.0)
    with Emulation(TOPOLOGY, name) as emulation:
        seconds = f"61.{name[1:].translate(str.maketrans('abcdef', '123456'))}"  # this run's sleep, and no other
        script = f"trap '' TERM; sleep {seconds} & wait; wait"
        with pytest.raises(MeshwrightError) as late:
            emulation.run(["sh", "-c", script], RunSettings(nodes=1, ranks_per_node=1, timeout_s=0.3))
        assert (late.value.code, late.value.exit_code) == ("MW-EMU-008", 124)
        deadline = time.monotonic() + 60  # a killed process is listed until the kernel has ended it
        while processes_with(seconds) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert processes_with(seconds) == []
        with pytest.raises(MeshwrightError, match="MW-EMU-009"):
            emulation.run(["no-such-command-of-ours"])
        with pytest.raises(MeshwrightError, match="MW-EMU-002"):
            emulation.run([])
        with pytest.raises(MeshwrightError, match="MW-EMU-002"):
            emulation.run(["true"], RunSettings(nodes=3))


def test_a_failed_up_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        system.call("ip", "-n", switch_namespace(name), "link", "add", "x", "type", "no-such-kind")

    monkeypatch.setattr(kernel_links, "attach", fail)
    with pytest.raises(MeshwrightError, match="MW-EMU-005"):
        Emulation(TOPOLOGY, name).up()
    assert left_over(name) == []


def test_a_rate_that_cannot_be_carried_leaves_nothing(name: str) -> None:
    with pytest.raises(MeshwrightError) as refused:
        bring_up(Emulation(Topology(2, 1, 1e12), name))  # 8 Tb/s
    assert refused.value.code == "MW-EMU-012"
    assert left_over(name) == []


def test_a_namespace_that_is_not_ours_is_left_alone(name: str) -> None:
    system.call("ip", "netns", "add", namespace(name, 1))
    try:
        with pytest.raises(MeshwrightError, match="MW-EMU-003"):
            Emulation(TOPOLOGY, name).up()
        assert not take_down(name)
        assert left_over(name) == [namespace(name, 1)]
    finally:
        system.delete_namespace(namespace(name, 1))


UP = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background of a shell ignores it
from meshwright.comm.emulate import emulation
from meshwright.comm.emulate.topology import Topology
def stop(*arguments):
    print("half", flush=True)
    time.sleep(60)
emulation.Emulation._configure_nodes = stop
emulation.Emulation(Topology(2, 1, 25e6), sys.argv[1], sys.argv[2]).up()
"""


@pytest.mark.parametrize("links", ["kernel", "process"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_up_leaves_nothing(name: str, links: str, number: int) -> None:
    """Ctrl-C removes everything at once. After SIGKILL the next `up` or `down` does; the switch process ends without a signal."""
    with subprocess.Popen(
        [sys.executable, "-c", UP, name, links], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        assert len(left_over(name)) > 3
        process.send_signal(number)
        process.wait(30)
    wait_until(lambda: not processes_with(name))
    if number == signal.SIGKILL:
        with pytest.raises(MeshwrightError, match="MW-EMU-004"):
            find(name)
        Emulation(TOPOLOGY, name).up()
        assert take_down(name)
    assert left_over(name) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_ends_its_ranks(name: str, number: int) -> None:
    with Emulation(TOPOLOGY, name):
        command = [sys.executable, "-m", "meshwright", "emulate", "run", "--name", name, "--", "sleep", "60"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_until(lambda: len(children(process.pid)) == 4)
            started = [{"pid": pid, "started": process_start(pid)} for pid in children(process.pid)]
            with pytest.raises(MeshwrightError, match="MW-EMU-006"):
                take_down(name)
            process.send_signal(number)
            assert process.wait(30) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
        wait_until(lambda: not any(map(system.is_running, started)))


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def test_a_dead_switch_process_is_reported(name: str) -> None:
    with Emulation(Topology(2, 1, 25e6, 1e-3), name, "process") as emulation:
        system.end_process(state.read(name)["switch"])
        with pytest.raises(MeshwrightError, match="MW-EMU-010"):
            emulation.run(["true"])


def test_two_emulations_stand_side_by_side(name: str) -> None:
    with Emulation(TOPOLOGY, name), Emulation(TOPOLOGY, name + "b") as second:
        lines = Lines()
        second.run(["echo", "here"], RunSettings(line=lines))
        assert len(lines.text) == 4
        assert {name, name + "b"} <= set(state.names())


def test_the_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from meshwright.cli import main

    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as leaving:
            main(["emulate", *arguments])
        return int(leaving.value.code or 0), capsys.readouterr().out

    up = ("up", "--nodes", "2", "--between", "200Mb/s", "--name", name, "--no-measure")
    code, text = call(*up)
    assert code == 0
    assert f"meshwright emulate run --name {name} -- COMMAND" in text
    code, text = call(*up, "--json")
    assert (code, json.loads(text)["error"]["code"]) == (2, "MW-EMU-003")
    code, text = call("run", "--name", name, "--", "sh", "-c", "echo $RANK", "--json")
    assert (code, sorted(text.splitlines())) == (0, ["[rank 0] 0", "[rank 1] 1"])
    assert call("run", "--name", name, "sh", "-c", "exit 5")[0] == 5
    code, text = call("status", "--name", name, "--json")
    assert [entry["name"] for entry in json.loads(text)] == [name]
    assert call("down", "--name", name) == (0, f"Emulation '{name}' removed.\n")
    assert call("down", "--name", name) == (0, f"There is no emulation '{name}'.\n")
    assert call("run", "--name", name, "--", "true")[0] == 2
