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
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.models.dropout import Dropped
from meshwright.models.parts import at_least_single
from meshwright.parallel.context.blocks import AttentionPattern
from meshwright.parallel.context.ring import Context, Gradients, SavedForward, run_backward, run_forward
from meshwright.parallel.operators import group_named


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
