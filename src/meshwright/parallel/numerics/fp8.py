"""fp8 matrix products: E4M3 in forward, E5M2 for gradients, one scale per tensor, computed when the tensor is used.

    E4M3   4 bits of exponent, 3 of mantissa: up to 448, relative error 2⁻⁴     weights and activations: precision
    E5M2   5 bits of exponent, 2 of mantissa: up to 57,344, error 2⁻³           gradients: range

    y  = s_x s_w · (x̂ ŵᵀ)      x̂ = fp8(x / s_x),  s_x = max|x| / 448
    dx = s_g s_w · (ĝ ŵ)        ĝ = fp8(g / s_g),  s_g = max|g| / 57,344
    dw = s_g s_x · (ĝᵀ x̂)      accumulated in fp32 or wider

The error of one product is at most (u_a + u_b + u_a u_b) Σ|a||b|, u = 2⁻⁴ or 2⁻³, plus underflow; the errors of
many terms have mixed signs and mostly cancel. *Dynamic* scaling (used here) reads each tensor once more before its product;
*delayed* scaling would use the maximum of the last step and save that pass, at the risk of an overflow. Master weights, norms,
attention's core, routers, embedding and head stay in higher precision; routed experts are in `fp8_grouped`.

A scale belongs to the whole tensor: under tensor and context parallelism the ranks reduce the maximum of their parts (two
numbers in forward and one in backward per product), so that every layout rounds as one device does. A scale per shard
would save these small messages, but rounding would depend on the plan.

On a CPU the product is emulated: operands are rounded through torch's float8 types and multiplied in full precision, as
a tensor core does up to its accumulation. On a GPU with fp8 units `torch._scaled_mm` computes it (the one private name
used, only here); where it does not support the shapes (multiples of 16) or is missing, the product is emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FIRST_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)
UNIT = 16  # sizes of the device's products must be multiples of it


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in a tensor."""
    return x.abs().amax().to(torch.float32)


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale of a tensor whose largest magnitude is `amax`. It multiplies by the reciprocal, because a GPU divides by a
    constant in this way and a CPU does not: a difference in the last bit of a scale can change the rounding of a number."""
    return (amax * (1 / torch.finfo(dtype).max)).clamp(min=torch.finfo(torch.float32).tiny)


def quantise(
    x: torch.Tensor, dtype: torch.dtype, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor in fp8 and its scale: x ≈ quantised · scale. If `x` is a part of a larger tensor, `amax` is the largest
    magnitude of that tensor."""
    limit = torch.finfo(dtype).max
    scale = scale_of(amax_of(x) if amax is None else amax, dtype)
    # Divided in at least float32: dividing by a scale rounded to 16 bits and multiplying by the exact one would add a bias.
    # Rounding the scale may lift the largest value just above the range; saturate, since E4M3 has no infinity.
    return (x.to(sum_dtype(x)) / scale).to(torch.float32).clamp(-limit, limit).to(dtype), scale


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which sums of products of `x` are computed: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def rounded(x: torch.Tensor, dtype: torch.dtype, amax: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor rounded to fp8, in at least float32."""
    quantised, scale = quantise(x, dtype, amax)
    return quantised.to(sum_dtype(x)) * scale


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    a_amax: torch.Tensor | None = None,
    b_amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """a [M, K] times b [N, K]ᵀ, both rounded to fp8."""
    if not has_scaled_product(a, b):
        return (rounded(a, a_dtype, a_amax) @ rounded(b, b_dtype, b_amax).T).to(a.dtype)
    (quantised_a, scale_a), (quantised_b, scale_b) = quantise(a, a_dtype, a_amax), quantise(b, b_dtype, b_amax)
    out = a.dtype if a.dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.float32
    return device_product(quantised_a, quantised_b, scale_a, scale_b, out).to(a.dtype)


def device_product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.dtype
) -> torch.Tensor:
    """The GPU's fp8 product; rows are padded with zeros to a multiple of `UNIT`."""
    rows = len(a)
    whole = F.pad(a.view(torch.uint8), (0, 0, 0, -rows % UNIT)).view(a.dtype) if rows % UNIT else a
    return torch._scaled_mm(whole, b.T, scale_a, scale_b, out_dtype=out)[:rows]


def has_scaled_product(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the GPU's fp8 product supports these shapes: K and N multiples of 16."""
    if not (a.is_cuda and hasattr(torch, "_scaled_mm") and torch.cuda.get_device_capability() >= FIRST_CAPABILITY):
        return False
    return a.shape[1] % UNIT == 0 and b.shape[0] % UNIT == 0


def max_over_ranks(amax: torch.Tensor, groups: Sequence[ProcessGroup]) -> torch.Tensor:
    """The maximum over all ranks that hold a part of the tensor."""
    for group in groups:
        distributed.all_reduce(amax, distributed.ReduceOp.MAX, group)
    return amax


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, groups: Sequence[ProcessGroup]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        flat = x.flatten(0, -2)
        ctx.groups, ctx.amax = groups, max_over_ranks(torch.stack((amax_of(flat), amax_of(weight))), groups)
        return scaled_product(flat, weight, E4M3, E4M3, *ctx.amax).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        flat_x, flat_g = x.flatten(0, -2), gradient.flatten(0, -2)
        amax_x, amax_w = ctx.amax
        amax_g = max_over_ranks(amax_of(flat_g), ctx.groups)
        dx = scaled_product(flat_g, weight.T.contiguous(), E5M2, E4M3, amax_g, amax_w).unflatten(0, x.shape[:-1])
        return dx, scaled_product(flat_g.T.contiguous(), flat_x.T.contiguous(), E5M2, E4M3, amax_g, amax_x), None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, groups: Sequence[ProcessGroup] = ()
) -> torch.Tensor:
    """`F.linear` with fp8 products; the bias is added in full precision. The operands are split over `groups`."""
    y = _Linear.apply(x, weight, groups)
    return y if bias is None else y + bias


class Fp8Products(TorchFunctionMode):
    """A mode in which every `F.linear` is an fp8 product, whether `nn.Linear` or a row-split layer calls it."""

    def __init__(self, groups: Sequence[ProcessGroup] = ()) -> None:
        super().__init__()
        self.groups = groups

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            return linear(*args, **{**(kwargs or {}), "groups": self.groups})
        return function(*args, **(kwargs or {}))


def enable_fp8(modules: Iterable[nn.Module], groups: Sequence[ProcessGroup] = ()) -> None:
    """Run the linear layers inside these modules in fp8; the layers are split over `groups`."""
    for module in modules:
        module.forward = _with_fp8(module.forward, groups)


def _with_fp8(forward: Callable[..., Any], groups: Sequence[ProcessGroup]) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        with Fp8Products(groups):
            return forward(*args, **named)

    return run
