"""What families of Hugging Face configs have in common: decoder shape, activation, biases, windows, layers with experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.describe.hf.config import Config, shown
from meshwright.describe.shape_checks import MOST_LAYERS
from meshwright.errors import MeshwrightError
from meshwright.units import counted

EXACT_GELU, TANH_GELU = ("gelu", "gelu_python"), ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh")
GATED = {"silu": "swiglu", "swish": "swiglu", "swiglu": "swiglu", "quick_gelu": "swiglu"}
GATED |= dict.fromkeys(EXACT_GELU, "geglu") | dict.fromkeys(TANH_GELU, "geglu-tanh")
PLAIN = {"relu": "relu", "relu2": "relu2", "quick_gelu": "quick-gelu"}
PLAIN |= dict.fromkeys(EXACT_GELU, "gelu") | dict.fromkeys(TANH_GELU, "gelu-tanh")
QUICK_GELU = 1.702
WITHOUT_LAYER_TYPES = ("mistral", "mixtral", "phi3", "qwen3_moe")  # their window is that of all layers


def decoder(
    c: Config, tied: bool = False, activation: str = "silu", gated: bool = True, ffn: int = 0
) -> dict[str, Any]:
    """The fields almost every family spells the same way: FFN, RMSNorm, rotary positions.

    `tied` and `activation` are the defaults of the family's configuration class; `gated`: whether its FFN has a gate;
    `ffn`: the default width of the FFN in units of the hidden width, if the class has one.
    """
    heads, hidden = c.number("num_attention_heads"), c.number("hidden_size")
    # A gate of quick GELU, g·sigmoid(1.702·g), is SwiGLU with another factor.
    quick = gated and "quick_gelu" in (c.data.get("hidden_activation", c.data.get("hidden_act")), activation)
    return ({"swiglu_alpha": QUICK_GELU} if quick else {}) | {
        "hidden": hidden,
        "layers": c.number("num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": c.number("num_key_value_heads", heads),
        "head_dim": c.number("head_dim", 0),
        "ffn": c.number("intermediate_size", ffn * hidden or None),
        "activation": gated_activation(c, activation) if gated else plain_activation(c, "hidden_act", activation),
        "vocab": c.number("vocab_size"),
        "max_positions": c.number("max_position_embeddings", 0, least=0),
        "tied": c.flag("tie_word_embeddings", tied),
        "causal": not c.flag("use_bidirectional_attention", False),
    }


def gated_activation(c: Config, default: str) -> str:
    """The activation of a gated FFN. Gemma writes `hidden_activation`, and its files may carry an older `hidden_act` too."""
    name = c.word("hidden_activation", c.word("hidden_act", default))
    return GATED[name] if name in GATED else _unknown_activation(c, name, tuple(GATED))


def plain_activation(c: Config, key: str, default: str = "gelu") -> str:
    """The activation of an FFN without a gate."""
    name = c.word(key, default)
    return PLAIN[name] if name in PLAIN else _unknown_activation(c, name, tuple(PLAIN))


def _unknown_activation(c: Config, name: str, valid: tuple[str, ...]) -> str:
    raise MeshwrightError(
        "MW-HF-006",
        f"activation {shown(name)} of this {c.family} config is not known",
        why="It would change the model's mathematics",
        valid=valid,
    )


def attention_bias(c: Config, default: bool = False) -> dict[str, bool]:
    bias = c.flag("attention_bias", default)
    return {"qkv_bias": bias, "out_bias": bias}


def sliding_window(c: Config, full: list[bool], width: int | None = None) -> dict[str, Any]:
    """Window, and the layers without one: a stride, or a list. `full` marks the layers that see all positions; `layer_types`
    overrides it, except in classes that do not read it."""
    width = c.number("sliding_window", 0, least=0) if width is None else width
    kinds = c.many("layer_types", str)
    if kinds is not None and c.family in WITHOUT_LAYER_TYPES:
        c.notes.append(f"layer_types is ignored, as by the class of {c.family}")
    elif kinds is not None:
        full = [kind == "full_attention" for kind in kinds[:MOST_LAYERS]]
    if not width or all(full):
        return {}
    every = full.index(True) + 1 if any(full) else 0
    if full == (every_nth(every, len(full)) if every else [False] * len(full)):
        return {"window": width, "full_every": every}
    return {"window": width, "full_layers": tuple(i for i, sees_all in enumerate(full) if sees_all)}


def no_rope(c: Config, layers: int) -> list[bool]:
    """Return the layers without rotary positions: `no_rope_layers` has 0 for them, else every n-th of `no_rope_layer_interval`."""
    listed = c.many("no_rope_layers", int)
    every = c.number("no_rope_layer_interval", 4)
    return [not rotates for rotates in listed[:layers]] if listed else every_nth(every, layers)


def layers_without_rope(nope: list[bool]) -> dict[str, Any]:
    """A stride, or a list."""
    every = nope.index(True) + 1 if any(nope) else 0
    if not every or nope == every_nth(every, len(nope)):
        return {"nope_every": every}
    return {"nope_layers": tuple(i for i, without in enumerate(nope) if without)}


def every_nth(stride: int, layers: int) -> list[bool]:
    return [(i + 1) % stride == 0 for i in range(layers)]


def expert_layers(c: Config, has_experts: list[bool]) -> dict[str, int]:
    """Number of dense first layers and stride of the layers with experts; refused where no such pattern fits."""
    where = [i for i, yes in enumerate(has_experts) if yes]
    strides = {where[1] - where[0]} if len(where) > 1 else {1, where[0] + 1}
    for every in strides:
        dense = where[0] - every + 1
        if dense >= 0 and where == list(range(where[0], len(has_experts), every)):
            return {"dense_layers": dense, "moe_every": every}
    raise MeshwrightError(
        "MW-HF-007",
        f"the layers with experts of this {c.family} config have no fixed stride",
        why=f"They are {shown(where)}",
        valid=["every n-th layer after the first dense ones"],
    )


def predicted_tokens(c: Config) -> None:
    """Multi-token-prediction layers are not counted, as in published counts; the note says how to count them."""
    if layers := c.number("num_nextn_predict_layers", 0, least=0):
        c.notes.append(
            f"{counted(layers, 'multi-token-prediction layer')} not counted (model.mtp_layers={layers} counts them)"
        )


def compact(words: Sequence[str]) -> str:
    """The shortest pattern that repeats to these layers; every word is a layer."""
    period = next(n for n in range(1, len(words) + 1) if all(w == words[i % n] for i, w in enumerate(words)))
    words = words[:period] if period > 1 else [*words[:1]] * 2
    return "".join(words) if all(len(word) == 1 for word in words) else " ".join(words)
