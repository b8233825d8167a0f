"""Fused attention kernels that return the logarithm of their sum of exponentials (lse), which merging blocks needs.

The public `scaled_dot_product_attention` does not return it; the operators behind it do, and take it as an argument of
backward: with the **final** lse over all blocks instead of the lse of the block, the kernel returns the gradients of this
block. Private names of torch, all of them here:

    aten._scaled_dot_product_cudnn_attention, …_backward    Hopper and later: there twice as fast as flash
    aten._scaled_dot_product_flash_attention, …_backward    Ampere and later

Both need CUDA and 16-bit tensors, and support full and causal blocks; torch's public `can_use_…` check further
conditions. Without these names in torch, on a CPU, in float32 or with a window, the caller computes in tiles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda

HOPPER = (9, 0)
MULTIPLE = 8  # head widths must be a multiple; the public function pads to it


@dataclass(frozen=True)
class Kernel:
    """forward(q, k, v, triangle, scale) → output, ℓ; backward(grad_output, q, k, v, output, ℓ, triangle, scale) → dq, dk, dv."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, triangle: bool, scale: float) -> tuple[Tensor, Tensor]:
    output, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, triangle, scale=scale)[
        :2
    ]
    return output, lse.squeeze(-1)


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, triangle: bool, scale: float
) -> Any:
    backward, seed = torch.ops.aten._scaled_dot_product_cudnn_attention_backward, _no_dropout(q)
    last = (seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, triangle)
    return backward(grad, q, k, v, out, lse.contiguous().unsqueeze(-1), *last, scale=scale)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, triangle: bool, scale: float) -> tuple[Tensor, Tensor]:
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, triangle, scale=scale)[:2]
    return output, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, triangle: bool, scale: float
) -> Any:
    backward, seed = torch.ops.aten._scaled_dot_product_flash_attention_backward, _no_dropout(q)
    last = (None, None, q.shape[2], k.shape[2], 0.0, triangle, seed, seed)
    return backward(grad, q, k, v, out, lse.contiguous(), *last, scale=scale)


def _no_dropout(q: Tensor) -> Tensor:
    """The dropout seed that the kernels require as an argument even without dropout."""
    return torch.zeros((), dtype=torch.long, device=q.device)


def _has(name: str) -> bool:
    return all(hasattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention{end}") for end in ("", "_backward"))


def kernel_for(q: Tensor, k: Tensor, v: Tensor, triangle: bool) -> Kernel | None:
    """The fastest kernel that supports these tensors, or None."""
    if not q.is_cuda or q.dtype.itemsize != 2 or q.shape[-1] % MULTIPLE or v.shape[-1] % MULTIPLE:
        return None
    arguments: Any = cuda.SDPAParams(q, k, v, None, 0.0, triangle, q.shape[1] != k.shape[1])
    hopper = torch.cuda.get_device_capability(q.device) >= HOPPER
    if hopper and _has("cudnn") and cuda.can_use_cudnn_attention(arguments):
        return Kernel(_cudnn_forward, _cudnn_backward)
    if _has("flash") and cuda.can_use_flash_attention(arguments):
        return Kernel(_flash_forward, _flash_backward)
    return None
