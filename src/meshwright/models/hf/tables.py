"""The names of tensors, one table per family: their module or tensor, our module or parameter, and how it is laid out.

A row names modules, whose weight and bias have the same names on both sides, or tensors (`…weight` on our side). In a layer the
names start after `model.layers.7.` and `layers.7.`. Several of our names joined by + are one tensor of theirs, one after the other
along the output dimension. Layouts:

    transposed    their matrix is [in, out]; ours, like nn.Linear's, is [out, in]
    interleaved   the rows of the joined parameters alternate
    grouped       the joined parameters alternate by groups of heads: queries of the first KV head, its keys, its values, then the next
    {expert}      each expert has a separate tensor; ours are stacked, [expert, out, in]

Where a family has two layouts (Transformers 5 can save experts stacked), the table has both, and the tensors that exist decide.
"""

import re
from typing import NamedTuple

from meshwright.errors import MeshwrightError

EXPERT = "{expert}"
TRANSPOSED, INTERLEAVED, GROUPED = "transposed", "interleaved", "grouped"


class TensorRow(NamedTuple):
    theirs: str
    ours: str  # joined by " + "
    layout: str = ""  # words


class Family(NamedTuple):
    """The tensors of one family. Those of `ends` are in no layer; `ignored`: tensors that are not read."""

    ends: tuple[TensorRow, ...]
    layer: tuple[TensorRow, ...]
    prefix: str = "model."  # of all names but the head's; the base class of a family is saved without it
    layers: str = "layers"
    ignored: str = r"rotary_emb\.inv_freq$"
    head: str = "lm_head"  # the only name without the prefix of the base class


def rows(text: str) -> tuple[TensorRow, ...]:
    """A table of three columns, with two spaces or more between them."""
    return tuple(TensorRow(*re.split(r"\s{2,}", line.strip())) for line in text.strip().splitlines())


