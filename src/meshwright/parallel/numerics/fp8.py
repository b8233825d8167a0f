"""fp8 matrix products: E4M3 in forward, E5M2 for gradients, one scale per tensor, computed when the tensor is used.

    E4M3   4 bits of exponent, 3 of mantissa: up to 448, relative error 2⁻⁴     weights and activations: precision
    E5M2   5 bits of exponent, 2 of mantissa: up to 57,344, error 2⁻³           gradients: range

    y  = s_x s_w · (x̂ ŵᵀ)      x̂ = fp8(x / s_x),  s_x = max|x| / 448
    dx = s_g s_w · (ĝ ŵ)        ĝ = fp8(g / s_g),  s_g = max|g| / 57,344
    dw = s_g s_x · (ĝᵀ x̂)      accumulated in fp32 or wider

x̂ is kept for backward, one byte per element instead of two; where sequence parallelism gathers x, this rank's share of x is kept instead, and
gathered and quantised again in backward. A GPU multiplies rows with rows: both operands must have the summed dimension
last. So dx needs a transposed copy of ŵ, and dw transposed copies of ĝ and x̂. Where a rank holds the whole weight, ŵ and its transpose are
computed once per step, not once per micro-batch (`quantise_weights`). In a compiled layer the other quantisations become part of the
kernels before them, and q, k and v, or gate and up, share the quantisation of their input.

The error of one product is at most (u_a + u_b + u_a u_b) Σ|a||b|, u = 2⁻⁴ or 2⁻³, plus underflow; the errors of
many terms have mixed signs and mostly cancel. *Dynamic* scaling (used here) reads each tensor once more before its product;
*delayed* scaling would use the maximum of the last step and save that pass, at the risk of an overflow. Master weights, norms,
attention's core, routers, embedding and head stay in higher precision; routed experts are in `fp8_grouped`.

A scale belongs to the whole tensor: under tensor and context parallelism the ranks reduce the maximum of their parts (two
numbers in forward and one in backward per product), so that every layout rounds as one device does. A scale per shard
would save these small messages, but rounding would depend on the plan.

On a CPU the product is emulated: operands are rounded through torch's float8 types and multiplied in full precision, as
a tensor core does up to its accumulation. On a GPU with fp8 units `models.wide_products.scaled_product` computes it:
sizes must be multiples of 16, so tokens and sums are padded with zeros. Where the width of an output is no multiple of 16
or the GPU has no fp8 units, the product is emulated; and in float64, because the units keep sums to about 14 bits.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.models.parts import ProductLinear, at_least_single
from meshwright.models.wide_products import scaled_product
from meshwright.parallel import exchange
from meshwright.parallel.saved_tensors import is_saved_as_share

Quantised = tuple[Tensor, Tensor]  # in units of the scale, and the scale

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FIRST_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)
UNIT = 16  # sizes of the device's products must be multiples of it
_found: list[bool] = []  # whether this process has a GPU with fp8 units, once it is known


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude in a tensor."""
    return x.abs().amax().to(torch.float32)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of a tensor whose largest magnitude is `amax`. It multiplies by the reciprocal, because a GPU divides by a
    constant in this way and a CPU does not: a difference in the last bit of a scale can change the rounding of a number."""
    return (amax * (1 / torch.finfo(dtype).max)).clamp(min=torch.finfo(torch.float32).tiny)


def quantise(x: Tensor, dtype: torch.dtype, amax: Tensor | None = None) -> Quantised:
    """The tensor in fp8 and its scale: x ≈ quantised · scale. If `x` is a part of a larger tensor, `amax` is the largest
    magnitude of that tensor."""
    limit = torch.finfo(dtype).max
    scale = scale_of(amax_of(x) if amax is None else amax, dtype)
    # Divided in at least float32: dividing by a scale rounded to 16 bits and multiplying by the exact one would add a bias.
    # Rounding the scale may lift the largest value just above the range; saturate, since E4M3 has no infinity.
    return (x.to(sum_dtype(x)) / scale).to(torch.float32).clamp(-limit, limit).to(dtype), scale


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which sums of products of `x` are computed: at least float32."""
    return at_least_single(x.dtype)


