"""Rows of other sources than those we know: names, cards and shapes as people write them. All rows are invented."""

import numpy as np
import pytest

from meshwright.calibrate.runs import rows
from meshwright.calibrate.runs.row_model import Widths, catalog_entry
from meshwright.calibrate.runs.rows import apply_readings
from meshwright.calibrate.runs.validate import predict_rows
from meshwright.describe import catalog
from meshwright.describe.catalog import accelerator_of, stack_of
from meshwright.describe.config import configure
from meshwright.planner.question import base_plan

BASE = {
    "file": "invented", "row_id": "r", "model": "Corvus 7B", "layers": "32", "hidden": "4096", "ffn_hidden": "11008", "heads": "32",
    "kv_heads": "32", "vocab": "32000", "seq_len": "4096", "gpu_type": "H100 SXM5 80GB", "gpus": "64", "gpus_per_node": "8", "tp": "2", "pp": "2",
    "cp": "1", "dp": "16", "sp": "1", "zero": "1", "micro_batch": "1", "global_batch": "256", "recompute_mode": "none", "dtype": "bf16",
    "flash_attn": "1", "schedule": "1f1b", "stack": "", "step_time_s": "3.0", "params": "", "experts": "", "topk": "",
}  # fmt: skip


SMALL = {"model": "Llama-like", "vocab": "131072", "layers": "16", "hidden": "2048", "ffn_hidden": "8192"}
UNITS = {"B": 1e9, "M": 1e6}


def case(**changes):
    return rows.case({**BASE, **changes})


def model(**changes):
    found = case(**changes)
    assert not found.refused, found.refused
    return found.model


# Names that the catalog does not have


def test_the_published_count_decides_between_swiglu_and_gelu():
    assert model(params="6.74e9").activation == "swiglu"
    gelu = model(params="6.67e9", ffn_hidden="16384")
    assert gelu.activation == "gelu"
    for found in (model(params="6.74e9"), gelu):
        assert found.name == "Corvus 7B"
    assert model().activation == "gelu"  # no count, and the name says nothing
    assert model(model="Corvus-Llama 7B").activation == "swiglu"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (SMALL | {"params": "1.34e9"}, {"tied": True, "activation": "swiglu"}),
        (SMALL | {"params": "1.61e9"}, {"tied": False, "activation": "swiglu"}),
        ({"ffn_hidden": "", "params": "6.74 B"}, {"ffn": 11008, "activation": "swiglu"}),
        ({"vocab": "", "params": "8.03e9", "kv_heads": "8", "ffn_hidden": "14336"}, {"vocab": 128256}),
        ({"kv_heads": "", "vocab": "128256", "params": "8030M", "ffn_hidden": "14336"}, {"kv_heads": 8}),
    ],
)
def test_what_a_row_leaves_open_is_chosen_by_the_published_count(changes, expected):
    found = model(**changes)
    assert {key: getattr(found, key) for key in expected} == expected
    count = rows.number(changes["params"]) * UNITS.get(changes["params"][-1], 1)
    assert found.total == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize(
    ("params", "vocab"), [("6.7e9", 50304), ("6.6e9", 32000), ("6.59e9", 32000), ("7.0e9", 128256)]
)
def test_the_vocabulary_is_the_first_whose_count_rounds_to_the_published_one(params, vocab):
    """GPT with 4096 × 32 has 6.67e9, 6.59e9 and 6.98e9 parameters with these vocabularies: all but the last within 2% of 6.6e9."""
    found = model(model="GPT", ffn_hidden="16384", vocab="", params=params)
    assert (found.vocab, found.activation, found.positions) == (vocab, "gelu", "learned")
    digits = len(params.removesuffix("e9").replace(".", "")) - 1
    assert round(found.total / 1e9, digits) == float(params.removesuffix("e9"))


def test_virtual_stages_that_a_source_publishes_beside_its_table_are_read():
    row = {"file": "nvidia_dgxc_benchmarking", "model": "Nemotron-4-340B", "tp": "8", "pp": "8", "dp": "", "gpus": "256", "global_batch": "64",
           "layers": "96", "hidden": "18432", "ffn_hidden": "73728", "heads": "96", "kv_heads": "8", "vocab": "256000"}  # fmt: skip
    read = apply_readings(case(**row)).plan
    assert (read.schedule, read.virtual) == ("interleaved", 12)
    for changes in ({"vpp": "1"}, {"pp": "4"}, {"file": "invented"}):
        assert apply_readings(case(**(row | changes))).plan.schedule == "1f1b"


