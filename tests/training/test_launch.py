"""The harness itself: a rank that raises, hangs or dies fails its run with its own traceback, and leaves nothing."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

import ranks
from meshwright.errors import MeshwrightError
from meshwright.training.launch.rank import RankFailure, read_failures
from meshwright.training.launch.temporary import temporary_folder


def add_ranks(context, start):
    import torch
    from torch import distributed

    total = torch.tensor([start + context.rank])
    distributed.all_reduce(total)
    context.send({"rank": context.rank})
    return int(total), os.getpid()


def raise_on_two(context):
    from torch import distributed

    if context.rank == 2:
        raise ZeroDivisionError("the second rank's own words")
    distributed.barrier()


def raise_ours(context):
    raise MeshwrightError("MW-TEST-001", "ours", why="because", exit_code=3)


def hang_on_one(context):
    from torch import distributed

    context.send(os.getpid())
    if context.rank == 1:
        sleep_forever()
    distributed.barrier()


def sleep_forever():
    time.sleep(1000)


def abort_on_zero(context):
    from torch import distributed

    if context.rank == 0:
        os.abort()
    distributed.barrier()


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().split(") ")[1][0] == "Z"


def test_results_and_messages_come_back_by_rank():
    messages = []
    results = ranks.run(3, add_ranks, 10, listen=lambda rank, message: messages.append((rank, message["rank"])))
    assert [total for total, _ in results] == [33, 33, 33]
    assert sorted(messages) == [(0, 0), (1, 1), (2, 2)]
    assert all(gone(pid) for _, pid in results)


def test_the_rank_that_raised_first_is_the_one_shown():
    with pytest.raises(RankFailure, match="the second rank's own words") as failure:
        ranks.run(3, raise_on_two)
    assert failure.value.rank == 2
    assert failure.value.state == "raised"
    assert "raise_on_two" in failure.value.text


def test_our_own_errors_arrive_whole():
    with pytest.raises(MeshwrightError) as error:
        ranks.run(1, raise_ours)
    assert (error.value.code, error.value.why, error.value.exit_code) == ("MW-TEST-001", "because", 3)


@pytest.mark.parametrize(("silence", "group_timeout"), [(2.0, 60.0), pytest.param(20.0, 2.0, marks=pytest.mark.slow)])
def test_a_hung_rank_is_named_with_its_stack_and_killed(silence, group_timeout):
    """Noticed by silence or by its peers' timeouts; the sleeper is the root cause, not who waited for it."""
    pids = []
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        ranks.run(
            2, hang_on_one, silence=silence, group_timeout=group_timeout, listen=lambda rank, pid: pids.append(pid)
        )
    assert time.monotonic() - start < ranks.GROUP_TIMEOUT_S
    assert failure.value.state == "hung"
    assert "sleep_forever" in failure.value.text + "".join(failure.value.others.values())
    if group_timeout < silence:
        assert failure.value.rank == 1
        assert "sleep_forever" in failure.value.text
    assert all(gone(pid) for pid in pids)


def test_a_dead_rank_is_named_with_its_signal_and_stack(tmp_path):
    with pytest.raises(RankFailure, match="SIGABRT") as failure:
        ranks.run(2, abort_on_zero, folder=tmp_path)
    assert failure.value.rank == 0
    assert failure.value.state == "died"
    assert "abort_on_zero" in failure.value.text
    assert (tmp_path / "rank-1.log").exists()


