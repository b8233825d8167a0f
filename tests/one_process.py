"""The compressors of all ranks in one process: exchanges are performed in its memory."""

from collections.abc import Iterator

import torch

from meshwright.parallel.numerics.compress.base import Compressor, Exchange, Layout


def emulate(
    compressors: list[Compressor], index: int, messages: list[torch.Tensor], layout: Layout, backwards: bool = False
) -> list[torch.Tensor]:
    """The result on each rank, computed on one device; `messages` and `compressors` are lists by rank."""
    ranks = len(messages)
    messages = [m.clone() for m in messages]
    run_together(
        [c.reduce(index, m, layout, r, ranks) for r, (c, m) in enumerate(zip(compressors, messages, strict=True))],
        backwards,
    )
    return messages


def run_together(steps: list[Iterator[Exchange]], backwards: bool = False) -> None:
    """Run the reductions of all ranks in lockstep to their ends."""
    while requests := [asked for step in steps if (asked := next(step, None)) is not None]:
        perform(requests, backwards)


def perform(asked: list[Exchange], backwards: bool = False) -> None:
    """Perform one exchange of all ranks in memory; sums start with the first rank, or with the last."""
    given = [a.given.clone() for a in asked]
    first, *others = given[::-1] if backwards else given
    for rank, a in enumerate(asked):
        if a.operation == "all_reduce":
            total = first.clone()
            for other in others:
                total += other
            a.out.copy_(total)
        elif a.operation == "reduce_scatter":
            total = first[rank].clone()
            for other in others:
                total += other[rank]
            a.out.copy_(total)
        elif a.operation == "all_gather":
            a.out.view(-1).copy_(torch.cat([g.flatten() for g in given]))
        else:
            a.out.copy_(torch.cat([g.chunk(len(asked))[rank] for g in given]))
