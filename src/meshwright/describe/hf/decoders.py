"""Further families of Hugging Face configs. Their parameters are counted exactly; `train` does not compute all parts of opt, bloom, mpt, gptj,
codegen, phi and gemma3n.

    opt                    learned positions with two unused rows; OPT-350m has narrow embeddings and norms after each part
    bloom, mpt             ALiBi instead of positions; norms of layer norm
    falcon                 7B: attention and FFN share one norm, one KV head; 40B: two norms, several KV heads
    gpt_bigcode            GPT-2 with one KV head
    gptj, codegen, phi     attention and FFN in parallel; biases of the head
    cohere, cohere2        attention and FFN in parallel behind a layer norm without bias
    stablelm               layer norms, partial rotary positions
    glm, glm4              partial rotary positions; glm4 with four norms
    minimax_m2             experts in all layers, norms of the whole query and key projections
    gemma3n                AltUp, Laurel, an embedding for each layer, layers that reuse keys and values

What our transformer computes in another way is added to `HfConfig.differences`. Weights that a Model has no field for are `model.extra`.
"""

from collections.abc import Callable

from meshwright.describe.hf.config import HfConfig
from meshwright.describe.hf.parts import (
    attention_bias,
    compact,
    decoder,
    every_nth,
    layers_without_rope,
    sliding_window,
)
from meshwright.errors import MeshwrightError
from meshwright.units import Json

HEAD_BIAS = "head_bias: a head with a bias"
QK_LAYER_NORM = "qk_layernorm: layer norms of queries and keys"
LAYER_NORM = {"norm": "layernorm", "head_dim": 0}


def _biases(on: bool) -> dict[str, bool]:
    return {"qkv_bias": on, "out_bias": on, "ffn_bias": on}


def _vector(name: str, size: int, where: str = "layer") -> Json:
    return {"name": name, "where": where, "columns": size}


def _matrix(name: str, rows: int, columns: int, where: str = "layer") -> Json:
    return {"name": name, "where": where, "rows": rows, "columns": columns}


def opt(c: HfConfig) -> Json:
    fields = decoder(c, tied=True, activation="relu", gated=False) | LAYER_NORM | _biases(c.flag("enable_bias", True))
    before, hidden = c.flag("do_layer_norm_before", True), fields["hidden"]
    narrow = c.number("word_embed_proj_dim", hidden)
    c.differs("position_offset: learned positions that begin at 2")
    if not before:
        c.differs("do_layer_norm_before: norms of the residual after each part")
    return fields | {
        "kv_heads": 0,
        "positions": "learned",
        "norm_position": "pre" if before else "post",
        "norm_parameters": "all" if c.flag("layer_norm_elementwise_affine", True) else "none",
        "final_norm": before and not c.flag("_remove_final_layer_norm", False),
        "embedding_dim": narrow if narrow != hidden else 0,
        "extra": [_vector("unused-positions", 2 * hidden, "embedding")],
    }


def bloom(c: HfConfig) -> Json:
    fields = decoder(c, tied=True, activation="gelu_new", gated=False, ffn=4) | LAYER_NORM | _biases(True)
    if c.flag("apply_residual_connection_post_layernorm", False):
        c.differs("apply_residual_connection_post_layernorm: residuals that begin after the norm")
    return fields | {"kv_heads": 0, "positions": "alibi", "embedding_norm": True}


def mpt(c: HfConfig) -> Json:
    """MPT. Transformers' class ignores the config here: FFN of 4·hidden, ALiBi, one KV head for each head."""
    fields = decoder(c, tied=True, activation="gelu", gated=False, ffn=4) | LAYER_NORM
    return fields | {"kv_heads": 0, "ffn": 4 * fields["hidden"], "norm_parameters": "weight", "positions": "alibi"}


