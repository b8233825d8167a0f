"""What blocks of a model are made of: matrices, vectors, tensors saved for backward, and the products between activations.

`anatomy` lists them for each block of a model. `style` names the rule by which tensor and expert parallelism cut a parameter (`sharding.rules`):
`column` cuts d_out, `row` cuts d_in, `between` and `inside` keep it whole on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


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
