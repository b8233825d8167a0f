"""`meshwright bench`: ranks are joined or named, the sweep keeps its budget, and what was measured is never lost."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import pytest

from meshwright.calibrate.points import Bench, RankInfo
from meshwright.cli import main
from meshwright.cli.bench import finish, measured
from meshwright.comm.bench import collectives, run
from meshwright.comm.bench.backends import OPERATIONS, named_hosts
from meshwright.comm.bench.collectives import (
    DEVICE,
    PAIR,
    Sweep,
    SweepProgress,
    Task,
    concurrent_pairs,
    groups_of,
    pairs_of,
    sizes_of,
)
from meshwright.comm.bench.run import Collector, sweep_of
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import ALGORITHMS
from meshwright.programs.collectives.comparison import SWITCHED
from meshwright.training.launch import local, temporary

TWO_HOSTS = ["a", "a", "b", "b"]
LONG = ("--budget", "60s", "--operations", "all-reduce")  # without the device


def bench(
    *arguments: str, environment: dict[str, str] | None = None, stderr: int = subprocess.PIPE
) -> subprocess.Popen:
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | (environment or {})
    command = [sys.executable, "-m", "meshwright", "bench", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=variables)


def bench_in_terminal(*arguments: str, environment: dict[str, str] | None = None) -> tuple[subprocess.Popen, int]:
    """A bench whose stderr is a terminal, because it shows there what it measures; and the terminal's other end."""
    ours, theirs = pty.openpty()
    try:
        return bench(*arguments, environment=environment, stderr=theirs), ours
    finally:
        os.close(theirs)


def read_terminal(terminal: int, is_enough: Callable[[str], bool], seconds: float = 90) -> str:
    """The text of a terminal until it is enough, or until the process has closed it."""
    text, limit = "", time.monotonic() + seconds
    while not is_enough(text) and time.monotonic() < limit:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                text += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # closed
                break
    return text


def has_points(text: str) -> bool:
    """Whether a bench has begun its second measurement of a collective, so that the first is complete."""
    return len(set(re.findall(r"s left\s+(?!the device)(\S.*?)\s*[\r\n\x1b]", text))) > 1


def ended(process: subprocess.Popen, seconds: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def variables_of(rank: int, world: int, port: int) -> dict[str, str]:
    local = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), **local}


def test_a_bench_that_can_measure_nothing_is_an_error(capsys, monkeypatch) -> None:
    monkeypatch.setattr(local, "run", lambda *a, listen, **k: listen(0, {"skipped": "nccl: nccl needs GPUs"}))
    with pytest.raises(SystemExit) as leaving:
        main(["bench", "--ranks", "2", "--operations", "all-reduce", "--backends", "nccl"])
    assert leaving.value.code == 2
    assert "MW-BENCH-006: nothing was measured. nccl: nccl needs GPUs" in " ".join(capsys.readouterr().err.split())


def test_the_progress_bar_does_not_wait_for_torch() -> None:
    """torch takes seconds to import on a busy machine; the bar is there before."""
    code = (
        "import sys; from meshwright.cli import bench, output\n"
        "output.patient = lambda *a, **k: sys.exit(3 if 'torch' in sys.modules else 0)\n"
        "bench.command(2, '', '', '1KiB', '1KiB', '5s', 'cpu', '5s', '', '')"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0


# What is measured


def test_pairs_and_groups() -> None:
    assert pairs_of(TWO_HOSTS) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert groups_of(TWO_HOSTS) == [(0, 1, 2, 3), (0, 1), (0, 2)]
    assert groups_of(["a", "a"]) == [(0, 1)]
    assert concurrent_pairs(TWO_HOSTS) == [((0, 2), (1, 3))]
    assert concurrent_pairs(["a"] * 4) == [((0, 2), (1, 3))]
    many = [f"h{r // 8}" for r in range(64)]
    found = pairs_of(many)
    assert len(found) < 120
    for host in range(8):  # every host is seen from at least two other hosts
        others = {b // 8 if a // 8 == host else a // 8 for a, b in found if (a // 8 == host) != (b // 8 == host)}
        assert len(others) >= 2


def test_hosts_of_one_name_and_several_namespaces_are_told_apart() -> None:
    found = named_hosts([RankInfo(rank=r, host=host) for r, host in enumerate(["a/1", "vm/7", "a/1", "vm/8"])])
    assert [info.host for info in found] == ["a", "vm-0", "a", "vm-1"]


def test_sizes_end_at_the_largest() -> None:
    assert sizes_of(Sweep(smallest=1024, largest=100_000)) == [1024, 4096, 16384, 65536, 100_000]
    assert sizes_of(Sweep())[-1] == 2**30


def test_pairs_leave_time_for_collectives() -> None:
    """Eight ranks have 28 pairs; over a slow network they took all the time, and no collective was measured."""

    class Library:
        name, ranks = "gloo", (0, 1, 2, 3)

    pair, whole = Task(Library(), PAIR, "", 1024, ((0, 1),)), Task(Library(), "all-reduce", "", 1024)
    state = SweepProgress(100, 60.0, 0.0)
    assert [bool(state.reason_to_skip(task, left)) for left in (21.0, 19.0) for task in (pair, whole)] == [0, 0, 1, 0]
    assert not SweepProgress(100, 60.0, 0.0, only_pairs=True).reason_to_skip(pair, 19.0)


def test_coarse_sizes_come_first() -> None:
    order = list(collectives.coarse_to_fine([range(5), range(10, 12)]))  # type: ignore[list-item]
    assert order == [0, 10, 3, 1, 11, 2, 4]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("gloo,ncl", "", "1KiB", "1MiB", "5s"), "backend 'ncl'"),
        (("", "allreduce", "1KiB", "1MiB", "5s"), "operation 'allreduce'"),
        (("", "", "1MiB", "1KiB", "5s"), "not a range"),
        (("", "", "1KiB", "1MiB", "1ms"), "budget"),
    ],
)
def test_wrong_options_are_refused(words, says) -> None:
    with pytest.raises(MeshwrightError, match=says):
        sweep_of(*words)


