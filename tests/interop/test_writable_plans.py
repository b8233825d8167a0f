"""`plan --for X` gives only plans that `launch --for X` starts; files name the versions whose own parser read them."""

from dataclasses import replace

import pytest

from meshwright import api
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.keys import write_settings
from meshwright.interop.write import check_runnable, settings_of
from meshwright.view.launch_files.job import make_job

QUESTION = {"cluster": "dgx-h100", "gpus": 8, "batch": 64, "seq": 4096}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_winner_can_be_launched_and_names_the_versions_tried(name):
    framework = FRAMEWORKS[name]
    model, gpus = ("llama3-8b", 4) if name == "nanotron" else ("qwen3-4b", 2)  # few plans to search
    config = api.plan(model, framework=name, common=True, **{**QUESTION, "gpus": gpus}).config
    job = make_job(config, "plan.toml", typed="", framework=name)
    assert any(framework.versions in note for note in job.program.notes)
    if framework.form != "json":  # has no comments
        assert framework.versions in settings_of(config, framework).text


def without_key(name, fact):
    """A framework whose settings have no word for a fact."""
    framework = FRAMEWORKS[name]
    keys = tuple(key for key in framework.table.keys if key.fact != fact)
    return replace(framework, table=replace(framework.table, keys=keys))


def test_the_search_takes_the_best_plan_that_can_be_written():
    question = {"cluster": "dgx-h100", "gpus": 64, "batch": 8, "seq": 8192}  # fewer sequences than GPUs
    assert api.plan("llama3-70b", framework="torchtitan", **question).plan.tp > 1
    result = api.plan("llama3-70b", framework=without_key("torchtitan", "tp"), **question)
    assert {leader.plan.tp for leader in result.ranking.leaders} == {1}


def test_a_training_that_no_settings_state_is_refused_with_the_reason():
    with pytest.raises(MeshwrightError, match=r"cannot express workload\.precision = fp32") as refused:
        api.plan("llama3-8b", framework="torchtitan", set=["workload.precision=fp32"], **QUESTION)
    assert refused.value.fix == "--set plan.param_dtype=fp32"
    words = ["workload.precision=fp32", "plan.param_dtype=fp32"]
    assert (
        api.plan("llama3-8b", framework="torchtitan", set=words, fix=["schedule=zbv", "pp=2"], **QUESTION).plan.schedule
        == "zbv"
    )
    with pytest.raises(MeshwrightError, match="has no recipe that we know for mixtral-8x7b"):
        api.plan("mixtral-8x7b", framework="megatron-bridge", **QUESTION)
    with pytest.raises(MeshwrightError, match="nanotron has no settings for qk_norm"):
        api.plan("qwen3-4b", framework="nanotron", **QUESTION)


@pytest.mark.parametrize("name", ["torchtitan", "torchtitan-0.3", "automodel"])
def test_weights_stay_in_a_pipeline_as_the_plan_is_costed(name):
    """PyTorch loses the gradients of weights that FSDP frees before a split backward pass."""
    fix = ("pp=2", "zero=3", "schedule=interleaved-zb", "virtual=2")
    config = api.plan("llama3-8b", framework=name, fix=fix, **QUESTION).config
    assert config.plan.reshard
    written = settings_of(config, FRAMEWORKS[name])
    stated = [value for key, value in written.settings.items() if "reshard_after_forward" in key]
    assert stated in (["never"], [False])


@pytest.mark.parametrize("name", ["torchtitan", "automodel"])
def test_a_pipeline_without_data_parallelism_has_nothing_to_shard(name):
    assert api.plan("llama3-8b", framework=name, fix=["pp=8"], **QUESTION).config.plan.zero == 0


def test_ddp_of_automodel_is_written_without_options_of_fsdp():
    settings, _ = write_settings(FRAMEWORKS["automodel"].table, {"sharding": "none", "grad_dtype": "bf16"})
    assert settings["distributed.strategy"] == "ddp"
    assert not [name for name in settings if "mp_policy" in name]


@pytest.mark.parametrize(
    ("name", "key"), [("megatron-bridge", "checkpoint.async_save"), ("megatron-lm", "--async-save")]
)
def test_fsdp_of_megatron_is_written_without_asynchronous_saves(name, key):
    table = FRAMEWORKS[name].table
    assert key in write_settings(table, {"sharding": "optimizer", "saves": "copied"})[0]
    assert key not in write_settings(table, {"sharding": "parameters", "saves": "copied"})[0]


@pytest.mark.parametrize("name", ["megatron-lm", "megatron-bridge"])
def test_offloaded_layers_are_written_where_the_framework_moves_them(name):
    """Transformer Engine keeps the last layer, and Megatron-Core has no offloading in a pipeline or with recompute."""
    config = Config(
        catalog.load("models", "llama3-8b"), catalog.load("clusters", "dgx-h100").with_gpus(8), Plan(tp=8, sp=True),
        Workload(batch=8, seq=4096), catalog.load("stacks", FRAMEWORKS[name].stack),
    )  # fmt: skip
    some, whole = Plan(tp=8, sp=True, offload="activations", offload_layers=20), Plan(tp=8, offload="activations")
    written = settings_of(config.but(plan=some), FRAMEWORKS[name])
    assert {str(v) for k, v in written.settings.items() if "offloading" in k} <= {"20", "True"}
    assert (written.back.plan.offload, written.back.plan.offload_layers) == ("activations", 20)
    assert not {"plan.offload", "plan.offload_layers"} & set(written.inexpressible)
    assert settings_of(config.but(plan=whole), FRAMEWORKS[name]).inexpressible["plan.offload_layers"] == (0, 31)
    with pytest.raises(MeshwrightError, match=r"cannot express plan\.offload_layers"):
        check_runnable(config.but(plan=whole), FRAMEWORKS[name])
    for changes, why in (({"pp": 2, "tp": 4}, "pipeline"), ({"recompute": "full"}, "recompute")):
        with pytest.raises(MeshwrightError, match=why):
            check_runnable(config.but(plan=some.but(**changes)), FRAMEWORKS[name])
