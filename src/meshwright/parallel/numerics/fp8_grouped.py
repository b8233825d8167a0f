"""fp8 products of routed experts: a scale per token for inputs and gradients, a scale per expert for weights.

    y_r  = s_r s_e · (x̂_r ŵ_eᵀ)     x̂_r = E4M3(x_r / s_r),  s_r = max|x_r| / 448,  s_e = max|w_e| / 448
    dx_r = σ_r s_e · (ĝ_r ŵ_e)       ĝ_r = E5M2(g_r / σ_r),  σ_r the power of two above max|g_r| / 57,344
    dw_e = σ_e · (ĥᵀ x̂)             ĥ_r = E5M2(s_r g_r / σ_e), σ_e likewise, of all rows of the expert

The tokens that an expert processes together depend on the layout: those of one rank, or with expert parallelism those of
many ranks. With one scale for all of them, the rounding of a token would depend on the other tokens, and another number of
ranks would train another model. A scale per token avoids that. (DeepSeek-V3 has a scale per 128 features of a token, for
more range.) The gradient of the weight is a sum over tokens, from which the scale of a token cannot be factored out. So the
scale is applied to the other factor, s_r g_r, and x̂ is reused from forward: one rounding less, and only one byte per element
is saved for backward.

A scale that is a power of two does not change the mantissa, so it does not affect rounding, except for numbers 2³⁰ times
below the largest. So ranks that hold parts of a row, or some rows of an expert, need not agree on σ. E4M3 spans only 2¹⁵,
and its full range is needed: if experts are split over expert_tp, ranks reduce s_e (one number per expert and weight) and
s_r of the inputs of `down`, of which each rank has some columns. Backward sends no message. The scale of a weight is per expert for every
`workload.scaling`: forward sums along the rows of a weight and backward along its columns, and both use the same ŵ_e. So ZeRO-3 can gather ŵ_e
instead of w_e.

On a GPU with fp8 units each expert's rows are one `scaled_product`, multiplied by the rows' scales afterwards; where it
does not support the shapes, and on a CPU, the product is emulated (`fp8`).

Legend: E experts, R rows (copies of tokens, sorted by expert), I width in, O width out.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.models.moe import Experts, GroupedLinear
from meshwright.parallel.numerics.fp8 import (
    E4M3,
    E5M2,
    UNIT,
    Quantised,
    device_product,
    has_scaled_product,
    max_over_ranks,
    quantise,
    scale_of,
    sum_dtype,
)

EXPONENT = 0x7F800000  # the exponent bits of a float32


def amax_over(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """The largest magnitudes along these dimensions, which become 1."""
    return x.detach().abs().amax(dims, keepdim=True).to(torch.float32)


def amax_of_power_of_two_scale(amax: Tensor) -> Tensor:
    """The smallest number above `amax` whose scale is a power of two."""
    exponent = scale_of(amax, E5M2).view(torch.int32).bitwise_and(EXPONENT).view(torch.float32)
    return exponent * (2 * torch.finfo(E5M2).max)


def product(a: Tensor, b: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """a [M, K] times b [N, K]ᵀ, both in fp8, times a scalar; in the dtype in which sums of `like` are computed."""
    if not len(a) or not has_scaled_product(a, b, like.dtype):
        return (a.to(sum_dtype(like)) @ b.to(sum_dtype(like)).T) * scale
    one = torch.ones((), dtype=torch.float32, device=a.device)
    aligned = scale.reshape(()).clone()  # the device needs a scale at an address that is a multiple of 16 bytes
    return device_product(a, b, one, aligned, torch.float32)


def columns(x: Tensor) -> Tensor:
    """[R, N] → [N, R], padded with zeros to a multiple of `UNIT` rows. Transposed as bytes, which every device supports."""
    padding = -len(x) % UNIT
    bits = x.view(torch.uint8)
    return torch.cat((bits, bits.new_zeros(padding, x.shape[1]))).T.contiguous().view(x.dtype)


class _Grouped(torch.autograd.Function):
    """`weight` and its largest magnitudes, from which backward computes the units again; or with `gathered` the units and their scale, which
    ZeRO-3 frees and gathers again in the same memory: there `weight`, which has none, receives its gradient only."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        amax_R: Tensor,
        weight_EOI: Tensor,
        amax_E: Tensor | None,
        gathered: Quantised | None,
        counts: list[int],
    ) -> Tensor:
        quantised_RI, scale_R = quantise(x_RI, E4M3, amax_R)
        quantised_EOI, scale_E = gathered or quantise(weight_EOI, E4M3, amax_E)
        ctx.counts, ctx.gathered, ctx.dtype = counts, gathered is not None, weight_EOI.dtype
        ctx.save_for_backward(quantised_RI, scale_R, *(gathered or (weight_EOI, amax_E)))
        runs = zip(quantised_RI.split(counts), quantised_EOI, scale_E, strict=True)
        return (torch.cat([product(x, w, s, x_RI) for x, w, s in runs]) * scale_R).to(x_RI.dtype)

    @staticmethod
    def backward(ctx: Any, gradient_RO: Tensor) -> tuple[Tensor | None, ...]:
        quantised_RI, scale_R, *weight = ctx.saved_tensors
        quantised_EOI, scale_E = weight if ctx.gathered else quantise(weight[0], E4M3, weight[1])
        quantised_RO, grad_scale_R = quantise(gradient_RO, E5M2, amax_of_power_of_two_scale(amax_over(gradient_RO, 1)))
        runs = zip(quantised_RO.split(ctx.counts), quantised_EOI, scale_E, strict=True)
        dx_RI = torch.cat([product(g, columns(w)[:, : len(w)], s, gradient_RO) for g, w, s in runs]) * grad_scale_R
        by_expert = zip((gradient_RO * scale_R).split(ctx.counts), quantised_RI.split(ctx.counts), strict=True)
        dw_EOI = torch.stack([_weight_gradient(h, x) for h, x in by_expert])
        return dx_RI.to(gradient_RO.dtype), None, dw_EOI.to(ctx.dtype), None, None, None


