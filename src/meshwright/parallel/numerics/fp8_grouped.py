"""fp8 products of routed experts: a scale a token for what they read and learn from, a scale an expert for its weight.

    y_r  = s_r s_e · (x̂_r ŵ_eᵀ)     x̂_r = E4M3(x_r / s_r),  s_r = max|x_r| / 448,  s_e = max|w_e| / 448
    dx_r = σ_r s_e · (ĝ_r ŵ_e)       ĝ_r = E5M2(g_r / σ_r),  σ_r the power of two from max|g_r| / 57,344 up
    dw_e = σ_e · (ĥᵀ x̂)             ĥ_r = E5M2(s_r g_r / σ_e), σ_e likewise, of all rows of the expert

Which tokens an expert sees together is the layout's doing: those of one rank, or with expert parallelism those of many.
One scale for all of them would make a token's rounding depend on its company, and on another number of ranks another
model would be trained. A scale a token does not; DeepSeek-V3 scales 128 features of one token together for the range's
sake. The weight's gradient is a sum over tokens, of which no scale of a token can be taken out: it moves over to the
other factor, s_r g_r, and x̂ is used as forward made it: one rounding less, and one byte an element is all that is kept.

A power of two as scale changes no digit: numbers are rounded alike whatever it is, but for those 2³⁰ times below the
largest. So σ needs no agreement between ranks that hold parts of a row, or some rows of an expert. E4M3 spans only 2¹⁵
and is worth its whole range: where experts are split over expert_tp, ranks agree on s_e, a number an expert and weight,
and on s_r of the rows that `down` reads, of which each holds some columns. Nothing is sent backward.

On a GPU with fp8 units each expert's run of rows is one `torch._scaled_mm`, its rows' scales multiplied in after; where
shapes do not suit it, and on a CPU, the product is emulated (`fp8`).

Legend: E experts, R rows (copies of tokens, sorted by expert), I width in, O width out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from meshwright.models.moe import Experts, GroupedLinear
from meshwright.parallel.numerics.fp8 import (
    E4M3,
    E5M2,
    UNIT,
    agreed,
    has_scaled_product,
    on_device,
    quantise,
    scale_of,
    wide,
)

EXPONENT = 0x7F800000  # the bits of a float32 that hold it


def largest_of(x: torch.Tensor, dims: int | tuple[int, ...]) -> torch.Tensor:
    return x.detach().abs().amax(dims, keepdim=True).to(torch.float32)


def up_to_power_of_two(most: torch.Tensor) -> torch.Tensor:
    """The least above `most` whose scale is a power of two."""
    exponent = scale_of(most, E5M2).view(torch.int32).bitwise_and(EXPONENT).view(torch.float32)
    return exponent * (2 * torch.finfo(E5M2).max)


def product(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [N, K]ᵀ, both in fp8, times one number; as wide as sums of `like` are."""
    if not len(a) or not has_scaled_product(a, b):
        return (a.to(wide(like)) @ b.to(wide(like)).T) * scale
    one = torch.ones((), dtype=torch.float32, device=a.device)
    alone = scale.reshape(()).clone()  # the device wants a scale at an address in units of 16 bytes
    return on_device(a, b, one, alone, torch.float32)


def columns(x: torch.Tensor) -> torch.Tensor:
    """[R, N] → [N, R], with rows of zeros where there is no multiple of a unit of them. Moved as bytes, which every
    device can."""
    more = -len(x) % UNIT
    bits = x.view(torch.uint8)
    return torch.cat((bits, bits.new_zeros(more, x.shape[1]))).T.contiguous().view(x.dtype)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RI: torch.Tensor,
        weight_EOI: torch.Tensor,
        counts: list[int],
        group: ProcessGroup | None,
        part: bool,
    ) -> torch.Tensor:
        most_R, most_E = largest_of(x_RI, 1), largest_of(weight_EOI, (1, 2))
        if group is not None:
            told = agreed(torch.cat((most_R.flatten(), most_E.flatten())) if part else most_E.flatten(), [group])
            most_E = told[-len(most_E) :].view_as(most_E)
            most_R = told[: -len(most_E)].view_as(most_R) if part else most_R
        (small_RI, scale_R), (small_EOI, scale_E) = quantise(x_RI, E4M3, most_R), quantise(weight_EOI, E4M3, most_E)
        ctx.counts, ctx.most_E = counts, most_E
        ctx.save_for_backward(small_RI, scale_R, weight_EOI)
        runs = zip(small_RI.split(counts), small_EOI, scale_E, strict=True)
        return (torch.cat([product(x, w, s, x_RI) for x, w, s in runs]) * scale_R).to(x_RI.dtype)

    @staticmethod
    def backward(ctx: Any, gradient_RO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        small_RI, scale_R, weight_EOI = ctx.saved_tensors
        small_EOI, scale_E = quantise(weight_EOI, E4M3, ctx.most_E)
        small_RO, slope_R = quantise(gradient_RO, E5M2, up_to_power_of_two(largest_of(gradient_RO, 1)))
        runs = zip(small_RO.split(ctx.counts), small_EOI, scale_E, strict=True)
        dx_RI = torch.cat([product(g, columns(w)[:, : len(w)], s, gradient_RO) for g, w, s in runs]) * slope_R
        learnt = zip((gradient_RO * scale_R).split(ctx.counts), small_RI.split(ctx.counts), weight_EOI, strict=True)
        dw_EOI = torch.stack([_weight_gradient(h, x, w) for h, x, w in learnt])
        return dx_RI.to(gradient_RO.dtype), dw_EOI.to(weight_EOI.dtype), None, None, None


def _weight_gradient(h_RO: torch.Tensor, small_RI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    if not len(h_RO):  # an expert without a token
        return torch.zeros_like(weight_OI, dtype=wide(h_RO))
    small_RO, scale = quantise(h_RO, E5M2, up_to_power_of_two(largest_of(h_RO, (0, 1))))
    return product(columns(small_RO), columns(small_RI), scale, h_RO)


def grouped(
    x_RI: torch.Tensor,
    weight_EOI: torch.Tensor,
    counts: list[int],
    group: ProcessGroup | None = None,
    part: bool = False,
) -> torch.Tensor:
    """Each expert's run of rows times its weight, in fp8. Over `group` weights are divided, and where `part` says so
    the rows with them, by columns."""
    return _Grouped.apply(x_RI, weight_EOI, counts, group, part)


def put_on(modules: Iterable[nn.Module], group: ProcessGroup | None = None) -> None:
    """Run the routed experts inside these modules in fp8; over `group` each of them is divided."""
    for experts in (part for module in modules for part in module.modules() if isinstance(part, Experts)):
        for kind, linear in experts.named_children():
            if isinstance(linear, GroupedLinear):
                linear.product = _over(group, kind == "down")


def _over(group: ProcessGroup | None, part: bool) -> Any:
    return lambda x_RI, weight_EOI, counts: grouped(x_RI, weight_EOI, counts, group, part)
