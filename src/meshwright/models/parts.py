"""Parts of every transformer layer: norms, and the feed-forward network, σ(W₁x) W₂ or gated, (σ(W_g x) ∘ W₁x) W₂.

gpt-oss clamps both halves of its SwiGLU and shifts the second one. With g = W_g x and u = W₁x:

    min(g, c) · sigmoid(α · min(g, c)) ∘ (clamp(u, −c, c) + shift)          c `swiglu_limit`, α `swiglu_alpha`

The dtype in which sums are computed, whatever the precision of a model.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.describe.model import Model
from meshwright.describe.variants import ACTIVATIONS


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are computed: float32, or wider."""
    return torch.promote_types(dtype, torch.float32)


QUICK_GELU = 1.702
ACTIVATIONS.provide("gelu", function=F.gelu)
ACTIVATIONS.provide("gelu-tanh", function=partial(F.gelu, approximate="tanh"))
ACTIVATIONS.provide("quick-gelu", function=lambda x: x * torch.sigmoid(QUICK_GELU * x))
ACTIVATIONS.provide("relu", function=F.relu)
ACTIVATIONS.provide("relu2", function=lambda x: F.relu(x).square())
ACTIVATIONS.provide("swiglu", function=F.silu)
ACTIVATIONS.provide("geglu", function=F.gelu)
ACTIVATIONS.provide("geglu-tanh", function=partial(F.gelu, approximate="tanh"))


def activation_of(model: Model) -> Callable[[Tensor], Tensor]:
    """The activation function of a model's FFN."""
    function: Callable[[Tensor], Tensor] = ACTIVATIONS.part(model.activation, "function")
    return function


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class ProductLinear(nn.Linear):
    """A linear layer whose product can be replaced, by one in fp8 for example."""

    product: Product

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        super().__init__(d_in, d_out, bias)
        self.product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class OffsetRMSNorm(nn.RMSNorm):
    """An RMS norm that multiplies by offset + weight (Gemma: 1 + weight), so that decay of the weight pulls the factor to the offset.
    The sum is computed in float32 or wider: the sum 1 + weight in bf16 would lose a small weight."""

    def __init__(self, width: int, eps: float, offset: float) -> None:
        super().__init__(width, eps=eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_single(x.dtype)
        weight = self.weight.to(wide) + self.offset
        return F.rms_norm(x.to(wide), self.normalized_shape, weight, self.eps).to(x.dtype)


class OffsetLayerNorm(nn.LayerNorm):
    """The same for a layer norm."""

    def __init__(self, width: int, eps: float, offset: float, bias: bool) -> None:
        super().__init__(width, eps=eps, bias=bias)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_single(x.dtype)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x.to(wide), self.normalized_shape, self.weight.to(wide) + self.offset, bias, self.eps).to(
            x.dtype
        )


def make_norm(model: Model, width: int = 0, epsilon: float = 0.0) -> nn.Module:
    """A norm of the model's kind; by default over the hidden width, with the epsilon of the model."""
    width, epsilon, offset = width or model.hidden, epsilon or model.norm_epsilon, model.norm_offset
    weighted, biased = "weight" in model.norm_affine, "bias" in model.norm_affine
    if model.norm == "layernorm":
        if offset:
            return OffsetLayerNorm(width, epsilon, offset, biased)
        return nn.LayerNorm(width, epsilon, elementwise_affine=weighted, bias=biased)
    return rms_norm(width, epsilon, offset) if weighted else nn.RMSNorm(width, epsilon, elementwise_affine=False)


def rms_norm(width: int, epsilon: float, offset: float) -> nn.Module:
    return OffsetRMSNorm(width, epsilon, offset) if offset else nn.RMSNorm(width, epsilon)


class ProjectionNorm(nn.Module):
    """An RMS norm of queries or keys over all heads together (OLMo 2). Where ranks hold parts of the heads, `mean` averages over them: each
    rank has equally many elements, copies of KV heads included."""

    def __init__(self, width: int, epsilon: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon, self.offset = epsilon, offset
        self.mean: Callable[[Tensor], Tensor] = lambda local: local

    def weights(self) -> Tensor:
        """A weight for each element of its input."""
        return self.weight

    def forward(self, x_BSX: Tensor) -> Tensor:
        wide = x_BSX.to(at_least_single(x_BSX.dtype))
        square = self.mean(wide.square().mean(-1, keepdim=True))
        factor = self.weights().to(wide.dtype) + self.offset
        return (wide * torch.rsqrt(square + self.epsilon) * factor).to(x_BSX.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap): almost x where |x| is far below the cap, and never beyond it."""
    return torch.tanh(x / cap) * cap


def gated_product(model: Model) -> Callable[[Tensor, Tensor], Tensor]:
    """(gate, up) → the input of the down projection, of a model with a gated activation."""
    activation = activation_of(model)
    limit, alpha, shift = model.swiglu_limit, model.swiglu_alpha, model.swiglu_shift
    if (limit, alpha, shift) == (0, 1, 0):
        return lambda gate, up: activation(gate) * up

    def clamped(gate: Tensor, up: Tensor) -> Tensor:
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + shift)

    return clamped


class FeedForward(nn.Module):
    def __init__(self, model: Model, width: int = 0) -> None:
        super().__init__()
        width = width or model.ffn
        if model.gated:
            self.gate = ProductLinear(model.hidden, width, bias=model.ffn_bias)
        self.up = ProductLinear(model.hidden, width, bias=model.ffn_bias)
        self.down = ProductLinear(width, model.hidden, bias=model.ffn_bias)
        self.gated, self.activation = model.gated, activation_of(model)
        self.product = gated_product(model)

    def forward(self, x_BSH: Tensor) -> Tensor:
        if self.gated:
            return self.down(self.product(self.gate(x_BSH), self.up(x_BSH)))
        return self.down(self.activation(self.up(x_BSH)))
