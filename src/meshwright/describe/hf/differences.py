"""What a config says about the model's mathematics that our transformer computes in another way.

Costs do not depend on these, so such a model is planned and estimated as it is. `train` and `verify` run our transformer, so
both commands show all entries, so that no difference in the mathematics is silent.
Base of the rotary embedding, epsilon of the norms and dropout rates are fields of the Model and are run as the config says.
"""

from __future__ import annotations

from typing import Any

from meshwright.describe.hf.config import Config, shown

TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
ROPE_FIELDS = ("rope_parameters", "rope_scaling")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
# A key that changes the mathematics unless it has this value, and what it does.
NEUTRAL: dict[str, tuple[Any, str]] = {
    "attn_logit_softcapping": (None, "soft-capping of attention scores"),
    "final_logit_softcapping": (None, "soft-capping of the logits"),
    "partial_rotary_factor": (1.0, "rotary positions on a part of each head only"),
    "use_parallel_residual": (False, "attention and FFN in parallel"),
    "scale_attn_by_inverse_layer_idx": (False, "attention scores divided by the layer's number"),
    "swiglu_limit": (None, "clamped SwiGLU"),
    "embedding_multiplier": (1.0, "scaled embeddings"),
    "residual_multiplier": (1.0, "scaled residuals"),
    "attention_multiplier": (None, "a constant scale of attention scores"),
    "logits_scaling": (1.0, "scaled logits"),
    "attention_chunk_size": (None, "attention within chunks"),
    "attn_temperature_tuning": (False, "attention temperature by position"),
    "no_rope_layer_interval": (0, "layers without rotary positions"),
    "mlp_layernorm_in_ffn": (False, "a norm inside the FFN"),
}
# Keys whose absence means the default of the family's class, where that default is not neutral.
ASSUMED: dict[str, dict[str, Any]] = {
    "gpt_neox": {"use_parallel_residual": True, "partial_rotary_factor": 0.25},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gpt_oss": {"swiglu_limit": 7.0},
    "glm4_moe": {"partial_rotary_factor": 0.5},
    "llama4_text": {"attention_chunk_size": 8192, "attn_temperature_tuning": True, "no_rope_layer_interval": 4},
    "smollm3": {"no_rope_layer_interval": 4},
}
BY_FAMILY: dict[str, tuple[str, ...]] = {
    "gemma": ("embeddings scaled by √hidden", "norms that multiply by 1 + weight"),
    "gemma2": ("embeddings scaled by √hidden", "norms that multiply by 1 + weight"),
    "gemma3_text": ("embeddings scaled by √hidden", "norms that multiply by 1 + weight", "a RoPE base for windowed layers"),
    "gpt_oss": ("SwiGLU with a shifted linear half",),
    "llama4_text": ("norms of queries and keys without weights", "router weights applied before the experts"),
}  # fmt: skip


def not_run(c: Config) -> list[str]:
    """Each entry names a part of the original model, with its value, that `train` and `verify` compute in another way."""
    rope = rope_parameters(c)
    found = list(BY_FAMILY.get(c.family, ()))
    for key, (neutral, what) in NEUTRAL.items():
        value = c.get(key)
        if key not in c.data:
            value = rope.get(key, ASSUMED.get(c.family, {}).get(key, neutral))
        off = value is None or value is False or value == neutral
        if not off:
            found.append(f"{what} ({key} = {shown(value)})")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        found.append(f"scaled rotary positions (rope_type = {shown(kind)})")
    scalar, width = c.get("query_pre_attn_scalar"), c.get("head_dim")
    if scalar is not None and scalar != width:
        found.append(f"attention scores scaled by query_pre_attn_scalar = {shown(scalar)}")
    for key in ("hidden_activation", "hidden_act", "activation_function"):
        if c.data.get(key) in TANH_GELU:
            found.append(f"the tanh approximation of GELU ({key} = {shown(c.data[key])})")
            break
    return found


def rope_parameters(c: Config) -> dict[str, Any]:
    """The table of rotary settings: `rope_parameters` in newer files, `rope_scaling` with `rope_theta` in older ones."""
    for key in ROPE_FIELDS:
        table = c.get(key)
        if isinstance(table, dict):
            inner = table.get("full_attention")
            return inner if isinstance(inner, dict) else table
    return {}


def numbers(c: Config) -> dict[str, float]:
    """Rotary base, epsilon of the norms and dropout rates, where the config gives them."""
    fields: dict[str, float] = {}
    theta = c.data.get("rope_theta", c.data.get("rotary_emb_base", rope_parameters(c).get("rope_theta")))
    if isinstance(theta, int | float) and not isinstance(theta, bool) and 1 < theta < 1e15:
        fields["rope_theta"] = float(theta)
    for key in EPSILONS:
        value = c.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
            fields["norm_epsilon"] = float(value)
            break
    attention, residual, embedding = c.rate("attention"), c.rate("residual"), c.rate("embedding")
    if attention:
        fields["attention_dropout"] = attention
    if residual or embedding:
        fields["dropout_rate"] = residual or embedding or 0.0
        if residual != embedding and embedding is not None:
            c.notes.append(
                f"embedding dropout {embedding:g} differs from {residual or 0.0:g}: {fields['dropout_rate']:g} is used"
            )
    return fields
