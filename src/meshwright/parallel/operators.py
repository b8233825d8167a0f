"""Collectives as operators of a compiled graph.

`torch.compile` traces Python into a graph of operators. A collective of `torch.distributed` changes its output in place and knows its
group as a Python object, and neither fits into a graph. Here each collective is an operator without side effects that names its group:

    meshwright::all_reduce(x, operation, group)   meshwright::all_gather(x, group)   meshwright::reduce_scatter(x, group)
    meshwright::all_to_all(x, group)

The compiler knows the shape of the result, and that a gather and a reduce-scatter are each other's gradient, but nothing else: it neither
removes, reorders nor splits such an operator, and all ranks run the same order. At run time the operator calls `torch.distributed` as eager
code does: the same backend, also ours, and the same recorder of communication see it. torch's functional collectives would also be
traceable; inductor may reorder those to overlap them, but a sum inside a layer has nothing to overlap with, and they bypass what records
and checks our calls.

Private names of torch: `distributed_c10d._resolve_process_group`, the group of a name.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

# torch 2.13 renamed them; the old names warn there and are the only ones before.
gather_into = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
scatter_into = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor

REDUCTIONS = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}


def group_named(name: str) -> distributed.ProcessGroup:
    resolve: Callable[[Any], distributed.ProcessGroup] = distributed_c10d._resolve_process_group
    return resolve(name)


@torch.compiler.assume_constant_result
def size_and_rank(group: str) -> tuple[int, int]:
    """Constants of a graph."""
    members = group_named(group)
    return members.size(), members.rank()


@torch.library.custom_op("meshwright::all_reduce", mutates_args=())
def all_reduce(x: Tensor, operation: str, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(out, REDUCTIONS[operation], group=group_named(group))
    return out


@all_reduce.register_fake
def _(x: Tensor, operation: str, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("meshwright::all_gather", mutates_args=())
def all_gather(x: Tensor, group: str) -> Tensor:
    """The ranks' tensors one after the other along the first dimension."""
    members = group_named(group)
    out = x.new_empty((x.shape[0] * members.size(), *x.shape[1:]))
    gather_into(out, x.contiguous(), group=members)
    return out


@all_gather.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty((x.shape[0] * group_named(group).size(), *x.shape[1:]))


@torch.library.custom_op("meshwright::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """This rank's slice along the first dimension of the sum."""
    members = group_named(group)
    out = x.new_empty((x.shape[0] // members.size(), *x.shape[1:]))
    scatter_into(out, x.contiguous(), group=members)
    return out


@reduce_scatter.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty((x.shape[0] // group_named(group).size(), *x.shape[1:]))


def remember_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


all_gather.register_autograd(lambda ctx, g: (reduce_scatter(g, ctx.group), None), setup_context=remember_group)
reduce_scatter.register_autograd(lambda ctx, g: (all_gather(g, ctx.group), None), setup_context=remember_group)


@torch.library.custom_op("meshwright::all_to_all", mutates_args=())
def all_to_all(x: Tensor, group: str) -> Tensor:
    """Equal slices along the first dimension: the p-th is sent to rank p and received from rank p."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    distributed.all_to_all_single(out, x.contiguous(), group=group_named(group))
    return out


@all_to_all.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
