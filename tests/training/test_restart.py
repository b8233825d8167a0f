"""Ranks of a training on this machine: restarts that form a new group, the root cause, signals, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from test_launch import gone

import ranks  # noqa: F401  preloads what ranks need
from meshwright.describe.config import Config
from meshwright.describe.run_folder import lock_of, read_about, read_events, read_steps
from meshwright.errors import MeshwrightError
from meshwright.training.launch import local
from meshwright.training.launch.rank import RankFailure
from meshwright.training.run import run_training


def enter(context, folder):
    (folder / f"pid-{context.rank}").write_text(str(os.getpid()))


def total_of_ranks(context):
    import torch
    from torch import distributed

    total = torch.tensor([context.rank])
    distributed.all_reduce(total)
    return int(total)


def fail_once(context, attempt, folder, how):
    """Rank 1 fails in the first attempt; the second one forms a new group of all ranks."""
    enter(context, folder)
    total = total_of_ranks(context)
    if attempt.number == 0:
        if context.rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if context.rank == 1 and how == "raised":
            raise ZeroDivisionError("first attempt")
        total_of_ranks(context)
    return context.world, total, attempt.cause


@pytest.mark.parametrize(
    ("how", "cause"),
    [("killed", "rank 1 died: SIGKILL"), ("raised", "rank 1 raised: ZeroDivisionError: first attempt")],
)
def test_a_restart_forms_a_new_group(tmp_path, how, cause):
    """The ranks of the second attempt exchange messages, and know the root cause, which is not that of the ranks that lost rank 1."""
    start = time.monotonic()
    causes = []

    def restarting(failure):
        causes.append(failure.summary)
        return True

    run = local.run_restarting(
        "test_restart:fail_once", 3, tmp_path, how, folder=tmp_path, restarts=1, restarting=restarting
    )
    assert run == (3, 3, cause)
    assert causes == [cause]
    assert time.monotonic() - start < 110  # a rank that waits for a lost one would take the timeout of the group


def test_without_restarts_left_the_root_cause_is_raised(tmp_path):
    with pytest.raises(RankFailure, match="rank 1 died:\nSIGKILL") as failure:
        local.run_restarting("test_restart:fail_once", 2, tmp_path, "killed", folder=tmp_path)
    assert (failure.value.rank, failure.value.state, failure.value.exit_code) == (1, "died", 70)
    assert all(gone(int((tmp_path / f"pid-{rank}").read_text())) for rank in range(2))


def refuse(context, attempt, folder):
    (folder / f"attempt-{attempt.number}").touch()
    raise MeshwrightError("MW-TEST-001", "wrong input", exit_code=3)


def test_wrong_input_is_not_tried_again(tmp_path):
    with pytest.raises(MeshwrightError, match="MW-TEST-001: wrong input") as error:
        local.run_restarting("test_restart:refuse", 1, tmp_path, folder=tmp_path, restarts=3)
    assert error.value.exit_code == 3
    assert [file.name for file in tmp_path.glob("attempt-*")] == ["attempt-0"]


def stop_itself(context, attempt, folder):
    """Rank 0 stands still in a way that SIGTERM does not end; rank 1 fails."""
    enter(context, folder)
    if context.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / "deaf").touch()
        time.sleep(100)
    while not (folder / "deaf").exists():
        time.sleep(0.01)
    os._exit(3)


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "STUCK_S", 0.5)
    with pytest.raises(RankFailure, match="rank 1 died:\nexit code 3"):
        local.run_restarting("test_restart:stop_itself", 2, tmp_path, folder=tmp_path)
    assert gone(int((tmp_path / "pid-0").read_text()))
    assert time.time() - (tmp_path / "deaf").stat().st_mtime < 30


def save_on_signal(context, attempt, folder, reacts):
    enter(context, folder)
    saved = threading.Event()
    signal.signal(signal.SIGTERM, (lambda *_: saved.set()) if reacts else signal.SIG_DFL)
    (folder / "ready").touch()
    assert saved.wait(60)
    (folder / "saved").touch()
    return "saved"


@pytest.mark.parametrize("reacts", [True, False])
def test_sigterm_reaches_the_ranks(tmp_path, reacts):
    """They may save and return, or end at once; the handlers of this process are the same afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    sent = []

    def poll():
        if (tmp_path / "ready").exists() and not sent:
            sent.append(True)
            for _ in range(2):  # as `timeout` does: to the process and to its group
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as leaving:
        local.run_restarting("test_restart:save_on_signal", 1, tmp_path, reacts, folder=tmp_path, poll=poll)
    assert leaving.value.code == 143
    assert (tmp_path / "saved").exists() == reacts
    assert signal.getsignal(signal.SIGTERM) == before
    assert gone(int((tmp_path / "pid-0").read_text()))


MODEL = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 256}
WORKLOAD = {"batch": 4, "seq": 8, "precision": "fp32"}
PLAN = {"param_dtype": "fp32", "master": False, "replicate": 2}


def config(**sections):
    return Config.from_parts(MODEL, "laptop", "gloo-cpu", WORKLOAD, PLAN, **sections)


def test_a_run_goes_on_after_its_first_rank_was_killed(tmp_path):
    """Rank 0 writes the run folder: the next one goes on there, and each step has one row."""
    seen = []

    def listen(record):
        seen.append(record.step)
        if seen == [0, 1, 2, 3]:
            os.kill(lock_of(tmp_path).pid, signal.SIGKILL)

    training = run_training(config(), 12, folder=tmp_path, listen=listen)
    assert [row["step"] for row in read_steps(tmp_path)] == list(range(12)) == [r.step for r in training.steps]
    first, second = read_about(tmp_path)["attempts"]
    assert first["cause"] == "rank 0 died: SIGKILL"
    assert (second["world"], second["cause"]) == (2, "")
    assert [event["kind"] for event in read_events(tmp_path)].count("restart") == 1
    again = seen.index(second["resumed_from"] or 0, 4)
    assert seen[:again] == list(range(again))
    assert seen[again:] == list(range(second["resumed_from"] or 0, 12))
    assert not list(tmp_path.glob("*.failure.json"))


def test_a_run_that_fails_before_its_first_step_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.training.run.TARGET", "test_restart:broken")
    with pytest.raises(RankFailure, match=r"rank \d died:\nexit code 5"):
        run_training(config(), 5, folder=tmp_path)
    assert [file.name for file in tmp_path.glob("attempt-*")] == ["attempt-0"]


def broken(context, attempt, job):
    (job.folder / f"attempt-{attempt.number}").touch()
    os._exit(5)


SCRIPT = """
import sys
from pathlib import Path
import test_restart
from meshwright.training.run import run_training
run_training(test_restart.config(), 100_000, folder=Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    """A parent killed outright cannot clean up: its ranks notice."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)  # of leaked semaphores
    try:
        deadline = time.monotonic() + 200
        while not read_steps(tmp_path):
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    pid, deadline = lock_of(tmp_path).pid, time.monotonic() + 60
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
