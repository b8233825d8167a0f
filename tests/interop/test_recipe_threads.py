"""Mistakes that people reported in public threads (`benchmarks/recipe_threads.jsonl`): flagged for their reason, and the corrections are not."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.interop.recipes import check
from meshwright.interop.shapes import stated_memory
from meshwright.planner.advice.lint.recipes import judge

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "benchmarks/recipe_threads.jsonl").read_text("utf-8").splitlines()
]
MISSED = {40}  # 8-bit weights with FSDP: a published recipe has the same options


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row["expected"] != "slow" and "set" not in row], ids=lambda row: str(row["n"])
)
def test_a_mistake_is_flagged_and_its_correction_is_not(row: dict[str, Any]) -> None:
    def is_wrong(recipe: dict[str, Any]) -> bool:
        verdict = check({**recipe, "id": "one"})
        return (verdict.legal if row["expected"] == "illegal" else verdict.fits) is False

    assert is_wrong(row["before"]) is (row["n"] not in MISSED), row["why"]
    assert not (row["after"] and is_wrong(row["after"])), row["why"]


@pytest.mark.parametrize(
    ("thread", "code"),
    # 3499: with adapters the gathers of ZeRO-3 take 29% of the step, within the doubt of two predictions; other patterns of it are flagged
    [("6695", "MW-LINT-018"), ("1000", "MW-LINT-019"), ("1214", "MW-LINT-005")],
)
def test_a_slow_recipe_is_flagged_for_its_reason(thread: str, code: str) -> None:
    row = next(row for row in ROWS if row["source"].endswith(f"/{thread}"))
    assert row["reason"] == code
    verdict = judge({**row["before"], "id": "one"})
    assert verdict.slow
    assert code in [finding["code"] for finding in verdict.findings]
    if row["after"]:
        assert code not in [finding["code"] for finding in judge({**row["after"], "id": "one"}).findings]


def test_tensor_parallelism_without_need_is_found_by_its_costs() -> None:
    """Eight stages were 30% faster there than tp 8 in one node: no rule says so, the costs do. Sequence parallelism, whose messages overlap in
    Megatron-Core, saves more than a smaller tp."""
    row = next(row for row in ROWS if row["source"].endswith("Megatron-LM/issues/258"))
    (found,) = (f for f in judge({**row["before"], "id": "one"}).findings if f["code"] == "MW-LINT-020")
    assert found["fix"] == "--set plan.sp=true"
    before, after = (judge({**row[side], "id": "one"}) for side in ("before", "after"))
    assert before.slow
    assert not after.slow


def test_gradients_of_adapters_are_not_called_slow() -> None:
    row = next(row for row in ROWS if row["source"].endswith("/3499"))
    assert {f["code"] for f in judge({**row["after"], "id": "one"}).findings}.isdisjoint({"MW-LINT-016", "MW-LINT-017"})


@pytest.mark.parametrize(
    ("hardware", "gib"),
    [("RTX 3090", 23.7), ("A10 24GB", 23.7), ("A100 64GB", 63.2), ("L40S", 47.4), ("H20", 94.8), ("H200", None), ("A10G", None), ("TPU v5", None)],
)  # fmt: skip
def test_memory_of_a_gpu_by_its_name(hardware: str, gib: float | None) -> None:
    assert stated_memory(hardware) == (pytest.approx(gib, abs=0.1) if gib else None)


def test_a_gpu_with_more_memory_than_the_catalogs_is_judged_by_its_own() -> None:
    settings = {
        "deepspeed": "ds_z3_config.json",
        "finetuning_type": "full",
        "per_device_train_batch_size": 1,
        "cutoff_len": 1024,
    }
    recipe = {"id": "one", "framework": "LLaMA-Factory", "model": "Qwen/Qwen2.5-32B", "gpus": 7, "settings": settings}
    assert check({**recipe, "hardware": "H100"}).fits is False
    assert check({**recipe, "hardware": "H100 96GB"}).fits is True


@pytest.mark.parametrize(
    ("framework", "settings", "stack"),
    [("TRL", {"deepspeed": "zero2.json"}, "deepspeed"), ("TRL", {"fsdp": "full_shard"}, "trl"),
     ("axolotl", {"deepspeed": "deepspeed_configs/zero3_bf16.json"}, "deepspeed"),
     ("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": 2}, "deepspeed"),
     ("accelerate", {"distributed_type": "FSDP"}, "accelerate"), ("LLaMA-Factory", {"deepspeed": "ds_z3_config.json"}, "deepspeed")],
)  # fmt: skip
def test_the_stack_of_trainers_that_shard_by_deepspeed_is_deepspeed(
    framework: str, settings: dict[str, Any], stack: str
) -> None:
    reading = check({"id": "one", "framework": framework, "gpus": 8, "settings": settings}).reading
    assert reading is not None
    assert reading.stack.name == stack


def test_deepspeed_keeps_parameters_gathered() -> None:
    """By default 10⁹ of them in 16 bits: more than the head with its norm, the largest unit of an 8B model."""
    settings = {
        "zero_optimization.stage": 3,
        "bf16.enabled": True,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization.stage3_prefetch_bucket_size": 0,
    }
    row = {
        "id": "one",
        "framework": "DeepSpeed",
        "model": "meta-llama/Meta-Llama-3-8B",
        "gpus": 8,
        "hardware": "A100",
        "settings": settings,
    }
    few = {**row, "settings": {**settings, "zero_optimization.stage3_max_live_parameters": 1}}
    default, least = (check(each).memory_gib or 0.0 for each in (row, few))
    assert default - least == pytest.approx(2 * (1e9 - 128257 * 4096) / 2**30)


def test_frozen_weights_of_adapters_take_memory() -> None:
    """A quarter of 16 bits, shared by two cards: 70B take 17 GiB on each, although their shards have no fp32 copy."""
    row = next(row for row in ROWS if row["source"].endswith("/1522"))
    weights = 69e9 * 4.5 / 8 / 2 / 2**30
    assert (check({**row["before"], "id": "one"}).memory_gib or 0.0) > weights


def test_offload_in_the_name_of_a_deepspeed_file() -> None:
    reading = check({"id": "one", "framework": "TRL", "settings": {"deepspeed": "ds_z3_offload_config.json"}}).reading
    assert reading is not None
    assert (reading.facts["sharding"], reading.facts["offload_states"], reading.facts["offload_parameters"]) == (
        "parameters",
        True,
        True,
    )


def test_the_name_of_bridges_precision_decides_the_gradients() -> None:
    settings = {"mixed_precision": "bf16_mixed", "ddp.grad_reduce_in_fp32": False}
    named = check({"id": "one", "framework": "Megatron-Bridge", "settings": settings}).reading
    field = {**settings, "mixed_precision.grad_reduce_in_fp32": False}
    stated = check({"id": "one", "framework": "Megatron-Bridge", "settings": field}).reading
    assert named is not None
    assert stated is not None
    assert (named.plan.grad_dtype, stated.plan.grad_dtype) == ("fp32", "bf16")


def test_logits_that_stay_in_16_bits_take_less_memory() -> None:
    settings = {
        "model.pretrained_model_name_or_path": "Qwen/Qwen3-8B", "dataset.seq_length": 8192, "step_scheduler.local_batch_size": 1,
        "loss_fn._target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
    }  # fmt: skip
    recipe = {"id": "one", "framework": "Automodel", "gpus": 8, "hardware": "H100"}
    wide, half = (
        check({**recipe, "settings": {**settings, "loss_fn.fp32_upcast": upcast}}).memory_gib
        for upcast in (True, False)
    )
    assert wide is not None
    assert half is not None
    assert wide - half == pytest.approx((14 - 8) * 8192 * 151936 / 2**30, rel=0.01)


@pytest.mark.parametrize(
    ("changed", "legal"),
    [({}, True), ({"train_module.rank_microbatch_size": 6000}, False), ({"train_module.tp_config.degree": 2}, False),
     ({"train_module.dp_config.name": "fsdp"}, False), ({"train_module.dp_config.shard_degree": 4}, False)],
)  # fmt: skip
def test_olmo_core_refuses(changed: dict[str, Any], legal: bool) -> None:
    settings = {
        "train_module.max_sequence_length": 4096, "train_module.rank_microbatch_size": 8192, "train_module.ep_config.degree": 8,
        "train_module.dp_config.name": "hsdp", "train_module.dp_config.shard_degree": 8, "model.num_experts": 64, "model.top_k": 8,
    }  # fmt: skip
    assert (
        check({"id": "one", "framework": "OLMo-core", "gpus": 32, "settings": {**settings, **changed}}).legal is legal
    )
