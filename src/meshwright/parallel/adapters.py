"""Adapters and their frozen base on one rank: bytes in place of quantised weights, and the part of the input that dropout drops.

The sharding table cuts A and B like any other parameter, and an adapter's output is summed with that of its base (`models.adapter`). What is left:

    base       after tensor parallelism has cut it, a quantised weight becomes the bytes of this rank's rows and columns (`models.quantised`). Under
               ZeRO-3 these bytes are what is sharded and gathered; ZeRO 1 and 2 shard gradients and states, so that a frozen base stays whole
    dtype      frozen weights are kept in the dtype of products. Under ZeRO the trained shards are wider: they are their own masters
    dropout    behind a matrix that is cut by rows a rank has some of the features, and beside one between the regions some of the tokens
"""

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import Box
from meshwright.models.adapter import DROP, A, AdapterProduct, adapted
from meshwright.models.moe import GroupedLinear
from meshwright.models.quantised import QuantisedProduct, RowPacking
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics import fp8_rows


def place_adapters(module: nn.Module, table: Sequence[Box], mesh: Mesh, plan: Plan) -> None:
    """Tell the dropout of each adapter which part of its input this rank has."""
    boxes = {box.name: box for box in table}
    for name, layer in adapted(module).items():
        if hasattr(layer, DROP):
            box = boxes[f"{name}.{A}.weight"]
            layer.lora_drop.first = box.start[-1]
            if plan.sp and box.parameter.style == "between":
                layer.lora_drop.share = (mesh.index("tp"), mesh.size("tp"))


def quantise_base(module: nn.Module, table: Sequence[Box], model: Model) -> dict[str, RowPacking]:
    """Replace the weights of the quantised base, still on the meta device, by matrices of bytes. Returns their packings by name."""
    out, adapter = dict[str, RowPacking](), model.adapter
    for box in table:
        if not box.parameter.packed:
            continue
        packing = RowPacking(adapter.base, box.shape[-1], box.start[-1], adapter.double_quantised)
        layer, out[box.name] = module.get_submodule(box.parameter.module), packing
        packed = torch.empty(*box.shape[:-1], packing.row_bytes, dtype=torch.uint8, device="meta")
        layer.weight = nn.Parameter(packed, requires_grad=False)
        holder = layer.product if isinstance(layer.product, AdapterProduct) else layer
        name = "base" if holder is layer.product else "product"
        product = getattr(holder, name)
        in_fp8 = product is fp8_rows.linear and adapter.base == "fp8"
        experts = isinstance(layer, GroupedLinear)
        setattr(
            holder, name, fp8_rows.FrozenRowProduct(packing) if in_fp8 else QuantisedProduct(packing, product, experts)
        )
    return out


def narrow_frozen(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep frozen weights on the meta device in `dtype`."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