def test_a_shape_that_misses_the_published_count_is_refused_with_both_numbers():
    found = case(params="13e9")
    assert "13B are published" in found.refused
    assert "6.9" in found.refused or "6.7" in found.refused
    assert case(model="Llama-3-8B", params="70e9", ffn_hidden="14336", kv_heads="8", vocab="128256").refused


def test_experts_of_a_row_are_built():
    mixture = {
        "ffn_hidden": "9216 dense (2 layers) / 1536 per expert + 3072 shared", "experts": "48", "topk": "4", "layers": "24",
        "params": "22.87e9", "model": "Corvus MoE",
    }  # fmt: skip
    found = model(**mixture)
    assert (found.experts, found.top_k, found.expert_ffn, found.ffn, found.dense_layers) == (48, 4, 1536, 9216, 2)
    assert (found.shared_experts, found.shared_width, found.activation) == (1, 3072, "swiglu")
    assert Widths.of("8192 per expert + 2 shared; MoE every 3rd layer") == Widths(8192, 8192, shared=2, every=3)


# Variants of catalog models


def test_a_reduced_variant_has_the_layers_and_experts_of_the_row():
    row = {
        "model": "DeepSeek-V3 (layers reduced)", "layers": "8", "hidden": "7168", "heads": "128", "kv_heads": "MLA", "vocab": "129280",
        "experts": "64", "topk": "8", "ffn_hidden": "18432 dense / 2048 per expert + 2048 shared", "tp": "1", "ep": "8", "dp": "32",
    }  # fmt: skip
    found = model(**row)
    assert (found.layers, found.experts, found.top_k, found.attention, found.dense_layers) == (8, 64, 8, "mla", 3)
    whole = catalog.load("models", "deepseek-v3")
    assert found.total < 0.04 * whole.total
    assert model(**row, params=f"{found.total:.0f}").total == found.total
    assert case(**row, params="671e9").refused
    fewer = model(**row | {"experts": "12", "topk": "3", "ep": "4"})  # 8 groups do not divide 12 experts
    assert (fewer.experts, fewer.top_k, fewer.router.groups) == (12, 3, 1)


@pytest.mark.parametrize(
    ("name", "given", "missing"),
    [
        ("Mixtral 8x7B (layers reduced)", {}, "layers"),
        ("Mixtral 8x7B (layers reduced)", {"layers": "4"}, ""),
        ("Mixtral 8x7B (reduced)", {"experts": "4"}, "layers"),
        ("DeepSeek-V3 (layers and experts reduced)", {"layers": "8"}, "experts"),
        ("DeepSeek-V3 (layers and experts reduced)", {"layers": "8", "experts": "64"}, ""),
    ],
)
def test_a_reduced_variant_without_its_numbers_is_refused(name, given, missing):
    """The catalog's layers and experts are not those of the run."""
    blank = dict.fromkeys(("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab"), "")
    found = case(**{**blank, "model": name, **given})
    assert found.refused == (f"the {missing} of {name} are not published" if missing else "")


