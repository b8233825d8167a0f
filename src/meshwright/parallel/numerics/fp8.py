"""fp8 products: E4M3 forward, E5M2 for gradients, each tensor with a scale of its own, measured as it comes.

    E4M3   4 bits of exponent, 3 of mantissa: up to 448, relative error 2⁻⁴     weights and activations: precision
    E5M2   5 bits of exponent, 2 of mantissa: up to 57,344, error 2⁻³           gradients: range

    y  = s_x s_w · (x̂ ŵᵀ)      x̂ = fp8(x / s_x),  s_x = max|x| / 448
    dx = s_g s_w · (ĝ ŵ)        ĝ = fp8(g / s_g),  s_g = max|g| / 57,344
    dw = s_g s_x · (ĝᵀ x̂)      accumulated in fp32 or wider

One product is off by at most (u_a + u_b + u_a u_b) Σ|a||b|, u = 2⁻⁴ or 2⁻³, plus what falls below the smallest number;
errors of many terms have mixed signs and mostly cancel. *Dynamic* scaling reads each tensor once more before its
product (γ); *delayed* scaling would use the last step's maximum and save that pass, for fear of an overflow. Master
weights, norms, attention's core, routers, embedding and head stay wide; routed experts are `fp8_grouped`'s.

A scale is of the whole tensor, whatever ranks hold parts of it: under tensor and context parallelism they agree on the
largest, two numbers forward and one backward a product, so that every layout rounds as one device does. A scale a shard
would spare those small messages and round otherwise under every plan.

On a CPU the product is emulated: operands are rounded through torch's float8 types and multiplied wide, which is what
a tensor core does up to its accumulation. On a GPU with fp8 units `torch._scaled_mm` does it (the one private name
used, only here); where the shapes do not suit it (multiples of 16) or it is missing, the emulation takes its place.
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
UNIT = 16  # what the device's products want their sizes to be multiples of


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax().to(torch.float32)


def scale_of(most: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """That of a tensor whose largest is `most`. Multiplied, since a GPU divides by a number so and a CPU does not: one
    digit more or less in a scale, and a number between two of fp8's goes to the other."""
    return (most * (1 / torch.finfo(dtype).max)).clamp(min=torch.finfo(torch.float32).tiny)


def quantise(
    x: torch.Tensor, dtype: torch.dtype, most: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor in fp8 and its scale: x ≈ quantised · scale. `most`: the largest of the tensor this is a part of."""
    limit = torch.finfo(dtype).max
    scale = scale_of(largest(x) if most is None else most, dtype)
    # Divided wide: by a scale rounded to x's 16 bits, and multiplied back by the whole one, all would be off alike.
    # Rounding the scale may lift the largest just above the range; saturate, since E4M3 has no infinity.
    return (x.to(wide(x)) / scale).to(torch.float32).clamp(-limit, limit).to(dtype), scale


def wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def rounded(x: torch.Tensor, dtype: torch.dtype, most: torch.Tensor | None = None) -> torch.Tensor:
    """Through fp8 and back, wide."""
    small, scale = quantise(x, dtype, most)
    return small.to(wide(x)) * scale


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    a_most: torch.Tensor | None = None,
    b_most: torch.Tensor | None = None,
) -> torch.Tensor:
    """a [M, K] times b [N, K]ᵀ, both through fp8."""
    if not has_scaled_product(a, b):
        return (rounded(a, a_dtype, a_most) @ rounded(b, b_dtype, b_most).T).to(a.dtype)
    (small_a, scale_a), (small_b, scale_b) = quantise(a, a_dtype, a_most), quantise(b, b_dtype, b_most)
    out = a.dtype if a.dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.float32
    return on_device(small_a, small_b, scale_a, scale_b, out).to(a.dtype)


def on_device(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.dtype
) -> torch.Tensor:
    """The GPU's own product, of rows in whole units: those up to the next are zeros."""
    rows = len(a)
    whole = F.pad(a.view(torch.uint8), (0, 0, 0, -rows % UNIT)).view(a.dtype) if rows % UNIT else a
    return torch._scaled_mm(whole, b.T, scale_a, scale_b, out_dtype=out)[:rows]


def has_scaled_product(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the GPU's own fp8 product takes these shapes: K and N multiples of 16."""
    if not (a.is_cuda and hasattr(torch, "_scaled_mm") and torch.cuda.get_device_capability() >= FIRST_CAPABILITY):
        return False
    return a.shape[1] % UNIT == 0 and b.shape[0] % UNIT == 0


def agreed(most: torch.Tensor, groups: Sequence[ProcessGroup]) -> torch.Tensor:
    """The largest on any rank that holds a part."""
    for group in groups:
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group)
    return most


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, groups: Sequence[ProcessGroup]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        flat = x.flatten(0, -2)
        ctx.groups, ctx.most = groups, agreed(torch.stack((largest(flat), largest(weight))), groups)
        return scaled_product(flat, weight, E4M3, E4M3, *ctx.most).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        flat_x, flat_g = x.flatten(0, -2), gradient.flatten(0, -2)
        most_x, most_w = ctx.most
        most_g = agreed(largest(flat_g), ctx.groups)
        dx = scaled_product(flat_g, weight.T.contiguous(), E5M2, E4M3, most_g, most_w).unflatten(0, x.shape[:-1])
        return dx, scaled_product(flat_g.T.contiguous(), flat_x.T.contiguous(), E5M2, E4M3, most_g, most_x), None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, groups: Sequence[ProcessGroup] = ()
) -> torch.Tensor:
    """`F.linear` with fp8 products; the bias is added wide. Over `groups` the operands are parts of larger ones."""
    y = _Linear.apply(x, weight, groups)
    return y if bias is None else y + bias


class Fp8Products(TorchFunctionMode):
    """Within it, every `F.linear` is an fp8 one, whoever calls it: `nn.Linear`, or a row-split product."""

    def __init__(self, groups: Sequence[ProcessGroup] = ()) -> None:
        super().__init__()
        self.groups = groups

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            return linear(*args, **{**(kwargs or {}), "groups": self.groups})
        return function(*args, **(kwargs or {}))


def put_on(modules: Iterable[nn.Module], groups: Sequence[ProcessGroup] = ()) -> None:
    """Run the linear layers inside these modules in fp8; over `groups` they are divided."""
    for module in modules:
        module.forward = _within(module.forward, groups)


def _within(forward: Callable[..., Any], groups: Sequence[ProcessGroup]) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        with Fp8Products(groups):
            return forward(*args, **named)

    return run
