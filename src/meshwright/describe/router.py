"""How a mixture of experts routes tokens: `[model.router]` in a plan file.

    score          softmax over the experts, or sigmoid of each (DeepSeek-V3)
    choice         tokens choose k experts, or experts choose their tokens
    groups         experts form groups, and a token chooses among the experts of the `groups_kept` best groups: by their
                   highest score (DeepSeek-V2), or where a bias balances by the sum of their two highest (V3)
    capacity       an expert takes at most c·T·k/E copies, the rest are dropped; 0: as many as come
    aux, z         weights α and β of the balancing and of the logits' loss
    balance_rate   γ of the bias that balances without a loss

Lowering asks two things: which share of the T·k copies travels, and how many the busiest expert gets over the mean.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.describe.base import Described, Size, Whole
from meshwright.errors import MeshwrightError


class RouterOptions(Described):
    score: Literal["", "softmax", "sigmoid"] = Field(
        default="", description="default: sigmoid where the model balances by a bias, else softmax"
    )
    choice: Literal["token", "expert"] = "token"
    groups: Size = Field(default=1, description="the experts' groups, of which a token visits some")
    groups_kept: Whole = Field(default=0, description="groups a token may choose from; 0: all")
    capacity: float = Field(default=0.0, ge=0, description="as a multiple of the mean load; 0: dropless")
    normalise: bool | None = Field(
        default=None, description="weights of a token sum to one; default: where k > 1 and tokens choose"
    )
    scale: float = Field(default=1.0, ge=0, description="of the routed experts' sum")
    aux: float = Field(default=0.0, ge=0, description="weight of the balancing loss (Switch, GShard)")
    aux_scope: Literal["batch", "sequence"] = Field(
        default="batch", description="the balancing loss is computed over all tokens in flight, or over each sequence"
    )
    z: float = Field(default=0.0, ge=0, description="weight of the squared log-sum of the logits (ST-MoE)")
    balance_rate: float = Field(default=0.001, ge=0, description="step of the balancing bias, where there is one")

    def check(self, experts: int, top_k: int) -> None:
        """Whether k experts can be chosen within groups."""
        kept = self.groups_kept or self.groups
        if experts % self.groups or kept > self.groups or top_k > kept * (experts // self.groups):
            raise MeshwrightError(
                "MW-MODEL-008",
                f"top {top_k} of {experts} experts in {kept} of {self.groups} groups",
                why="Groups have equal sizes, and the groups that are kept must hold at least top_k experts",
                fix="--set model.router.groups=1 --set model.router.groups_kept=0",
            )
        if self.groups > 1 and self.choice == "expert":
            raise MeshwrightError(
                "MW-MODEL-008",
                f"{self.groups} groups of experts with choice=expert",
                why="Groups limit what a token chooses",
                fix="--set model.router.choice=token",
            )

    @property
    def compares(self) -> bool:
        """Whether experts compare all tokens in flight, so that their scores must be gathered."""
        return self.choice == "expert" or self.capacity > 0

    @property
    def counts_together(self) -> bool:
        """Whether a token's way depends on the tokens that are in flight with it."""
        return self.compares or (self.aux > 0 and self.aux_scope == "batch")

    @property
    def travelling(self) -> float:
        """Share of the tokens' k copies that reaches an expert, at most."""
        if self.choice == "expert":
            return self.capacity or 1.0
        return min(1.0, self.capacity) if self.capacity else 1.0

    def busiest(self, imbalance: float) -> float:
        """Copies of the busiest expert over the mean, where unlimited it would be `imbalance`."""
        if self.choice == "expert":
            return self.travelling
        return min(imbalance, self.capacity) if self.capacity else imbalance
