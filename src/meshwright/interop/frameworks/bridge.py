"""Megatron-Bridge: fields of a Python config by dotted path (`model.tensor_model_parallel_size`), also as overrides on its command line.

Its performance recipes name some of the same fields without their section; NeMo's table of performance settings shortens them further. All
run on Megatron-Core, whose rules apply.
"""

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.interop.adapters import fused_words
from meshwright.interop.frameworks.megatron import (
    derive_offload,
    derive_recompute,
    derive_saves,
    derive_schedule,
    derive_sharding,
    restate_offload,
    restate_recompute,
    restate_schedule,
    restate_sharding,
)
from meshwright.interop.keys import Facts, Settings
from meshwright.interop.tables import framework


def _derive(facts: Facts) -> None:
    if facts.get("fsdp") and facts.get("sharding") in (None, "none"):
        facts["sharding"] = "parameters"  # using FSDP sets its strategy
    if facts.pop("zero_of_optimizer", False):  # either of the two keys turns both on
        facts["zero"] = 1
    derive_sharding(facts)
    derive_saves(facts)
    if facts.get("scripted"):  # the scripts of measured runs set these
        facts["overlap_tp"] = facts["sp"] = facts.get("tp", 1) > 1
        facts["grad_dtype"] = "bf16"
    derive_recompute(facts)
    derive_offload(facts)
    derive_schedule(facts)
    if "eight" in facts:
        facts["half"] = "bf16"
    if facts.get("eight") == "none":
        facts.pop("eight")
    # A script that names layers or modules turns recompute on.
    if facts.get("recompute") == "none" and facts.get("scripted"):
        facts["recompute"] = (
            "full" if facts.get("recompute_layers") else "selective" if facts.get("recompute_modules") else "none"
        )
    facts["stated_sp"] = facts.get("sp")
    if facts.get("tp", 1) == 1:
        facts["sp"] = False
    if facts.get("adapter_kind") in (None, "none") and not facts.get("adapters"):
        facts.pop("adapters", None)
    else:  # the defaults of its LoRA
        facts.setdefault("adapters", 32)
        facts.setdefault("adapter_alpha", 32)
        facts.setdefault("adapter_targets", list(LORA_WORDS.values()))


# What Megatron joins into one matrix, by our words for its parts.
LORA_WORDS = {
    ("q_proj", "k_proj", "v_proj"): "linear_qkv",
    ("o_proj",): "linear_proj",
    ("gate_proj", "up_proj"): "linear_fc1",
    ("down_proj",): "linear_fc2",
}


def _restate(facts: Facts) -> None:
    if facts.get("adapter_kind"):
        facts["adapter_kind"] = "lora" if not facts.get("quantised") else None
        words = list(LORA_WORDS.values())
        facts["adapter_targets"] = (
            words if facts.get("adapter_all") else fused_words(facts.get("adapter_targets"), LORA_WORDS)
        )
    facts["async_linears"] = None
    restate_sharding(facts)
    restate_recompute(facts)
    restate_offload(facts)
    restate_schedule(facts)
    facts["eight"] = facts.get("eight") or "none"
    facts["zero_of_optimizer"] = bool(facts.get("zero"))


M = "model."

