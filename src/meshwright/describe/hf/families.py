"""One small function per family of Hugging Face configs: its keys as the fields of a Model.

The same key means different things in different families: `intermediate_size` is the dense FFN of Llama and the expert of
Mixtral, Qwen2 has biases on Q, K and V without a key for them, Gemma 2 has four norms per layer. So no key is interpreted across
families. A pattern that a Model cannot hold exactly is refused.
"""

from collections.abc import Callable

from meshwright.describe.hf.config import HfConfig
from meshwright.describe.hf.decoders import DECODERS
from meshwright.describe.hf.hybrids import HYBRIDS
from meshwright.describe.hf.parts import (
    attention_bias,
    decoder,
    deepseek_router,
    every_nth,
    expert_layers,
    layers_without_rope,
    no_rope,
    plain_activation,
    predicted_tokens,
    sliding_window,
    softmax_router,
)
from meshwright.describe.model import MOST_LAYERS
from meshwright.errors import MeshwrightError
from meshwright.units import Json

# model_type of a file → the family whose function reads it
ALIASES = {
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "kimi_k2": "deepseek_v3", "llama4": "llama4_text", "mistral3": "mistral", "minimax_text_01": "minimax", "minimax_m1": "minimax",
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2",
    "qwen3_vl": "qwen3", "qwen3_vl_text": "qwen3", "qwen3_vl_moe": "qwen3_moe", "qwen3_vl_moe_text": "qwen3_moe",
}  # fmt: skip


def _qwen_window(c: HfConfig, full: list[bool]) -> dict[str, int]:
    return sliding_window(c, full) if c.flag("use_sliding_window", False) else {}


def _llama(c: HfConfig) -> Json:
    return decoder(c) | attention_bias(c) | {"ffn_bias": c.flag("mlp_bias", False)}


def _mistral(c: HfConfig) -> Json:
    fields = decoder(c)
    return fields | sliding_window(c, [False] * fields["layers"])


def _qwen2(c: HfConfig) -> Json:
    fields = decoder(c)
    return fields | {"qkv_bias": True} | _qwen_window(c, _first_full(c, fields["layers"]))


def _first_full(c: HfConfig, layers: int) -> list[bool]:
    first = c.number("max_window_layers", 28, least=0)
    return [i < first for i in range(layers)]


def _qwen3(c: HfConfig) -> Json:
    fields = decoder(c)
    full = _first_full(c, fields["layers"]) if c.family == "qwen3" else [False] * fields["layers"]
    return fields | attention_bias(c) | {"qk_norm": True} | _qwen_window(c, full)


def _qwen_experts(c: HfConfig, fields: Json) -> Json:
    experts = c.number("num_experts", c.number("num_local_experts", 0, least=0), least=0)
    step, dense = c.number("decoder_sparse_step", 1), set(c.many("mlp_only_layers", int) or [])
    layers = [bool(experts) and i not in dense and (i + 1) % step == 0 for i in range(fields["layers"])]
    width, top_k = c.number("moe_intermediate_size"), c.number("num_experts_per_tok")
    router = softmax_router(c, top_k, max(1, sum(layers)), c.flag("norm_topk_prob", False))
    if not any(layers):
        return {}
    return {"experts": experts, "top_k": top_k, "expert_ffn": width} | router | expert_layers(c, layers)


def _qwen2_moe(c: HfConfig) -> Json:
    fields = decoder(c)
    shared = c.number("shared_expert_intermediate_size", 0, least=0)
    experts = _qwen_experts(c, fields)
    if experts:
        experts |= {"shared_gate": True} | ({"shared_experts": 1, "shared_ffn": shared} if shared else {})
    full = [i % 2 == 1 or not yes for i, yes in enumerate(_first_full(c, fields["layers"]))]
    return fields | {"qkv_bias": c.flag("qkv_bias", True)} | experts | _qwen_window(c, full)


def _qwen3_moe(c: HfConfig) -> Json:
    fields = _qwen3(c)
    return fields | _qwen_experts(c, fields)


