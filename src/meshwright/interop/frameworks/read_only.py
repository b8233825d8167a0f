"""torchtune, picotron, gpt-neox and ms-swift: their files are read, not written."""

from dataclasses import replace

from meshwright.interop.frameworks.megatron import TABLE as MEGATRON_TABLE
from meshwright.interop.frameworks.trainer import OTHERS, TRAINER_KEYS
from meshwright.interop.keys import OPTIMIZERS, SWITCH, Facts, Framework, Key, Table, last_part, rows

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


TORCHTUNE = Framework(
    name="torchtune",
    title="torchtune",
    usual_cluster="dgx-h100",
    stack="accelerate",
    form="yaml",
    table=Table(
        known_as="torchtune",
        keys=(
            *rows((
                ("model._component_", "model"),
                ("model._component_", "quantised", (("qlora", 4), (".", None))),
                ("model.quantize_base", "quantised", {True: 4, False: None}),
                ("batch_size", "microbatch"), ("gradient_accumulation_steps", "accumulation"), ("tokenizer.max_seq_len", "seq"),
            )),
            *rows((("tensor_parallel_dim", "tp"), ("data_parallel_replicate_dim", "replicate")), default=1),
            Key("data_parallel_shard_dim", "shard", default=-1),
            Key("enable_activation_checkpointing", "recompute", words={True: "full", False: "none"}, default="none"),
            *rows((
                ("ac_mode", "recompute", {"selective": "selective", "full": "full"}),
                ("custom_sharded_layers", "wrapped_ends", (("output", True), (".", None))),
            )),
            Key("enable_activation_offloading", "offload_activations", words=SWITCH, default=False),
            *rows((
                (("fsdp_cpu_offload", "fsdp.cpu_offload"), "offload_parameters"),
                ("fsdp_reshard_after_forward", "reshard"),
            ), words=SWITCH),
            *(Key("compile", fact, words={True: True, False: None}) for fact in ("fused_norm", "fused_activation")),
            *rows((
                ("enable_async_checkpointing", "saves", {True: "copied", False: None}),
                ("dtype", "half", {"bf16": "bf16", "fp32": "fp32"}),
                ("optimizer.lr", "learning_rate"),
                ("loss._component_", "fused_loss", (("Linear|Chunked", True), (".", False))),
                ("model.lora_rank", "adapters"),
            )),
            Key("optimizer._component_", "optimizer", match=OPTIMIZERS),
        ),
        not_modelled=(
        *SHARED, r"^model\.", r"^optimizer", r"memory_efficient|tensor_parallel_plan|ac_option", r"optimizer_in_bwd|low_cpu",
    ),
        derive=_torchtune,
    ),
)  # fmt: skip


def _picotron(facts: Facts) -> None:
    facts["sharding"] = "none"
    _pure_half(facts)


PICOTRON = Framework(
    name="picotron",
    title="picotron",
    stack="nanotron",
    form="json",
    table=Table(
        keys=(
            *rows((
                ("model.name", "model"), ("model.num_hidden_layers", "model.layers"), ("model.num_attention_heads", "model.heads"),
                ("model.num_key_value_heads", "model.kv_heads"), ("distributed.dp_size", "dp"), ("training.micro_batch_size", "microbatch"),
                ("training.gradient_accumulation_steps", "accumulation"), ("training.seq_length", "seq"),
                ("training.learning_rate", "learning_rate"),
                ("model.dtype", "half", {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}),
            )),
            *rows((("tp_size", "tp"), ("cp_size", "cp"), ("pp_size", "pp")), prefix="distributed.", default=1),
            Key("distributed.pp_engine", "schedule", words={"1f1b": "1f1b", "afab": "gpipe"}, default="1f1b"),
        ),
        not_modelled=(*SHARED, r"backend|use_cpu|use_flash|use_fused"),
        derive=_picotron,
    ),
)  # fmt: skip


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


def dashed(name: str) -> tuple[str, ...]:
    return (name.replace("_", "-"),)


