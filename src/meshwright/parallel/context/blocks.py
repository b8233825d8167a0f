"""Attention of queries to one block of keys, computed so that the results of all blocks can be merged exactly.

Softmax over keys that arrive block by block needs one pass: each block gives its output and the logarithm of its sum of
exponentials (lse, ℓ). Two blocks merge exactly and without overflow (Milakov & Gimelshein 2018):

    ℓ_j = log Σ_k exp(s_k)      o_j = Σ_k exp(s_k − ℓ_j) v_k            over the keys k of block j,  s = scale · q kᵀ
    ℓ = log(e^ℓ₁ + e^ℓ₂)        o = e^(ℓ₁−ℓ) o₁ + e^(ℓ₂−ℓ) o₂

Backward needs only q, k, v, o and ℓ: the probabilities of a block are exp(s − ℓ) with the **final** ℓ. So blocks are
independent, and their gradients are added:

    δ = Σ_d o ∘ do      ds = scale · p ∘ (do vᵀ − δ)      dq = ds k      dk = dsᵀ q      dv = pᵀ do

With dropout of probabilities (`dropped`), each p that multiplies a v or a do is also multiplied by m, 0 or 1/(1 − r):

    o = Σ p m v         dv = (p ∘ m)ᵀ do        ds = scale · p ∘ (m ∘ do vᵀ − δ)

ℓ and δ do not change, since Σ_k p m do·v = do·o.

Soft-capped scores are s = c·tanh(scale · q kᵀ / c): ds is also multiplied by 1 − (s/c)².

A sink z, a score without a value, is a first block with ℓ = z and o = 0. Its gradient is that of any score, with v = 0:
dz = −exp(z − ℓ) δ, summed over the queries of its head.

The tokens of a rank are a few runs of consecutive positions. For each pair of runs the queries see all keys, no keys, or,
if both are the same run, the lower triangle: `rectangles` lists the parts to compute. A rectangle runs on a fused kernel
if one supports it (`kernels`: CUDA, 16-bit, no window, no dropout, no soft cap), else in tiles of rows, so that at most `TILE`
scores are in memory at once. Sums are in float32 or wider.

With document masks a rectangle without a pair of tokens of the same document is skipped, one inside a single document runs as
before, and all others run in tiles with a mask: the kernels have no argument for it.

Legend: B batch, N heads, K KV heads, G = N/K, S sequence, R rows of a tile, D head dim.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.models.attention import same_document
from meshwright.models.dropout import Dropped
from meshwright.models.parts import at_least_single
from meshwright.parallel.context.kernels import Kernel, kernel_for

Runs = tuple[range, ...]  # positions of a rank's tokens in the whole sequence, ascending
TILE = 1 << 24  # scores in memory at once: 64 MiB in float32


class Rectangle(NamedTuple):
    """A part of the local score matrix, and which of its scores are visible: all, the lower triangle, or those in `_mask`."""

    queries: slice
    keys: slice
    visible: str  # all | triangle | mask


class AttentionPattern(NamedTuple):
    """The keys that a query sees: with `causal` only earlier keys; with `window` > 0 only keys less than `window` positions away, or with
    `chunked` those of its chunk of `window` positions; with `documents_BS`, the document of each token of the whole sequence, only keys of
    its document. `scale` is the factor of the scores (None: 1/√D), `softcap` their soft cap (0: none)."""

    causal: bool
    window: int = 0
    documents_BS: Tensor | None = None
    scale: float | None = None
    chunked: bool = False
    softcap: float = 0.0

    def scale_of(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


class Tile(NamedTuple):
    """Rows of a rectangle, the columns that they can see, and the mask of these scores (None: all are visible)."""

    rows: slice
    columns: slice
    mask: Tensor | None


def rectangles(queries: Runs, keys: Runs, pattern: AttentionPattern) -> list[Rectangle]:
    """The parts of the score matrix that are not fully masked."""
    whole = slice(0, sum(map(len, queries))), slice(0, sum(map(len, keys)))
    if not pattern.window and (not pattern.causal or queries == keys):
        return [Rectangle(*whole, "triangle" if pattern.causal else "all")]
    pairs = []
    for rows, q in _with_slices(queries):
        for columns, k in _with_slices(keys):
            visible = _relation(q, k, pattern)
            if visible:
                pairs.append(Rectangle(rows, columns, visible))
    return _merged(_merged(pairs, 0), 1)


def _with_slices(runs: Runs) -> Iterator[tuple[slice, range]]:
    at = 0
    for run in runs:
        yield slice(at, at + len(run)), run
        at += len(run)


def _relation(q: range, k: range, pattern: AttentionPattern) -> str:
    nearest, farthest = q.start - (k.stop - 1), q.stop - 1 - k.start  # smallest and largest (query − key)
    if pattern.causal and farthest < 0:
        return ""
    if pattern.window and pattern.chunked:
        (first_q, last_q), (first_k, last_k) = (
            (run.start // pattern.window, run[-1] // pattern.window) for run in (q, k)
        )
        if last_q < first_k or last_k < first_q:
            return ""
        near = first_q == last_q == first_k == last_k
    else:
        if pattern.window and (nearest >= pattern.window or -farthest >= pattern.window):
            return ""
        near = not pattern.window or max(abs(nearest), abs(farthest)) < pattern.window
    if near and (not pattern.causal or nearest >= 0):
        return "all"
    return "triangle" if near and q == k else "mask"


def _merged(pairs: list[Rectangle], dim: int) -> list[Rectangle]:
    """Merge adjacent fully visible rectangles along one dimension."""
    out: list[Rectangle] = []
    for pair in sorted(pairs, key=lambda r: (r[:2][1 - dim].start, r[:2][dim].start)):
        sides = list(pair[:2])
        if out and out[-1].visible == pair.visible == "all":
            last = out[-1][:2]
            if last[1 - dim] == sides[1 - dim] and last[dim].stop == sides[dim].start:
                sides[dim] = slice(last[dim].start, sides[dim].stop)
                out.pop()
        out.append(Rectangle(sides[0], sides[1], pair.visible))
    return out


class _OwnQueries:
    """This rank's queries, and the parts of a block of keys that they see: shared by forward and backward."""

    def __init__(self, q_BNSD: Tensor, queries: Runs, pattern: AttentionPattern, dropped: Dropped | None) -> None:
        self.q, self.queries, self.pattern, self.dropped = q_BNSD, queries, pattern, dropped
        self.scale = pattern.scale_of(q_BNSD)

    def parts(
        self, k_BKSD: Tensor, v_BKSD: Tensor, keys: Runs
    ) -> Iterator[tuple[Rectangle, tuple[Tensor, Tensor, Tensor], Kernel | None]]:
        """Yield the visible rectangles, with their queries, keys and values, and the fused kernel if one supports them."""
        for r in rectangles(self.queries, keys, self.pattern):
            shared = shared_documents(r, self.queries, keys, self.pattern)
            if shared == "none":
                continue
            part = self.q[:, :, r.queries], k_BKSD[:, :, r.keys], v_BKSD[:, :, r.keys]
            fused = r.visible != "mask" and self.dropped is None and shared == "all" and not self.pattern.softcap
            yield r, part, kernel_for(*part, r.visible == "triangle") if fused else None

    def kept(self, r: Rectangle, keys: Runs, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor | None:
        """The dropout factors of a tile's probabilities; None without dropout."""
        if self.dropped is None:
            return None
        row_ids, column_ids = position_ids(self.queries)[r.queries][rows], position_ids(keys)[r.keys][columns]
        return self.dropped.factor(row_ids, column_ids, dtype)


class BlockAttention(_OwnQueries):
    """Output and log-sum-exp of this rank's queries over the blocks of keys seen so far."""

    def __init__(
        self,
        q_BNSD: Tensor,
        queries: Runs,
        pattern: AttentionPattern,
        dropped: Dropped | None = None,
        sinks_BNS: Tensor | None = None,
    ) -> None:
        super().__init__(q_BNSD, queries, pattern, dropped)
        self.output_BNSD: Tensor | None = None
        self.lse_BNS = q_BNSD.new_full(q_BNSD.shape[:-1], -torch.inf, dtype=at_least_single(q_BNSD.dtype))
        if sinks_BNS is not None:
            self.lse_BNS.copy_(sinks_BNS)

    def attend_block(self, k_BKSD: Tensor, v_BKSD: Tensor, keys: Runs) -> None:
        if self.output_BNSD is None:
            shape = (*self.q.shape[:-1], v_BKSD.shape[-1])
            self.output_BNSD = self.q.new_zeros(shape, dtype=self.lse_BNS.dtype)
        for r, (q, k, v), kernel in self.parts(k_BKSD, v_BKSD, keys):
            if kernel is not None:
                self._merge(r.queries, *kernel.forward(q, k, v, r.visible == "triangle", self.scale))
                continue
            for rows, columns, mask in _tiles(q, r, self.queries, keys, self.pattern):
                part = slice(r.queries.start + rows.start, r.queries.start + rows.stop)
                kept = self.kept(r, keys, rows, columns, self.lse_BNS.dtype)
                tile = q[:, :, rows], k[:, :, columns], v[:, :, columns]
                self._merge(part, *_tile_forward(*tile, mask, kept, self.scale, self.pattern.softcap))

    def _merge(self, rows: slice, output: Tensor, lse: Tensor) -> None:
        assert self.output_BNSD is not None
        before, merged = self.lse_BNS[:, :, rows], self.output_BNSD[:, :, rows]
        after = torch.logaddexp(before, lse)
        finite = after.masked_fill(after == -torch.inf, 0.0)  # rows without a visible key until now: e^(−∞ − 0) = 0
        merged.mul_((before - finite).exp_().unsqueeze(-1)).add_(output * (lse - finite).exp_().unsqueeze(-1))
        before.copy_(after)


class BlockGradients(_OwnQueries):
    """Gradients of this rank's queries, and of the keys and values of blocks from any rank."""

    def __init__(
        self,
        grad_output: Tensor,
        q: Tensor,
        output: Tensor,
        lse: Tensor,
        queries: Runs,
        pattern: AttentionPattern,
        dropped: Dropped | None = None,
    ) -> None:
        super().__init__(q, queries, pattern, dropped)
        self.grad_output = grad_output if grad_output.stride(-1) == 1 else grad_output.contiguous()  # kernels read rows
        self.output, self.lse = output, lse
        self.dq = q.new_zeros(q.shape, dtype=at_least_single(q.dtype))
        self.delta_BNS = (grad_output.to(self.dq.dtype) * output.to(self.dq.dtype)).sum(-1)

    def of_sinks(self, sinks_BNS: Tensor | None) -> Tensor | None:
        """The gradient of the sink of each query; None without sinks."""
        if sinks_BNS is None:
            return None
        return -((sinks_BNS - self.lse).exp_() * self.delta_BNS).to(sinks_BNS.dtype)

    def attend_block(self, k: Tensor, v: Tensor, keys: Runs, dk: Tensor, dv: Tensor) -> None:
        """Run backward through one block: add to `dk` and `dv`, the gradients of its keys and values."""
        for r, (q, k_part, v_part), kernel in self.parts(k, v, keys):
            grad_output, output, lse, delta, dq = (
                x[:, :, r.queries] for x in (self.grad_output, self.output, self.lse, self.delta_BNS, self.dq)
            )
            sums = dq, dk[:, :, r.keys], dv[:, :, r.keys]
            if kernel is not None:
                triangle = r.visible == "triangle"
                add_to(sums, kernel.backward(grad_output, q, k_part, v_part, output, lse, triangle, self.scale))
                continue
            for rows, columns, mask in _tiles(q, r, self.queries, keys, self.pattern):
                kept = self.kept(r, keys, rows, columns, self.dq.dtype)
                grad_rows, q_rows, lse_rows, delta_rows = (x[:, :, rows] for x in (grad_output, q, lse, delta))
                k_tile, v_tile = (x[:, :, columns] for x in (k_part, v_part))
                given = grad_rows, q_rows, lse_rows, delta_rows, k_tile, v_tile, mask, kept
                found = _tile_backward(*given, self.scale, self.pattern.softcap)
                add_to((x[:, :, part] for x, part in zip(sums, (rows, columns, columns), strict=True)), found)


def add_to(sums: Iterable[Tensor], parts: Iterable[Tensor]) -> None:
    for total, part in zip(sums, parts, strict=True):
        total.add_(part)


def shared_documents(r: Rectangle, queries: Runs, keys: Runs, pattern: AttentionPattern) -> str:
    """Whether the queries and keys of a rectangle belong to the same document: all, some or none of their pairs. Documents are
    numbered in ascending order, so the first and the last token of each run of positions decide."""
    if pattern.documents_BS is None:
        return "all"
    rows, columns = (
        pattern.documents_BS[:, position_ids(runs)[part]] for runs, part in ((queries, r.queries), (keys, r.keys))
    )
    if not rows.numel() or not columns.numel():
        return "all"
    lowest, highest = torch.maximum(rows[:, 0], columns[:, 0]), torch.minimum(rows[:, -1], columns[:, -1])
    if (highest < lowest).all():
        return "none"
    first, last = torch.minimum(rows[:, 0], columns[:, 0]), torch.maximum(rows[:, -1], columns[:, -1])
    return "all" if torch.equal(first, last) else "some"


def _tiles(q: Tensor, r: Rectangle, queries: Runs, keys: Runs, pattern: AttentionPattern) -> Iterator[Tile]:
    """Yield the tiles of a rectangle, at most `TILE` scores each."""
    if shared_documents(r, queries, keys, pattern) == "all":
        yield from _position_tiles(q, r, queries, keys, pattern)
        return
    documents_BS = pattern.documents_BS
    assert documents_BS is not None
    query_ids, key_ids = position_ids(queries)[r.queries], position_ids(keys)[r.keys]
    for rows, columns, mask in _position_tiles(q, r, queries, keys, pattern):
        same = same_document(documents_BS, query_ids[rows], key_ids[columns])
        if same.any():
            # [B, 1, 1, R, C]: for all KV heads and all of their groups of queries
            yield Tile(rows, columns, (same.to(q.device) if mask is None else same.to(q.device) & mask).unsqueeze(2))


def _position_tiles(q: Tensor, r: Rectangle, queries: Runs, keys: Runs, pattern: AttentionPattern) -> Iterator[Tile]:
    """The tiles with what causality and the window make visible."""
    length, width = r.queries.stop - r.queries.start, r.keys.stop - r.keys.start
    step = max(1, TILE // max(1, q.shape[0] * q.shape[1] * width))
    if r.visible == "mask":
        row_ids, column_ids = position_ids(queries)[r.queries], position_ids(keys)[r.keys]
    else:
        row_ids, column_ids = torch.arange(length), torch.arange(width)
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        if r.visible == "all":
            yield Tile(rows, slice(0, width), None)
            continue
        applied = pattern if r.visible == "mask" else AttentionPattern(causal=True)
        columns = _reach(row_ids[rows], column_ids, applied)
        if columns.start < columns.stop:
            yield Tile(rows, columns, _mask(row_ids[rows], column_ids[columns], applied).to(q.device))


def _reach(rows: Tensor, columns: Tensor, pattern: AttentionPattern) -> slice:
    """The range of columns that at least one of the rows can see; rows and columns are ascending."""
    low, high, window = int(rows[0]), int(rows[-1]), pattern.window
    if pattern.chunked:
        first, end = low // window * window, (high // window + 1) * window - 1
    else:
        first, end = low - window + 1 if window else 0, high + window - 1
    edges = torch.tensor([first, (high if pattern.causal else end) + 1])
    return slice(*torch.searchsorted(columns, edges).tolist())


def _mask(rows: Tensor, columns: Tensor, pattern: AttentionPattern) -> Tensor:
    distance = rows[:, None] - columns[None, :]
    if pattern.chunked:
        near = rows[:, None] // pattern.window == columns[None, :] // pattern.window
    else:
        near = distance.abs() < pattern.window if pattern.window else torch.ones_like(distance, dtype=torch.bool)
    return near & (distance >= 0) if pattern.causal else near


def position_ids(runs: Runs) -> Tensor:
    """The positions of all runs, one after the other."""
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


def _probabilities(q: Tensor, k: Tensor, lse: Tensor | None, mask: Tensor | None, scale: float, softcap: float) -> Any:
    """exp(s − ℓ) [B, K, G·R, S], ℓ [B, K, G·R], and the slope of the soft cap (None without one). Without a given ℓ, that of this
    block is computed."""
    groups = q.shape[1] // k.shape[1]
    scores = q.unflatten(1, (-1, groups)).flatten(2, 3).mul(scale) @ k.transpose(-1, -2)
    slope = None
    if softcap:
        scores.div_(softcap).tanh_()
        slope = 1 - scores.square() if lse is not None else None
        scores.mul_(softcap)
    if mask is not None:
        scores.unflatten(2, (groups, -1)).masked_fill_(~mask, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse.unflatten(1, (-1, groups)).flatten(2, 3)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return scores.sub_(finite.unsqueeze(-1)).exp_(), lse, slope


def _tile_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor | None, scale: float, softcap: float
) -> Any:
    q, k, v = (x.to(at_least_single(x.dtype)) for x in (q, k, v))
    probability, lse, _ = _probabilities(q, k, None, mask, scale, softcap)
    if kept is not None:
        probability *= kept.view(probability.shape)
    output = probability @ v
    return tuple(x.reshape(*q.shape[:3], *x.shape[3:]) for x in (output, lse))


def _tile_backward(
    grad_output: Tensor,
    q: Tensor,
    lse: Tensor,
    delta: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_output, q, k, v = (x.to(at_least_single(x.dtype)) for x in (grad_output, q, k, v))
    probability, _, slope = _probabilities(q, k, lse, mask, scale, softcap)
    groups = q.shape[1] // k.shape[1]
    grouped_q, grouped_grad, grouped_delta = (
        x.unflatten(1, (-1, groups)).flatten(2, 3) for x in (q, grad_output, delta)
    )
    ds = grouped_grad @ v.transpose(-1, -2)
    dropped_probability = probability
    if kept is not None:
        dropped_probability = probability * kept.view(probability.shape)
        ds *= kept.view(probability.shape)
    dv = dropped_probability.transpose(-1, -2) @ grouped_grad
    ds.sub_(grouped_delta.unsqueeze(-1)).mul_(probability).mul_(scale)
    if slope is not None:
        ds.mul_(slope)
    return (ds @ k).reshape(q.shape), ds.transpose(-1, -2) @ grouped_q, dv
