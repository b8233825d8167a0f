"""Attention of one query per head to a KV cache, on a GPU: each program reads a run of positions for up to 16 heads that share it.

One query has too little work for one program per head: the positions are cut into `splits` runs, so that all multiprocessors read, and the
results of the runs are added up afterwards (flash decoding, Dao et al. 2023):

    m_j, l_j, o_j    largest score, Σ exp(s − m_j), Σ exp(s − m_j) v of run j
    o = Σ_j exp(m_j − m) o_j / Σ_j exp(m_j − m) l_j,    m = max_j m_j

The number of positions is read from the device, so that a CUDA graph is right at every position. Rows behind it are not read. Widths of keys that
are no power of two (576 of latent attention) are read as two blocks, 512 + 64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # of a program: the least rows of a product on tensor cores
PROGRAMS = 528  # that fill the device: four for each multiprocessor of a Hopper


@triton.jit
def _runs(  # type: ignore[no-untyped-def]
    q, k, v, at, out, stats, scale, group, rows, kv_heads, splits, width, values,
    stride_kb, stride_kh, stride_kr, stride_vb, stride_vh, stride_vr,
    heads: tl.constexpr, main: tl.constexpr, other: tl.constexpr, wide: tl.constexpr, block: tl.constexpr, two: tl.constexpr,
):  # fmt: skip
    kv, run, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    batch, kv_head = kv // kv_heads, kv % kv_heads
    filled = tl.minimum(tl.load(at) + 1, rows).to(tl.int32)
    length = tl.cdiv(tl.cdiv(filled, splits), block) * block
    first, last = run * length, tl.minimum((run + 1) * length, filled)

    in_group = part * heads + tl.arange(0, heads)
    head = kv * group + in_group  # of all sequences
    used = in_group < group
    column, beside, column_v = tl.arange(0, main), main + tl.arange(0, other), tl.arange(0, wide)
    q_main = tl.load(q + head[:, None] * width + column[None, :], mask=used[:, None], other=0.0)
    in_rest = beside < width
    q_rest = tl.load(q + head[:, None] * width + beside[None, :], mask=used[:, None] & in_rest[None, :], other=0.0)
    k += batch * stride_kb + kv_head * stride_kh
    v += batch * stride_vb + kv_head * stride_vh
    in_v = column_v < values

    highest = tl.full([heads], -1e30, tl.float32)
    total = tl.zeros([heads], tl.float32)
    mixed = tl.zeros([heads, wide], tl.float32)
    for start in range(first, last, block):
        row = start + tl.arange(0, block)
        inside = row < last
        place = row.to(tl.int64)
        keys = tl.load(k + place[None, :] * stride_kr + column[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(q_main, keys)
        if two:
            shown = inside[None, :] & in_rest[:, None]
            scores += tl.dot(q_rest, tl.load(k + place[None, :] * stride_kr + beside[:, None], mask=shown, other=0.0))
        scores = tl.where(inside[None, :], scores * scale, -1e30)
        new = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.where(inside[None, :], tl.exp(scores - new[:, None]), 0.0)
        shrink = tl.exp(highest - new)
        total = total * shrink + tl.sum(weights, 1)
        shown_v = inside[:, None] & in_v[None, :]
        of_rows = tl.load(v + place[:, None] * stride_vr + column_v[None, :], mask=shown_v, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(of_rows.dtype), of_rows)
        highest = new
    place_out = head * splits + run
    tl.store(out + place_out[:, None] * values + column_v[None, :], mixed, mask=used[:, None] & in_v[None, :])
    tl.store(stats + place_out * 2, highest, mask=used)
    tl.store(stats + place_out * 2 + 1, total, mask=used)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    parts, stats, out, splits, values, runs: tl.constexpr, wide: tl.constexpr
):
    head, run, column = tl.program_id(0).to(tl.int64), tl.arange(0, runs), tl.arange(0, wide)
    there, in_v = run < splits, column < values
    highest = tl.load(stats + (head * splits + run) * 2, mask=there, other=-1e30)
    total = tl.load(stats + (head * splits + run) * 2 + 1, mask=there, other=0.0)
    share = tl.where(there, tl.exp(highest - tl.max(highest, 0)), 0.0)
    places = (head * splits + run)[:, None] * values + column[None, :]
    mixed = tl.load(parts + places, mask=there[:, None] & in_v[None, :], other=0.0)
    value = tl.sum(mixed * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + head * values + column, value.to(out.dtype.element_ty), mask=in_v)


def attend(q: Tensor, keys: Tensor, values: Tensor, at: Tensor, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v over rows 0 to `at` of the buffers [B, K, rows, D], for queries [B, N, 1, D]."""
    batch, query_heads, _, width = q.shape
    kv_heads, rows, values_width = keys.shape[1], keys.shape[2], values.shape[-1]
    group = query_heads // kv_heads
    parts = triton.cdiv(group, HEADS)
    block = (64 if width <= 256 else 32) * 2 // q.element_size()  # blocks of all stages fit the shared memory
    splits = max(1, min(triton.cdiv(PROGRAMS, batch * kv_heads * parts), triton.cdiv(rows, block), 64))
    main = 1 << (width.bit_length() - 1)
    other = max(16, triton.next_power_of_2(width - main)) if width > main else 16
    wide = triton.next_power_of_2(values_width)
    mixed = q.new_empty(batch * query_heads, splits, values_width, dtype=torch.float32)
    stats = q.new_empty(batch * query_heads, splits, 2, dtype=torch.float32)
    out = q.new_empty(batch, query_heads, 1, values_width)
    _runs[batch * kv_heads, splits, parts](
        q, keys, values, at, mixed, stats, scale, group, rows, kv_heads, splits, width, values_width,
        *keys.stride()[:3], *values.stride()[:3], HEADS, main, other, wide, block, width > main,
        num_stages=3 if width <= 256 else 2,
    )  # fmt: skip
    _sum[(batch * query_heads,)](mixed, stats, out, splits, values_width, triton.next_power_of_2(splits), wide)
    return out