def rounded(x: Tensor, dtype: torch.dtype, amax: Tensor | None = None) -> Tensor:
    """The tensor rounded to fp8, in at least float32."""
    quantised, scale = quantise(x, dtype, amax)
    return quantised.to(sum_dtype(x)) * scale


def product(a: Quantised, b: Quantised, out: torch.dtype, fast: bool = False) -> Tensor:
    """a [M, K] times b [N, K]ᵀ. `fast` keeps the sum to fewer bits."""
    (units_a, scale_a), (units_b, scale_b) = a, b
    if has_scaled_product(units_a, units_b, out):
        device_out = out if out in (torch.bfloat16, torch.float16, torch.float32) else torch.float32
        return device_product(units_a, units_b, scale_a, scale_b, device_out, fast).to(out)
    wide = at_least_single(out)
    return ((units_a.to(wide) * scale_a) @ (units_b.to(wide) * scale_b).T).to(out)


def device_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: torch.dtype, fast: bool = False
) -> Tensor:
    """The GPU's fp8 product, of any number of rows of `a` and any length of the sums."""
    units_a, units_b = padded(a, rows=True), padded(b)
    return scaled_product(units_a, units_b, scale_a, scale_b, out, fast)[: len(a)]


def padded(units: Tensor, rows: bool = False) -> Tensor:
    """Units as the GPU's product needs them: contiguous along the summed dimension, which is padded with zeros to a multiple of `UNIT`, and
    with `rows` their number as well. The gradient of a weight sums over tokens, of which there may be any number."""
    missing = -units.shape[1] % UNIT, -len(units) % UNIT if rows else 0
    bits = units.view(torch.uint8)  # copied as bytes, which every device supports
    return (F.pad(bits, (0, missing[0], 0, missing[1])) if any(missing) else bits).contiguous().view(units.dtype)


def transposed(x: Quantised) -> Quantised:
    """Copied as bytes, which every device supports."""
    units, scale = x
    return units.view(torch.uint8).t().contiguous().view(units.dtype), scale


def has_scaled_product(a: Tensor, b: Tensor, out: torch.dtype = torch.float32) -> bool:
    """Whether the GPU's fp8 product supports these operands and is as exact as the result's dtype: N must be a multiple of 16; M and K are padded."""
    exact = out == torch.float64 and not torch.compiler.is_compiling()  # Triton has no cast of fp8 to float64
    return a.is_cuda and gpu_has_units() and b.shape[0] % UNIT == 0 and not exact


def gpu_has_units() -> bool:
    if not _found:  # a compiled graph takes the list as a constant
        _found.append(torch.cuda.get_device_capability() >= FIRST_CAPABILITY)
    return _found[0]


