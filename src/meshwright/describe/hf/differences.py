"""What a config says about the model's mathematics that our transformer computes in another way.

Costs do not depend on these, so such a model is planned and estimated as it is. `train` and `verify` run our transformer, so
both commands show all entries, so that no difference in the mathematics is silent.
Rotary positions with their scaling (`rope`), epsilon of the norms, dropout rates and the scale of attention scores are fields of the
Model and are run as the config says. Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, DeepSeek-V2 and V3, gpt-oss and GPT-2 have no
entries (except the noise of Mixtral's router, which released models do not use): tests compare their logits with those of Transformers.
"""

from __future__ import annotations

from typing import Any

from meshwright.describe.hf.config import Config, shown
from meshwright.describe.hf.rope import KINDS, rope_kind, rope_parameters

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
# Defaults of the configuration classes, where they differ from that of a Model, 1e-5.
EPSILON = dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32",
     "gemma", "gemma2", "qwen3_next", "jamba", "deepseek_v4",
     "gemma3_text", "granite", "smollm3", "minimax_m2", "qwen3_5_text", "qwen3_5_moe_text", "gemma3n_text"), 1e-6,
) | {"glm": 1.5625e-7, "glm4": 1.5625e-7}  # fmt: skip
# A key that changes the mathematics unless it has this value, and what it does.
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
# Keys whose absence means the default of the family's class, where that default is not neutral.
ASSUMED: dict[str, dict[str, Any]] = {
    "gpt_neox": {"use_parallel_residual": True},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3n_text": {"final_logit_softcapping": 30.0},
    "llama4_text": {"attention_chunk_size": 8192, "attn_temperature_tuning": True, "no_rope_layer_interval": 4},
    "smollm3": {"no_rope_layer_interval": 4},
}
BY_FAMILY: dict[str, tuple[str, ...]] = {
    "gemma": ("embeddings scaled by √hidden", "norms that multiply by 1 + weight"),
    "gemma2": ("embeddings scaled by √hidden", "norms that multiply by 1 + weight"),
    "gemma3_text": ("embeddings scaled by √hidden", "norms that multiply by 1 + weight", "a RoPE base for windowed layers"),
    "llama4_text": ("norms of queries and keys without weights", "router weights applied before the experts"),
}  # fmt: skip
UNGATED = ("gpt2", "gpt_neox", "starcoder2")


def not_run(c: Config) -> list[str]:
    """Each entry names a part of the original model, with its value, that `train` and `verify` compute in another way."""
    rope = rope_parameters(c)
    found = [*BY_FAMILY.get(c.family, ()), *c.differences]
    for key, (neutral, what) in NEUTRAL.items():
        value = c.get(key)
        if key not in c.data:
            value = rope.get(key, ASSUMED.get(c.family, {}).get(key, neutral))
        off = value is None or value is False or value == neutral
        if not off:
            found.append(f"{what} ({key} = {shown(value)})")
    if (kind := rope_kind(c)) not in KINDS:
        found.append(f"scaled rotary positions (rope_type = {shown(kind)})")
    if "quick_gelu" in (c.data.get("hidden_activation"), c.data.get("hidden_act")) and c.family not in UNGATED:
        found.append("GeGLU with x·sigmoid(1.702·x) instead of GELU (quick_gelu)")
    return found


def numbers(c: Config) -> dict[str, float]:
    """Epsilon of the norms, scale of attention scores and dropout rates, as the config or its class gives them."""
    fields: dict[str, float] = {}
    if c.family in EPSILON:
        fields["norm_epsilon"] = EPSILON[c.family]
    for key in EPSILONS:
        value = c.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
            fields["norm_epsilon"] = float(value)
            break
    if c.family in ("gemma2", "gemma3_text"):
        fields["attention_scale"] = (c.decimal("query_pre_attn_scalar", 256.0) or 256.0) ** -0.5
    if c.family == "granite":
        fields["attention_scale"] = c.decimal("attention_multiplier", 1.0)
    attention, residual, embedding = c.rate("attention"), c.rate("residual"), c.rate("embedding")
    if attention:
        fields["attention_dropout"] = attention
    if residual:
        fields["dropout_rate"] = residual
    if embedding is not None and embedding != (residual or 0.0):
        fields["embedding_dropout"] = embedding
    return fields
