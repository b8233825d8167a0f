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
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models.attention import AttentionRule, Geometry
from meshwright.parallel.context.attend import attend_over_gathered, attend_over_ring, tiled_attention
from meshwright.parallel.context.blocks import AttentionPattern, Runs, position_ids
from meshwright.parallel.context.ring import Context
from meshwright.parallel.context.ulysses import attend_by_heads


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
    length = seq // pieces
    runs = [range(i * length, (i + 1) * length) for i in range(pieces)]
    if not zigzag:
        return tuple((run,) for run in runs)
    return tuple((runs[i], runs[-1 - i]) for i in range(ranks))


def part_of(x: torch.Tensor, group: ProcessGroup, dim: int, zigzag: bool = True) -> torch.Tensor:
    """This rank's tokens of a tensor with the whole sequence along `dim`."""
    own = runs_of(x.shape[dim], group.size(), zigzag)[group.rank()]
    return x.index_select(dim, position_ids(own).to(x.device))


def ring_attention(
    q_BNSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    group: ProcessGroup,
    causal: bool = True,
    *,
    zigzag: bool = True,
    window: int = 0,
) -> torch.Tensor:
    """softmax(q kᵀ / √D) v over the sequence of all ranks, for the queries of this rank. All ranks have equally many tokens, as
    `part_of` returns them. With `window` a token sees only tokens less than `window` positions away."""
    return attend_over_ring(q_BNSD, k_BKSD, v_BKSD, _context(q_BNSD, k_BKSD, group, causal, zigzag, window))


def gather_attention(
    q_BNSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    group: ProcessGroup,
    causal: bool = True,
    *,
    zigzag: bool = True,
    window: int = 0,
) -> torch.Tensor:
    """As `ring_attention`, with all K and V gathered at once."""
    return attend_over_gathered(q_BNSD, k_BKSD, v_BKSD, _context(q_BNSD, k_BKSD, group, causal, zigzag, window))


def ulysses_attention(
    q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, group: ProcessGroup, causal: bool = True
) -> torch.Tensor:
    """As `ring_attention`, by exchanging sequence shards for heads. Rank r holds the r-th run of the sequence: no zigzag."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return attend_by_heads(q_BNSD, k_BKSD, v_BKSD, group, attend)


def _context(q: torch.Tensor, k: torch.Tensor, group: ProcessGroup, causal: bool, zigzag: bool, window: int) -> Context:
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
) -> torch.Tensor:
    """Make attention of one stage run over a split sequence. `overlaps`: messages of a ring run behind its compute. Returns the positions of this
    rank's tokens."""
    runs = runs_of(seq, group.size(), is_zigzag(model, kind, seq, group.size()))
    geometry = module.geometry
    assert isinstance(geometry, Geometry)
    geometry.position_ids, geometry.length = position_ids(runs[group.rank()]), seq
    transport = attend_over_gathered if kind == "all-gather" else partial(attend_over_ring, overlaps=overlaps)

    def by_blocks(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, rule: AttentionRule
    ) -> torch.Tensor:
        return transport(q, k, v, Context(group, runs, pattern_of(geometry, rule, seq), rule.dropped), sinks)

    def by_heads(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, rule: AttentionRule
    ) -> torch.Tensor:
        own = rule._replace(dropped=rule.dropped and rule.dropped.part(group.rank(), group.size()))
        # A head has the same sink for all queries: its value for the first query of this rank serves for the whole sequence.
        own_sinks = None if sinks is None else sinks.chunk(group.size(), 1)[group.rank()][..., :1].expand(-1, -1, seq)
        return attend_by_heads(q, k, v, group, lambda q, k, v: geometry.attend_whole(q, k, v, own_sinks, own))

    geometry.attend = by_heads if kind == "ulysses" else by_blocks
    return geometry.position_ids


def pattern_of(geometry: Geometry, rule: AttentionRule, seq: int) -> AttentionPattern:
    window = 0 if rule.window >= seq else rule.window
    chunked = rule.chunked and bool(window)
    return AttentionPattern(geometry.causal, window, geometry.documents(), rule.scale, chunked, rule.softcap)


def use_tiled_attention(module: nn.Module) -> None:
    """Compute attention with sinks, soft caps or dropout of probabilities in tiles, on whole sequences, so that not all probabilities are
    in memory."""
    geometry: Any = module.geometry
    plain = geometry.attend_whole

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, rule: AttentionRule
    ) -> torch.Tensor:
        if rule.fused and sinks is None:
            return plain(q, k, v, None, rule)
        return tiled_attention(q, k, v, pattern_of(geometry, rule, q.shape[2]), rule.dropped, sinks)

    geometry.attend_whole = geometry.attend = attend
