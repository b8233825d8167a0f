"""The options of mixers that are tables of their own in [model]: `[model.linear]` and `[model.compressed]`."""

from typing import Literal

from meshwright.describe.base import Described, Size, Whole
from meshwright.errors import MeshwrightError

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