def test_a_hybrid_variant_keeps_its_pattern_and_an_unknown_one_is_refused():
    row = {
        "model": "Nemotron_3_Nano",
        "hidden": "2688",
        "ffn_hidden": "1856 per expert",
        "tp": "1",
        "dp": "32",
        "ep": "8",
    }
    found = model(**row | {"layers": "12", "heads": "", "kv_heads": "", "vocab": "", "experts": "32"})
    assert (found.layers, found.layer_count("linear"), found.layer_count("experts"), found.experts) == (12, 6, 5, 32)
    other = case(**row | {"hidden": "1024"})
    assert "pattern of layer kinds" in other.refused
    assert "pattern of layer kinds" in case(model="Corvus hybrid 8B").refused


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("Llama 3.1 405B", "llama3.1-405b"), ("meta-llama/Llama-3-8B", "llama3-8b"), ("LLaMA2-70b (SFT)", "llama2-70b"),
        ("llama 3 405B", "llama3.1-405b"),
        ("Qwen3_30B_A3B", "qwen3-30b-a3b"), ("Qwen3-30B", "qwen3-30b-a3b"), ("Qwen3-Next 80B", "qwen3-next-80b-a3b"),
        ("deepseek v3 671B", "deepseek-v3"),
        ("DeepSeek-V3.2-Exp", "deepseek-v3.2"), ("DeepSeek V3 256 experts", "deepseek-v3"), ("Kimi K2", "kimi-k2"), ("GPT-3 175B", "gpt3-175b"),
        ("Nemotron-H 47B", "nemotron-h-47b"), ("NVIDIA Nemotron 3 Super 120B", "nemotron-3-super"), ("MiniMax-Text-01", "minimax-text-01"),
        ("Jamba 1.5 Large", "jamba-1.5-large"), ("Mixtral-8x22B-v0.1", "mixtral-8x22b"), ("GLM-4.5-Air", "glm-4.5-air"),
        ("gpt_oss_20b", "gpt-oss-20b"),
        ("GPT 8B", None), ("Mixtral", None), ("nano model", None), ("Llama-3-80B", None), ("", None),
    ],
)  # fmt: skip
def test_names_are_found_in_the_catalog(name, entry):
    assert catalog_entry(name) == entry


# Cards


@pytest.mark.parametrize(
    ("text", "card"),
    [
        ("H200 SXM", "h200"), ("NVIDIA H200 141GB HBM3e", "h200"), ("H100 SXM5 80GB", "h100-sxm"), ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100 PCIe 80GB", "h100-pcie"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("A100-SXM4-40GB", "a100-40gb"), ("a100_40gb", "a100-40gb"),
        ("A100 80GB PCIe", "a100-80gb-pcie"), ("A100 (80 GB; a second table says 40GB)", "a100-80gb"), ("GB200 NVL72", "gb200"),
        ("DGX-B200", "b200"),
        ("dgx_gb300", "gb300"), ("HGX B300", "b300"), ("MI300X", "mi300x"), ("AMD Instinct MI300X OAM", "mi300x"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("8x V100", "v100-sxm2-16gb"), ("GeForce RTX 4090", "rtx-4090"), ("L40S", "l40s"), ("H800", "h800"), ("TPU v5p", None), ("H20", None),
        ("abacus", None),
    ],
)  # fmt: skip
def test_cards_are_understood_however_they_are_written(text, card):
    assert accelerator_of(text) == card
    assert card is None or card in catalog.names("accelerators")


def test_a_row_gets_the_cluster_of_its_card_and_network():
    assert case(gpu_type="H200 SXM").cluster.accelerator.name == "h200"
    assert case(gpu_type="H200 SXM", interconnect="EFAv3").cluster.name.startswith("aws-p5e")
    assert case(gpu_type="Tesla V100-SXM2-32GB", dtype="fp16").cluster.accelerator.name == "v100-sxm2-32gb"
    assert case(gpu_type="A100 80GB PCIe").cluster.accelerator.name == "a100-80gb-pcie"
    assert case(gpu_type="H100", gpus_per_node="4").cluster.levels[0].size == 4
    assert case(gpu_type="GB200 NVL72", gpus_per_node="4").cluster.levels[0].size == 72
    assert "catalog" in case(gpu_type="TPU v5p").refused


def test_a_model_of_encoder_and_decoder_is_refused():
    assert "encoder and decoder" in case(model="t5:t5_220m_tp4").refused
    assert not case(model="Corvus t50 7B").refused


def test_stages_without_layers_are_refused_unless_nearly_all_have_some():
    """126 layers, embedding and head in 16 × 8 stages are nearly 16 × 7; 22 layers in 8 × 3 stages are not 8 × 2."""
    fields = {"schedule": "interleaved", "tp": "1", "dp": "", "gpus": "", "zero": "0"}
    near = case(**fields, pp="16", vpp="8", layers="126", model="Corvus", global_batch="64")
    assert near.plan.virtual == 7
    assert any("each with a layer" in text for text in near.assumed)
    assert "without layers" in case(**fields, pp="8", vpp="3", layers="22", model="Corvus").refused


def test_zero_3_of_deepspeed_in_2021_gathers_parameter_by_parameter():
    fields = {"stack": "megatron-lm", "tp": "1", "pp": "1", "dp": "64", "sp": "0"}
    old, own = (apply_readings(case(**fields, zero=zero, zero_fsdp=f"ZeRO-{zero} (DeepSpeed)")).stack for zero in "31")
    assert (old.name, old.gathers, old.attention) == ("deepspeed-2021", "parameter", "flash")
    assert own.name == "megatron-lm"


# The loss, and memory that cannot be compared


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({}, True),
        ({"notes": "mini compile-block autocast"}, False),
        ({"source": "NVIDIA/Megatron-LM functional-test golden values"}, False),
    ],
)
def test_a_source_that_does_not_fuse_its_loss_is_read_so(changes, fused):
    found = apply_readings(case(stack="megatron-core", **changes))
    assert ("loss" in found.stack.fused) is fused
    assert found.stack.name == "megatron-core"