def _mixtral(c: HfConfig) -> Json:
    fields = decoder(c)
    experts = {"experts": c.number("num_local_experts"), "top_k": c.number("num_experts_per_tok")}
    experts |= softmax_router(c, experts["top_k"], fields["layers"], normalise=True)
    return fields | experts | {"expert_ffn": fields["ffn"], "ffn": 0} | sliding_window(c, [False] * fields["layers"])


def _deepseek(c: HfConfig) -> Json:
    """Multi-head latent attention; the first layers dense, the others with routed and shared experts."""
    if c.flag("mlp_bias", False):
        raise MeshwrightError(
            "MW-HF-007", "mlp_bias = true: dense FFNs with biases and experts without them", valid=["false"]
        )
    fields = decoder(c) | attention_bias(c) | {"kv_heads": 0, "head_dim": 0, "attention": "mla"}
    fields |= {
        "latent_norm_epsilon": 1e-6,  # a constant of these classes, whatever rms_norm_eps is
        "q_rank": c.number("q_lora_rank", 0),
        "kv_rank": c.number("kv_lora_rank"),
        "nope_dim": c.number("qk_nope_head_dim"),
        "rope_dim": c.number("qk_rope_head_dim", least=0),
        "value_dim": c.number("v_head_dim"),
    }
    first, stride = c.number("first_k_dense_replace", 0, least=0), c.number("moe_layer_freq", 1)
    layers = [i >= first and i % stride == 0 for i in range(fields["layers"])]
    if (kinds := c.many("mlp_layer_types", str)) is not None:
        layers = [kind == "sparse" for kind in kinds[: fields["layers"]]]
    experts = c.number("n_routed_experts", 0, least=0)
    width, top_k = c.number("moe_intermediate_size", 0, least=0), c.number("num_experts_per_tok", 0, least=0)
    shared = c.number("n_shared_experts", 0, least=0)
    predicted_tokens(c)
    router = deepseek_router(c, top_k)
    if not experts or not any(layers):
        return fields
    fields |= router | {"experts": experts, "top_k": top_k, "expert_ffn": width, "shared_experts": shared}
    return fields | {"balance_bias": c.family != "deepseek_v2"} | expert_layers(c, layers)


def _sparse_deepseek(c: HfConfig) -> Json:
    """DeepSeek-V3.2: an indexer selects the positions that a query attends to."""
    index = {
        "index_heads": c.number("index_n_heads", 64),
        "index_dim": c.number("index_head_dim", 128),
        "index_top_k": c.number("index_topk", 2048),
    }
    return _deepseek(c) | index


def _gpt2(c: HfConfig) -> Json:
    if c.flag("add_cross_attention", False):
        raise MeshwrightError("MW-HF-007", "add_cross_attention = true is not a decoder alone", valid=["false"])
    hidden = c.number("n_embd")
    return {
        "hidden": hidden,
        "layers": c.number("n_layer", most=MOST_LAYERS),
        "heads": c.number("n_head"),
        "ffn": c.number("n_inner", 4 * hidden),
        "activation": plain_activation(c, "activation_function", "gelu_new"),
        "vocab": c.number("vocab_size"),
        "max_positions": c.number("n_positions"),
        "positions": "learned",
        "tied": c.flag("tie_word_embeddings", True),
        "norm": "layernorm",
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "attention_scale": 0.0 if c.flag("scale_attn_weights", True) else 1.0,
        "attention_scale_by_layer": c.flag("scale_attn_by_inverse_layer_idx", False),
    }


def _gpt_neox(c: HfConfig) -> Json:
    fields = decoder(c, activation="gelu", gated=False) | {"kv_heads": 0, "head_dim": 0}
    fields |= {"parallel_residual": c.flag("use_parallel_residual", True)}
    return fields | attention_bias(c, True) | {"norm": "layernorm", "ffn_bias": True}


