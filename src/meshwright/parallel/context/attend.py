"""Attention in blocks as a differentiable function, in eager code and in a compiled graph.

Eager code calls an autograd function, which holds the `Context` of the call. A compiled graph cannot contain Python objects, loops over
tiles, or messages of a ring: there attention is one operator, `meshwright::attend_blocks`, and its backward another one. All that
describes the call is among their arguments, as tensors, numbers and names:

    documents_BS  the document of each token, if attention stays in documents
    sample_B      the hashes by which probabilities are dropped
    numbers       runs of each rank, causal, window, chunked, the first and last head of this rank, then the first and last position
                  of all runs of all ranks
    factors       scale and soft cap of the scores, rate of dropout
    kind          how keys and values come here: ring, sequential-ring, all-gather, or local
    group         the name of the group

The compiler sees the shapes of the results only, so all ranks run the same messages in the same order.

Ring attention and all-gather attention: the same block-wise attention, with two ways to fetch keys and values.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from meshwright.models.dropout import Dropped
from meshwright.models.parts import at_least_single
from meshwright.parallel import exchange
from meshwright.parallel.context.blocks import AttentionPattern, BlockAttention, BlockGradients, Runs
from meshwright.parallel.operators import group_named


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
        ends = ((distributed.irecv, received, me - 1), (distributed.isend, sent, me + 1))
        messages = [distributed.P2POp(call, x, group=group, group_peer=peer % ranks) for call, x, peer in ends]
        self.work = distributed.batch_isend_irecv(messages) if sent.numel() else []

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


def attend_over_ring(
    q: Tensor, k: Tensor, v: Tensor, context: Context, sinks: Tensor | None = None, overlaps: bool = True
) -> Tensor:
    return attend(q, k, v, sinks, context, "ring" if overlaps else "sequential-ring")


def attend_over_gathered(q: Tensor, k: Tensor, v: Tensor, context: Context, sinks: Tensor | None = None) -> Tensor:
    return attend(q, k, v, sinks, context, "all-gather")


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: AttentionPattern,
    dropped: Dropped | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention to a whole sequence on this rank, in tiles, so that not all probabilities are in memory at once. `sinks` [B, N, S]
    holds the sink of each query."""
    return attend(q, k, v, sinks, Context(None, ((range(q.shape[2]),),), pattern, dropped), "local")


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, context: Context, kind: str) -> Tensor:
    if not torch.compiler.is_compiling():
        return _Attend.apply(q, k, v, sinks, context, kind)
    group, runs, p, dropped = context
    heads, rate = (range(0), 0.0) if dropped is None else (dropped.heads, dropped.rate)
    edges = [edge for own in runs for run in own for edge in (run.start, run.stop)]
    numbers = [len(runs[0]), int(p.causal), p.window, int(p.chunked), heads.start, heads.stop, *edges]
    sample_B, name = None if dropped is None else dropped.sample_B, "" if group is None else group.group_name
    factors = [p.scale_of(q), p.softcap, rate]
    return attend_blocks(q, k, v, sinks, p.documents_BS, sample_B, numbers, factors, kind, name)[0]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, context: Context, kind: str) -> Tensor:
        output, lse_BNS = run_forward(q, k, v, sinks, context, kind)
        ctx.context, ctx.kind = context, kind
        ctx.save_for_backward(q, k, v, output, lse_BNS, sinks)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        return *run_backward(SavedForward(*ctx.saved_tensors), grad_output, ctx.context, ctx.kind), None, None


def context_of(
    documents_BS: Tensor | None, sample_B: Tensor | None, numbers: list[int], factors: list[float], group: str
) -> Context:
    """The `Context` that the arguments of an operator describe."""
    (runs_per_rank, causal, window, chunked, *heads), edges = numbers[:6], numbers[6:]
    scale, softcap, rate = factors
    runs = [range(*edge) for edge in batched(edges, 2)]
    dropped = None if sample_B is None else Dropped(sample_B, range(*heads), rate)
    pattern = AttentionPattern(bool(causal), window, documents_BS, scale, bool(chunked), softcap)
    return Context(group_named(group) if group else None, tuple(batched(runs, runs_per_rank)), pattern, dropped)


def batched(values: list[Any], count: int) -> list[tuple[Any, ...]]:
    return [tuple(values[i : i + count]) for i in range(0, len(values), count)]


@torch.library.custom_op("meshwright::attend_blocks", mutates_args=())
def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents_BS: Tensor | None,
    sample_B: Tensor | None,
    numbers: list[int],
    factors: list[float],
    kind: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    context = context_of(documents_BS, sample_B, numbers, factors, group)
    output, lse_BNS = run_forward(q, k, v, sinks, context, kind)
    return output.contiguous(), lse_BNS.contiguous()


@attend_blocks.register_fake
def _(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=at_least_single(q.dtype))


@torch.library.custom_op("meshwright::attend_blocks_backward", mutates_args=())
def attend_blocks_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse_BNS: Tensor,
    sinks: Tensor | None,
    documents_BS: Tensor | None,
    sample_B: Tensor | None,
    numbers: list[int],
    factors: list[float],
    kind: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the sinks (empty without sinks)."""
    context = context_of(documents_BS, sample_B, numbers, factors, group)
    dq, dk, dv, of_sinks = run_backward(SavedForward(q, k, v, output, lse_BNS, sinks), grad_output, context, kind)
    of_sinks = q.new_empty(0) if of_sinks is None else of_sinks
    # The gradients of k and v may be views of one message; results of an operator may not share memory.
    dk, dv = (x.clone(memory_format=torch.contiguous_format) for x in (dk, dv))
    return dq.contiguous(), dk, dv, of_sinks.contiguous()


@attend_blocks_backward.register_fake
def _(grad_output: Any, q: Any, k: Any, v: Any, output: Any, lse_BNS: Any, sinks: Any, *rest: Any) -> Any:
    of_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


def _save(ctx: Any, inputs: tuple, output: Any) -> None:
    q, k, v, sinks, documents_BS, sample_B, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, documents_BS, sample_B)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_output: Tensor, _: Any) -> tuple:
    q, k, v, output, lse_BNS, sinks, documents_BS, sample_B = ctx.saved_tensors
    rest: Gradients = attend_blocks_backward(
        grad_output, q, k, v, output, lse_BNS, sinks, documents_BS, sample_B, *ctx.rest
    )
    return *rest[:3], None if sinks is None else rest[3], None, None, *(None for _ in ctx.rest)


attend_blocks.register_autograd(_backward, setup_context=_save)