def falcon(c: HfConfig) -> Json:
    fields = decoder(c, tied=True, activation="gelu", gated=False, ffn=4) | LAYER_NORM | _biases(c.flag("bias", False))
    new, parallel = c.flag("new_decoder_architecture", False), c.flag("parallel_attn", True)
    multi_query, norms = c.flag("multi_query", True), c.number("num_ln_in_parallel_attn", 2 if new else 1)
    kv_heads = c.number("num_kv_heads", fields["heads"])
    if c.rate("residual") or c.rate("attention"):
        c.differs("hidden_dropout: dropout of the sum of attention and FFN")
    return fields | {
        "parallel_residual": new or parallel,
        "kv_heads": kv_heads if new else 1 if multi_query else 0,
        "norms_per_layer": 2 if norms == 2 or not parallel else 1,
        "positions": "alibi" if c.flag("alibi", False) else "rope",
    }


def gpt_bigcode(c: HfConfig) -> Json:
    if c.flag("add_cross_attention", False):
        raise MeshwrightError("MW-HF-007", "add_cross_attention = true is not a decoder alone", valid=["false"])
    fields = decoder(c, tied=True, activation="gelu_pytorch_tanh", gated=False, ffn=4) | LAYER_NORM | _biases(True)
    scale = {} if c.flag("scale_attn_weights", True) else {"attention_scale": 1.0}
    return fields | scale | {"kv_heads": int(c.flag("multi_query", True)), "positions": "learned"}


def gptj(c: HfConfig) -> Json:
    """GPT-J and CodeGen: one norm, rotated neighbours, a head with a bias."""
    fields = decoder(c, activation="gelu_new", gated=False, ffn=4) | LAYER_NORM | {"ffn_bias": True, "kv_heads": 0}
    c.differs(HEAD_BIAS)
    rotated = c.number("rotary_dim", 64, least=0)
    width = fields["hidden"] // fields["heads"]
    fields |= {"rope_dim": rotated} if 0 < rotated < width else {}
    fields |= {"parallel_residual": True, "norms_per_layer": 1}
    return fields | {"extra": [_vector("head-bias", fields["vocab"], "head")]}


