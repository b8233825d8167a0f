"""Training end to end: the loss falls, the measurement has the fields of the prediction, the folder has every file."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import ranks  # noqa: F401  preloads what ranks need
from meshwright.describe.config import Config, load
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.run import Run
from meshwright.describe.run_folder import read_steps, state
from meshwright.errors import MeshwrightError
from meshwright.explain.collectives import axis_of
from meshwright.explain.explanation import explain_traces
from meshwright.explain.folder import read_traces
from meshwright.predict.prediction import predict
from meshwright.training.hooks import RankReport, StepRecord
from meshwright.training.measure.calibration import with_this_machine
from meshwright.training.measure.measurement import Training, measure
from meshwright.training.page import page, percent
from meshwright.training.run import run_training
from meshwright.view.report import page as report_page
from meshwright.view.tables import console
from meshwright.view.watch import progress_display
from synthetic_machine import measurement, synthetic

MODEL = {"hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab": 256, "tied": True}
WORKLOAD = {"batch": 8, "seq": 16, "precision": "fp32"}
FP32 = {"param_dtype": "fp32", "master": False}


def config(**plan):
    return Config.from_parts(MODEL, "laptop", "gloo-cpu", WORKLOAD, {**FP32, **plan})


def with_rate(made, learning_rate):
    return replace(made, optimizer=Optimizer(learning_rate=learning_rate))


def test_training_learns_and_is_measured(tmp_path):
    with progress_display(24, tmp_path) as display:
        made = replace(with_rate(config(tp=2, microbatch=4), 5e-3), run=Run(profile_steps=2))
        training = run_training(made, 24, folder=tmp_path)
    m = training.measurement
    assert len(display.run.rows) == m.steps == 24
    assert sum(m.loss[-4:]) / 4 < m.loss[0] - 0.5
    assert m.step_time_low_s <= m.step_time_s <= m.step_time_high_s
    assert m.tokens_per_s == pytest.approx(8 * 16 / m.step_time_s)
    assert 0 < m.mfu < 1
    assert m.memory_gib > m.memory_by_stage[0]["tensors"] > 0
    assert m.traffic_bytes["tp"] > 0
    assert {d.what for d in training.differences} >= {"step time", "peak memory of tensors", "traffic tp"}
    memory = next(d for d in training.differences if d.unit == "GiB")
    assert memory.measured == m.memory_by_stage[0]["tensors"] < 0.1 * m.memory_gib  # tensors, not the interpreter
    assert memory.error == pytest.approx(0.0, abs=0.5)
    rows = read_steps(tmp_path)
    assert [r["loss"] for r in rows] == m.loss
    assert [StepRecord.of_row(r) for r in rows] == training.steps
    assert {"mfu", "memory_gib", "learning_rate", "exposed_s"} <= set(rows[0])
    assert sorted(file.name for file in (tmp_path / "profile").iterdir()) == ["rank-0.json", "rank-1.json"]
    check_profile(tmp_path)
    assert state(tmp_path) == "done"
    assert json.loads((tmp_path / "measurement.json").read_text())["steps"] == 24
    assert json.loads((tmp_path / "prediction.json").read_text())["step_time_s"] > 0
    assert load(tmp_path / "plan.toml").plan == training.config.plan
    assert (tmp_path / "rank-1.log").exists()
    with (out := console()).capture() as text:
        out.print(page(training, str(tmp_path)))
    assert "Prediction and measurement" in text.get()
    check_parts(training, tmp_path, text.get())


def check_profile(folder):
    """`explain` reads the run folder: steps, products by shape, and the axis of each collective, which gloo does not record."""
    traced = explain_traces(read_traces([folder]))
    assert (len(traced.run.ranks), len(traced.steps[0])) == (2, 2)
    assert traced.products[0]
    collectives = traced.run.ranks[0].collectives
    axes = {axis_of(kind, group) for kind, group in zip(collectives.kind, collectives.group, strict=True)}
    assert axes == {"tp"}
    assert set(collectives.ranks) == {(0, 1)}
    assert traced.attributed > 0.95


def check_parts(training, folder, text):
    """The step by part is in the measurement, in the differences, on the page, and by rank in the run folder."""
    m, p = training.measurement, training.prediction
    assert sum(m.exposed_s.values()) == pytest.approx(m.step_time_s)
    assert sum(p.parts.values()) == pytest.approx(p.step_time_s)
    assert set(m.exposed_s) - {"waiting"} == {"compute", "tp", "optimizer"} == set(p.parts)
    assert m.exposed_s["tp"] > 0
    parts = [d.what for d in training.differences[1:5] if d.what != "waiting"]
    assert parts[:3] == ["compute", "exposed tp", "optimizer"]
    table = text.partition("Step of the busiest rank by part")[2]
    assert "tp: tensor-parallel communication" in table
    by_rank = json.loads((folder / "communication.json").read_text())
    assert by_rank["version"] == 1
    assert [r["rank"] for r in by_rank["ranks"]] == [0, 1]
    assert by_rank["steps"] == 24
    timeline = json.loads((folder / "timeline.json").read_text())
    assert timeline["step"] in (24, 25, 26)  # of the three traced ones
    assert {s["rank"] for s in timeline["measured"]} == {0, 1}
    events = training.trace()["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(timeline["measured"]) + len(timeline["simulated"])
    assert '"busiest_rank"' in report_page([folder])


def test_the_balance_of_experts_is_recorded_step_by_step(tmp_path):
    """The worst layer of two stages; the capacity drops copies, and the plan file has the router options."""
    router = {"capacity": 0.5, "aux": 0.01}
    shape = {**MODEL, "tied": False, "experts": 4, "top_k": 2, "expert_ffn": 32, "router": router}
    made = Config.from_parts(shape, "laptop", "gloo-cpu", WORKLOAD, {**FP32, "pp": 2})
    training = run_training(made, 3, folder=tmp_path)
    for row in read_steps(tmp_path):
        assert 0.5 < row["router_entropy"] <= 1
        assert 1 <= row["router_peak"] <= 4
        assert 0 <= row["router_idle"] < 1
        assert 0.5 <= row["router_dropped"] < 0.8  # half of them at most are kept
    with (out := console()).capture() as text:
        out.print(page(training, str(tmp_path)))
    assert "(1 = even), busiest expert" in text.get()
    assert "dropped" in text.get()
    assert training.as_dict()["router"] == training.steps[-1].router != {}
    assert load(tmp_path / "plan.toml").model.router.capacity == 0.5


def test_bytes_stand_under_the_axis_that_was_predicted():
    """The same two ranks carry gradients and tokens, yet dp and ep are two lines of the comparison."""
    shape = {**MODEL, "tied": False, "experts": 4, "top_k": 2, "expert_ffn": 32}
    made = Config.from_parts(shape, "laptop", "gloo-cpu", WORKLOAD, {**FP32, "replicate": 2, "ep": 2})
    training = run_training(made, 1)
    measured, predicted = training.measurement.traffic_bytes, training.prediction.traffic_bytes
    assert set(measured) == set(predicted) == {"dp", "ep"}
    assert measured["dp"] == pytest.approx(predicted["dp"], rel=0.01)
    assert measured["ep"] == pytest.approx(predicted["ep"], rel=0.5)  # real routing is uneven


def test_expert_traffic_is_compared_for_the_copies_that_were_kept():
    """How many copies a capacity drops is known only after the run; the prediction says that it is an upper bound."""
    router = {"capacity": 0.75}
    shape = {**MODEL, "tied": False, "experts": 8, "top_k": 2, "expert_ffn": 32, "router": router}
    made = Config.from_parts(shape, "laptop", "gloo-cpu", WORKLOAD, {**FP32, "replicate": 2, "ep": 2})
    training = run_training(made, 2)
    m, p = training.measurement, training.prediction
    assert 0.2 < m.kept_copies < 0.75
    assert any("upper bound" in words and "at most 75%" in words for words in p.assumed)
    (row,) = [d for d in training.differences if d.what.startswith("traffic ep")]
    assert 0 < m.crossing_copies < m.kept_copies
    assert row.what == f"traffic ep ({m.kept_copies:.0%} of token copies kept, {m.crossing_copies:.0%} to other ranks)"
    # The numbers of copies are exchanged too: 8 bytes for each expert, layer and micro-batch, whatever is kept.
    counts = 8 * 8 * 2 * 4 / 2
    assert row.predicted - counts == pytest.approx((p.traffic_bytes["ep"] - counts) * m.crossing_copies / (0.75 / 2))
    assert row.measured == pytest.approx(row.predicted)  # bytes that were sent, of the same copies
    assert training.as_dict()["difference"][-1]["what"] == row.what

    free = replace(m, kept_copies=None)
    assert [d.what for d in free - p if "ep" in d.what.split()] == ["exposed ep", "traffic ep"]
    roomy = made.model.but(router=made.model.router.but(capacity=4.0))  # an expert has room for all tokens
    assert not any("upper bound" in words for words in predict(replace(made, model=roomy)).assumed)


@pytest.mark.slow
def test_replicas_that_average_now_and_then_send_as_much_less():
    traffic = [run_training(config(replicate=2, average_every=n), 3) for n in (1, 4)]
    each, fourth = (training.measurement.traffic_bytes["dp"] for training in traffic)
    assert each == pytest.approx(4 * fourth)
    assert traffic[1].prediction.traffic_bytes["dp"] == pytest.approx(fourth, rel=0.01)


@pytest.mark.slow
def test_every_plan_learns_the_same():
    losses = [
        run_training(config(**plan), 4).measurement.loss for plan in ({}, {"replicate": 2}, {"pp": 2, "microbatch": 2})
    ]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_the_mlp_and_other_optimizers_train():
    for optimizer in ("sgd", "momentum", "adam"):
        shape = {"kind": "mlp", "hidden": 32, "layers": 3}
        made = Config.from_parts(
            shape, "laptop", workload={**WORKLOAD, "optimizer": optimizer}, plan={**FP32, "replicate": 2}
        )
        loss = run_training(with_rate(made, 0.02), 12).measurement.loss
        assert sum(loss[-3:]) < sum(loss[:3])


def test_a_dtype_that_does_not_train_is_refused():
    with pytest.raises(MeshwrightError, match=r"MW-TRAIN-001: plan\.param_dtype=fp8"):
        run_training(config(param_dtype="fp8"), 1)
    refusals = {
        "fp4": r"MW-CLUS-003: workload\.precision=fp4, and cpu has no fp4 units",
        "fp16": r"MW-TRAIN-001: workload\.precision=fp16 with plan\.param_dtype=fp32",
    }
    for precision, words in refusals.items():
        narrow = Config.from_parts(MODEL, "laptop", "gloo-cpu", {**WORKLOAD, "precision": precision}, FP32)
        with pytest.raises(MeshwrightError, match=words):
            run_training(narrow, 1)


@pytest.mark.parametrize("losses", [[5.0, 4.0, float("nan"), float("inf")], [float("nan")] * 4])
def test_a_training_that_diverges_is_reported(losses):
    steps = [StepRecord(step, loss, 1.0, 128, 0.1) for step, loss in enumerate(losses)]
    made = config()
    training = Training(made, steps, measure(made, steps, [RankReport(0, 0, 1, 2, {})], len(steps)), predict(made))
    assert json.loads(json.dumps(training.as_dict(), allow_nan=False))["measurement"]["loss"][2:] == [None, None]
    with (out := console()).capture() as text:
        out.print(page(training, "here"))
    assert "××" in text.get()
    assert f"Loss is NaN or infinite from step {training.diverged_at} on" in text.get()
    assert training.diverged_at == (2 if losses[0] == 5.0 else 0)


@pytest.mark.parametrize("source", ["", "the links of mine.toml and the device of this machine"])
def test_a_result_says_which_file_its_prediction_comes_from(source):
    steps, made = [StepRecord(0, 5.0, 1.0, 128, 0.1)], config()
    training = Training(made, steps, measure(made, steps, [], 1), predict(made), predicted_from=source)
    with (out := console()).capture() as text:
        out.print(page(training))
    assert (f"predicted from {source}\n" in text.get()) == bool(source)
    assert ("predicted from" in text.get()) == bool(source)


@pytest.mark.parametrize(("later", "expected"), [([], 4.0), ([3.0] * 3, 3.0)], ids=["one step", "warm-up"])
def test_a_measured_step_is_without_compilation(later, expected):
    """A single step of minutes is compared like with like; where the first step is warm-up, nothing is left out of the others."""
    made, first = config(), StepRecord(0, 5.0, 1.0, 128, 10.0, compile_s=6.0)
    steps = [first, *(StepRecord(i + 1, 5.0, 1.0, 128, seconds) for i, seconds in enumerate(later))]
    found = measure(made, steps, [], len(steps))
    assert found.step_time_s == pytest.approx(expected)
    assert any("without 6 s of compilation" in text for text in found.assumed) == (not later)
    with (out := console()).capture() as text:
        out.print(page(Training(made, steps, found, predict(made)), "here"))
    assert "first step 10 s, of which compilation 6 s" in text.get()
    assert ("left out above" in text.get()) == (not later)


@pytest.mark.parametrize(
    ("precision", "calibrated", "says"),
    [
        ("fp32", "fp32", ""),
        ("fp32", "", "This machine was not calibrated"),
        ("bf16", "bf16", ""),
        ("bf16", "fp32", "calibrated in fp32, not in bf16: operations may take longer"),
        ("fp32", "bf16", "calibrated in bf16, not in fp32: operations may take longer"),
        ("fp8", "bf16", "in fp8 are emulated on a CPU: they take longer"),
    ],
)
def test_a_report_says_which_precision_was_not_calibrated(precision, calibrated, says):
    dtype = "bf16" if precision == "fp8" else precision
    made = Config.from_parts(
        MODEL, "laptop", "gloo-cpu", {**WORKLOAD, "precision": precision}, {**FP32, "param_dtype": dtype}
    )
    if calibrated:
        machine = measurement().but(dtype=calibrated, operations=synthetic(dtype=calibrated))
        made = with_this_machine(made, machine)
    steps = [StepRecord(0, 5.0, 1.0, 128, 0.1)]
    training = Training(made, steps, measure(made, steps, [RankReport(0, 0, 1, 2, {})], 1), predict(made))
    with (out := console()).capture() as text:
        out.print(page(training, "here"))
    shown = " ".join(text.get().split())
    assert says in shown
    assert ("than predicted" in shown or "not calibrated" in shown) == bool(says)


def test_bytes_saved_by_compression_are_shown():
    steps = [StepRecord(0, 5.0, 1.0, 128, 0.1)]
    lines = {}
    for name in ("none", "int8"):
        made = config(replicate=2, compression=name)
        sent = predict(made).traffic_bytes
        training = Training(
            made, steps, measure(made, steps, [RankReport(0, 0, 1, 2, sent)], len(steps)), predict(made)
        )
        with (out := console()).capture() as text:
            out.print(page(training, "here"))
        lines[name] = [line for line in text.get().splitlines() if line.startswith("sent ")]
    assert lines["none"] == []
    assert re.fullmatch(r"sent .* per step over dp, .* without int8: (4|3\.9\d*)× fewer", lines["int8"][0].rstrip())


def test_errors_are_signed_only_where_there_is_one():
    assert [percent(e) for e in (-0.004, 0.0, 0.006, -0.2, float("inf"))] == ["0%", "0%", "+1%", "-20%", "—"]


def test_a_run_of_no_steps_is_refused():
    with pytest.raises(MeshwrightError, match="MW-TRAIN-003: steps=0"):
        run_training(config(), 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(SystemExit, marks=pytest.mark.slow)])
def test_steps_until_an_interruption_are_kept(tmp_path, error, monkeypatch):
    """Ctrl-C and SIGTERM (which raises SystemExit) in the middle of a run. The ranks end by themselves: none waits until it is killed."""
    from meshwright.training.launch import local

    processes, start = [], local._start
    monkeypatch.setattr(local, "STUCK_S", 25.0)  # on a busy machine a step may take seconds
    monkeypatch.setattr(local, "_start", lambda *args: processes.append(start(*args)) or processes[-1])

    def interrupt(record):
        if record.step == 5:
            raise error

    (tmp_path / "difference.json").write_text("[]")  # of an earlier run
    with pytest.raises(error):
        run_training(config(), 10_000, folder=tmp_path, listen=interrupt)
    assert {rank.process.exitcode for rank in processes} == {0}
    steps = len(read_steps(tmp_path))
    assert steps >= 6  # rank 0 writes on until it is ended
    assert state(tmp_path) == "stopped"
    measurement = json.loads((tmp_path / "measurement.json").read_text())
    assert measurement["steps"] == len(measurement["loss"]) == steps
    assert f"interrupted after {steps} of 10000 steps" in measurement["assumed"]
    assert json.loads((tmp_path / "difference.json").read_text())[0]["what"] == "step time"
    assert f"interrupted after {steps} of 10000 steps" in report_page([tmp_path])  # `report` reads it


def test_a_diverged_run_exits_with_one(tmp_path, monkeypatch, capsys):
    from meshwright.cli import main

    steps = [StepRecord(step, loss, 1.0, 128, 0.1) for step, loss in enumerate([5.0, float("nan")])]
    made = config()
    training = Training(made, steps, measure(made, steps, [RankReport(0, 0, 1, 2, {})], 2), predict(made))
    monkeypatch.setattr("meshwright.api.train", lambda *_, **__: training)
    for as_json in ([], ["--json"]):
        with pytest.raises(SystemExit) as leaving:
            main(["train", "examples/demo-dp2-tp2.toml", "--steps", "2", "--out", str(tmp_path), *as_json])
        assert leaving.value.code == 1
    assert "Loss is NaN or infinite from step 1 on" in capsys.readouterr().out


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    from meshwright.cli import main

    class Started(Exception):
        pass

    def started(*_, out, **__):
        folders.append(out)
        raise Started

    folders = []
    monkeypatch.setattr("meshwright.api.train", started)
    monkeypatch.setattr("meshwright.cli.train.time.strftime", lambda _: "20260101-000000")
    plan = str(Path("examples/demo-dp2-tp2.toml").resolve())
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with suppress(Started, SystemExit):
            main(["train", plan, "--json"])
    assert [folder.name for folder in folders] == [f"demo-dp2-tp2-20260101-000000{end}" for end in ("", "-2")]
    assert all(folder.is_dir() for folder in folders)
