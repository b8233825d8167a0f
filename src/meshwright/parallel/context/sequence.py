"""Context parallelism: the sequence divided over P ranks, for sequences that do not fit on one device.

Everything but attention treats each token by itself, so a rank with s/P tokens runs it unchanged. Attention needs
every earlier key and value, and there are three ways to get them:

    ring        K and V are passed on, P−1 hops; a rank never holds more than two blocks of them  4·(s/P)·kv·bytes
    all-gather  K and V of the whole sequence at once, freed after each layer                     2·s·kv·bytes
    ulysses     all-to-all: whole sequences of N/P heads, then back                               P at most the heads

None computes s×s scores at once: blocks run in tiles or on a flash kernel. Per layer a rank keeps q, k, v and the output
of its own tokens: at 131,072 tokens, P = 8, hidden 4096 with 1024 of K and V in 16 bits that is 320 MiB a layer, and the
ring's two buffers are 128 MiB in all.

**The free-overlap regime.** A ring step computes 4·N·D·c·(s/P)² FLOPs (c = ½ if causal) and passes 2·(s/P)·K·D values
on. Compute grows with the square of the block, the transfer with the block: beyond

    s/P  ≥  K·bytes·F / (2·N·c·B)         F FLOP/s, B bytes/s, N heads, K of them with keys

communication is free, at any number of ranks. With 400 TFLOP/s, 50 GB/s, N = 32, K = 8, causal and 16 bits: 4,000
tokens a rank.

**Why zigzag.** Cut a causal sequence into P runs and the first rank sees one block, the last P of them; all wait for
the last. Cut it into 2P and give rank r runs r and 2P−1−r, one early and one late:

    P = 4     rank 0: 0 7     rank 1: 1 6     rank 2: 2 5     rank 3: 3 4

For its own block a rank computes the triangle, for an earlier rank's block all its queries against the early half, for a
later rank's block its late queries against both halves: half a block at every step on every rank. Ulysses has whole
sequences and needs no zigzag.

Positions are those of the whole sequence: rotary and learned positions use the rank's `position_ids`. Ranks of a
context-parallel group hold the same weights and different tokens: gradients are summed over dp·cp, also where dp is 1,
and ZeRO shards over shard·cp.

On your own model: give each rank `part_of(x, group, dim)` of the inputs, and call `ring_attention` or `gather_attention`
in place of attention; for `ulysses_attention` take `part_of(x, group, dim, zigzag=False)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models.dropout import Dropped
from meshwright.models.transformer import Geometry
from meshwright.parallel.context.blocks import AttentionPattern, Runs, position_ids
from meshwright.parallel.context.ring import Context, attend_over_gathered, attend_over_ring, tiled_attention
from meshwright.parallel.context.ulysses import attend_by_heads


def runs_of(seq: int, ranks: int, zigzag: bool) -> tuple[Runs, ...]:
    """The runs of positions of every rank: one each, or with zigzag an early and a late one."""
    pieces = 2 * ranks if zigzag else ranks
    if seq % pieces:
        raise MeshwrightError(
            "MW-CP-001",
            f"a sequence of {seq} does not split into {pieces} runs",
            why=f"Each of {ranks} ranks has {'two: one early, one late' if zigzag else 'one'}",
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
    """softmax(q kᵀ / √D) v over the sequence of all ranks, for this rank's queries. The ranks hold equal shares, as
    `part_of` returns them; with a `window` a token sees those fewer than that many positions away."""
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
            why="Blocks are of one sequence, and a head of keys serves a whole number of heads of queries",
        )
    return Context(group, runs_of(q.shape[2] * group.size(), group.size(), zigzag), AttentionPattern(causal, window))


def is_zigzag(model: Model, kind: str, seq: int, ranks: int) -> bool:
    """Whether ranks hold an early and a late run: causal attention by blocks, where that balances the work. All-gather
    attention to a sequence that does not divide by 2·ranks runs unbalanced."""
    return model.causal and (kind == "ring" or (kind == "all-gather" and seq % (2 * ranks) == 0))


def shard_sequence(module: nn.Module, model: Model, group: ProcessGroup, kind: str, seq: int) -> torch.Tensor:
    """Make attention of one stage run over a divided sequence. Returns the positions of this rank's tokens."""
    runs = runs_of(seq, group.size(), is_zigzag(model, kind, seq, group.size()))
    geometry = module.geometry
    assert isinstance(geometry, Geometry)
    geometry.position_ids = position_ids(runs[group.rank()])
    transport = attend_over_gathered if kind == "all-gather" else attend_over_ring

    def by_blocks(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, full: bool, dropped: Dropped | None
    ) -> torch.Tensor:
        return transport(q, k, v, Context(group, runs, pattern_of(geometry, full, seq), dropped))

    def by_heads(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, full: bool, dropped: Dropped | None
    ) -> torch.Tensor:
        own_heads = dropped and dropped.part(group.rank(), group.size())
        return attend_by_heads(q, k, v, group, lambda q, k, v: geometry.attend_whole(q, k, v, full, own_heads))

    geometry.attend = by_heads if kind == "ulysses" else by_blocks
    return geometry.position_ids


def pattern_of(geometry: Geometry, full: bool, seq: int) -> AttentionPattern:
    return AttentionPattern(geometry.causal, 0 if full or geometry.window >= seq else geometry.window)


def use_tiled_attention(module: nn.Module) -> None:
    """Compute attention with dropout of probabilities in tiles, on whole sequences: never all probabilities in memory."""
    geometry: Any = module.geometry
    plain = geometry.attend_whole

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, full: bool, dropped: Dropped | None) -> torch.Tensor:
        if dropped is None:
            return plain(q, k, v, full, None)
        return tiled_attention(q, k, v, pattern_of(geometry, full, q.shape[2]), dropped)

    geometry.attend_whole = geometry.attend = attend
