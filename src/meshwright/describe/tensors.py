"""What blocks of a model are made of: matrices, vectors, tensors saved for backward, and the products between activations.

`anatomy` lists them for each block of a model. `style` names the rule by which tensor and expert parallelism cut a parameter (`sharding.rules`):
`column` cuts d_out, `row` cuts d_in, `between` and `inside` keep it whole on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.describe.base import Described, Size, Whole
from meshwright.errors import MeshwrightError


@dataclass(frozen=True)
class Linear:
    """A weight matrix. `copies` of it exist (experts) and `uses` of them act on each token. A frozen one (`learns` false) may have an adapter of a
    `rank`, and be kept in the quantised format of the adapter's base (`packed`)."""

    name: str
    part: str
    d_in: int
    d_out: int
    style: str
    bias: bool = False
    copies: int = 1
    uses: float = 1
    saves_input: bool = True
    learns: bool = True
    rank: int = 0
    packed: bool = False

    @property
    def adapter(self) -> int:
        """Parameters of its adapter: A [rank, in] and B [out, rank]."""
        return self.copies * self.rank * (self.d_in + self.d_out)

    @property
    def own(self) -> int:
        """Parameters without those of its adapter."""
        return self.copies * (self.d_in * self.d_out + (self.d_out if self.bias else 0))

    @property
    def parameters(self) -> int:
        return self.own + self.adapter

    @property
    def trained(self) -> int:
        """Parameters that have a gradient."""
        return self.own * self.learns + self.adapter

    @property
    def flops(self) -> float:
        """Forward, per token."""
        return 2.0 * self.uses * (self.d_in * self.d_out + self.rank * (self.d_in + self.d_out))

    @property
    def frozen_flops(self) -> float:
        """Those of forward whose weight has no gradient."""
        return 0.0 if self.learns else 2.0 * self.uses * self.d_in * self.d_out


@dataclass(frozen=True)
class Vector:
    """Parameters that no product multiplies by: norm weights, embeddings, attention sinks, balancing biases of a router."""

    name: str
    part: str
    size: int
    style: str = "between"
    learns: bool = True

    @property
    def parameters(self) -> int:
        return self.size

    @property
    def trained(self) -> int:
        """Parameters that have a gradient."""
        return self.size * self.learns


@dataclass(frozen=True)
class Saved:
    """A tensor kept from forward to backward: `width` elements per token of `bytes_` each (0: the compute dtype)."""

    name: str
    part: str
    width: float
    split: Literal["tensor", "sequence", "expert", "whole"]
    bytes_: float = 0.0
    per_position: float = 0.0  # elements per token and per attended position: the softmax, quadratic in s
    condition: Literal[
        "",
        "dropout",
        "stored-softmax",
        "unfused-softmax",
        "flash",
        "fused-norm",
        "unfused-norm",
        "unfused-activation",
        "weighted-outputs",
        "adapter-dropout",
        "cast-inputs",
    ] = ""


@dataclass(frozen=True)
class AttentionCore:
    """softmax(QKᵀ)V: `heads` of query width `qk` and value width `v`. An indexer of `index` width scores all positions to select some."""

    heads: int
    kv_heads: int
    qk: int
    v: int
    index: int = 0
    window: int = 0  # compressed attention: positions seen as they are
    ratio: int = 0  # compressed attention: positions that become one
    selected: int = 0  # compressed attention: compressed positions that the indexer selects; 0: all

    def flops(self, positions: float, candidates: float = 0.0) -> float:
        """Forward, per token that attends to `positions` others out of `candidates`: QKᵀ and PV, and the indexer's scores."""
        return 2.0 * self.heads * (self.qk + self.v) * positions + 2.0 * self.index * candidates


@dataclass(frozen=True)
class LinearCore:
    """The products of a linear mixer between its projections."""

    kind: str
    heads: int
    groups: int
    state: int
    value: int
    chunk: int

    @property
    def products(self) -> bool:
        """Whether it is computed by matrix products."""
        return self.kind != "mamba1"

    @property
    def flops(self) -> float:
        """Forward, per token. A scan without products: multiply-adds of decay, input and output for each channel and state."""
        if not self.products:
            return 6.0 * self.heads * self.value * self.state
        inside = self.groups * self.state + self.heads * self.value
        through = 4.0 * self.heads * self.state * self.value
        if self.kind == "gated-delta":  # k·kᵀ, and T·k and T·v of the triangular inverse T
            inside += self.heads * (2 * self.state + self.value)
            through *= 1.5
        return 2.0 * self.chunk * inside + through


@dataclass(frozen=True)
class ParameterBlock:
    kind: str
    linears: tuple[Linear, ...]
    vectors: tuple[Vector, ...] = ()
    saved: tuple[Saved, ...] = ()
    attention: AttentionCore | None = None
    linear: LinearCore | None = None

    def parameters(self) -> dict[str, int]:
        out: dict[str, int] = {}
        items: list[Linear | Vector] = [*self.linears, *self.vectors]
        for item in items:
            out[item.part] = out.get(item.part, 0) + item.parameters
        return out

    @property
    def trained(self) -> int:
        """Parameters that have a gradient."""
        return sum(linear.trained for linear in self.linears) + sum(vector.trained for vector in self.vectors)

    def fused_matrices(self) -> list[list[Linear]]:
        """Group matrices that multiply the same input (query, key and value; gate and up), in order."""
        groups: list[list[Linear]] = []
        columns: list[Linear] = []
        for linear in self.linears:
            if linear.style in ("row", "experts-row"):
                groups += [columns, [linear]] if columns else [[linear]]
                columns = []
            else:
                columns.append(linear)
        return [*groups, columns] if columns else groups