GPT_NEOX = Framework(
    name="gpt-neox",
    title="gpt-neox",
    stack="megatron-deepspeed",
    form="yaml",
    table=Table(
        known_as="gpt-neox",
        keys=(
            *(Key(name, fact, was=dashed(name)) for name, fact in (
                ("num_layers", "model.layers"), ("hidden_size", "model.hidden"), ("num_attention_heads", "model.heads"),
                ("num_kv_heads", "model.kv_heads"), ("intermediate_size", "model.ffn"), ("seq_length", "seq"),
                ("max_position_embeddings", "model.max_positions"), ("make_vocab_size_divisible_by", "model.vocab_multiple"),
            )),
            Key("mlp_multiple_of", "ffn_multiple", was=dashed("mlp_multiple_of")),
            *rows((
                ("activation", "gated", (("swiglu|geglu|silu", True), (".", False))),
                (("pos_emb", "pos-emb"), "model.positions", {"rotary": "rope", "learned": "learned", "none": "none", "alibi": "alibi"}),
            )),
            Key("norm", "model.norm", words={"rmsnorm": "rmsnorm", "layernorm": "layernorm"}, default="layernorm"),
            Key("model_parallel_size", "tp", was=dashed("model_parallel_size"), default=1),
            Key("pipe_parallel_size", "pp", was=dashed("pipe_parallel_size"), unset=(0,), default=1),
            Key("pipe_parallel_size", "pipeline_engine", words={0: False}, match=((".", True),), was=dashed("pipe_parallel_size"), default=True),
            *rows((("overlap_comm", "overlap_dp"), ("cpu_offload", "offload_states")), prefix="zero_optimization.", words=SWITCH, default=False),
            *rows((
                ("train_micro_batch_size_per_gpu", "microbatch"), ("gradient_accumulation_steps", "accumulation"),
                ("train_batch_size", "batch"),
            ), unset=("auto",)),
            Key("zero_optimization.stage", "zero", words={0: 0, 1: 1, 2: 2, 3: 3}, default=0),
            Key("checkpoint_activations", "recompute", words={True: "full", False: "none"}, was=dashed("checkpoint_activations"), default="none"),
            *rows((
                ("fp16.enabled", "half", {True: "fp16", False: None}),
                ("precision", "half", {"bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32"}),
                ("bf16.enabled", "half", {True: "bf16", False: None}),
                (("attention_config", "attention-config"), "state_space", (("mamba|rwkv", True), (".", False))),
            )),
            Key("optimizer.type", "optimizer", match=OPTIMIZERS),
            Key("optimizer.params.lr", "learning_rate", unset=("auto",)),
        ),
        not_modelled=(*SHARED, r"^(?!.*(parallel_size|batch_size|zero_optimization\.stage|precision))",),
        derive=_neox,
    ),
)  # fmt: skip


# --- ms-swift: arguments of Transformers' Trainer; its `megatron` commands take Megatron's flags with underscores.

MEGATRON_KEYS = tuple(
    replace(key.only_read(), name=last_part(key.name), was=tuple(map(last_part, key.was)))
    for key in MEGATRON_TABLE.keys
    if key.name.startswith("--") and key.fact not in ("half", "optimizer", "recompute", "model")
)


def _trainer(facts: Facts) -> None:
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
        facts["adapters"] = 8  # the framework's default
    if (facts.get("tp") or 1) == 1:
        facts["sp"] = False


MS_SWIFT = Framework(
    name="ms-swift",
    title="ms-swift",
    stack="accelerate",
    defers_reduction=True,
    form="yaml",
    table=Table(
        known_as="ms-swift",
        keys=(
            *MEGATRON_KEYS,
            *TRAINER_KEYS,
            Key("recompute_granularity", "recompute", words={"full": "full", "selective": "selective", "none": "none"}),
            Key("target_modules", "adapter_targets", default="all-linear"),
        ),
        not_modelled=OTHERS,
        derive=_trainer,
    ),
    names=("swift", "megatron-swift"),
    splits_evenly=True,
    expert_tp="one",
    launcher_shards=True,
)
