"""The anatomy of a model: the matrix products, vectors and saved tensors of each block.

There is one table per block, and everything is counted from it: parameters and FLOPs in `model`, the sharding table in `sharding`, the
operations and the memory of a training step in `lower`. A block is one of

    embedding · dense (a layer with one FFN) · moe (a layer with experts) · head (final norm, output projection, loss)

Legend: h hidden, N heads, K KV heads, D head dim, f FFN width, E experts, k experts a token, s sequence, V vocabulary.

`style` names the rule by which tensor and expert parallelism cut a parameter (`sharding.rules`): `column` cuts d_out, `row` cuts d_in,
`between` and `inside` keep it whole on every rank. A saved tensor is split by `tensor` parallelism, or only along the `sequence`
(the regions between the products, which plain tensor parallelism leaves whole and sequence parallelism shards).

With 16-bit values, stored softmax and dropout masks, the saved bytes of a GELU layer add up to s·b·h·(34 + 5·N·s/h)
(Korthikanti et al. 2022): 11 + 5Ns/h from attention, 19 from the FFN, 4 from the norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from meshwright.describe.shape import ModelShape

BLOCKS = ("embedding", "dense", "moe", "head")


@dataclass(frozen=True)
class Linear:
    """A weight matrix. `copies` of it exist (experts) and `uses` of them act on each token."""

    name: str
    part: str
    d_in: int
    d_out: int
    style: str
    bias: bool = False
    copies: int = 1
    uses: float = 1
    saves_input: bool = True

    @property
    def parameters(self) -> int:
        return self.copies * (self.d_in * self.d_out + (self.d_out if self.bias else 0))

    @property
    def flops(self) -> float:
        """Forward, per token."""
        return 2.0 * self.uses * self.d_in * self.d_out


@dataclass(frozen=True)
class Vector:
    """Parameters that no product multiplies by: norm weights, embeddings, attention sinks, balancing biases of a router."""

    name: str
    part: str
    size: int
    style: str = "between"

    @property
    def parameters(self) -> int:
        return self.size


@dataclass(frozen=True)
class Saved:
    """A tensor kept from forward to backward: `width` elements per token of `bytes_` each (0: the compute dtype)."""

    name: str
    part: str
    width: float
    split: Literal["tensor", "sequence", "expert"]
    bytes_: float = 0.0
    per_position: float = 0.0  # elements per token and per attended position: the softmax, quadratic in s
    condition: Literal["", "dropout", "stored-softmax", "flash", "unfused-norm", "unfused-activation"] = ""


@dataclass(frozen=True)
class AttentionCore:
    """softmax(QKᵀ)V: `heads` of query width `qk` and value width `v`."""

    heads: int
    kv_heads: int
    qk: int
    v: int

    def flops(self, positions: float) -> float:
        """Forward, per token that attends to `positions` others: QKᵀ and PV."""
        return 2.0 * self.heads * (self.qk + self.v) * positions


@dataclass(frozen=True)
class Block:
    kind: str
    linears: tuple[Linear, ...]
    vectors: tuple[Vector, ...] = ()
    saved: tuple[Saved, ...] = ()
    attention: AttentionCore | None = None

    def parameters(self) -> dict[str, int]:
        out: dict[str, int] = {}
        items: list[Linear | Vector] = [*self.linears, *self.vectors]
        for item in items:
            out[item.part] = out.get(item.part, 0) + item.parameters
        return out


def norm(model: ModelShape, name: str, width: int = 0) -> Vector:
    width = width or model.hidden
    return Vector(name, "norm", width * (2 if model.norm == "layernorm" else 1))


def attention_linears(m: ModelShape) -> tuple[list[Linear], AttentionCore]:
    """The projections around attention: grouped-query (MHA and MQA are its ends) or multi-head latent (MLA)."""
    if m.attention == "mla":
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
        latent = [
            Linear("kv_a", "attention", m.hidden, m.kv_rank + m.rope_dim, "between", m.qkv_bias, saves_input=False),
            Linear("kv_b", "attention", m.kv_rank, kv_out, "column"),
        ]
        out = Linear("o", "attention", m.heads * v, m.hidden, "row", m.out_bias)
        return [*query, *latent, out], AttentionCore(m.heads, m.heads, qk, v)
    q_out, kv_out = m.heads * m.head_width, m.kv_groups * m.head_width
    linears = [
        Linear("q", "attention", m.hidden, q_out, "column", m.qkv_bias),
        Linear("k", "attention", m.hidden, kv_out, "keys", m.qkv_bias, saves_input=False),
        Linear("v", "attention", m.hidden, kv_out, "keys", m.qkv_bias, saves_input=False),
        Linear("o", "attention", q_out, m.hidden, "row", m.out_bias),
    ]
    return linears, AttentionCore(m.heads, m.kv_groups, m.head_width, m.head_width)


def attention_saved(m: ModelShape, core: AttentionCore) -> list[Saved]:
    saved = [
        Saved("q", "attention", core.heads * core.qk, "tensor"),
        Saved("k", "attention", core.kv_heads * core.qk, "tensor"),
        Saved("v", "attention", core.kv_heads * core.v, "tensor"),
        Saved("softmax", "attention", 0, "tensor", per_position=core.heads, condition="stored-softmax"),
        Saved("logsumexp", "attention", core.heads, "tensor", 4, condition="flash"),
        Saved("attention-mask", "attention", m.hidden, "sequence", 1, condition="dropout"),
    ]
    if m.dropout or m.attention_dropout:
        saved += [
            Saved("softmax-mask", "attention", 0, "tensor", 1, per_position=core.heads, condition="stored-softmax"),
            Saved("softmax-dropped", "attention", 0, "tensor", per_position=core.heads, condition="stored-softmax"),
        ]
    if m.attention == "mla":
        saved += [Saved("latent-norms", "attention", m.q_rank + m.kv_rank, "sequence")]
    if m.qk_norm:
        saved.append(Saved("qk-norm-in", "attention", (core.heads + core.kv_heads) * core.qk, "tensor"))
    return saved


def ffn_linears(
    m: ModelShape, part: str, width: int, copies: int = 1, uses: float = 1, saves_input: bool = True
) -> list[Linear]:
    """GELU: up, down. Gated (SwiGLU, GeGLU): gate, up, down. Shared experts read the input the router already keeps."""
    common: dict[str, Any] = {"bias": m.ffn_bias, "copies": copies, "uses": uses}
    column, row = ("experts", "experts-row") if part == "experts" else ("column", "row")
    gate = [Linear(f"{part}-gate", part, m.hidden, width, column, saves_input=False, **common)] if m.gated else []
    return [
        *gate,
        Linear(f"{part}-up", part, m.hidden, width, column, saves_input=saves_input, **common),
        Linear(f"{part}-down", part, width, m.hidden, row, **common),
    ]


def ffn_saved(m: ModelShape, part: str, width: float, split: Literal["tensor", "expert"] = "tensor") -> list[Saved]:
    """What the activation function keeps; the inputs of the products are kept by the products themselves."""
    inputs = width * (2 if m.gated else 1)
    saved = [Saved(f"{part}-activation-in", part, inputs, split)]
    if m.gated:  # unfused, the gate's own output is one more tensor, kept for the product with the other half
        saved.append(Saved(f"{part}-gate-out", part, width, split, condition="unfused-activation"))
    return saved


def norm_saved(m: ModelShape, name: str) -> list[Saved]:
    return [
        Saved(f"{name}-in", "norm", m.hidden, "sequence"),
        Saved(f"{name}-in-fp32", "norm", m.hidden, "sequence", 4, condition="unfused-norm"),
    ]


def dense_block(m: ModelShape) -> Block:
    if m.kind == "mlp":
        layer = Linear("linear", "ffn", m.hidden, m.hidden, "column", m.ffn_bias)
        return Block("dense", (layer,), (), (Saved("activation-in", "ffn", m.hidden, "tensor"),))
    attention, core = attention_linears(m)
    ffn = ffn_linears(m, "ffn", m.ffn)
    saved = attention_saved(m, core) + ffn_saved(m, "ffn", m.ffn) + _norms_saved(m)
    saved.append(Saved("ffn-mask", "ffn", m.hidden, "sequence", 1, condition="dropout"))
    return Block("dense", (*attention, *ffn), tuple(_layer_vectors(m)), tuple(saved), core)


def moe_block(m: ModelShape) -> Block:
    attention, core = attention_linears(m)
    router = Linear("router", "router", m.hidden, m.experts, "inside", m.router_bias)
    experts = ffn_linears(m, "experts", m.expert_width, copies=m.experts, uses=m.top_k)
    shared = ffn_linears(m, "shared", m.shared_width, saves_input=False) if m.shared_experts else []
    if m.shared_gate:
        shared.append(Linear("shared-scale", "shared", m.hidden, 1, "between", saves_input=False))
    saved = attention_saved(m, core) + _norms_saved(m)
    saved += [Saved("router-scores", "router", m.experts, "sequence", 4)]
    saved += ffn_saved(m, "experts", m.top_k * m.expert_width, "expert")
    if m.shared_experts:
        saved += ffn_saved(m, "shared", m.shared_width)
    vectors = _layer_vectors(m)
    if m.balance_bias:
        vectors.append(Vector("balance-bias", "router", m.experts, "inside"))
    return Block("moe", (*attention, router, *experts, *shared), tuple(vectors), tuple(saved), core)


def embedding_block(m: ModelShape) -> Block:
    vectors = [Vector("tokens", "embedding", m.padded_vocab * m.hidden, "vocabulary")] if m.vocab else []
    if m.positions == "learned":
        vectors.append(Vector("positions", "embedding", m.max_positions * m.hidden, "positions"))
    if m.embedding_norm:
        vectors.append(norm(m, "embedding-norm"))
    saved = [Saved("embedding-mask", "embedding", m.hidden, "sequence", 1, condition="dropout")] if m.vocab else []
    return Block("embedding", (), tuple(vectors), tuple(saved))


def head_block(m: ModelShape) -> Block:
    """Final norm, output projection and loss. Tied weights are counted with the embedding."""
    if m.kind != "transformer" or not m.vocab:
        return Block("head", ())
    project = Linear("head", "head", m.hidden, m.padded_vocab, "logits", copies=0 if m.tied else 1)
    vectors = [norm(m, "final-norm")] if m.final_norm else []
    # The loss needs the logits in fp32 and keeps their softmax for backward.
    saved = [*norm_saved(m, "final-norm"), Saved("logits", "head", m.padded_vocab, "tensor", 4)]
    return Block("head", (project,), tuple(vectors), tuple(saved))


def _layer_vectors(m: ModelShape) -> list[Vector]:
    vectors = [norm(m, f"norm-{i + 1}") for i in range(m.norms_per_layer)]
    if m.qk_norm:
        heads = m.heads + m.kv_groups if m.qk_norm_width == "projection" else 2
        vectors.append(Vector("qk-norm", "norm", heads * m.head_width, "inside"))
    if m.attention == "mla":
        vectors += [norm(m, "q-norm", m.q_rank)] if m.q_rank else []
        vectors.append(norm(m, "kv-norm", m.kv_rank))
    if m.sinks:
        vectors.append(Vector("sinks", "attention", m.heads, "per-head"))
    return vectors


def _norms_saved(m: ModelShape) -> list[Saved]:
    return [s for i in range(m.norms_per_layer) for s in norm_saved(m, f"norm-{i + 1}")]


def blocks(m: ModelShape) -> dict[str, Block]:
    """Every block the model has, by kind."""
    out = {"embedding": embedding_block(m), "dense": dense_block(m), "head": head_block(m)}
    if m.experts:
        out["moe"] = moe_block(m)
    return out
