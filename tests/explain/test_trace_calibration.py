"""A stack calibrated to a trace: numbers that are known are found again, and a real trace of CPU processes moves the prediction to it."""

import dataclasses
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest

from meshwright.calibrate.fit import FittedFactors
from meshwright.calibrate.runs.from_run import prior_of
from meshwright.calibrate.runs.normal import Normal
from meshwright.calibrate.runs.stack_fit import numbers_of
from meshwright.cli import run_command
from meshwright.cost.collective import choose
from meshwright.describe import catalog
from meshwright.describe.cluster import Factors
from meshwright.describe.config import configure
from meshwright.errors import MeshwrightError
from meshwright.explain import calibration
from meshwright.explain.calibration import PARTS, calibrate_from_trace, part_times, posterior, with_links
from meshwright.explain.explanation import explain_traces
from meshwright.explain.folder import read_traces
from meshwright.predict.prediction import predict

TRACE = (
    Path(__file__).parent / "traces" / "dp8-rank-0.json.gz"
)  # two steps of eight processes on two busy cores, one rank
PLAN = """
[model]
name = "loop"
hidden = 256
layers = 8
heads = 8
kv_heads = 8
ffn = 256
vocab = 256
tied = true
max_positions = 256
[cluster]
extends = "laptop"
gpus = 8
levels = [{ name = "machine", size = 8, link = "loopback", shared = true }]
[stack]
extends = "gloo-cpu"
[workload]
batch = 16
seq = 128
precision = "fp32"
[plan]
replicate = 8
microbatch = 2
param_dtype = "fp32"
grad_dtype = "fp32"
state_dtype = "fp32"
master = false
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(PLAN)
    return path


@pytest.fixture(scope="module")
def explanation():
    return explain_traces(read_traces([TRACE]))


def gpu_config():
    return configure(
        "llama3-8b", "dgx-h100", stack="megatron-core", gpus=16, plan={"tp": 2, "shard": 8, "microbatch": 1, "zero": 1}
    )


def test_the_parts_of_a_prediction_respond_to_their_numbers_alone():
    config = gpu_config()
    x = numbers_of(config.stack)
    base = part_times(config, x[None])[0]
    for part, coordinate in (("products", 1), ("attention", 2), ("elementwise", 3)):
        slower = x.copy()
        slower[coordinate] += math.log(2)
        ratio = part_times(config, slower[None])[0] / base
        assert ratio[PARTS.index(part)] == pytest.approx(2, rel=0.1)
        others = [PARTS.index(p) for p in ("products", "attention", "elementwise") if p != part]
        assert ratio[others] == pytest.approx(1, rel=0.1)


def test_the_bubble_is_no_part():
    """A pipeline of eight stages waits half of a step of eight micro-batches, and a tenth of one of 64: a micro-batch has the same products."""
    plan = {"pp": 8, "tp": 2, "microbatch": 1, "schedule": "gpipe"}
    few, many = (
        configure("llama3-8b", "dgx-h100", stack="megatron-core", gpus=16, plan=plan, batch=batch) for batch in (8, 64)
    )
    products = [part_times(c, numbers_of(c.stack)[None])[0][0] / c.workload.batch for c in (few, many)]
    assert products[0] == pytest.approx(products[1], rel=0.02)


def test_known_numbers_are_found_again_by_a_wide_prior_and_half_way_by_a_narrow_one():
    config = gpu_config()
    truth = np.add(numbers_of(config.stack), [0.0, 0.3, -0.2, 0.4, 0.0, 0.0])
    measured = dict(zip(PARTS, part_times(config, truth[None])[0], strict=True))
    used = ["products", "attention", "elementwise"]
    prior = prior_of(config.stack)
    wide = Normal.of(prior.mean, prior.covariance + np.eye(6))
    found = posterior(config, used, measured, wide, [])
    assert found.mean[1:4] == pytest.approx(truth[1:4], abs=0.02)
    narrow = posterior(config, used, measured, prior, [])
    moved = (narrow.mean - prior.mean)[1] / 0.3
    assert 0.3 < moved < 1
    assert np.linalg.eigvalsh(narrow.covariance)[0] > 0
    assert np.diag(narrow.covariance)[1] < np.diag(prior.covariance)[1]


def test_a_real_trace_moves_the_prediction_to_it(explanation, plan):
    result = calibrate_from_trace(explanation, configure(plan))
    measured, before, after = result.step_s
    assert before < 0.2 * measured  # nobody measured this machine
    waiting = measured - sum(result.measured.values())
    assert after == pytest.approx(measured - waiting, rel=0.05)
    for part in ("products", "attention", "elementwise"):
        assert result.after[part] == pytest.approx(result.measured[part], rel=0.1)
    assert result.links[0].operation == "all-reduce"


def test_the_command_writes_a_file_that_later_predictions_use(plan, tmp_path, capsys):
    out = tmp_path / "traced.toml"
    run_command("calibrate", ["--from-trace", str(TRACE), "--plan", str(plan), "--out", str(out)])
    assert "products" in capsys.readouterr().out
    assert set(tomllib.loads(out.read_text())) == {"cluster", "stack"}
    config = configure(plan, str(out), stack=str(out))
    assert config.stack.products < 0.5
    again = calibrate_from_trace(explain_traces(read_traces([TRACE])), config)  # a second trace starts from the first
    assert again.stack.name == config.stack.name
    assert again.stack.products == pytest.approx(config.stack.products, rel=0.1)


def test_factors_of_traced_collectives_stand_for_those_that_were_not():
    cluster = catalog.load("clusters", "dgx-h100").but(gpus=16)
    changed = with_links(cluster, [FittedFactors("all-reduce", True, Factors(latency=2.0, bytes=3.0), points=2)])
    for operation in ("all-reduce", "all-gather"):
        slower = choose(changed, operation, 2.0**30, 16).seconds / choose(cluster, operation, 2.0**30, 16).seconds
        assert 1.5 < slower < 3.1
        assert choose(changed, operation, 2.0**30, 8) == choose(cluster, operation, 2.0**30, 8)


def test_a_trace_of_another_program_is_refused(explanation, plan, tmp_path):
    larger = configure(plan, set=["model.hidden=512"])
    with pytest.raises(MeshwrightError, match=r"MW-CALIB-008.*FLOPs"):
        calibrate_from_trace(explanation, larger)
    with pytest.raises(MeshwrightError, match=r"MW-CALIB-008.*8 ranks"):
        calibrate_from_trace(
            explanation, configure(plan, set=["plan.replicate=4", "cluster.gpus=4", "workload.batch=8"])
        )
    slow = configure(plan, "dgx-h100", gpus=8)
    weak = slow.cluster.accelerator.but(peak={"fp32": 1e9})
    with pytest.raises(MeshwrightError, match=r"MW-CALIB-008.*another device"):
        calibrate_from_trace(explanation, slow.but(cluster=slow.cluster.but(accelerator=weak)))
    with pytest.raises(MeshwrightError, match="MW-CALIB-008"):
        run_command("calibrate", ["--from-trace", str(TRACE)])
    settings = Path(__file__).parents[2] / "examples" / "settings" / "torchtitan-llama3-70b.toml"
    with pytest.raises(MeshwrightError, match=r"MW-CALIB-008.*and the plan 4"):
        run_command("calibrate", ["--from-trace", str(TRACE), "--plan", str(settings), "--cluster", "dgx-h100"])
    with pytest.raises(MeshwrightError, match="MW-CLI-003"):
        run_command("calibrate", ["--plan", str(plan), "bench.json"])


def test_without_shapes_the_result_is_partial_and_says_so(explanation, plan):
    without = dataclasses.replace(explanation, products={0: []})
    assert any("no products with shapes" in note for note in calibrate_from_trace(without, configure(plan)).notes)


def test_parts_that_the_plan_lacks_are_left_out_with_a_note(explanation, plan, monkeypatch):
    parts = calibration.measured_parts(explanation, []) | {"host": 0.5}
    monkeypatch.setattr(calibration, "measured_parts", lambda *_: parts)
    result = calibrate_from_trace(explanation, configure(plan))
    assert any("the plan has no host" in note for note in result.notes)


def test_an_odd_shape_on_a_gpu_does_not_slow_down_other_plans(tmp_path):
    """Transformers' Llama on an H200 with an FFN of 5461: its products run at 14% of their usual rate."""
    explanation = explain_traces(read_traces([TRACE.parent / "gpu-odd-shape-rank-0.json.gz"]))
    path = tmp_path / "plan.toml"
    cluster = Path(__file__).parents[2] / "benchmarks" / "gpu" / "h200.toml"
    path.write_text(
        f'cluster = "{cluster}"\n[model]\nhidden = 2048\nlayers = 12\nheads = 16\nkv_heads = 8\nffn = 5461\nvocab = 32000\n'
        'max_positions = 2048\n[workload]\nbatch = 4\nseq = 2048\nprecision = "bf16"\n[plan]\nmicrobatch = 4\n'
    )
    config = configure(path, stack="torch-eager")
    result = calibrate_from_trace(explanation, config)
    assert "n = 5461" in result.notes[0]
    assert result.stack.products == pytest.approx(config.stack.products, rel=0.15)
    healthy = 0.0961  # seconds of the same run with an FFN of 5632
    usual = config.but(model=config.model.but(ffn=5632), stack=result.stack)
    assert predict(usual).step_time_s == pytest.approx(healthy, rel=0.07)


def test_a_step_that_its_host_bounds_says_little_of_rates():
    quiet, bound = np.array([0.6, 0.2, 0.2, 0.0, 0.0]), np.array([0.1, 0.0, 0.1, 0.8, 0.0])
    assert calibration.noise_of(quiet) == pytest.approx(0.05)
    assert calibration.noise_of(bound) > 0.2
