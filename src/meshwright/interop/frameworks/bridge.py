"""Megatron-Bridge: fields of a Python config by dotted path (`model.tensor_model_parallel_size`), also as overrides on its command line.

Its performance recipes name some of the same fields without their section; NeMo's table of performance settings shortens them further. All
run on Megatron-Core, whose rules apply.
"""

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.interop.adapters import fused_words
from meshwright.interop.frameworks.megatron import (
    CP_KINDS,
    FORMATS,
    STRATEGIES,
    derive_recompute,
    derive_saves,
    derive_schedule,
    derive_sharding,
    restate_recompute,
    restate_schedule,
    restate_sharding,
)
from meshwright.interop.keys import OPTIMIZERS, PRECISIONS, SWITCH, Facts, Framework, Key, Settings, Table, flag, rows

DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.uint8": "fp8",
    "fp32": "fp32",
    "bf16": "bf16",
}
MIXED = {
    "bf16_mixed": "none", "bf16_with_fp8_current_scaling_mixed": "fp8", "bf16_with_fp8_delayed_scaling_mixed": "fp8", "bf16_with_mxfp8_mixed": "mxfp8",
    "bf16_with_fp8_subchannel_scaling_mixed": "fp8", "bf16_with_nvfp4_mixed": "fp4",
}  # fmt: skip


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
    restate_schedule(facts)
    facts["eight"] = facts.get("eight") or "none"
    facts["zero_of_optimizer"] = bool(facts.get("zero"))


