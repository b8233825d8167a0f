"""What families of Hugging Face configs have in common: decoder shape, activation, biases, windows, layers with experts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshwright.describe.hf.config import HfConfig, shown
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
    c: HfConfig, tied: bool = False, activation: str = "silu", gated: bool = True, ffn: int = 0
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


def gated_activation(c: HfConfig, default: str) -> str:
    """The activation of a gated FFN. Gemma writes `hidden_activation`, and its files may carry an older `hidden_act` too."""
    name = c.word("hidden_activation", c.word("hidden_act", default))
    return GATED[name] if name in GATED else _unknown_activation(c, name, tuple(GATED))


def plain_activation(c: HfConfig, key: str, default: str = "gelu") -> str:
    """The activation of an FFN without a gate."""
    name = c.word(key, default)
    return PLAIN[name] if name in PLAIN else _unknown_activation(c, name, tuple(PLAIN))


def _unknown_activation(c: HfConfig, name: str, valid: tuple[str, ...]) -> str:
    what = f"activation {shown(name)} of this {c.family} config is not known"
    raise MeshwrightError("MW-HF-006", what, why="It would change the model's mathematics", valid=valid)


def attention_bias(c: HfConfig, default: bool = False) -> dict[str, bool]:
    bias = c.flag("attention_bias", default)
    return {"qkv_bias": bias, "out_bias": bias}


def sliding_window(c: HfConfig, full: list[bool], width: int | None = None) -> dict[str, Any]:
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


def no_rope(c: HfConfig, layers: int) -> list[bool]:
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


def expert_layers(c: HfConfig, has_experts: list[bool]) -> dict[str, int]:
    """Number of dense first layers and stride of the layers with experts; refused where no such pattern fits."""
    where = [i for i, yes in enumerate(has_experts) if yes]
    strides = {where[1] - where[0]} if len(where) > 1 else {1, where[0] + 1}
    for every in strides:
        dense = where[0] - every + 1
        if dense >= 0 and where == list(range(where[0], len(has_experts), every)):
            return {"dense_layers": dense, "moe_every": every}
    what = f"the layers with experts of this {c.family} config have no fixed stride"
    why = f"They are {shown(where)}"
    raise MeshwrightError("MW-HF-007", what, why=why, valid=["every n-th layer after the first dense ones"])


def predicted_tokens(c: HfConfig) -> None:
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


# --- How a Hugging Face config routes tokens, read into `RouterOptions`; each family as its own class does it.
#
#     mixtral, gpt_oss       softmax, top k, weights that sum to one
#     qwen2_moe, qwen3_moe   softmax, top k; weights sum to one where norm_topk_prob is true
#     deepseek_v2            softmax; topk_method "greedy", or group_limited_greedy: top k among the topk_group best of
#                            n_group groups; weights scaled by routed_scaling_factor. Transformers' class ignores
#                            norm_topk_prob, which no released model sets; so do we, with a note
#     deepseek_v3, glm4_moe, nemotron_h  sigmoid and a balancing bias; groups ranked by the sum of their two best; normalised, then scaled
#
# `router_aux_loss_coef` weighs E·Σ f_e P_e with f and P averaged over all layers with experts and f summing to k; ours is
# added in each layer, with f summing to one: a coefficient c becomes c·k/layers. Those classes add the loss only where
# `output_router_logits` is true. DeepSeek's `aux_loss_alpha` is per layer and normalised as ours is, per sequence if
# `seq_aux` is true.

SCORES = ("softmax", "sigmoid")


class Defaults(NamedTuple):
    """Defaults of a configuration class for missing keys."""

    score: str
    methods: tuple[str, ...]
    groups: int = 1
    groups_kept: int = 1
    normalise: bool = True
    scale: float = 1.0


DEEPSEEK = {
    "deepseek_v2": Defaults("softmax", ("greedy", "group_limited_greedy"), normalise=False),
    "deepseek_v3": Defaults("sigmoid", ("noaux_tc",), groups=8, groups_kept=4, scale=2.5),
    "deepseek_v32": Defaults("sigmoid", ("noaux_tc",), groups=8, groups_kept=4, scale=2.5),
    "glm4_moe": Defaults("sigmoid", ("noaux_tc",)),
    "nemotron_h": Defaults("sigmoid", ("noaux_tc",)),
}


def _options(top_k: int, normalise: bool, **options: Any) -> dict[str, Any]:
    """Router options that differ from their defaults."""
    named = options | ({} if normalise == (top_k > 1) else {"normalise": normalise})
    return {"router": named} if named else {}


def _coefficient(c: HfConfig, top_k: int, layers: int) -> dict[str, float]:
    """The balancing loss of the classes that average it over layers."""
    coefficient = c.decimal("router_aux_loss_coef", 0.001)
    if not c.flag("output_router_logits", False):
        if "router_aux_loss_coef" in c.data and coefficient:
            c.notes.append(f"router_aux_loss_coef = {coefficient:g} is left out, as output_router_logits is not true")
        return {}
    return {"aux": coefficient * top_k / layers} if coefficient else {}


def softmax_router(c: HfConfig, top_k: int, layers: int, normalise: bool) -> dict[str, Any]:
    """Mixtral's and Qwen's; `layers`: those with experts."""
    return _options(top_k, normalise, **_coefficient(c, top_k, layers))


def deepseek_router(c: HfConfig, top_k: int) -> dict[str, Any]:
    """DeepSeek's and GLM-4.5's routing, from the keys of the config and the defaults of its class."""
    default = DEEPSEEK[c.family]
    method = c.word("topk_method", default.methods[0])
    if method not in default.methods:
        c.notes.append(f"topk_method {shown(method)} is read as {default.methods[0]}")
    groups, chosen_groups = c.number("n_group", default.groups), c.number("topk_group", default.groups_kept)
    grouped = {"groups": groups, "groups_kept": chosen_groups} if method != "greedy" and chosen_groups < groups else {}
    normalise, scale = c.flag("norm_topk_prob", default.normalise), c.decimal("routed_scaling_factor", default.scale)
    if normalise and c.family == "deepseek_v2":
        c.notes.append("norm_topk_prob is ignored, as by the class of deepseek_v2")
        normalise = False
    score = c.word("scoring_func", default.score)
    if score not in SCORES:
        c.notes.append(f"scoring_func {shown(score)} is read as {default.score}")
        score = default.score
    options: dict[str, Any] = {"scale": scale} if scale != 1.0 else {}
    options |= {"score": score} if score != default.score else {}
    if alpha := c.decimal("aux_loss_alpha", 0.0):
        options["aux"] = alpha
        if c.flag("seq_aux", True):
            options["aux_scope"] = "sequence"
    return _options(top_k, normalise, **options, **grouped)