@pytest.mark.parametrize(("table", "kernel"), [("A100 80GB", "triton"), ("H100 80GB BF16 (Large Scale)", "flash")])
def test_runs_of_llm_foundry_used_triton_but_for_its_large_sweep(table, kernel):
    notes = "attn_impl: large sweep used flash; other rows harness default was triton flash-attention at the time"
    fields = {"stack": "composer-fsdp", "flash_attn": "1", "table": table}
    assert apply_readings(case(**fields, notes=notes)).stack.attention == kernel
    assert apply_readings(case(**fields)).stack.attention == "flash"


@pytest.mark.parametrize(
    ("table", "file", "mode", "reduced"),
    [
        ("A100 80GB", "llm_foundry", "DEFAULT", "bf16"),
        ("H100 80GB BF16 (Large Scale)", "llm_foundry", "DEFAULT", "fp32"),
        ("A100 80GB", "of a user", "DEFAULT", "fp32"),
        ("A100 80GB", "of a user", "PURE", "bf16"),
    ],
)
def test_composer_reduced_gradients_in_16_bits_until_october_2023(table, file, mode, reduced):
    """mosaicml/composer#2628; llm-foundry's tables but the last are of August 2023 (its pull request 543)."""
    found = apply_readings(case(stack="composer-fsdp", table=table, file=file, zero_fsdp=f"mixed_precision={mode}"))
    assert found.plan.reduce_dtype == reduced
    assert found.plan.grad_dtype == ("bf16" if mode == "PURE" else "fp32")


def test_memory_is_not_compared_if_zero_shards_over_an_unknown_number_of_gpus():
    row = {**BASE, "memory_gib": "30", "layers": "4", "model": "small", "ffn_hidden": "", "dp": ""}
    known, unknown, whole = predict_rows([row, {**row, "gpus": ""}, {**row, "gpus": "", "zero": "0"}])
    assert known.memory_error is not None
    assert unknown.memory_error is None
    assert whole.memory_error is not None


# Cells that cannot be read, and values that the catalog does not have


@pytest.mark.parametrize("column", ["gpus", "step_time_s", "memory_gib", "micro_batch"])
def test_a_negative_number_is_refused(column):
    assert case(**{column: "-8"}).refused == f"{column} = -8 is negative"


def test_a_cell_without_a_number_counts_as_blank_and_is_listed():
    found = case(gpus="sixty-four")
    assert "gpus: not published ('sixty-four' is not a number)" in found.assumed
    assert found.cluster.world == 64


def test_unknown_words_are_listed_with_what_is_assumed():
    assert "stack: default ('corvus-trainer' is not in the catalog)" in case(stack="corvus-trainer").assumed
    assert "precision: bf16 ('int3' is not known)" in case(dtype="int3").assumed
    assert "precision: bf16" in case(dtype="").assumed
    assert "schedule: 1f1b ('chimera' is not known)" in case(schedule="chimera").assumed
    assert not [a for a in case(schedule="", pp="1", dp="32").assumed if a.startswith("schedule")]


def test_a_stack_that_is_read_from_the_text_replaces_the_assumed_one():
    fields = {"zero": "3", "zero_fsdp": "FSDP full shard", "tp": "1", "pp": "1", "dp": "64", "sp": "0"}
    found = apply_readings(case(**fields))
    assert found.stack.name == "fsdp"
    assert "stack: fsdp" in found.assumed
    assert not [a for a in found.assumed if "default" in a]
    two_ways = apply_readings(
        case(**fields | {"pp": "2", "dp": "32", "notes": "DualPipe", "zero": "1", "schedule": "", "flash_attn": ""})
    )
    assert {"stack: hai-llm", "schedule: dualpipev", f"attention: {two_ways.stack.attention}"} <= set(two_ways.assumed)