PARTS = {
    "ends": """
    embed_tokens   embedding.tokens
    norm           head.norm
    lm_head        head.project
""",
    "norms": """
    input_layernorm            attention_norm
    post_attention_layernorm   ffn_norm
""",
    "attention": """
    self_attn.q_proj   attention.q
    self_attn.k_proj   attention.k
    self_attn.v_proj   attention.v
    self_attn.o_proj   attention.o
    self_attn.q_norm   attention.q_norm
    self_attn.k_norm   attention.k_norm
""",
    "ffn": """
    mlp.gate_proj   ffn.gate
    mlp.up_proj     ffn.up
    mlp.down_proj   ffn.down
""",
    "experts": """
    mlp.gate                         moe.router
    mlp.experts.{expert}.gate_proj   moe.experts.gate
    mlp.experts.{expert}.up_proj     moe.experts.up
    mlp.experts.{expert}.down_proj   moe.experts.down
    mlp.experts.gate_up_proj         moe.experts.gate.weight + moe.experts.up.weight
    mlp.experts.down_proj            moe.experts.down.weight
""",
    "mixtral": """
    block_sparse_moe.gate                  moe.router
    block_sparse_moe.experts.{expert}.w1   moe.experts.gate
    block_sparse_moe.experts.{expert}.w3   moe.experts.up
    block_sparse_moe.experts.{expert}.w2   moe.experts.down
""",
    "shared_qwen": """
    mlp.shared_expert.gate_proj   moe.shared.gate
    mlp.shared_expert.up_proj     moe.shared.up
    mlp.shared_expert.down_proj   moe.shared.down
    mlp.shared_expert_gate        moe.shared_scale
""",
    "latent": """
    self_attn.q_proj               attention.heads.q
    self_attn.q_a_proj             attention.q_a
    self_attn.q_a_layernorm        attention.q_a_norm
    self_attn.q_b_proj             attention.heads.q_b
    self_attn.kv_a_proj_with_mqa   attention.kv_a
    self_attn.kv_a_layernorm       attention.kv_a_norm
    self_attn.kv_b_proj            attention.heads.kv_b
    self_attn.o_proj               attention.heads.o
""",
    "shared_deepseek": """
    mlp.gate.e_score_correction_bias   moe.router.balance_bias
    mlp.shared_experts.gate_proj       moe.shared.gate
    mlp.shared_experts.up_proj         moe.shared.up
    mlp.shared_experts.down_proj       moe.shared.down
""",
    "gpt_oss": """
    self_attn.sinks                 attention.sinks.weight
    mlp.router                      moe.router
    mlp.experts.gate_up_proj        moe.experts.gate.weight + moe.experts.up.weight   transposed interleaved
    mlp.experts.gate_up_proj_bias   moe.experts.gate.bias + moe.experts.up.bias       interleaved
    mlp.experts.down_proj           moe.experts.down.weight                           transposed
    mlp.experts.down_proj_bias      moe.experts.down.bias
""",
    "phi3": """
    self_attn.qkv_proj   attention.q + attention.k + attention.v
    self_attn.o_proj     attention.o
    mlp.gate_up_proj     ffn.gate + ffn.up
    mlp.down_proj        ffn.down
""",
    "glm_ffn": """
    mlp.gate_up_proj   ffn.gate + ffn.up
    mlp.down_proj      ffn.down
""",
    "glm4_norms": """
    post_self_attn_layernorm   attention_post_norm
    post_mlp_layernorm         ffn_post_norm
""",
    "gpt2_ends": """
    wte       embedding.tokens
    wpe       embedding.positions
    ln_f      head.norm
    lm_head   head.project
""",
    "gpt2": """
    ln_1          attention_norm
    attn.c_attn   attention.q + attention.k + attention.v   transposed
    attn.c_proj   attention.o                               transposed
    ln_2          ffn_norm
    mlp.c_fc      ffn.up                                    transposed
    mlp.c_proj    ffn.down                                  transposed
""",
    "four_norms": """
    input_layernorm              attention_norm
    post_attention_layernorm     attention_post_norm
    pre_feedforward_layernorm    ffn_norm
    post_feedforward_layernorm   ffn_post_norm
""",
    "norms_after": """
    post_attention_layernorm     attention_norm
    post_feedforward_layernorm   ffn_norm
""",
    "gpt_neox_ends": """
    embed_in           embedding.tokens
    final_layer_norm   head.norm
    embed_out          head.project
""",
    "gpt_neox": """
    attention.query_key_value   attention.q + attention.k + attention.v   grouped
    attention.dense             attention.o
    mlp.dense_h_to_4h           ffn.up
    mlp.dense_4h_to_h           ffn.down
""",
    "starcoder2": """
    mlp.c_fc     ffn.up
    mlp.c_proj   ffn.down
""",
    "cohere_norm": """
    input_layernorm   attention_norm
""",
    "minimax_m2": """
    block_sparse_moe.e_score_correction_bias   moe.router.balance_bias
""",
    "falcon_ends": """
    word_embeddings   embedding.tokens
    ln_f              head.norm
    lm_head           head.project
""",
    "falcon": """
    input_layernorm                  attention_norm
    post_attention_layernorm         ffn_norm
    ln_attn                          attention_norm
    ln_mlp                           ffn_norm
    self_attention.query_key_value   attention.q + attention.k + attention.v   grouped
    self_attention.dense             attention.o
    mlp.dense_h_to_4h                ffn.up
    mlp.dense_4h_to_h                ffn.down
""",
    "gpt_bigcode": """
    ln_1          attention_norm
    attn.c_attn   attention.q + attention.k + attention.v   grouped
    attn.c_proj   attention.o
    ln_2          ffn_norm
    mlp.c_fc      ffn.up
    mlp.c_proj    ffn.down
""",
    "llama4": """
    feed_forward.gate_proj                 ffn.gate
    feed_forward.up_proj                   ffn.up
    feed_forward.down_proj                 ffn.down
    feed_forward.router                    moe.router
    feed_forward.experts.gate_up_proj      moe.experts.gate.weight + moe.experts.up.weight   transposed
    feed_forward.experts.down_proj         moe.experts.down.weight                           transposed
    feed_forward.shared_expert.gate_proj   moe.shared.gate
    feed_forward.shared_expert.up_proj     moe.shared.up
    feed_forward.shared_expert.down_proj   moe.shared.down
""",
}
# model_type → the part of the ends, the parts of a layer, and further fields of `Family`
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": ("ends", "norms attention ffn"),
    "mistral": ("ends", "norms attention ffn"),
    "qwen2": ("ends", "norms attention ffn"),
    "qwen3": ("ends", "norms attention ffn"),
    "stablelm": ("ends", "norms attention ffn"),
    "glm": ("ends", "norms attention glm_ffn"),
    "glm4": ("ends", "norms glm4_norms attention glm_ffn"),
    "phi3": ("ends", "norms phi3"),
    "mixtral": ("ends", "norms attention mixtral experts"),
    "qwen2_moe": ("ends", "norms attention ffn experts shared_qwen"),
    "qwen3_moe": ("ends", "norms attention ffn experts"),
    "deepseek_v2": ("ends", "norms latent ffn experts shared_deepseek"),
    "deepseek_v3": ("ends", "norms latent ffn experts shared_deepseek"),
    "gpt_oss": ("ends", "norms attention gpt_oss"),
    "gemma": ("ends", "norms attention ffn"),
    "gemma2": ("ends", "four_norms attention ffn"),
    "gemma3_text": ("ends", "four_norms attention ffn"),
    "granite": ("ends", "norms attention ffn"),
    "smollm3": ("ends", "norms attention ffn"),
    "olmo2": ("ends", "norms_after attention ffn"),
    "olmo3": ("ends", "norms_after attention ffn"),
    "olmoe": ("ends", "norms attention experts"),
    "starcoder2": ("ends", "norms attention starcoder2"),
    "gpt_neox": (
        "gpt_neox_ends",
        "norms gpt_neox",
        "gpt_neox.",
        "layers",
        r"rotary_emb\.inv_freq$|attention\.(masked_)?bias$",
        "embed_out",
    ),
    "llama4_text": ("ends", "norms attention llama4"),
    "glm4_moe": ("ends", "norms attention ffn experts shared_deepseek"),
    "cohere": ("ends", "cohere_norm attention ffn"),
    "cohere2": ("ends", "cohere_norm attention ffn"),
    "minimax_m2": ("ends", "norms attention mixtral minimax_m2"),
    "falcon": ("falcon_ends", "falcon", "transformer.", "h"),
    "gpt_bigcode": ("gpt2_ends", "gpt_bigcode", "transformer.", "h", r"\.attn\.(masked_)?bias$"),
    "gpt2": ("gpt2_ends", "gpt2", "transformer.", "h", r"\.attn\.(masked_)?bias$"),
}


def family(ends: str, layer: str, *fields: str) -> Family:
    return Family(rows(PARTS[ends]), tuple(row for part in layer.split() for row in rows(PARTS[part])), *fields)


TABLES: dict[str, Family] = {name: family(*fields) for name, fields in FAMILIES.items()}


def table_of(family: str) -> Family:
    if family not in TABLES:
        raise MeshwrightError(
            "MW-HF-016",
            f"the tensors of model_type '{family}' have no table of names",
            why="Weights of this family can be neither read nor written",
            valid=sorted(TABLES),
        )
    return TABLES[family]
