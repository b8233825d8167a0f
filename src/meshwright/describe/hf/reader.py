"""From a parsed config to a Model: find the family, read its fields, and note what was assumed or not understood.

Encoders, encoder-decoders and layers of unknown kinds are refused with what to do instead: a wrong count is worse than none.
"""

import re
from pathlib import Path
from typing import Any

from meshwright.describe.hf.config import HfConfig, load, shown
from meshwright.describe.hf.families import ALIASES, FAMILIES
from meshwright.describe.model import Model
from meshwright.describe.shape_parts import NEED_ORIGINAL
from meshwright.describe.variants import ATTENTIONS
from meshwright.errors import MeshwrightError

# --- Rotary positions of a Hugging Face config, read into `rope_theta`, `rope_dim` and `[model.rope]`.
#
# Newer files have a table `rope_parameters`; older ones have `rope_theta` at the top level and the scaling in `rope_scaling`, with the key
# `type` instead of `rope_type`. A value in the table has priority over the same key at the top level, except
# `original_max_position_embeddings`, where the top level has priority.

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
OLD_KINDS = {"su": "longrope"}
# Defaults of the configuration classes, where they differ from those of a Model.
THETA = {
    "mixtral": 1e6,
    "minimax": 1e6,
    "gpt_oss": 1.5e5,
    "gemma3_text": 1e6,
    "olmo3": 5e5,
    "llama4_text": 5e5,
    "smollm3": 2e6,
    "cohere": 5e5,
    "minimax_m2": 5e6,
    "gemma3n_text": 1e6,
}
TABLE = {
    "gpt_oss": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
}
PARTIAL = {
    "gpt_neox": 0.25,
    "glm4_moe": 0.5,
    "phi3": 1.0,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "stablelm"), 0.25),
    **dict.fromkeys(("glm", "glm4", "phi"), 0.5),
    "minimax_m2": 1.0,
}  # families that can rotate a part of each head
INTERLEAVED = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm", "glm4", "cohere", "cohere2", "gptj", "codegen", "llama4_text",
)  # fmt: skip
# Base of windowed layers, which are not scaled: the default of the class, or 0 for the base of the other layers.
WINDOW_THETA = {"gemma3_text": 1e4, "olmo3": 0.0}
POSITIONS = {
    "llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768, "mixtral": 131072,
    "deepseek_v2": 2048, "deepseek_v3": 4096, "deepseek_v32": 4096, "gpt_oss": 131072,
}  # fmt: skip


def rope_parameters(c: HfConfig) -> dict[str, Any]:
    """The table of rotary settings, or what the family's class assumes without one."""
    for key in ("rope_scaling", "rope_parameters"):
        table = c.get(key)
        if isinstance(table, dict) and table:
            inner = table.get("full_attention")
            return inner if isinstance(inner, dict) else table
    return TABLE.get(c.family, {})


def rope_kind(c: HfConfig) -> str:
    """The kind of scaling; a word that is not one of `KINDS` is not run."""
    table = rope_parameters(c)
    kind = table.get("rope_type") or table.get("type") or "default"
    return OLD_KINDS.get(str(kind), str(kind))


def window_parameters(c: HfConfig) -> dict[str, Any]:
    """The table of rotary settings of windowed layers, in families that have one for each kind of layer."""
    table = c.get("rope_parameters")
    inner = table.get("sliding_attention") if isinstance(table, dict) else None
    return inner if isinstance(inner, dict) and c.family in WINDOW_THETA else {}


def window_rope_kind(c: HfConfig) -> str:
    return str(window_parameters(c).get("rope_type") or "")


def window_base(c: HfConfig, fields: dict[str, Any], out: dict[str, Any]) -> dict[str, float]:
    """The base of windowed layers, if they rotate in another way than the others."""
    if c.family not in WINDOW_THETA or not fields.get("window"):
        return {}
    main = out.get("rope_theta", 10_000.0)
    own = HfConfig(c.family, window_parameters(c), c.notes).decimal("rope_theta", 0.0)
    base = own or c.decimal("rope_local_base_freq", WINDOW_THETA[c.family]) or main
    return {} if base == main and "rope" not in out else {"window_rope_theta": base}


