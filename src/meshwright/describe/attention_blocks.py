"""The blocks of our attention kinds: matrices, vectors, saved tensors and the core, softmax(QKᵀ)V.

Legend: h hidden, N heads, K KV heads, D head dim. Grouped-query attention (MHA and MQA are its ends) has 2·h·D·(N + K) weights. Multi-head latent
attention (MLA) projects to latents, which are whole on every tensor-parallel rank, and from these to the heads. An indexer selects the
positions that sparse attention reads.
"""

from __future__ import annotations

from meshwright.describe.attentions import ATTENTIONS
from meshwright.describe.compressed import compressed_part
from meshwright.describe.shape import ModelShape
from meshwright.describe.tensors import AttentionCore, Block, Linear, Saved, Vector


def norm(model: ModelShape, name: str, width: int = 0) -> Vector:
    return Vector(name, "norm", (width or model.hidden) * len(model.norm_affine))


def grouped(m: ModelShape, mixer: str) -> Block:
    """Grouped-query attention. A `query` mixer reads the keys and values of an earlier layer: it has neither their projections nor their norm."""
    q_out, kv_out = m.heads * m.head_width, m.kv_groups * m.head_width
    names = () if mixer == "query" else ("k", "v")
    keys = [Linear(name, "attention", m.hidden, kv_out, "keys", m.qkv_bias, saves_input=False) for name in names]
    linears = [
        Linear("q", "attention", m.hidden, q_out, "column", m.qkv_bias),
        *keys,
        Linear("o", "attention", q_out, m.hidden, "row", m.out_bias),
    ]
    core = AttentionCore(m.heads, m.kv_groups, m.head_width, m.head_width, m.index_heads * m.index_dim)
    return with_options(m, mixer, linears, [], core_saved(m, core, mixer), core, m.hidden)


def latent(m: ModelShape, mixer: str) -> Block:
    """MLA. Sparse attention reads the latents themselves: one KV head that all queries share, with the width of the latent."""
    qk, v = m.nope_dim + m.rope_dim, m.value_dim
    q_out, kv_out = m.heads * qk, m.heads * (m.nope_dim + v)
    query = (
        [
            Linear("q_a", "attention", m.hidden, m.q_rank, "between", m.qkv_bias),
            Linear("q_b", "attention", m.q_rank, q_out, "column"),
        ]
        if m.q_rank
        else [Linear("q", "attention", m.hidden, q_out, "column")]
    )
    linears = [
        *query,
        Linear("kv_a", "attention", m.hidden, m.kv_rank + m.rope_dim, "between", m.qkv_bias, saves_input=False),
        Linear("kv_b", "attention", m.kv_rank, kv_out, "column"),
        Linear("o", "attention", m.heads * v, m.hidden, "row", m.out_bias),
    ]
    norms = [*([norm(m, "q-norm", m.q_rank)] if m.q_rank else []), norm(m, "kv-norm", m.kv_rank)]
    core = AttentionCore(m.heads, m.heads, qk, v)
    if m.index_heads:
        core = AttentionCore(m.heads, 1, m.kv_rank + m.rope_dim, m.kv_rank, m.index_heads * m.index_dim)
    saved = [
        *core_saved(m, core, mixer),
        Saved("latent-norms", "attention", m.q_rank + m.kv_rank, "sequence"),
        *([Saved("latent-out", "attention", core.heads * core.v, "tensor")] if m.index_heads else []),
    ]
    return with_options(m, mixer, linears, norms, saved, core, m.q_rank or m.hidden)


def with_options(
    m: ModelShape,
    mixer: str,
    linears: list[Linear],
    norms: list[Vector],
    saved: list[Saved],
    core: AttentionCore,
    queries: int,
) -> Block:
    """The block of an attention, with what any kind may have: norms of queries and keys, sinks, an output gate, and an indexer, which
    multiplies an input of `queries` elements."""
    vectors = [*qk_norms(m, mixer), *norms]
    if m.qk_norm:
        saved.append(Saved("qk-norm-in", "attention", (core.heads + core.kv_heads) * core.qk, "tensor"))
    if m.sinks:
        vectors.append(Vector("sinks", "attention", m.heads, "per-head"))
    if m.output_gate:  # the gate, and the output that it scales
        gate = Linear("gate", "attention", m.hidden, linears[-1].d_in, "column", m.qkv_bias, saves_input=False)
        linears = [*linears, gate]
        saved.append(Saved("output-gate", "attention", 2 * core.heads * core.v, "tensor"))
    if m.index_heads:
        linears = [*linears, *_indexer(m, queries)]
        vectors.append(Vector("index-norm", "norm", 2 * m.index_dim))  # a layer norm with a bias
        # queries, keys and weights of the indexer, and the selected positions
        width = core.index + m.index_dim + m.index_heads
        saved.append(Saved("index", "attention", width, "sequence"))
        saved.append(Saved("selected", "attention", m.index_top_k, "sequence", 4))
    return Block("", tuple(linears), tuple(vectors), tuple(saved), core)


def qk_norms(m: ModelShape, mixer: str) -> list[Vector]:
    """The weights of the norms of queries and keys: for each head, or for the whole projection."""
    if not (m.qk_norm and m.qk_norm_weights):
        return []
    size = (m.heads + m.kv_groups if m.qk_norm_width == "projection" else 2) * m.head_width
    return [Vector(*(("q-only-norm", "norm", size // 2) if mixer == "query" else ("qk-norm", "norm", size)), "inside")]


def core_saved(m: ModelShape, core: AttentionCore, mixer: str) -> list[Saved]:
    """Tensors that softmax(QKᵀ)V saves for backward; the keys and values of a `query` mixer are kept by the layer that computed them."""
    keys = [
        Saved("k", "attention", core.kv_heads * core.qk, "tensor"),
        Saved("v", "attention", core.kv_heads * core.v, "tensor"),
    ]
    saved = [
        Saved("q", "attention", core.heads * core.qk, "tensor"),
        *([] if mixer == "query" else keys),
        Saved("softmax", "attention", 0, "tensor", per_position=core.heads, condition="stored-softmax"),
        Saved("logsumexp", "attention", core.heads, "tensor", 4, condition="flash"),
        Saved("attention-mask", "attention", m.hidden, "sequence", 1, condition="dropout"),
    ]
    if m.dropout or m.attention_dropout:
        saved += [
            Saved("softmax-mask", "attention", 0, "tensor", 1, per_position=core.heads, condition="stored-softmax"),
            Saved("softmax-dropped", "attention", 0, "tensor", per_position=core.heads, condition="stored-softmax"),
        ]
    return saved


def _indexer(m: ModelShape, queries: int) -> list[Linear]:
    return [
        Linear("index_q", "attention", queries, m.index_heads * m.index_dim, "between", saves_input=False),
        Linear("index_k", "attention", m.hidden, m.index_dim, "between", saves_input=False),
        Linear("index_weights", "attention", m.hidden, m.index_heads, "between", saves_input=False),
    ]


def compressed(m: ModelShape, mixer: str) -> Block:
    index = m.index_heads, m.index_dim, m.index_top_k
    return compressed_part(m.compressed, mixer, m.hidden, m.heads, m.head_width, m.q_rank, m.window, index)


ATTENTIONS.provide("gqa", block=grouped)
ATTENTIONS.provide("mla", block=latent)
ATTENTIONS.provide("compressed", block=compressed)
