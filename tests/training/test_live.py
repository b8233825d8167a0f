"""A run in the terminal: the live picture and the plain lines, both from the run folder alone."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.describe.config import Config
from meshwright.predict.prediction import predict
from meshwright.training.folder import RunFolder, StepWriter
from meshwright.training.hooks import StepRecord
from meshwright.view.live import LiveRun, line_of, picture
from meshwright.view.tables import sparkline
from meshwright.view.watch import ProgressDisplay, progress_display

PLAN = {"param_dtype": "fp32", "master": False, "replicate": 2}
ROUTER = {"entropy": 0.5, "peak": 3.1, "idle": 0.1, "dropped": 0.2}


def configuration(cluster: str = "laptop") -> Config:
    model = {"hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab": 256}
    return Config.from_parts(model, cluster, "gloo-cpu", {"batch": 8, "seq": 16, "precision": "fp32"}, PLAN)


def create(path: Path, steps: int = 100, cluster: str = "laptop", device: str = "cpu") -> RunFolder:
    config = configuration(cluster)
    folder = RunFolder.create(path, config, predict(config), steps=steps, seed=0, device=device)
    folder.begin_attempt(world=2, plan=config.plan.title())
    return folder


def record(step: int, seconds: float = 0.1, **more: Any) -> StepRecord:
    measured = {"learning_rate": 1e-3, "mfu": 0.25, "memory_gib": 0.5, "exposed_s": {"dp": 0.02}}
    return StepRecord(step, 5 - step / 40, 1.0, 128, seconds, **{**measured, **more})


def drawn(run: LiveRun, width: int = 130) -> str:
    run.refresh()
    out = Console(file=io.StringIO(), width=width, highlight=False)
    out.print(picture(run, width))
    return out.file.getvalue()  # type: ignore[attr-defined]


def line_with(text: str, words: str) -> str:
    return next(line for line in text.splitlines() if line.lstrip().startswith(words))


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 7.0]) == "▁█"
    assert sparkline([0.41] * 100, width=7) == "▁" * 7
    assert sparkline([float(i) for i in range(800)], width=8) == "▁▂▃▄▅▆▇█"


def test_the_picture_has_measured_and_predicted_values(tmp_path: Path) -> None:
    folder = create(tmp_path)
    writer = StepWriter(folder)
    for step in range(40):
        writer.after_step(None, record(step, validation_loss=4.5 if step == 19 else None))
    folder.event("checkpoint-begun", 30, "checkpoint of step 30 begun")
    folder.event("checkpoint-finished", 30, "checkpoint of step 30 written", seconds=0.4)
    folder.event("checkpoint-begun", 40, "checkpoint of step 40 begun")
    run = LiveRun(tmp_path)
    text, p = drawn(run), predict(configuration())
    assert "dp 2" in text.splitlines()[0]
    assert "2 ranks on cpu" in text
    assert "step 40 of 100" in text
    loss = line_with(text, "loss")
    assert "4.0250" in loss
    assert "█" in loss
    assert "validation 4.5000 after step 19" in loss
    step = line_with(text, "step  ")
    assert "100 ms" in step
    assert f"{0.1 / p.step_time_s - 1:+.0%}" in step
    assert f"of {p.mfu_denominator}" in line_with(text, "MFU")
    assert "25.0%" in line_with(text, "MFU")
    assert "20 ms, 20%" in line_with(text, "communication")
    assert "exposed: dp 20 ms" in line_with(text, "communication")
    assert "512 MiB" in line_with(text, "memory")
    assert "1.28k" in line_with(text, "tokens/s")
    checkpoint = line_with(text, "checkpoint")
    assert "writing step 40" in checkpoint
    assert "last: step 30, written 0:00:0" in checkpoint
    assert "in 400 ms" in checkpoint


def test_time_left_counts_what_is_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.1 s, of which one ends every 2 s because checkpoints lie between them: 98 steps take 196 s."""
    folder, now = create(tmp_path), time.time()
    for step in range(2):
        monkeypatch.setattr("meshwright.training.folder.time.time", lambda step=step: now + 2 * step)
        folder.add(record(step))
    run = LiveRun(tmp_path)
    run.refresh()
    assert run.left_s() == pytest.approx(196, abs=0.1)


