"""What a config says about the model's mathematics that our transformer computes in another way.

Costs do not depend on these, so such a model is planned and estimated as it is. `train` and `verify` run our transformer, so they refuse
such a model (MW-BUILD-005) unless `--allow-differences` names the entry: no difference in the mathematics is silent. An entry is
"name: what it is (value)"; the name is the config's key where there is one.
Everything else that changes the mathematics is a field of the Model and is run as the config says: tests compare the logits of every family
that has a table of weights (`models.hf.tables`) with those of Transformers.
"""

from __future__ import annotations

from typing import Any

from meshwright.describe.hf.config import Config, shown
from meshwright.describe.hf.rope import KINDS, rope_kind, window_rope_kind

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


def not_run(c: Config) -> list[str]:
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


def numbers(c: Config) -> dict[str, float]:
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
