"""Context parallelism: the sequence is split over P ranks, for sequences that do not fit on one device.

All operations except attention process each token separately, so a rank with s/P tokens runs them unchanged. Attention
needs all earlier keys and values. There are three ways to get them:

    ring        K and V go round the ring in P−1 hops; a rank holds at most two blocks of them    4·(s/P)·kv·bytes
    all-gather  K and V of the whole sequence at once, freed after each layer                     2·s·kv·bytes
    ulysses     all-to-all: whole sequences of N/P heads, then back                               P at most the heads

None of them computes s×s scores at once: blocks run in tiles or on a flash kernel. Per layer a rank saves q, k, v and the
output of its tokens: with 131,072 tokens, P = 8, hidden 4096 and a K and V width of 1024 in 16 bits, 320 MiB per layer. The
two buffers of the ring are 128 MiB in total.

**The free-overlap regime.** A ring step computes 4·N·D·c·(s/P)² FLOPs (c = ½ if causal) and sends 2·(s/P)·K·D
values. Compute grows with the square of the block, the transfer linearly. If

    s/P  ≥  K·bytes·F / (2·N·c·B)         F FLOP/s, B bytes/s, N heads, K KV heads

communication is fully hidden, for any number of ranks. With 400 TFLOP/s, 50 GB/s, N = 32, K = 8, causal and 16 bits:
4,000 tokens per rank.

**Why zigzag.** If a causal sequence is cut into P runs, the first rank attends to one block and the last to P blocks, and all
ranks wait for the last. Instead cut it into 2P runs and give rank r the runs r and 2P−1−r, one early and one late:

    P = 4     rank 0: 0 7     rank 1: 1 6     rank 2: 2 5     rank 3: 3 4

For its own block a rank computes the lower triangle; for the block of an earlier rank, all its queries with the early half;
for the block of a later rank, its late queries with both halves. This is half a block at every step on every rank. Ulysses
attends to whole sequences and needs no zigzag.

Positions are those of the whole sequence: rotary and learned positions use the rank's `position_ids`. Ranks of a
context-parallel group hold the same weights and different tokens: gradients are summed over dp·cp, even if dp is 1,
and ZeRO shards over shard·cp.

For a user's own model: give each rank `part_of(x, group, dim)` of the inputs, and call `ring_attention` or
`gather_attention` instead of attention; for `ulysses_attention` use `part_of(x, group, dim, zigzag=False)`.

Ulysses: exchange sequence shards for heads, attend to whole sequences, exchange back (Jacobs et al. 2023).

    q, k, v  [B, N, S/P, D]  → all-to-all →  [B, N/P, S, D]     attention of N/P heads, whole and unchanged
    output   [B, N/P, S, D]  → all-to-all →  [B, N, S/P, D]

Two all-to-alls forward (q, k and v in one message) and two backward, each sending (P−1)/P of the data of this rank: less
than a ring for large P, and any attention kernel, mask or window works unchanged. But P may not exceed the number of
heads, the messages are not hidden, and attention saves q, k and v of whole sequences for backward. These are the same bytes
as before the exchange (s·N/P = s/P·N), unless there are fewer KV heads than ranks. Then KV heads are repeated until each
rank has one, and the backward of the repeat sums the gradients of the copies.

Legend: B batch, N heads, K KV heads, S sequence, D head dim, P ranks.

The index in one device's batch of every token that the ranks of a stage hold.

One device has tokens in the order (sample, position). The ranks of a stage hold them as

    dp       runs of samples
    cp       runs of positions: with zigzag, an early and a late run
    tp       with sequence parallelism, an equal share of those positions; without it, an equal slice of the flat
             (sample, position) list, which all tp ranks have

Routing that compares tokens with each other (a capacity limit, expert choice) must break ties in an order that does not
depend on the layout. It uses this index.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models.attention import AttentionRule, Geometry
from meshwright.models.step_context import current
from meshwright.parallel import operators
from meshwright.parallel.context.attend import Context, attend_over_gathered, attend_over_ring, tiled_attention
from meshwright.parallel.context.blocks import AttentionPattern, Runs, position_ids

Heads = Callable[[Tensor, Tensor, Tensor], Tensor]


class _AllToAll(torch.autograd.Function):
    """Send row p to rank p and receive row p from rank p; backward exchanges the gradients in the same way."""

    @staticmethod
    def forward(ctx: Any, rows_PX: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(rows_PX, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output_PX: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad_output_PX, ctx.group), None


def all_to_all(rows_PX: Tensor, group: ProcessGroup) -> Tensor:
    rows_PX = rows_PX.contiguous()
    if torch.compiler.is_compiling():
        return operators.all_to_all(rows_PX, group.group_name)
    out = torch.empty_like(rows_PX)
    distributed.all_to_all_single(out, rows_PX, group=group)
    return out


def attend_by_heads(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, attend: Heads) -> Tensor:
    """Attend to whole sequences with this rank's share of the heads. q, k and v have all heads of this rank's run of the sequence."""
    ranks, length, heads, keys = group.size(), q.shape[2], q.shape[1], k.shape[1]
    if heads % ranks or (keys % ranks and ranks % keys):
        raise MeshwrightError(
            "MW-CP-002",
            f"{heads} heads and {keys} KV heads do not divide over {ranks} ranks",
            why="Ulysses gives each rank whole heads; if there are fewer KV heads than ranks, their number must divide the ranks",
            valid=["cp_kind=ring", "cp_kind=all-gather"],
        )
    k, v = (x.repeat_interleave(max(1, ranks // keys), dim=1) for x in (k, v))

    by_heads = [x.unflatten(1, (ranks, -1)).movedim(1, 0) for x in (q, k, v)]  # [P, B, N/P, S/P, D]
    exchanged = _AllToAll.apply(torch.cat([x.flatten(1) for x in by_heads], dim=1), group)
    sizes = [x[0].numel() for x in by_heads]
    parts = [y.view(x.shape) for y, x in zip(exchanged.split(sizes, dim=1), by_heads, strict=True)]
    mixed = attend(*(p.permute(1, 2, 0, 3, 4).flatten(2, 3) for p in parts))

    by_sequence = mixed.unflatten(2, (ranks, length)).permute(2, 0, 1, 3, 4)  # [P, B, N/P, S/P, D]
    back = _AllToAll.apply(by_sequence.flatten(1), group).view(by_sequence.shape)
    return back.movedim(0, 1).flatten(1, 2)


def runs_of(seq: int, ranks: int, zigzag: bool) -> tuple[Runs, ...]:
    """The runs of positions of every rank: one run per rank, or with zigzag an early and a late run."""
    pieces = 2 * ranks if zigzag else ranks
    if seq % pieces:
        raise MeshwrightError(
            "MW-CP-001",
            f"a sequence of {seq} does not split into {pieces} runs",
            why=f"Each of {ranks} ranks has {'two runs, one early and one late' if zigzag else 'one run'}",
            valid=[f"sequences that are multiples of {pieces}"],
        )
    runs = [range(start, start + seq // pieces) for start in range(0, seq, seq // pieces)]
    return tuple((runs[i], runs[-1 - i]) if zigzag else (runs[i],) for i in range(ranks))


def part_of(x: Tensor, group: ProcessGroup, dim: int, zigzag: bool = True) -> Tensor:
    """This rank's tokens of a tensor with the whole sequence along `dim`."""
    own = runs_of(x.shape[dim], group.size(), zigzag)[group.rank()]
    return x.index_select(dim, position_ids(own).to(x.device))


