"""The run folder: rows that survive a crash, each step once after a resume, and one run at a time."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.describe.config import Config
from meshwright.describe.run_folder import (
    EVENTS,
    LOCK,
    RUN,
    STEPS,
    RunFollower,
    lock_of,
    read_about,
    read_events,
    read_json,
    read_steps,
    state,
)
from meshwright.errors import MeshwrightError
from meshwright.predict.prediction import predict
from meshwright.training.environment import git_state
from meshwright.training.faults.inject import set_disk_full
from meshwright.training.folder import RunFolder, check_unused, claimed
from meshwright.training.hooks import StepRecord

CONFIG = Config.from_parts(
    {"hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab": 256},
    "laptop",
    "gloo-cpu",
    {"batch": 8, "seq": 16, "precision": "fp32"},
    {"param_dtype": "fp32", "master": False},
)
PREDICTION = predict(CONFIG)


def record(step: int, **more: object) -> StepRecord:
    return StepRecord(step, 5.0 - step / 10, 1.0, 128, 0.5, **more)  # type: ignore[arg-type]


def create(path: Path, steps: int = 0) -> RunFolder:
    folder = RunFolder.create(path, CONFIG, PREDICTION, steps=10, seed=3)
    folder.begin_attempt(world=1, plan="one device")
    for step in range(steps):
        folder.add(record(step))
    return folder


def test_a_row_has_the_keys_that_everyone_reads(tmp_path: Path) -> None:
    folder = create(tmp_path)
    folder.add(record(0, learning_rate=1e-3, mfu=0.4, memory_gib=1.5, exposed_s={"tp": 0.1}))
    folder.add(
        StepRecord(1, float("nan"), float("inf"), 128, 0.5, {"entropy": 0.9}, updated=False, validation_loss=4.0)
    )
    first, second = [json.loads(line) for line in (tmp_path / STEPS).read_text().splitlines()]
    assert abs(first.pop("time") - time.time()) < 60 > abs(second.pop("time") - time.time())
    assert first == {
        "step": 0, "loss": 5.0, "grad_norm": 1.0, "tokens": 128, "seconds": 0.5, "tokens_per_s": 256.0, "learning_rate": 1e-3,
        "mfu": 0.4, "memory_gib": 1.5, "exposed_s": {"tp": 0.1}, "attempt": 0,
    }  # fmt: skip
    assert second == {
        "step": 1, "loss": None, "grad_norm": None, "tokens": 128, "seconds": 0.5, "tokens_per_s": 256.0, "validation_loss": 4.0,
        "skipped": True, "router_entropy": 0.9, "attempt": 0,
    }  # fmt: skip
    again = StepRecord.of_row(second)
    assert (again.router, again.updated, again.validation_loss) == ({"entropy": 0.9}, False, 4.0)
    assert again.loss != again.loss


def test_run_json_says_what_a_plan_does_not(tmp_path: Path) -> None:
    create(tmp_path).close()
    about = read_json(tmp_path / RUN)
    assert {"steps", "seed", "started", "command", "hosts", "versions", "git", "attempts"} <= set(about)
    assert about["versions"]["torch"]
    assert about["attempts"] == [
        {"start": about["attempts"][0]["start"], "world": 1, "plan": "one device", "resumed_from": None, "ended": None, "cause": None}
    ]  # fmt: skip


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """The first attempt dies while it writes a row; the second one begins at its checkpoint of step 3."""
    folder = create(tmp_path, steps=6)
    os.write(folder.files[STEPS], b'{"step":6,"lo')
    folder.close()
    assert [row["step"] for row in read_steps(tmp_path)] == list(range(6))
    folder = RunFolder.reopen(tmp_path, CONFIG, PREDICTION, steps=20)
    assert folder.begin_attempt(world=2, plan="dp 2", first_step=3, cause="rank 1 was killed") == 1
    folder.add(record(3))
    folder.end_attempt()
    folder.close()
    rows = read_steps(tmp_path)
    assert [(row["step"], row["attempt"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    about = read_json(tmp_path / RUN)
    first, second = about["attempts"]
    assert (first["cause"], second["cause"], second["resumed_from"]) == ("rank 1 was killed", "", 3)
    assert first["ended"] is not None
    assert (about["steps"], about["seed"]) == (20, 3)
    assert [event["kind"] for event in read_events(tmp_path)] == ["restart"]


def test_a_follower_sees_rows_as_they_are_written(tmp_path: Path) -> None:
    """Also those of another attempt that repeats steps and by now has written as many rows as the first one."""
    follower = RunFollower(tmp_path)
    assert (follower.new_steps(), follower.new_events()) == ([], [])
    folder = create(tmp_path, steps=3)
    assert [row["step"] for row in follower.new_steps()] == [0, 1, 2]
    assert follower.new_steps() == []
    folder.add(record(3))
    assert [row["step"] for row in follower.new_steps()] == [3]
    folder.add(record(4))  # not read before the next attempt removes it
    folder.begin_attempt(world=1, plan="one device", first_step=2)
    for step in range(2, 7):
        folder.add(record(step))
    assert [(row["step"], row["attempt"]) for row in follower.new_steps()] == [(step, 1) for step in range(2, 7)]
    assert [event["kind"] for event in follower.new_events()] == ["restart"]
    assert (follower.new_steps(), follower.new_events()) == ([], [])


def test_a_resume_after_an_unfinished_line_appends_whole_rows(tmp_path: Path) -> None:
    folder = create(tmp_path, steps=2)
    for name in (STEPS, EVENTS):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"time":1.0,"st' + b" " * 10_000)
    folder.close()
    folder = RunFolder.reopen(tmp_path, CONFIG, PREDICTION)
    folder.begin_attempt(world=1, plan="one device", first_step=2)
    folder.add(record(2))
    folder.close()
    assert [row["step"] for row in read_steps(tmp_path)] == [0, 1, 2]
    assert [event["kind"] for event in read_events(tmp_path)] == ["restart"]


def hold(path: Path, ready: multiprocessing.synchronize.Event, end: multiprocessing.synchronize.Event) -> None:
    folder = RunFolder.reopen(path, CONFIG, PREDICTION)
    ready.set()
    end.wait(30)
    os._exit(0 if folder.lock else 1)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.training.folder.LOCK_S", 0.1)
    folder = create(tmp_path, steps=1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for make in (RunFolder.create, RunFolder.reopen):
        with pytest.raises(MeshwrightError, match=f"MW-FOLDER-001: .*Process {os.getpid()} of "):
            make(tmp_path, CONFIG, PREDICTION)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert state(tmp_path) == "running"
    folder.close()
    assert not lock_of(tmp_path).taken
    assert state(tmp_path) == "stopped"  # it never noted an end: its process died
    with pytest.raises(MeshwrightError, match=r"MW-FOLDER-002: .*already contains a run.* --resume"):
        check_unused(tmp_path)
    with pytest.raises(MeshwrightError, match="MW-FOLDER-002"):
        RunFolder.create(tmp_path, CONFIG, PREDICTION)
    assert (tmp_path / STEPS).read_bytes() == before[STEPS]


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """A killed run leaves a folder that can be resumed at once."""
    create(tmp_path).close()
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready, end))
    process.start()
    assert ready.wait(30)
    assert lock_of(tmp_path) == (True, lock_of(tmp_path).host, process.pid)
    process.kill()
    process.join(30)
    assert not lock_of(tmp_path).taken
    RunFolder.reopen(tmp_path, CONFIG, PREDICTION).close()


def test_a_reader_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    """A viewer that looks at the lock at the same moment holds it for a moment."""
    import fcntl
    import threading

    create(tmp_path).close()
    with (tmp_path / LOCK).open("rb") as viewer:
        fcntl.flock(viewer, fcntl.LOCK_SH)
        timer = threading.Timer(0.2, lambda: fcntl.flock(viewer, fcntl.LOCK_UN))
        timer.start()
        RunFolder.reopen(tmp_path, CONFIG, PREDICTION).close()
        timer.join()


def test_a_run_that_ended_before_its_first_attempt_has_stopped(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, CONFIG, PREDICTION)
    assert state(tmp_path) == "running"
    folder.close()
    assert state(tmp_path) == "stopped"


def test_states(tmp_path: Path) -> None:
    for cause, word in (("", "done"), ("stopped", "stopped"), ("rank 1: killed", "failed")):
        folder = create(tmp_path / word)
        assert state(tmp_path / word) == "running"
        folder.end_attempt(cause)
        folder.close()
        assert state(tmp_path / word) == word


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_rows_wait_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.training.folder.MOST_WAITING", 3)
    folder = create(tmp_path)
    disk, folder.files[STEPS] = folder.files[STEPS], os.open("/dev/full", os.O_WRONLY)
    for step in range(3):
        folder.add(record(step))
    assert read_steps(tmp_path) == []
    full, folder.files[STEPS] = folder.files[STEPS], disk
    folder.add(record(3))
    assert [row["step"] for row in read_steps(tmp_path)] == [0, 1, 2, 3]
    folder.files[STEPS] = full
    for step in range(4, 7):
        folder.add(record(step))
    with pytest.raises(MeshwrightError, match=r"MW-CLI-004: cannot write '.*steps.jsonl'"):
        folder.add(record(7))
    os.close(disk)
    with pytest.raises(MeshwrightError, match="MW-CLI-004"):
        RunFolder(tmp_path / STEPS / "inside")


def test_a_disk_that_becomes_full_within_a_row_loses_none(tmp_path: Path) -> None:
    folder = create(tmp_path)
    set_disk_full(True)
    try:
        for step in range(60):  # the first rows fill a block
            folder.add(record(step))
        assert 0 < len(read_steps(tmp_path)) < 60
    finally:
        set_disk_full(False)
    folder.add(record(60))
    assert [row["step"] for row in read_steps(tmp_path)] == list(range(61))


def test_what_a_full_disk_did_not_take_is_named_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = create(tmp_path)
    set_disk_full(True)
    try:
        for step in range(60):
            folder.add(record(step))
        written = len(read_steps(tmp_path))
        assert [row["step"] for row in folder.rows()] == list(range(60))
        with monkeypatch.context() as patch:
            patch.setattr("meshwright.training.folder.replace_file", full)
            folder.save("measurement", {})
            folder.end_attempt()
        folder.close()
    finally:
        set_disk_full(False)
    assert folder.lost == [
        f"{60 - written} rows of steps.jsonl (steps {written} to 59)"
    ]  # there was room for small files
    assert read_json(tmp_path / "measurement.json") == {}
    assert state(tmp_path) == "done"


def test_rows_that_are_missing_are_said_and_unreadable_ones_stay(tmp_path: Path) -> None:
    create(tmp_path, steps=6).close()
    lines = (tmp_path / STEPS).read_bytes().splitlines(keepends=True)
    (tmp_path / STEPS).write_bytes(lines[0] + b"broken\n" + b"".join(lines[2:]))
    folder = RunFolder.reopen(tmp_path, CONFIG, PREDICTION)
    folder.begin_attempt(world=1, plan="one device", first_step=5)
    folder.close()
    assert (tmp_path / STEPS).read_bytes() == lines[0] + b"broken\n" + b"".join(lines[2:5])
    assert "has the rows of 4 of the 5 steps" in read_events(tmp_path)[0]["text"]


def test_a_second_start_in_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    """Before processes start and this machine is calibrated. The lock of a killed process is free."""
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()

    def start() -> None:
        with claimed(tmp_path):
            ready.set()
            end.wait(30)

    process = context.Process(target=start)
    process.start()
    assert ready.wait(30)
    with pytest.raises(MeshwrightError, match="MW-FOLDER-001"), claimed(tmp_path):
        pass
    process.kill()
    process.join(30)
    with claimed(tmp_path):
        pass
    folder = create(tmp_path)
    with pytest.raises(MeshwrightError, match=r"MW-FOLDER-001: .*Process"), claimed(tmp_path):
        pass
    folder.close()
    with claimed(tmp_path / "not there"):
        assert not (tmp_path / "not there").exists()


def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    for command in (["init", "-q", "-b", "work"], ["add", "."], ["commit", "-q", "-m", "one"]):
        (tmp_path / "file").write_text("one")
        author = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
        subprocess.run(["git", *author, *command], cwd=tmp_path, check=True, timeout=200)
    found = git_state(tmp_path)
    assert found is not None
    assert (len(found["commit"]), found["branch"], found["changed"]) == (40, "work", 0)
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path)["changed"] == 1  # type: ignore[index]


def test_a_run_folder_says_what_is_compiled(tmp_path):
    folder = create(tmp_path / "run")
    folder.note_compilation("off", [], 0)  # off as asked for: no event
    folder.note_compilation("off", ["the schedule zb-h1 splits the backward"], 0)
    folder.close()
    assert read_about(tmp_path / "run")["compile"] == {
        "mode": "off",
        "notes": ["the schedule zb-h1 splits the backward"],
    }
    (event,) = read_events(tmp_path / "run")
    assert (event["kind"], event["text"]) == ("compile", "torch.compile: off (the schedule zb-h1 splits the backward)")


def test_a_run_that_writes_no_checkpoints_cannot_be_continued():
    from meshwright.training.run import check_keeps

    check_keeps(CONFIG)
    with pytest.raises(MeshwrightError, match="writes no checkpoints"):
        check_keeps(replace(CONFIG, checkpoint=CONFIG.checkpoint.but(keep=0)))