def test_a_published_power_limit_lowers_the_clock():
    """The cube root of the power, and the boards of Grand Teton: 96 GB of HBM2e."""
    limited, full = case(gpu_type="H100 SXM 96GB (500 W limit)"), case(gpu_type="H100 80GB SXM (700W TDP, HBM3)")
    assert limited.cluster.accelerator.memory_bandwidth == 2.4e12
    assert limited.cluster.accelerator.clock == pytest.approx((5 / 7) ** (1 / 3))
    assert limited.cluster.levels == full.cluster.levels
    assert full.cluster.accelerator.clock == 1
    assert case(gpu_type="A100-80GB SXM4 400W").cluster.accelerator.clock == 1


@pytest.mark.parametrize(
    ("text", "stack"),
    [
        ("megatron-core", "megatron-core"), ("NeMo Automodel", "automodel"), ("TorchTitan (FSDP2)", "torchtitan"), ("FMS", "fms-fsdp"),
        ("JAX (MaxText)", "maxtext"), ("AXLearn (JAX)", "axlearn"), ("Levanter", "levanter"), ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("InternEvo", "internevo"), ("", None), ("own code", None),
        ("PyTorch FSDP2", "fsdp"), ("DeepSpeed ZeRO-3", "deepspeed"), ("Hugging Face Transformers (FSDP)", "huggingface"), ("Megatron-FSDP", None),
    ],
)  # fmt: skip
def test_frameworks_are_understood_however_they_are_written(text, stack):
    assert stack_of(text) == stack
    assert stack is None or stack in catalog.names("stacks")


def test_selective_checkpointing_of_fms_recomputes_a_share_of_the_layers():
    """A whole recompute adds a third to the FLOPs of the model: 0.51 against 0.45 is 40% of that."""
    run = {"stack": "fms-fsdp", "zero": "3", "recompute_mode": "selective", "layers": "40", "pp": "1", "dp": ""}
    plan = apply_readings(case(**run, mfu_pct="45", hfu_pct="51")).plan
    assert (plan.recompute, plan.recompute_layers) == ("full", 16)
    assert apply_readings(case(**run)).plan.recompute_layers == 40


# What a row does not state of its framework


@pytest.mark.parametrize(
    ("stack", "zero"), [("maxtext", 3), ("torchtitan", 3), ("fms-fsdp", 3), ("megatron-core", 1), ("deepspeed", 1)]
)
def test_an_unpublished_zero_stage_is_the_usual_one_of_the_framework(stack, zero):
    found = case(zero="", stack=stack, pp="1", dp="32")
    assert found.plan.zero == zero
    assert any(text.startswith(f"ZeRO: {zero}, usual in") for text in found.assumed)


ONE_MICRO_BATCH = {"pp": "1", "dp": "32", "global_batch": "32"}


@pytest.mark.parametrize(
    ("changes", "gradients"),
    [(ONE_MICRO_BATCH, "bf16"), (ONE_MICRO_BATCH | {"global_batch": "64"}, "fp32"), ({"pp": "2", "dp": "16"}, "fp32")],
)
def test_automodel_has_one_copy_of_weights_and_moments_in_16_bits(changes, gradients):
    """Micro-batches are added up in the dtype of the reduction."""
    plan = case(stack="NeMo Automodel", zero="3", **changes).plan
    assert (plan.master, plan.state_dtype, plan.grad_dtype) == (False, "bf16", gradients)
    assert case(stack="torchtitan", zero="3", **changes).plan.master
    kept = {stack: states(stack) for stack in ("automodel", "torchtitan", "maxtext")}
    weights = {stack: parts["parameters"] + parts["optimizer"] for stack, parts in kept.items()}
    assert weights["automodel"] == pytest.approx(weights["torchtitan"] / 2, rel=1e-3)  # 2 + 4 bytes and 4 + 8
    assert weights["maxtext"] == pytest.approx(weights["torchtitan"], rel=1e-3)


