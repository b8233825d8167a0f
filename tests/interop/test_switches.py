"""Switches of overlap and of checkpoints: read with each framework's own defaults, written so that what runs is what was predicted."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_interop_roundtrip import random_config

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.interop.assemble import used_overlap
from meshwright.interop.frameworks import FRAMEWORKS, READABLE
from meshwright.interop.keys import Table, write_settings
from meshwright.interop.reading import SettingsReading, understand
from meshwright.interop.recipes import check, rows
from meshwright.interop.write import difference, express, settings_of
from meshwright.predict.estimate import estimate

NODE, GPUS = 8, 64
MEGATRON = {
    "--tensor-model-parallel-size": 4,
    "--sequence-parallel": True,
    "--use-distributed-optimizer": True,
    "--bf16": True,
}
PIPELINE = {"--pipeline-model-parallel-size": 4, "--num-virtual-stages-per-pipeline-rank": 2}
BRIDGE = {"model.tensor_model_parallel_size": 4, "model.sequence_parallel": True}
TITAN = {"parallelism.tensor_parallel_degree": 4, "training.local_batch_size": 1}
AUTOMODEL = {"distributed.tp_size": 4, "distributed.sequence_parallel": True}
OLMO = {"train_module.dp_config.name": "fsdp", "train_module.tp_config.degree": 4}
FSDP1 = {"distributed_type": "FSDP", "fsdp_config.fsdp_version": 1, "fsdp_config.fsdp_sharding_strategy": "FULL_SHARD"}
FSDP2 = {"distributed_type": "FSDP", "fsdp_config.fsdp_version": 2}
Z = "zero_optimization."


def read(name: str, settings: dict[str, Any]) -> SettingsReading:
    return understand(READABLE[name], settings, gpus=GPUS, model="llama3-8b")


def axes(name: str, settings: dict[str, Any]) -> set[str]:
    reading = read(name, settings)
    return set(used_overlap(reading.plan, reading.stack, NODE))


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("megatron-lm", MEGATRON, set()),  # all off by default
        ("megatron-lm", MEGATRON | {"--overlap-grad-reduce": True}, {"dp"}),
        ("megatron-lm", MEGATRON | {"--tp-comm-overlap": True}, {"tp"}),
        ("megatron-bridge", BRIDGE, {"dp"}),  # on in the recipes' common settings
        ("megatron-bridge", BRIDGE | {"ddp.overlap_grad_reduce": False}, set()),
        ("megatron-bridge", BRIDGE | {"ddp.overlap_grad_reduce": False, "comm_overlap": "CommOverlapConfig"}, {"dp"}),
        ("megatron-bridge", BRIDGE | {"comm_overlap.tp_comm_overlap": True}, {"dp", "tp"}),
        ("torchtitan", TITAN, {"dp"}),
        ("torchtitan", TITAN | {"compile.enable": True, "parallelism.enable_async_tensor_parallel": True}, {"dp", "tp"}),
        ("torchtitan", TITAN | {"parallelism.enable_async_tensor_parallel": True}, {"dp"}),  # it needs the compiler
        ("automodel", AUTOMODEL, {"dp"}),
        ("automodel", AUTOMODEL | {"distributed.enable_async_tensor_parallel": True}, {"dp", "tp"}),
        ("deepspeed", {Z + "stage": 0}, set()),
        ("deepspeed", {Z + "stage": 2}, set()),
        ("deepspeed", {Z + "stage": 2, Z + "overlap_comm": True}, {"dp"}),
        ("deepspeed", {Z + "stage": 3}, {"dp"}),
        ("deepspeed", {Z + "stage": 3, Z + "overlap_comm": False}, set()),
        ("gpt-neox", {Z + "stage": 1, Z + "overlap_comm": True, "pipe_parallel_size": 1}, set()),  # the pipeline engine
        ("gpt-neox", {Z + "stage": 1, Z + "overlap_comm": True, "pipe_parallel_size": 0}, {"dp"}),
        ("accelerate", FSDP2, {"dp"}),
        ("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": 2}, set()),
        ("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": 3}, {"dp"}),
        ("axolotl", {"deepspeed": "deepspeed_configs/zero2.json"}, {"dp"}),
        ("llama-factory", {"deepspeed": "examples/deepspeed/ds_z2_config.json"}, set()),
        ("llama-factory", {"use_distributed_optimizer": True, "overlap_grad_reduce": True}, {"dp"}),
        ("olmo-core", OLMO, {"dp"}),
        ("olmo-core", OLMO | {"train_module.tp_config.enable_async": True}, {"dp", "tp"}),
        ("nanotron", {"parallelism.dp": 64}, {"dp"}),
        ("torchtune", {"batch_size": 1}, {"dp"}),
    ],
)  # fmt: skip
def test_overlap_is_read(name: str, settings: dict[str, Any], expected: set[str]) -> None:
    assert axes(name, settings) == expected


@pytest.mark.parametrize(
    ("name", "settings", "prefetch"),
    [
        ("accelerate", FSDP1, "forward"),  # NO_PREFETCH is its default
        ("accelerate", FSDP1 | {"fsdp_config.fsdp_backward_prefetch": "BACKWARD_PRE"}, True),
        ("accelerate", FSDP2, True),
        ("deepspeed", {Z + "stage": 3, Z + "stage3_prefetch_bucket_size": 0}, False),
        ("deepspeed", {Z + "stage": 3, Z + "stage3_prefetch_bucket_size": "auto"}, True),
        ("megatron-lm", MEGATRON | {"--overlap-grad-reduce": True}, False),
        ("megatron-lm", MEGATRON | {"--overlap-grad-reduce": True, "--overlap-param-gather": True}, True),
    ],
)
def test_prefetch_is_read(name: str, settings: dict[str, Any], prefetch: bool | str) -> None:
    assert read(name, settings).plan.prefetch == prefetch


def test_pipeline_messages_and_async_linears_change_the_stack() -> None:
    assert read("megatron-lm", MEGATRON | PIPELINE).stack.blocking_p2p is False
    assert (
        read("megatron-lm", MEGATRON | PIPELINE | {"--no-overlap-p2p-communication": True}).stack.blocking_p2p is True
    )
    tensor = {"parallelism.tp": 4, "parallelism.dp": 16, "parallelism.tp_mode": "REDUCE_SCATTER"}
    assert read("nanotron", tensor).stack.async_linears == "none"
    assert (
        read("nanotron", tensor | {"parallelism.tp_linear_async_communication": True}).stack.async_linears
        == "own-shard"
    )


@pytest.mark.parametrize(
    ("impl", "scope", "graphs"),
    [("none", ["attn"], ()), ("transformer_engine", ["moe_router", "moe_preprocess"], ("router",)), ("local", "full_iteration", ("step",)),
     ("full_iteration", None, ("step",)), ("transformer_engine", ["attn", "mlp"], ("attention", "ffn")),
     ("local", "full", ("attention", "router", "ffn"))],
)  # fmt: skip
def test_what_cuda_graphs_replay(impl: str, scope: Any, graphs: tuple[str, ...]) -> None:
    settings = {"model.cuda_graph_impl": impl, "model.cuda_graph_scope": scope}
    reading = check({"id": "one", "framework": "Megatron-Bridge", "gpus": 8, "settings": settings}).reading
    assert reading is not None
    assert reading.stack.graphs == graphs


@pytest.mark.parametrize(
    ("name", "settings", "saves", "loads"),
    [
        ("accelerate", FSDP1, "rank-0", "every-rank"),
        ("accelerate", FSDP2, "copied", "sharded"),
        ("accelerate", FSDP2 | {"fsdp_config.fsdp_state_dict_type": "FULL_STATE_DICT"}, "rank-0", "rank-0"),
        ("axolotl", {"fsdp_version": 2, "fsdp_config.final_state_dict_type": "FULL_STATE_DICT"}, "rank-0", "rank-0"),
        ("deepspeed", {Z + "stage": 3}, "sharded", "sharded"),
        ("deepspeed", {Z + "stage": 3, Z + "stage3_gather_16bit_weights_on_model_save": True}, "weights", "sharded"),
        ("deepspeed", {Z + "stage": 2, Z + "stage3_gather_16bit_weights_on_model_save": True}, "sharded", "sharded"),
        ("megatron-lm", MEGATRON, "sharded", "sharded"),
        ("megatron-lm", MEGATRON | {"--ckpt-format": "torch"}, "group", "sharded"),
        ("megatron-lm", MEGATRON | {"--async-save": True}, "copied", "sharded"),
        ("megatron-bridge", BRIDGE | {"checkpoint.ckpt_format": "torch"}, "group", "sharded"),
        ("torchtitan", TITAN | {"checkpoint.async_mode": "async"}, "copied", "sharded"),
        ("torchtune", {"batch_size": 1}, "rank-0", "rank-0"),
    ],
)  # fmt: skip
def test_who_collects_a_checkpoint_is_read(name: str, settings: dict[str, Any], saves: str, loads: str) -> None:
    stack = read(name, settings).stack
    assert (stack.saves, stack.loads) == (saves, loads)


@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_written_switches_give_the_predicted_step(name: str) -> None:
    """The plan that a framework runs with the written settings takes the predicted time; other overlap is written too, or named as lost."""
    framework, rng, seen = FRAMEWORKS[name], random.Random(name), 0
    while seen < 6:
        config = random_config(framework, "llama3-8b", rng)
        if config is None or config.plan.dp == 1:
            continue
        seen += 1
        overlap = rng.choice([None, (), ("dp",), ("dp", "tp")])
        config = replace(config, plan=config.plan.but(overlap=overlap))
        written = settings_of(config, framework)
        back = understand(framework, written.settings, gpus=config.plan.world, model="llama3-8b")
        lost = {"plan.overlap", "plan.prefetch", "stack.blocking_p2p"} & set(written.inexpressible)
        if overlap is None:
            assert not lost, (config.plan.title(), written.inexpressible)
        if not lost:
            assert step_time(config) == pytest.approx(step_time(with_switches(config, back)), rel=1e-12)


def with_switches(config: Config, back: SettingsReading) -> Config:
    plan = config.plan.but(overlap=back.plan.overlap, prefetch=back.plan.prefetch)
    return replace(config, plan=plan, stack=back.stack)


def step_time(config: Config) -> float:
    e = estimate(config)
    return e.prediction.step_time_s


def test_overlap_of_recipes_survives_a_round_trip() -> None:
    seen = 0
    for row in rows(Path(__file__).parent / "recipes.jsonl"):
        reading = check(row).reading
        if reading is None or reading.errors or not reading.shape.complete or reading.framework.name not in FRAMEWORKS:
            continue
        cluster = catalog.load("clusters", "dgx-h100").with_gpus(abs(reading.assembled.gpus))
        config = Config(reading.shape.model, cluster, reading.plan, reading.workload, reading.stack)
        written, _ = write_settings(
            reading.framework.table, express(config)
        )  # of a model that the framework may not have by name
        lost = difference(
            config, understand(reading.framework, written, gpus=config.plan.world, model=config.model.name)
        )
        by_file = reading.framework.name == "axolotl" and "deepspeed" in reading.understood.used  # written as FSDP
        assert by_file or not {"plan.overlap", "plan.prefetch", "stack.blocking_p2p"} & set(lost), (row["id"], lost)
        seen += 1
    assert seen > 20


def test_a_stack_hides_tensor_parallelism_only_where_it_can() -> None:
    stack = catalog.load("stacks", "megatron-core")
    plan = read(
        "megatron-lm",
        MEGATRON | {"--tp-comm-overlap": True, "--overlap-grad-reduce": True, "--overlap-param-gather": True},
    ).plan
    assert plan.overlap is None
    assert "tp" in plan.overlapped(stack, 8)
    assert "tp" not in plan.but(sp=False).overlapped(stack, 8)
    assert "tp" not in plan.overlapped(stack, 2)


@pytest.mark.parametrize(
    ("name", "key", "kind"),
    [
        ("deepspeed", "zero_optimization.stage3_max_live_parameters", "not modelled"),
        ("deepspeed", "zero_optimization.sub_group_size", "not modelled"),
        ("deepspeed", "fp16.loss_scale_window", "no effect"),
        ("deepspeed", "--critic_model_name_or_path", "not modelled"),
        ("accelerate", "fsdp_config.fsdp_forward_prefetch", "not modelled"),
        ("accelerate", "fsdp_config.fsdp_use_orig_params", "not modelled"),
        ("accelerate", "machine_rank", "no effect"),
        ("axolotl", "fsdp_config.fsdp_limit_all_gathers", "not modelled"),
        ("axolotl", "learning_rate", "no effect"),
        ("megatron-lm", "--adam-beta1", "no effect"),
        ("megatron-lm", "--cross-entropy-fusion-impl", "not modelled"),
        ("nanotron", "parallelism.tp_recompute_allgather", "not modelled"),
        ("torchtitan", "checkpoint.folder_path", "no effect"),
    ],
)
def test_keys_are_called_without_effect_only_if_they_are(name: str, key: str, kind: str) -> None:
    table: Table = READABLE[name].table
    assert table.kind_of(key) == kind


def test_each_gather_that_is_not_ahead_costs_time() -> None:
    """ZeRO-1 waits for updated parameters, ZeRO-3 for the weights of every layer;
    `forward` waits in backward only. Buckets are as large as Megatron's."""
    cluster, stack = catalog.load("clusters", "dgx-h100").with_gpus(16), catalog.load("stacks", "megatron-core")
    model, workload = catalog.load("models", "llama3-8b"), Workload(batch=16, seq=2048)
    times = {
        (zero, prefetch): step_time(
            Config(model, cluster, Plan(shard=16, zero=zero, prefetch=prefetch, bucket=1.6e8), workload, stack)
        )
        for zero in (1, 3)
        for prefetch in (True, "forward", False)
    }
    assert times[1, True] == times[1, "forward"] < times[1, False]
    assert times[3, True] < times[3, "forward"] < times[3, False]
