"""Plan → settings → plan is the identity on what a framework can say."""

import random
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.describe import catalog, legality
from meshwright.describe.config import Config
from meshwright.describe.legality import Case
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.interop.files import detect, parse, read_settings
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.keys import Framework
from meshwright.interop.write import settings_of, write_file

PLANS = 40  # random legal plans of each framework and model
MODELS = ("llama3-8b", "qwen3-30b-a3b")
# What settings of a framework leave to the script that calls it, or cannot say at all.
LEFT_OUT = {
    "torchtitan": {"plan.sp"},  # always with tensor parallelism; the search has it
    "accelerate": {
        "plan.microbatch",
        "workload.batch",
        "workload.seq",
        "plan.recompute_every",
        "plan.recompute_layers",
        "plan.virtual",
    },
    "deepspeed": {"workload.seq", "plan.reshard", "plan.recompute"},
    "nanotron": {"workload.precision"},  # it has no fp8
    "trl": {"workload.precision"},
}
DEGREES = (1, 1, 2, 4, 8)


def random_config(framework: Framework, model: str, rng: random.Random) -> Config | None:
    """A random plan that the framework can run; None if the dice made an illegal one."""
    stack, shape = catalog.load("stacks", framework.stack), catalog.load("models", model)
    can = stack.can
    degrees = {axis: 1 if axis in can.without else rng.choice(DEGREES) for axis in ("tp", "cp", "pp")}
    zero = rng.choice(can.zero)
    dp = rng.choice(DEGREES)
    replicate = dp if zero == 0 else rng.choice([d for d in (1, 2) if dp % d == 0])
    schedule = rng.choice(can.schedules) if degrees["pp"] > 1 else "1f1b"
    virtual = {"interleaved": 2, "looped-bfs": 2, "interleaved-zb": 2, "zbv": 2, "dualpipev": 2}.get(schedule, 1)
    fields = {
        **degrees,
        "sp": degrees["tp"] > 1 and "sp" not in can.without and rng.random() < 0.5,
        "replicate": replicate,
        "shard": dp // replicate,
        "zero": zero if dp // replicate * degrees["cp"] > 1 else 0,
        "schedule": schedule,
        "virtual": virtual,
        "microbatch": rng.choice((1, 2, 4)),
        "recompute": rng.choice(can.recomputes),
        "cp_kind": rng.choice(can.cp_kinds or ("ring",)),
    }
    if shape.experts:
        fields |= {"ep": 1 if "ep" in can.without else rng.choice(DEGREES), "expert_tp": 1}
    if zero == 3 and "reshard" not in can.without:
        fields["reshard"] = rng.random() < 0.5
    try:
        plan = Plan(**fields)
    except MeshwrightError:
        return None
    if framework.name == "axolotl" and plan.shard % plan.ep:  # its expert parallelism is a part of the shards
        return None
    work = Workload(
        batch=plan.dp * plan.microbatch * plan.pp * rng.choice((2, 4)), seq=4096, precision=rng.choice(("bf16", "fp8"))
    )
    if framework.name == "deepspeed":  # its file has no fp8
        work = work.but(precision="bf16")
    case = Case(plan, shape, work, None, stack, framework=True)
    if legality.problem(case) is not None:
        return None
    return Config(shape, catalog.load("clusters", "dgx-h100").with_gpus(plan.world), plan, work, stack)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_settings_say_the_plan(name: str, model: str) -> None:
    framework, rng, seen = FRAMEWORKS[name], random.Random(f"{name} {model}"), 0
    if name == "nanotron" and model == "qwen3-30b-a3b":  # it has no normalisation of queries and keys
        model = "mixtral-8x7b"
    for _ in range(PLANS * 60):
        config = random_config(framework, model, rng)
        if config is None:
            continue
        written = settings_of(config, framework)
        lost = {key: pair for key, pair in written.inexpressible.items() if key not in LEFT_OUT.get(name, set())}
        assert not lost, f"{config.plan.title()}: {lost}\n{written.text}"
        seen += 1
        if seen == PLANS:
            return
    assert seen > 5, f"only {seen} legal plans of {name} were found"


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if FRAMEWORKS[name].form != "python"])
def test_a_written_file_is_read_back(name: str, tmp_path) -> None:
    """The text of the file says what its settings say, and its framework is recognised."""
    framework, rng = FRAMEWORKS[name], random.Random(name)
    config = next(c for _ in range(1000) if (c := random_config(framework, "llama3-8b", rng)) is not None)
    ending = {"toml": ".toml", "yaml": ".yaml", "json": ".json", "args": ".sh"}[framework.form]
    path = tmp_path / f"settings{ending}"
    written = write_file(config, framework, path)
    settings, args, _ = parse(path)
    found = detect(settings, args)
    assert found is not None
    assert found.name == name
    assert read_settings(path, gpus=config.plan.world, model="llama3-8b").plan.tp == config.plan.tp
    if not args:
        assert settings == written.settings


