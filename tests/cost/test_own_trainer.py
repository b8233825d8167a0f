"""A plan without a stack: every command predicts it with the typical stack, and states the same number for our own trainer."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import api
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.own_stack import is_typical, own_stack, with_own_stack
from meshwright.lower.stages import split_peaks
from meshwright.planner.question import ANY_FRAMEWORK, OWN_TRAINER
from meshwright.predict.prediction import predict
from meshwright.programs import pipelines
from meshwright.training.run import make_job
from meshwright.view.launch_files import job as launch

WORK = {"batch": 16, "seq": 64}
PLAN = {"shard": 4, "zero": 1, "pp": 2, "microbatch": 2}


def nano(cluster: str = "dgx-h200", plan: dict[str, object] | None = None, **parts: object) -> Config:
    return Config.from_parts("nano", cluster, workload=WORK, plan=plan or PLAN, **parts)


def trained(config: Config, folder: Path) -> Config:
    return make_job(config, 1, 0, "cpu", "auto", folder / "run", config.plan.world, None)


@pytest.mark.parametrize(
    ("parts", "stack"),
    [
        ({}, "meshwright"),
        ({"run": {"compile": "off"}}, "meshwright-eager"),
        ({"cluster": "laptop", "plan": {**PLAN, "shard": 2}}, "gloo-cpu"),
        ({"plan": {**PLAN, "recompute": "auto"}}, "meshwright"),
    ],
)
def test_the_commands_state_one_number_for_our_trainer(parts: dict, stack: str, tmp_path: Path) -> None:
    config = nano(**parts)
    estimated = api.estimate(config)
    assert estimated.stack.name == "default"
    own = estimated.own_trainer
    assert own is not None
    assert own.stack == stack
    job = trained(config, tmp_path)
    assert job.config.stack.name == stack
    assert own.prediction == job.watch.prediction
    assert own.prediction == launch.make_job(config, "plan.toml", typed="").prediction
    named = replace(config, stack=own_stack(config.cluster.accelerator.name, config.run.compiled))
    assert own.prediction.step_time_s == api.estimate(named).prediction.step_time_s
    assert own.prediction.step_time_s != estimated.prediction.step_time_s


def test_a_run_with_graphs_is_predicted_without_launches() -> None:
    """A small model with experts: its launches take the host as long as its kernels take the device."""
    shape = {
        "layers": 12,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 8,
        "ffn": 1408,
        "vocab": 32000,
        "experts": 16,
        "top_k": 2,
    }
    plan = {"microbatch": 8, "grad_dtype": "bf16"}
    launched, replayed = (
        predict(
            with_own_stack(Config.from_parts(shape, "dgx-h200", workload={"batch": 8, "seq": 2048}, plan=plan, run=run))
        )
        for run in ({}, {"graphs": "step"})
    )
    assert replayed.exposed_s["host"] < 0.01 * launched.exposed_s["host"]
    assert launched.step_time_s - replayed.step_time_s == pytest.approx(launched.exposed_s["host"], rel=0.01)
    assert launched.exposed_s["host"] > 0.05 * launched.step_time_s


def test_a_plan_states_the_number_of_its_estimate_and_of_train(tmp_path: Path) -> None:
    result = api.plan("nano", "dgx-h200", nodes=1, batch=16, seq=64, fix=["pp=2"])
    own = result.estimate.own_trainer
    assert result.runs_in == ANY_FRAMEWORK
    file = tmp_path / "plan.toml"
    file.write_text(result.to_toml())
    assert own.sentence in file.read_text()
    assert own.prediction.step_time_s == api.estimate(plan=file).own_trainer.prediction.step_time_s
    assert own.prediction.step_time_s == trained(api.load(file), tmp_path).watch.prediction.step_time_s


def test_a_stack_that_is_named_or_calibrated_is_kept() -> None:
    assert with_own_stack(nano(stack="megatron-core")).stack.name == "megatron-core"
    measured = catalog.load("stacks", "default").but(evidence="calibrated", launch=1e-5)
    assert not is_typical(measured)
    assert with_own_stack(nano(stack=measured)).stack == measured
    assert api.estimate(nano(stack="megatron-core")).own_trainer is None


def test_a_plan_that_our_trainer_does_not_run_says_why() -> None:
    config = Config.from_parts("llama3-8b", "dgx-b200", workload={**WORK, "precision": "mxfp8"}, plan={"replicate": 8})
    own = api.estimate(config).own_trainer
    assert own.prediction is None
    assert "mxfp8" in own.sentence


def test_plans_for_our_trainer_are_searched_with_its_stack() -> None:
    result = api.plan("nano", "dgx-h200", nodes=1, batch=16, seq=64, stack="meshwright")
    assert result.runs_in == OWN_TRAINER
    assert result.estimate.own_trainer is None


@pytest.mark.parametrize("virtual", [1, 2])
def test_the_memory_of_a_searched_schedule_is_that_of_the_schedule_that_is_trained(virtual: int) -> None:
    program = pipelines.build("auto", 2, 8, virtual)
    in_flight = pipelines.walk(program, activation=1.0).peak_memory
    assert split_peaks("auto", 2, 8, virtual, 0.0).tolist() == in_flight.tolist()
    plan = {"pp": 2, "microbatch": 2, "schedule": "auto", "virtual": virtual}
    assert max(predict(nano("laptop", plan, stack="gloo-cpu")).tensors_gib) > 0
