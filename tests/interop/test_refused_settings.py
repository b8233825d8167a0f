"""Options that a framework refuses together are flagged, and the same settings without the conflict are not."""

from __future__ import annotations

import pytest

from meshwright.interop.files import read_settings
from meshwright.interop.recipes import check

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