def _granite(c: HfConfig) -> Json:
    """Llama with four constants: of the embeddings, the residuals, the attention scores and (a divisor) the logits."""
    return _llama(c) | {
        "embedding_scale": c.decimal("embedding_multiplier", 1.0),
        "residual_scale": c.decimal("residual_multiplier", 1.0),
        "attention_scale": c.decimal("attention_multiplier", 1.0),
        "logit_scale": 1.0 / (c.decimal("logits_scaling", 1.0) or 1.0),
    }


def _gemma(c: HfConfig) -> Json:
    fields = decoder(c, tied=True, activation="gelu_pytorch_tanh") | attention_bias(c) | {"norm_offset": 1.0}
    return fields | {"embedding_scale": fields["hidden"] ** 0.5}


def _gemma2(c: HfConfig) -> Json:
    fields = _gemma(c) | {"norms_per_layer": 4} | _gemma_scores(c, 30.0)
    cap = c.decimal("attn_logit_softcapping", 0.0 if "attn_logit_softcapping" in c.data else 50.0)
    return fields | {"attention_softcap": cap} | sliding_window(c, every_nth(2, fields["layers"]))


def _gemma_scores(c: HfConfig, cap: float) -> dict[str, float]:
    """The scale of attention scores, and the soft cap of the logits: null means none, an absent key the default of the class."""
    cap = 0.0 if "final_logit_softcapping" in c.data else cap
    scale = (c.decimal("query_pre_attn_scalar", 256.0) or 256.0) ** -0.5
    return {"attention_scale": scale, "logit_softcap": c.decimal("final_logit_softcapping", cap)}


def _gemma3(c: HfConfig) -> Json:
    fields = _gemma(c) | {"norms_per_layer": 4, "qk_norm": True} | _gemma_scores(c, 0.0)
    if c.decimal("attn_logit_softcapping", 0.0):
        c.notes.append("attn_logit_softcapping is ignored, as by the class of gemma3_text")
    every = c.number("sliding_window_pattern", c.number("_sliding_window_pattern", 6))
    width = c.number("sliding_window", 0, least=0)
    width = width // 2 + 1 if width and not fields["causal"] else width  # half of it on each side
    return fields | sliding_window(c, every_nth(every, fields["layers"]), width)


def _gpt_oss(c: HfConfig) -> Json:
    fields = decoder(c) | attention_bias(c, True) | {"sinks": True, "router_bias": True, "ffn_bias": True}
    fields |= {"swiglu_limit": c.decimal("swiglu_limit", 7.0), "swiglu_alpha": c.decimal("swiglu_alpha", 1.702)}
    fields |= {"swiglu_shift": 1.0}
    top_k = c.number("num_experts_per_tok", c.number("experts_per_token", 4))
    experts = {"experts": c.number("num_local_experts"), "top_k": top_k, "expert_ffn": fields["ffn"], "ffn": 0}
    experts |= softmax_router(c, top_k, fields["layers"], normalise=True)
    return fields | experts | sliding_window(c, every_nth(2, fields["layers"]))


def _olmo2(c: HfConfig) -> Json:
    """Norms after attention and FFN, and norms of the full query and key projections."""
    fields = decoder(c) | attention_bias(c) | {"qk_norm": True, "qk_norm_width": "projection", "norm_position": "post"}
    return fields | (sliding_window(c, every_nth(4, fields["layers"])) if c.family == "olmo3" else {})


def _olmoe(c: HfConfig) -> Json:
    fields = decoder(c) | attention_bias(c) | {"qk_norm": True, "qk_norm_width": "projection"}
    experts = {"experts": c.number("num_experts", 64), "top_k": c.number("num_experts_per_tok", 8)}
    experts |= softmax_router(c, experts["top_k"], fields["layers"], c.flag("norm_topk_prob", False))
    return fields | experts | {"expert_ffn": fields["ffn"], "ffn": 0}


