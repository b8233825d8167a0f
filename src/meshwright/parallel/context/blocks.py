"""Attention of some queries to some keys, such that several such blocks add up to attention to all of them.

Softmax over keys that arrive block by block needs no second look: each block gives its output and the logarithm of
its sum of exponentials, and two blocks merge exactly, however large their scores (Milakov & Gimelshein 2018):

    ℓ_j = log Σ_k exp(s_k)      o_j = Σ_k exp(s_k − ℓ_j) v_k            of block j's keys k,  s = q kᵀ / √D
    ℓ = log(e^ℓ₁ + e^ℓ₂)        o = e^(ℓ₁−ℓ) o₁ + e^(ℓ₂−ℓ) o₂

Backward needs q, k, v, o and ℓ only: the block's probabilities are exp(s − ℓ) with the **final** ℓ, so blocks are
independent and their gradients plain sums,

    δ = Σ_d o ∘ do      ds = p ∘ (do vᵀ − δ) / √D      dq = ds k      dk = dsᵀ q      dv = pᵀ do

Where probabilities are dropped (`dropped`), each p that meets a v or a do has its factor m, 0 or 1/(1 − r), beside it:

    o = Σ p m v         dv = (p ∘ m)ᵀ do        ds = p ∘ (m ∘ do vᵀ − δ) / √D

ℓ is of all keys as before, and so is δ: Σ_k p m do·v = do·o.

A rank's tokens are a few runs of the sequence (`ranges` of positions). Of each pair of runs the queries see all keys,
none, or, where the two are one run, the triangle: `rectangles` lists what is left to compute. A rectangle runs on a
kernel where there is one (`kernels`: CUDA, 16-bit, no window, nothing dropped); elsewhere in tiles of rows, so that at most `TILE`
scores exist at once. Sums are in float32 or wider.

Legend: B batch, N heads, K KV heads, G = N/K, S sequence, R rows of a tile, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from meshwright.models.dropout import Dropped
from meshwright.parallel.context.kernels import kernel_for

Runs = tuple[range, ...]  # positions of a rank's tokens in the whole sequence, in order
TILE = 1 << 24  # scores at once: 64 MiB in float32


class Rectangle(NamedTuple):
    """Local rows × local columns, and which of them are seen: all, or the triangle, or what `_mask` says."""

    queries: slice
    keys: slice
    seen: str  # all | triangle | mask


class Sight(NamedTuple):
    """Who sees whom: earlier tokens only, and those fewer than `window` away (0: any)."""

    causal: bool
    window: int = 0


def rectangles(queries: Runs, keys: Runs, sight: Sight) -> list[Rectangle]:
    whole = slice(0, sum(map(len, queries))), slice(0, sum(map(len, keys)))
    if not sight.window and (not sight.causal or queries == keys):
        return [Rectangle(*whole, "triangle" if sight.causal else "all")]
    pairs = []
    for rows, q in _placed(queries):
        for columns, k in _placed(keys):
            seen = _relation(q, k, sight)
            if seen:
                pairs.append(Rectangle(rows, columns, seen))
    return _merged(_merged(pairs, 0), 1)


def _placed(runs: Runs) -> Iterator[tuple[slice, range]]:
    at = 0
    for run in runs:
        yield slice(at, at + len(run)), run
        at += len(run)


def _relation(q: range, k: range, sight: Sight) -> str:
    nearest, farthest = q.start - (k.stop - 1), q.stop - 1 - k.start  # least and most of (query − key)
    if sight.causal and farthest < 0:
        return ""
    if sight.window and (nearest >= sight.window or -farthest >= sight.window):
        return ""
    near = not sight.window or max(abs(nearest), abs(farthest)) < sight.window
    if near and (not sight.causal or nearest >= 0):
        return "all"
    return "triangle" if near and q == k else "mask"


def _merged(pairs: list[Rectangle], dim: int) -> list[Rectangle]:
    """Neighbours along one dimension that see all become one."""
    sides: list[list[slice]] = [[pair.queries, pair.keys] for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda i: (sides[i][1 - dim].start, sides[i][dim].start))
    out: list[Rectangle] = []
    for i in order:
        along, across = sides[i][dim], sides[i][1 - dim]
        if out and out[-1].seen == pairs[i].seen == "all":
            last = [out[-1].queries, out[-1].keys]
            if last[1 - dim] == across and last[dim].stop == along.start:
                last[dim] = slice(last[dim].start, along.stop)
                out[-1] = Rectangle(last[0], last[1], "all")
                continue
        out.append(pairs[i])
    return out


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Attended:
    """Output and log-sum-exp of this rank's queries over the keys met so far."""

    def __init__(self, q_BNSD: torch.Tensor, queries: Runs, sight: Sight, dropped: Dropped | None = None) -> None:
        self.q, self.queries, self.sight, self.dropped = q_BNSD, queries, sight, dropped
        self.output_BNSD: torch.Tensor | None = None
        self.total_BNS = q_BNSD.new_full(q_BNSD.shape[:-1], -torch.inf, dtype=wide(q_BNSD.dtype))

    def meet(self, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, keys: Runs) -> None:
        if self.output_BNSD is None:
            shape = (*self.q.shape[:-1], v_BKSD.shape[-1])
            self.output_BNSD = self.q.new_zeros(shape, dtype=self.total_BNS.dtype)
        for r in rectangles(self.queries, keys, self.sight):
            parts = self.q[:, :, r.queries], k_BKSD[:, :, r.keys], v_BKSD[:, :, r.keys]
            fused = r.seen != "mask" and self.dropped is None
            kernel = kernel_for(*parts, r.seen == "triangle") if fused else None
            if kernel is not None:
                self._merge(r.queries, *kernel.forward(*parts, r.seen == "triangle"))
                continue
            q, k, v = parts
            for rows, columns, mask in _tiles(q, r, self.queries, keys, self.sight):
                part = slice(r.queries.start + rows.start, r.queries.start + rows.stop)
                kept = _kept(self.dropped, r, self.queries, keys, rows, columns, self.total_BNS.dtype)
                self._merge(part, *_tile_forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask, kept))

    def _merge(self, rows: slice, output: torch.Tensor, total: torch.Tensor) -> None:
        assert self.output_BNSD is not None
        before, so_far = self.total_BNS[:, :, rows], self.output_BNSD[:, :, rows]
        after = torch.logaddexp(before, total)
        finite = after.masked_fill(after == -torch.inf, 0.0)  # rows that have seen no key yet: e^(−∞ − 0) = 0
        so_far.mul_((before - finite).exp_().unsqueeze(-1)).add_(output * (total - finite).exp_().unsqueeze(-1))
        before.copy_(after)