def ring_attention(
    q_BNSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    group: ProcessGroup,
    causal: bool = True,
    *,
    zigzag: bool = True,
    window: int = 0,
) -> Tensor:
    """softmax(q kᵀ / √D) v over the sequence of all ranks, for the queries of this rank. All ranks have equally many tokens, as
    `part_of` returns them. With `window` a token sees only tokens less than `window` positions away."""
    return attend_over_ring(q_BNSD, k_BKSD, v_BKSD, _context(q_BNSD, k_BKSD, group, causal, zigzag, window))


def gather_attention(
    q_BNSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    group: ProcessGroup,
    causal: bool = True,
    *,
    zigzag: bool = True,
    window: int = 0,
) -> Tensor:
    """As `ring_attention`, with all K and V gathered at once."""
    return attend_over_gathered(q_BNSD, k_BKSD, v_BKSD, _context(q_BNSD, k_BKSD, group, causal, zigzag, window))


def ulysses_attention(
    q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, group: ProcessGroup, causal: bool = True
) -> Tensor:
    """As `ring_attention`, by exchanging sequence shards for heads. Rank r holds the r-th run of the sequence: no zigzag."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return attend_by_heads(q_BNSD, k_BKSD, v_BKSD, group, attend)


def _context(q: Tensor, k: Tensor, group: ProcessGroup, causal: bool, zigzag: bool, window: int) -> Context:
    if q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise MeshwrightError(
            "MW-CP-003",
            f"queries of {q.shape[1]} heads and {q.shape[2]} tokens, keys of {k.shape[1]} and {k.shape[2]}",
            why="Queries and keys have the same tokens, and the number of heads is a multiple of the number of KV heads",
        )
    return Context(group, runs_of(q.shape[2] * group.size(), group.size(), zigzag), AttentionPattern(causal, window))


def is_zigzag(model: Model, kind: str, seq: int, ranks: int) -> bool:
    """Whether each rank has an early and a late run: for causal ring and all-gather attention, to balance the work. All-gather
    attention runs unbalanced if the sequence length is not a multiple of 2·ranks."""
    return model.causal and (kind == "ring" or (kind == "all-gather" and seq % (2 * ranks) == 0))


def shard_sequence(
    module: nn.Module, model: Model, group: ProcessGroup, kind: str, seq: int, overlaps: bool = True
) -> Tensor:
    """Make attention of one stage run over a split sequence. `overlaps`: messages of a ring run behind its compute. Returns the positions of this
    rank's tokens."""
    runs = runs_of(seq, group.size(), is_zigzag(model, kind, seq, group.size()))
    geometry = module.geometry
    assert isinstance(geometry, Geometry)
    geometry.position_ids, geometry.length = position_ids(runs[group.rank()]), seq
    transport = attend_over_gathered if kind == "all-gather" else partial(attend_over_ring, overlaps=overlaps)

    def by_blocks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rule: AttentionRule) -> Tensor:
        return transport(q, k, v, Context(group, runs, pattern_of(geometry, rule, seq), rule.dropped), sinks)

    def by_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rule: AttentionRule) -> Tensor:
        own = rule._replace(dropped=rule.dropped and rule.dropped.part(group.rank(), group.size()))
        # A head has the same sink for all queries: its value for the first query of this rank serves for the whole sequence.
        own_sinks = None if sinks is None else sinks.chunk(group.size(), 1)[group.rank()][..., :1].expand(-1, -1, seq)
        return attend_by_heads(q, k, v, group, lambda q, k, v: geometry.attend_whole(q, k, v, own_sinks, own))

    geometry.attend = by_heads if kind == "ulysses" else by_blocks
    return geometry.position_ids