def _llama4(c: HfConfig) -> Json:
    """Routed and one shared expert in every n-th layer; three of four layers attend within chunks, the others have no rotary positions."""
    fields = decoder(c) | attention_bias(c)
    layers, width = fields["layers"], fields["ffn"]
    step, listed = c.number("interleave_moe_layer_step", 1), c.many("moe_layers", int)
    where = set(listed) if listed is not None else {i for i in range(layers) if (i + 1) % step == 0}
    experts: Json = {
        "experts": c.number("num_local_experts", 16),
        "top_k": c.number("num_experts_per_tok", 1),
    }
    experts |= {"expert_ffn": width, "shared_experts": 1, "shared_ffn": width, "ffn": c.number("intermediate_size_mlp")}
    normalise = {} if experts["top_k"] == 1 else {"normalise": False}
    experts |= {"router": {"score": "sigmoid", "weigh_inputs": True} | normalise}
    experts |= expert_layers(c, [i in where for i in range(layers)])
    nope = no_rope(c, layers)
    if c.flag("use_qk_norm", True):
        fields |= {"qk_norm": True, "qk_norm_weights": False}
    scale, floor = c.decimal("attn_scale", 0.1), c.number("floor_scale", 8192)
    if c.flag("attn_temperature_tuning", True) and any(nope) and scale:
        fields |= {"temperature_scale": scale, "temperature_floor": floor}
    chunk = 0 if c.data.get("attention_chunk_size", 0) is None else c.number("attention_chunk_size", 8192, least=0)
    windows = sliding_window(c, nope, chunk)
    return fields | experts | layers_without_rope(nope) | windows | ({"window_kind": "chunk"} if windows else {})


def _glm4_moe(c: HfConfig) -> Json:
    """Grouped queries with DeepSeek-V3's routing: sigmoid scores and a bias that balances."""
    bias = c.flag("attention_bias", False)
    fields = decoder(c) | {"qkv_bias": bias, "qk_norm": c.flag("use_qk_norm", False), "balance_bias": True}
    fields["head_dim"] = fields["head_dim"] or fields["hidden"] // fields["heads"]  # rounded down
    first = c.number("first_k_dense_replace", 1, least=0)
    top_k, shared = c.number("num_experts_per_tok", 8), c.number("n_shared_experts", 1, least=0)
    experts = {"experts": c.number("n_routed_experts", 128), "top_k": top_k, "shared_experts": shared}
    experts |= {"expert_ffn": c.number("moe_intermediate_size")} | deepseek_router(c, top_k)
    predicted_tokens(c)
    return fields | experts | expert_layers(c, [i >= first for i in range(fields["layers"])])


def _starcoder2(c: HfConfig) -> Json:
    bias = c.flag("use_bias", True)
    fields = decoder(c, tied=True, activation="gelu_pytorch_tanh", gated=False)
    fields |= {"norm": "layernorm", "qkv_bias": bias, "out_bias": bias, "ffn_bias": bias}
    return fields | sliding_window(c, [False] * fields["layers"])


def _smollm3(c: HfConfig) -> Json:
    fields = decoder(c, tied=True) | attention_bias(c) | {"ffn_bias": c.flag("mlp_bias", False)}
    nope = no_rope(c, fields["layers"])
    return fields | layers_without_rope(nope) | _qwen_window(c, [not without for without in nope])


FAMILIES: dict[str, Callable[[HfConfig], Json]] = {
    "llama": _llama, "mistral": _mistral, "phi3": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe, "mixtral": _mixtral, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "gpt2": _gpt2,
    "gpt_neox": _gpt_neox, "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3, "gpt_oss": _gpt_oss,
    "granite": _granite, "olmo2": _olmo2, "olmo3": _olmo2, "olmoe": _olmoe, "llama4_text": _llama4, "glm4_moe": _glm4_moe,
    "starcoder2": _starcoder2, "smollm3": _smollm3, "deepseek_v32": _sparse_deepseek, **HYBRIDS, **DECODERS,
}  # fmt: skip
