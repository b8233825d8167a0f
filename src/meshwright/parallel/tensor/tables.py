"""How tensor parallelism divides each model, as data: (pattern of module names, style), read by `tensor.split`.

    region      its input enters column-split products: `copy_in`, or `gather_in` with sequence parallelism
    enter       its output does, where what follows it asks for a whole sequence
    column      weight and bias split by rows of the weight, that is by output; no communication of its own
    column:1,1  several parts in one weight, in this proportion, each split by itself (`cuts`)
    heads:4,2,2 several parts of so many heads, none of them cut; of fewer than ranks a head is on several
    counts:a,b  numbers that the module counts by (its heads, say) become this rank's; `config.a`: in a config of its own
    keys        column by whole heads; where there are fewer heads than ranks, a head is on several
    row         weight split by input; outputs are partial sums: `reduce_out` or `scatter_out`, then the whole bias, once.
                In the all-gather form split by output, input and output gathered
    vocabulary  an embedding split by rows: absent tokens look up zero, the sum over ranks is the embedding
    logits      column over the vocabulary, which need not divide: for a loss that knows where each rank begins
    join        its output, columns of this rank, is gathered, and all ranks go on alike
    between     whole, and outside the regions: with sequence parallelism it sees a share of the tokens, so that its
                gradient is a partial sum over the tp ranks
    inside      whole, and inside a region: it sees this rank's heads only, so its gradient is always a partial sum
    positions   whole; its output follows the sequence, of which a rank keeps its share under sequence parallelism
    dropout     holds nothing; under sequence parallelism it drops of its share of the tokens
    probabilities   holds nothing; drops of this rank's heads
    gathered    its output, columns of this rank, is gathered from all: the deep MLP's layers
    experts     divided by `expert`, over groups of its own

`*` stands for one part of a dotted name.

A module that holds parameters and matches no pattern raises: an omission would train silently wrong. `LLAMA` is for
Hugging Face's Llama, Mistral and Qwen2, `QWEN3` for what also norms queries and keys, `GPT2` and `phi3(…)` for those
that fuse their projections. Without its "join" row the head leaves each rank its columns of the logits, for
`vocabulary.cross_entropy`: T·V/tp numbers instead of T·V.
"""

from __future__ import annotations

from meshwright.describe.model import Model

Table = tuple[tuple[str, str], ...]

ENDS: Table = (
    ("embedding.tokens", "vocabulary"),
    ("embedding.positions", "positions"),
    ("embedding.norm", "between"),
    ("embedding.drop", "dropout"),
    ("layers.*.attention_norm", "between"),
    ("layers.*.attention_post_norm", "between"),
    ("layers.*.ffn_norm", "between"),
    ("layers.*.ffn_post_norm", "between"),
    ("layers.*.*_drop", "dropout"),
    ("head.norm", "between"),
    ("head.project", "region"),
    ("head.project", "logits"),
)
ATTENTION: Table = (
    ("layers.*.attention", "region"),
    ("layers.*.attention.q", "column"),
    ("layers.*.attention.[kv]", "keys"),
    ("layers.*.attention.[qk]_norm", "inside"),
    ("layers.*.attention.o", "row"),
    ("layers.*.attention.probabilities", "probabilities"),
)
LATENT: Table = (
    ("layers.*.attention.q_a", "between"),
    ("layers.*.attention.kv_a", "between"),
    ("layers.*.attention.*_a_norm", "between"),
    ("layers.*.attention.heads", "region"),
    ("layers.*.attention.heads.q", "column"),
    ("layers.*.attention.heads.q_b", "column"),
    ("layers.*.attention.heads.kv_b", "column"),
    ("layers.*.attention.heads.o", "row"),
    ("layers.*.attention.heads.probabilities", "probabilities"),
)
FFN: Table = (
    ("layers.*.ffn", "region"),
    ("layers.*.ffn.gate", "column"),
    ("layers.*.ffn.up", "column"),
    ("layers.*.ffn.down", "row"),
)
EXPERTS: Table = (
    ("layers.*.moe.router", "inside"),  # each rank routes tokens of its own, with sequence parallelism or without
    ("layers.*.moe.experts.*", "experts"),
    ("layers.*.moe.shared", "region"),
    ("layers.*.moe.shared.gate", "column"),
    ("layers.*.moe.shared.up", "column"),
    ("layers.*.moe.shared.down", "row"),
    ("layers.*.moe.shared_scale", "between"),
)
TRANSFORMER: Table = (*ENDS, *ATTENTION, *FFN, *EXPERTS)

MLP: Table = (("layers.*", "gathered"), ("layers.*.linear", "column"))

LLAMA: Table = (
    ("model.embed_tokens", "vocabulary"),
    ("model.layers.*.input_layernorm", "between"),
    ("model.layers.*.self_attn", "region"),
    ("model.layers.*.self_attn.q_proj", "column"),
    ("model.layers.*.self_attn.[kv]_proj", "keys"),
    ("model.layers.*.self_attn.o_proj", "row"),
    ("model.layers.*.post_attention_layernorm", "between"),
    ("model.layers.*.mlp", "region"),
    ("model.layers.*.mlp.gate_proj", "column"),
    ("model.layers.*.mlp.up_proj", "column"),
    ("model.layers.*.mlp.down_proj", "row"),
    ("model.norm", "between"),
    ("lm_head", "region"),
    ("lm_head", "column"),
    ("lm_head", "join"),
)
QWEN3: Table = (*LLAMA, ("model.layers.*.self_attn.[qk]_norm", "inside"))
GPT2: Table = (
    ("transformer.wte", "vocabulary"),
    ("transformer.wpe", "positions"),
    ("transformer.h.*.ln_[12]", "between"),
    ("transformer.h.*.attn", "region"),
    ("transformer.h.*.attn", "counts:split_size,num_heads"),
    ("transformer.h.*.attn.c_attn", "column:1,1,1"),
    ("transformer.h.*.attn.c_proj", "row"),
    ("transformer.h.*.mlp", "region"),
    ("transformer.h.*.mlp.c_fc", "column"),
    ("transformer.h.*.mlp.c_proj", "row"),
    ("transformer.ln_f", "between"),
    ("transformer.ln_f", "enter"),  # the model gives its output the shape of its input before the head sees it
    ("lm_head", "logits"),
    ("lm_head", "join"),
)


def phi3(heads: int, kv_heads: int) -> Table:
    """Llama's, with queries, keys and values in one weight, and gate and up in another."""
    fused = ("q_proj", "[kv]_proj", "gate_proj", "up_proj")
    return (
        *(row for row in LLAMA if not row[0].endswith(fused)),
        ("model.layers.*.self_attn", "counts:config.num_attention_heads,num_key_value_heads"),
        ("model.layers.*.self_attn.qkv_proj", f"heads:{heads},{kv_heads},{kv_heads}"),
        ("model.layers.*.mlp.gate_up_proj", "column:1,1"),
    )


TABLES: dict[str, Table] = {"transformer": TRANSFORMER, "mla": (*ENDS, *LATENT, *FFN, *EXPERTS), "mlp": MLP}


def table_of(model: Model) -> Table:
    return TABLES["mla" if model.attention == "mla" and model.kind == "transformer" else model.kind]
