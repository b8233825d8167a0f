"""Whether two models compute the same function of the same weights, whatever their names and however their fields are written.

Fields that only training uses (dropout, balancing losses, capacity) and what padding adds may differ: a folder of weights
can be trained with other values, and a trained model has no such values. Fields that have a derived default (`kv_heads = 0`)
are compared by what they stand for.
"""

from __future__ import annotations

from typing import Any

from meshwright.describe.model import Model

FREE = {
    "name", "published", "notes", "not_run", "vocab_multiple", "dropout", "dropout_rate", "embedding_dropout", "attention_dropout",
    "given_parameters", "given_flops", "given_activations",
}  # fmt: skip
FREE_IN_ROUTER = {"aux", "aux_scope", "z", "balance_rate", "capacity"}
NEEDS_POSITIONS = ("dynamic", "llama3", "yarn", "longrope")  # scaled rotary positions that depend on max_positions


def different_fields(a: Model, b: Model) -> dict[str, tuple[Any, Any]]:
    """Fields whose values make two models different functions, with both values."""
    left, right = canonical(a), canonical(b)
    return {
        field: (left.get(field), right.get(field)) for field in {**left, **right} if left.get(field) != right.get(field)
    }


def canonical(model: Model) -> dict[str, Any]:
    """The fields that decide what a model computes, each written in one way."""
    fields = {name: value for name, value in model.model_dump().items() if name not in FREE}
    rope = fields.pop("rope", {})
    fields |= {f"rope.{name}": value for name, value in rope.items() if model.positions == "rope"}
    router = fields.pop("router")
    fields |= {"kv_heads": model.kv_groups, "head_dim": model.head_width if model.attention == "gqa" else 0}
    fields |= {
        "ffn": model.ffn if model.has_dense_layers else 0,
        "expert_ffn": model.expert_width if model.experts else 0,
    }
    fields["shared_ffn"] = model.shared_width if model.experts else 0
    fields["moe_every"] = fields["dense_layers"] = None
    fields["layer_kinds"] = model.layer_kinds
    if model.experts:
        normalise = model.top_k > 1 if model.router.normalise is None else model.router.normalise
        router["normalise"], router["groups_kept"] = normalise, model.router.groups_kept or model.router.groups
        router["score"] = model.router.score or ("sigmoid" if model.balance_bias else "softmax")
        fields |= {f"router.{name}": value for name, value in router.items() if name not in FREE_IN_ROUTER}
    if model.positions != "rope":
        fields["rope_theta"] = None
    if model.positions == "rope" and rope.get("kind", "default") not in NEEDS_POSITIONS:
        fields["max_positions"] = None
    return fields