def pattern_of(geometry: Geometry, rule: AttentionRule, seq: int) -> AttentionPattern:
    window = 0 if rule.window >= seq else rule.window
    chunked = rule.chunked and bool(window)
    return AttentionPattern(geometry.causal, window, current().documents_BS, rule.scale, chunked, rule.softcap)


def use_tiled_attention(module: nn.Module) -> None:
    """Compute attention with sinks, soft caps or dropout of probabilities in tiles, on whole sequences, so that not all probabilities are
    in memory."""
    geometry: Any = module.geometry
    plain = geometry.attend_whole

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rule: AttentionRule) -> Tensor:
        if rule.fused and sinks is None:
            return plain(q, k, v, None, rule)
        return tiled_attention(q, k, v, pattern_of(geometry, rule, q.shape[2]), rule.dropped, sinks)

    geometry.attend_whole = geometry.attend = attend


def token_order(layout: Layout, rank: int, model: Model, rows: int, length: int) -> Tensor:
    """[rank of the stage, token of that rank] → index in one device's micro-batch; a layer sees [rows, length] tokens on
    each rank."""
    plan = layout.plan
    shared = length * (plan.tp if plan.sp else 1)  # positions of one tp group
    seq = shared * plan.cp
    runs = runs_of(seq, plan.cp, is_zigzag(model, plan.cp_kind, seq, plan.cp)) if plan.cp > 1 else ((range(seq),),)
    out = []
    for other in layout.group_of("stage", rank):
        at = layout.coordinates(other)
        if plan.sp:
            flat = (torch.arange(rows)[:, None] * shared + at["tp"] * length + torch.arange(length)).flatten()
        else:
            flat = torch.arange(rows * length).chunk(plan.tp)[at["tp"]]
        sample = (at["replicate"] * plan.shard + at["shard"]) * rows + flat // shared
        out.append(sample * seq + position_ids(runs[at["cp"]])[flat % shared])
    return torch.stack(out)
