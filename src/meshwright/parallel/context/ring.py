"""Ring attention and all-gather attention: the same block-wise attention, with two ways to fetch keys and values.

Ring: at step t of P, rank r computes with the K and V of rank (r − t) mod P while it sends them to the next rank and
receives the next block. Receive and send are posted together before the computation and waited for after it, so with two
buffers the transfer is hidden behind the computation. Backward runs the ring a second time, and the gradients of a block
follow it one rank behind:

    K, V    b → b+1 → … → b+P−1            P−1 hops
    dK, dV      b+1 → … → b+P−1 → b        P−1 hops: rank b+1 starts the sum, the owner b adds its part last

So backward sends twice the bytes of forward, in 2(P−1) messages: K and V before a step's computation, dK and dV after it.

All-gather: every rank gathers all K and V at once, a second time in backward instead of saving them, and backward
reduce-scatters their gradients. Each is one large message instead of P−1 small ones, but it is not hidden, and all K and V
are in memory while they are used. Llama 3 uses it, because its grouped queries make K and V small.

Both save for backward this rank's q, k, v and output, and one number (the log-sum-exp) per row.
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
from meshwright.parallel.context.blocks import AttentionPattern, BlockAttention, BlockGradients, Runs


class Context(NamedTuple):
    """How a sequence is split: the runs of positions of each rank of the group, and the keys that a query sees."""

    group: ProcessGroup
    runs: tuple[Runs, ...]
    pattern: AttentionPattern
    dropped: Dropped | None = None

    @property
    def local_runs(self) -> Runs:
        return self.runs[self.group.rank()]


def pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Copy K and V into one message."""
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def unpack(block: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a message in the shapes of `k` and `v`."""
    return block[: k.numel()].view(k.shape), block[k.numel() :].view(v.shape)


class RingMessage:
    """A send to the next rank of the ring and a receive from the previous one: started here, completed by `wait`."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, group: ProcessGroup) -> None:
        ranks, me = group.size(), group.rank()
        self.sent, self.received = sent, received  # both buffers must live until `wait`
        self.work = (
            []
            if not sent.numel()
            else distributed.batch_isend_irecv(
                [
                    distributed.P2POp(distributed.irecv, received, group=group, group_peer=(me - 1) % ranks),
                    distributed.P2POp(distributed.isend, sent, group=group, group_peer=(me + 1) % ranks),
                ]
            )
        )

    def wait(self) -> torch.Tensor:
        for work in self.work:
            work.wait()
        return self.received


def ring_blocks(block: torch.Tensor, group: ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (rank, block) for all ranks, this rank first; the next block is received while one is used. Overwrites `block`."""
    ranks, me = group.size(), group.rank()
    spare = torch.empty_like(block) if ranks > 1 else block
    for step in range(ranks):
        message = RingMessage(block, spare, group) if step < ranks - 1 else None
        yield (me - step) % ranks, block
        if message is not None:
            block, spare = message.wait(), block


def gathered_blocks(whole: torch.Tensor, group: ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (rank, block) of gathered blocks, in the order of the ring."""
    for step in range(group.size()):
        source = (group.rank() - step) % group.size()
        yield source, whole[source]


def gather_blocks(block: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return exchange.all_gather(block, group, 0).view(group.size(), -1)


def attend_blocks(
    ctx: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks_BNS: torch.Tensor | None,
    context: Context,
    blocks: Iterator[tuple[int, torch.Tensor]],
) -> torch.Tensor:
    """Run forward over all blocks, received from the ring or gathered."""
    attended = BlockAttention(q, context.local_runs, context.pattern, context.dropped, sinks_BNS)
    for source, block in blocks:
        attended.attend_block(*unpack(block, k, v), context.runs[source])
    assert attended.output_BNSD is not None
    output = attended.output_BNSD.to(q.dtype)
    ctx.context = context
    ctx.save_for_backward(q, k, v, output, attended.lse_BNS, sinks_BNS)
    return output


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        return attend_blocks(ctx, q, k, v, sinks, context, ring_blocks(pack(k, v), context.group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        q, k, v, output, lse, sinks = ctx.saved_tensors
        context: Context = ctx.context
        gradients = BlockGradients(grad_output, q, output, lse, context.local_runs, context.pattern, context.dropped)
        own_gradient = torch.empty(0)
        message: RingMessage | None = None
        for step, (source, block) in enumerate(ring_blocks(pack(k, v), context.group)):
            gradient = block.new_zeros(block.shape, dtype=gradients.dq.dtype)
            gradients.attend_block(*unpack(block, k, v), context.runs[source], *unpack(gradient, k, v))
            if step == 0:
                own_gradient = gradient
                continue
            if message is not None:
                gradient += message.wait()
            sent = gradient.to(block.dtype)
            message = RingMessage(sent, torch.empty_like(sent), context.group)
        if message is not None:
            own_gradient += message.wait()
        dk, dv = unpack(own_gradient, k, v)
        return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), gradients.of_sinks(sinks), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        whole = gather_blocks(pack(k, v), context.group)
        return attend_blocks(ctx, q, k, v, sinks, context, gathered_blocks(whole, context.group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        q, k, v, output, lse, sinks = ctx.saved_tensors
        context: Context = ctx.context
        gradients = BlockGradients(grad_output, q, output, lse, context.local_runs, context.pattern, context.dropped)
        whole = gather_blocks(pack(k, v), context.group)
        added = whole.new_zeros(whole.shape, dtype=gradients.dq.dtype)
        for source, block in gathered_blocks(whole, context.group):
            gradients.attend_block(*unpack(block, k, v), context.runs[source], *unpack(added[source], k, v))
        own_gradient = exchange.reduce_scatter(added.to(k.dtype).flatten(), context.group, 0)
        return gradients.dq.to(q.dtype), *unpack(own_gradient, k, v), gradients.of_sinks(sinks), None


class _TiledAttention(torch.autograd.Function):
    """Attention to a whole sequence on one rank, in tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        pattern: AttentionPattern,
        dropped: Dropped | None,
    ) -> torch.Tensor:
        runs = (range(q.shape[2]),)
        ctx.arguments = runs, pattern, dropped
        attended = BlockAttention(q, runs, pattern, dropped, sinks)
        attended.attend_block(k, v, runs)
        assert attended.output_BNSD is not None
        output = attended.output_BNSD.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, attended.lse_BNS, sinks)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        q, k, v, output, lse, sinks = ctx.saved_tensors
        gradients = BlockGradients(grad_output, q, output, lse, *ctx.arguments)
        dk, dv = (torch.zeros_like(x, dtype=gradients.dq.dtype) for x in (k, v))
        gradients.attend_block(k, v, ctx.arguments[0], dk, dv)
        return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), gradients.of_sinks(sinks), None, None


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: AttentionPattern,
    dropped: Dropped | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention to a whole sequence on this rank, in tiles, so that not all probabilities are in memory at once. `sinks` [B, N, S]
    holds the sink of each query."""
    return _TiledAttention.apply(q, k, v, sinks, pattern, dropped)


def attend_over_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    return _Ring.apply(q, k, v, sinks, context)


def attend_over_gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    return _Gather.apply(q, k, v, sinks, context)
