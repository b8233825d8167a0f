"""Products on a GPU's tensor cores: of 16-bit operands with results in float32, and of fp8 operands.

A tensor core multiplies bf16 numbers exactly and sums the products in float32. Widened operands would give the same products, without tensor
cores: ten times as slow, after a pass that writes 4 bytes for each element.

A router computes its logits in float32. Its two operands are bf16 already, so forward needs nothing more. The gradient of the logits is float32. It
is the sum of three bf16 numbers, each the rounding of what the ones before it leave (8 bits of the 24 each, so the sum is exact):

    g = g₁ + g₂ + g₃        dx = [g₁ g₂ g₃] [W; W; W]        dW = Σ_i g_iᵀ x

So each of the three products is one product of bf16 operands, with the error of a float32 sum.

Private name of torch: `torch._scaled_mm`, its only fp8 product that runs alike from 2.11 on; `scaled_product` is its one caller.

Legend: T tokens, H hidden, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.models.parts import at_least_single

PARTS = 3  # bf16 numbers whose sum is a float32


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: torch.dtype, fast: bool) -> Tensor:
    """The GPU's product of fp8 operands, a [M, K] times b [N, K]ᵀ: one scale per tensor or per row. `fast` keeps the sum to fewer bits."""
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out, use_fast_accum=fast)


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, in float32 or wider, in the memory of `total`; None is zero."""
    wide = at_least_single(a.dtype)
    if wide == a.dtype:
        return a @ b if total is None else total.addmm_(a, b)
    if not a.is_cuda:
        return add_product(total, a.to(wide), b.to(wide))
    return torch.mm(a, b, out_dtype=wide) if total is None else torch.addmm(total, a, b, out_dtype=wide, out=total)


def in_parts(x: Tensor) -> list[Tensor]:
    """bf16 tensors whose sum is a float32 tensor."""
    parts = []
    for _ in range(PARTS):
        parts.append(x.to(torch.bfloat16))
        x = x - parts[-1]
    return parts


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        return add_product(None, x_TH, weight_EH.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TH, weight_EH = ctx.saved_tensors
        trains_x, trains_weight = ctx.needs_input_grad
        gradient_TP = torch.cat(in_parts(gradient_TE), dim=1)
        dx_TH = gradient_TP @ weight_EH.repeat(PARTS, 1) if trains_x else None
        dw_EH = None
        if trains_weight:
            dw_EH = add_product(None, gradient_TP.t(), x_TH).unflatten(0, (PARTS, -1)).sum(0).to(weight_EH.dtype)
        return dx_TH, dw_EH


def wide_linear(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """x Wᵀ in float32, of bf16 operands."""
    return _WideLinear.apply(x_TH, weight_EH)


def widened_linear(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """x Wᵀ in float32 or wider, of operands that are widened first."""
    wide = at_least_single(x_TH.dtype)
    return x_TH.to(wide) @ weight_EH.to(wide).t()
