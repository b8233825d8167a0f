"""Parts of every transformer layer: norms, and the feed-forward network, σ(W₁x) W₂ or gated, (σ(W_g x) ∘ W₁x) W₂."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.describe.model import Model

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "geglu": F.gelu,
    "relu": F.relu,
    "swiglu": F.silu,
}


def make_norm(model: Model, width: int = 0) -> nn.Module:
    if model.norm == "layernorm":
        return nn.LayerNorm(width or model.hidden, eps=model.norm_epsilon)
    return nn.RMSNorm(width or model.hidden, eps=model.norm_epsilon)


class FeedForward(nn.Module):
    def __init__(self, model: Model, width: int = 0) -> None:
        super().__init__()
        width = width or model.ffn
        if model.gated:
            self.gate = nn.Linear(model.hidden, width, bias=model.ffn_bias)
        self.up = nn.Linear(model.hidden, width, bias=model.ffn_bias)
        self.down = nn.Linear(width, model.hidden, bias=model.ffn_bias)
        self.gated, self.activation = model.gated, ACTIVATIONS[model.activation]

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        if self.gated:
            return self.down(self.activation(self.gate(x_BSH)) * self.up(x_BSH))
        return self.down(self.activation(self.up(x_BSH)))
