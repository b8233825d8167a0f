"""How long arithmetic takes on one device, by the *local* shape of the operation.

A matrix product never reaches the peak, and small ones miss it by far: splitting a layer over more ranks makes every product
smaller and the device less busy. Measured products follow

    t = t₀ + max(a, m) + c · min(a, m)        a = flops / (e · peak),  m = bytes / (share · bandwidth)

with e the share of peak that large products sustain (power limits it on recent devices), c the part of the smaller term that is not
hidden behind the larger, and t₀ the ramp of any kernel. On 375 H100 shapes from 256³ to 4096³ this misses by a median 5%. Thin products
(the scores of attention, k = 64) are memory-bound. A dimension below a tile (128) still pays for the tile.

Attention sustains less than products and needs long sequences: e · s / (s + 700). Everything else (norms, activations,
residuals, the optimizer) is memory-bound: t = t₀ + bytes / (share · bandwidth).
"""

from __future__ import annotations

import numpy as np

from meshwright.describe.cluster import Accelerator
from meshwright.lower.op import Array, Op

TILE = 128.0
SEQUENCE_HALF = 700.0  # flash attention reaches half its rate at this many positions


def gemm_time(device: Accelerator, dtype: str, op: Op) -> Array:
    eff = device.efficiency
    peak = device.peak_for(dtype)
    flops: Array = op.flops
    if op.shape:
        products, m, n, k = op.shape
        flops = 2.0 * products * np.maximum(m, TILE) * np.maximum(n, TILE) * k
    arithmetic = flops / (eff.gemm * peak)
    traffic = op.bytes / (eff.memory * device.memory_bandwidth)
    return eff.floor + np.maximum(arithmetic, traffic) + eff.gemm_traffic * np.minimum(arithmetic, traffic)


def attention_time(device: Accelerator, dtype: str, op: Op, kernel: str) -> Array:
    eff = device.efficiency
    share = eff.fused if kernel == "fused" else eff.flash
    _, s_q, s_kv, width = op.shape
    seen = np.minimum(s_q, s_kv)
    reached = share * seen / (seen + SEQUENCE_HALF) * np.minimum(1.0, (width / 128.0) ** 0.25)
    return eff.floor + op.flops / (reached * device.peak_for(dtype)) + op.bytes / device.memory_bandwidth


def memory_time(device: Accelerator, op: Op) -> Array:
    eff = device.efficiency
    return eff.floor * np.minimum(op.launches, 4.0) + op.bytes / (eff.memory * device.memory_bandwidth)


def op_time(device: Accelerator, precision: str, kernel: str, op: Op) -> Array:
    """Seconds on the compute stream of one occurrence of an operation."""
    dtype = op.dtype or precision
    if op.kind == "gemm":
        return gemm_time(device, dtype, op)
    if op.kind == "attention":
        return attention_time(device, dtype, op, kernel)
    return memory_time(device, op)
