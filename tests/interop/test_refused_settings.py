"""Options that a framework refuses together are flagged, and the same settings without the conflict are not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import MeshwrightError
from meshwright.interop import rules_megatron, rules_torch
from meshwright.interop.files import configure, read_settings
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.recipes import check
from meshwright.interop.rules import SettingsOptions
from meshwright.interop.rules_megatron import MEGATRON_RULES
from meshwright.interop.rules_torch import TORCH_RULES
from meshwright.interop.write import write_file

MODEL = ["--num-layers", "8", "--hidden-size", "512", "--num-attention-heads", "8", "--vocab-size", "32000"]
BATCH = ["--seq-length", "1024", "--micro-batch-size", "1", "--global-batch-size", "64", "--bf16"]
EXPERTS = ["--num-experts", "8", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
CHUNKS = [*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "2"]
OVERLAP = [*EXPERTS, "--overlap-moe-expert-parallel-comm"]


def findings(options: list[str]) -> list[str]:
    found = check({"id": "one", "framework": "Megatron-LM", "args": [*MODEL, *BATCH, *options], "gpus": 8})
    return [f"{finding['code']} {finding['what']}" for finding in found.findings if finding["severity"] == "error"]


@pytest.mark.parametrize(
    ("legal", "added", "what"),
    [
        (["--recompute-granularity", "selective"], ["--recompute-method", "uniform"], "selective recompute"),
        ([], ["--recompute-granularity", "full"], "without a recompute method"),
        (["--cpu-offloading-num-layers", "2"], PIPELINE, "offloaded to the CPU in a pipeline of 2"),
        (["--cpu-offloading-num-layers", "2"], ["--recompute-activations", "--recompute-granularity", "selective"], "together with recompute"),
        (CHUNKS, ["--num-virtual-stages-per-pipeline-rank", "2"], "are both set"),
        ([*PIPELINE, "--decoder-first-pipeline-num-layers", "4"], ["--account-for-embedding-in-pipeline-split"], "are both set"),
        ([], ["--num-virtual-stages-per-pipeline-rank", "2"], "2 virtual stages without a pipeline"),
        ([*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2"], ["--no-overlap-p2p-communication"], "interleaved schedule of 2 ranks"),
        ([], ["--max-position-embeddings", "512"], "1,024 tokens with 512 positions"),
        (["--context-parallel-size", "4"], ["--hierarchical-context-parallel-sizes", "2", "4"], "2 × 4 = 8 with context parallelism 4"),
        (["--context-parallel-size", "4"], ["--cp-comm-type", "a2a+p2p"], "a2a+p2p without"),
        (OVERLAP, ["--moe-shared-expert-overlap"], "overlap of shared experts"),
        (OVERLAP, PIPELINE, "without virtual stages"),
        (EXPERTS, ["--delay-wgrad-compute"], "delayed weight gradients"),
        (EXPERTS, ["--tensor-model-parallel-size", "2"], "experts with tensor parallelism 2"),
        ([], ["--expert-model-parallel-size", "2"], "a model without experts"),
        (["--use-distributed-optimizer", "--overlap-grad-reduce"], ["--tp-comm-overlap"], "without sequence parallelism"),
        ([], ["--overlap-param-gather"], "without sharded optimizer states"),
        (["--use-distributed-optimizer"], ["--overlap-param-gather"], "without overlap of the gradient reduction"),
        (["--use-torch-fsdp2"], PIPELINE, "FSDP2 with a pipeline of 2 stages"),
        (["--use-megatron-fsdp"], ["--use-tp-pp-dp-mapping"], "in the order tp, pp, dp"),
        (["--fp8-format", "hybrid"], ["--fp4-format", "e2m1"], "fp8 and fp4"),
    ],
)  # fmt: skip
def test_refused_together(legal: list[str], added: list[str], what: str) -> None:
    assert findings(legal) == []
    found = findings([*legal, *added])
    assert any(what in finding for finding in found), found


def test_legal_combinations_are_not_flagged() -> None:
    assert findings([*OVERLAP, *CHUNKS, "--delay-wgrad-compute"]) == []
    assert (
        findings(["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "2"])
        == []
    )
    assert findings([*EXPERTS, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--tp-comm-overlap"]) == []
    sizes = [
        "--context-parallel-size",
        "8",
        "--cp-comm-type",
        "a2a+p2p",
        "--hierarchical-context-parallel-sizes",
        "2",
        "4",
    ]
    assert findings(sizes) == []


def test_a_script_states_its_gpus_with_the_flags_of_torchrun(tmp_path) -> None:
    script = tmp_path / "train.sh"
    words = " ".join([*MODEL, *BATCH, "--tensor-model-parallel-size", "8"])
    script.write_text(f"NODES=4\ntorchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py {words}\n")
    reading = read_settings(script)
    assert (reading.gpus, reading.plan.world, reading.understood.unknown) == (32, 32, [])
    script.write_text(f"torchrun --standalone pretrain_gpt.py {words}\n")
    assert "GPUs: 8" in read_settings(script).assembled.assumed


def test_fields_of_megatron_bridge_follow_the_same_rules() -> None:
    settings = {
        "model.num_layers": 8, "model.hidden_size": 512, "model.num_attention_heads": 8, "model.vocab_size": 32000, "model.seq_length": 1024,
        "train.micro_batch_size": 1, "train.global_batch_size": 64, "model.recompute_granularity": "selective",
    }  # fmt: skip
    row = {"id": "one", "framework": "Megatron-Bridge", "settings": settings, "gpus": 8}
    assert check(row).legal
    settings["model.recompute_num_layers"] = 1
    assert check(row).legal is False


@pytest.mark.parametrize(
    ("schedule", "layers", "legal"),
    [("1F1B", 9, True), ("1F1B", 5, False), ("Interleaved1F1B", 5, True), ("Interleaved1F1B", 9, False), ("ZBVZeroBubble", 3, False)],
)  # fmt: skip
def test_a_schedule_of_torchtitan_needs_its_number_of_stages(schedule: str, layers: int, legal: bool) -> None:
    settings = {
        "training.local_batch_size": 8, "training.seq_len": 1024, "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": schedule, "parallelism.pipeline_parallel_layers_per_stage": layers,
    }  # fmt: skip
    shape = {"n_layers": 16, "dim": 512, "n_heads": 8, "vocab_size": 32000}
    found = check({"id": "one", "framework": "torchtitan", "settings": settings, "shape": shape, "gpus": 8})
    assert found.legal is legal, found.findings


def test_axolotl_packs_one_sequence_with_context_parallelism_and_shards_once() -> None:
    settings = {"micro_batch_size": 2, "sequence_len": 512, "context_parallel_size": 2, "sample_packing": True}
    row = {"id": "one", "framework": "axolotl", "settings": settings}
    assert check(row).legal is False
    settings["micro_batch_size"] = 1
    assert check(row).legal
    settings |= {"deepspeed": "zero3.json", "fsdp": ["full_shard"]}
    assert check(row).legal is False


AXOLOTL = {"base_model": "meta-llama/Llama-3.1-8B", "micro_batch_size": 1, "sequence_len": 4096, "bf16": True}
FSDP2 = AXOLOTL | {"fsdp_version": 2, "fsdp_config.reshard_after_forward": True}
TITAN = {"training.local_batch_size": 8, "training.seq_len": 4096}
TITAN_STAGES = TITAN | {
    "parallelism.pipeline_parallel_degree": 2,
    "parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble",
}
AUTO = {"distributed.strategy": "fsdp2", "step_scheduler.local_batch_size": 1, "dataset.seq_len": 4096}
PIPE = AUTO | {
    "model.pretrained_model_name_or_path": "Qwen/Qwen3-8B", "distributed.pp_size": 2, "distributed.pipeline.layers_per_stage": 9,
    "distributed.pipeline.pp_microbatch_size": 1, "step_scheduler.local_batch_size": 4,
}  # fmt: skip
OLD = {
    "--model-parallel-size": 2,
    "--pipe-parallel-size": 2,
    "--batch-size": 4,
    "--num-layers": 24,
    "--seq-length": 1024,
}
MESH = {
    "distributed_type": "FSDP", "num_processes": 8, "fsdp_config.fsdp_version": 2, "fsdp_config.fsdp_reshard_after_forward": True,
    "parallelism_config.parallelism_config_dp_shard_size": 4, "parallelism_config.parallelism_config_tp_size": 2,
}  # fmt: skip
BRIDGE = {
    "model.hf_model_id": "Qwen/Qwen3-235B-A22B",
    "model.seq_length": 4096,
    "model.pipeline_model_parallel_size": 8,
    "train.micro_batch_size": 1,
}


@pytest.mark.parametrize(
    ("framework", "legal", "added", "what"),
    [
        ("axolotl", FSDP2, {"optimizer": "adamw_bnb_8bit"}, "adamw_bnb_8bit with FSDP2"),
        ("axolotl", FSDP2, {"optimizer": "paged_adamw_8bit"}, "paged_adamw_8bit with FSDP2"),
        ("axolotl", AXOLOTL | {"fsdp_config.offload_params": True}, {"optimizer": "paged_adamw_8bit"}, "with FSDP offload"),
        ("axolotl", FSDP2 | {"adapter": "qlora", "load_in_4bit": True}, {"fsdp_config.cpu_ram_efficient_loading": True}, "memory-efficient loading"),
        ("axolotl", AXOLOTL | {"adapter": "qlora", "load_in_4bit": True}, {"load_in_4bit": False}, "QLoRA without 4-bit"),
        ("axolotl", AXOLOTL | {"load_in_8bit": True, "adapter": "lora"}, {"adapter": None}, "without an adapter"),
        ("axolotl", FSDP2 | {"dp_shard_size": 8}, {"fsdp_version": None, "fsdp_config.reshard_after_forward": None}, "without fsdp_config"),
        ("axolotl", AXOLOTL | {"context_parallel_size": 2, "attn_implementation": "flash_attention_2"}, {"attn_implementation": "sdpa"}, "with sdpa"),
        ("axolotl", AXOLOTL | {"cut_cross_entropy": True}, {"liger_fused_linear_cross_entropy": True}, "several fused losses"),
        ("axolotl", FSDP2, {"tensor_parallel_size": 2, "dp_shard_size": 4, "liger_rms_norm": True}, "Liger's norm"),
        ("axolotl", FSDP2 | {"optimizer": "muon"}, {"fsdp_version": 1}, "muon with DeepSpeed or FSDP1"),
        ("axolotl", FSDP2 | {"optimizer": "flash_adamw"}, {"fsdp_version": 1}, "flash_adamw with DeepSpeed or FSDP1"),
        ("axolotl", AXOLOTL | {"optimizer": "q_galore_adamw8bit"}, {"adapter": "lora"}, "with adapters"),
        ("axolotl", AXOLOTL | {"adapter": "lora", "load_in_8bit": True}, {"model_quantization_config": "Mxfp4Config"}, "two kinds of quantised"),
        ("axolotl", AXOLOTL | {"max_memory": {"0": "70GiB"}}, {"gpu_memory_limit": "70GiB"}, "both set"),
        ("axolotl", AXOLOTL | {"deepspeed": "zero3.json"}, {"deepcompile": True, "deepspeed": None}, "without DeepSpeed"),
        ("axolotl", AXOLOTL | {"gradient_checkpointing": True}, {"selective_checkpointing": True, "gradient_checkpointing": False}, "selective"),
        ("axolotl", AXOLOTL | {"base_model": "tiiuae/falcon-7b"}, {"fsdp": ["full_shard"]}, "Falcon"),
        ("accelerate", MESH, {"parallelism_config.parallelism_config_dp_shard_size": 1, "parallelism_config.parallelism_config_tp_size": 8},
         "no dimension"),
        ("accelerate", MESH, {"fsdp_config.fsdp_forward_prefetch": True}, "forward prefetch"),
        ("torchtitan", TITAN, {"parallelism.tensor_parallel_degree": 2, "parallelism.enable_async_tensor_parallel": True}, "without compiling"),
        ("torchtitan", TITAN, {"parallelism.tensor_parallel_degree": 2, "training.seq_len": 4095}, "4,095 tokens"),
        ("torchtitan", TITAN, {"parallelism.data_parallel_replicate_degree": 4, "parallelism.data_parallel_shard_degree": 1,
                               "parallelism.tensor_parallel_degree": 2}, "That is DDP"),
        ("torchtitan", TITAN_STAGES | {"parallelism.fsdp_reshard_after_forward": "default"},
         {"parallelism.fsdp_reshard_after_forward": "always"}, "weights are freed"),
        ("torchtitan",
         TITAN_STAGES | {"parallelism.fsdp_reshard_after_forward": "always", "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"},
         {"parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble"}, "weights are freed"),
        ("Automodel", AUTO, {"distributed.strategy": "ddp", "distributed.tp_size": 2}, "DDP with tensor"),
        ("Automodel", AUTO, {"distributed.dp_replicate_size": 8}, "left to shard over"),
        ("Automodel", AUTO, {"distributed.pp_size": 2, "step_scheduler.local_batch_size": 2}, "without a section"),
        ("LLaMA-Factory", {"finetuning_type": "lora", "quantization_bit": 4}, {"finetuning_type": "full"}, "full fine-tuning"),
        ("DeepSpeed", {"zero_optimization.stage": 1, "optimizer.type": "OneBitAdam"}, {"zero_optimization.stage": 2}, "1-bit optimizer"),
        ("Megatron-Bridge", BRIDGE | {"model.account_for_embedding_in_pipeline_split": True, "model.account_for_loss_in_pipeline_split": True,
                                      "model.virtual_pipeline_model_parallel_size": 4},
         {"model.account_for_embedding_in_pipeline_split": False, "model.account_for_loss_in_pipeline_split": False}, "94 layers do not divide"),
        ("Automodel", PIPE | {"distributed.pipeline.pp_schedule": "interleaved1f1b"}, {"distributed.pipeline.pp_schedule": "1f1b"},
         "2 stages per rank"),
        ("Megatron-Bridge", BRIDGE | {"model.pipeline_model_parallel_size": 1}, {"dataset.micro_batch_size": 2}, "other micro-batches"),
        ("Megatron-DeepSpeed", OLD | {"zero_optimization.stage": 1}, {"zero_optimization.stage": 2}, "ZeRO stage 2 with a pipeline"),
        ("Megatron-Bridge", {"model.num_layers": 8, "model.seq_length": 1024}, {"model.num_layers_in_first_pipeline_stage": 3}, "without a pipeline"),
    ],
)  # fmt: skip
def test_frameworks_refuse(framework: str, legal: dict[str, Any], added: dict[str, Any], what: str) -> None:
    def errors(settings: dict[str, Any]) -> list[str]:
        row = {"id": "one", "framework": framework, "settings": settings, "gpus": 8}
        return [
            f"{f['what']}. {f['why']}"
            for f in check(row).findings
            if f["severity"] == "error" and f["code"] != "MW-LINT-013"
        ]

    assert [e for e in errors(legal) if "GPUs" not in e] == []
    assert any(what in error for error in errors(legal | added)), errors(legal | added)


def test_no_option_of_any_type_raises_in_a_rule() -> None:
    """Each rule reads options that a file may give as text, numbers, lists or nothing."""
    sources = (Path(module.__file__ or "").read_text("utf-8") for module in (rules_torch, rules_megatron))
    names = sorted({name for source in sources for name in re.findall(r'"([a-z_0-9]{4,})"', source)})
    for value in (None, True, "x", -1, 1.5, [1], {"a": 1}):
        options = SettingsOptions.of(dict.fromkeys(names, value), {"tp": 2, "seq": 64, "microbatch": 2, "gpus": 2})
        for rule in (*MEGATRON_RULES, *TORCH_RULES):
            rule.when(options)


def test_deepspeed_without_zero_shards_the_states_in_bf16(tmp_path) -> None:
    """DeepSpeed's `get_data_types` sums bf16 gradients in float32 without ZeRO, and its BF16_Optimizer shards the states; with fp16 it does not."""
    for half, zero, grads in (("bf16", 1, "fp32"), ("fp16", 0, "bf16")):
        file = tmp_path / "ds.json"
        file.write_text(
            json.dumps(
                {half: {"enabled": True}, "zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 1}
            )
        )
        plan = read_settings(file, gpus=8, model="llama3-8b").plan
        assert plan.zero == zero
        assert half == "fp16" or plan.grad_dtype == grads


def test_megatron_deepspeed_has_gelu_without_swiglu(tmp_path) -> None:
    script = tmp_path / "train.sh"
    words = "--deepspeed --zero-stage 0 --num-layers 70 --hidden-size 14336 --num-attention-heads 112 --vocab-size 250880 --seq-length 2048"
    script.write_text(f"python pretrain_gpt.py {words}\n")
    model = read_settings(script, gpus=384).shape.model
    assert (model.activation, model.ffn) == ("gelu", 4 * 14336)
    assert round(sum(model.parameters().values()) / 1e9) == 180


def test_flags_with_dashes_can_matter(tmp_path) -> None:
    """A name that speaks of a size is not filed under "ignored" because it is written with dashes."""
    script = tmp_path / "train.sh"
    words = (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ddp-bucket-size 400000000 --overlap-grad-reduce"
    )
    script.write_text(
        f"python pretrain_gpt.py {words} --intermediate-size 11008 --xielu --padded-vocab-size 9 --eod-mask-loss\n"
    )
    reading = read_settings(script, gpus=8)
    assert reading.plan.bucket == 8e8
    assert reading.understood.unknown == ["--intermediate-size", "--xielu", "--padded-vocab-size"]


MEGATRON = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --swiglu "
    "--vocab-size 128256 --seq-length 4096 --micro-batch-size 1 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --bf16"
)


