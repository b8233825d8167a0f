"""Parts of every transformer layer: norms, and the feed-forward network, σ(W₁x) W₂ or gated, (σ(W_g x) ∘ W₁x) W₂.

gpt-oss clamps both halves of its SwiGLU and shifts the second one. With g = W_g x and u = W₁x:

    min(g, c) · sigmoid(α · min(g, c)) ∘ (clamp(u, −c, c) + shift)          c `swiglu_limit`, α `swiglu_alpha`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.describe.model import Model

QUICK_GELU = 1.702
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "quick-gelu": lambda x: x * torch.sigmoid(QUICK_GELU * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu-tanh": partial(F.gelu, approximate="tanh"),
}


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Linear(nn.Linear):
    """A linear layer whose product can be replaced, by one in fp8 for example."""

    product: Product

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        super().__init__(d_in, d_out, bias)
        self.product = F.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)


def make_norm(model: Model, width: int = 0, epsilon: float = 0.0) -> nn.Module:
    """A norm of the model's kind; by default over the hidden width, with the epsilon of the model."""
    kind = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
    return kind(width or model.hidden, eps=epsilon or model.norm_epsilon)


def gated_product(model: Model) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(gate, up) → the input of the down projection, of a model with a gated activation."""
    activation = ACTIVATIONS[model.activation]
    limit, alpha, shift = model.swiglu_limit, model.swiglu_alpha, model.swiglu_shift
    if (limit, alpha, shift) == (0, 1, 0):
        return lambda gate, up: activation(gate) * up

    def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + shift)

    return clamped


class FeedForward(nn.Module):
    def __init__(self, model: Model, width: int = 0) -> None:
        super().__init__()
        width = width or model.ffn
        if model.gated:
            self.gate = Linear(model.hidden, width, bias=model.ffn_bias)
        self.up = Linear(model.hidden, width, bias=model.ffn_bias)
        self.down = Linear(width, model.hidden, bias=model.ffn_bias)
        self.gated, self.activation = model.gated, ACTIVATIONS[model.activation]
        self.product = gated_product(model)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        if self.gated:
            return self.down(self.product(self.gate(x_BSH), self.up(x_BSH)))
        return self.down(self.activation(self.up(x_BSH)))