def states(stack, **changes):
    """GiB of weights, gradients and moments on a rank of a run without a pipeline."""
    (found,) = predict_rows([{**BASE, **ONE_MICRO_BATCH, "stack": stack, "zero": "3", **changes}])
    (parts,) = found.prediction.memory_by_stage
    return parts


def test_gradients_of_micro_batches_are_whole_until_automodel_reduces_them():
    """In fp32, on every rank: 4 bytes of half the parameters (tp 2), of which torchtitan keeps a 32nd and reduces it each time."""
    many = {"global_batch": "64", "params": "6.74e9"}
    assert case(stack="automodel", zero="3", **ONE_MICRO_BATCH | many).plan.reduce == "step"
    assert case(stack="torchtitan", zero="3", **ONE_MICRO_BATCH | many).plan.reduce == "auto"
    whole = 4 * 6.74e9 / 2 / 2**30
    assert states("automodel", **many)["gradients"] == pytest.approx(whole, rel=0.01)
    assert states("torchtitan", **many)["gradients"] == pytest.approx(whole / 32, rel=0.01)


def test_automodel_keeps_weights_of_models_with_expert_parallelism_gathered():
    dense, experts = case(stack="automodel", zero="3", **ONE_MICRO_BATCH), case(**EXPERTS, stack="automodel")
    assert dense.plan.reshard
    assert not experts.plan.reshard
    assert case(**EXPERTS, stack="torchtitan").plan.reshard


@pytest.mark.parametrize(
    ("stack", "gradients", "reduced"),
    [
        ("maxtext", "fp32", "bf16"),
        ("AXLearn", "bf16", "bf16"),
        ("fms-fsdp", "fp32", "bf16"),
        ("torchtitan", "fp32", "fp32"),
    ],
)
def test_gradients_are_reduced_in_the_dtype_of_the_framework(stack, gradients, reduced):
    plan = case(stack=stack, zero="3", **ONE_MICRO_BATCH).plan
    assert (plan.grad_dtype, plan.reduce_dtype) == (gradients, reduced)


@pytest.mark.parametrize(("dtype", "gradients", "reduced"), [("bf16", "fp32", "bf16"), ("fp16", "fp16", "fp16")])
def test_each_optimizer_of_megatron_deepspeed_reduces_in_its_dtype(dtype, gradients, reduced):
    found = case(stack="megatron-deepspeed", dtype=dtype, zero="1")
    assert (found.plan.grad_dtype, found.plan.reduce_dtype) == (gradients, reduced)
    asked = configure(found.model, found.cluster, stack=found.stack, workload=found.workload)
    assert (base_plan(asked).grad_dtype, base_plan(asked).reduce_dtype) == (gradients, reduced)


@pytest.mark.parametrize(
    ("notes", "overlaps"), [("", False), ("AsyncTP", True), ("asynchronous tensor parallel", True)]
)
def test_torchtitan_overlaps_tensor_parallelism_where_a_run_says_so(notes, overlaps):
    plan = case(stack="torchtitan", zero="3", **ONE_MICRO_BATCH, notes=notes).plan
    assert ("tp" in plan.overlap) == overlaps
    assert "dp" in plan.overlap
    assert "tp" in case(stack="megatron-core", zero="1").stack.overlap


@pytest.mark.parametrize(("stack", "recompute"), [("Levanter", "full"), ("fms-fsdp", "none"), ("torchtitan", None)])
def test_an_unpublished_recompute_is_the_usual_one_of_the_framework(stack, recompute):
    """Where there is none, the least that fits: here none."""
    (found,) = predict_rows([{**BASE, **ONE_MICRO_BATCH, "stack": stack, "zero": "3", "recompute_mode": ""}])
    assert found.plan.recompute == (recompute or "none")
    (text,) = (text for text in found.case.assumed if text.startswith("recompute:"))
    assert ("usual in" in text) == (recompute is not None)


EXPERTS = {
    "model": "Corvus 30B", "layers": "48", "hidden": "2048", "ffn_hidden": "768", "heads": "32", "kv_heads": "4", "vocab": "151936",
    "experts": "128", "topk": "8", "ep": "64", "tp": "1", "pp": "1", "dp": "64", "zero": "", "schedule": "none",
}  # fmt: skip


