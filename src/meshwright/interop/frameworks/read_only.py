"""torchtune, picotron, gpt-neox, NeMo 1 and ms-swift: their files are read, not written."""

from meshwright.interop.frameworks.megatron import MEGATRON, derive_recompute, derive_schedule, derive_sharding
from meshwright.interop.frameworks.trainer import OTHERS
from meshwright.interop.keys import Facts
from meshwright.interop.tables import framework

SHARED = (
    r"output_dir|checkpoint|tokenizer|dataset|seed|log|shuffle|epochs|steps|lr_|learning|warmup|device|profiler|metric|save|resume|clip|loss\.|_component_$",
)


def _pure_half(facts: Facts) -> None:
    """Everything is kept in the dtype of the parameters: no master weights."""
    if facts.get("half") == "bf16":
        facts["master"], facts["grad_dtype"], facts["state_dtype"] = False, "bf16", "bf16"


def _torchtune(facts: Facts) -> None:
    facts["sharding"] = "parameters"
    facts.setdefault("saves", "rank-0")
    facts["loads"] = "rank-0"
    facts["model"] = str(facts.get("model", "")).rpartition(".")[2].removeprefix("lora_").removeprefix("qlora_")
    _pure_half(facts)


TORCHTUNE = framework(
    "torchtune",
    not_modelled=(
        *SHARED, r"^model\.", r"^optimizer", r"memory_efficient|tensor_parallel_plan|ac_option", r"optimizer_in_bwd|low_cpu",
    ),
    derive=_torchtune,
)  # fmt: skip


def _picotron(facts: Facts) -> None:
    facts["sharding"] = "none"
    _pure_half(facts)


PICOTRON = framework("picotron", not_modelled=(*SHARED, r"backend|use_cpu|use_flash|use_fused"), derive=_picotron)


def _neox(facts: Facts) -> None:
    stage = facts.pop("zero", 0)
    facts["sharding"] = ("none", "optimizer", "gradients", "parameters")[stage]
    facts["half"] = facts.get("half") or "fp16"
    facts["pp"] = facts.get("pp") or 1
    if facts.get("pipeline_engine") or not stage:  # switches the overlap off, also with one stage
        facts["overlap_dp"] = False
    if facts.get("gated"):
        facts["model.activation"] = "swiglu"
        if facts.get("model.ffn"):
            unit = facts.get("ffn_multiple") or 1
            # It is the width of all three projections.
            facts["model.ffn"] = -(-(facts["model.ffn"] // 3) // unit) * unit
    else:
        facts["model.activation"] = "gelu"
        if facts.get("model.hidden"):
            facts.setdefault("model.ffn", 4 * facts["model.hidden"])


GPT_NEOX = framework(
    "gpt-neox",
    not_modelled=(
        *SHARED,
        r"^(?!.*(parallel_size|batch_size|zero_optimization\.stage|precision))",
    ),
    derive=_neox,
)


def _nemo(facts: Facts) -> None:
    if facts.get("fsdp"):
        facts.setdefault("sharding", "parameters")
    derive_sharding(facts)
    derive_recompute(facts)
    derive_schedule(facts)
    if facts.get("tp", 1) == 1:
        facts["sp"] = False


NEMO_1 = framework("nemo-1", not_modelled=(r"^(trainer|model)\.(?!peft)|^exp_manager\.checkpoint",), derive=_nemo)


# --- ms-swift: arguments of Transformers' Trainer; its `megatron` commands take Megatron's flags with underscores.


def _trainer(facts: Facts) -> None:
    if any((facts.get(axis) or 1) > 1 for axis in ("tp", "pp", "ep")) or facts.get("batch"):
        MEGATRON.table.derive(facts)
    elif facts.get("fsdp") and not facts.get("sharding"):
        facts["sharding"] = "parameters"
    facts.setdefault("sharding", "none")
    facts.setdefault("half", "bf16")
    if (facts.get("sequence_ranks") or 1) > 1:
        facts["cp"], facts["cp_kind"] = facts["sequence_ranks"], "ulysses"
    if facts.get("adapter_kind") != "lora":
        facts.pop("adapters", None)
    elif not facts.get("adapters"):
        facts["adapters"] = 8  # the framework's default
    if (facts.get("tp") or 1) == 1:
        facts["sp"] = False


MS_SWIFT = framework("ms-swift", not_modelled=OTHERS, derive=_trainer)