@pytest.mark.slow
def test_ranks_end_with_their_parent(tmp_path):
    """A parent killed outright cannot clean up: its ranks notice, and remove its temporary folder."""
    code = (
        "import ranks, test_launch as t; from meshwright.training.launch import local, temporary\n"
        f"temporary.memory_folder = lambda shared: {str(tmp_path)!r}\n"
        "local.PRELOAD[1:] = []\n"  # what other tests need takes seconds
        "ranks.run(2, t.hang_on_one, listen=lambda rank, pid: print(pid, flush=True))"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not all(gone(p) for p in pids):
        time.sleep(0.05)
    assert all(gone(p) for p in pids)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_interrupted_start_says_nothing_and_leaves_nothing():
    """A terminal sends Ctrl-C to every process, and the one that ranks are forked from imports torch for seconds."""
    code = (
        "import signal, sys, tempfile; from meshwright.cli import exit_code_of; from meshwright.training.launch import local\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which what runs in the background ignores
        "make = tempfile.mkdtemp\n"
        "def told(**where): made = make(**where); print(made, flush=True); return made\n"
        "tempfile.mkdtemp = told\n"
        "sys.exit(exit_code_of(lambda: local.run('test_launch:hang_on_one', 2), False))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    meeting = parent.stdout.readline().strip()
    assert os.path.isdir(meeting)
    time.sleep(0.7)
    os.killpg(parent.pid, signal.SIGINT)
    _, printed = parent.communicate(timeout=200)
    assert (parent.returncode, printed) == (130, "")
    assert not os.path.exists(meeting)


@pytest.mark.parametrize(("device", "nearest"), [("gpu", "cpu"), ("cdua", "cuda")])
def test_an_unknown_device_is_refused_before_a_process_starts(device, nearest):
    with pytest.raises(MeshwrightError, match=f"MW-RANK-002.*Fix: --device {nearest}"):
        ranks.run(2, add_ranks, 10, device=device)


def test_a_rank_without_a_gpu_says_so():
    import torch

    world = torch.cuda.device_count() + 1
    with pytest.raises(
        MeshwrightError, match=f"MW-RANK-002: (one rank needs one GPU|{world} ranks need {world} GPUs), and"
    ):
        ranks.run(world, add_ranks, 10, device="cuda")


def wait_for_the_first(context):
    """Whether the others, who have long returned, are still there to be connected to."""
    from torch import distributed

    pids = [None] * context.world
    distributed.all_gather_object(pids, os.getpid())
    if context.rank == 0:
        time.sleep(0.5)
        for pid in pids:
            os.kill(pid, 0)  # raises where there is no such process
    return context.rank


def test_nobody_leaves_before_all_are_done():
    assert ranks.run(3, wait_for_the_first) == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "code"),
    [(EOFError("unexpected EOF"), "MW-RANK-003"), (OSError(28, "No space left on device"), "MW-RANK-012")],
)
def test_processes_that_cannot_be_started(error, code, monkeypatch):
    def start(process):
        raise error

    monkeypatch.setattr(multiprocessing.context.ForkServerProcess, "start", start)
    monkeypatch.setattr("meshwright.training.launch.local.GRACE_S", 0.0)
    with pytest.raises(MeshwrightError, match=code):
        ranks.run(1, add_ranks, 10)


def backend_of(context):
    from torch import distributed

    return distributed.get_backend()


def test_the_backend_of_the_ranks():
    from meshwright.training.machine import resolve_backend

    assert ranks.run(2, backend_of, backend="meshwright") == ["meshwright"] * 2
    assert resolve_backend("auto", "cuda") == "nccl"
    for backend, device in (("gluo", "cpu"), ("nccl", "cpu"), ("meshwright", "cuda")):
        with pytest.raises(MeshwrightError, match="MW-RANK-005"):
            resolve_backend(backend, device)


def test_a_rank_ends_soon_after_the_agent_that_started_it_was_killed(tmp_path):
    """It writes why: without this it would keep its devices until its timeouts."""
    rank = (
        "import os, pathlib, sys, time\n"
        "from meshwright.training.launch.rank import end_with_agent\n"
        "end_with_agent(3, pathlib.Path(sys.argv[1]))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    agent = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    command = [sys.executable, "-c", agent, rank, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        pid = int(started.stdout.readline())
        started.kill()
    until = time.monotonic() + 60
    while not (tmp_path / "rank-3.failure.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    (failure,) = read_failures(tmp_path)
    assert failure.error["code"] == "MW-RANK-011"
    assert not failure.is_consequence
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not runs(pid)


def test_folders_of_processes_that_were_killed_with_their_ranks_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = {"stale": f"{ended.pid}-a", "recent": f"{ended.pid}-b", "running": f"{os.getpid()}-c", "other": "x-y"}
    folders = {key: tmp_path / f"meshwright-{name}" for key, name in names.items()}
    for key, folder in folders.items():
        folder.mkdir()
        (folder / "store").write_text("")
        if key != "recent":
            os.utime(folder, (0, 0))
    with temporary_folder(str(tmp_path)) as made:
        assert made.is_dir()
        assert made.name.startswith(f"meshwright-{os.getpid()}-")
    assert not made.exists()
    assert {key for key, folder in folders.items() if folder.exists()} == {"recent", "running", "other"}


def runs(pid):
    """Whether a process runs. One that ended remains as a zombie where no process collects orphans."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
