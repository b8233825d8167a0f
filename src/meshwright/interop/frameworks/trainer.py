"""TRL and LLaMA-Factory: YAML files with the arguments of Transformers' Trainer.

They are written with FSDP2 in the file itself (`fsdp`, `fsdp_config`), so that any launcher of processes starts them. A file of accelerate or DeepSpeed may
say how weights are sharded, apart from these arguments: it is read where they name it.
"""

from meshwright.interop.frameworks.axolotl import restate_fsdp
from meshwright.interop.keys import Facts
from meshwright.interop.tables import framework

OTHERS = (r".",)  # of the keys that the framework has, those that are left set nothing that is modelled

# --- What is written for both: the batch, the precision, the optimizer, and FSDP2 as `TrainingArguments` takes it.


def _derive_fsdp(facts: Facts) -> None:
    if facts.get("fsdp") and not facts.get("sharding"):
        facts["sharding"] = "parameters"
    facts.setdefault("sharding", "none")
    if facts.get("fsdp") == 2:
        facts.pop("prefetch", None)  # it always gathers ahead
    if facts.get("fsdp") and facts.get("shard_recompute"):
        facts["recompute"] = facts["shard_recompute"]


def _restate(facts: Facts, everything: str) -> None:
    """Under FSDP its own activation checkpointing is written: Trainer's gathers the weights once more."""
    if facts.get("sharding") == "parameters" and facts.get("recompute") == "full":
        facts["recompute"], facts["shard_recompute"] = "none", "full"
    facts["adapter_kind"] = "lora" if facts.get("adapters") else "full"
    if facts.get("adapter_all"):
        facts["adapter_targets"] = [everything]
    if facts.get("quantised") != 4:
        facts["double_quantised"] = None
    restate_fsdp(facts)


# --- TRL: the YAML of `trl sft --config FILE`, with SFTConfig and ModelConfig.


def _derive_trl(facts: Facts) -> None:
    _derive_fsdp(facts)
    if facts.get("half", "fp32") == "fp32":  # without automatic mixed precision the dtype of the weights decides
        facts["half"] = facts.get("param_dtype") or facts.get("half") or "bf16"
    if (facts.get("sequence_ranks") or 1) > 1:
        facts["cp"], facts["cp_kind"] = facts["sequence_ranks"], "ulysses"
    if facts.get("adapter_kind") != "lora":
        facts.pop("adapters", None)
        # FSDP2 keeps fp32 shards; DDP trains the weights in the dtype that they are loaded in.
        facts["pure_half"] = facts["sharding"] == "none" and facts.get("param_dtype") in ("bf16", "fp16")
    else:
        facts["adapters"] = facts.get("adapters") or 16  # the framework's defaults
        facts.setdefault("adapter_alpha", 32)
        facts.setdefault("adapter_dropout", 0.05)


def _restate_trl(facts: Facts) -> None:
    half = facts.get("half")
    facts["param_dtype"] = half if facts.get("adapters") else "fp32"  # of the weights that are loaded
    if facts.get("quantised") == 4 and facts.get("sharding") == "parameters":  # FSDP shards tensors of one dtype
        facts["quantised_storage"] = half
    _restate(facts, "all-linear")


TRL = framework("trl", not_modelled=OTHERS, derive=_derive_trl, restate=_restate_trl)

# --- LLaMA-Factory: the YAML of `llamafactory-cli train FILE`. With its back end of Megatron (USE_MCA) it has further degrees, which are read, not written.

SHARED = r"output_dir|checkpoint|tokenizer|dataset|seed|log|shuffle|epochs|steps|lr_|learning|warmup|device|profiler|metric|save|resume|clip|loss\."


def _derive_factory(facts: Facts) -> None:
    by_fsdp = bool(facts.get("fsdp"))
    _derive_fsdp(facts)
    if facts["sharding"] == "none" and facts.get("zero"):
        facts["sharding"] = "optimizer"
    if facts.get("adapter_kind") != "lora":
        facts.pop("adapters", None)
    else:
        facts["adapters"] = facts.get("adapters") or 8  # the framework's defaults
        facts.setdefault("adapter_alpha", 2 * facts["adapters"])
        facts.setdefault("adapter_targets", "all")
        if facts.get("quantised") == 4:
            facts.setdefault("double_quantised", True)
    facts.setdefault("half", "bf16")
    by_megatron = any(facts.get(axis, 1) > 1 for axis in ("tp", "pp", "ep")) or facts.get("zero")
    if by_megatron or (not by_fsdp and facts["sharding"] != "none"):  # off in Megatron and in its files of DeepSpeed
        facts.setdefault("overlap_dp", False)
        facts.setdefault("overlap_gather", False)
    if not by_megatron and facts["sharding"] == "parameters":
        facts.setdefault("saves", "copied" if by_fsdp else "weights")


def _restate_factory(facts: Facts) -> None:
    if facts.get("sharding") == "parameters":  # its default puts all weights on every GPU before FSDP shards them
        facts["loads_on_host"] = True
    _restate(facts, "all")
    for name in ("adapter_targets", "adapter_trains"):
        if facts.get(name):
            facts[name] = ",".join(facts[name])


LLAMA_FACTORY = framework(
    "llama-factory",
    not_modelled=(
        SHARED,
        r"^stage$|optim_config|kernel_config|dist_config|init_config|quant_config|packing|moe_|fusion|fp8_|lora|flash_attn|template|overlap",
    ),
    derive=_derive_factory,
    restate=_restate_factory,
)
