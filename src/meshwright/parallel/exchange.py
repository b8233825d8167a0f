"""The pairs of communication that tensor parallelism is made of, each the other's backward.

    copy_in     identity      forward, all-reduce     backward      enter a column-split product        Megatron's f
    reduce_out  all-reduce    forward, identity       backward      leave a row-split product           Megatron's g
    gather_in   all-gather    forward, reduce-scatter backward      f where the sequence is sharded
    scatter_out reduce-scatter forward, all-gather    backward      g where the sequence is sharded
    join        all-gather    forward, own slice      backward      a whole tensor that every rank then uses in the same way
    divide      own slice     forward, all-gather     backward      the inverse of join: each rank continues with its share

One `copy_in` feeds q, k and v together, so backward sums their three input gradients before the one all-reduce: four
all-reduces a layer, where a plan that treats each product separately has seven. An all-reduce is a reduce-scatter
and an all-gather, so the sequence-sharded pair moves the same bytes.

Each can be differentiated once: a gradient of a gradient would need further pairs of collectives, and raises.

torch concatenates ranks along the first dimension: for a dimension d > 0 tensors are transposed to the front and back.

In a compiled graph the collectives are operators (`operators`), which compute the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from meshwright.errors import MeshwrightError
from meshwright.parallel import operators


def all_reduce(tensor: Tensor, group: ProcessGroup, operation: str = "sum") -> Tensor:
    """The sum or the maximum ("max") over the group, in place if the tensor is contiguous."""
    if torch.compiler.is_compiling():
        return operators.all_reduce(tensor, operation, group.group_name)
    tensor = tensor.contiguous()
    distributed.all_reduce(tensor, operators.REDUCTIONS[operation], group=group)
    return tensor


def sum_together(tensors: list[Tensor], group: ProcessGroup) -> None:
    """Sum each of several tensors over the group, in place, with one all-reduce."""
    together = all_reduce(torch.cat([t.flatten() for t in tensors]), group)
    for tensor, summed in zip(tensors, together.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))


def all_gather(tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """The ranks' tensors of equal shape, one after the other along `dim`."""
    front = to_front(tensor, dim)
    if torch.compiler.is_compiling():
        return in_order(operators.all_gather(front, group.group_name).movedim(0, dim))
    whole = front.new_empty((front.shape[0] * group.size(), *front.shape[1:]))
    operators.gather_into(whole, front, group=group)
    return from_front(whole, dim)


def reduce_scatter(tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's slice along `dim` of the sum over the group."""
    ranks, _ = size_and_rank(group)
    check_divides(tensor, ranks, dim)
    front = to_front(tensor, dim)
    if torch.compiler.is_compiling():
        return in_order(operators.reduce_scatter(front, group.group_name).movedim(0, dim))
    part = front.new_empty((front.shape[0] // ranks, *front.shape[1:]))
    operators.scatter_into(part, front, group=group)
    return from_front(part, dim)


def size_and_rank(group: ProcessGroup) -> tuple[int, int]:
    """The number of ranks of a group and this rank's place in it: numbers in a compiled graph, which cannot call methods of a group."""
    if torch.compiler.is_compiling():
        return operators.size_and_rank(group.group_name)
    return group.size(), group.rank()


def check_divides(tensor: Tensor, ranks: int, dim: int) -> None:
    if tensor.shape[dim] % ranks:
        raise MeshwrightError(
            "MW-TP-006",
            f"dimension {dim} of {tuple(tensor.shape)} does not divide over {ranks} ranks",
            why="Each rank keeps an equal share of it",
            fix="pad it, or set sp=false",
        )


def to_front(tensor: Tensor, dim: int) -> Tensor:
    """Contiguous with `dim` first: nothing is copied where all dimensions before it are 1, as with a batch of one sequence."""
    return tensor.movedim(dim, 0).contiguous()


def from_front(tensor: Tensor, dim: int) -> Tensor:
    """The inverse of `to_front`, with the strides of a new tensor: torch compares the strides of pipeline messages even of
    size 1, and a split backward detaches a stage's output in place, which autograd refuses for a view."""
    back = tensor.movedim(0, dim)
    return back.reshape(-1).view(back.shape).detach()


def in_order(tensor: Tensor) -> Tensor:
    """Contiguous, without a call that returns its argument. Of a compiled `autograd.Function` torch 2.11 returns every tensor that forward names;
    if two names are one tensor, the gradient of the result is taken for that of the other name, and is lost (its issue 180642)."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


Collective = Callable[[Tensor, ProcessGroup, int], Tensor]


def pair(there: Collective, back: Collective, transposed: bool = False) -> Callable[..., Tensor]:
    """A function of (tensor, group, dim) that computes `there`, and whose backward computes `back` of the gradient. `transposed`: the operator
    in `there` has this gradient already. A compiled graph then needs no function around it, inside of which torch 2.11 forgets what
    `torch.utils.checkpoint` said of the operator: that backward computes it again (`regather`)."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
            ctx.group, ctx.dim = group, dim
            return there(x, group, dim)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
            return back(gradient, ctx.group, ctx.dim), None, None

    def exchange(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
        if transposed and torch.compiler.is_compiling():
            return there(x, group, dim)
        return Exchange.apply(x, group, dim)

    return exchange


def own_slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    ranks, rank = size_and_rank(group)
    check_divides(x, ranks, dim)
    return in_order(x.chunk(ranks, dim)[rank])


def sum_in_place(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """The sum over the group of a product's fresh output. It is not a view of it: a module may change it in place."""
    if torch.compiler.is_compiling():
        return operators.all_reduce(x, "sum", group.group_name)
    distributed.all_reduce(x, group=group)
    return x.detach()


copy_in = pair(lambda x, group, dim: x.view_as(x), lambda g, group, dim: all_reduce(g, group))
reduce_out = pair(sum_in_place, lambda g, group, dim: g)
gather_in = pair(lambda x, *where: all_gather(x, *where), lambda g, *where: reduce_scatter(g, *where), True)
scatter_out = pair(lambda x, *where: reduce_scatter(x, *where), lambda g, *where: all_gather(g, *where), True)
join = pair(lambda x, *where: all_gather(x, *where), own_slice)
divide = pair(own_slice, lambda g, *where: all_gather(g, *where))
