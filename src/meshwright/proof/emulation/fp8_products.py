"""fp8 products on one device, written a second time: nothing here is shared with `parallel.numerics`.

    x̂ = round(x / s) · s      s = max|x| / M       E4M3: M = 448, 3 bits of mantissa      E5M2: M = 57,344, 2 bits
    y  = x̂ ŵᵀ                 both in E4M3, one scale for a whole tensor
    dx = ĝ ŵ,  dw = ĝᵀ x̂      the gradient in E5M2

    scaling "row"             all in E4M3, a scale for each row along which a product sums

    routed experts            a scale for each row of x and one for each expert's weight; the gradient's scales are powers of two;
                              dw_e = ĥᵀ q with h = g · s_row and q = x̂ / s_row, one scale for the rows of an expert

Ranks that hold parts of a tensor agree on its scale, so one device with the full tensor rounds in the same way. It is compared in
float64, in which ranks do not multiply by the fp8 kernel of a GPU: no emulation reproduces its sums bit by bit.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshwright.models.adapter import AdapterProduct, adapted
from meshwright.models.moe import GroupedLinear
from meshwright.models.parts import at_least_single
from meshwright.models.quantised import QuantisedProduct

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)  # bits of mantissa, smallest exponent, largest number
Format = tuple[int, int, float]


def nearest(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Each float32 to the nearest number of the format, ties to an even last bit; beyond the largest, the largest."""
    bits, smallest, largest = form
    x = x.clamp(-largest, largest)
    exponent = torch.frexp(x).exponent.clamp(min=smallest + 1) - 1
    step = torch.ldexp(torch.ones_like(x), exponent - bits)
    return (x / step).round() * step


def scale_for(x: torch.Tensor, form: Format, dims: tuple[int, ...] = ()) -> torch.Tensor:
    """max|x| / M over these dimensions (none: all of them), a float32; the reciprocal is multiplied, as on a GPU."""
    most = x.detach().abs().amax(dims or tuple(range(x.ndim)), keepdim=True).float()
    return (most * (1 / form[2])).clamp(min=torch.finfo(torch.float32).tiny)


def power_of_two_above(scale: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent)


def in_units(x: torch.Tensor, scale: torch.Tensor, form: Format) -> torch.Tensor:
    """x / s, rounded, in at least float32."""
    wide = at_least_single(x.dtype)
    return nearest((x.to(wide) / scale).float(), form).to(wide)


def rounded(x: torch.Tensor, form: Format) -> torch.Tensor:
    scale = scale_for(x, form)
    return in_units(x, scale, form) * scale


def rows_rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row of the last dimension rounded to E4M3 with its own scale."""
    scale = scale_for(x, E4M3, (x.ndim - 1,))
    return in_units(x, scale, E4M3) * scale


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (rounded(x, E4M3) @ rounded(weight, E4M3).T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        g = rounded(gradient, E5M2)
        dw = g.flatten(0, -2).T @ rounded(x, E4M3).flatten(0, -2)
        return (g @ rounded(weight, E4M3)).to(gradient.dtype), dw.to(gradient.dtype)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (rows_rounded(x) @ rows_rounded(weight).T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        dx = rows_rounded(gradient) @ rows_rounded(weight.T).T
        dw = rows_rounded(gradient.flatten(0, -2).T) @ rows_rounded(x.flatten(0, -2).T).T
        return dx.to(gradient.dtype), dw.to(gradient.dtype)


class _FrozenRows(torch.autograd.Function):
    """A product with a frozen weight that is kept as codes in E4M3 and a scale per row: it is not rounded again. In backward the scales multiply
    the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(codes, scale)
        return (rows_rounded(x) @ (codes * scale).T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        codes, scale = ctx.saved_tensors
        return (rows_rounded(gradient.to(codes.dtype) * scale.flatten()) @ codes).to(gradient.dtype), None, None


def frozen_product(base: QuantisedProduct) -> Callable[..., torch.Tensor]:
    packing = base.packing

    def run(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        wide = at_least_single(x.dtype)
        scale = (packing.scales(packed[..., packing.code_bytes :]) / E4M3[2]).to(wide)
        y: torch.Tensor = _FrozenRows.apply(x, packing.values(packed).to(wide), scale)
        return y if bias is None else y + bias

    return run


class _Experts(torch.autograd.Function):
    """Rows sorted by expert, `counts` of them for each."""

    @staticmethod
    def forward(ctx: Any, x_RI: torch.Tensor, weight_EOI: torch.Tensor, counts: list[int]) -> torch.Tensor:
        scale_R = scale_for(x_RI, E4M3, (1,))
        units_RI = in_units(x_RI, scale_R, E4M3)
        scale_E = scale_for(weight_EOI, E4M3, (1, 2))
        weight = in_units(weight_EOI, scale_E, E4M3) * scale_E
        ctx.counts = counts
        ctx.save_for_backward(units_RI, scale_R, weight)
        runs = zip(units_RI.split(counts), weight, strict=True)
        return (torch.cat([x @ w.T for x, w in runs]) * scale_R).to(x_RI.dtype)

    @staticmethod
    def backward(ctx: Any, gradient_RO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        units_RI, scale_R, weight = ctx.saved_tensors
        step_R = power_of_two_above(scale_for(gradient_RO, E5M2, (1,)))
        g = in_units(gradient_RO, step_R, E5M2) * step_R
        dx = torch.cat([run @ w for run, w in zip(g.split(ctx.counts), weight, strict=True)])
        dw = []
        for h, x, w in zip((gradient_RO * scale_R).split(ctx.counts), units_RI.split(ctx.counts), weight, strict=True):
            if not len(h):  # an expert without a token
                dw.append(torch.zeros_like(w))
                continue
            step = power_of_two_above(scale_for(h, E5M2))
            dw.append((in_units(h, step, E5M2) * step).T @ x)
        return dx.to(gradient_RO.dtype), torch.stack(dw).to(gradient_RO.dtype), None


class Fp8Linears(TorchFunctionMode):
    """A mode in which every `F.linear` multiplies in fp8; the bias is added unrounded."""

    def __init__(self, scaling: str = "tensor") -> None:
        super().__init__()
        self.on = True
        self.product: Any = _RowLinear if scaling == "row" else _Linear

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.linear or not self.on:
            return function(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        y = self.product.apply(x, weight)
        return y if bias is None else y + bias


def emulate_fp8(module: nn.Module, scaling: str = "tensor") -> None:
    """Make the linear layers and routed experts inside the layers of a network multiply in fp8."""
    layers: Any = module.layers
    for layer in layers.values():
        mode = Fp8Linears(scaling)
        layer.forward = within_fp8(layer.forward, mode)
        for part in adapted(layer).values():
            part.lora_drop.product = unrounded(part.lora_drop.product, mode)
        for part in layer.modules():
            holder = part.product if isinstance(getattr(part, "product", None), AdapterProduct) else part
            name = "product" if holder is part else "base"
            if isinstance(base := getattr(holder, name, None), QuantisedProduct):
                setattr(holder, name, frozen_product(base))
    for part in module.modules():
        if isinstance(part, GroupedLinear):
            part.product = _Experts.apply


def unrounded(product: Callable[..., Any], mode: Fp8Linears) -> Callable[..., Any]:
    """The product with the inner matrix of an adapter, which is not computed in fp8."""

    def run(*args: Any) -> Any:
        mode.on = False
        try:
            return product(*args)
        finally:
            mode.on = True

    return run


def within_fp8(forward: Callable[..., Any], mode: Fp8Linears) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        with mode:
            return forward(*args, **named)

    return run