def rotary(c: HfConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a model that has the other `fields`."""
    if fields.get("positions", "rope") != "rope":
        return {}
    table = HfConfig(c.family, rope_parameters(c), c.notes)
    out: dict[str, Any] = {}
    theta = table.data.get("rope_theta") or c.data.get("rope_theta") or c.data.get("rotary_emb_base")
    theta = THETA.get(c.family) if theta is None else theta
    if isinstance(theta, int | float) and not isinstance(theta, bool) and 1 < theta < 1e15:
        out["rope_theta"] = float(theta)
    if c.family in PARTIAL:
        out |= _part_of_head(c, table, fields)
    kind = rope_kind(c)
    options = _scaling(c, table, kind, fields, out) if kind in KINDS and kind != "default" else {}
    if c.family in INTERLEAVED and c.flag("rope_interleave", True):
        options["interleaved"] = True
    out |= {"rope": options} if options else {}
    return out | window_base(c, fields, out)


def _part_of_head(c: HfConfig, table: HfConfig, fields: dict[str, Any]) -> dict[str, int]:
    share = c.decimal("partial_rotary_factor", c.decimal("rotary_pct", PARTIAL[c.family]))
    share = table.decimal("partial_rotary_factor", share)
    width = fields["head_dim"] or fields["hidden"] // fields["heads"]
    rotated = int(width * share)
    return {"rope_dim": rotated} if 0 < rotated < width else {}


def _scaling(c: HfConfig, table: HfConfig, kind: str, fields: dict[str, Any], out: dict[str, Any]) -> dict[str, Any]:
    """The options of a kind of scaling that differ from their defaults."""
    options: dict[str, Any] = {"kind": kind}
    positions = fields.get("max_positions", 0)
    if kind in NEED_ORIGINAL and not positions and c.family in POSITIONS:
        positions = out["max_positions"] = POSITIONS[c.family]
        c.notes.append(f"max_position_embeddings is not given: {positions}, the default of {c.family}, is used")
    original = table.number("original_max_position_embeddings", 0, least=0)
    original = c.number("original_max_position_embeddings", original, least=0)
    if kind != "dynamic" and original and original != positions:
        options["original_positions"] = original
    ratio = positions / original if original and kind in ("yarn", "longrope") else 1.0
    options["factor"] = table.decimal("factor", ratio)
    if kind == "llama3":
        options |= {
            key: table.decimal(key, 0.0) for key in ("low_freq_factor", "high_freq_factor") if key in table.data
        }
    if kind == "yarn":
        yarn_fields = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        options |= {key: table.decimal(key, 0.0) for key in yarn_fields if table.data.get(key)}
        options |= {} if table.flag("truncate", True) else {"truncate": False}
    if kind == "longrope":
        options |= {key: table.decimals(key) for key in ("short_factor", "long_factor")}
    if kind in ("yarn", "longrope") and table.data.get("attention_factor"):
        options["attention_factor"] = table.decimal("attention_factor", 0.0)
    return options


# --- What a config says about the model's mathematics that our transformer computes in another way.
#
# Costs do not depend on these, so such a model is planned and estimated as it is. `train` and `verify` run our transformer, so they refuse
# such a model (MW-BUILD-005) unless `--allow-differences` names the entry: no difference in the mathematics is silent. An entry is
# "name: what it is (value)"; the name is the config's key where there is one.
# Everything else that changes the mathematics is a field of the Model and is run as the config says: tests compare the logits of every family
# that has a table of weights (`models.hf.tables`) with those of Transformers.

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
# Defaults of the configuration classes, where they differ from that of a Model, 1e-5.
EPSILON = dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32",
     "gemma", "gemma2", "qwen3_next", "jamba", "deepseek_v4",
     "gemma3_text", "granite", "smollm3", "minimax_m2", "qwen3_5_text", "qwen3_5_moe_text", "gemma3n_text"), 1e-6,
) | {"glm": 1.5625e-7, "glm4": 1.5625e-7}  # fmt: skip
# A key that changes the mathematics unless it has this value, and what it does. One that a family's function reads is a field of the Model.
NEUTRAL: dict[str, tuple[Any, str]] = {
    "attn_logit_softcapping": (None, "soft-capping of attention scores"),
    "final_logit_softcapping": (None, "soft-capping of the logits"),
    "use_parallel_residual": (False, "attention and FFN in parallel"),
    "embedding_multiplier": (1.0, "scaled embeddings"),
    "residual_multiplier": (1.0, "scaled residuals"),
    "logits_scaling": (1.0, "scaled logits"),
    "attention_chunk_size": (None, "attention within chunks"),
    "attn_temperature_tuning": (False, "attention temperature by position"),
    "no_rope_layer_interval": (0, "layers without rotary positions"),
    "mlp_layernorm_in_ffn": (False, "a norm inside the FFN"),
    "router_jitter_noise": (0.0, "noise on the input of the experts during training"),
}


def not_run(c: HfConfig) -> list[str]:
    """List the parts of the original model, with their values, that `train` and `verify` compute differently."""
    entries = list(c.differences)
    for key, (neutral, what) in NEUTRAL.items():
        value = c.data.get(key) if key not in c.read_keys else neutral
        c.covered(key)
        if value is not None and value is not False and value != neutral:
            entries.append(f"{key}: {what} ({shown(value)})")
    if (kind := rope_kind(c)) not in KINDS:
        entries.append(f"rope_type: scaled rotary positions ({shown(kind)})")
    if window_rope_kind(c) not in ("", "default", kind):
        entries.append(f"window_rope_type: scaled rotary positions of windowed layers ({shown(window_rope_kind(c))})")
    return entries


def numbers(c: HfConfig) -> dict[str, float]:
    """Epsilon of the norms and dropout rates, as the config or its class gives them."""
    fields: dict[str, float] = {}
    if c.family in EPSILON:
        fields["norm_epsilon"] = EPSILON[c.family]
    for key in EPSILONS:
        value = c.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
            fields["norm_epsilon"] = float(value)
            break
    attention, residual, embedding = c.rate("attention"), c.rate("residual"), c.rate("embedding")
    if attention:
        fields["attention_dropout"] = attention
    if residual:
        fields["dropout_rate"] = residual
    if embedding is not None and embedding != (residual or 0.0):
        fields["embedding_dropout"] = embedding
    return fields


# --- Whether two models compute the same function of the same weights, whatever their names and however their fields are written.
#
# Fields that only training uses (dropout, balancing losses, capacity) and what padding adds may differ: a folder of weights
# can be trained with other values, and a trained model has no such values. Fields that have a derived default (`kv_heads = 0`)
# are compared by their meaning.

FREE = {
    "name", "published", "notes", "not_run", "allow_differences", "vocab_multiple", "dropout", "dropout_rate", "embedding_dropout",
    "attention_dropout", "adapter", "given_parameters", "given_flops", "given_activations",
}  # fmt: skip
BY_LAYER = (  # compared layer by layer, or option by option
    "moe_every", "dense_layers", "pattern", "full_every", "full_layers", "nope_every", "nope_layers", "router", "rope",
)  # fmt: skip
FREE_IN_ROUTER = {"aux", "aux_scope", "z", "balance_rate", "capacity"}


def different_fields(a: Model, b: Model) -> dict[str, tuple[Any, Any]]:
    """Fields whose values make two models different functions, with both values."""
    left, right = canonical(a), canonical(b)
    return {
        field: (left.get(field), right.get(field)) for field in {**left, **right} if left.get(field) != right.get(field)
    }


def canonical(model: Model) -> dict[str, Any]:
    """The fields that decide what a model computes, each written in one way."""
    fields = {name: value for name, value in model.model_dump().items() if name not in FREE}
    for name in BY_LAYER:
        del fields[name]
    kind, expert = ATTENTIONS[model.attention], bool(model.experts)
    fields |= {
        "kv_heads": model.kv_groups,
        "head_dim": model.head_width if kind.reads("head_dim") else 0,
        "ffn": model.ffn if model.has_part("ffn") else 0,
        "expert_ffn": model.expert_width if expert else 0,
        "shared_ffn": model.shared_width if expert else 0,
        "latent_norm_epsilon": (model.latent_norm_epsilon or model.norm_epsilon)
        if kind.reads("latent_norm_epsilon")
        else 0.0,
        "attention_scale": model.attention_scale or model.key_width**-0.5,
        "layer_kinds": model.layer_kinds,
        "window": model.window if model.full_count < model.attention_count else 0,
        "layers with a window": tuple(i for i in range(model.layers) if not model.sees_all(i)),
        "layers with rotary positions": tuple(i for i in range(model.layers) if model.rotates(i)),
        "norm_parameters": model.norm_affine,
        "window_kind": model.window_kind if model.full_count < model.attention_count else "sliding",
        "qk_norm_width": model.qk_norm_width if model.qk_norm else "head",
        "temperature_floor": model.temperature_floor if model.temperature_scale else 0,
    }
    return fields | routing(model) | rotation(model)


def routing(model: Model) -> dict[str, Any]:
    """Return the fields that decide how tokens choose experts."""
    if not model.experts:
        return {}
    fields, options = model.router.model_dump(), model.router
    fields["normalise"] = model.top_k > 1 if options.normalise is None else options.normalise
    fields["groups_kept"] = options.groups_kept or options.groups
    fields["score"] = options.score or ("sigmoid" if model.balance_bias else "softmax")
    return {f"router.{name}": value for name, value in fields.items() if name not in FREE_IN_ROUTER}


def rotation(model: Model) -> dict[str, Any]:
    """Rotary positions; the number of positions matters where frequencies are scaled by it, and where positions are learned."""
    if model.positions != "rope":
        return {"rope_theta": None, "rope_dim": None}
    options = model.rope
    out: dict[str, Any] = {"rope_dim": model.rotated_width, "max_positions": None}
    if model.window_rope_theta == model.rope_theta and options.kind == "default":
        out["window_rope_theta"] = 0.0
    compared = {"kind", "interleaved"} if options.kind == "default" else set(type(options).model_fields)
    fields = {name: value for name, value in options.model_dump().items() if name in compared}
    if options.kind in NEED_ORIGINAL:
        fields["original_positions"] = options.original_positions or model.max_positions
    return out | {f"rope.{name}": value for name, value in fields.items()}


MOST_NOTES = 20
ENCODERS = {
    "bert", "roberta", "distilbert", "deberta-v2", "electra", "modernbert", "xlm-roberta", "vit", "clip", "siglip", "dinov2",
}  # fmt: skip
NOT_DESCRIBED = {
    "mamba", "falcon_mamba", "zamba", "zamba2", "falcon_h1", "granitemoehybrid", "recurrent_gemma", "rwkv", "lfm2",
    "t5", "mt5", "umt5", "bart", "mbart", "pegasus", "whisper",
}  # fmt: skip


def read(path: str | Path, name: str = "") -> Model:
    """The model that a `config.json`, or a folder that holds one, describes."""
    return interpret(load(path), name)


def interpret(data: dict[str, Any], name: str = "") -> Model:
    """A config already parsed. `Model.notes` says what was assumed, `Model.not_run` what `train` computes differently."""
    notes: list[str] = []
    family, data = _language_model(data, notes)
    config = HfConfig(family, data, notes)
    fields = FAMILIES[family](config)
    fields |= rotary(config, fields) | numbers(config)
    differences = not_run(config)
    notes += config.unread()
    if fields.get("balance_bias"):
        notes.append("the routers' balancing biases are counted; Transformers has them as buffers, not parameters")
    if len(notes) > MOST_NOTES:
        notes = [*notes[:MOST_NOTES], f"and {len(notes) - MOST_NOTES} more"]
    fields |= {"notes": tuple(notes), "not_run": tuple(differences), "dropout": config.drops}
    return Model(**fields, name=name or _name(data, family))


def family_of(data: dict[str, Any]) -> str:
    """The family of a config already parsed: the key of `FAMILIES`."""
    return _language_model(data, [])[0]


def _language_model(data: dict[str, Any], notes: list[str]) -> tuple[str, dict[str, Any]]:
    """The family and the keys of the language model, which a multi-modal config has in a nested table or at its top level."""
    text = data.get("text_config")
    towers = [key for key in data if re.fullmatch(r"(vision|audio|image)\w*_config", key)]
    if isinstance(text, dict) or towers:
        notes.append("only the language model is counted; towers for images or sound are left out")
    if isinstance(text, dict):
        outer = {k: v for k, v in data.items() if k in ("tie_word_embeddings", "model_type")}
        data = {**outer, **text}
    data = {k: v for k, v in data.items() if k not in towers}
    return _family(data), data


def _family(data: dict[str, Any]) -> str:
    """By `model_type`, else by the class named in `architectures`."""
    kind = data.get("model_type")
    if isinstance(kind, str) and ALIASES.get(kind, kind) in FAMILIES:
        return ALIASES.get(kind, kind)
    classes = data.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    if kind is None and first:
        stem = re.sub(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|Model)$", "", first[:100]).lower()
        for family in (*FAMILIES, *ALIASES):
            if family.replace("_", "") == stem:
                return ALIASES.get(family, family)
    if isinstance(kind, str) and (spelled := kind.lower().replace("-", "_")) in {*FAMILIES, *ALIASES}:
        raise MeshwrightError("MW-HF-004", f"model_type {kind} is not known", fix=f'"model_type": "{spelled}"')
    raise _cannot_be_described(str(kind or first or "(none)")[:60])


def _cannot_be_described(kind: str) -> MeshwrightError:
    """Build the error for a family that is not read: how to write the model. It never suggests another family: its counts would differ."""
    if kind in ENCODERS:
        return MeshwrightError(
            "MW-HF-008",
            f"model_type {kind} cannot be read",
            why="Only decoders are read from a config; an encoder of plain layers can be written as a [model] table",
            fix='a [model] table in a plan file, with hidden, layers, heads, ffn, vocab, activation = "gelu" and causal = false',
        )
    why = (
        "It has layers that a [model] table cannot describe: shared, parallel, with cross-attention, or with a mixer that is not known"
        if kind in NOT_DESCRIBED
        else "Its parameters would have to be counted as its class builds them, which is known of the families in docs/hugging-face.md"
    )
    plain = (
        ""
        if kind in NOT_DESCRIBED
        else "a [model] table in a plan file, with hidden, layers, heads, kv_heads, ffn, vocab and activation; or "
    )
    counts = 'a [model] table with kind = "counts", given_parameters, given_flops and given_activations (data parallelism only)'
    code = "MW-HF-008" if kind in NOT_DESCRIBED else "MW-HF-004"
    return MeshwrightError(code, f"model_type {kind} cannot be read", why=why, fix=plain + counts)


def _name(data: dict[str, Any], family: str) -> str:
    name = data.get("_name_or_path")
    last = name.rstrip("/").rsplit("/", 1)[-1] if isinstance(name, str) else ""
    return last if re.fullmatch(r"[\w.+-]{1,60}", last, re.ASCII) and last.strip(".") else family