def max_over_ranks(amax: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    """The maximum over all ranks that hold a part of the tensor."""
    for group in groups:
        amax = exchange.all_reduce(amax, group, "max")
    return amax


class _Linear(torch.autograd.Function):
    """With `units` of a weight that outlive the call, `weight` is there to receive its gradient only: the product uses the units, and in
    backward their transpose. Without them forward and backward quantise the weight, given its largest magnitude: kept units would be a copy of
    the weight for each micro-batch, which ZeRO-3 could not free."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        amax_w: Tensor | None,
        units: Tensor | None,
        units_t: Tensor | None,
        scale: Tensor | None,
        amax: Tensor | None,
        groups: Sequence[ProcessGroup],
    ) -> Tensor:
        units_x, scale_x = quantise(x.flatten(0, -2), E4M3, amax)
        w = quantise(weight, E4M3, amax_w) if units is None or scale is None else (units, scale)
        kept = (weight, amax_w) if units is None else (units if units_t is None else units_t, scale)
        ctx.from_share = is_saved_as_share(x)
        ctx.save_for_backward(*((x, amax) if ctx.from_share else (units_x, scale_x)), *kept)
        ctx.groups, ctx.shape, ctx.dtype = groups, x.shape, weight.dtype
        ctx.quantises, ctx.transposed = units is None, units_t is not None
        return product((units_x, scale_x), w, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *x, kept, of_kept = ctx.saved_tensors
        units_x, scale_x = quantise(x[0].flatten(0, -2), E4M3, x[1]) if ctx.from_share else x
        flat_g = gradient.flatten(0, -2)
        g = quantise(flat_g, E5M2, max_over_ranks(amax_of(flat_g), ctx.groups) if ctx.groups else None)
        w = quantise(kept, E4M3, of_kept) if ctx.quantises else (kept, of_kept)  # its largest magnitude, or the scale
        w_t = w if ctx.transposed else transposed(w)
        dx = product(g, w_t, gradient.dtype).view(ctx.shape)
        dw = product(transposed(g), transposed((units_x, scale_x)), ctx.dtype)
        return dx, dw, None, None, None, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, groups: Sequence[ProcessGroup] = ()) -> Tensor:
    """`F.linear` with fp8 products; the bias is added in full precision. The operands are split over `groups`."""
    amax_x, amax_w = None, amax_of(weight.detach())
    if groups:
        amax_x, amax_w = max_over_ranks(torch.stack((amax_of(x.detach()), amax_w)), groups)
    y = _Linear.apply(x, weight, amax_w, None, None, None, amax_x, groups)
    return y if bias is None else y + bias


def both_ways(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in fp8, its transpose, and their scale."""
    units, scale = quantise(weight, E4M3)
    return units, transposed((units, scale))[0], scale


def all_both_ways(weights: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [both_ways(weight) for weight in weights]


@cache
def _in_few_kernels() -> Callable[[list[Tensor]], list[tuple[Tensor, Tensor, Tensor]]]:
    """`all_both_ways`, compiled: one pass over a weight for the maximum and one for both results, instead of seven. One call quantises all
    weights of a layer, because a call costs the host more time than a weight costs the GPU."""
    return torch.compile(all_both_ways, dynamic=False)


class Fp8Product:
    """The product of one linear layer, called with its weight. With `keeps` it uses the weight as `quantise_weights` left it. ZeRO-3 may
    gather a weight in fp8 (`data.fp8_gather`), which sets `units` and `scale` too."""

    def __init__(self, groups: Sequence[ProcessGroup], keeps: bool) -> None:
        self.groups, self.keeps = groups, keeps
        self.units: Tensor | None = None
        self.units_t: Tensor | None = None
        self.scale: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.units is None or self.scale is None:
            return linear(x, weight, bias, self.groups)
        amax = max_over_ranks(amax_of(x.detach()), self.groups) if self.groups else None
        y = _Linear.apply(x, weight, None, self.units, self.units_t, self.scale, amax, self.groups)
        return y if bias is None else y + bias


def enable_fp8(modules: Iterable[nn.Module], groups: Sequence[ProcessGroup] = (), keeps: bool = False) -> None:
    """Run the linear layers inside these modules in fp8; the layers are split over `groups`. With `keeps`, `quantise_weights` is called
    whenever the weights may have changed."""
    if torch.cuda.is_available():
        gpu_has_units()
    for part in [part for module in modules for part in module.modules() if isinstance(part, ProductLinear)]:
        part.product = Fp8Product(groups, keeps and not groups)


@torch.no_grad()
def quantise_weights(stages: Iterable[nn.Module]) -> None:
    """Quantise the weights that layers use until the next call."""
    for layer in (layer for stage in stages for layer in layers_of(stage)):
        linears = [part for part in layer.modules() if isinstance(part, ProductLinear)]
        kept = [(p.product, p.weight) for p in linears if isinstance(p.product, Fp8Product) and p.product.keeps]
        if kept:
            weights = [weight for _, weight in kept]
            compiles = weights[0].is_cuda and weights[0].dtype != torch.float64  # Triton has no cast of it to fp8
            quantised = (_in_few_kernels() if compiles else all_both_ways)(weights)
            for (layer_product, _), found in zip(kept, quantised, strict=True):
                layer_product.units, layer_product.units_t, layer_product.scale = found


def layers_of(stage: nn.Module) -> list[nn.Module]:
    layers = getattr(stage, "layers", None)
    return list(layers.values()) if isinstance(layers, nn.ModuleDict) else [stage]
