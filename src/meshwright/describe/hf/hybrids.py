"""Families of Hugging Face configs whose layers are of several kinds: linear mixers between layers with attention.

    nemotron_h             `hybrid_override_pattern`, a letter for each layer, or `layers_block_type`, a word for each
    qwen3_next, qwen3_5    `layer_types`, or every `full_attention_interval`-th layer has attention; experts in (almost) all
    jamba                  `attn_layer_period` and `attn_layer_offset`, `expert_layer_period` and `expert_layer_offset`
    minimax                `layer_types`, or `attn_type_list` with 1 for attention; experts in all layers
    bamba                  `attn_layer_indices`; an FFN in all layers
    mamba2                 linear mixers alone
    deepseek_v4            `layer_types`, or `compress_ratios`: 0 for a window, 4 for selected and 128 for strongly compressed positions

Each becomes a `pattern` of the Model (`describe.shape_checks`).
"""

from collections.abc import Callable
from typing import Any

from meshwright.describe.hf.config import HfConfig, shown
from meshwright.describe.hf.parts import (
    attention_bias,
    compact,
    decoder,
    deepseek_router,
    gated_activation,
    plain_activation,
    predicted_tokens,
    softmax_router,
)
from meshwright.describe.shape_checks import MOST_LAYERS
from meshwright.errors import MeshwrightError

COMPRESSED = {"sliding_attention": "W", "compressed_sparse_attention": "S", "heavily_compressed_attention": "C"}
LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip


def _kinds_of_layers(c: HfConfig, key: str) -> list[str] | None:
    """One letter for each layer, from a list of words."""
    words = c.many(key, str)
    if words is None:
        return None
    if unknown := [word for word in words if word not in LETTERS]:
        raise MeshwrightError("MW-HF-007", f"{key} has the layer {shown(unknown[0])}", valid=LETTERS)
    return [LETTERS[word] for word in words[:MOST_LAYERS]]


def _no_biases(c: HfConfig, *keys: str) -> None:
    """Refuse biases that a Model has no field for."""
    for key in keys:
        if c.flag(key, False):
            raise MeshwrightError(
                "MW-HF-007", f"{key} = true: biases that a [model] table has no field for", valid=["false"]
            )


def _mamba2(c: HfConfig, prefix: str = "mamba_") -> dict[str, Any]:
    """Mamba-2 as Nemotron-H (`mamba_num_heads`) or Bamba (`mamba_n_heads`) spell it."""
    bamba = prefix == "mamba_n_"
    return {
        "kind": "mamba2",
        "heads": c.number("mamba_n_heads" if bamba else f"{prefix}num_heads"),
        "head_dim": c.number("mamba_d_head" if bamba else f"{prefix}head_dim"),
        "groups": c.number("mamba_n_groups" if bamba else "n_groups", 1 if bamba else 8),
        "state": c.number("mamba_d_state" if bamba else "ssm_state_size" if prefix else "state_size"),
        "conv": c.number("mamba_d_conv" if bamba else "conv_kernel", 4),
        "conv_bias": c.flag("mamba_conv_bias" if bamba else "use_conv_bias", True),
        "chunk": c.number("mamba_chunk_size" if bamba else "chunk_size", 128 if prefix == "mamba_" else 256),
    }


