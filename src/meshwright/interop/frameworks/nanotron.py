"""nanotron, OLMo-core and Levanter: trainers with one settings file each."""

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.interop.keys import OPTIMIZERS, SWITCH, Facts, Framework, Key, Settings, Table, flag, rows

# --- nanotron: YAML with `parallelism`, `tokens`, `optimizer` and the shape of the model. dp × tp × pp × cp must equal the number of GPUs.

C, P = "model.model_config.", "parallelism."


def _derive_nanotron(facts: Facts) -> None:
    facts["sharding"] = "optimizer" if facts.pop("zero", 0) else "none"
    if facts.get("half") == "fp8":
        facts["half"], facts["eight"] = "bf16", "fp8"
    facts["sp"] = bool(facts.get("sp")) and facts.get("tp", 1) > 1
    facts["model.activation"] = "swiglu"


def _restate_nanotron(facts: Facts) -> None:
    facts["zero"] = 0 if facts.pop("sharding", "none") == "none" else 1
    if facts.get("tp", 1) == 1:
        facts["sp"] = False
    facts["recompute"] = facts.get("recompute", "none")
    if facts.get("pp", 1) == 1:
        facts["schedule"] = "1f1b"


NANOTRON_TABLE = Table(
    known_as="nanotron",
    keys=(
        *rows((
            ("model.model_config.num_hidden_layers", "model.layers"),
            (("model.model_config.hidden_size", "model.model_config.d_model"), "model.hidden"),
            ("model.model_config.intermediate_size", "model.ffn"), ("model.model_config.num_attention_heads", "model.heads"),
            ("model.model_config.num_key_value_heads", "model.kv_heads"), ("model.model_config.vocab_size", "model.vocab"),
        )),
        Key("model.make_vocab_size_divisible_by", "model.vocab_multiple", default=1),
        Key(C + "max_position_embeddings", "model.max_positions"),
        Key(C + "tie_word_embeddings", "model.tied", words=SWITCH),
        *rows((
            (("model.model_config.moe_config.num_experts", "model.model_config.moe_num_experts"), "model.experts"),
            (("model.model_config.moe_config.top_k", "model.model_config.num_experts_per_tok"), "model.top_k"),
            ("model.model_config.moe_config.moe_intermediate_size", "model.expert_ffn"),
        )),
        Key(C + "is_mamba_config", "state_space", words=SWITCH, read_only=True),
        Key(P + "dp", "dp", always=True),
        Key(P + "tp", "tp", default=1, always=True),
        Key(P + "tp_mode", "sp", words={"REDUCE_SCATTER": True, "ALL_REDUCE": False, "reduce_scatter": True, "all_reduce": False}, default=False, always=True),
        Key(P + "pp", "pp", default=1, always=True),
        Key(P + "pp_engine", "schedule", words={"1f1b": "1f1b", "afab": "gpipe"}, default="1f1b", always=True),
        Key(P + "context_parallel_size", "cp", default=1),
        Key(P + "expert_parallel_size", "ep", default=1, always=True),
        flag("async_linears", P + "tp_linear_async_communication"),  # in the reduce-scatter mode
        Key(P + "recompute_layer", "recompute", words={True: "full", False: "none"}, default="none"),
        *rows((
            ("micro_batch_size", "microbatch"), ("batch_accumulation_per_replica", "accumulation"), ("sequence_length", "seq"),
        ), prefix="tokens.", always=True),
        Key("optimizer.zero_stage", "zero", words={0: 0, 1: 1}, default=0, always=True),
        Key("optimizer.accumulate_grad_in_fp32", "grad_dtype", words={True: "fp32", False: "bf16"}, always=True),
        Key("optimizer.optimizer_factory.name", "optimizer", match=OPTIMIZERS),
        Key("optimizer.learning_rate_scheduler.learning_rate", "learning_rate"),
        Key("model.dtype", "half", words={"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}, default="bf16", always=True),
        Key("model.ddp_bucket_cap_mb", "bucket_mb", always=True),
    ),
    not_modelled=(
        r"^model\.model_config\.", r"^general\.|^logging|^checkpoints|^data_stages|^lighteval|^profiler|^tokenizer|^model\.(init|make)",
        r"^optimizer\.(optimizer_factory|learning|weight|clip)", r"train_steps|val_check|limit_|^fp8\.", r"tp_recompute_allgather|moe_layer_recompute",
        r"^(?!parallelism\.|tokens\.|optimizer\.zero)",
    ),
    derive=_derive_nanotron,
    restate=_restate_nanotron,
)  # fmt: skip

# Fields of a model that the settings state, and those that describe it without changing it.
NANOTRON_FIELDS = {
    "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "activation", "vocab", "vocab_multiple", "tied", "max_positions", "rope_theta", "positions",
    "norm", "norm_epsilon", "qkv_bias", "experts", "top_k", "expert_ffn", "router", "name", "kind", "published", "notes", "not_run", "allow_differences",
}  # fmt: skip


def _nanotron_model(model: Model) -> Settings:
    """The class of the model and its constants; raises if the model is not of the shape of Llama or of Qwen 2, which nanotron has."""
    missing = sorted(set(model.as_dict()) - NANOTRON_FIELDS)
    needed = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rope", "attention": "gqa"}
    missing += [f"{name} = {getattr(model, name)}" for name, value in needed.items() if getattr(model, name) != value]
    if missing:
        raise MeshwrightError(
            "MW-LAUNCH-005",
            f"nanotron has no settings for {', '.join(missing)} of {model.name}",
            why="It would train another model",
            fix="--for meshwright, or --stack nanotron to plan without settings",
        )
    kind = "qwen2" if model.qkv_bias or model.experts else "llama"
    constants = {f"is_{kind}_config": True, "rope_theta": float(model.rope_theta), "rms_norm_eps": model.norm_epsilon}
    biased = {C + "attention_bias": True} if model.qkv_bias else {}
    return {"general.project": model.name, **{C + name: value for name, value in constants.items()}, **biased}


NANOTRON = Framework(
    name="nanotron",
    title="nanotron",
    stack="nanotron",
    form="yaml",
    table=NANOTRON_TABLE,
    comment="nanotron settings: the sections that follow from the plan",
    model_settings=_nanotron_model,
    tried=("0.4",),
    tried_part="sections general, parallelism, tokens and model",
    package="git+https://github.com/huggingface/nanotron",
)

# --- OLMo-core: fields of a Python config, read and not written. Batches are counted in tokens: of all ranks, and of one rank's micro-batch.
#
# A value that is the name of a variable of the script, such as `sequence_length`, states nothing.

T, D = "train_module.", "train_module.dp_config."
VARIABLES = ("sequence_length", "bs_config.sequence_length", "bs_config.rank_microbatch_size_tokens", "bs_config.global_batch_size_tokens",
             "bs_config.cp_degree", "cp_config", "dp_config", "ac_config", -1)  # fmt: skip
DTYPES = (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"))


def _derive_olmo_core(facts: Facts) -> None:
    seq, tokens = facts.get("seq"), facts.get("microbatch_tokens")
    if seq and tokens:
        facts["microbatch"] = max(1, tokens // seq)
    if seq and facts.get("batch_tokens"):
        facts["batch"] = max(1, facts["batch_tokens"] // seq)
    facts["sp"] = facts.get("tp", 1) > 1
    facts.setdefault("sharding", "none")
    facts.setdefault("replicate", -1)  # hybrid sharding replicates over the ranks that the shards leave


OLMO_CORE_TABLE = Table(
    known_as="olmo-core",
    keys=(
        *rows((
            ("model.d_model", "model.hidden"), ("model.n_layers", "model.layers"), ("model.n_heads", "model.heads"),
            ("model.n_kv_heads", "model.kv_heads"), ("model.vocab_size", "model.vocab"), ("model.num_experts", "model.experts"),
            ("model.top_k", "model.top_k"), ("model.expert_hidden_size", "model.expert_ffn"),
            ("model.shared_expert_hidden_size", "model.shared_ffn"), ("SEQUENCE_LENGTH", "seq"), ("GLOBAL_BATCH_SIZE", "batch_tokens"),
            ("train_module.dp_config.name", "sharding", (("fsdp|hsdp", "parameters"), ("ddp", "none"))),
            ("train_module.dp_config.shard_degree", "shard"), ("train_module.dp_config.num_replicas", "replicate"),
            ("train_module.pp_config.schedule", "schedule", (("interleaved_1F1B", "interleaved"), ("1F1B|single", "1f1b"), ("zbv|ZBV", "zbv"))),
            ("train_module.float8_config.enabled", "eight", {True: "fp8", False: None}),
            ("train_module.optim.lr", "learning_rate"),
        )),
        Key("model.qk_norm", "model.qk_norm", words=SWITCH),
        *rows((
            ("train_module.max_sequence_length", "seq"), ("data_loader.global_batch_size", "batch_tokens"),
            ("train_module.rank_microbatch_size", "microbatch_tokens"), ("train_module.tp_config.degree", "tp"),
            ("train_module.pp_config.degree", "pp"),
        ), unset=VARIABLES),
        *rows((
            # Names of classes or variables: their fields are keys.
            ("dp_config", "sharding"),
            ("ac_config", "recompute"), ("ep_config", "ep"),
        ), prefix=T, match=((".", None),)),
        *rows((("param_dtype", "half"), ("reduce_dtype", "grad_dtype")), prefix=D, match=DTYPES),
        Key(T + "tp_config.enable_async", "overlap_tp", words=SWITCH, default=False),
        *rows((
            ("ep_config.degree", "ep"), ("cp_config.degree", "cp"),
            ("cp_config", "cp_kind", (("ulysses", "ulysses"), ("llama3", "all-gather"), ("zig_zag|ring", "ring"))),
        ), prefix=T, unset=VARIABLES),
        Key(T + "ac_config.mode", "recompute", match=(("full", "full"), ("budget|selected", "selective")), default="none"),
        *rows((("optim", "optimizer"), ("optim.type", "optimizer")), prefix=T, match=OPTIMIZERS),
    ),
    not_modelled=(
        r"max_grad_norm|MAX_DURATION|lb_loss|z_loss|rope_theta|layer_norm_eps|capacity_factor|reordered_norm|head_stride|label_ignore",
        r"float8_config$|tp_config$|pp_config$|^train_module\.scheduler",
        r"compile|use_flash|wrapping_strategy|prefetch_factor|activation_memory_budget|ac_config\.|float8_config\.|optim\.|attn_backend",
    ),
    derive=_derive_olmo_core,
)  # fmt: skip

OLMO_CORE = Framework(name="olmo-core", title="OLMo-core", stack="torch-compile", form="yaml", table=OLMO_CORE_TABLE)

# --- levanter (JAX): YAML, read and not written. `train_batch_size` is global; the parameters are sharded over the data axis where `fsdp_axis` is named.

M, L = "model.", "trainer."


def _derive_levanter(facts: Facts) -> None:
    facts.setdefault("sharding", "none")
    facts["sp"] = False
    facts["model.activation"] = "gelu" if str(facts.get("flavor", "")).startswith(("gpt2", "backpack")) else "swiglu"
    facts.pop("flavor", None)


LEVANTER_TABLE = Table(
    known_as="levanter",
    keys=(
        *rows((
            ("model.type", "flavor"), ("model.hidden_dim", "model.hidden"), ("model.num_layers", "model.layers"),
            ("model.num_heads", "model.heads"), ("model.num_kv_heads", "model.kv_heads"), ("model.intermediate_dim", "model.ffn"),
            ("model.vocab_size", "model.vocab"),
            (("model.n_routed_experts", "model.num_experts"), "model.experts"),
            ("model.num_experts_per_tok", "model.top_k"), ("model.seq_len", "seq"),
            (("max_train_length", "max_seq_len", "max_tune_length"), "seq"),
            ("trainer.replica_dcn_axis_size", "replicate"),
            ("trainer.mp", "half", (("c=bf|c=bfloat16|^bf", "bf16"), ("c=f16|^f16", "fp16"), ("f32", "fp32"))),
            ("trainer.quantization.fp8", "eight", {True: "fp8", False: None}),
            ("optimizer.learning_rate", "learning_rate"),
        )),
        Key("initialize_from_hf", "model", unset=(True, False)),
        Key(M + "tie_word_embeddings", "model.tied", words=SWITCH),
        *rows((("train_batch_size", "batch"), ("per_device_parallelism", "microbatch")), prefix=L, unset=(-1,)),
        Key(L + "model_axis_size", "tp", default=1),
        *rows((("fsdp_axis", "sharding"), ("parameter_axis_resources.embed", "sharding")), prefix=L, match=((".", "parameters"),)),
        Key(M + "gradient_checkpointing", "recompute", words={True: "full", False: "none", "nested": "full", "offload": "full"}, default="full"),
        Key("optimizer.type", "optimizer", match=(*OPTIMIZERS, ("sophia", "adamw"))),
    ),
    not_modelled=(
        r"num_train_steps|batch_axis|tensor_parallel_axes|axis_resources|use_hf|max_eval|^data\.|initialize_from|num_senses|sense_|hyena|checkpointer",
        r"flash_attention|attn_backend|scan_layers|upcast",
    ),
    derive=_derive_levanter,
)  # fmt: skip

LEVANTER = Framework(name="levanter", title="levanter", stack="levanter", form="yaml", table=LEVANTER_TABLE)
