"""Whether two models compute the same function of the same weights, whatever their names and however their fields are written.

Fields that only training uses (dropout, balancing losses, capacity) and what padding adds may differ: a folder of weights
can be trained with other values, and a trained model has no such values. Fields that have a derived default (`kv_heads = 0`)
are compared by their meaning.
"""

from __future__ import annotations

from typing import Any

from meshwright.describe.attentions import ATTENTIONS
from meshwright.describe.model import Model
from meshwright.describe.rope import NEED_ORIGINAL

FREE = {
    "name", "published", "notes", "not_run", "allow_differences", "vocab_multiple", "dropout", "dropout_rate", "embedding_dropout",
    "attention_dropout", "given_parameters", "given_flops", "given_activations",
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
    kept = {"kind", "interleaved"} if options.kind == "default" else set(type(options).model_fields)
    fields = {name: value for name, value in options.model_dump().items() if name in kept}
    if options.kind in NEED_ORIGINAL:
        fields["original_positions"] = options.original_positions or model.max_positions
    return out | {f"rope.{name}": value for name, value in fields.items()}
