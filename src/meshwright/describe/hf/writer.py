"""The `config.json` of a model: the inverse of the reader, and checked by it.

    family, config = write(model)                 the first family whose config, read back, is the same model
    family, config = write(model, original)       the original config, if the model is still the one it describes

No rule decides here which family a model belongs to. Each family's writer states the keys as if the model belonged to it; the
reader then says what those keys mean, and a family is right if that is the model we have (`compare`). So a config that is
written never describes another model than the one that was trained.
"""

import math
from collections.abc import Callable
from typing import Any

from meshwright.describe.hf.parts import QUICK_GELU
from meshwright.describe.hf.reader import different_fields, family_of, interpret
from meshwright.describe.model import Model
from meshwright.describe.shape_parts import NEED_ORIGINAL
from meshwright.describe.variants import ACTIVATIONS, ATTENTIONS
from meshwright.errors import MeshwrightError, shown

QUANTISED = "quantization_config"
# Options of [model.rope] that a kind of scaling reads, by the same names in a config.
SCALING = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}


def write(model: Model, original: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """The family of a model, and its config; weights are written unquantised, so the config says nothing of quantisation."""
    if original is not None:
        config = {key: value for key, value in original.items() if key != QUANTISED}
        if not different_fields(interpret(config), model):
            return family_of(config), config
    closest: tuple[str, dict[str, Any]] = ("", {})
    for family, (architecture, keys) in WRITERS.items():
        config = {"architectures": [architecture], "model_type": family, **keys(model)}
        try:
            read_back = interpret(config)
        except MeshwrightError:
            continue
        wrong = different_fields(model, read_back)
        if not wrong and not read_back.not_run:
            return family, config
        if not closest[0] or len(wrong) < len(closest[1]):
            closest = (family, wrong or {"computed in another way": (read_back.not_run, "")})
    family, wrong = closest
    fields = ", ".join(f"{name} = {shown(values[0])}" for name, values in list(wrong.items())[:4])
    what = f"no family of Transformers is the model '{model.name}'"
    raise MeshwrightError("MW-HF-017", what, why=f"The closest is {family}, which has no {fields}", valid=list(WRITERS))


SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _decoder(m: Model) -> dict[str, Any]:
    """The keys that almost all families share."""
    keys: dict[str, Any] = {
        "vocab_size": m.vocab,
        "hidden_size": m.hidden,
        "intermediate_size": m.ffn,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_groups,
        "hidden_act": "quick_gelu" if is_quick(m) else ACTIVATIONS[m.activation].hf,
        "rms_norm_eps": m.norm_epsilon,
        "tie_word_embeddings": m.tied,
        "rope_theta": m.rope_theta,
        "attention_dropout": m.attention_dropout,
    }
    if m.max_positions:
        keys["max_position_embeddings"] = m.max_positions
    if ATTENTIONS[m.attention].reads("head_dim"):
        keys["head_dim"] = m.head_width
    if m.rope.kind != "default":
        keys["rope_scaling"] = _scaling(m)
    return keys


def is_quick(m: Model) -> bool:
    """Whether the gate is g·sigmoid(1.702·g), which families call quick_gelu."""
    return m.activation == "swiglu" and (m.swiglu_limit, m.swiglu_alpha, m.swiglu_shift) == (0, QUICK_GELU, 0)


def _scaling(m: Model) -> dict[str, Any]:
    """The table of scaled rotary positions, with the keys that Transformers 4 and 5 read."""
    options = m.rope
    fields = {name: getattr(options, name) for name in SCALING[options.kind]}
    keys = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in fields.items()
        if value != 0 or value is False
    }
    keys |= {"rope_type": options.kind, "factor": options.factor}
    if options.kind in NEED_ORIGINAL and options.kind != "dynamic":
        keys["original_max_position_embeddings"] = options.original_positions or m.max_positions
    return keys


def _window(m: Model) -> dict[str, Any]:
    return {"sliding_window": m.window or None}


def _layer_types(m: Model) -> dict[str, Any]:
    """Windows that some layers have: by layer."""
    kinds = ["full_attention" if m.sees_all(i) else "sliding_attention" for i in range(m.layers)]
    windows = {"use_sliding_window": True, "sliding_window": m.window} if m.window else {"use_sliding_window": False}
    return windows | {"layer_types": kinds}


def _biased(m: Model) -> dict[str, Any]:
    return {"attention_bias": m.qkv_bias}


def _routed(m: Model, count: str) -> dict[str, Any]:
    """Experts of the families that route by a softmax."""
    return {count: m.experts, "num_experts_per_tok": m.top_k}