class Gradients:
    """Gradients of this rank's queries, and of any rank's keys and values that meet them."""

    def __init__(
        self,
        slope: torch.Tensor,
        q: torch.Tensor,
        output: torch.Tensor,
        total: torch.Tensor,
        queries: Runs,
        sight: Sight,
        dropped: Dropped | None = None,
    ) -> None:
        self.slope = slope if slope.stride(-1) == 1 else slope.contiguous()  # kernels read rows
        self.q, self.output, self.total = q, output, total
        self.queries, self.sight, self.dropped = queries, sight, dropped
        self.dq = q.new_zeros(q.shape, dtype=wide(q.dtype))
        self.delta_BNS = (slope.to(self.dq.dtype) * output.to(self.dq.dtype)).sum(-1)

    def meet(self, k: torch.Tensor, v: torch.Tensor, keys: Runs, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Adds to `dk` and `dv`, gradients of this block's keys and values."""
        for r in rectangles(self.queries, keys, self.sight):
            rows, columns = r.queries, r.keys
            q, slope, output, total, delta, dq = (
                x[:, :, rows] for x in (self.q, self.slope, self.output, self.total, self.delta_BNS, self.dq)
            )
            k_seen, v_seen, dk_seen, dv_seen = (x[:, :, columns] for x in (k, v, dk, dv))
            triangle = r.seen == "triangle"
            fused = r.seen != "mask" and self.dropped is None
            kernel = kernel_for(q, k_seen, v_seen, triangle) if fused else None
            if kernel is not None:
                own = kernel.backward(slope, q, k_seen, v_seen, output, total, triangle)
                for into, part in zip((dq, dk_seen, dv_seen), own, strict=True):
                    into.add_(part)
                continue
            for tile, reach, mask in _tiles(q, r, self.queries, keys, self.sight):
                kept = _kept(self.dropped, r, self.queries, keys, tile, reach, self.dq.dtype)
                own = _tile_backward(
                    slope[:, :, tile],
                    q[:, :, tile],
                    total[:, :, tile],
                    delta[:, :, tile],
                    k_seen[:, :, reach],
                    v_seen[:, :, reach],
                    mask,
                    kept,
                )
                for into, part in zip((dq[:, :, tile], dk_seen[:, :, reach], dv_seen[:, :, reach]), own, strict=True):
                    into.add_(part)


# Tiles


def _tiles(
    q: torch.Tensor, r: Rectangle, queries: Runs, keys: Runs, sight: Sight
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Rows of a rectangle, the columns they may reach and the mask of those, a bounded number of scores at a time."""
    length, width = r.queries.stop - r.queries.start, r.keys.stop - r.keys.start
    step = max(1, TILE // max(1, q.shape[0] * q.shape[1] * width))
    if r.seen == "mask":
        row_places, column_places = places(queries)[r.queries], places(keys)[r.keys]
    else:
        row_places, column_places = torch.arange(length), torch.arange(width)
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        if r.seen == "all":
            yield rows, slice(0, width), None
            continue
        seen = sight if r.seen == "mask" else Sight(causal=True)
        columns = _reach(row_places[rows], column_places, seen)
        if columns.start < columns.stop:
            yield rows, columns, _mask(row_places[rows], column_places[columns], seen).to(q.device)


def _reach(rows: torch.Tensor, columns: torch.Tensor, sight: Sight) -> slice:
    """Columns that any of the rows may see; both in order."""
    first = int(rows[0]) - sight.window + 1 if sight.window else 0
    last = int(rows[-1]) + (0 if sight.causal else sight.window - 1)
    start, stop = torch.searchsorted(columns, torch.tensor([first, last + 1])).tolist()
    return slice(start, stop)


def _mask(rows: torch.Tensor, columns: torch.Tensor, sight: Sight) -> torch.Tensor:
    ago = rows[:, None] - columns[None, :]
    near = ago.abs() < sight.window if sight.window else torch.ones_like(ago, dtype=torch.bool)
    return near & (ago >= 0) if sight.causal else near


def places(runs: Runs) -> torch.Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


def _kept(
    dropped: Dropped | None, r: Rectangle, queries: Runs, keys: Runs, rows: slice, columns: slice, dtype: torch.dtype
) -> torch.Tensor | None:
    """What the probabilities of a tile are multiplied by."""
    if dropped is None:
        return None
    return dropped.factor(places(queries)[r.queries][rows], places(keys)[r.keys][columns], dtype)


def _probabilities(q: torch.Tensor, k: torch.Tensor, total: torch.Tensor | None, mask: torch.Tensor | None) -> Any:
    """exp(s − ℓ) [B, K, G·R, S] and ℓ [B, K, G·R]; ℓ is this block's own where none is given."""
    groups = q.shape[1] // k.shape[1]
    scores = q.unflatten(1, (-1, groups)).flatten(2, 3).mul(q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores.unflatten(2, (groups, -1)).masked_fill_(~mask, -torch.inf)
    total = scores.logsumexp(-1) if total is None else total.unflatten(1, (-1, groups)).flatten(2, 3)
    finite = total.masked_fill(total == -torch.inf, 0.0)
    return scores.sub_(finite.unsqueeze(-1)).exp_(), total


def _tile_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, kept: torch.Tensor | None
) -> Any:
    q, k, v = (x.to(wide(x.dtype)) for x in (q, k, v))
    probability, total = _probabilities(q, k, None, mask)
    if kept is not None:
        probability *= kept.view(probability.shape)
    output = probability @ v
    return tuple(x.reshape(*q.shape[:3], *x.shape[3:]) for x in (output, total))


def _tile_backward(
    slope: torch.Tensor,
    q: torch.Tensor,
    total: torch.Tensor,
    delta: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slope, q, k, v = (x.to(wide(x.dtype)) for x in (slope, q, k, v))
    probability, _ = _probabilities(q, k, total, mask)
    groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    grouped_q, grouped_slope, grouped_delta = (x.unflatten(1, (-1, groups)).flatten(2, 3) for x in (q, slope, delta))
    ds = grouped_slope @ v.transpose(-1, -2)
    weighed = probability
    if kept is not None:
        weighed = probability * kept.view(probability.shape)
        ds *= kept.view(probability.shape)
    dv = weighed.transpose(-1, -2) @ grouped_slope
    ds.sub_(grouped_delta.unsqueeze(-1)).mul_(probability).mul_(scale)
    return (ds @ k).reshape(q.shape), ds.transpose(-1, -2) @ grouped_q, dv
