"""axolotl and accelerate: YAML files with the same keys of FSDP."""

from meshwright.interop.frameworks.deepspeed import BLOCK, BLOCK_OTHERS, FILE, derive_block
from meshwright.interop.keys import OPTIMIZERS, SWITCH, Facts, Framework, Key, Table, rows

# --- axolotl: flat YAML; data parallelism is DDP, FSDP (`fsdp_config`) or DeepSpeed (a file that `deepspeed` names, or a separate JSON file).

F = "fsdp_config."
STRATEGIES = {
    "FULL_SHARD": "parameters",
    "SHARD_GRAD_OP": "gradients",
    "NO_SHARD": "none",
    "HYBRID_SHARD": "parameters",
    "_HYBRID_SHARD_ZERO2": "gradients",
}
# Gathers of the first version of FSDP in backward: BACKWARD_POST starts them after the gradients of a unit, with nothing to hide behind.
PREFETCH = {"BACKWARD_PRE": True, "BACKWARD_POST": "forward", "NO_PREFETCH": "forward", None: "forward"}
LOADING = {True: None, False: "every-rank"}  # whether rank 0 alone reads the weights that training starts from
STATE_DICTS = {"SHARDED_STATE_DICT": "copied", "FULL_STATE_DICT": "rank-0", "LOCAL_STATE_DICT": "copied"}


def derive_fsdp(facts: Facts) -> None:
    """FSDP is ZeRO-3. Sizes that are all 1 describe no mesh: FSDP then shards over all GPUs."""
    if all(facts.get(name, 1) == 1 for name in ("shard", "replicate", "tp", "cp")):
        facts.pop("shard", None)
        facts["fsdp"] = facts.get("fsdp")
    if facts.get("sharding") is None and (
        facts.get("fsdp") or facts.get("reshard") is not None or facts.get("shard", -1) > 0
    ):
        facts["sharding"] = "parameters"
    facts.setdefault("sharding", "none")
    if facts.get("offload_parameters"):
        facts["offload_states"] = True
    if facts["sharding"] == "none":
        return
    first = facts.get("fsdp") != 2
    if not first:
        facts.pop("prefetch", None)  # FSDP2 always gathers ahead
    else:
        facts.setdefault("prefetch", "forward")  # accelerate's default is NO_PREFETCH in backward
    facts.setdefault("saves", "rank-0" if first else "copied")
    if facts["saves"] == "rank-0":
        facts.setdefault("loads", "every-rank" if first else "rank-0")


EXPERTS = "axolotl.integrations.expert_parallel.ExpertParallelPlugin"