def test_time_left_does_not_count_the_pause_before_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step every 2 s, a day of pause after step 5, and again a step every 2 s: 92 steps take 184 s."""
    folder, now = create(tmp_path), time.time()
    for step in range(8):
        at = now + 2 * step + (86_400 if step > 5 else 0)
        monkeypatch.setattr("meshwright.training.folder.time.time", lambda at=at: at)
        if step == 6:
            folder.begin_attempt(world=2, plan="dp 2", first_step=6)
            run = LiveRun(tmp_path)
            run.refresh()
            assert run.left_s() is None
        folder.add(record(step))
    run = LiveRun(tmp_path)
    run.refresh()
    assert run.left_s() == pytest.approx(184, abs=0.1)


def test_a_restart_repeats_steps_and_says_why(tmp_path: Path) -> None:
    folder = create(tmp_path)
    for step in range(6):
        folder.add(record(step))
    run = LiveRun(tmp_path)
    assert "step 6 of 100" in drawn(run)
    folder.event("checkpoint-failed", 4, "step 4 was not saved: no space left")
    folder.event("fault", 5, "rank 1 was killed by signal 9")
    folder.begin_attempt(world=1, plan="one device", first_step=4)
    folder.add(record(4))
    text = drawn(run)
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3, 4]
    assert "rank 1 was killed by signal 9" in text
    assert "step 4 was not saved: no space left" in text
    assert "attempt 2 begins at step 4 on 1 ranks" in text
    assert "1 rank on cpu · attempt 2" in text


def test_times_of_another_device_are_not_compared(tmp_path: Path) -> None:
    folder = create(tmp_path, cluster="dgx-h100")
    folder.add(record(0))
    text = drawn(LiveRun(tmp_path))
    assert "The prediction is for h100-sxm, the run uses CPU processes: times do not compare" in text
    assert "%" not in line_with(text, "step  ")


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("router", [{}, ROUTER])
def test_every_line_fits_the_terminal(tmp_path: Path, width: int, router: dict[str, float]) -> None:
    folder = create(tmp_path)
    for step in range(40):
        folder.add(record(step, router=router))
    run = LiveRun(tmp_path)
    text = drawn(run, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "4.0250" in text
    assert ("expert bala" in text) == bool(router)


def test_a_loss_that_is_not_finite_is_shown(tmp_path: Path) -> None:
    folder = create(tmp_path)
    folder.add(StepRecord(0, float("nan"), float("inf"), 128, 0.1, updated=False))
    run = LiveRun(tmp_path)
    assert "NaN or infinite" in line_with(drawn(run), "loss")
    assert line_of(run, run.rows[0]) == "step     0  loss NaN or infinite  1.28k tokens/s"


def test_lines_without_a_terminal_go_by_time(tmp_path: Path) -> None:
    """A line about the first and the last step, and in between one per second, however many steps there are."""
    folder, out = create(tmp_path, steps=1000), Console(file=io.StringIO(), width=120)
    display = ProgressDisplay(LiveRun(tmp_path), out)
    for step in range(1000):
        folder.add(record(step))
    display.print_new()
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[1] for line in lines] == ["0", "999"]
    assert "loss 5.0000  norm 1.00  1.28k tokens/s  MFU 25.0%" in lines[0]
    folder.begin_attempt(world=2, plan="dp 2", first_step=500)
    folder.add(record(500))
    display.printed -= 1.1  # as if a second had passed
    display.print_new()
    lines = out.file.getvalue().splitlines()[2:]  # type: ignore[attr-defined]
    assert lines[0] == "attempt 2 begins at step 500 on 2 ranks (step 500)"


def wait_for(words: str, written: Callable[[], str], seconds: float = 60.0) -> None:
    until, text = time.monotonic() + seconds, ""
    while words not in text:
        assert time.monotonic() < until, text
        time.sleep(0.02)
        text += written()


def test_two_seconds_without_a_step_are_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshwright.view.watch.SILENCE_S", 0.1)
    with progress_display(3, tmp_path) as display:
        display.announce("measuring this machine")
        wait_for("measuring this machine (", lambda: capsys.readouterr().out)
        create(tmp_path, steps=3).add(record(0))
        wait_for("step 1 of 3 is running (", lambda: capsys.readouterr().out)


def test_steps_before_a_resume_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = create(tmp_path, steps=10)
    for step in range(5):
        folder.add(record(step))
    with progress_display(10, tmp_path):
        folder.begin_attempt(world=2, plan="dp 2", first_step=5)
        for step in range(5, 10):
            folder.add(record(step))
    printed = capsys.readouterr().out
    assert "step     0" not in printed
    assert "step     9" in printed


def test_on_a_terminal_the_picture_is_drawn_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(
        "meshwright.view.watch.console", lambda: Console(file=written, force_terminal=True, width=100, height=40)
    )
    folder = create(tmp_path)
    with progress_display(100, tmp_path):
        folder.add(record(0))
        wait_for("step 1 of 100", written.getvalue)
    assert "step 1 of 100" in written.getvalue()
    assert "since the start" in written.getvalue()
