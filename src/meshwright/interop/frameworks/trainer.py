"""TRL and LLaMA-Factory: YAML files with the arguments of Transformers' Trainer.

They are written with FSDP2 in the file itself (`fsdp`, `fsdp_config`), so that any launcher of processes starts them. A file of accelerate or DeepSpeed may
say how weights are sharded, apart from these arguments: it is read where they name it.
"""

from meshwright.interop.frameworks.axolotl import LOADING, PREFETCH, STATE_DICTS, restate_fsdp
from meshwright.interop.frameworks.deepspeed import FILE
from meshwright.interop.keys import OPTIMIZERS, SWITCH, Facts, Framework, Key, Table, rows

LIGER = ("fused_loss", "fused_norm", "fused_activation")  # by Liger's kernels
ON = {True: True, False: None}
OTHERS = (r".",)  # of the keys that the framework has, those that are left set nothing that is modelled
SYNC_EACH_BATCH = Key(
    "accelerator_config.gradient_accumulation_kwargs.sync_each_batch",
    "defers_reduction",
    words={True: False, False: True},
    read_only=True,
)
WEIGHTS = Key("torch_dtype", "half", match=(("bf16|bfloat16", "bf16"), ("fp16|float16", "fp16"), ("32", "fp32"), ("auto", None)), was=("dtype",))  # fmt: skip
TRAINER_KEYS = (
    *rows((
        (("model_name_or_path", "model", "model_id"), "model"),
        (("model_name_or_path", "model", "model_id"), "hub_model"),
        ("learning_rate", "learning_rate"), ("per_device_train_batch_size", "microbatch"),
    )),
    Key("gradient_accumulation_steps", "accumulation", unset=("auto",)),
    SYNC_EACH_BATCH,
    *rows((
        (("max_length", "max_seq_length", "max_prompt_length"), "seq"),
        ("fp16", "half", {True: "fp16", False: None}),
        ("bf16", "half", {True: "bf16", False: None}),
    )),
    Key("gradient_checkpointing", "recompute", words={True: "full", False: "none"}, default="full"),
    WEIGHTS,
    Key("optim", "optimizer", match=(*OPTIMIZERS, (".", "adamw"))),
    Key("optim", "eight_bit_states", match=(("8bit", True), (".", None))),
    *FILE,
    *rows((
        ("fsdp", "fsdp", {True: 2, False: None}, ((".", 1),)),
        ("fsdp", "offload_parameters", (("offload", True), (".", None))),
    ), unset=("", [])),
    *(Key("use_liger_kernel", fact, words=ON) for fact in LIGER),
    *rows((
        (("attn_implementation", "attn_impl"), "eager", {"eager": True}, ((".", None),)),
        (("tuner_type", "train_type", "sft_type"), "adapter_kind", (("lora", "lora"), (".", "full"))),
        ("use_peft", "adapter_kind", {True: "lora", False: "full"}),
        (("lora_rank", "lora_r"), "adapters"),
        ("lora_alpha", "adapter_alpha"), ("lora_dropout", "adapter_dropout"),
        (("lora_target_modules", "lora_target"), "adapter_targets"),
        (("lora_modules_to_save", "additional_target"), "adapter_trains"),
        ("load_in_4bit", "quantised", {True: 4, False: None}),
        ("load_in_8bit", "quantised", {True: 8, False: None}),
        ("quant_bits", "quantised"), ("sequence_parallel_size", "sequence_ranks"),
        (("NPROC_PER_NODE", "nproc_per_node"), "gpus_per_node"),
        (("NNODES", "nnodes"), "nodes"),
    )),
    *rows((
        ("use_rslora", "adapter_root"),
        (("use_bnb_nested_quant", "double_quantization"), "double_quantised"),
    ), words=ON),
)  # fmt: skip

# --- What is written for both: the batch, the precision, the optimizer, and FSDP2 as `TrainingArguments` takes it.

F = "fsdp_config."
RESHARDS = (("full_shard|hybrid_shard$", True), ("grad_op|zero2", False), (".", None))
WRITTEN = (
    *rows((("model_name_or_path", "hub_model"), ("learning_rate", "learning_rate"))),
    Key("per_device_train_batch_size", "microbatch", always=True),
    Key("gradient_accumulation_steps", "accumulation", unset=("auto",), always=True),
    Key("bf16", "half", words={True: "bf16", False: "fp32"}, always=True),
    Key("fp16", "half", words={True: "fp16", False: None}),
    Key("optim", "optimizer", words={"adamw_torch_fused": "adamw", "sgd": "sgd"}, match=(*OPTIMIZERS, (".", "adamw")), always=True),
    Key("fsdp", "fsdp", words={"full_shard auto_wrap": 2, True: 2, False: None}, match=((".", 1),), unset=("", [])),
    Key(F + "version", "fsdp", words={1: 1, 2: 2}, was=(F + "fsdp_version",)),
    Key(F + "reshard_after_forward", "reshard", words=SWITCH, match=RESHARDS, was=(F + "fsdp_reshard_after_forward",)),
    Key(F + "state_dict_type", "saves", words=STATE_DICTS, was=(F + "fsdp_state_dict_type",)),
    Key(F + "cpu_ram_efficient_loading", "loads", words=LOADING, was=(F + "fsdp_cpu_ram_efficient_loading",), read_only=True),
    Key(F + "backward_prefetch", "prefetch", words=PREFETCH, match=(("pre", True), (".", "forward")), was=(F + "fsdp_backward_prefetch",), read_only=True),
    Key(F + "activation_checkpointing", "shard_recompute", words={True: "full", False: None}, was=(F + "fsdp_activation_checkpointing",)),
    Key(F + "cpu_offload", "offload_parameters", words=ON, was=(F + "fsdp_offload_params",), read_only=True),
)  # fmt: skip


