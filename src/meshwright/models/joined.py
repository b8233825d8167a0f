"""The gate and the up projection of experts as one product, forward and for the gradient of their input.

    [g u] = x [W_g; W_u]ᵀ          dx = [dg du] [W_g; W_u]          dW_g = dgᵀ x          dW_u = duᵀ x

In two products backward computes dg W_g and du W_u separately and adds them: 5 more passes over the copies of all tokens. One product has
none of them, and twice as large a matrix: fewer tiles of a GPU's kernel are cut off at an edge.

The two weights remain two parameters, with the names and shapes that checkpoints and sharding know. Only their memory is shared: both are
views of one tensor [E, 2F, H], in which the rows of an expert's gate are followed by those of its up projection (`join`). What updates them,
copies or saves them sees two tensors with gaps between the experts. Their gradients are two separate tensors.

Legend: E experts, R copies of tokens, H hidden, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def join(gate: nn.Module, up: nn.Module) -> None:
    """Replace the weights [E, F, H] of two modules by views of one tensor, with the same values."""
    weights: list[Any] = [gate.weight, up.weight]
    both_E2FH = torch.cat([w.detach() for w in weights], dim=1)
    for part, old, view in zip((gate, up), weights, both_E2FH.chunk(2, dim=1), strict=True):
        part.register_parameter("weight", nn.Parameter(view, requires_grad=old.requires_grad))


def on_joined(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of gate and up as a function of [gate up]. Compiled, its backward writes both gradients side by side."""
    return lambda both_R2F: product(*both_R2F.chunk(2, dim=1))


def joined(gate_EFH: torch.Tensor, up_EFH: torch.Tensor) -> torch.Tensor | None:
    """The tensor [E, 2F, H] that two weights are views of; None if they are not."""
    experts, width, hidden = gate_EFH.shape
    size = width * hidden
    strides = (2 * size, hidden, 1)
    shared = gate_EFH.untyped_storage().data_ptr() == up_EFH.untyped_storage().data_ptr()
    if not shared or gate_EFH.stride() != strides or up_EFH.storage_offset() - gate_EFH.storage_offset() != size:
        return None
    return gate_EFH.detach().as_strided((experts, 2 * width, hidden), strides)


class _JoinedProduct(torch.autograd.Function):
    """`gate` and `up` are there to receive their gradients: the product uses `both`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RH: torch.Tensor,
        gate_EFH: torch.Tensor,
        up_EFH: torch.Tensor,
        both_E2FH: torch.Tensor,
        ends_E: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_RH, ends_E)
        ctx.both_E2FH = both_E2FH  # weights: not for hooks on saved activations
        return F.grouped_mm(x_RH, both_E2FH.transpose(-2, -1), offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_R2F: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_RH, ends_E = ctx.saved_tensors
        dx_RH = F.grouped_mm(gradient_R2F, ctx.both_E2FH, offs=ends_E) if ctx.needs_input_grad[0] else None
        dw_EFH = [
            F.grouped_mm(part_RF.t(), x_RH, offs=ends_E) if trains else None
            for part_RF, trains in zip(gradient_R2F.chunk(2, dim=1), ctx.needs_input_grad[1:3], strict=True)
        ]
        return dx_RH, *dw_EFH, None, None


def joined_product(
    x_RH: torch.Tensor, gate_EFH: torch.Tensor, up_EFH: torch.Tensor, both_E2FH: torch.Tensor, counts_E: torch.Tensor
) -> torch.Tensor:
    """[R, 2F]: the rows of each expert times its gate, then times its up projection."""
    return _JoinedProduct.apply(x_RH, gate_EFH, up_EFH, both_E2FH, counts_E.cumsum(0, dtype=torch.int32))
