"""Linear mixers: `[model.linear]`. They pass a state of fixed size along the sequence, so that their cost grows linearly with its length.

    mamba2         S ← a·S + x⊗B, y = S·C + D·x                     scalar decay a per head (state-space duality; Nemotron-H)
    mamba1         the same with a decay for each channel and state; a scan without matrix products (Jamba)
    gated-delta    S ← a·(S − β(S·k − v)⊗k)                          the delta rule with a gate (Gated DeltaNet; Qwen3-Next)
    lightning      S ← a·S + v⊗k, y = S·q                            constant decay per head (MiniMax)

Legend: H `heads`, P `head_dim` (value width of a head), N `state` (key width), G `groups` (of keys: B and C of mamba2, key heads of the delta
rule), C `chunk`. Training computes chunks of C positions with matrix products and passes states between chunks:

    within a chunk    scores 2·C·G·N, times values 2·C·H·P             delta rule: once more k·kᵀ, T·k and T·v
    states            2·H·N·P into the state and 2·H·N·P out of it     delta rule: one more product with the state

in FLOPs per token, forward. Sources: Dao and Gu 2024 (mamba2), Gu and Dao 2023 (mamba1), Yang et al. 2024 (gated delta), Qin et al. 2024 (lightning).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.describe.base import Described, Size, Whole
from meshwright.describe.tensors import Block, Linear, LinearCore, Saved, Vector
from meshwright.errors import MeshwrightError


class LinearOptions(Described):
    """The shape of a linear mixer."""

    kind: Literal["", "mamba2", "mamba1", "gated-delta", "lightning"] = Field(
        default="", description="kind of the model's linear mixers; empty: it has none"
    )
    heads: Whole = Field(default=0, description="heads; mamba1: channels")
    head_dim: Size = Field(default=1, description="width of a head's values; mamba1: 1")
    groups: Whole = Field(default=0, description="groups that share keys: B and C of mamba2, key heads of gated-delta")
    state: Whole = Field(default=0, description="state size: width of a head's keys")
    conv: Whole = Field(default=0, description="width of the causal convolution; 0: none")
    conv_bias: bool = False
    rank: Whole = Field(default=0, description="mamba1: width of the projection of the time step")
    chunk: Size = Field(default=128, description="positions that training computes together")

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


def linear_part(o: LinearOptions, hidden: int) -> Block:
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
    return Block(
        "",
        tuple(linears),
        tuple(vectors),
        tuple(saved),
        linear=LinearCore(o.kind, o.heads, o.key_groups, o.state, o.head_dim, o.chunk),
    )