def _read_only(*but: Key) -> tuple[Key, ...]:
    return tuple(key.only_read() for key in TRAINER_KEYS if key not in but)


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


DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": None}
TRL = Framework(
    name="trl",
    title="TRL",
    stack="trl",
    defers_reduction=True,
    form="yaml",
    table=Table(
        known_as="trl",
        keys=(
            *_read_only(WEIGHTS),
            *WRITTEN,
            Key("max_length", "seq", was=("max_seq_length", "max_prompt_length"), always=True),
            Key("gradient_checkpointing", "recompute", words={True: "full", False: "none"}, default="full", always=True),
            Key("dtype", "param_dtype", words=DTYPES, was=("torch_dtype",)),
            Key("use_peft", "adapter_kind", words={True: "lora", False: "full"}, always=True),
            *rows((
                ("lora_r", "adapters"), ("lora_alpha", "adapter_alpha"), ("lora_dropout", "adapter_dropout"),
                ("lora_target_modules", "adapter_targets"), ("lora_modules_to_save", "adapter_trains"),
            )),
            Key("use_rslora", "adapter_root", words=ON),
            *rows((
                ("load_in_4bit", "quantised", {True: 4, False: None}),
                ("load_in_8bit", "quantised", {True: 8, False: None}),
            )),
            Key("use_bnb_nested_quant", "double_quantised", words=SWITCH),
            Key("bnb_4bit_quant_storage", "quantised_storage", words=DTYPES, match=((".", None),)),
        ),
        not_modelled=OTHERS,
        derive=_derive_trl,
        restate=_restate_trl,
    ),
    names=("Transformers", "Trainer", "Hugging Face Trainer", "transformers Trainer"),
    launcher_shards=True,
    tried=("1.16.0",),
    comment="TRL settings: the keys of `trl sft --config FILE` that follow from the plan",
)  # fmt: skip

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


LLAMA_FACTORY = Framework(
    name="llama-factory",
    launcher_shards=True,
    title="LLaMA-Factory",
    stack="llama-factory",
    defers_reduction=True,
    form="yaml",
    table=Table(
        known_as="llama-factory",
        keys=(
            *_read_only(),
            *rows((
                ("tensor_model_parallel_size", "tp"), ("pipeline_model_parallel_size", "pp"),
                (("expert_model_parallel_size", "dist_config.ep_size"), "ep"),
                (("cp_size", "context_parallel_size"), "cp"),
            ), default=1, read_only=True),
            *rows((
                ("cp_mode", "cp_kind", {"ulysses": "ulysses", "ring": "ring"}),
                ("dist_config.name", "fsdp"),
            ), read_only=True),
            Key("sequence_parallel", "sp", words=SWITCH, default=False, read_only=True),
            Key("use_distributed_optimizer", "zero", words={True: 1, False: 0}, default=0, read_only=True),
            *rows((("overlap_grad_reduce", "overlap_dp"), ("overlap_param_gather", "overlap_gather")), words=SWITCH, read_only=True),
            *WRITTEN,
            Key("per_device_train_batch_size", "microbatch", was=("micro_batch_size",), read_only=True),
            Key("cutoff_len", "seq", always=True),
            Key("disable_gradient_checkpointing", "recompute", words={True: "none", False: "full"}, default="full", always=True),  # of Trainer
            Key("recompute_granularity", "recompute", words={"full": "full", "selective": "selective", "none": "none"}, read_only=True),  # of Megatron
            *(Key("enable_liger_kernel", fact, words=ON) for fact in LIGER),
            *rows((
                ("flash_attn", "eager", {"disabled": True}, ((".", None),)),
                ("fp8", "eight", {True: "fp8", False: None}),
            )),
            Key("finetuning_type", "adapter_kind", words={"lora": "lora", "full": "full", "freeze": "full"}, always=True),
            *rows((
                ("lora_rank", "adapters"), ("lora_alpha", "adapter_alpha"), ("lora_dropout", "adapter_dropout"),
                ("lora_target", "adapter_targets"), ("additional_target", "adapter_trains"),
            )),
            Key("use_rslora", "adapter_root", words=ON),
            *rows((
                ("low_cpu_mem_usage", "loads_on_host", {False: True}, ((".", None),)),
                ("quantization_bit", "quantised"),
            )),
            Key("double_quantization", "double_quantised", words=SWITCH),
        ),
        not_modelled=(SHARED, r"^stage$|optim_config|kernel_config|dist_config|init_config|quant_config|packing|moe_|fusion|fp8_|lora|flash_attn|template|overlap"),
        derive=_derive_factory,
        restate=_restate_factory,
    ),
    package="llamafactory",
    tried=("0.9.5",),
    comment="LLaMA-Factory settings: the keys of `llamafactory-cli train FILE` that follow from the plan",
)  # fmt: skip
