"""axolotl and accelerate: YAML files with the same keys of FSDP."""

from meshwright.interop.frameworks.deepspeed import BLOCK_OTHERS, derive_block
from meshwright.interop.keys import Facts
from meshwright.interop.tables import framework

# --- axolotl: flat YAML; data parallelism is DDP, FSDP (`fsdp_config`) or DeepSpeed (a file that `deepspeed` names, or a separate JSON file).


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


AXOLOTL = framework(
    "axolotl",
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

# --- accelerate: the YAML of `accelerate config`: FSDP, DeepSpeed or DDP by `distributed_type`, and a ParallelismConfig. The batch is the script's.


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


ACCELERATE = framework(
    "accelerate",
    not_modelled=(
        r"^fsdp_config", r"^deepspeed_config", r"^fp8_config", r"^megatron_lm_config$", r"num_machines|machine_rank|downcast|same_network|use_cpu|debug|rdzv|main_",
        r"compute_environment|tpu|enable_cpu_affinity|^parallelism_config$|dynamo",
    ),
    derive=_derive_accelerate,
    restate=_restate_accelerate,
)  # fmt: skip
