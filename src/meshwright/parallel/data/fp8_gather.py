"""ZeRO-3's all-gathers in fp8 (`gather_dtype = "fp8"`): the weights of fp8 products are quantised before they are sent.

    same   gather w in 16 bits, 2 bytes per element, and quantise the whole weight on every rank
    fp8    quantise the shard, gather units of E4M3, 1 byte per element, and multiply by these units

A scale belongs to a whole matrix: to the weight of a linear layer, or of routed experts [E, out, in] to each expert's. So ranks must agree on it
before they quantise. Once per step, before the first gather, each rank computes the largest magnitudes of its shards, one all-reduce (max)
of these numbers gives the scales, and the shards are quantised with them (`Fp8Weights.refresh`). The units then equal those of one device,
bit by bit: a shard is first rounded to the parameters' dtype, as torch would round it before a gather. Every forward and backward of the
step gathers the same bytes.

ZeRO cuts experts by expert, or by their rows where there are fewer experts than ranks (`describe.sharding.rules`). A rank needs the scales of
all experts that it gathers, so where it holds whole experts it sends zeros for the others. Parts of experts lie on other ranks than parts of
dense weights: these are two families, each with its all-reduce. With a scale per row (`scaling = "row"`) a dense weight has other units in
backward than in forward, and is gathered in 16 bits; experts have one scale per expert there too, and are gathered in fp8.

`fully_shard` looks for the attributes `fsdp_pre_all_gather` and `fsdp_post_all_gather` on the local tensor of a parameter. The first
returns what is sent: the units as bytes, in the padded shape of a shard. torch puts them into one message with the parameters of the unit
that stay in their dtype (norms, biases). The second gets what arrived, in memory that torch frees after the unit's forward and fills again
in backward. The layer multiplies by a view of this memory, and saves that view for backward, so no copy of a weight outlives its unit.

The gathered parameter has the shape and the dtype of a gradient, but no memory: nothing reads its values. torch needs memory only
at the moment when it makes this parameter, in the first gather; it is freed at the next gather of any weight.

The shards, which the optimizer updates and checkpoints save, stay as they are: plain tensors, fp32 for 16-bit runs.

Private names of torch: `_foreach_copy_`, and `DTensor._local_tensor`, the object on which `fully_shard` looks for the two attributes (`to_local`
may return another).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.describe.sharding import DATA_AXES
from meshwright.describe.sharding.rules import shard_range, share
from meshwright.models.moe import GroupedLinear
from meshwright.models.parts import ProductLinear
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.fp8 import E4M3, Fp8Product, layers_of, max_over_ranks, quantise, scale_of
from meshwright.parallel.numerics.fp8_grouped import Fp8Grouped

Product = Fp8Product | Fp8Grouped


def amaxes_of(shards: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The largest magnitude of each row of shards, some of which may be empty, as they are rounded to the dtype of the parameters."""
    found = [shard.abs().amax(1) if shard.shape[1] else shard.new_zeros(len(shard)) for shard in shards]
    return torch.cat(found).to(dtype).to(torch.float32)


def quantise_shards(shards: list[Tensor], amaxes: Tensor, dtype: torch.dtype, out: list[Tensor]) -> None:
    """Write the E4M3 units of shards into bytes, given the largest magnitude of the whole matrix of each row of them."""
    for shard, amax, part in zip(shards, amaxes.split([len(shard) for shard in shards]), out, strict=True):
        if shard.numel():
            units, _ = quantise(shard.to(dtype), E4M3, amax[:, None])
            part.copy_(units.view(torch.uint8))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for all weights of a layer in few kernels: a call costs the host more time than a shard costs the GPU."""
    return torch.compile(function, dynamic=False)


class GatheredWeight:
    """The weight of a linear layer or of its experts: the bytes of its shard, and the units that its product reads after a gather."""

    def __init__(
        self, layer: ProductLinear | GroupedLinear, product: Product, ranks: int, index: int, owner: Fp8Weights
    ):
        """The shard is the `index`-th of `ranks`."""
        assert isinstance(layer.weight, DTensor)
        self.parameter, self.product, self.owner = layer.weight, product, owner
        self.shape = tuple(layer.weight.shape)
        layer.load_state_dict({}, strict=False)  # torch pads the shard now, not in the first forward
        local = self.local
        dim, start, stop = shard_range(self.shape, ranks, index)
        padded = [share(size, ranks) if i == dim else size for i, size in enumerate(self.shape)]
        self.bytes = torch.zeros(padded, dtype=torch.uint8, device=local.device)
        self.sent = self.by_matrix(self.bytes[: len(local)])
        self.matrices = self.shape[0] if self.stacked else 1
        # Of which this shard is a part
        self.own = range(start, stop) if self.stacked and dim == 0 else range(self.matrices)
        shape = (self.matrices, 1, 1) if self.stacked else ()
        product.scale = self.scale = torch.zeros(shape, dtype=torch.float32, device=local.device)
        local.fsdp_pre_all_gather = self.before_gather  # type: ignore[attr-defined]
        local.fsdp_post_all_gather = self.after_gather  # type: ignore[attr-defined]

    @property
    def local(self) -> Tensor:
        return self.parameter._local_tensor

    @property
    def stacked(self) -> bool:
        """Whether the weight is a matrix for each expert."""
        return len(self.shape) == 3

    def by_matrix(self, shard: Tensor) -> Tensor:
        """A shard with a row for each matrix that has a scale."""
        return shard.flatten(1) if self.stacked else shard.flatten()[None]

    def before_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """torch calls this before each gather; the names and number of the arguments are torch's."""
        return (self.bytes,), None

    def after_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """torch calls this after each gather, without `out` the first time. It reuses the memory of the first gather."""
        self.owner.free_placeholder()
        if out is not None:
            return None
        (whole,) = gathered
        self.product.units = whole.view(-1)[: prod(self.shape)].view(self.shape).view(E4M3)
        self.owner.placeholder = torch.empty(self.shape, dtype=dtype, device=whole.device)
        return self.owner.placeholder, ()