def nemotron_h(c: HfConfig) -> dict[str, Any]:
    """Every layer has one part: a Mamba-2 mixer, attention without positions, an FFN or experts."""
    letters = c.word("hybrid_override_pattern", "")
    pattern = list(letters[:MOST_LAYERS]) or _kinds_of_layers(c, "layers_block_type")
    if not pattern:
        raise MeshwrightError("MW-HF-005", "the nemotron_h config lacks 'hybrid_override_pattern'")
    heads = c.number("num_attention_heads")
    fields: dict[str, Any] = {
        "hidden": c.number("hidden_size"),
        "layers": len(pattern),
        "heads": heads,
        "kv_heads": c.number("num_key_value_heads", 8),
        "head_dim": c.number("head_dim", c.number("attention_head_dim", 0, least=0), least=0),
        "ffn": c.number("intermediate_size") if "-" in pattern else 0,
        "activation": plain_activation(c, "mlp_hidden_act", "relu2"),
        "ffn_bias": c.flag("mlp_bias", False),
        "vocab": c.number("vocab_size"),
        "max_positions": c.number("max_position_embeddings", 0, least=0),
        "positions": "none",
        "pattern": letters or compact(pattern),
        "linear": _mamba2(c),
    }
    _no_biases(c, "mamba_proj_bias", "use_bias")
    predicted_tokens(c)
    ignored = [key for key in ("attention_bias", "tie_word_embeddings") if c.flag(key, False)]
    c.notes += [f"{key} = true is ignored, as by the class of nemotron_h" for key in ignored]
    if "E" not in pattern:
        return fields
    _no_biases(c, "mlp_bias")
    top_k = c.number("num_experts_per_tok")
    experts = {"experts": c.number("n_routed_experts"), "top_k": top_k, "balance_bias": True}
    experts |= {
        "expert_ffn": c.number("moe_intermediate_size"),
        "expert_hidden": c.number("moe_latent_size", 0, least=0),
    }
    if shared := c.number("n_shared_experts", 1, least=0):
        width = c.number("moe_shared_expert_intermediate_size", shared * experts["expert_ffn"])
        experts |= {"shared_experts": shared, "shared_ffn": width}
    return fields | experts | deepseek_router(c, top_k)


def qwen3_next(c: HfConfig) -> dict[str, Any]:
    """Three of four layers with a gated delta rule, the others with gated attention; experts where the step of Qwen's MoE says."""
    fields = decoder(c, ffn=int(c.family == "qwen3_5_moe_text"))  # no layer of qwen3_5_moe has an FFN
    fields |= attention_bias(c) | {"qk_norm": True, "output_gate": True}
    layers = fields["layers"]
    every = c.number("full_attention_interval", 4)
    mixers = _kinds_of_layers(c, "layer_types") or ["*" if (i + 1) % every == 0 else "M" for i in range(layers)]
    usual = {"qwen3_next": 512}.get(c.family, 256)
    experts = 0 if c.family == "qwen3_5_text" else c.number("num_experts", usual, least=0)
    step, dense = c.number("decoder_sparse_step", 1), set(c.many("mlp_only_layers", int) or [])
    channels = ["E" if experts and i not in dense and (i + 1) % step == 0 else "-" for i in range(layers)]
    fields |= {
        "pattern": compact([mixer + channel for mixer, channel in zip(mixers, channels, strict=False)]),
        "ffn": fields["ffn"] if "-" in channels else 0,
        "linear": {
            "kind": "gated-delta",
            "heads": c.number("linear_num_value_heads", 32),
            "head_dim": c.number("linear_value_head_dim", 128),
            "groups": c.number("linear_num_key_heads", 16),
            "state": c.number("linear_key_head_dim", 128),
            "conv": c.number("linear_conv_kernel_dim", 4),
            "chunk": 64,
        },
    }
    predicted_tokens(c)
    if "E" not in channels:
        return fields
    top_k, shared = c.number("num_experts_per_tok", 10), c.number("shared_expert_intermediate_size", 512, least=0)
    fields |= {"experts": experts, "top_k": top_k, "expert_ffn": c.number("moe_intermediate_size", 512)}
    fields |= {"shared_experts": 1, "shared_ffn": shared, "shared_gate": True} if shared else {}
    return fields | softmax_router(c, top_k, channels.count("E"), c.flag("norm_topk_prob", True))


