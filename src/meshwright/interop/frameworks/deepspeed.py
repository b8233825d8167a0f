"""DeepSpeed: a JSON file, and the arguments of launch scripts; with Megatron-DeepSpeed, together with Megatron's arguments.

train_batch_size = micro-batch × accumulation × data-parallel ranks; of the three, two suffice. `"auto"` is filled in by the caller, so it states nothing.
With AutoTP or Ulysses the product is not written: DeepSpeed, or Trainer, compares it with all ranks of the world. The pipeline engine takes ZeRO 0 and 1
only. Recompute is not in the file: the section `activation_checkpointing` only tunes `deepspeed.checkpointing`, which the model's code must call.
"""

from meshwright.interop.frameworks.megatron import MEGATRON, derive_recompute, derive_schedule
from meshwright.interop.keys import Facts
from meshwright.interop.tables import framework

STAGES = ("none", "optimizer", "gradients", "parameters")
Z = "zero_optimization."
BLOCK_OTHERS = (
    r"^zero_optimization\.(?!stage$|offload_(optimizer|param)\.device$)",
    r"^fp16\.|^bf16\.|^comms_config|^prescale|^gradient_(predivide|clipping)|^zero_allow|^zero_force|steps_per_print|wall_clock|^aio\.|^curriculum|^data_",
    r"^zero_optimization\.(stage3_|sub_group|contiguous|gather|allgather|reduce_scatter|overlap|round_robin|max_|ignore|elastic|load_from|offload_|zenflow)",
    r"^gradient_|^optimizer\.|^scheduler|^activation_checkpointing\.|^flops_profiler|^tensorboard|^wandb|^compression_training|^torch_autocast",
)


def derive_block(facts: Facts) -> None:
    """The ZeRO stage and the precision of a DeepSpeed block."""
    stage = facts.get("zero")
    facts["by_deepspeed"] = True
    facts["sharding"] = STAGES[stage] if isinstance(stage, int) else facts.get("sharding", "none")
    other = facts.pop("half_alternative", None)
    if other and facts.get("half") == "bf16":
        facts["half_alternative"] = other
    elif other:
        facts["half"] = "fp16" if other == "fp16" else None
    if facts["sharding"] == "none" and facts.get("half") == "bf16" and facts.get("grad_dtype") in (None, "fp32"):
        # Its engine (`get_data_types`) sums bf16 gradients in float32 then, and its BF16_Optimizer shards the states.
        facts["sharding"], facts["grad_dtype"] = "optimizer", "fp32"
    facts["unfilled"] = [Z + name for name in facts.get("unfilled") or ()]
    if facts["sharding"] != "parameters":
        facts["saves"] = "sharded"
    if facts.get("overlap_dp") is None:  # on by default with ZeRO-3 only
        facts["overlap_dp"] = facts["sharding"] == "parameters"
    if facts["sharding"] == "none":  # gradients are reduced after backward
        facts["overlap_dp"] = False


def _derive(facts: Facts) -> None:
    derive_block(facts)
    derive_recompute(facts)
    derive_schedule(facts)
    if facts.get("pipeline_engine") is False:
        facts["pp"] = 1
    if facts.get("pp", 1) > 1:  # its pipeline engine switches the overlap off
        facts["overlap_dp"] = False
    if facts.get("sequence_ranks"):
        facts["cp"], facts["cp_kind"] = facts["sequence_ranks"], "ulysses"
    if facts.get("gated") is not None or facts.get("model.hidden"):  # Megatron's flags; without --swiglu it is GELU
        facts["model.activation"] = "swiglu" if facts.get("gated") else "gelu"
    if facts.get("model.hidden") and not facts.get("gated"):
        facts.setdefault("model.ffn", 4 * facts["model.hidden"])
    if facts.get("tp", 1) == 1:
        facts["sp"] = False
    if facts.get("adapters") in (0, None):
        facts.pop("adapters", None)


def _restate(facts: Facts) -> None:
    facts["zero"] = STAGES.index(facts.pop("sharding", "none"))
    facts["half_alternative"] = "fp16" if facts.get("half") == "fp16" else None
    if facts.get("cp", 1) > 1 and facts.get("cp_kind") == "ulysses":
        facts["sequence_ranks"] = facts["cp"]
    if facts.get("tp", 1) * facts.get("cp", 1) > 1:  # it checks this number as if every rank had data of its own
        facts["batch"] = None
    if not facts["zero"]:
        facts["overlap_dp"] = None
        facts["grad_dtype"] = facts.get("half")  # the engine refuses any other without ZeRO
    if facts.get("tp", 1) > 1:  # DeepSpeed checks the global batch as if every rank had sequences of its own
        facts["batch"] = None


DEEPSPEED = framework(
    "deepspeed",
    not_modelled=(
        *BLOCK_OTHERS, r"machine|padding|generation|ppo|answer|prompt|eval|module_name|leaf_module|iteration|steps|reference_model|verbose",
        r"critic|hybrid_engine|mixed_precision_lora|repeated-dataloader|topk_ratio|update_interval|overlap_step|non_blocking|pin_memory|--tf32|attn_impl",
        *MEGATRON.table.not_modelled, r"compile|backend|super_offload|^--compile|zenflow",
    ),
    derive=_derive,
    restate=_restate,
)  # fmt: skip
