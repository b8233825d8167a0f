"""Training end to end: the loss falls, the measurement has the prediction's shape, the folder tells it all."""

import csv
import io
import json
import re

import pytest
from rich.console import Console

import ranks  # noqa: F401  preloads what ranks need
from meshwright.describe.config import Config, load
from meshwright.errors import MeshwrightError
from meshwright.training.page import page, percent, showing, sparkline
from meshwright.training.records import RankReport, Settings, StepRecord
from meshwright.training.run import Training, measure, predicted, run_training
from meshwright.view.tables import console

MODEL = {"hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab": 256, "tied": True}
WORKLOAD = {"batch": 8, "seq": 16, "precision": "fp32"}
FP32 = {"param_dtype": "fp32", "master": False}


def config(**plan):
    return Config.from_parts(MODEL, "laptop", "gloo-cpu", WORKLOAD, {**FP32, **plan})


def test_training_learns_and_is_measured(tmp_path):
    with showing(24) as listen:
        training = run_training(config(tp=2), 24, folder=tmp_path, listen=listen, settings=Settings(learning_rate=5e-3))
    m = training.measurement
    assert len(listen.losses) == m.steps == 24
    assert sum(m.loss[-4:]) / 4 < m.loss[0] - 0.5
    assert m.step_time_low_s <= m.step_time_s <= m.step_time_high_s
    assert m.tokens_per_s == pytest.approx(8 * 16 / m.step_time_s)
    assert 0 < m.mfu < 1
    assert m.memory_gib > m.memory_by_stage[0]["tensors"] > 0
    assert m.traffic_bytes["tp"] > 0
    assert {d.what for d in training.differences} >= {"step time", "peak memory", "traffic tp"}
    rows = list(csv.DictReader((tmp_path / "steps.csv").open()))
    assert [float(r["loss"]) for r in rows] == m.loss
    assert json.loads((tmp_path / "measurement.json").read_text())["steps"] == 24
    assert json.loads((tmp_path / "prediction.json").read_text())["step_time_s"] > 0
    assert load(tmp_path / "plan.toml").plan == training.config.plan
    assert (tmp_path / "rank-1.log").exists()
    with (out := console()).capture() as text:
        out.print(page(training, str(tmp_path)))
    assert "Prediction against measurement" in text.get()


def test_the_load_of_experts_is_told_step_by_step(tmp_path):
    """Of two stages, the worst layer of both; capacity drops, and the router is said in the plan file."""
    router = {"capacity": 0.5, "aux": 0.01}
    shape = {**MODEL, "tied": False, "experts": 4, "top_k": 2, "expert_ffn": 32, "router": router}
    made = Config.from_parts(shape, "laptop", "gloo-cpu", WORKLOAD, {**FP32, "pp": 2})
    training = run_training(made, 3, folder=tmp_path)
    rows = list(csv.DictReader((tmp_path / "steps.csv").open()))
    for row in rows:
        assert 0.5 < float(row["router_entropy"]) <= 1
        assert 1 <= float(row["router_peak"]) <= 4
        assert 0 <= float(row["router_idle"]) < 1
        assert 0.5 <= float(row["router_dropped"]) < 0.8  # half of them at most are kept
    with (out := console()).capture() as text:
        out.print(page(training, str(tmp_path)))
    assert "busiest" in text.get()
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


def test_replicas_that_average_now_and_then_send_as_much_less():
    traffic = [run_training(config(replicate=2, average_every=n), 3) for n in (1, 4)]
    each, fourth = (training.measurement.traffic_bytes["dp"] for training in traffic)
    assert each == pytest.approx(4 * fourth)
    assert traffic[1].prediction.traffic_bytes["dp"] == pytest.approx(fourth, rel=0.01)


def test_every_plan_learns_the_same():
    losses = [
        run_training(config(**plan), 4).measurement.loss for plan in ({}, {"replicate": 2}, {"pp": 2, "microbatch": 2})
    ]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def test_the_mlp_and_other_optimizers_train():
    for optimizer in ("sgd", "momentum", "adam"):
        shape = {"kind": "mlp", "hidden": 32, "layers": 3}
        made = Config.from_parts(
            shape, "laptop", workload={**WORKLOAD, "optimizer": optimizer}, plan={**FP32, "replicate": 2}
        )
        loss = run_training(made, 12, settings=Settings(learning_rate=0.02)).measurement.loss
        assert sum(loss[-3:]) < sum(loss[:3])


def test_a_dtype_that_does_not_train_is_refused():
    with pytest.raises(MeshwrightError, match=r"MW-TRAIN-001: plan\.param_dtype=fp8"):
        run_training(config(param_dtype="fp8"), 1)
    for precision in ("fp4", "fp16"):
        narrow = Config.from_parts(MODEL, "laptop", "gloo-cpu", {**WORKLOAD, "precision": precision}, FP32)
        with pytest.raises(
            MeshwrightError, match=rf"MW-TRAIN-001: workload\.precision={precision} with plan\.param_dtype=fp32"
        ):
            run_training(narrow, 1)


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 7.0]) == "▁█"
    assert sparkline([float(i) for i in range(800)], width=8) == "▁▂▃▄▅▆▇█"


@pytest.mark.parametrize("losses", [[5.0, 4.0, float("nan"), float("inf")], [float("nan")] * 4])
def test_a_training_that_diverges_is_told_not_a_fault(losses):
    steps = [StepRecord(step, loss, 1.0, 128, 0.1) for step, loss in enumerate(losses)]
    made = config()
    training = Training(made, steps, measure(made, steps, [RankReport(0, 0, 1, 2, {})]), predicted(made))
    assert json.loads(json.dumps(training.as_dict(), allow_nan=False))["measurement"]["loss"][2:] == [None, None]
    with (out := console()).capture() as text:
        out.print(page(training, "here"))
    assert "××" in text.get()
    assert "it diverged" in text.get()


@pytest.mark.parametrize("router", [{}, {"entropy": 0.5, "peak": 3.1, "idle": 0.1, "dropped": 0.2}])
def test_a_narrow_terminal_cuts_words_not_the_bar(monkeypatch, router):
    written = io.StringIO()
    monkeypatch.setattr(
        "meshwright.training.page.console", lambda: Console(file=written, force_terminal=True, width=80)
    )
    with showing(1000) as listen:
        for step in range(40):
            listen(StepRecord(step, 5 - step / 40, 1.0, 128, 0.1, router))
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue()).replace("\r", "\n").splitlines()
    assert any("━" * 12 in line and " 40/1000 " in line and "loss 4.0250  norm 1.00" in line for line in lines)


def test_bytes_saved_by_compression_are_told():
    steps = [StepRecord(0, 5.0, 1.0, 128, 0.1)]
    lines = {}
    for name in ("none", "int8"):
        made = config(replicate=2, compression=name)
        sent = predicted(made).traffic_bytes
        training = Training(made, steps, measure(made, steps, [RankReport(0, 0, 1, 2, sent)]), predicted(made))
        with (out := console()).capture() as text:
            out.print(page(training, "here"))
        lines[name] = [line for line in text.get().splitlines() if line.startswith("sent ")]
    assert lines["none"] == []
    assert re.fullmatch(r"sent .* a step over dp, .* without int8: (4|3\.9\d*)× fewer", lines["int8"][0].rstrip())


def test_errors_are_signed_only_where_there_is_one():
    assert [percent(e) for e in (-0.004, 0.0, 0.006, -0.2, float("inf"))] == ["0%", "0%", "+1%", "-20%", "—"]
