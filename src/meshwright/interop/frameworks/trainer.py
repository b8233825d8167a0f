"""TRL and ms-swift: arguments of Transformers' Trainer; ms-swift's `megatron` commands take Megatron's flags with underscores. Read, not written.

Both may be launched with a file of accelerate or DeepSpeed that says how weights are sharded, apart from these arguments.
"""

from __future__ import annotations

from meshwright.interop.frameworks.megatron import TABLE as MEGATRON_TABLE
from meshwright.interop.keys import OPTIMIZERS, Facts, Framework, Key, Table

BOTH = {True: True, False: None}
TRAINER_KEYS = (
    Key("model_name_or_path", "model", was=("model", "model_id"), read_only=True),
    Key("model_name_or_path", "hub_model", was=("model", "model_id"), read_only=True),
    Key("learning_rate", "learning_rate"),
    Key("per_device_train_batch_size", "microbatch"),
    Key("gradient_accumulation_steps", "accumulation", unset=("auto",)),
    Key("max_length", "seq", was=("max_seq_length", "max_prompt_length")),
    Key("gradient_checkpointing", "recompute", words={True: "full", False: "none"}, default="full"),
    Key("fp16", "half", words={True: "fp16", False: None}),
    Key("bf16", "half", words={True: "bf16", False: None}),
    Key("torch_dtype", "half", match=(("bf16|bfloat16", "bf16"), ("fp16|float16", "fp16"), ("32", "fp32"), ("auto", None)), was=("dtype",)),
    Key("optim", "optimizer", match=(*OPTIMIZERS, (".", "adamw"))),
    Key("optim", "eight_bit_states", match=(("8bit", True), (".", None))),
    Key("deepspeed", "sharding", match=(("zero_?1|z1", "optimizer"), ("zero_?2|z2", "gradients"), ("zero_?3|z3", "parameters"), (".", None))),
    Key("deepspeed", "offload_states", match=(("offload", True), (".", None))),
    Key("fsdp", "fsdp", match=((".", 1),), unset=("", [])),
    Key("use_liger_kernel", "fused_loss", words=BOTH),
    Key("attn_implementation", "eager", words={"eager": True}, match=((".", None),), was=("attn_impl",)),
    Key("tuner_type", "adapter_kind", match=(("lora", "lora"), (".", "full")), was=("train_type", "sft_type")),
    Key("use_peft", "adapter_kind", words={True: "lora", False: "full"}),
    Key("lora_rank", "adapters", was=("lora_r",)),
    Key("load_in_4bit", "quantised", words={True: 4, False: None}),
    Key("load_in_8bit", "quantised", words={True: 8, False: None}),
    Key("quant_bits", "quantised"),
    Key("sequence_parallel_size", "sequence_ranks"),
    Key("NPROC_PER_NODE", "gpus_per_node", was=("nproc_per_node",)),
    Key("NNODES", "nodes", was=("nnodes",)),
)  # fmt: skip
MEGATRON_KEYS = tuple(
    Key(k.name.lstrip("-").replace("-", "_"), k.fact, k.words, k.match, tuple(n.lstrip("-").replace("-", "_") for n in k.was), None, False, True, k.unset)
    for k in MEGATRON_TABLE.keys
    if k.name.startswith("--") and k.fact not in ("half", "optimizer", "recompute", "model")
)  # fmt: skip


def _derive(facts: Facts) -> None:
    if any((facts.get(axis) or 1) > 1 for axis in ("tp", "pp", "ep")) or facts.get("batch"):
        MEGATRON_TABLE.derive(facts)
    elif facts.get("fsdp") and not facts.get("sharding"):
        facts["sharding"] = "parameters"
    facts.setdefault("sharding", "none")
    facts.setdefault("half", "bf16")
    if (facts.get("sequence_ranks") or 1) > 1:
        facts["cp"], facts["cp_kind"] = facts["sequence_ranks"], "ulysses"
    if facts.get("adapter_kind") != "lora":
        facts.pop("adapters", None)
    elif not facts.get("adapters"):
        facts["adapters"] = 8  # the default of ms-swift; TRL's is 16
    if (facts.get("tp") or 1) == 1:
        facts["sp"] = False


OTHERS = (r".",)  # of the keys that the framework has, those that are left set nothing that is modelled
TRL = Framework(
    name="trl",
    title="TRL",
    stack="accelerate",
    form="yaml",
    table=Table(known_as="trl", keys=TRAINER_KEYS, not_modelled=OTHERS, derive=_derive),
    names=("Transformers", "Trainer", "Hugging Face Trainer", "transformers Trainer"),
    launcher_shards=True,
)
MS_SWIFT = Framework(
    name="ms-swift",
    title="ms-swift",
    stack="accelerate",
    form="yaml",
    table=Table(
        known_as="ms-swift",
        keys=(
            *MEGATRON_KEYS,
            *TRAINER_KEYS,
            Key("recompute_granularity", "recompute", words={"full": "full", "selective": "selective", "none": "none"}),
        ),
        not_modelled=OTHERS,
        derive=_derive,
    ),
    names=("swift", "megatron-swift"),
    splits_evenly=True,
    expert_tp="one",
    launcher_shards=True,
)