def _qwen_experts(m: Model) -> dict[str, Any]:
    normalise = m.top_k > 1 if m.router.normalise is None else m.router.normalise
    dense = [i for i, kind in enumerate(m.layer_kinds) if kind == "dense"]
    keys = _routed(m, "num_experts") | {"moe_intermediate_size": m.expert_width, "norm_topk_prob": normalise}
    return keys | {"decoder_sparse_step": 1, "mlp_only_layers": dense, "intermediate_size": m.ffn or m.expert_width}


def _llama(m: Model) -> dict[str, Any]:
    return _decoder(m) | _biased(m) | {"mlp_bias": m.ffn_bias}


def _qwen2(m: Model) -> dict[str, Any]:
    return _decoder(m) | _layer_types(m)


def _qwen3(m: Model) -> dict[str, Any]:
    return _decoder(m) | _biased(m) | _layer_types(m)


def _qwen3_moe(m: Model) -> dict[str, Any]:
    keys = _qwen3(m) | _qwen_experts(m)
    return {name: value for name, value in keys.items() if name != "layer_types"}  # this class does not read it


def _qwen2_moe(m: Model) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": m.shared_width, "qkv_bias": m.qkv_bias}
    return _qwen2(m) | _qwen_experts(m) | shared


def _deepseek(m: Model) -> dict[str, Any]:
    router = m.router
    normalise = m.top_k > 1 if router.normalise is None else router.normalise
    keys = _decoder(m) | _biased(m) | {"num_key_value_heads": m.heads}
    keys |= {
        "q_lora_rank": m.q_rank or None,
        "kv_lora_rank": m.kv_rank,
        "qk_nope_head_dim": m.nope_dim,
        "qk_rope_head_dim": m.rope_dim,
        "v_head_dim": m.value_dim,
        "n_routed_experts": m.experts or None,
        "num_experts_per_tok": m.top_k,
        "n_shared_experts": m.shared_experts,
        "moe_intermediate_size": m.expert_width,
        "first_k_dense_replace": next((i for i, kind in enumerate(m.layer_kinds) if kind == "moe"), m.layers),
        "n_group": router.groups,
        "topk_group": router.groups_kept or router.groups,
        "norm_topk_prob": normalise,
        "routed_scaling_factor": router.scale,
    }
    if not m.ffn:
        keys["intermediate_size"] = m.expert_width
    return keys


def _deepseek_v2(m: Model) -> dict[str, Any]:
    grouped = m.router.groups > 1
    return _deepseek(m) | {"topk_method": "group_limited_greedy" if grouped else "greedy", "scoring_func": "softmax"}


def _gpt_oss(m: Model) -> dict[str, Any]:
    keys = _decoder(m) | _biased(m) | _routed(m, "num_local_experts") | _layer_types(m)
    keys |= {"intermediate_size": m.expert_width, "swiglu_limit": m.swiglu_limit, "swiglu_alpha": m.swiglu_alpha}
    return {"rope_scaling": {"rope_type": "default"}} | keys  # without this table the class scales


def _gemma(m: Model) -> dict[str, Any]:
    keys = _decoder(m) | _biased(m)
    return keys | {"hidden_activation": keys["hidden_act"]}


def _gemma2(m: Model) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": m.attention_softcap or None, "final_logit_softcapping": m.logit_softcap or None}
    scalar = m.attention_scale**-2 if m.attention_scale else m.head_width
    return _gemma(m) | caps | {"query_pre_attn_scalar": whole(scalar)} | _layer_types(m) | _window(m)


def _gemma3(m: Model) -> dict[str, Any]:
    keys = {name: value for name, value in _gemma2(m).items() if name != "attn_logit_softcapping"}
    keys |= {"rope_local_base_freq": m.window_rope_theta or m.rope_theta, "use_bidirectional_attention": not m.causal}
    return keys | ({} if m.causal else {"sliding_window": 2 * (m.window - 1)})


def _granite(m: Model) -> dict[str, Any]:
    divisors = (round(1 / m.logit_scale, 12), 1 / m.logit_scale, math.nextafter(1 / m.logit_scale, 0))
    return _llama(m) | {
        "embedding_multiplier": m.embedding_scale,
        "residual_multiplier": m.residual_scale,
        "attention_multiplier": m.attention_scale,
        "logits_scaling": next((divisor for divisor in divisors if 1 / divisor == m.logit_scale), divisors[1]),
    }


def _rotated_layers(m: Model) -> dict[str, Any]:
    return {"no_rope_layers": [int(m.rotates(i)) for i in range(m.layers)]}


def _olmo2(m: Model) -> dict[str, Any]:
    return _decoder(m) | _biased(m)


def _olmoe(m: Model) -> dict[str, Any]:
    normalise = m.top_k > 1 if m.router.normalise is None else m.router.normalise
    return _olmo2(m) | _routed(m, "num_experts") | {"intermediate_size": m.expert_width, "norm_topk_prob": normalise}