class GatherFamily:
    """Weights whose parts the same ranks hold: ZeRO's over the first of `axes`, those of tensor parallelism over the second."""

    def __init__(self, mesh: Mesh, axes: tuple[str, str], kind: type[Product]) -> None:
        self.mesh, self.axes, self.kind = mesh, axes, kind
        self.layers: list[list[GatheredWeight]] = []

    def add(self, layer: nn.Module, owner: Fp8Weights) -> None:
        ranks, index = self.mesh.size(self.axes[0]), self.mesh.index(self.axes[0])
        parts = [part for part in layer.modules() if isinstance(part, ProductLinear | GroupedLinear)]
        found = [(part, part.product) for part in parts if isinstance(part.product, self.kind)]
        weights = [GatheredWeight(part, product, ranks, index, owner) for part, product in found]
        self.layers += [weights] if weights else []

    @cached_property
    def weights(self) -> list[GatheredWeight]:
        return [weight for layer in self.layers for weight in layer]

    @cached_property
    def own(self) -> Tensor:
        """The positions of the matrices of this rank's shards among all matrices of the family."""
        starts = accumulate((weight.matrices for weight in self.weights), initial=0)
        positions = [start + i for start, weight in zip(starts, self.weights, strict=False) for i in weight.own]
        return torch.tensor(positions, device=self.weights[0].local.device)

    def refresh(self, dtype: torch.dtype) -> None:
        """Compute the scales and quantise the shards; a collective of the ranks that hold parts of the same weights."""
        if not self.layers:
            return
        on_gpu = self.weights[0].local.is_cuda
        find, write = (_compiled(amaxes_of), _compiled(quantise_shards)) if on_gpu else (amaxes_of, quantise_shards)
        shards = [[weight.by_matrix(weight.local) for weight in layer] for layer in self.layers]
        found = torch.cat([find(some, dtype) for some in shards])
        matrices = [weight.matrices for weight in self.weights]
        amaxes = found.new_zeros(sum(matrices)).index_copy_(0, self.own, found)
        amaxes = max_over_ranks(amaxes, self.mesh.groups(*self.axes))
        rows = [sum(map(len, some)) for some in shards]
        for layer, some, largest in zip(self.layers, shards, amaxes[self.own].split(rows), strict=True):
            write(some, largest, dtype, [weight.sent for weight in layer])
        scales = scale_of(amaxes, E4M3).split(matrices)
        torch._foreach_copy_([weight.scale.view(-1) for weight in self.weights], list(scales))


class Fp8Weights:
    """All weights of this rank's stages that are gathered in fp8."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        """`dtype` is that of the gathered parameters."""
        self.dtype = dtype
        self.families = [GatherFamily(mesh, (DATA_AXES["dense"].shard, "tp"), Fp8Product)]
        if mesh.size(DATA_AXES["expert"].shard) > 1:
            self.families.append(GatherFamily(mesh, (DATA_AXES["expert"].shard, "expert_tp"), Fp8Grouped))
        self.placeholder: Tensor | None = None

    def add(self, stage: nn.Module) -> None:
        """Gather the weights of the fp8 layers of a stage in fp8: after `fully_shard` and after the shards have memory, before the first
        forward."""
        for layer in layers_of(stage):
            for family in self.families:
                family.add(layer, self)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the weights as the optimizer left them to fp8; a collective."""
        for family in self.families:
            family.refresh(self.dtype)

    def free_placeholder(self) -> None:
        if self.placeholder is not None:
            self.placeholder.untyped_storage().resize_(0)
            self.placeholder = None