def joined(kind: str, parts: Sequence[ParameterBlock]) -> ParameterBlock:
    """Concatenate the tensors of several blocks into one."""
    return ParameterBlock(
        kind,
        tuple(linear for part in parts for linear in part.linears),
        tuple(vector for part in parts for vector in part.vectors),
        tuple(saved for part in parts for saved in part.saved),
        next((part.attention for part in parts if part.attention), None),
        next((part.linear for part in parts if part.linear), None),
    )


# --- Linear mixers: `[model.linear]`. They pass a state of fixed size along the sequence, so that their cost grows linearly with its length.
#
#     mamba2         S ← a·S + x⊗B, y = S·C + D·x                     scalar decay a per head (state-space duality; Nemotron-H)
#     mamba1         the same with a decay for each channel and state; a scan without matrix products (Jamba)
#     gated-delta    S ← a·(S − β(S·k − v)⊗k)                          the delta rule with a gate (Gated DeltaNet; Qwen3-Next)
#     lightning      S ← a·S + v⊗k, y = S·q                            constant decay per head (MiniMax)
#
# Legend: H `heads`, P `head_dim` (value width of a head), N `state` (key width), G `groups` (of keys: B and C of mamba2, key heads of the delta
# rule), C `chunk`. Training computes chunks of C positions with matrix products and passes states between chunks:
#
#     within a chunk    scores 2·C·G·N, times values 2·C·H·P             delta rule: once more k·kᵀ, T·k and T·v
#     states            2·H·N·P into the state and 2·H·N·P out of it     delta rule: one more product with the state
#
# in FLOPs per token, forward. Sources: Dao and Gu 2024 (mamba2), Gu and Dao 2023 (mamba1), Yang et al. 2024 (gated delta), Qin et al.
# 2024 (lightning).


class LinearOptions(Described):
    """The shape of a linear mixer."""

    kind: Literal["", "mamba2", "mamba1", "gated-delta", "lightning"] = ""
    """kind of the model's linear mixers; empty: it has none"""
    heads: Whole = 0
    """heads; mamba1: channels"""
    head_dim: Size = 1
    """width of a head's values; mamba1: 1"""
    groups: Whole = 0
    """groups that share keys: B and C of mamba2, key heads of gated-delta"""
    state: Whole = 0
    """state size: width of a head's keys"""
    conv: Whole = 0
    """width of the causal convolution; 0: none"""
    conv_bias: bool = False
    rank: Whole = 0
    """mamba1: width of the projection of the time step"""
    chunk: Size = 128
    """positions that training computes together"""

    @property
    def key_groups(self) -> int:
        return self.groups or self.heads

    @property
    def inner(self) -> int:
        """Width of all heads' values."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all groups' keys."""
        return 0 if self.kind == "mamba1" else self.key_groups * self.state

    @property
    def convolved(self) -> int:
        """Channels of the convolution: values, and where the keys come from the same projection the keys and queries."""
        return (self.inner + 2 * self.keys) if self.conv else 0

    @property
    def projected(self) -> int:
        """Width of the input projection: values, keys, queries, the output's gate, and numbers for each head (time steps, or gate and β)."""
        numbers = {"mamba2": self.heads, "gated-delta": 2 * self.heads}.get(self.kind, 0)
        return 2 * self.inner + 2 * self.keys + numbers

    def check(self) -> None:
        """Raise if the sizes that the kind needs are missing or do not divide."""
        if not self.heads or not self.state or (self.kind == "mamba1" and not self.rank):
            need = "heads, state and rank" if self.kind == "mamba1" else "heads, head_dim and state"
            raise MeshwrightError("MW-MODEL-010", f"linear.kind={self.kind} needs {need} above 0")
        if self.heads % self.key_groups:
            legal = [n for n in range(1, min(self.heads, 4096) + 1) if self.heads % n == 0]
            raise MeshwrightError(
                "MW-MODEL-010", f"{self.key_groups} groups do not divide {self.heads} linear heads", valid=legal
            )


def linear_part(o: LinearOptions, hidden: int) -> ParameterBlock:
    """A linear mixer: one input projection, a convolution, the scan, a norm, one output projection (mamba1 has two more projections)."""
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


# --- Compressed attention (DeepSeek-V4): `[model.compressed]`. All queries share one KV head, whose keys and values are the same vector.
# There are three kinds of layers, which see
#
#     window       the `window` nearest positions
#     selected     these, and of the positions compressed `ratio` to one (overlapping) those that an indexer selects
#     compressed   these, and all positions compressed `far_ratio` to one
#
# A compressor pools `ratio` positions with learned weights (two projections and a bias for each place in the group). Queries come from a latent
# (`q_rank`). The output projection is a product for each of `out_groups` groups of heads into a latent of `out_rank`, and one from all latents.
#
# Legend: h hidden, N heads, D head dim, q q_rank, g groups, r out_rank. Parameters of a window layer: h·q + q·N·D + h·D + N·D·r + g·r·h.


class CompressedOptions(Described):
    """Ratios of compression, and the grouped output projection."""

    ratio: Whole = 0
    """positions that the layers S compress into one; an indexer selects some"""
    far_ratio: Whole = 0
    """positions that the layers C compress into one; all are seen"""
    out_groups: Whole = 0
    """groups of heads with a separate output projection"""
    out_rank: Whole = 0
    """width of the output of each group"""


def compressed_part(
    o: CompressedOptions,
    mixer: str,
    hidden: int,
    heads: int,
    width: int,
    q_rank: int,
    window: int,
    index: tuple[int, int, int],
) -> ParameterBlock:
    """The attention of one kind of layer; `index`: heads and width of the indexer, and the positions that it selects."""
    inner = heads * width
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