# Its recipe of the models of the catalog that it has: `llama3_8b_pretrain_config` brings the model.
RECIPES = {
    "llama2-7b": "llama2_7b", "llama3-8b": "llama3_8b", "llama3-70b": "llama3_70b", "llama3.1-8b": "llama31_8b", "llama3.1-70b": "llama31_70b",
    "llama3.1-405b": "llama31_405b", "llama3.2-1b": "llama32_1b", "llama3.2-3b": "llama32_3b", "qwen2.5-0.5b": "qwen25_500m",
    "qwen2.5-1.5b": "qwen25_1p5b", "qwen2.5-7b": "qwen25_7b", "qwen2.5-14b": "qwen25_14b", "qwen2.5-32b": "qwen25_32b", "qwen2.5-72b": "qwen25_72b",
    "qwen3-0.6b": "qwen3_600m", "qwen3-1.7b": "qwen3_1p7b", "qwen3-4b": "qwen3_4b", "qwen3-8b": "qwen3_8b", "qwen3-14b": "qwen3_14b",
    "qwen3-32b": "qwen3_32b", "qwen3-30b-a3b": "qwen3_30b_a3b", "qwen3-235b-a22b": "qwen3_235b_a22b", "gemma2-2b": "gemma2_2b",
    "gemma2-9b": "gemma2_9b", "gemma2-27b": "gemma2_27b", "gemma3-1b": "gemma3_1b", "gpt-oss-20b": "gpt_oss_20b", "gpt-oss-120b": "gpt_oss_120b",
    "deepseek-v2-lite": "deepseek_v2_lite", "deepseek-v2": "deepseek_v2",
}  # fmt: skip
# Settings of plans in its recipes.
OF_RECIPES = (
    "comm_overlap", M + "virtual_pipeline_model_parallel_size", M + "pipeline_model_parallel_layout", M + "recompute_granularity",
    M + "recompute_method", M + "recompute_num_layers", M + "recompute_modules", M + "cp_comm_type", M + "num_layers_in_first_pipeline_stage",
    M + "num_layers_in_last_pipeline_stage",
)  # fmt: skip
SWITCHES_OF_RECIPES = (
    M + "sequence_parallel", M + "tp_comm_overlap", M + "account_for_embedding_in_pipeline_split", M + "account_for_loss_in_pipeline_split",
)  # fmt: skip


def _model_settings(model: Model) -> Settings:
    """What a recipe may set of another plan, set back: the settings of the plan are laid over it. Raises if there is no recipe."""
    if model.name not in RECIPES:
        raise MeshwrightError(
            "MW-LAUNCH-005",
            f"Megatron-Bridge has no recipe that we know for {model.name}",
            why="Its settings change one of its recipes, which brings the model",
            valid=RECIPES,
            fix="--for megatron-lm",
        )
    return dict.fromkeys(OF_RECIPES) | dict.fromkeys(SWITCHES_OF_RECIPES, False)


BRIDGE = framework(
    "megatron-bridge",
    not_modelled=(
        r"^env_vars\.", r"^tokenizer\.", r"pad_cu_seqlens|pad_seq_to_mult|tokenizer_model|enable_offline_packing|offline_packing_specs$",
        r"(router|dropout|layer_scale|rope|position_embedding|normalization|window_size|make_vocab|share_embeddings|gated_linear|activation_func$|mamba)",
        r"pipeline_dtype|params_dtype|main_(grads|params)_dtype|exp_avg_sq_dtype|grad_comm_dtype|use_precision_aware", r"^optimizer\.(bf16|fp16)$",
        r"^peft\.|^lora|^model$|^system$|^model\.(init|fp8_|tp_only|use_mamba|mtp_|quant_recipe|use_fused_mhc|dsa|apply_)|^domain", r"empty_unused",
        r"^mixed_precision\.", r"^(use_sharp|use_user_buffer)", r"^max_steps|^num_nodes$",
        r"^comm_overlap", r"overlap|cuda_graph|attention_backend|grouped_gemm|deallocate|batch_p2p|offload|paged_stash|hybridep|double_buffer|moe_a2a",
        # Other keys of sections whose keys that matter are in the table.
        r"^(ddp|dist|optimizer|mixed_precision|comm_overlap|train|dataset|profiling|rng|logger|checkpoint|scheduler|peft|inference|straggler|ft)\.",
        r"^model\.(?!.*(parallel_size|pipeline|recompute_|seq_length|num_layers|hidden_size|num_moe_experts|num_attention_heads|num_query_groups))",
        r"nccl_ub|num_buckets|communication_unit|outer_dp|manual_registration|fsdp_|megatron_fsdp|transpose_cache|reuse_grad|moe_|cp_partition|cutedsl",
    ),
    derive=_derive,
    restate=_restate,
    model_settings=_model_settings,
)  # fmt: skip
