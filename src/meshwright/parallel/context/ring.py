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

Both save for backward this rank's q, k, v and output, and one number (the log-sum-exp) per row. `attend` makes them differentiable.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from meshwright.models.dropout import Dropped
from meshwright.parallel import exchange
from meshwright.parallel.context.blocks import AttentionPattern, BlockAttention, BlockGradients, Runs


class Context(NamedTuple):
    """The split of a sequence: the runs of positions of each rank of the group (None: one rank has all), and the keys that a
    query sees."""

    group: ProcessGroup | None
    runs: tuple[Runs, ...]
    pattern: AttentionPattern
    dropped: Dropped | None = None

    @property
    def local_runs(self) -> Runs:
        return self.runs[0 if self.group is None else self.group.rank()]


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Copy K and V into one message."""
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def unpack(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message in the shapes of `k` and `v`."""
    return block[: k.numel()].view(k.shape), block[k.numel() :].view(v.shape)


class RingMessage:
    """A send to the next rank of the ring and a receive from the previous one: started here, completed by `wait`."""

    def __init__(self, sent: Tensor, received: Tensor, group: ProcessGroup) -> None:
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

    def wait(self) -> Tensor:
        while self.work:
            self.work.pop(0).wait()
        return self.received


def ring_blocks(block: Tensor, group: ProcessGroup, overlaps: bool = True) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, block) for all ranks, this rank first; the next block is received while one is used, or before it unless the ring
    `overlaps`. Overwrites `block`."""
    ranks, me = group.size(), group.rank()
    spare = torch.empty_like(block) if ranks > 1 else block
    for step in range(ranks):
        message = RingMessage(block, spare, group) if step < ranks - 1 else None
        if message is not None and not overlaps:
            message.wait()
        yield (me - step) % ranks, block
        if message is not None:
            block, spare = message.wait(), block


def gathered_blocks(whole: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, block) of gathered blocks, in the order of the ring."""
    for step in range(group.size()):
        source = (group.rank() - step) % group.size()
        yield source, whole[source]


def gather_blocks(block: Tensor, group: ProcessGroup) -> Tensor:
    return exchange.all_gather(block, group, 0).view(group.size(), -1)


class SavedForward(NamedTuple):
    """Tensors that forward saves for backward: this rank's inputs and outputs, and the log-sum-exp of its queries."""

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    lse_BNS: Tensor
    sinks_BNS: Tensor | None


# of q, k, v and the sinks
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, sinks_BNS: Tensor | None, context: Context, blocks: Iterator[tuple[int, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Run forward over all blocks, received from the ring or gathered: output and log-sum-exp."""
    attended = BlockAttention(q, context.local_runs, context.pattern, context.dropped, sinks_BNS)
    for source, block in blocks:
        attended.attend_block(*unpack(block, k, v), context.runs[source])
    assert attended.output_BNSD is not None
    return attended.output_BNSD.to(q.dtype), attended.lse_BNS


def gradients_of(saved: SavedForward, grad_output: Tensor, context: Context) -> BlockGradients:
    runs = context.local_runs, context.pattern, context.dropped
    return BlockGradients(grad_output, saved.q, saved.output, saved.lse_BNS, *runs)


class KeyTransport(Protocol):
    """Brings keys and values to this rank, in forward and in backward."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, context: Context) -> tuple[Tensor, Tensor]: ...

    @staticmethod
    def backward(saved: SavedForward, grad_output: Tensor, context: Context) -> Gradients: ...


class Ring:
    """K and V go round the ring, behind the computation."""

    overlaps = True

    @classmethod
    def forward(cls, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        assert context.group is not None
        return attend_blocks(q, k, v, sinks, context, ring_blocks(pack(k, v), context.group, cls.overlaps))

    @classmethod
    def backward(cls, saved: SavedForward, grad_output: Tensor, context: Context) -> Gradients:
        q, k, v, group = saved.q, saved.k, saved.v, context.group
        assert group is not None
        gradients = gradients_of(saved, grad_output, context)
        own_gradient = torch.empty(0)
        message: RingMessage | None = None
        for step, (source, block) in enumerate(ring_blocks(pack(k, v), group, cls.overlaps)):
            gradient = block.new_zeros(block.shape, dtype=gradients.dq.dtype)
            gradients.attend_block(*unpack(block, k, v), context.runs[source], *unpack(gradient, k, v))
            if step == 0:
                own_gradient = gradient
                continue
            if message is not None:
                gradient += message.wait()
            sent = gradient.to(block.dtype)
            message = RingMessage(sent, torch.empty_like(sent), group)
            if not cls.overlaps:
                message.wait()
        if message is not None:
            own_gradient += message.wait()
        dk, dv = unpack(own_gradient, k, v)
        return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), gradients.of_sinks(saved.sinks_BNS)


class SequentialRing(Ring):
    """K and V go round the ring, and no computation runs meanwhile: a plan whose `overlap` leaves out cp."""

    overlaps = False


class Gathered:
    """K and V of all ranks are gathered at once."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        assert context.group is not None
        whole = gather_blocks(pack(k, v), context.group)
        return attend_blocks(q, k, v, sinks, context, gathered_blocks(whole, context.group))

    @staticmethod
    def backward(saved: SavedForward, grad_output: Tensor, context: Context) -> Gradients:
        q, k, v, group = saved.q, saved.k, saved.v, context.group
        assert group is not None
        gradients = gradients_of(saved, grad_output, context)
        whole = gather_blocks(pack(k, v), group)
        added = whole.new_zeros(whole.shape, dtype=gradients.dq.dtype)
        for source, block in gathered_blocks(whole, group):
            gradients.attend_block(*unpack(block, k, v), context.runs[source], *unpack(added[source], k, v))
        own_gradient = exchange.reduce_scatter(added.to(k.dtype).flatten(), group, 0)
        return gradients.dq.to(q.dtype), *unpack(own_gradient, k, v), gradients.of_sinks(saved.sinks_BNS)


class Local:
    """A whole sequence on one rank, in tiles."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        attended = BlockAttention(q, context.local_runs, context.pattern, context.dropped, sinks)
        attended.attend_block(k, v, context.local_runs)
        assert attended.output_BNSD is not None
        return attended.output_BNSD.to(q.dtype), attended.lse_BNS

    @staticmethod
    def backward(saved: SavedForward, grad_output: Tensor, context: Context) -> Gradients:
        q, k, v = saved.q, saved.k, saved.v
        gradients = gradients_of(saved, grad_output, context)
        dk, dv = (torch.zeros_like(x, dtype=gradients.dq.dtype) for x in (k, v))
        gradients.attend_block(k, v, context.local_runs, dk, dv)
        return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), gradients.of_sinks(saved.sinks_BNS)


TRANSPORTS: dict[str, type[KeyTransport]] = {
    "ring": Ring,
    "sequential-ring": SequentialRing,
    "all-gather": Gathered,
    "local": Local,
}
