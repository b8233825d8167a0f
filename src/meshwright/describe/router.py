"""How a mixture of experts routes tokens: `[model.router]` in a plan file.

    score          softmax over the experts, or a sigmoid per expert (DeepSeek-V3)
    choice         tokens choose k experts, or experts choose their tokens
    groups         experts form groups, and a token chooses among the experts of the `groups_kept` best groups. Groups are
                   ranked by their highest score (DeepSeek-V2), or, with a balancing bias, by the sum of their two highest (V3)
    capacity       an expert takes at most c·T·k/E token copies and drops the others; 0: no limit
    aux, z         weights α and β of the balancing loss and of the loss on the logits
    balance_rate   γ: step of the bias that balances the experts without a loss

Lowering needs two numbers: the share of the T·k token copies that is dispatched, and the load of the busiest expert over the mean.
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
    groups: Size = Field(default=1, description="groups of experts; a token chooses experts from some of them")
    groups_kept: Whole = Field(default=0, description="groups a token may choose from; 0: all")
    capacity: float = Field(default=0.0, ge=0, description="as a multiple of the mean load; 0: dropless")
    normalise: bool | None = Field(
        default=None, description="weights of a token sum to one; default: where k > 1 and tokens choose"
    )
    scale: float = Field(default=1.0, ge=0, description="factor of the sum of the routed experts' outputs")
    weigh_inputs: bool = Field(
        default=False, description="weights multiply the input of an expert instead of its output (Llama 4)"
    )
    aux: float = Field(default=0.0, ge=0, description="weight of the balancing loss (Switch, GShard)")
    aux_scope: Literal["batch", "sequence"] = Field(
        default="batch", description="the balancing loss is computed over all tokens in flight, or over each sequence"
    )
    z: float = Field(default=0.0, ge=0, description="weight of the squared log-sum-exp of the logits (ST-MoE)")
    balance_rate: float = Field(default=0.001, ge=0, description="step of the balancing bias, if the model has one")

    def check(self, experts: int, top_k: int) -> None:
        """Raise if a token cannot choose k experts within its groups."""
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
        """Whether the routing or the loss of a token depends on the other tokens of the micro-batch."""
        return self.compares or (self.aux > 0 and self.aux_scope == "batch")

    @property
    def travelling(self) -> float:
        """Largest share of the tokens' k copies that is dispatched to experts."""
        if self.choice == "expert":
            return self.capacity or 1.0
        return min(1.0, self.capacity) if self.capacity else 1.0

    def can_drop(self, experts: int, top_k: int) -> bool:
        """Whether the capacity can drop copies. An expert that all T tokens choose keeps c·T·k/E of them: all if c ≥ E/k."""
        return self.choice == "token" and 0 < self.capacity < experts / top_k

    def busiest(self, imbalance: float) -> float:
        """Load of the busiest expert over the mean; without a capacity limit it would be `imbalance`."""
        if self.choice == "expert":
            return self.travelling
        return min(imbalance, self.capacity) if self.capacity else imbalance
