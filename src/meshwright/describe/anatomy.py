"""The anatomy of a model: the matrix products, vectors and saved tensors of each block.

There is one table per block, and everything is counted from it: parameters and FLOPs in `model`, the sharding table in `sharding`, the
operations and the memory of a training step in `lower`. A block is one of

    embedding · a layer, of one of the kinds of `shape_checks` · head (final norm, output projection, loss) · mtp (multi-token prediction)

A layer is put together from its mixer (`mixers`: attention, or a linear mixer) and its channel part (FFN or
experts). A module of multi-token prediction is one more layer, in front of it a product that joins its input with the embedding of the
next token, behind it one more product with the head's weights.

Legend: h hidden, N heads, K KV heads, D head dim, f FFN width, E experts, k experts a token, s sequence, V vocabulary.

A saved tensor is split by `tensor` parallelism, or only along the `sequence`
(the regions between the products, which plain tensor parallelism leaves whole and sequence parallelism shards).

With 16-bit values, stored softmax and dropout masks, the saved bytes of a GELU layer add up to s·b·h·(34 + 5·N·s/h)
(Korthikanti et al. 2022): 11 + 5Ns/h from attention, 19 from the FFN, 4 from the norms.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from meshwright.describe.adapted import adapted
from meshwright.describe.mixers import mixer_part, norm
from meshwright.describe.shape import ModelShape
from meshwright.describe.tensors import Linear, ParameterBlock, Saved, Vector, joined
from meshwright.units import Json


def ffn_linears(
    m: ModelShape, part: str, width: int, copies: int = 1, uses: float = 1, saves_input: bool = True
) -> list[Linear]:
    """GELU: up, down. Gated (SwiGLU, GeGLU): gate, up, down. Shared experts read the input the router already keeps."""
    common: Json = {"bias": m.ffn_bias, "copies": copies, "uses": uses}
    column, row = ("experts", "experts-row") if part == "experts" else ("column", "row")
    d_in = m.routed_width if part == "experts" else m.hidden
    gate = [Linear(f"{part}-gate", part, d_in, width, column, saves_input=False, **common)] if m.gated else []
    return [
        *gate,
        Linear(f"{part}-up", part, d_in, width, column, saves_input=saves_input, **common),
        Linear(f"{part}-down", part, width, d_in, row, **common),
    ]


def ffn_saved(m: ModelShape, part: str, width: float, split: Literal["tensor", "expert"] = "tensor") -> list[Saved]:
    """Bytes that the activation function saves for backward; each product saves its own input."""
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


def layer_block(m: ModelShape, kind: str) -> ParameterBlock:
    """A layer of a kind: its mixer, then its channel part, then its norms."""
    if m.kind == "mlp":
        layer = Linear("linear", "ffn", m.hidden, m.hidden, "column", m.ffn_bias)
        return ParameterBlock("dense", (layer,), (), (Saved("activation-in", "ffn", m.hidden, "tensor"),))
    mixer, channel = m.parts_of(kind)
    parts = [mixer_part(m, mixer)] if mixer else []
    parts += [CHANNELS[channel](m)] if channel else []
    if m.streams > 1:
        parts += [stream_part(m, name) for name, part in (("streams-1", mixer), ("streams-2", channel)) if part]
    names = layer_norms(m, kind)
    norms = ParameterBlock(
        kind, (), tuple(norm(m, name) for name in names), tuple(s for name in names for s in norm_saved(m, name))
    )
    return joined(kind, [norms, *parts, extra_part(m, "layer")])


def layer_norms(m: ModelShape, kind: str) -> tuple[str, ...]:
    """The norms of a layer: before the mixer, before the channel part, and with four per layer one after each. A layer of one part has its half."""
    names = ("norm-1", "norm-2", "norm-3", "norm-4")[: m.norms_per_layer]
    mixer, channel = m.parts_of(kind)
    return names if mixer and channel else names[::2] if mixer else names[1::2]


def extra_part(m: ModelShape, where: str) -> ParameterBlock:
    """The weights of `model.extra` in a layer, the embedding or the head."""
    there = [e for e in m.extra if e.where == where]
    products = [Linear(e.name, "extra", e.rows, e.columns, "between") for e in there if e.rows and not e.lookup]
    tables = [
        Vector(e.name, "extra", max(1, e.rows) * e.columns, "vocabulary" if e.lookup else "between")
        for e in there
        if e.lookup or not e.rows
    ]
    return ParameterBlock("", tuple(products), tuple(tables))


def stream_part(m: ModelShape, name: str) -> ParameterBlock:
    """The weights with which a part reads from the residual streams, writes to them and mixes them (hyper-connections): n reading, n writing and
    n² mixing weights for each token, from one product with all streams, with a base for each and three scales."""
    weights = (2 + m.streams) * m.streams
    product = Linear(name, "norm", m.residual_width, weights, "between", saves_input=False)
    saved = Saved(f"{name}-in", "norm", m.residual_width, "sequence")
    return ParameterBlock("", (product,), (Vector(f"{name}-base", "norm", weights + 3),), (saved,))


def ffn_part(m: ModelShape) -> ParameterBlock:
    mask = Saved("ffn-mask", "ffn", m.hidden, "sequence", 1, condition="dropout")
    return ParameterBlock("", tuple(ffn_linears(m, "ffn", m.ffn)), (), (*ffn_saved(m, "ffn", m.ffn), mask))


def experts_part(m: ModelShape) -> ParameterBlock:
    linears = [Linear("router", "router", m.hidden, m.experts, "inside", m.router_bias)]
    if m.expert_hidden:  # latent experts: one projection before dispatch, one after the results are combined
        linears += [
            Linear("latent-down", "latent", m.hidden, m.expert_hidden, "between", saves_input=False),
            Linear("latent-up", "latent", m.expert_hidden, m.hidden, "between"),
        ]
    linears += ffn_linears(m, "experts", m.expert_width, copies=m.experts, uses=m.top_k)
    saved = [Saved("router-scores", "router", m.experts, "sequence", 4)]
    saved += ffn_saved(m, "experts", m.top_k * m.expert_width, "expert")
    # The gradient of a token's routing weights needs what they multiply: the outputs of its experts, unless the stack multiplies earlier.
    outputs = Saved("expert-outputs", "experts", m.top_k * m.routed_width, "expert", condition="weighted-outputs")
    saved.append(outputs)
    if m.shared_experts:
        linears += ffn_linears(m, "shared", m.shared_width, saves_input=False)
        saved += ffn_saved(m, "shared", m.shared_width)
    if m.shared_gate:
        linears.append(Linear("shared-scale", "shared", m.hidden, 1, "between", saves_input=False))
    vectors = [Vector("balance-bias", "router", m.experts, "inside")] if m.balance_bias else []
    return ParameterBlock("", tuple(linears), tuple(vectors), tuple(saved))


CHANNELS: dict[str, Callable[[ModelShape], ParameterBlock]] = {"ffn": ffn_part, "experts": experts_part}


def embedding_block(m: ModelShape) -> ParameterBlock:
    vectors = [Vector("tokens", "embedding", m.padded_vocab * m.token_width, "vocabulary")] if m.vocab else []
    if m.positions == "learned":
        vectors.append(Vector("positions", "embedding", m.max_positions * m.hidden, "positions"))
    if m.embedding_norm:
        vectors.append(norm(m, "embedding-norm"))
    saved = [Saved("embedding-mask", "embedding", m.hidden, "sequence", 1, condition="dropout")] if m.vocab else []
    project = (Linear("embedding-in", "embedding", m.token_width, m.hidden, "between"),) if m.embedding_dim else ()
    return joined("embedding", [ParameterBlock("", project, tuple(vectors), tuple(saved)), extra_part(m, "embedding")])


def head_block(m: ModelShape) -> ParameterBlock:
    """Final norm, output projection and loss. Tied weights are counted with the embedding."""
    if m.kind != "transformer" or not m.vocab:
        return ParameterBlock("head", ())
    project = Linear("head", "head", m.token_width, m.padded_vocab, "logits", copies=0 if m.tied else 1)
    narrow = (Linear("embedding-out", "head", m.hidden, m.token_width, "between"),) if m.embedding_dim else ()
    vectors = [norm(m, "final-norm")] if m.final_norm else []
    streams: tuple[Linear, ...] = ()
    if m.streams > 1:  # the streams become one with a weight for each
        streams = (Linear("streams-out", "norm", m.residual_width, m.streams, "between"),)
        vectors.append(Vector("streams-out-base", "norm", m.streams + 1))
    # The loss needs the logits in fp32 and keeps their softmax for backward.
    saved = [*norm_saved(m, "final-norm"), Saved("logits", "head", m.padded_vocab, "tensor", 4)]
    head = ParameterBlock("head", (project, *narrow, *streams), tuple(vectors), tuple(saved))
    return joined("head", [head, extra_part(m, "head")])


def mtp_block(m: ModelShape) -> ParameterBlock:
    """A module of multi-token prediction: norms of both inputs and their joint projection, a layer, a norm, and the head's product again."""
    join = Linear("mtp-join", "mtp", 2 * m.hidden, m.hidden, "column")
    head = replace(head_block(m).linears[0], copies=0)
    norms = tuple(norm(m, name) for name in ("mtp-norm-1", "mtp-norm-2", "mtp-norm-3"))
    saved = (*norm_saved(m, "mtp-norm-1"), *norm_saved(m, "mtp-norm-2"), *head_block(m).saved)
    return joined("mtp", [ParameterBlock("mtp", (join, head), norms, saved), layer_block(m, "mtp")])


def blocks(m: ModelShape) -> dict[str, ParameterBlock]:
    """Every block the model has, by kind."""
    out = {"embedding": embedding_block(m)}
    out |= {kind: layer_block(m, kind) for kind in m.kinds}
    out["head"] = head_block(m)
    out |= {kind: mtp_block(m) for kind in m.mtp_kinds}
    return {kind: adapted(m, block) for kind, block in out.items()} if m.adapter.on else out
