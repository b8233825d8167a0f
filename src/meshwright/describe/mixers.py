"""The blocks of all mixers: the matrices, vectors and saved tensors of attention and of linear mixers, each declared here only.

Grouped-query attention (MHA and MQA are its ends) has 2·h·D·(N + K) weights. Multi-head latent attention (MLA) projects to latents, which are
whole on every tensor-parallel rank, and from these to the heads. An indexer selects the positions that sparse attention reads. The options of
linear mixers and of compressed attention are explained in `mixer_options`.

Legend: h hidden, N heads, K KV heads, D head dim.
"""

from meshwright.describe.shape import ModelShape
from meshwright.describe.tensors import AttentionCore, Linear, LinearCore, ParameterBlock, Saved, Vector
from meshwright.describe.variants import ATTENTIONS


def norm(model: ModelShape, name: str, width: int = 0) -> Vector:
    return Vector(name, "norm", (width or model.hidden) * len(model.norm_affine))


def grouped(m: ModelShape, mixer: str) -> ParameterBlock:
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


def latent(m: ModelShape, mixer: str) -> ParameterBlock:
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
) -> ParameterBlock:
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
    return ParameterBlock("", tuple(linears), tuple(vectors), tuple(saved), core)


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
        Saved("softmax-in-fp32", "attention", 0, "tensor", 4, per_position=core.heads, condition="unfused-softmax"),
        Saved(
            "repeated-kv",
            "attention",
            (core.heads - core.kv_heads) * (core.qk + core.v),
            "tensor",
            condition="unfused-softmax",
        ),
        Saved("logsumexp", "attention", core.heads, "tensor", 4, condition="flash"),
        Saved("attention-mask", "attention", m.hidden, "sequence", 1, condition="dropout"),
    ]
    if m.drops_probabilities:
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