def _starcoder2(m: Model) -> dict[str, Any]:
    keys = _decoder(m) | _window(m) | {"use_bias": m.qkv_bias, "norm_epsilon": m.norm_epsilon}
    if m.activation == "gelu-tanh":
        keys["hidden_act"] = ACTIVATIONS["geglu-tanh"].hf  # the spelling of this class
    drops = {"residual_dropout": m.dropout_rate, "embedding_dropout": m.embedding_rate}
    return {name: value for name, value in keys.items() if name not in ("rms_norm_eps", "head_dim")} | drops


def _gpt_neox(m: Model) -> dict[str, Any]:
    left_out = ("rms_norm_eps", "num_key_value_heads", "head_dim", "rope_theta")
    keys = {name: value for name, value in _decoder(m).items() if name not in left_out} | _biased(m)
    return keys | {
        "layer_norm_eps": m.norm_epsilon,
        "use_parallel_residual": m.parallel_residual,
        "rotary_pct": m.rotated_width / m.head_width,
        "rotary_emb_base": m.rope_theta,
        "hidden_dropout": m.dropout_rate,
    }


def _glm4_moe(m: Model) -> dict[str, Any]:
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    keys = {name: value for name, value in _deepseek(m).items() if name not in latent}
    share = {"partial_rotary_factor": m.rotated_width / m.head_width}
    return keys | {"num_key_value_heads": m.kv_groups, "use_qk_norm": m.qk_norm} | share


def _llama4(m: Model) -> dict[str, Any]:
    kinds = ["full_attention" if m.sees_all(i) else "chunked_attention" for i in range(m.layers)]
    temperature = {"attn_scale": m.temperature_scale, "floor_scale": m.temperature_floor}
    return (
        _decoder(m)
        | _biased(m)
        | _routed(m, "num_local_experts")
        | _rotated_layers(m)
        | {
            "intermediate_size": m.expert_width,
            "intermediate_size_mlp": m.ffn or m.expert_width,
            "moe_layers": [i for i, kind in enumerate(m.layer_kinds) if kind == "moe"],
            "layer_types": kinds,
            "use_qk_norm": m.qk_norm,
            "attn_temperature_tuning": bool(m.temperature_scale),
            **({"attention_chunk_size": m.window} if m.window else {}),
            **(temperature if m.temperature_scale else {}),
        }
    )


def whole(number: float) -> float:
    """Round a number that differs from an integer only by rounding errors."""
    return round(number) if abs(number - round(number)) < 1e-9 * abs(number) else number


def _gpt2(m: Model) -> dict[str, Any]:
    return {
        "vocab_size": m.vocab,
        "n_embd": m.hidden,
        "n_layer": m.layers,
        "n_head": m.heads,
        "n_inner": m.ffn,
        "n_positions": m.max_positions,
        "activation_function": ACTIVATIONS[m.activation].hf,
        "layer_norm_epsilon": m.norm_epsilon,
        "tie_word_embeddings": m.tied,
        "scale_attn_weights": not m.attention_scale,
        "scale_attn_by_inverse_layer_idx": m.attention_scale_by_layer,
        "attn_pdrop": m.attention_dropout,
        "resid_pdrop": m.dropout_rate,
        "embd_pdrop": m.embedding_rate,
    }


WRITERS: dict[str, tuple[str, Callable[[Model], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", lambda m: _decoder(m) | _window(m)),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "mixtral": (
        "MixtralForCausalLM",
        lambda m: _decoder(m) | _window(m) | _routed(m, "num_local_experts") | {"intermediate_size": m.expert_width},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen2_moe": ("Qwen2MoeForCausalLM", _qwen2_moe),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _deepseek_v2),
    "deepseek_v3": (  # V2 always pairs neighbours
        "DeepseekV3ForCausalLM",
        lambda m: _deepseek(m) | {"rope_interleave": m.rope.interleaved} | SIGMOID,
    ),
    "gpt_oss": ("GptOssForCausalLM", _gpt_oss),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "gemma": ("GemmaForCausalLM", _gemma),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", _gemma3),
    "granite": ("GraniteForCausalLM", _granite),
    "smollm3": (  # the default of the class for padding is beyond small vocabularies
        "SmolLM3ForCausalLM",
        lambda m: _llama(m) | _layer_types(m) | _rotated_layers(m) | {"pad_token_id": None},
    ),
    "olmo2": ("Olmo2ForCausalLM", _olmo2),
    "olmo3": ("Olmo3ForCausalLM", lambda m: _olmo2(m) | _layer_types(m) | _window(m)),
    "olmoe": ("OlmoeForCausalLM", _olmoe),
    "starcoder2": ("Starcoder2ForCausalLM", _starcoder2),
    "gpt_neox": ("GPTNeoXForCausalLM", _gpt_neox),
    "glm4_moe": ("Glm4MoeForCausalLM", _glm4_moe),
    "llama4_text": ("Llama4ForCausalLM", _llama4),
}