def _weight_gradient(h_RO: Tensor, quantised_RI: Tensor) -> Tensor:
    if not len(h_RO):  # an expert without a token
        return h_RO.new_zeros(h_RO.shape[1], quantised_RI.shape[1], dtype=sum_dtype(h_RO))
    quantised_RO, scale = quantise(h_RO, E5M2, amax_of_power_of_two_scale(amax_over(h_RO, (0, 1))))
    return product(columns(quantised_RO), columns(quantised_RI), scale, h_RO)


class Fp8Grouped:
    """The rows of each expert times its weight, in fp8. The weights are split over `group`; with `part` the columns of the rows are split too.
    ZeRO-3 may gather the weights in fp8 (`data.fp8_gather`), which sets `units` and `scale`."""

    def __init__(self, group: ProcessGroup | None = None, part: bool = False) -> None:
        self.group, self.part = group, part
        self.units: Tensor | None = None
        self.scale: Tensor | None = None  # [E, 1, 1]

    def __call__(self, x_RI: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
        gathered = None if self.units is None or self.scale is None else (self.units, self.scale)
        amax_R, amax_E = amax_over(x_RI, 1), None if gathered else amax_over(weight_EOI, (1, 2))
        if self.group is not None:
            amax_R, amax_E = self._agree(self.group, amax_R, amax_E)
        return _Grouped.apply(x_RI, amax_R, weight_EOI, amax_E, gathered, counts)

    def _agree(self, group: ProcessGroup, amax_R: Tensor, amax_E: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The largest magnitudes of whole rows and weights, of which ranks hold parts, in one message."""
        parts = ([amax_R] if self.part else []) + ([] if amax_E is None else [amax_E])
        if not parts:
            return amax_R, None
        largest = max_over_ranks(torch.cat([part.flatten() for part in parts]), [group])
        found = [x.view_as(part) for x, part in zip(largest.split([p.numel() for p in parts]), parts, strict=True)]
        return found[0] if self.part else amax_R, None if amax_E is None else found[-1]


def enable_fp8(modules: Iterable[nn.Module], group: ProcessGroup | None = None) -> None:
    """Run the routed experts inside these modules in fp8; each expert is split over `group`."""
    for experts in (part for module in modules for part in module.modules() if isinstance(part, Experts)):
        for kind, linear in experts.named_children():
            if isinstance(linear, GroupedLinear):
                linear.product = Fp8Grouped(group, kind == "down")
