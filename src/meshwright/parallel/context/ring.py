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
from typing import NamedTuple

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


def gathered_blocks(packed: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, block) of all ranks' blocks, gathered at once, in the order of the ring."""
    whole = exchange.all_gather(packed, group, 0).view(group.size(), -1)
    for step in range(group.size()):
        source = (group.rank() - step) % group.size()
        yield source, whole[source]


def key_blocks(k: Tensor, v: Tensor, context: Context, kind: str) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield K, V and the rank of each block: of this rank alone without a group, else gathered, or as they come round the ring. A sequential
    ring (of a plan whose `overlap` leaves out cp) sends nothing while a block is used."""
    group = context.group
    if group is None:
        yield k, v, 0
        return
    packed = pack(k, v)
    blocks = gathered_blocks(packed, group) if kind == "all-gather" else ring_blocks(packed, group, kind == "ring")
    for source, block in blocks:
        yield *unpack(block, k, v), source


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks_BNS: Tensor | None, context: Context, kind: str
) -> tuple[Tensor, Tensor]:
    """Attend to the blocks of all ranks: output and log-sum-exp."""
    attended = BlockAttention(q, context.local_runs, context.pattern, context.dropped, sinks_BNS)
    for keys, values, source in key_blocks(k, v, context, kind):
        attended.attend_block(keys, values, context.runs[source])
    assert attended.output_BNSD is not None
    return attended.output_BNSD.to(q.dtype), attended.lse_BNS


def run_backward(saved: SavedForward, grad_output: Tensor, context: Context, kind: str) -> Gradients:
    q, k, v, output, lse_BNS, sinks_BNS = saved
    runs = context.local_runs, context.pattern, context.dropped
    gradients = BlockGradients(grad_output, q, output, lse_BNS, *runs)
    sums_at_home = _sums_of_ring if kind.endswith("ring") else _sums_of_gathered
    dk, dv = sums_at_home(gradients, k, v, context, kind)
    return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), gradients.of_sinks(sinks_BNS)


def _sums_of_ring(
    gradients: BlockGradients, k: Tensor, v: Tensor, context: Context, kind: str
) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's keys and values, which follow their block round the ring."""
    assert context.group is not None
    own_gradient, message = torch.empty(0), None
    for step, (keys, values, source) in enumerate(key_blocks(k, v, context, kind)):
        gradient = k.new_zeros(k.numel() + v.numel(), dtype=gradients.dq.dtype)
        gradients.attend_block(keys, values, context.runs[source], *unpack(gradient, k, v))
        if step == 0:
            own_gradient = gradient
            continue
        if message is not None:
            gradient += message.wait()
        sent = gradient.to(k.dtype)
        message = RingMessage(sent, torch.empty_like(sent), context.group)
        if kind == "sequential-ring":
            message.wait()
    if message is not None:
        own_gradient += message.wait()
    return unpack(own_gradient, k, v)


def _sums_of_gathered(
    gradients: BlockGradients, k: Tensor, v: Tensor, context: Context, kind: str
) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's keys and values, reduce-scattered."""
    added = k.new_zeros((len(context.runs), k.numel() + v.numel()), dtype=gradients.dq.dtype)
    for keys, values, source in key_blocks(k, v, context, kind):
        gradients.attend_block(keys, values, context.runs[source], *unpack(added[source], k, v))
    if context.group is None:
        return unpack(added[0], k, v)
    return unpack(exchange.reduce_scatter(added.to(k.dtype).flatten(), context.group, 0), k, v)
