"""Low-rank adapters beside frozen matrices (LoRA, Hu et al. 2021), of linear layers and of stacked experts.

    y = W x + s · B A dropout(x)        A [rank, in], B [out, rank], s = alpha / rank

W does not train, so its product keeps no input for its own gradient; the input is kept once, for that of A. A starts with numbers of
U(−1/√in, 1/√in), as `nn.Linear` does (Kaiming with a = √5), and B with zeros: the first forward is that of the base.

An adapter is a part of the product of a layer (`parts.Product`), not a module around it. Whatever replaces the product, or sums its output over
ranks, then has the adapter with it: behind a matrix that is cut by rows, B A x of this rank's columns is a partial sum like W x, and both
are in the same all-reduce.

Legend: R rows of experts (copies of tokens), E experts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.describe.model import Model
from meshwright.describe.sharding import Parameter
from meshwright.models.dropout import HasPositions, InputDropout
from meshwright.models.moe import GroupedLinear, grouped, takes_device_counts
from meshwright.models.parts import ProductLinear

A, B, DROP = "lora_a", "lora_b", "lora_drop"


class AdapterProduct:
    """The product of a layer, and the output of its adapter, whose matrices are modules of the layer."""

    def __init__(self, layer: Any, scale: float) -> None:
        self.layer, self.scale, self.base = layer, scale, layer.product
        self.experts = isinstance(layer, GroupedLinear)

    @property
    def takes_device_counts(self) -> bool:
        """Whether torch's grouped kernel may compute the products: rows of the adapter's output are a multiple of 16 bytes."""
        ranked = getattr(self.layer, A).weight.shape[1] % 8 == 0
        return ranked and takes_device_counts(self.base)

    def __call__(self, x: Tensor, weight: Tensor, bias_or_counts: Any = None) -> Tensor:
        y = self.base(x, weight, bias_or_counts)
        a, b = (getattr(self.layer, name).weight.to(x.dtype) for name in (A, B))
        if self.experts:
            return y + grouped(grouped(x, a, bias_or_counts) * self.scale, b, bias_or_counts)
        low = getattr(self.layer, DROP).product(x, a)
        # One kernel adds in the precision of sums, and no output of the adapter is ever in memory.
        return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), b.t(), alpha=self.scale).view_as(y)


def adapt(network: nn.Module, model: Model, parameters: list[Parameter]) -> None:
    """Add the adapters of a model to a network on the meta device, and freeze what does not train, as the table of parameters says."""
    geometry: HasPositions | None = getattr(network, "geometry", None)
    for p in parameters:
        if p.module.endswith(f".{A}"):
            add_adapter(network, p, model, geometry)
    for p in parameters:
        network.get_parameter(p.name).requires_grad_(p.learns)


def add_adapter(network: nn.Module, a: Parameter, model: Model, geometry: HasPositions | None) -> None:
    path = a.module.removesuffix(f".{A}")
    layer, rank, d_in = network.get_submodule(path), a.shape[-2], a.shape[-1]
    assert isinstance(layer, ProductLinear | GroupedLinear), (
        f"'{path}' has no product that an adapter could be added to"
    )
    d_out = layer.weight.shape[-2]
    for name, (inner, outer) in {A: (d_in, rank), B: (rank, d_out)}.items():
        part = GroupedLinear(a.shape[0], inner, outer, False) if a.expert else nn.Linear(inner, outer, bias=False)
        layer.add_module(name, part)
    if not a.expert:
        layer.add_module(DROP, InputDropout(model.adapter.dropout, f"{path}.lora", geometry))
    layer.product = AdapterProduct(layer, model.adapter.scale(rank))


def adapted(network: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, by name."""
    return {
        name: part
        for name, part in network.named_modules()
        if isinstance(getattr(part, "product", None), AdapterProduct)
    }


@torch.no_grad()
def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s·B A, in the precision of the adapter and then that of W."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)