M = "model."
TABLE = Table(
    known_as="megatron-bridge",
    keys=(
        *rows((
            ("num_layers", "model.layers"), ("hidden_size", "model.hidden"), ("ffn_hidden_size", "model.ffn"),
            ("num_attention_heads", "model.heads"), ("num_query_groups", "model.kv_heads"), ("kv_channels", "model.head_dim"),
            ("vocab_size", "model.vocab"), ("num_moe_experts", "model.experts"), ("moe_router_topk", "model.top_k"),
            ("moe_ffn_hidden_size", "model.expert_ffn"), ("moe_shared_expert_intermediate_size", "model.shared_ffn"),
            ("hf_model_id", "hub_model"),
        ), prefix=M),
        Key(M + "mtp_num_layers", "mtp", words={None: 0, **{n: n for n in range(9)}}, read_only=True),
        *rows((
            ("model.hybrid_layer_pattern", "pattern"), ("model.hf_model_id", "model"), ("size", "flavor"),
            (("model.num_layers_in_first_pipeline_stage", "num_layers_in_first_pipeline_stage"), "first_layers"),
            (("model.num_layers_in_last_pipeline_stage", "num_layers_in_last_pipeline_stage"), "last_layers"),
            ("model.microbatch_group_size_per_vp_stage", "microbatch_group"),
            ("dataset.offline_packing_specs.packed_sequence_size", "packed_seq"),
            (("model.recompute_modules", "recompute_modules"), "recompute_modules"),
        ), read_only=True),
        Key(M + "tensor_model_parallel_size", "tp", was=("tensor_model_parallel_size", "tp_size"), default=1, always=True),
        flag("sp", M + "sequence_parallel", was=("sequence_parallel",)),
        Key(M + "pipeline_model_parallel_size", "pp", was=("pipeline_model_parallel_size", "pp_size"), default=1, always=True),
        *rows((
            (("model.virtual_pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "vp_size"), "virtual"),
            (("model.pipeline_model_parallel_layout", "pp_layout", "pipeline_model_parallel_layout"), "layout"),
        )),
        *rows((
            ("account_for_embedding_in_pipeline_split", "counts_embedding"), ("account_for_loss_in_pipeline_split", "counts_loss"),
            ("fine_grained_activation_offloading", "offloads_modules"), ("cpu_offloading", "offload_activations"),
        ), prefix=M, words=SWITCH, default=False, read_only=True),
        Key(M + "context_parallel_size", "cp", was=("context_parallel_size", "cp_size"), default=1, always=True),
        Key(M + "cp_comm_type", "cp_kind", words=CP_KINDS, default="ring"),
        Key(M + "expert_model_parallel_size", "ep", was=("expert_model_parallel_size", "ep_size"), default=1, always=True),
        Key(M + "expert_tensor_parallel_size", "expert_tp", was=("expert_tensor_parallel_size", "etp_size")),
        Key("ddp.use_distributed_optimizer", "zero", words={True: 1, False: 0}, default=1),
        Key("optimizer.use_distributed_optimizer", "zero_of_optimizer", words=SWITCH),
        Key("ddp.use_megatron_fsdp", "fsdp", words=SWITCH, default=False,
            was=("dist.use_megatron_fsdp", "use_megatron_fsdp", "use_mcore_fsdp")),
        Key("ddp.data_parallel_sharding_strategy", "sharding", words=STRATEGIES),
        Key("ddp.outer_dp_sharding_strategy", "outer_optimizer", words={"optim": True, "no_shard": False}, default=False, read_only=True),
        Key("ddp.num_distributed_optimizer_instances", "replicate", default=1),
        *rows((
            (("train.micro_batch_size", "micro_batch_size", "mbs"), "microbatch"),
            (("train.global_batch_size", "global_batch_size", "gbs"), "batch"),
            (("model.seq_length", "seq_length", "seq_len", "dataset.seq_length"), "seq"),
            ("dataset.sequence_length", "seq"),
        ), always=True),
        Key(M + "recompute_granularity", "recompute", words={"selective": "selective", "full": "full", None: "none"}, was=("recompute_granularity",),
            default="none"),
        Key(M + "recompute_method", "recompute_method", was=("recompute_method",)),
        Key(M + "recompute_num_layers", "recompute_layers", was=("recompute_num_layers", "recompute_layers"), unset=(0,)),
        Key("mixed_precision", "eight", words=MIXED, match=(*PRECISIONS, (".", "none")), always=True),
        Key("compute_dtype", "eight", match=(*PRECISIONS, (".", "none")), was=("dtype",)),
        Key("ddp.grad_reduce_in_fp32", "grad_dtype", words={True: "fp32", False: "bf16"}, default="fp32"),
        *rows((
            # A name stands for an object, whose value overrides DDP's, and its own field both.
            ("mixed_precision", "grad_dtype", (("bf16", "fp32"), ("fp16", "bf16"), (".", None))),
            ("mixed_precision.grad_reduce_in_fp32", "grad_dtype", {True: "fp32", False: "bf16"}),  # overrides DDP's
            ("model.offload_modules", "offload_modules"),
        ), read_only=True),
        Key("optimizer.exp_avg_dtype", "state_dtype", words=DTYPES, default="fp32"),
        Key("optimizer.optimizer", "optimizer", match=OPTIMIZERS),
        *rows((
            ("lr", "learning_rate"),
            ("optimizer", "zero", (("^dist_", 1), (".", None))),
        ), prefix="optimizer."),
        *rows((
            ("optimizer_cpu_offload", "offload_states"), ("use_precision_aware_optimizer", "precision_aware"),
        ), prefix="optimizer.", words=SWITCH, default=False),
        Key("activation_offload_layers", "offload_layers", was=(M + "cpu_offloading_num_layers",), unset=(0,), read_only=True),
        *rows((
            # On in the recipes' common settings. A section `comm_overlap` turns on what it does not name, except tensor parallelism.
            ("ddp.overlap_grad_reduce", "overlap_dp"),
            (("ddp.overlap_param_gather", "optimizer.overlap_param_gather"), "overlap_gather"),
        ), words=SWITCH, default=True, always=True),
        *(Key("comm_overlap", fact, match=(("None|False", None), (".", True)), read_only=True) for fact in ("overlap_dp", "overlap_gather")),
        *rows((
            ("comm_overlap.overlap_grad_reduce", "overlap_dp", {True: True, False: False, None: None}),
            ("comm_overlap.overlap_param_gather", "overlap_gather", {True: True, False: False, None: None}),
            (("model.cuda_graph_impl", "cuda_graphs", "model.enable_cuda_graph"), "cuda_graphs", {"none": None, None: None, 0: None},
             (("full_iteration", "step"), (".", True))),
            (("model.cuda_graph_scope", "model.cuda_graph_modules", "cuda_graph_scope"), "graph_scope"),
            ("ddp.bucket_size", "bucket_elements"),
            ("model.cross_entropy_fusion_impl", "fused_loss", {"te": True, "native": False}),
            (("model.moe_flex_dispatcher_backend", "moe_flex_dispatcher_backend"), "dispatcher"),
            (("model.moe_token_dispatcher_type", "moe_token_dispatcher_type"), "dispatcher_type"),
            ("env_vars.NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "nvlink_domain"), ("num_gpus", "gpus"),
        ), read_only=True),
        *rows((
            # Written without a section `comm_overlap`: its keys cannot be set where a recipe has none.
            ("model.tp_comm_overlap", "overlap_tp"),
            (("model.overlap_moe_expert_parallel_comm", "model.moe_a2a_overlap"), "overlap_ep"),
        ), words=SWITCH, default=False),
        *rows((
            ("tp_comm_overlap", "overlap_tp"), ("overlap_moe_expert_parallel_comm", "overlap_ep"),
        ), prefix="comm_overlap.", words=SWITCH, default=False, read_only=True),
        Key(M + "batch_p2p_comm", "overlap_p2p", words={False: True, True: False}, always=True),
        flag("overlap_p2p", M + "overlap_p2p_comm", default=True, always=True),
        flag("overlap_p2p", "comm_overlap.overlap_p2p_comm", default=True, read_only=True),
        Key("checkpoint.ckpt_format", "fsdp_format", words={"fsdp_dtensor": True}, match=((".", False),), default=False),
        Key("checkpoint.ckpt_format", "saves", words=FORMATS, default="sharded"),
        *rows((
            ("checkpoint.async_save", "saves", {True: "copied", False: None}),
            (("peft", "task"), "adapter_kind", (("lora|dora|peft", "lora"), (".", None))),
            ("peft._target_", "adapter_kind", {"megatron.bridge.peft.lora.LoRA": "lora"}, ((".", "lora"),)),
            (("peft.dim", "lora_rank", "peft_dim"), "adapters"),
            ("peft.alpha", "adapter_alpha"), ("peft.dropout", "adapter_dropout"), ("peft.target_modules", "adapter_targets"),
            (("pipeline_model_parallel_size", "pp_size"), "scripted", ((".", True),)),
        )),
    ),
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
)  # fmt: skip

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


BRIDGE = Framework(
    name="megatron-bridge",
    title="Megatron-Bridge",
    usual_cluster="dgx-h100",
    stack="nemo-megatron",
    form="yaml",
    table=TABLE,
    names=("NeMo",),
    model_settings=_model_settings,
    tried=("0.3.1",),
    splits_evenly=True,
    vocab_of_tokenizer=True,
    layout_in_code=True,
    trains_mtp=True,
    expert_tp="one",
    # Since 0.6, whose recipes are in a folder for each GPU. Before, unset meant tensor parallelism, as in Megatron-Core.
    old_paths=r"bridge/recipes/(?!.*/(h100|h200|b200|b300|gb200|gb300)/)|scripts/performance/configs",
    # A library recipe has TP·PP·CP, or the experts' grid, in its name (93 of 101); `gpt3_175b_pretrain_32gpu_…` "is expected to run on 64 nodes".
    # https://docs.nvidia.com/nemo/megatron-bridge/nightly/apidocs/bridge/bridge.recipes.gpt.h100.gpt3_175b.html
    least_gpus=r"bridge/recipes/",
    comment="Megatron-Bridge settings; on its command line: model.tensor_model_parallel_size=8",
)
