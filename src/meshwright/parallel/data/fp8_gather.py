"""ZeRO-3's all-gathers in fp8 (`gather_dtype = "fp8"`): the weights of fp8 products are quantised before they are sent.

    same   gather w in 16 bits, 2 bytes per element, and quantise the whole weight on every rank
    fp8    quantise the shard, gather units of E4M3, 1 byte per element, and multiply by these units

A scale belongs to the whole weight, so ranks must agree on it before they quantise. Once per step, before the first gather, each rank
computes the largest magnitude of its shard of every weight, one all-reduce (max) of these numbers gives the scales, and the shards are
quantised with them (`Fp8Weights.refresh`). The units then equal those of one device, bit by bit: the shard is first rounded to the
parameters' dtype, as torch would round it before a gather. Every forward and backward of the step gathers the same bytes.

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

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from meshwright.describe.sharding import shard_dim
from meshwright.describe.sharding.zero import share
from meshwright.models.parts import Linear
from meshwright.parallel.numerics.fp8 import E4M3, Fp8Product, amax_of, layers_of, max_over_ranks, quantise, scale_of


def amaxes_of(shards: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The largest magnitudes of shards, some of which may be empty, as they are rounded to the dtype of the parameters."""
    found = [amax_of(shard) if shard.numel() else shard.new_zeros((), dtype=torch.float32) for shard in shards]
    return torch.stack(found).to(dtype).to(torch.float32)


def quantise_shards(
    shards: list[torch.Tensor], amaxes: torch.Tensor, dtype: torch.dtype, out: list[torch.Tensor]
) -> torch.Tensor:
    """Write the E4M3 units of shards into bytes, given the largest magnitudes of the whole weights; returns the scales."""
    for shard, amax, part in zip(shards, amaxes.unbind(), out, strict=True):
        if shard.numel():
            units, _ = quantise(shard.to(dtype), E4M3, amax)
            part.copy_(units.view(torch.uint8))
    return scale_of(amaxes, E4M3)


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function for all weights of a layer in few kernels: a call costs the host more time than a shard costs the GPU."""
    return torch.compile(function, dynamic=False)


class GatheredWeight:
    """The weight of one linear layer: the bytes of its shard, and the units that its product reads after a gather."""

    def __init__(self, layer: Linear, ranks: int, owner: Fp8Weights) -> None:
        product = layer.product
        assert isinstance(layer.weight, DTensor)
        assert isinstance(product, Fp8Product)
        self.parameter, self.product, self.owner = layer.weight, product, owner
        self.shape = tuple(layer.weight.shape)
        layer.load_state_dict({}, strict=False)  # torch pads the shard now, not in the first forward
        local = self.local
        dim = shard_dim(self.shape, ranks)
        padded = [share(size, ranks) if i == dim else size for i, size in enumerate(self.shape)]
        self.bytes = torch.zeros(padded, dtype=torch.uint8, device=local.device)
        product.scale = self.scale = torch.zeros((), dtype=torch.float32, device=local.device)
        local.fsdp_pre_all_gather = self.before_gather  # type: ignore[attr-defined]
        local.fsdp_post_all_gather = self.after_gather  # type: ignore[attr-defined]

    @property
    def local(self) -> torch.Tensor:
        return self.parameter._local_tensor

    def before_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        """torch calls this before each gather; the names and number of the arguments are torch's."""
        return (self.bytes,), None

    def after_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """torch calls this after each gather, without `out` the first time. It reuses the memory of the first gather."""
        self.owner.free_placeholder()
        if out is not None:
            return None
        (whole,) = gathered
        self.product.units = whole.view(-1)[: prod(self.shape)].view(self.shape).view(E4M3)
        self.owner.placeholder = torch.empty(self.shape, dtype=dtype, device=whole.device)
        return self.owner.placeholder, ()


class Fp8Weights:
    """All weights of this rank's stages that are gathered in fp8. The ranks of `groups` hold parts of the same weights."""

    def __init__(self, groups: Sequence[ProcessGroup], ranks: int, dtype: torch.dtype) -> None:
        """`fully_shard` shards over `ranks` ranks; `dtype` is that of the gathered parameters."""
        self.groups, self.ranks, self.dtype = groups, ranks, dtype
        self.layers: list[list[GatheredWeight]] = []
        self.placeholder: torch.Tensor | None = None

    def add(self, stage: nn.Module) -> None:
        """Gather the weights of the fp8 layers of a stage in fp8: after `fully_shard` and after the shards have memory, before the first
        forward."""
        for layer in layers_of(stage):
            linears = [part for part in layer.modules() if isinstance(part, Linear)]
            weights = [GatheredWeight(x, self.ranks, self) for x in linears if isinstance(x.product, Fp8Product)]
            self.layers += [weights] if weights else []

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the scales and quantise the shards; a collective of the ranks that hold parts of the same weights."""
        if not self.layers:
            return
        on_gpu = self.layers[0][0].local.is_cuda
        find, write = (_compiled(amaxes_of), _compiled(quantise_shards)) if on_gpu else (amaxes_of, quantise_shards)
        shards = [[weight.local for weight in layer] for layer in self.layers]
        amaxes = max_over_ranks(torch.cat([find(some, self.dtype) for some in shards]), self.groups)
        for layer, some, found in zip(self.layers, shards, amaxes.split([len(x) for x in shards]), strict=True):
            scales = write(some, found, self.dtype, [w.bytes[: len(x)] for w, x in zip(layer, some, strict=True)])
            torch._foreach_copy_([weight.scale for weight in layer], list(scales.unbind()))

    def free_placeholder(self) -> None:
        if self.placeholder is not None:
            self.placeholder.untyped_storage().resize_(0)
            self.placeholder = None
