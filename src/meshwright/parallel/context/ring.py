"""Ring attention and its all-gather twin: the same blocks of attention, fed by two kinds of transport.

Ring: at step t of P a rank works on the K and V of rank (me − t) mod P while passing them on and receiving the next.
Receive and send are posted together before the work and waited for after it, so with two buffers the transfer hides
behind the compute. Backward goes round again, and the gradients of a block travel behind it:

    K, V    b → b+1 → … → b+P−1            P−1 hops
    dK, dV      b+1 → … → b+P−1 → b        P−1 hops: the first rank after home begins the sum, home adds its own last

so backward sends twice forward's bytes, in 2(P−1) messages: K and V leave before a step's work, dK and dV after it.

All-gather: every rank gets all K and V at once (and once more in backward, rather than keeping them), and backward
reduce-scatters their gradients: one large message each in place of P−1 small ones, nothing hidden, all K and V in
memory while they are used. The choice of Llama 3, whose grouped queries make K and V small.

Both keep for backward this rank's q, k, v, output and one number a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from meshwright.models.dropout import Dropped
from meshwright.parallel import exchange
from meshwright.parallel.context.blocks import Attended, Gradients, Runs, Sight


class Context(NamedTuple):
    """Who holds what: the runs of positions of each rank of the group."""

    group: ProcessGroup
    runs: tuple[Runs, ...]
    sight: Sight
    dropped: Dropped | None = None

    @property
    def own(self) -> Runs:
        return self.runs[self.group.rank()]


def pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One message, in memory of its own."""
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def unpack(block: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a message in the shapes of `k` and `v`."""
    return block[: k.numel()].view(k.shape), block[k.numel() :].view(v.shape)


class Pass:
    """One message to the next rank of the ring while one comes from the previous: started here, ended by `wait`."""

    def __init__(self, sent: torch.Tensor, arriving: torch.Tensor, group: ProcessGroup) -> None:
        ranks, me = group.size(), group.rank()
        self.sent, self.arriving = sent, arriving  # a buffer must outlive its message
        self.work = (
            []
            if not sent.numel()
            else distributed.batch_isend_irecv(
                [
                    distributed.P2POp(distributed.irecv, arriving, group=group, group_peer=(me - 1) % ranks),
                    distributed.P2POp(distributed.isend, sent, group=group, group_peer=(me + 1) % ranks),
                ]
            )
        )

    def wait(self) -> torch.Tensor:
        for work in self.work:
            work.wait()
        return self.arriving


def travelling(block: torch.Tensor, group: ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, its block) for every rank, own first; `block` is overwritten. The next one is on its way meanwhile."""
    ranks, me = group.size(), group.rank()
    spare = torch.empty_like(block) if ranks > 1 else block
    for step in range(ranks):
        passing = Pass(block, spare, group) if step < ranks - 1 else None
        yield (me - step) % ranks, block
        if passing is not None:
            block, spare = passing.wait(), block


def in_turn(whole: torch.Tensor, group: ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """The same order, of blocks that are all here."""
    for step in range(group.size()):
        source = (group.rank() - step) % group.size()
        yield source, whole[source]


def gathered(block: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return exchange.all_gather(block, group, 0).view(group.size(), -1)


def attend_in_turn(
    ctx: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: Context,
    blocks: Iterator[tuple[int, torch.Tensor]],
) -> torch.Tensor:
    """Forward over blocks, however they come."""
    attended = Attended(q, context.own, context.sight, context.dropped)
    for source, block in blocks:
        attended.meet(*unpack(block, k, v), context.runs[source])
    assert attended.output_BNSD is not None
    output = attended.output_BNSD.to(q.dtype)
    ctx.context = context
    ctx.save_for_backward(q, k, v, output, attended.total_BNS)
    return output


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
        return attend_in_turn(ctx, q, k, v, context, travelling(pack(k, v), context.group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple:
        q, k, v, output, total = ctx.saved_tensors
        context: Context = ctx.context
        gradients = Gradients(slope, q, output, total, context.own, context.sight, context.dropped)
        home = torch.empty(0)
        passing: Pass | None = None
        for step, (source, block) in enumerate(travelling(pack(k, v), context.group)):
            added = block.new_zeros(block.shape, dtype=gradients.dq.dtype)
            gradients.meet(*unpack(block, k, v), context.runs[source], *unpack(added, k, v))
            if step == 0:
                home = added
                continue
            if passing is not None:
                added += passing.wait()
            leaving = added.to(block.dtype)
            passing = Pass(leaving, torch.empty_like(leaving), context.group)
        if passing is not None:
            home += passing.wait()
        dk, dv = unpack(home, k, v)
        return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
        whole = gathered(pack(k, v), context.group)
        return attend_in_turn(ctx, q, k, v, context, in_turn(whole, context.group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple:
        q, k, v, output, total = ctx.saved_tensors
        context: Context = ctx.context
        gradients = Gradients(slope, q, output, total, context.own, context.sight, context.dropped)
        whole = gathered(pack(k, v), context.group)
        added = whole.new_zeros(whole.shape, dtype=gradients.dq.dtype)
        for source, block in in_turn(whole, context.group):
            gradients.meet(*unpack(block, k, v), context.runs[source], *unpack(added[source], k, v))
        home = exchange.reduce_scatter(added.to(k.dtype).flatten(), context.group, 0)
        return gradients.dq.to(q.dtype), *unpack(home, k, v), None


class _Here(torch.autograd.Function):
    """The same where the whole sequence is here."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight, dropped: Dropped | None
    ) -> torch.Tensor:
        ctx.told = (range(q.shape[2]),), sight, dropped
        attended = Attended(q, *ctx.told)
        attended.meet(k, v, ctx.told[0])
        assert attended.output_BNSD is not None
        output = attended.output_BNSD.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, attended.total_BNS)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple:
        q, k, v, output, total = ctx.saved_tensors
        gradients = Gradients(slope, q, output, total, *ctx.told)
        dk, dv = (torch.zeros_like(x, dtype=gradients.dq.dtype) for x in (k, v))
        gradients.meet(k, v, ctx.told[0], dk, dv)
        return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def here(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight, dropped: Dropped | None = None
) -> torch.Tensor:
    """Attention to a whole sequence in tiles."""
    return _Here.apply(q, k, v, sight, dropped)


def over_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
    return _Ring.apply(q, k, v, context)


def over_gathered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
    return _Gather.apply(q, k, v, context)
