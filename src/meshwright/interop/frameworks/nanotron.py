"""nanotron, OLMo-core and Levanter: trainers with one settings file each."""

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.interop.keys import Facts, Settings
from meshwright.interop.tables import framework

# --- nanotron: YAML with `parallelism`, `tokens`, `optimizer` and the shape of the model. dp × tp × pp × cp must equal the number of GPUs.

C = "model.model_config."


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


NANOTRON = framework(
    "nanotron",
    not_modelled=(
        r"^model\.model_config\.", r"^general\.|^logging|^checkpoints|^data_stages|^lighteval|^profiler|^tokenizer|^model\.(init|make)",
        r"^optimizer\.(optimizer_factory|learning|weight|clip)", r"train_steps|val_check|limit_|^fp8\.", r"tp_recompute_allgather|moe_layer_recompute",
        r"^(?!parallelism\.|tokens\.|optimizer\.zero)",
    ),
    derive=_derive_nanotron,
    restate=_restate_nanotron,
    model_settings=_nanotron_model,
)  # fmt: skip

# --- OLMo-core: fields of a Python config, read and not written. Batches are counted in tokens: of all ranks, and of one rank's micro-batch.
#
# A value that is the name of a variable of the script, such as `sequence_length`, states nothing.


def _derive_olmo_core(facts: Facts) -> None:
    seq, tokens = facts.get("seq"), facts.get("microbatch_tokens")
    if seq and tokens:
        facts["microbatch"] = max(1, tokens // seq)
    if seq and facts.get("batch_tokens"):
        facts["batch"] = max(1, facts["batch_tokens"] // seq)
    facts["sp"] = facts.get("tp", 1) > 1
    facts.setdefault("sharding", "none")
    facts.setdefault("replicate", -1)  # hybrid sharding replicates over the ranks that the shards leave


OLMO_CORE = framework(
    "olmo-core",
    not_modelled=(
        r"max_grad_norm|MAX_DURATION|lb_loss|z_loss|rope_theta|layer_norm_eps|capacity_factor|reordered_norm|head_stride|label_ignore",
        r"float8_config$|tp_config$|pp_config$|^train_module\.scheduler",
        r"compile|use_flash|wrapping_strategy|prefetch_factor|activation_memory_budget|ac_config\.|float8_config\.|optim\.|attn_backend",
    ),
    derive=_derive_olmo_core,
)  # fmt: skip

# --- levanter (JAX): YAML, read and not written. `train_batch_size` is global; the parameters are sharded over the data axis where `fsdp_axis` is named.


def _derive_levanter(facts: Facts) -> None:
    facts.setdefault("sharding", "none")
    facts["sp"] = False
    facts["model.activation"] = "gelu" if str(facts.get("flavor", "")).startswith(("gpt2", "backpack")) else "swiglu"
    facts.pop("flavor", None)


LEVANTER = framework(
    "levanter",
    not_modelled=(
        r"num_train_steps|batch_axis|tensor_parallel_axes|axis_resources|use_hf|max_eval|^data\.|initialize_from|num_senses|sense_|hyena|checkpointer",
        r"flash_attention|attn_backend|scan_layers|upcast",
    ),
    derive=_derive_levanter,
)  # fmt: skip