@pytest.mark.parametrize(
    ("changes", "severity", "words"),
    [
        ("--num-query-groups 6", "error", "6 KV heads do not divide 64 heads"),
        ("--recompute-granularity full --recompute-method block", "error", "without the number of layers"),
        (
            "--recompute-activations --recompute-granularity full --recompute-method uniform",
            "error",
            "selective recompute with recompute method",
        ),
        ("--fp8-format hybrid --transformer-impl local", "warning", "local transformer implementation"),
        ("--fp8-recipe delayed", "warning", "without --fp8-format"),
        (
            "--tensor-model-parallel-size 1 --sequence-parallel",
            "note",
            "sequence parallelism with tensor parallelism 1",
        ),
        ("--num-layers-per-virtual-pipeline-stage 7", "error", "do not divide into stages of 7 layers"),
    ],
)
def test_mistakes_in_a_launch_script(changes: str, severity: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"python pretrain_gpt.py {MEGATRON} {changes}\n")
    found = [problem for problem in read_settings(script, gpus=64).problems if words in problem.what]
    assert [problem.severity for problem in found] == [severity]


@pytest.mark.parametrize(
    ("changes", "code"), [("--num-query-groups 6", "MW-MODEL-003"), ("--global-batch-size 500", "MW-PLAN-011")]
)
def test_the_fix_of_an_illegal_script_works(changes: str, code: str, tmp_path: Path) -> None:
    """A fix that is offered as --set is applied before the plan is judged."""
    script = tmp_path / "train.sh"
    script.write_text(f"python pretrain_gpt.py {MEGATRON} --global-batch-size 512 {changes}\n")
    with pytest.raises(MeshwrightError) as raised:
        configure(plan=script, cluster="dgx-h100", gpus=64)
    assert raised.value.code == code
    configure(plan=script, cluster="dgx-h100", gpus=64, set=[raised.value.fix.removeprefix("--set ")])


def test_what_a_script_says_of_its_model_is_written_again(tmp_path: Path) -> None:
    """A rotary base or an epsilon changes no time, but another one in the written settings trains another model."""
    script = tmp_path / "train.sh"
    script.write_text(
        f"python pretrain_gpt.py {MEGATRON} --position-embedding-type rope --rotary-base 500000 --norm-epsilon 1e-6\n"
    )
    config = configure(plan=script, cluster="dgx-h100", gpus=64)
    text = write_file(config, FRAMEWORKS["megatron-lm"], tmp_path / "best.sh").text
    assert "--rotary-base 500000" in text
    assert "--norm-epsilon 1e-06" in text


def test_a_key_without_a_value_states_nothing(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yml"
    file.write_text(
        "base_model: meta-llama/Llama-3.1-8B\nmicro_batch_size: 2\nsequence_len: 4096\nfsdp_config:\ndeepspeed_stage:\n"
    )
    reading = read_settings(file)
    assert not reading.understood.unknown
    assert {"fsdp_config", "deepspeed_stage"} <= set(reading.understood.others["no effect"])
