"""The workspace Runs in a real browser: runs grow as a stream, are compared, and survive a restart of the server; dropped traces and recordings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from meshwright.describe.config import load
from meshwright.describe.run_folder import STEPS, json_line
from meshwright.errors import MeshwrightError
from meshwright.explain.beside import beside_plan
from meshwright.explain.explanation import explain_traces
from meshwright.explain.folder import read_traces
from meshwright.training.folder import RunFolder
from meshwright.training.hooks import StepRecord
from meshwright.view.json_schema import schema_of
from meshwright.view.page.shapes import SHAPES
from meshwright.view.page.subject import Subject
from meshwright.view.report import page as report
from meshwright.view.traces import data, html
from web.browser import shows, until
from web.running import start, stop
from web.test_page_views import violations

Open = Callable[..., Any]
CONFIG = load("examples/demo-dp2-tp2.toml")
TRACES = Path(__file__).parents[1] / "explain" / "traces"
WRITTEN = """() => {
  const { prototype } = CanvasRenderingContext2D, { fillText } = prototype;
  window.written = [];
  prototype.fillText = function (text, ...place) { written.push(text); fillText.call(this, text, ...place); };
  document.dispatchEvent(new CustomEvent("meshwright:theme"));
}"""
LOSS = "#view .charts .panel:first-child"


def begin_run(folder: Path, losses: list[float]) -> None:
    """The files of a run that trains."""
    folder.mkdir()
    (folder / "plan.toml").write_text(CONFIG.to_toml(), "utf-8")
    (folder / "prediction.json").write_text(json.dumps(Subject(CONFIG).estimate.prediction.as_dict()), "utf-8")
    add_steps(folder, losses)


def add_steps(folder: Path, losses: list[float], first: int = 0) -> None:
    rows = [StepRecord(first + i, loss, 5.0, 1024, 0.3).row() for i, loss in enumerate(losses)]
    with (folder / STEPS).open("ab") as file:
        file.write(b"".join(map(json_line, rows)))


def end_run(folder: Path) -> None:
    """The files that `train` writes at its end."""
    prediction = json.loads((folder / "prediction.json").read_text("utf-8"))
    span = dict(rank=0, stream="schedule", name="0F0", start_s=0.0, duration_s=0.1, category="F", args={})
    parts = {"version": 1, "steps": 3, "busiest_rank": 0, "exposed_s": {"tp": 0.1}, "predicted_exposed_s": {"tp": 0.2}}
    files = {
        "timeline": {"version": 1, "step": 2, "measured": [span], "simulated": [span]},
        "communication": parts,
        "difference": [{"what": "step time", "unit": "s", "predicted": 0.26, "measured": 0.3, "error": -0.13}],
        "measurement": prediction | {"step_time_s": 0.3, "step_time_low_s": 0.28, "step_time_high_s": 0.4},
    }
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), "utf-8")


def address(server: str, *names: str) -> str:
    return f"{server}/#view=runs&options.runs={json.dumps({'shown': names})}"


@pytest.mark.daily
def test_a_run_grows_and_two_are_compared_with_one_pointer(server: str, open_page: Open, run_folders: Path) -> None:
    watched = run_folders / "watched"
    begin_run(watched, [5.5, 5.25])
    begin_run(run_folders / "other", [6.5, 6.25, 6.125])
    page = open_page(address(server, "watched"))
    assert page.locator("#inputs, #verdict").filter(visible=True).count() == 0  # no plan above a run
    shows(page, "5.25", "#view .stats")
    add_steps(watched, [4.125], first=2)
    shows(page, "4.125", "#view .stats")
    page.get_by_label("Draw other").check()
    shows(page, "6.125", LOSS)
    page.locator(f"{LOSS} svg").focus()
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    shows(page, "5.5", LOSS)
    assert "6.5" in page.locator(f"{LOSS} .readout").inner_text()
    other = page.locator(".charts .panel", has_text="Step time")
    assert other.locator("circle").count() == 2  # the same step of both runs is marked in every figure


def test_the_end_of_a_run_brings_its_parts_and_timeline(server: str, open_page: Open, run_folders: Path) -> None:
    folder = run_folders / "ending"
    begin_run(folder, [5.5, 5.25])
    page = open_page(address(server, "ending"))
    shows(page, "running", ".run-head")
    end_run(folder)
    shows(page, "done", ".run-head")
    page.get_by_role("link", name="Predicted and measured").click()
    shows(page, "tensor parallel", "#view .figure")
    page.get_by_role("link", name="Timeline").last.click()
    shows(page, "A measured step above the simulated one", "#view")
    lanes = page.locator("#view canvas[role=application]")
    lanes.focus()
    page.keyboard.press(".")
    shows(page, "0F0", "#view output")
    begin_run(run_folders / "untraced", [5.5, 5.25])
    page.goto(address(server, "untraced", "ending"))  # what another run has stands under its name
    page.get_by_role("link", name="Timeline").last.click()
    shows(page, "untraced still trains", "#view")
    shows(page, "A measured step above the simulated one: ending", "#view")
    page.get_by_role("link", name="Predicted and measured").click()
    shows(page, "ending: rank 0, the busiest", "#view")


def test_the_page_goes_on_when_the_server_comes_back(open_page: Open, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "kept"
    folder.parent.mkdir()
    begin_run(folder, [5.5, 5.25])
    process, server = start("--runs", str(folder.parent))
    page = open_page(address(server, "kept"), offline=True)
    shows(page, "5.25", "#view .stats")
    stop(process)
    shows(page, "The server does not answer", "#view")
    add_steps(folder, [4.125], first=2)
    process, again = start("--runs", str(folder.parent), "--port", server.rpartition(":")[2])
    assert again == server
    shows(page, "4.125", "#view .stats")
    until(page, "!document.querySelector('#view').textContent.includes('The server does not answer')")
    assert page.evaluate("import('meshwright/runs.js').then((m) => m.known.runs.get('kept').rows.length)") == 3
    stop(process)


def test_a_report_opens_from_disk_and_compares_runs(open_page: Open, tmp_path: Path) -> None:
    for name, seconds in (("first", 0.3), ("second", 0.2)):
        folder = RunFolder.create(tmp_path / name, CONFIG, Subject(CONFIG).estimate.prediction, steps=9, device="cpu")
        folder.begin_attempt(world=4, plan=CONFIG.plan.title())
        for step in range(4):
            measured = {"mfu": 0.1, "exposed_s": {"tp": 0.1}, "validation_loss": 4.5 if step == 2 else None}
            folder.add(StepRecord(step, 5.0 - step, 1.0, 1024, seconds, **measured))
        folder.event("fault", 3, "rank 2 was killed by signal 9")
        folder.end_attempt("rank 2 was killed by signal 9" if name == "first" else "")
        folder.close()
    file = tmp_path / "report.html"
    file.write_text(report([tmp_path / "first", tmp_path / "second"]), "utf-8")
    page = open_page(f"file://{file}")
    shows(page, "failed", ".run-head")
    for title in ("Loss", "Step time", "Throughput", "MFU", "Exposed communication"):
        shows(page, title, "#view")
    assert page.locator("#inputs").is_hidden()
    page.get_by_label("Draw second").check()
    shows(page, "second", "#view .legend")
    assert violations(page) == []  # the colours of runs are legible as text
    page.get_by_role("link", name="Faults and checkpoints").click()
    for title in ("When it trained", "Attempts of first", "Events of second"):
        shows(page, title, "#view")
    page.get_by_role("button", name="second").click()
    shows(page, "done", ".run-head")


def test_traced_steps_are_strips_above_their_prediction(open_page: Open, tmp_path: Path) -> None:
    for run, ranks in (("gpu-odd-shape", 1), ("ddp-slow-rank", 2)):
        e = explain_traces(read_traces(sorted(TRACES.glob(f"{run}-rank-[0-9].json.gz"))))
        file = tmp_path / f"{run}.html"
        file.write_text(html(e, beside_plan(e)), "utf-8")
        page = open_page(f"file://{file}")
        shows(page, e.causes[0].cause, "#view")
        lanes = page.locator("#view canvas[aria-label*='rank 0']").get_attribute("aria-label")
        assert lanes.count("rank ") == ranks
        assert ("predicted" in lanes) == (run == "gpu-odd-shape")
        if run == "ddp-slow-rank":  # the strip says its own length, the tile the mean of all steps
            pieces = [
                piece for rank in data(e, MeshwrightError("MW-EXPL-001", ""))["ranks"] for piece in rank["pieces"]
            ]
            length = max(start + seconds for start, seconds, _ in pieces)
            page.evaluate(WRITTEN)
            until(page, f"written.includes('{1e3 * length:.0f} ms')")
        shows(page, "From the predicted" if run == "gpu-odd-shape" else "No prediction beside it", "#view")


def test_dropped_traces_are_explained_and_other_files_refused(server: str, open_page: Open, tmp_path: Path) -> None:
    page = open_page(server + "/#view=traced", refused=True)
    files = page.locator("#view input[type=file]")
    plain = tmp_path / "words.txt"
    plain.write_text("some words", "utf-8")
    files.set_input_files(plain)
    page.locator("#files .notice.error").wait_for()
    broken = tmp_path / "rank-0.json"
    broken.write_text('{"traceEvents": [{"ph": "M"}]}', "utf-8")
    files.set_input_files(broken)
    shows(page, "'rank-0.json' is not a profiler trace", "#view")  # its own name, not that of the server's copy
    traces = sorted(TRACES.glob("ddp-slow-rank-rank-*.json.gz"))
    files.set_input_files(traces)
    shows(page, explain_traces(read_traces(traces)).causes[0].cause, "#view")


def test_dropped_recordings_are_compared(server: str, open_page: Open, tmp_path: Path) -> None:
    import small_training
    from meshwright.check.compare import compare
    from meshwright.check.comparison_view import data
    from meshwright.check.folder import Recording
    from meshwright.check.recorder import StepRecorder

    for name, bug in (("base", ""), ("faulty", "factor")):
        recorder = StepRecorder(str(tmp_path / name))
        recorder.attach()
        small_training.train("one", bug)
        recorder.close()
    one, many = (Recording.read(tmp_path / name) for name in ("base", "faulty"))
    jsonschema_rs.validate(schema_of(SHAPES["checked"], closed=True), data(one, many, compare(one, many)))
    page = open_page(server + "/#view=checked")
    page.locator("#view input[type=file]").set_input_files(tmp_path)
    shows(page, "differs: faulty against base", "#view")
    shows(page, "first difference", "#view .figure")
    page.get_by_role("button", name="Exchange reference and candidate").click()
    shows(page, "differs: base against faulty", "#view")