# Topology

TOPO = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-31
GPU1\tNV18\t X \tSYS\t0-31
NIC0\tPIX\tSYS\t X

Legend:
  X    = Self
"""


def test_topology_is_read() -> None:
    assert run.gpu_links(TOPO) == [["X", "NV18"], ["NV18", "X"]]
    assert run.gpu_links("") == []
    assert run.gpu_links("GPU0 GPU1\nGPU0 X what\n") == []
    found = run.detect()
    assert found["interfaces"]["lo"]["virtual"]
    json.dumps(found)


def test_interfaces_and_rdma_of_sysfs(tmp_path) -> None:
    nic = tmp_path / "class" / "net" / "eth0"
    (nic / "device").mkdir(parents=True)
    for name, text in (("speed", "100000"), ("operstate", "up"), ("mtu", "9000")):
        (nic / name).write_text(text)
    (tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    (tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1" / "rate").write_text("400 Gb/sec (4X NDR)")
    assert run.interfaces(tmp_path)["eth0"] == {
        "state": "up",
        "mtu": 9000,
        "virtual": False,
        "bytes_per_s": 12.5e9,
    }
    assert run.rdma_devices(tmp_path) == {"mlx5_0": "400 Gb/sec (4X NDR)"}
    assert run.interfaces(tmp_path / "none") == {}


# Runs


def test_four_local_ranks(tmp_path, capsys) -> None:
    file, page = tmp_path / "bench.json", tmp_path / "bench.html"
    with pytest.raises(SystemExit) as left:
        main(
            [
                "bench",
                "--operations",
                ",".join((PAIR, *OPERATIONS)),
                "--ranks",
                "4",
                "--budget",
                "3s",
                "--max-size",
                "4KiB",
                "--json",
                str(file),
                "--html",
                str(page),
            ]
        )
    assert left.value.code == 0
    found = Bench.read(file)
    assert (found.state, found.world) == ("complete", 4)
    late = {name for name in (PAIR, *OPERATIONS) for text in found.skipped if f" {name}," in text}  # on a busy machine
    assert {p.operation for p in found.points} | late == {PAIR, *OPERATIONS}
    pairs = {p.ranks for p in found.points if p.concurrent == 1 and p.operation == PAIR}
    assert pairs <= set(pairs_of(["a"] * 4))
    assert pairs
    assert '"title":"point-to-point: time"' in page.read_text("utf-8")
    collectives = {p.operation for p in found.points} - {PAIR}
    assert ("busbw" in capsys.readouterr().out) == bool(collectives)


def test_every_algorithm_of_ours_is_measured_by_name() -> None:
    sweep = Sweep(
        ("meshwright",), ("all-reduce", "all-gather", "scatter", "gather", "reduce-scatter"), 1024, 1024, 30.0
    )
    found, failure = measured(None, 2, sweep, "cpu", 20.0, lambda left, doing: None)
    assert failure is None
    algorithms = {(p.operation, p.algorithm) for p in found.points}
    late = {f"{name} {operation}" for operation, name in algorithms} | {
        text.split(",")[0][11:] for text in found.skipped
    }
    for operation in sweep.operations:
        for name in ALGORITHMS[operation]:
            assert name in SWITCHED or f"{name} {operation}" in late
    assert ("all-reduce", "ring") in algorithms


def test_interrupted_bench_keeps_what_was_measured(tmp_path, capsys, monkeypatch) -> None:
    """Ctrl-C after the fifth progress message, as the parent of the ranks receives it."""
    shown = []

    def show(left: float, doing: str) -> None:
        shown.append(doing)
        if len(shown) == 5:
            raise KeyboardInterrupt

    folders = []

    def mkdtemp(make=tempfile.mkdtemp, **options):
        folders.append(make(**options))
        return folders[-1]

    monkeypatch.setattr(temporary.tempfile, "mkdtemp", mkdtemp)
    found, failure = measured(None, 2, Sweep(operations=(PAIR,), budget_s=60.0), "cpu", 10.0, show)
    assert isinstance(failure, KeyboardInterrupt)
    assert (found.state, len(found.points)) == ("interrupted", 4)
    finish(found, str(tmp_path / "bench.json"), "")
    assert "interrupted" in capsys.readouterr().out
    assert Bench.read(tmp_path / "bench.json") == found
    (rendezvous,) = (folder for folder in folders if "meshwright-" in folder)
    assert not os.path.exists(rendezvous)


def test_bench_interrupted_while_it_measures_the_device_keeps_the_first_round(monkeypatch) -> None:
    """Ctrl-C after the first message about the device, which has one round."""
    received = []

    class Interrupted(Collector):
        def __call__(self, message):
            super().__call__(message)
            if "device" in message:
                received.append(len(self.device))
                raise KeyboardInterrupt

    monkeypatch.setattr(run, "Collector", Interrupted)
    sweep = Sweep(operations=(DEVICE,), budget_s=60.0)
    found, failure = measured(None, 1, sweep, "cpu", 30.0, lambda left, doing: None)
    assert isinstance(failure, KeyboardInterrupt)
    assert found.state == "interrupted"
    assert received == [len(found.device)]
    assert {p.samples for p in found.device} == {1}
    assert "gemm" not in {p.kind for p in found.device if p.condition}


def test_bench_interrupted_before_anything_was_measured_says_so(monkeypatch, capsys) -> None:
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "run", interrupted)
    with pytest.raises(SystemExit) as leaving:
        main(["bench", "--ranks", "2"])
    assert leaving.value.code == 130
    assert "stopped before anything was measured" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_of_a_launcher_join_and_rank_0_writes(tmp_path) -> None:
    port, file = free_port(), tmp_path / "bench.json"
    options = ("--budget", "2s", "--max-size", "4KiB", "--operations", "all-reduce", "--json", str(file))
    processes = [bench(*options, environment=variables_of(r, 2, port)) for r in range(2)]
    results = [ended(process) for process in processes]
    assert [code for code, _, _ in results] == [0, 0], results
    assert "busbw" in results[0][1]
    assert results[1][1] == ""
    assert {p.bytes for p in Bench.read(file).points} == {1024, 4096}


@pytest.mark.slow
def test_ctrl_c_ends_a_bench_with_its_result(tmp_path) -> None:
    file = tmp_path / "bench.json"
    process, terminal = bench_in_terminal("--ranks", "2", *LONG, "--json", str(file))
    shown = read_terminal(terminal, has_points)
    assert has_points(shown), shown[-300:]
    process.send_signal(signal.SIGINT)
    code, out, _ = ended(process, 20)
    assert code == 130, read_terminal(terminal, lambda text: False, 5)
    assert Bench.read(file).state == "interrupted"
    assert "interrupted" in out


def test_full_shared_memory_is_not_used(monkeypatch, tmp_path) -> None:
    """The rendezvous goes to the temporary folder; a full or missing /dev/shm is no reason to fail."""

    class Full:
        f_bavail, f_frsize, f_favail = 0, 4096, 10**6

    monkeypatch.setattr(temporary.os, "statvfs", lambda path: Full)
    assert temporary.memory_folder("/dev/shm") is None
    monkeypatch.undo()
    assert temporary.memory_folder(str(tmp_path / "none")) is None
    assert temporary.memory_folder(str(tmp_path)) == str(tmp_path)


@pytest.mark.slow
def test_rank_that_dies_leaves_the_result_of_the_others(tmp_path) -> None:
    port, file = free_port(), tmp_path / "bench.json"
    options = (*LONG, "--timeout", "10s", "--json", str(file))
    first, terminal = bench_in_terminal(*options, environment=variables_of(0, 2, port))
    second = bench(*options, environment=variables_of(1, 2, port))
    shown = read_terminal(terminal, has_points)
    assert has_points(shown), shown[-300:]
    second.kill()
    err = read_terminal(terminal, lambda text: False, 40)
    code, out, _ = ended(first, 10)
    ended(second)
    assert code == 2, (out, err)
    assert "MW-RANK-008" in err
    found = Bench.read(file)
    assert found.state == "interrupted"
    assert found.points
