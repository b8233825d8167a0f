"""DeepSpeed: a JSON file, and the arguments of launch scripts; with Megatron-DeepSpeed, together with Megatron's arguments.

train_batch_size = micro-batch × accumulation × data-parallel ranks; of the three, two suffice. `"auto"` is filled in by the caller, so it states nothing.
With AutoTP or Ulysses the product is not written: DeepSpeed, or Trainer, compares it with all ranks of the world. The pipeline engine takes ZeRO 0 and 1
only. Recompute is not in the file: the section `activation_checkpointing` only tunes `deepspeed.checkpointing`, which the model's code must call.
"""

from meshwright.interop.frameworks.megatron import TABLE as MEGATRON_TABLE
from meshwright.interop.frameworks.megatron import derive_recompute, derive_schedule
from meshwright.interop.keys import OPTIMIZERS, SWITCH, Facts, Framework, Key, Table, flag, rows

STAGES = ("none", "optimizer", "gradients", "parameters")
Z = "zero_optimization."
OFFLOAD = {"cpu": True, "nvme": True, "none": False}
# The keys of a DeepSpeed block, which other frameworks hold too.
BLOCK = (
    *rows((
        ("train_batch_size", "batch"), ("train_micro_batch_size_per_gpu", "microbatch"), ("gradient_accumulation_steps", "accumulation"),
    ), unset=("auto",), always=True),
    Key(Z + "stage", "zero", words={0: 0, 1: 1, 2: 2, 3: 3}, always=True),
    Key(Z + "offload_optimizer.device", "offload_states", words=OFFLOAD, default=False),
    Key(Z + "cpu_offload", "offload_states", words=SWITCH, read_only=True),
    Key(Z + "offload_param.device", "offload_parameters", words=OFFLOAD, read_only=True),
    Key(Z + "overlap_comm", "overlap_dp", words={True: True, False: False, None: None}, unset=("auto",)),
    *rows((
        (("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.prefetch_bucket_size"), "prefetch", {0: False}, ((".", True),)),
        ("zero_optimization.prefetch_bucket_size", "unfilled", {"auto": ("prefetch_bucket_size",)}, ((r"\d", None),)),
        ("zero_optimization.param_persistence_threshold", "unfilled", {"auto": ("param_persistence_threshold",)}, ((r"\d", None),)),
    ), read_only=True),
    Key(Z + "stage3_gather_16bit_weights_on_model_save", "saves", words={True: "weights", False: "sharded"}, default="sharded",
        was=(Z + "gather_16bit_weights_on_model_save", Z + "stage3_gather_fp16_weights_on_model_save")),
    Key(Z + "stage3_max_live_parameters", "live_parameters", was=(Z + "max_live_parameters",), unset=("auto",), read_only=True),
    *rows((
        ("zero_optimization.reduce_bucket_size", "bucket_elements"),
        ("bf16.enabled", "half", {True: "bf16", False: "fp32"}),
    ), unset=("auto",)),
    Key("fp16.enabled", "half_alternative", words={True: "fp16", "auto": "auto", False: None}),
    Key("optimizer.type", "optimizer", words={"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Muon": "muon"}, match=OPTIMIZERS),
    Key("optimizer.params.lr", "learning_rate", unset=("auto",)),
)  # fmt: skip
# A file of DeepSpeed that other frameworks name: `ds_z3_offload_config.json`, `zero3_bf16_cpuoffload_params.json`.
FILE = (
    Key("deepspeed", "by_deepspeed", match=((".", True),), unset=("", False), read_only=True),
    Key("deepspeed", "sharding", match=tuple((rf"(zero|z|stage)[_-]?{stage}", STAGES[stage]) for stage in (1, 2, 3))),
    *rows((
        ("deepspeed", "offload_states", (("offload_param", None), ("offload", True), (".", None))),
        ("deepspeed", "offload_parameters", ((r"(zero|z|stage)[_-]?3.*offload", True), (".", None))),
    ), read_only=True),
)  # fmt: skip
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
    if facts.get("gated") is not None:
        facts["model.activation"] = "swiglu" if facts["gated"] else "gelu"
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


OWN = {"zero", "fsdp", "sharding", "half", "batch", "microbatch", "optimizer", "offload_states", "saves", "overlap_dp"}
MEGATRON_KEYS = tuple(key.only_read() for key in MEGATRON_TABLE.keys if key.fact not in OWN)
TABLE = Table(
    known_as="deepspeed",
    keys=(
        *MEGATRON_KEYS,
        Key("--model_name_or_path", "model", was=("--model_name", "--actor_model_name_or_path"), unset=("", True), read_only=True),
        *rows((
            (("--zero_stage", "--zero-stage", "--actor_zero_stage"), "zero", {0: 0, 1: 1, 2: 2, 3: 3}),
            (("--per_device_train_batch_size", "--per_device_training_batch_size", "--micro-batch-size", "--batch-size"), "microbatch"),
            (("--global-batch-size", "--batch_size"), "batch"),
            ("--gradient_accumulation_steps", "accumulation"),
            (("--max_seq_len", "--max_length", "--seq_length", "--seq-length"), "seq"),
            (("--gradient_checkpointing", "--activation_checkpointing", "--actor_gradient_checkpointing"), "recompute",
             {True: "full", False: "none"}),
            ("--deepspeed-activation-checkpointing", "recompute", {True: "full"}),
            (("--lora_dim", "--actor_lora_dim"), "adapters"),
            (("--num_layers", "--nlayers"), "model.layers"),
            ("--hidden_dim", "model.hidden"),
            ("--fp16", "half", {True: "fp16", False: None}),
            ("--bf16", "half", {True: "bf16", False: None}),
            ("--no-pipeline-parallel", "pipeline_engine", {True: False}),
            (("--ds-sequence-parallel-size", "--sp-size", "--sp_size", "sequence_parallel_size"), "sequence_ranks"),
            (("--dp-size", "--dp_size"), "dp"),
            ("--moe-expert-parallel-size", "ep"), ("--num-key-value-heads", "model.kv_heads"), ("--num_processes", "gpus"),
        ), read_only=True),
        Key("--offload", "offload_parameters", words=SWITCH, read_only=True),
        Key("--optimizer", "optimizer", match=OPTIMIZERS),
        flag("offload_states", "--cpu-optimizer", read_only=True),
        *BLOCK,
        Key("tensor_parallel.autotp_size", "tp", default=1),
        *rows((
            ("sequence_parallel_size", "sequence_ranks"),
            ("torch_autocast.dtype", "half", (("bfloat16", "bf16"), ("float16", "fp16"))),
            ("data_types.grad_accum_dtype", "grad_dtype", {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}),
        )),
    ),
    not_modelled=(
        *BLOCK_OTHERS, r"machine|padding|generation|ppo|answer|prompt|eval|module_name|leaf_module|iteration|steps|reference_model|verbose",
        r"critic|hybrid_engine|mixed_precision_lora|repeated-dataloader|topk_ratio|update_interval|overlap_step|non_blocking|pin_memory|--tf32|attn_impl",
        *MEGATRON_TABLE.not_modelled, r"compile|backend|super_offload|^--compile|zenflow",
    ),
    derive=_derive,
    restate=_restate,
)  # fmt: skip

DEEPSPEED = Framework(
    name="deepspeed",
    title="DeepSpeed",
    stack="deepspeed",
    form="json",
    table=TABLE,
    names=("Megatron-DeepSpeed",),
    flag_prefix="",
    tried=("0.19.8",),
    left_to_script=("workload.seq", "plan.recompute", "plan.reshard"),
)