def jamba(c: HfConfig) -> dict[str, Any]:
    """Mamba-1 mixers with attention in every eighth layer, and experts in every second one."""
    fields = decoder(c) | {"positions": "none"}
    layers, hidden = fields["layers"], fields["hidden"]
    period, offset = c.number("attn_layer_period", 8), c.number("attn_layer_offset", 4, least=0)
    every, first = c.number("expert_layer_period", 2), c.number("expert_layer_offset", 1, least=0)
    experts = c.number("num_experts", 16)
    words = [
        ("*" if i % period == offset else "M") + ("E" if experts > 1 and i % every == first else "-")
        for i in range(layers)
    ]
    rank = c.get("mamba_dt_rank")
    fields |= {
        "pattern": compact(words),
        "linear": {
            "kind": "mamba1",
            "heads": hidden * c.number("mamba_expand", 2),
            "state": c.number("mamba_d_state", 16),
            "rank": -(-hidden // 16) if rank in (None, "auto") else c.number("mamba_dt_rank"),
            "conv": c.number("mamba_d_conv", 4),
            "conv_bias": c.flag("mamba_conv_bias", True),
        },
    }
    _no_biases(c, "mamba_proj_bias")
    if not any(word.endswith("E") for word in words):
        c.covered("num_experts_per_tok", "router_aux_loss_coef")
        return fields
    top_k = c.number("num_experts_per_tok", 2)
    routed = {"experts": experts, "top_k": top_k}
    return fields | routed | softmax_router(c, top_k, layers // every, normalise=False)


def minimax(c: HfConfig) -> dict[str, Any]:
    """Lightning attention, with softmax attention in every eighth layer; experts in all layers."""
    fields = decoder(c)
    listed = c.many("attn_type_list", int)
    mixers = ["*" if kind else "M" for kind in listed] if listed else _kinds_of_layers(c, "layer_types")
    if not mixers:
        raise MeshwrightError("MW-HF-005", "the minimax config lacks 'layer_types'", why="It has no default")
    top_k = c.number("num_experts_per_tok")
    head_dim = fields["head_dim"] or fields["hidden"] // fields["heads"]
    fields |= {
        "pattern": compact([f"{mixer}E" for mixer in mixers[: fields["layers"]]]),
        "linear": {
            "kind": "lightning",
            "heads": fields["heads"],
            "head_dim": head_dim,
            "state": head_dim,
            "chunk": c.number("block_size", 256),
        },
        "experts": c.number("num_local_experts"),
        "top_k": top_k,
        "expert_ffn": fields["ffn"],
        "ffn": 0,
        "rope_dim": c.number("rotary_dim", 0, least=0),
    }
    c.covered(*(key for key in c.data if key.startswith(("layernorm_", "full_attn_", "linear_attn_", "mlp_"))))
    return fields | softmax_router(c, top_k, fields["layers"], normalise=True)


def bamba(c: HfConfig) -> dict[str, Any]:
    """Mamba-2 mixers with attention in a few listed layers; an FFN in all."""
    fields = decoder(c)
    at = set(c.many("attn_layer_indices", int) or [])
    words = ["*-" if i in at else "M-" for i in range(fields["layers"])]
    _no_biases(c, "mamba_proj_bias")
    fields |= {"ffn_bias": c.flag("mlp_bias", False)}
    return fields | attention_bias(c) | {"pattern": compact(words), "linear": _mamba2(c, "mamba_n_")}


def mamba2(c: HfConfig) -> dict[str, Any]:
    """Linear mixers alone: no attention and no FFN."""
    hidden, width = c.number("hidden_size"), c.number("head_dim", 64)
    heads = c.number("num_heads", c.number("expand", 2) * hidden // width)
    _no_biases(c, "use_bias")
    return {
        "hidden": hidden,
        "layers": c.number("num_hidden_layers", most=MOST_LAYERS),
        "vocab": c.number("vocab_size"),
        "tied": c.flag("tie_word_embeddings", False),
        "norms_per_layer": 2,
        "positions": "none",
        "pattern": "MM",
        "linear": _mamba2(HfConfig(c.family, {**c.data, "num_heads": heads, "head_dim": width}, c.notes), ""),
    }


def deepseek_v4(c: HfConfig) -> dict[str, Any]:
    """Compressed attention in three kinds of layers, several residual streams, experts in all layers."""
    layers = c.number("num_hidden_layers", 43, most=MOST_LAYERS)
    near, far = _compression_ratios(c)
    _no_biases(c, "mlp_bias")
    if c.number("n_shared_experts", 1) != 1:
        raise MeshwrightError(
            "MW-HF-007", "the class of deepseek_v4 has one shared expert, whatever n_shared_experts says", valid=[1]
        )
    predicted_tokens(c)
    return {
        "attention": "compressed",
        "hidden": c.number("hidden_size", 4096),
        "layers": layers,
        "heads": c.number("num_attention_heads", 64),
        "kv_heads": 1,
        "head_dim": c.number("head_dim", 512),
        "rope_dim": c.number("qk_rope_head_dim", 64, least=0),
        "q_rank": c.number("q_lora_rank", 1024),
        "window": c.number("sliding_window", 128),
        "compressed": {
            "ratio": near,
            "far_ratio": far,
            "out_groups": c.number("o_groups", 8),
            "out_rank": c.number("o_lora_rank", 1024),
        },
        "index_heads": c.number("index_n_heads", 64),
        "index_dim": c.number("index_head_dim", 128),
        "index_top_k": c.number("index_topk", 512),
        "streams": c.number("hc_mult", 4),
        "sinks": True,
        "pattern": compact([f"{mixer}E" for mixer in _compressed_mixers(c, layers, near, far)]),
        "experts": c.number("n_routed_experts", 256),
        "top_k": c.number("num_experts_per_tok", 6),
        "expert_ffn": c.number("moe_intermediate_size", 2048),
        "shared_experts": 1,
        "balance_bias": True,
        "router": {"scale": c.decimal("routed_scaling_factor", 1.5)},
        "swiglu_limit": c.decimal("swiglu_limit", 10.0),
        "activation": gated_activation(c, "silu"),
        "vocab": c.number("vocab_size", 129280),
        "max_positions": c.number("max_position_embeddings", 0, least=0),
        "tied": c.flag("tie_word_embeddings", False),
    }


def _compression_ratios(c: HfConfig) -> tuple[int, int]:
    """Tokens that one compressed key stands for, in the two kinds of compressed layers."""
    rates = c.get("compress_rates")
    table = HfConfig(c.family, rates if isinstance(rates, dict) else {}, c.notes)
    return table.number("compressed_sparse_attention", 4), table.number("heavily_compressed_attention", 128)


def _compressed_mixers(c: HfConfig, layers: int, near: int, far: int) -> list[str]:
    """The letter of each layer's attention, from `layer_types` or from `compress_ratios`."""
    words, ratios = c.many("layer_types", str), c.many("compress_ratios", int)
    if words is None and ratios is None:
        raise MeshwrightError("MW-HF-005", "the deepseek_v4 config lacks 'layer_types'", why="It has no default")
    by_ratio = {0: "W", near: "S", far: "C"}
    mixers = [COMPRESSED.get(word, "") for word in words] if words else [by_ratio.get(r, "") for r in ratios or ()]
    if "" in mixers[:layers]:
        raise MeshwrightError(
            "MW-HF-007", "a layer of this deepseek_v4 config has an unknown kind of attention", valid=COMPRESSED
        )
    return mixers[:layers]


HYBRIDS: dict[str, Callable[[HfConfig], dict[str, Any]]] = {
    "nemotron_h": nemotron_h, "qwen3_next": qwen3_next, "qwen3_5_text": qwen3_next, "qwen3_5_moe_text": qwen3_next, "jamba": jamba,
    "minimax": minimax, "bamba": bamba, "mamba2": mamba2, "deepseek_v4": deepseek_v4,
}  # fmt: skip