@pytest.mark.parametrize("stack", ["megatron-lm", "megatron-bridge"])
@pytest.mark.parametrize("stages", [(), (3, 5, 5, 3, 4, 4, 4, 4)])
def test_stages_of_different_length_become_a_layout_of_megatron(
    stack: str, stages: tuple[int, ...], tmp_path: Path
) -> None:
    """126 layers over pp 16 × 4, or lengths that the plan names: the text is shell-quoted, and the same lengths are read back."""
    framework = FRAMEWORKS[stack]
    model, fields = ("llama3-8b", {"pp": 4, "virtual": 2}) if stages else ("llama3.1-405b", {"pp": 16, "virtual": 4})
    plan = Plan(schedule="interleaved", layers_per_stage=stages, replicate=8, **fields)
    config = Config.from_parts(
        model, {"extends": "dgx-h100", "gpus": plan.world}, framework.stack, {"batch": 512, "seq": 4096}, plan
    ).check()
    written = settings_of(config, framework)
    assert not written.inexpressible
    path = tmp_path / f"settings.{'sh' if framework.form == 'flags' else framework.form}"
    path.write_text(written.text)
    back = read_settings(path, gpus=plan.world).plan
    assert back.stage_layers(config.model.layers) == plan.stage_layers(config.model.layers)


def written_for(name: str, model: str, **fields: object) -> dict[str, object]:
    """The settings of a plan on dgx-h100, written for a framework."""
    framework, plan = FRAMEWORKS[name], Plan(**fields)
    cluster = {"extends": "dgx-h100", "gpus": plan.world}
    return settings_of(
        Config.from_parts(model, cluster, framework.stack, {"batch": 512, "seq": 4096}, plan), framework
    ).settings


def test_settings_have_what_the_frameworks_own_parsers_ask_for() -> None:
    """Each was refused, or silently trained something else, before (`make test-frameworks`)."""
    sharded = written_for("accelerate", "llama3-8b", shard=8, zero=3)
    assert sharded["fsdp_config.fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert written_for("accelerate", "llama3-8b")["distributed_type"] == "NO"
    ring = written_for("axolotl", "llama3-8b", shard=4, cp=2, cp_kind="all-gather", zero=3)
    assert ring["attn_implementation"] == "flash_attention_2"
    experts = written_for("axolotl", "mixtral-8x7b", shard=64, ep=8, zero=3)
    assert experts["dp_shard_size"] == 8
    assert "ExpertParallelPlugin" in str(experts["plugins"])
    titan = written_for("torchtitan", "llama3-8b", shard=8, zero=3)
    assert (titan["model.name"], titan["model.flavor"]) == ("llama3", "8B")
    stages = written_for("torchtitan", "llama3-8b", pp=2, virtual=4, schedule="interleaved", shard=2, zero=3)
    less = "parallelism.pipeline_parallel_{}_stage_less_layers"
    assert (stages["parallelism.pipeline_parallel_layers_per_stage"], stages[less.format("first")]) == (4, 0)


def test_a_model_that_torchtitan_does_not_have_is_refused() -> None:
    with pytest.raises(MeshwrightError, match=r"MW-LAUNCH-005.*mixtral"):
        written_for("torchtitan", "mixtral-8x7b", shard=8, zero=3)


def test_settings_of_torchtitan_03_are_a_function() -> None:
    """It is Python that compiles; experts and pipelines exclude CUDA graphs there."""
    framework = FRAMEWORKS["torchtitan-0.3"]
    settings = written_for("torchtitan-0.3", "llama3-8b", pp=2, shard=4, zero=3)
    assert settings["training.disable_cuda_graphs"] is True
    text = framework.python(settings)
    compile(text, "settings.py", "exec")
    assert "model_registry('8B')" in text


def test_a_recompute_that_settings_cannot_state_is_reported():
    """A regression: without a policy of recompute, the Python settings of torchtitan 0.3 raised a KeyError, on the page a status of 500."""
    config = mw.load(
        "llama3-8b", cluster="dgx-h100", gpus=8, set=["plan.shard=8", "plan.zero=3", "plan.recompute=auto"]
    )
    written = settings_of(config, FRAMEWORKS["torchtitan-0.3"])
    assert "plan.recompute" in written.inexpressible
    assert "config.activation_checkpoint" not in written.text
