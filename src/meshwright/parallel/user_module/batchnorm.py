"""Batch normalisation over the samples of all data-parallel ranks, as one device would have it.

    mean = Σ x / n        variance = Σ (x − mean)² / n        sums over all ranks, n their samples × positions

Two passes: Σx² − n·mean² would cancel. Backward sums the gradients of the two sums over the ranks in turn. torch's own `SyncBatchNorm` runs on
GPUs only, and over a group that is no part of a plan. Ranks with batches of different length count for what they have.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from meshwright.parallel import exchange
from meshwright.parallel.numerics.precision import at_least_single


def synchronise(module: nn.Module, group: ProcessGroup) -> list[nn.Module]:
    """Make the batch normalisations of a module use the statistics of all ranks of a group; returns them. A class with a forward of its own stays."""
    ours = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    parts = [part for part in module.modules() if isinstance(part, _BatchNorm) and type(part).forward in ours]
    for part in parts:
        part.forward = partial(_synchronised, part, group)  # type: ignore[method-assign]
    return list(parts)


def uses_batch(part: Any) -> bool:
    """Whether a batch normalisation takes the statistics of the batch, not the running ones."""
    return part.training or part.running_mean is None


def _synchronised(part: Any, group: ProcessGroup, x: Tensor) -> Tensor:
    """The forward of a batch normalisation over a group."""

    def total(x: Tensor) -> Tensor:
        return exchange.copy_in(exchange.reduce_out(x, group), group)

    if not uses_batch(part):
        statistics = part.running_mean, part.running_var, part.weight, part.bias
        return nn.functional.batch_norm(x, *statistics, False, 0.0, part.eps)
    part._check_input_dim(x)
    wide = x.to(at_least_single(x.dtype))
    dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
    count = exchange.all_reduce(wide.new_tensor([wide.numel() / wide.shape[1]]), group)
    mean = total(wide.sum(dims)) / count
    centred = wide - mean.view(shape)
    variance = total(centred.square().sum(dims)) / count
    out = centred * (variance + part.eps).rsqrt().view(shape)
    if part.weight is not None:
        out = out * part.weight.view(shape) + part.bias.view(shape)
    if part.training and part.running_mean is not None:
        update_running(part, mean.detach(), variance.detach() * (count / (count - 1)))
    return out.to(x.dtype)


@torch.no_grad()
def update_running(part: Any, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics towards those of the batch, as torch does; without a momentum they are the mean of all batches."""
    part.num_batches_tracked.add_(1)
    share = part.momentum if part.momentum is not None else 1.0 / float(part.num_batches_tracked)
    part.running_mean.lerp_(mean.to(part.running_mean.dtype), share)
    part.running_var.lerp_(variance.to(part.running_var.dtype), share)