def test_benchmarks_of_automodel_route_each_token_to_consecutive_experts():
    """Its gate gives token i the experts 8·i to 8·i + 7 modulo 128: on 8 nodes of 16 experts each token reaches one node. Learned routing would
    reach 8·(1 − (7/8)⁸) = 5.25 of them."""
    tokens = np.arange(10_000)[:, None]
    nodes = (8 * tokens + np.arange(8)) % 128 // 16
    reached = np.mean([len(set(row)) for row in nodes.tolist()])

    def time_of_messages():
        """Seconds of twice the tokens without those of the tokens: no latency."""
        sizes = [{"micro_batch": str(n), "global_batch": str(64 * n)} for n in (4, 8)]
        once, twice = predict_rows([{**BASE, **EXPERTS, "stack": "automodel", **size} for size in sizes])
        return twice.prediction.exposed_s["ep"] - once.prediction.exposed_s["ep"]

    found = case(**EXPERTS, stack="automodel")
    assert (found.model.router.groups, found.model.router.groups_kept) == (16, 1)
    assert any(text.startswith("routing:") for text in found.assumed)
    assert case(**EXPERTS, stack="torchtitan").model.router.groups == 1
    learned = catalog.load("stacks", "automodel").but(usual_routing="learned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_stack_with", lambda name, kernel: learned)
        spread = time_of_messages()
    assert spread / time_of_messages() == pytest.approx(8 * (1 - (7 / 8) ** 8) / reached, rel=0.1)


def test_hybrid_sharding_keeps_a_copy_of_the_weights_in_each_node():
    changes = {"tp": "1", "pp": "1", "dp": "64", "zero": "3", "schedule": "none", "stack": "fms-fsdp"}
    hybrid = case(**changes, zero_fsdp="HSDP").plan
    assert (hybrid.replicate, hybrid.shard) == (8, 8)
    whole = case(**changes, zero_fsdp="FSDP").plan
    assert (whole.replicate, whole.shard) == (1, 64)
    usual = case(**changes)  # fms-fsdp's own default
    assert (usual.plan.replicate, usual.plan.shard) == (8, 8)
    assert "sharding: over 8 ranks of a node, usual in fms-fsdp" in usual.assumed
    assert case(**changes | {"stack": "torchtitan"}).plan.shard == 64
    stated = case(**changes, zero_fsdp="data=-1, fsdp=16").plan
    assert (stated.replicate, stated.shard) == (4, 16)


def test_settings_of_a_recipe_are_read_from_its_row():
    """Recomputed layers, modules that predict further tokens, the layers of each stage and fused experts."""
    given = {
        "model": "DeepSeek-V3", "gpu_type": "GB300", "gpus": "256", "tp": "1", "pp": "2", "vpp": "8", "schedule": "interleaved", "ep": "32",
        "dp": "", "layers": "", "hidden": "", "ffn_hidden": "", "heads": "", "kv_heads": "", "vocab": "", "stack": "megatron-core",
    }  # fmt: skip
    read = case(
        **given, recompute_mode="none", recompute_layers="0", mtp="1", stages="4*15 1", graphs="step", fused="experts"
    )
    assert not read.refused, read.refused
    assert read.plan.layers_per_stage == (4,) * 15 + (1,)
    assert (read.plan.recompute, read.model.mtp_layers) == ("none", 1)
    assert {"experts", "norm"} <= set(read.stack.fused)
    some = case(recompute_mode="full", recompute_layers="5")
    assert (some.plan.recompute, some.plan.recompute_layers) == ("full", 5)
    assert case(recompute_mode="full").plan.recompute_layers == 0
    away = case(offload_layers="20").plan
    assert (away.offload, away.offload_layers, case().plan.offload) == ("activations", 20, "none")


@pytest.mark.parametrize(
    ("card", "words", "precision"),
    [
        ("GB200", "FP8-MX", "mxfp8"),
        ("B200", "FP8 finer granularity (32x32 MX on GB200/B200; 128x128/1x128 blockwise on H100)", "mxfp8"),
        ("H100", "FP8 finer granularity (32x32 MX on GB200/B200; 128x128/1x128 blockwise on H100)", "fp8"),
        ("GB200", "FP8-CS", "fp8"),
    ],
)
def test_block_scaled_fp8_of_blackwell_is_read_from_the_words_of_a_table(card, words, precision):
    assert case(gpu_type=card, dtype="fp8", precision=words).workload.precision == precision
