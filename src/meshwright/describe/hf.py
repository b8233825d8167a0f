"""A Hugging Face `config.json` read into a Model, with the standard library alone.

A config is a flat table whose keys mean different things in different families: `intermediate_size` is the dense FFN
of Llama and the expert of Mixtral, Qwen2 has biases on Q, K and V without saying so, Gemma 2 has four norms a layer. So
each family is one small function below that turns its keys into the fields of a Model; nothing is guessed across them.

    model = read("config.json")                       or the folder that holds it
    model, notes = read_with_notes("config.json")     notes: what was assumed, and the keys nobody here understands

What cannot be held exactly (cross-attention, experts in an irregular pattern of layers) is refused, because a wrong
count is worse than none. `hf_config` does the reading and its bounds, `hf_router` reads how experts are chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.describe.hf_config import Config, load, shown
from meshwright.describe.hf_router import deepseek_router, softmax_router
from meshwright.describe.model import MOST_LAYERS, Model
from meshwright.errors import MeshwrightError, unknown

MOST_NOTES = 20
ALIASES = {"gemma3": "gemma3_text", "kimi_k2": "deepseek_v3"}
# The parts families share


def _decoder(c: Config, tied: bool = False) -> dict[str, Any]:
    """What almost every family says in the same words: gated FFN, RMSNorm, rotary positions."""
    heads = c.number("num_attention_heads")
    return {
        "hidden": c.number("hidden_size"),
        "layers": c.number("num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": c.number("num_key_value_heads", heads),
        "head_dim": c.number("head_dim", 0),
        "ffn": c.number("intermediate_size"),
        "activation": _gated(c),
        "vocab": c.number("vocab_size"),
        "max_positions": c.number("max_position_embeddings", 0, least=0),
        "tied": c.flag("tie_word_embeddings", tied),
        "dropout": c.drops,
        "causal": not c.flag("use_bidirectional_attention", False),
    }


def _gated(c: Config) -> str:
    name = c.word("hidden_activation", c.word("hidden_act", "silu"))
    if name not in ("silu", "swish") and not name.startswith("gelu"):
        c.notes.append(f"activation {shown(name)} is counted as SwiGLU")
    return "geglu" if name.startswith("gelu") else "swiglu"


def _plain(c: Config, key: str) -> str:
    name = c.word(key, "gelu")
    if not name.startswith(("gelu", "relu")):
        c.notes.append(f"activation {shown(name)} is counted as GELU")
    return "relu" if name.startswith("relu") else "gelu"


def _attention_bias(c: Config, default: bool = False) -> dict[str, bool]:
    bias = c.flag("attention_bias", default)
    return {"qkv_bias": bias, "out_bias": bias}


def _window(c: Config, full: list[bool]) -> dict[str, int]:
    """Sliding-window attention. `full`: the layers that see all positions, unless `layer_types` tells them."""
    width = c.number("sliding_window", 0, least=0)
    kinds = c.many("layer_types", str)
    if kinds is not None:
        full = [kind == "full_attention" for kind in kinds[:MOST_LAYERS]]
    if not width or all(full):
        return {}
    every = full.index(True) + 1 if any(full) else 0
    if full != (_every(every, len(full)) if every else [False] * len(full)):
        every = max(2, round(len(full) / sum(full)))
        c.notes.append(f"{sum(full)} of {len(full)} layers see all positions: taken as every {every}th")
    return {"window": width, "full_every": every}


def _every(stride: int, layers: int) -> list[bool]:
    return [(i + 1) % stride == 0 for i in range(layers)]


def _qwen_window(c: Config, full: list[bool]) -> dict[str, int]:
    return _window(c, full) if c.flag("use_sliding_window", False) else {}


def _expert_layers(c: Config, has_experts: list[bool]) -> dict[str, int]:
    """Dense first layers and the stride of the layers with experts, or a refusal where there is no such pattern."""
    where = [i for i, yes in enumerate(has_experts) if yes]
    strides = {where[1] - where[0]} if len(where) > 1 else {1, where[0] + 1}
    for every in strides:
        dense = where[0] - every + 1
        if dense >= 0 and where == list(range(where[0], len(has_experts), every)):
            return {"dense_layers": dense, "moe_every": every}
    what = f"the layers with experts of this {c.family} config follow no fixed stride"
    raise MeshwrightError(
        "MW-HF-007", what, why=f"They are {shown(where)}", valid=["every n-th after the first dense ones"]
    )


# One function a family


def _llama(c: Config) -> dict[str, Any]:
    return _decoder(c) | _attention_bias(c) | {"ffn_bias": c.flag("mlp_bias", False)}


def _mistral(c: Config) -> dict[str, Any]:
    fields = _decoder(c)
    return fields | _window(c, [False] * fields["layers"])


def _qwen2(c: Config) -> dict[str, Any]:
    fields = _decoder(c)
    return fields | {"qkv_bias": True} | _qwen_window(c, _first_full(c, fields["layers"]))


def _first_full(c: Config, layers: int) -> list[bool]:
    first = c.number("max_window_layers", 28, least=0)
    return [i < first for i in range(layers)]


def _qwen3(c: Config) -> dict[str, Any]:
    fields = _decoder(c)
    full = _first_full(c, fields["layers"]) if c.family == "qwen3" else [False] * fields["layers"]
    return fields | _attention_bias(c) | {"qk_norm": True} | _qwen_window(c, full)


def _qwen_experts(c: Config, fields: dict[str, Any]) -> dict[str, Any]:
    experts = c.number("num_experts", c.number("num_local_experts", 0, least=0), least=0)
    step, dense = c.number("decoder_sparse_step", 1), set(c.many("mlp_only_layers", int) or [])
    layers = [bool(experts) and i not in dense and (i + 1) % step == 0 for i in range(fields["layers"])]
    width, top_k = c.number("moe_intermediate_size"), c.number("num_experts_per_tok")
    router = softmax_router(c, top_k, max(1, sum(layers)), c.flag("norm_topk_prob", False))
    if not any(layers):
        return {}
    return {"experts": experts, "top_k": top_k, "expert_ffn": width} | router | _expert_layers(c, layers)


def _qwen2_moe(c: Config) -> dict[str, Any]:
    fields = _decoder(c)
    shared = c.number("shared_expert_intermediate_size", 0, least=0)
    experts = _qwen_experts(c, fields)
    if experts:
        experts |= {"shared_gate": True} | ({"shared_experts": 1, "shared_ffn": shared} if shared else {})
    full = [i % 2 == 1 or not yes for i, yes in enumerate(_first_full(c, fields["layers"]))]
    return fields | {"qkv_bias": c.flag("qkv_bias", True)} | experts | _qwen_window(c, full)


def _qwen3_moe(c: Config) -> dict[str, Any]:
    fields = _qwen3(c)
    return fields | _qwen_experts(c, fields)


def _mixtral(c: Config) -> dict[str, Any]:
    fields = _decoder(c)
    experts = {"experts": c.number("num_local_experts"), "top_k": c.number("num_experts_per_tok")}
    experts |= softmax_router(c, experts["top_k"], fields["layers"], normalise=True)
    return fields | experts | {"expert_ffn": fields["ffn"], "ffn": 0} | _window(c, [False] * fields["layers"])


def _deepseek(c: Config) -> dict[str, Any]:
    """Multi-head latent attention; the first layers dense, the others with routed and shared experts."""
    fields = _decoder(c) | _attention_bias(c) | {"kv_heads": 0, "head_dim": 0, "attention": "mla"}
    fields |= {
        "q_rank": c.number("q_lora_rank", 0),
        "kv_rank": c.number("kv_lora_rank"),
        "nope_dim": c.number("qk_nope_head_dim"),
        "rope_dim": c.number("qk_rope_head_dim", least=0),
        "value_dim": c.number("v_head_dim"),
    }
    first, stride = c.number("first_k_dense_replace", 0, least=0), c.number("moe_layer_freq", 1)
    layers = [i >= first and i % stride == 0 for i in range(fields["layers"])]
    experts = c.number("n_routed_experts", 0, least=0)
    width, top_k = c.number("moe_intermediate_size", 0, least=0), c.number("num_experts_per_tok", 0, least=0)
    shared = c.number("n_shared_experts", 0, least=0)
    if mtp := c.number("num_nextn_predict_layers", 0, least=0):
        c.notes.append(f"{mtp} multi-token-prediction layer{'s' * (mtp > 1)} not counted")
    router = deepseek_router(c, top_k)
    if not experts or not any(layers):
        return fields
    fields |= router | {"experts": experts, "top_k": top_k, "expert_ffn": width, "shared_experts": shared}
    return fields | {"balance_bias": c.family == "deepseek_v3"} | _expert_layers(c, layers)


def _gpt2(c: Config) -> dict[str, Any]:
    if c.flag("add_cross_attention", False):
        raise MeshwrightError("MW-HF-007", "add_cross_attention = true is not a decoder alone", valid=["false"])
    hidden = c.number("n_embd")
    return {
        "hidden": hidden,
        "layers": c.number("n_layer", most=MOST_LAYERS),
        "heads": c.number("n_head"),
        "ffn": c.number("n_inner", 4 * hidden),
        "activation": _plain(c, "activation_function"),
        "vocab": c.number("vocab_size"),
        "max_positions": c.number("n_positions"),
        "positions": "learned",
        "tied": c.flag("tie_word_embeddings", True),
        "dropout": c.drops,
        "norm": "layernorm",
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
    }


def _gpt_neox(c: Config) -> dict[str, Any]:
    fields = _decoder(c) | {"kv_heads": 0, "head_dim": 0, "activation": _plain(c, "hidden_act")}
    return fields | _attention_bias(c, True) | {"norm": "layernorm", "ffn_bias": True}


def _gemma(c: Config) -> dict[str, Any]:
    return _decoder(c, tied=True) | _attention_bias(c)


def _gemma2(c: Config) -> dict[str, Any]:
    fields = _gemma(c) | {"norms_per_layer": 4}
    return fields | _window(c, _every(2, fields["layers"]))


def _gemma3(c: Config) -> dict[str, Any]:
    fields = _gemma(c) | {"norms_per_layer": 4, "qk_norm": True}
    every = c.number("sliding_window_pattern", c.number("_sliding_window_pattern", 6))
    return fields | _window(c, _every(every, fields["layers"]))


def _gpt_oss(c: Config) -> dict[str, Any]:
    fields = _decoder(c) | _attention_bias(c, True) | {"sinks": True, "router_bias": True, "ffn_bias": True}
    top_k = c.number("num_experts_per_tok", c.number("experts_per_token", 4))
    experts = {"experts": c.number("num_local_experts"), "top_k": top_k, "expert_ffn": fields["ffn"], "ffn": 0}
    experts |= softmax_router(c, top_k, fields["layers"], normalise=True)
    return fields | experts | _window(c, _every(2, fields["layers"]))


FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama, "mistral": _mistral, "phi3": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe, "mixtral": _mixtral, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "gpt2": _gpt2,
    "gpt_neox": _gpt_neox, "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3, "gpt_oss": _gpt_oss,
}  # fmt: skip


# Reading


def read(path: str | Path, name: str = "") -> Model:
    """The model a `config.json`, or a folder that holds one, describes."""
    return read_with_notes(path, name)[0]


def read_with_notes(path: str | Path, name: str = "") -> tuple[Model, list[str]]:
    """The model, and what was assumed or not understood on the way."""
    return interpret(load(path), name)


def interpret(data: dict[str, Any], name: str = "") -> tuple[Model, list[str]]:
    """A config already parsed."""
    notes: list[str] = []
    text = data.get("text_config")
    if isinstance(text, dict):
        notes.append("only the language model is counted; towers for images or sound are left out")
        outer = {k: v for k, v in data.items() if k in ("tie_word_embeddings", "model_type")}
        data = {**outer, **text}
    family = _family(data)
    config = Config(family, data, notes)
    fields = FAMILIES[family](config)
    notes += config.unread()
    if len(notes) > MOST_NOTES:
        notes = [*notes[:MOST_NOTES], f"and {len(notes) - MOST_NOTES} more"]
    return Model(**fields, name=name or _name(data, family)), notes


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
    raise unknown("MW-HF-004", "model_type", str(kind or first), sorted({*FAMILIES, *ALIASES}))


def _name(data: dict[str, Any], family: str) -> str:
    given = data.get("_name_or_path")
    last = given.rstrip("/").rsplit("/", 1)[-1] if isinstance(given, str) else ""
    return last if re.fullmatch(r"[\w.+-]{1,60}", last, re.ASCII) and last.strip(".") else family