def compressed(m: ModelShape, mixer: str) -> ParameterBlock:
    """Compressed attention, of one kind of layer."""
    o, hidden, heads, width = m.compressed, m.hidden, m.heads, m.head_width
    inner, q_rank, window = heads * width, m.q_rank, m.window
    index = m.index_heads, m.index_dim, m.index_top_k
    linears = [
        Linear("q_a", "attention", hidden, q_rank, "between"),
        Linear("q_b", "attention", q_rank, inner, "column"),
        Linear("kv", "attention", hidden, width, "between", saves_input=False),
        Linear("o_a", "attention", inner // o.out_groups, o.out_groups * o.out_rank, "column", saves_input=False),
        Linear("o", "attention", o.out_groups * o.out_rank, hidden, "row"),
    ]
    vectors = [
        Vector("q-norm", "norm", q_rank),
        Vector("kv-norm", "norm", width),
        Vector("sinks", "attention", heads, "per-head"),
    ]
    saved = [
        Saved("q", "attention", inner, "tensor"),
        Saved("kv", "attention", width, "sequence"),
        Saved("logsumexp", "attention", heads, "tensor", 4, condition="flash"),
        Saved("attention-out", "attention", inner, "tensor"),
        Saved("latent-norms", "attention", q_rank + width, "sequence"),
    ]
    ratio = {"selected": o.ratio, "compressed": o.far_ratio}.get(mixer, 0)
    indexes = index if mixer == "selected" else (0, 0, 0)
    if ratio:
        linears += _compressor("compress", hidden, width, mixer == "selected")
        vectors += _compressor_vectors("compress", width, ratio, mixer == "selected")
        saved.append(Saved("compressor", "attention", 2 * width, "sequence"))
    if mixer == "selected":
        index_heads, index_width, _ = index
        linears += [
            Linear("index_q", "attention", q_rank, index_heads * index_width, "between", saves_input=False),
            Linear("index_weights", "attention", hidden, index_heads, "between", saves_input=False),
            *_compressor("index", hidden, index_width, True),
        ]
        vectors += _compressor_vectors("index", index_width, ratio, True)
        saved.append(Saved("index", "attention", index_heads * (index_width + 1) + 4 * index_width, "sequence"))
        saved.append(Saved("selected", "attention", index[2], "sequence", 4))
    core = AttentionCore(heads, 1, width, width, indexes[0] * indexes[1], window, ratio, indexes[2])
    return ParameterBlock("", tuple(linears), tuple(vectors), tuple(saved), core)


def _compressor(name: str, hidden: int, width: int, overlaps: bool) -> list[Linear]:
    """The projections that pool keys and values, and the weights of pooling; groups that overlap have both twice."""
    columns = (2 if overlaps else 1) * width
    return [
        Linear(f"{name}_kv", "attention", hidden, columns, "between", saves_input=False),
        Linear(f"{name}_gate", "attention", hidden, columns, "between", saves_input=False),
    ]


def _compressor_vectors(name: str, width: int, ratio: int, overlaps: bool) -> list[Vector]:
    return [
        Vector(f"{name}-bias", "attention", ratio * (2 if overlaps else 1) * width),
        Vector(f"{name}-norm", "norm", width),
    ]


def linear(m: ModelShape) -> ParameterBlock:
    """A linear mixer: one input projection, a convolution, the scan, a norm, one output projection (mamba1 has two more projections)."""
    o, hidden = m.linear, m.hidden
    linears = [Linear("linear-in", "linear", hidden, o.projected, "column")]
    vectors: list[Vector] = []
    if o.conv:
        vectors.append(Vector("conv", "linear", o.convolved * (o.conv + o.conv_bias), "per-head"))
    saved = [Saved("projected", "linear", o.projected, "tensor"), Saved("scan-out", "linear", o.inner, "tensor")]
    if o.kind == "mamba1":
        linears += [
            Linear("linear-steps", "linear", o.inner, o.rank + 2 * o.state, "row"),
            Linear("linear-rate", "linear", o.rank, o.inner, "column", bias=True),
        ]
        vectors += [
            Vector("decay", "linear", o.inner * (o.state + 1), "per-head"),
            Vector("steps-norm", "norm", o.rank + 2 * o.state),
        ]
        saved += [Saved("steps", "linear", 2 * o.inner, "tensor")]
    elif o.kind == "mamba2":  # A, D and the bias of the time step; the norm of the gated output
        vectors += [
            Vector("decay", "linear", 3 * o.heads, "per-head"),
            Vector("scan-norm", "norm", o.inner, "per-head"),
        ]
    elif o.kind == "gated-delta":  # A and the bias of the gate; a norm that all heads share
        vectors += [
            Vector("decay", "linear", 2 * o.heads, "per-head"),
            Vector("scan-norm", "norm", o.head_dim, "inside"),
        ]
        saved += [  # convolved values, keys and queries; keys and queries with length one; the triangular inverse of each chunk
            Saved("convolved", "linear", o.convolved, "tensor"),
            Saved("normed-keys", "linear", 2 * o.keys, "tensor"),
            Saved("inverse", "linear", o.heads * o.chunk, "tensor"),
        ]
    else:
        vectors.append(Vector("scan-norm", "norm", o.inner, "per-head"))
        saved.append(Saved("activated", "linear", o.inner + 2 * o.keys, "tensor"))
    linears.append(Linear("linear-out", "linear", o.inner, hidden, "row"))
    return ParameterBlock(
        "",
        tuple(linears),
        tuple(vectors),
        tuple(saved),
        linear=LinearCore(o.kind, o.heads, o.key_groups, o.state, o.head_dim, o.chunk),
    )


ATTENTIONS.provide("gqa", block=grouped)
ATTENTIONS.provide("mla", block=latent)
ATTENTIONS.provide("compressed", block=compressed)


def mixer_part(m: ModelShape, mixer: str) -> ParameterBlock:
    return linear(m) if mixer == "linear" else ATTENTIONS.part(m.attention, "block")(m, mixer)
