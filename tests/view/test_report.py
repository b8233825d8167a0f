"""The page of training runs, and errors for broken run folders."""

import json

import pytest

from meshwright.cli import main
from meshwright.describe.config import load
from meshwright.errors import MeshwrightError
from meshwright.view.report import page, read_run, trace_of

RUN = {
    "prediction": {"exposed_s": {"attention": 0.03, "tp": 0.01}, "step_time_s": 0.04},
    "measurement": {"loss": [5.0, 4.0, 3.5], "step_time_s": 0.05},
    "difference": [
        {"what": "step time", "unit": "s", "predicted": 0.04, "measured": 0.05, "error": -0.2},
        {"what": "traffic tp", "unit": "bytes", "predicted": 1e6, "measured": 0.0, "error": None},
    ],
}
PROOF = {"passed": True, "plan": "dp 2 · tp <2>", "ranks": 4, "steps": 5, "errors": {"fp64": {"gradient": 1e-15}}}


def folder(path, **changes):
    path.mkdir()
    for name, value in {**RUN, **changes}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (path / f"{name}.json").write_text(text)
    return path


def test_the_page_shows_proof_loss_and_difference(tmp_path):
    text = page([read_run(folder(tmp_path / "a", proof=PROOF)), read_run(folder(tmp_path / "b"))])
    assert "✓ proved" in text
    assert "2 runs, 1 proved to train the same model as one device" in text  # above a run that was not verified
    assert "not verified" in text
    assert "-20%" in text
    assert "40 ms" in text
    assert "loss over 3 steps" in text
    assert "<2>" not in text  # what a file says is text, not markup
    assert "http" not in text  # nothing is fetched


def test_a_failed_proof_is_shown_as_one(tmp_path):
    first = {"what": "gradient", "name": "layers.0.norm", "step": 0, "rank": 1, "axis": "tp", "error": None}
    failed = {**PROOF, "passed": False, "errors": {"fp64": {"gradient": None}}, "first_break": first}
    text = page([read_run(folder(tmp_path / "a", proof=failed))])
    assert "✗ not proved</span>: gradient layers.0.norm of step 0 on rank 1 differs; axis tp" in text


def test_a_diverged_run_is_drawn_up_to_its_last_finite_loss(tmp_path):
    text = page([read_run(folder(tmp_path / "a", measurement={"loss": [5.0, 4.0, None]}))])
    assert "loss over 3 steps" in text
    assert "nan" not in text


def test_the_validation_loss_is_drawn(tmp_path):
    measurement = {"loss": [5.0, 4.0, 3.5], "validation_loss": [[1, 4.25], [2, None]]}
    text = page([read_run(folder(tmp_path / "a", measurement=measurement))])
    assert "loss over 3 steps; validation 4.250 (points)" in text
    assert text.count("<circle") == 1
    with pytest.raises(MeshwrightError, match="MW-REP-002"):
        read_run(folder(tmp_path / "b", measurement={**measurement, "validation_loss": [["x", 1]]}))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prediction": "{"}, "MW-REP-002"),
        ({"difference": {}}, "MW-REP-002"),
        ({"difference": [{"what": "step time"}]}, "MW-REP-002"),
        ({"measurement": {"loss": "low"}}, "MW-REP-002"),
    ],
)
def test_broken_files_are_named(tmp_path, changes, code):
    with pytest.raises(MeshwrightError) as error:
        read_run(folder(tmp_path / "a", **changes))
    assert error.value.code == code


def test_missing_folders_and_files_are_named(tmp_path):
    for make in (
        lambda: tmp_path / "none",
        lambda: (folder(tmp_path / "a") / "measurement.json").unlink() or tmp_path / "a",
    ):
        with pytest.raises(MeshwrightError) as error:
            read_run(make())
        assert error.value.code == "MW-REP-001"


def test_the_title_is_the_plan_that_was_trained(tmp_path):
    """The title of the proof is that of its small copy, with another micro-batch."""
    run = folder(tmp_path / "a", proof={**PROOF, "plan": "dp 2 · tp 2 · micro-batch 2"})
    assert "<h2>a " in page([read_run(run)])  # without a plan file: the folder's name
    config = load("examples/demo-dp2-tp2.toml")
    assert config.plan.microbatch == 4
    (run / "plan.toml").write_text(config.to_toml())
    text = page([read_run(run)])
    assert "<h2>dp 2 · tp 2 · micro-batch 4 " in text
    assert "a small copy, dp 2 · tp 2 · micro-batch 2<" in text


def test_an_interrupted_run_says_so(tmp_path):
    measurement = {**RUN["measurement"], "assumed": ["interrupted after 3 of 100 steps"]}
    assert "interrupted after 3 of 100 steps" in page([read_run(folder(tmp_path / "a", measurement=measurement))])


def spans(rank):
    return [
        {
            "rank": rank,
            "stream": "compute",
            "name": "optimizer",
            "start_s": 0.0,
            "duration_s": 0.5,
            "category": "optimizer",
            "args": {},
        }
    ]


TIMELINE = {"version": 1, "step": 7, "measured": [*spans(0), *spans(1)], "simulated": spans(0)}
COMMUNICATION = {"version": 1, "predicted_exposed_s": {"compute": 0.03, "tp": 0.01}}


def test_predicted_and_measured_parts_are_drawn_together(tmp_path):
    measured = {"loss": [5.0], "exposed_s": {"compute": 0.036, "tp": 0.014}, "hidden_s": {"tp": 0.005}}
    text = page([read_run(folder(tmp_path / "a", measurement=measured, communication=COMMUNICATION))])
    assert "14 ms + 5 ms hidden" in text
    assert "measured: step of the busiest rank by part" in text
    assert "predicted step of the busiest rank" not in text


def test_one_trace_has_the_measured_and_the_simulated_step(tmp_path):
    run = folder(tmp_path / "a", timeline=TIMELINE)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run), "--html", str(tmp_path / "r.html"), "--trace", str(tmp_path / "t.json")])
    assert ended.value.code == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["measured: rank 0", "measured: rank 1", "simulated: rank 0"]
    assert trace_of([read_run(run)])["traceEvents"] == events


def test_a_trace_needs_one_complete_run(tmp_path):
    runs = [read_run(folder(tmp_path / "a")), read_run(folder(tmp_path / "b", timeline=TIMELINE))]
    for chosen in (runs, runs[:1]):
        with pytest.raises(MeshwrightError) as error:
            trace_of(chosen)
        assert error.value.code == "MW-REP-003"


@pytest.mark.parametrize("timeline", [{**TIMELINE, "version": 2}, {"version": 1, "measured": [{"rank": 0}]}])
def test_a_timeline_of_another_version_or_shape_is_an_error(tmp_path, timeline):
    with pytest.raises(MeshwrightError) as error:
        read_run(folder(tmp_path / "a", timeline=timeline))
    assert error.value.code == "MW-REP-002"