def phi(c: HfConfig) -> Json:
    fields = decoder(c, activation="gelu_new", gated=False) | {"norm": "layernorm"} | _biases(True)
    c.differs(HEAD_BIAS)
    extra = [_vector("head-bias", fields["vocab"], "head")]
    normed = c.flag("qk_layernorm", False)
    if normed:
        c.differs(QK_LAYER_NORM)
        extra.append(_vector("qk-norm-bias", 2 * (fields["hidden"] // fields["heads"])))
    return fields | {"parallel_residual": True, "norms_per_layer": 1, "qk_norm": normed, "extra": extra}


def cohere(c: HfConfig) -> Json:
    """Command R, and Command A and R7B (cohere2), which have windows and no positions in the layers without one."""
    fields = decoder(c, tied=True) | attention_bias(c) | {"norm": "layernorm", "norm_parameters": "weight"}
    fields |= {"parallel_residual": True, "norms_per_layer": 1, "logit_scale": c.decimal("logit_scale", 0.0625)}
    if c.family == "cohere":
        normed = c.flag("use_qk_norm", False)
        if normed:
            c.differs(QK_LAYER_NORM)
        return fields | {"qk_norm": normed, "qk_norm_width": "projection"}
    every = c.number("sliding_window_pattern", c.number("_sliding_window_pattern", 4))
    kinds = c.many("layer_types", str)
    full = [kind == "full_attention" for kind in kinds] if kinds else every_nth(every, fields["layers"])
    windows = sliding_window(c, full)
    # Layers without a window have no rotary positions.
    return fields | windows | (layers_without_rope(full) if windows else {"positions": "none"})


def stablelm(c: HfConfig) -> Json:
    fields = decoder(c) | {"norm": "layernorm", "qkv_bias": c.flag("use_qkv_bias", False), "head_dim": 0}
    normed, parallel = c.flag("qk_layernorm", False), c.flag("use_parallel_residual", False)
    if normed:  # a weight for each head, as many as one norm of the projection has
        c.differs(QK_LAYER_NORM)
    fields |= {"parallel_residual": parallel, "norms_per_layer": 1 if parallel else 2}
    return fields | {"qk_norm": normed, "qk_norm_width": "projection"}


def glm(c: HfConfig) -> Json:
    fields = decoder(c) | {"qkv_bias": c.flag("attention_bias", True)}
    return fields | ({"norms_per_layer": 4} if c.family == "glm4" else {})


def minimax_m2(c: HfConfig) -> Json:
    """Grouped queries; sigmoid scores and a balancing bias choose the experts of every layer."""
    top_k = c.number("num_experts_per_tok", 8)
    fields = decoder(c) | {"qk_norm": True, "qk_norm_width": "projection", "balance_bias": True}
    fields |= {"experts": c.number("num_local_experts", 256), "top_k": top_k, "expert_ffn": fields["ffn"], "ffn": 0}
    rotated = c.number("rotary_dim", 0, least=0)
    return fields | ({"rope_dim": rotated} if rotated else {})


def gemma3n(c: HfConfig) -> Json:
    """AltUp keeps several copies of the residual, Laurel adds a low-rank path, and each layer has a separate embedding of the token."""
    widths = c.data.get("intermediate_size")
    if isinstance(widths, list):
        if len(set(map(str, widths))) != 1:
            raise MeshwrightError(
                "MW-HF-007", "intermediate_size of this gemma3n config differs between layers", valid=["one width"]
            )
        c.data["intermediate_size"] = widths[0]
    fields = decoder(c, tied=True, activation="gelu_pytorch_tanh") | attention_bias(c)
    layers, hidden = fields["layers"], fields["hidden"]
    copies, rank = c.number("altup_num_inputs", 4), c.number("laurel_rank", 64)
    table, width = c.number("vocab_size_per_layer_input", 262_144), c.number("hidden_size_per_layer_input", 256)
    first = layers - c.number("num_kv_shared_layers", 15, least=0, most=layers)
    c.differs("altup: AltUp", "laurel: Laurel", "per_layer_inputs: an embedding for each layer")
    c.differs("kv_shared_layers: keys and values reused by later layers", "activation_sparsity: sparse activations")
    c.differs("value_norm: norms of values without weights")
    layer = {
        "laurel-down": (hidden, rank),
        "laurel-up": (rank, hidden),
        "layer-gate": (hidden, width),
        "layer-up": (width, hidden),
    }
    layer |= {"altup-router": (hidden, copies), "altup-predict": (copies, copies**2), "altup-correct": (copies, copies)}
    extra = [_matrix(name, *sizes) for name, sizes in layer.items()]
    extra.append(_vector("layer-norms", 4 * hidden))  # of Laurel, AltUp's router, the layer's embedding; AltUp's scale
    extra.append(_matrix("layer-project", hidden, layers * width, "embedding"))
    if copies > 1:
        extra.append(_matrix("altup-in", hidden, (copies - 1) * hidden, "embedding"))
        extra.append(_matrix("altup-out", hidden, (copies - 1) * hidden, "head"))
    extra.append(_matrix("layer-tables", table, layers * width, "embedding") | {"lookup": True})
    extra.append(_vector("layer-tables-norm", width, "embedding"))
    reused = {} if first == layers else {"pattern": compact(["*-" if i < first else "Q-" for i in range(layers)])}
    fields |= reused | {"norms_per_layer": 4, "qk_norm": True, "attention_scale": 1.0, "extra": extra}
    fields |= {"embedding_scale": hidden**0.5, "logit_softcap": c.decimal("final_logit_softcapping", 30.0)}
    return fields | sliding_window(c, every_nth(5, layers))


DECODERS: dict[str, Callable[[HfConfig], Json]] = {
    "opt": opt, "bloom": bloom, "mpt": mpt, "falcon": falcon, "gpt_bigcode": gpt_bigcode, "gptj": gptj, "codegen": gptj, "phi": phi,
    "cohere": cohere, "cohere2": cohere, "stablelm": stablelm, "glm": glm, "glm4": glm, "minimax_m2": minimax_m2, "gemma3n_text": gemma3n,
}  # fmt: skip
