"""fp8 products with one scale per row (`workload.scaling = "row"`): an outlier harms its own row only.

    y  = (x̂ s_x) (ŵ s_w)ᵀ      s_x of each token, s_w of each output feature
    dx = (ĝ s_g) (ŵ' s_w')      s_g of each token, s_w' of each input feature: the columns of w
    dw = (ĝ' s_g')ᵀ (x̂' s_x')   s_g' of each output feature, s_x' of each input feature: the columns of g and x, over all tokens

Rows are those along which a product sums. With one scale per tensor a token with values 1,000 times larger pushes the other tokens
1,000 times down: E4M3 spans 2¹⁵ between its largest and its smallest normal number, and below that precision is lost. With a scale per row
every row uses the full range, so all operands, gradients too, are in E4M3 with its finer mantissa: 2⁻⁴ instead of E5M2's 2⁻³.

The price: an operand is needed along both dimensions with different scales, so x̂ cannot be reused for dw. x is kept in 16 bits for
backward (2 bytes per element, where tensor scaling keeps 1), and each of the three products quantises both operands. A rank must hold whole
rows and columns: tensor and context parallelism would have to reduce a maximum per row, so they are refused.

The error of a product is at most (2u + u²) Σ|a||b| with u = 2⁻⁴, plus underflow: half of E4M3's smallest step, 2⁻¹⁰ of 448, relative to the
largest number of the row.

A frozen base that is kept in fp8 (`adapter.base = "fp8"`) has a scale per row already, s_w of each output feature. Its bytes are the operand of
forward. In backward these rows are summed over, so their scales multiply the gradient before it is quantised, and no weight is ever rounded twice:

    dx = ((g s_w)^ s_g) ŵ

On a GPU with fp8 units `scaled_product` takes the scales of rows, and returns bf16; elsewhere the product is emulated, as in `fp8`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.models.adapter import AdapterProduct
from meshwright.models.parts import ProductLinear, at_least_single
from meshwright.models.quantised import LARGEST, RowPacking
from meshwright.models.wide_products import scaled_product
from meshwright.parallel.numerics.fp8 import E4M3, UNIT, Quantised, gpu_has_units, has_scaled_product, padded, quantise


def quantise_rows(x: Tensor) -> Quantised:
    """x [R, K] in E4M3 and the scale of each row [R, 1]."""
    return quantise(x, E4M3, x.abs().amax(1, keepdim=True).to(torch.float32))


def row_product(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """a [M, K] times b [N, K]ᵀ, each row of both rounded to E4M3 with its own scale."""
    return product_of_units(quantise_rows(a), quantise_rows(b), out)


def product_of_units(a: Quantised, b: Quantised, out: torch.dtype) -> Tensor:
    (units_a, scale_a), (units_b, scale_b) = a, b
    if has_scaled_product(units_a, units_b, out):
        return device_row_product(units_a, units_b, scale_a, scale_b).to(out)
    wide = at_least_single(out)
    return ((units_a.to(wide) * scale_a) @ (units_b.to(wide) * scale_b).T).to(out)


def device_row_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The GPU's product with a scale per row, in bf16. The operands of backward are transposed and are copied: the GPU reads rows."""
    scales_a, scales_b = F.pad(scale_a, (0, 0, 0, -len(a) % UNIT)), scale_b.reshape(1, -1)
    units_a, units_b = padded(a, rows=True), padded(b)
    return scaled_product(units_a, units_b, scales_a, scales_b, torch.bfloat16, fast=True)[: len(a)]


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return row_product(x.flatten(0, -2), weight, x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        g = gradient.flatten(0, -2)
        dx = row_product(g, weight.T, gradient.dtype).view(x.shape)
        return dx, row_product(g.T, x.flatten(0, -2).T, weight.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with fp8 products and a scale per row; the bias is added in full precision."""
    y = _RowLinear.apply(x, weight)
    return y if bias is None else y + bias


class _FrozenRowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, packing: RowPacking) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.packing = packing
        weight = units_of_rows(packed, packing)
        return product_of_units(quantise_rows(x.flatten(0, -2)), weight, x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        units, scale = units_of_rows(ctx.saved_tensors[0], ctx.packing)
        g = gradient.flatten(0, -2)
        scaled = quantise_rows(g.to(at_least_single(g.dtype)) * scale.T)
        dx = product_of_units(scaled, (units.T, scale.new_ones(units.shape[1], 1)), gradient.dtype)
        return dx.unflatten(0, gradient.shape[:-1]), None, None


def units_of_rows(packed: Tensor, packing: RowPacking) -> Quantised:
    """The codes of a packed fp8 weight, and the scale of each row."""
    scale = packing.scales(packed[:, packing.code_bytes :]) / LARGEST["fp8"]
    return packed[:, : packing.columns].view(E4M3), scale


class FrozenRowProduct:
    """The product of a linear layer whose frozen weight is packed in fp8."""

    def __init__(self, packing: RowPacking) -> None:
        self.packing = packing

    def __call__(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        y = _FrozenRowLinear.apply(x, packed, self.packing)
        return y if bias is None else y + bias


def enable_fp8(modules: Iterable[nn.Module]) -> None:
    """Run the linear layers inside these modules in fp8 with a scale per row; their adapters multiply in 16 bits."""
    if torch.cuda.is_available():
        gpu_has_units()
    for part in (part for module in modules for part in module.modules() if isinstance(part, ProductLinear)):
        if isinstance(part.product, AdapterProduct):
            part.product.base = linear
        else:
            part.product = linear