def _restate_axolotl(facts: Facts) -> None:
    """Context parallelism needs flash attention; expert parallelism is a plug-in, whose ranks multiply with those that shard."""
    facts["ring_attention"] = True if facts.get("cp", 1) > 1 else None
    if (facts.get("ep") or 1) > 1 and (facts.get("shard") or -1) > 0:
        facts["shard"] = max(1, facts["shard"] // facts["ep"])
        facts["expert_plugin"] = True
    restate_fsdp(facts)


def restate_fsdp(facts: Facts) -> None:
    zero = facts.pop("sharding", "none")
    facts["fsdp"] = 2 if zero != "none" else None
    facts["prefetch"] = None
    if zero == "none":
        facts["saves"] = None
    facts["reshard"] = None if zero == "none" else facts.get("reshard")
    if zero == "none":
        facts["shard"] = None
    facts["offload_parameters"] = bool(facts.get("offload_states"))
    facts["zero"] = None


def _derive_axolotl(facts: Facts) -> None:
    # Ranks are expert_parallel_size × dp_shard_size × …
    if (facts.get("ep") or 1) > 1 and (facts.get("shard") or -1) > 0:
        facts["shard"] *= facts["ep"]
    facts.setdefault("cp_kind", "all-gather")  # of packed samples
    # By a file of DeepSpeed that comes with axolotl, in which these are on.
    if facts.get("sharding") and not facts.get("fsdp"):
        facts.setdefault("overlap_dp", True)
        facts.setdefault("prefetch", True)
        facts.setdefault("saves", "weights" if facts["sharding"] == "parameters" else "sharded")
    stage = facts.get("zero")
    if isinstance(stage, int):
        derive_block(facts)
    else:
        facts["unfilled"] = []
        facts.pop("half_alternative", None)
        derive_fsdp(facts)
    # Without FSDP or DeepSpeed, weights are loaded and trained in bf16.
    facts["pure_half"] = facts["sharding"] == "none" and facts.get("half", "bf16") == "bf16"
    facts["half"] = facts.get("half") if facts.get("half") in ("bf16", "fp16", "fp32") else "bf16"
    if not facts.get("adapters") and facts.get("adapter_kind") in ("lora", "qlora"):
        facts["adapters"] = 32
    if facts.get("adapter_kind") is None:
        facts.pop("adapters", None)
    elif facts.get("quantised") == 4:
        facts.setdefault("double_quantised", True)  # its default for QLoRA


AXOLOTL_TABLE = Table(
    known_as="axolotl",
    keys=(
        *rows((
            ("base_model", "model"),
            ("ring_attn_func", "cp_kind", {"varlen_llama3": "all-gather", "batch_ring": "ring"}),
        ), read_only=True),
        *rows((("base_model", "hub_model"), ("learning_rate", "learning_rate"))),
        *rows((
            ("tensor_parallel_size", "tp"),
            (("context_parallel_size", "sequence_parallel_degree"), "cp"),
            ("expert_parallel_size", "ep"),
        ), default=1),
        Key("dp_shard_size", "shard"),
        Key("dp_replicate_size", "replicate", default=1),
        *rows((
            (("fsdp_version", "fsdp_config.fsdp_version"), "fsdp", {1: 1, 2: 2}),
            ("fsdp", "fsdp", ((".", 1),)),
        )),
        Key(F + "reshard_after_forward", "reshard", words=SWITCH, was=(F + "fsdp_reshard_after_forward",), always=True),
        Key(F + "sharding_strategy", "sharding", words=STRATEGIES, was=(F + "fsdp_sharding_strategy",), read_only=True),
        Key(F + "offload_params", "offload_parameters", words=SWITCH, was=(F + "fsdp_offload_params",), default=False),
        Key(F + "backward_prefetch", "prefetch", words=PREFETCH, was=(F + "fsdp_backward_prefetch",), read_only=True),
        Key(F + "state_dict_type", "saves", words=STATE_DICTS, was=(F + "fsdp_state_dict_type",)),
        Key(F + "final_state_dict_type", "saves", words={"FULL_STATE_DICT": "rank-0"}, match=((".", None),), was=(F + "fsdp_final_state_dict_type",), read_only=True),
        Key(F + "cpu_ram_efficient_loading", "loads", words=LOADING, was=(F + "fsdp_cpu_ram_efficient_loading",), read_only=True),
        Key("gradient_checkpointing", "recompute", words={True: "full", False: "none", None: "none", "offload": "full", "unsloth": "full"}, default="none",
            always=True),
        *rows((
            (("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"), "recompute", {True: "full", False: None}),
            ("optimizer", "eight_bit_states", (("8bit", True), (".", None))),
            ("attn_implementation", "eager", {"eager": True}, ((".", None),)),
            ("plugins", "fused_loss", (("CutCrossEntropy", True), (".", None))),
        ), read_only=True),
        Key("micro_batch_size", "microbatch", always=True),
        Key("gradient_accumulation_steps", "accumulation", unset=("auto",), always=True),
        Key("sequence_len", "seq", always=True),
        Key("fp16", "half", words={True: "fp16", False: None}),
        Key("bf16", "half", words={True: "bf16", "auto": "bf16", False: "fp32", "full": "bf16"}, always=True),
        Key("fp8", "eight", words={True: "fp8", False: None}),
        Key("optimizer", "optimizer", words={"adamw_torch_fused": "adamw", "muon": "muon", "sgd": "sgd"}, match=(*OPTIMIZERS, (".", "adamw")), always=True),
        Key("attn_implementation", "ring_attention", words={"flash_attention_2": True}, match=((".", None),)),
        Key("plugins", "expert_plugin", words={(EXPERTS,): True}, match=((".", None),)),
        *(Key(name, "fused_loss", words={True: True, False: None}, read_only=True)
          for name in ("cut_cross_entropy", "chunked_cross_entropy", "liger_fused_linear_cross_entropy")),
        *(Key(name, fact, words={True: True, False: None}, read_only=True) for name, fact in (
            ("liger_rms_norm", "fused_norm"), ("liger_glu_activation", "fused_activation"), ("torch_compile", "fused_norm"),
            ("torch_compile", "fused_activation"))),
        *rows((
            ("adapter", "adapter_kind", {"lora": "lora", "qlora": "qlora", None: None}),
            ("lora_r", "adapters"), ("lora_alpha", "adapter_alpha"), ("lora_dropout", "adapter_dropout"),
            ("lora_target_modules", "adapter_targets"), ("lora_modules_to_save", "adapter_trains"),
        )),
        *(Key(name, fact, words={True: True, False: None}) for name, fact in (("lora_target_linear", "adapter_all"), ("peft_use_rslora", "adapter_root"))),
        *rows((
            ("load_in_4bit", "quantised", {True: 4, False: None}),
            ("load_in_8bit", "quantised", {True: 8, False: None}),
        )),
        Key("bnb_config_kwargs.bnb_4bit_use_double_quant", "double_quantised", words=SWITCH),
        *FILE,
        Key("ray_num_workers", "gpus", read_only=True),
        *(key.only_read() for key in BLOCK if key.fact not in ("accumulation", "offload_parameters")),
        Key("zero_optimization.offload_param.device", "offload_parameters", words={"cpu": True, "nvme": True, "none": False}, read_only=True),
    ),
    not_modelled=(
        *BLOCK_OTHERS, r"^fsdp_config\.", r"^(sample_packing|pad_to|pad_|tf32|use_ray|model_type|resize|qat|plugins|lora_|experts_impl|quantize_moe|use_reentrant)",
        r"gradient_checkpointing_kwargs|max_steps|num_epochs|^special_tokens|^datasets|^wandb|_proc|^eval|^save|^val|^learning|^lr_|^warmup|^weight|^dataset",
        r"expert_parallel_(num|token)", r"^flash_attention$|attn_implementation|^fp8_enable|^trust|^tokenizer|^cosine|^strict|^shuffle|^output_dir|^seed",
        r"^(lora|peft|relora|unfrozen|gptq|chat|reward|rl$|rl_|trl|kd_|vllm|group_by|multipack|accelerator_config|ddp_|hub|mlflow|comet|tokens|added|torch_|adam|optim_|"
        r"max_|min_|noisy|neftune|early|hf_|local_|remove|train_on|use_|debug|dataloader|embeddings|expert|moe|scattermoe|sonicmoe|quant)",
        r"liger|compile|tiled_mlp|activation_offloading|flex_attn|^xformers|^sdp|^flash",
    ),
    derive=_derive_axolotl,
    restate=_restate_axolotl,
)  # fmt: skip

AXOLOTL = Framework(
    name="axolotl",
    title="axolotl",
    stack="axolotl",
    defers_reduction=True,
    form="yaml",
    table=AXOLOTL_TABLE,
    tried=("0.19.0",),
    comment="axolotl settings: the keys that follow from the plan",
)

# --- accelerate: the YAML of `accelerate config`: FSDP, DeepSpeed or DDP by `distributed_type`, and a ParallelismConfig. The batch is the script's.

A, P, Z = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_", "deepspeed_config."


def _derive_accelerate(facts: Facts) -> None:
    if facts.get("sequence_ranks", 1) > 1:  # Ulysses, by DeepSpeed, whose groups take the GPUs that are left
        facts["cp"], facts["cp_kind"] = facts["sequence_ranks"], "ulysses"
        facts.pop("shard", None)
    kind = facts.pop("adapter_kind", None)
    stage = facts.pop("zero", None)
    if kind == "DEEPSPEED" or stage is not None:
        facts["by_deepspeed"] = True
        facts["sharding"] = ("none", "optimizer", "gradients", "parameters")[stage or 0]
        facts["overlap_dp"] = stage == 3  # DeepSpeed's default: accelerate's file has no such key
        facts["saves"] = "weights" if stage == 3 and facts.get("saves") == "weights" else "sharded"
    elif kind == "FSDP":
        facts["fsdp"] = facts.get("fsdp") or 1
        derive_fsdp(facts)
    else:
        facts["sharding"], facts["saves"], facts["loads"] = "none", "sharded", "every-rank"
    if facts.get("half") in ("fp8", "no"):
        facts["half"], facts["eight"] = ("bf16", "fp8") if facts["half"] == "fp8" else ("fp32", None)


def _restate_accelerate(facts: Facts) -> None:
    """FSDP wraps every layer: without a policy accelerate shards the model as one unit, and refuses to recompute. DDP has no mesh."""
    sharded = facts.get("sharding") != "none"
    facts["adapter_kind"] = "FSDP" if sharded else "MULTI_GPU" if facts.get("gpus", 1) > 1 else "NO"
    facts["wrap_policy"] = sharded
    if not sharded and facts.get("tp", 1) == facts.get("cp", 1) == 1:
        for name in ("replicate", "shard", "tp", "cp", "reshard"):
            facts.pop(name, None)
    facts["half"] = "fp8" if facts.get("eight") == "fp8" else "no" if facts.get("half") == "fp32" else facts.get("half")
    restate_fsdp(facts)


ACCELERATE_TABLE = Table(
    known_as="accelerate",
    keys=(
        Key("distributed_type", "adapter_kind", words={name: name for name in ("FSDP", "DEEPSPEED", "MULTI_GPU", "NO", "MULTI_CPU", "MEGATRON_LM", "XLA")},
            always=True),
        Key("num_processes", "gpus", always=True),
        Key(P + "dp_replicate_size", "replicate", was=("parallelism_config_dp_replicate_size",), default=1, always=True),
        Key(P + "dp_shard_size", "shard", was=("parallelism_config_dp_shard_size",), always=True),
        *rows((
            (("parallelism_config.parallelism_config_tp_size", "parallelism_config_tp_size"), "tp"),
            (("parallelism_config.parallelism_config_cp_size", "parallelism_config_cp_size"), "cp"),
        ), default=1, always=True),
        Key(P + "sp_size", "sequence_ranks", was=("parallelism_config_sp_size",), read_only=True),
        Key(P + "cp_comm_strategy", "cp_kind", words={"allgather": "all-gather", "alltoall": "ring"}, default="all-gather"),
        Key(A + "version", "fsdp", words={1: 1, 2: 2}),
        Key(A + "auto_wrap_policy", "wrap_policy", words={"TRANSFORMER_BASED_WRAP": True}, match=((".", False),), default=False),
        Key(A + "reshard_after_forward", "reshard", words=SWITCH, always=True),
        Key(A + "sharding_strategy", "sharding", words=STRATEGIES, match=(("1", "parameters"), ("2", "gradients"), ("3", "none")), read_only=True),
        Key(A + "offload_params", "offload_parameters", words=SWITCH, default=False),
        Key(A + "activation_checkpointing", "recompute", words={True: "full", False: "none"}, default="none"),
        Key(A + "backward_prefetch", "prefetch", words=PREFETCH, read_only=True),
        Key(A + "state_dict_type", "saves", words=STATE_DICTS),
        Key(A + "cpu_ram_efficient_loading", "loads", words=LOADING, read_only=True),
        *rows((
            ("zero3_save_16bit_model", "saves", {True: "weights", False: None}),
            ("zero_stage", "zero", {0: 0, 1: 1, 2: 2, 3: 3}),
            ("offload_optimizer_device", "offload_states", {"cpu": True, "nvme": True, "none": False}),
            ("offload_param_device", "offload_parameters", {"cpu": True, "nvme": True, "none": None}),
        ), prefix=Z, read_only=True),
        Key(Z + "gradient_accumulation_steps", "accumulation", was=("gradient_accumulation_steps",), unset=("auto",), read_only=True),
        Key("mixed_precision", "half", words={"bf16": "bf16", "fp16": "fp16", "no": "no", "fp8": "fp8"}, default="no", always=True),
    ),
    not_modelled=(
        r"^fsdp_config", r"^deepspeed_config", r"^fp8_config", r"^megatron_lm_config$", r"num_machines|machine_rank|downcast|same_network|use_cpu|debug|rdzv|main_",
        r"compute_environment|tpu|enable_cpu_affinity|^parallelism_config$|dynamo",
    ),
    derive=_derive_accelerate,
    restate=_restate_accelerate,
)  # fmt: skip

ACCELERATE = Framework(
    name="accelerate",
    title="accelerate",
    stack="accelerate",
    defers_reduction=True,
    form="yaml",
    table=ACCELERATE_TABLE,
    tried=("1.15.0",),
    comment="accelerate settings: `accelerate launch --config_file FILE`",
    left_to_script=("workload.batch", "workload.seq", "workload.optimizer", "plan.microbatch"),
)
