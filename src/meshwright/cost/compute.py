"""The time of one operation on one device, from its *local* shape.

A matrix product never reaches the peak rate, and small products are far below it. Splitting a layer over more ranks makes every
product smaller and so less efficient. Measured products follow

    t = t₀ + max(a, m) + c · min(a, m)        a = flops / (e · peak),  m = bytes / (share · bandwidth)

with e the share of peak that large products sustain (power limits it on recent devices), c the part of the smaller term that is not
hidden behind the larger, and t₀ the start-up time of a kernel. On 375 H100 shapes from 256³ to 4096³ the median error is 5%. Thin products
(the scores of attention, k = 64) are memory-bound. A dimension below the tile size (128) costs as much as a full tile.

Attention sustains a smaller share and needs long sequences: e · s / (s + 700). The scan of a linear mixer: `scan_time`. All other
operations (norms, activations, residuals, the optimizer) are memory-bound: t = t₀ + bytes / (share · bandwidth).

A power limit below the power of the board lowers the clock of products and attention (`Accelerator.clock`), not the bandwidth of memory.

These are rates of a device in benchmarks. A stack reaches `products` and `attention_rate` of the rates of products and attention, and its
memory-bound operations take `elementwise` times as long (`describe.stack`).

A CPU has no tiles and no ramp (`tile` = 1, `sequence_half` = 0), and its exponentials are not hidden: each element of a softmax or an
activation takes `exponential` longer. `calibrate.machine` measures these for the machine at hand.
"""

import numpy as np

from meshwright.describe.accelerator import Accelerator
from meshwright.describe.stack import Stack
from meshwright.lower.program import Array, Op


def gemm_time(device: Accelerator, dtype: str, op: Op) -> Array:
    """Seconds of a matrix product (formula above)."""
    eff = device.efficiency
    peak = device.peak_for(dtype)
    flops: Array = op.flops
    if op.shape:
        products, m, n, k = op.shape
        flops = 2.0 * products * np.maximum(m, eff.tile) * np.maximum(n, eff.tile) * k
    rate = eff.products(dtype) * peak * device.clock
    if eff.grouped != 1 and op.part == "experts":
        rate = rate * eff.grouped
    arithmetic = flops / rate
    traffic = op.bytes / (eff.memory * device.memory_bandwidth)
    return eff.floor + np.maximum(arithmetic, traffic) + eff.gemm_traffic * np.minimum(arithmetic, traffic)


def attention_time(device: Accelerator, dtype: str, op: Op, kernel: str) -> Array:
    """Seconds of an attention kernel: e · s/(s + 700) of peak, less for head dimensions below 128."""
    eff = device.efficiency
    rows, s_q, s_kv, width = op.shape
    length = np.minimum(s_q, s_kv)
    reached = (
        eff.attention(kernel) * length / (length + eff.sequence_half) * np.minimum(1.0, (width / eff.tile) ** 0.25)
    )
    seconds = (
        eff.floor + op.flops / (reached * device.clock * device.peak_for(dtype)) + op.bytes / device.memory_bandwidth
    )
    return seconds + rows * s_q * s_kv * eff.exponential if eff.exponential else seconds


def scan_time(device: Accelerator, dtype: str, op: Op) -> Array:
    """Seconds of the chunked scan of a linear mixer. Its kernels alternate between small products and passes over states, so that neither hides
    the other. Their tiles are those of one chunk, so they reach a share (`Efficiency.scan`) of the rates of attention with heads of that width and
    of copies."""
    eff = device.efficiency
    width = op.shape[2]
    reached = eff.flash * min(1.0, width / eff.tile) ** 0.25
    traffic = op.bytes / (eff.memory * device.memory_bandwidth)
    return eff.floor * op.launches + (op.flops / (reached * device.peak_for(dtype)) + traffic) / eff.scan


def memory_time(device: Accelerator, op: Op) -> Array:
    """Seconds of a memory-bound operation; the start-up time t₀ counts for at most four of its kernels."""
    eff = device.efficiency
    seconds = eff.floor * np.minimum(op.launches, 4.0) + op.bytes / (eff.memory * device.memory_bandwidth)
    if eff.exponential:
        seconds = seconds + op.exponentials * eff.exponential
    return seconds * eff.elementwise.get(op.elementwise, 1.0) if eff.elementwise else seconds


def update_time(device: Accelerator, op: Op) -> Array:
    """Seconds of the optimizer's passes over its states."""
    return (
        memory_time(device, op) if device.efficiency.update == 1 else memory_time(device, op) / device.efficiency.update
    )


def host_copy_time(device: Accelerator, op: Op) -> Array:
    """Seconds of a copy between the device and its host."""
    return op.bytes / device.host_bandwidth


def op_time(device: Accelerator, precision: str, stack: Stack, op: Op) -> Array:
    """Seconds on the compute stream of one occurrence of an operation, at the rates that the stack reaches."""
    return pace(stack, op) * device_time(device, precision, stack.attention, op)


# Rate of kernels that quantise to fp8 over that of copies: 5.3 of 6.2 TB/s on a B300, from a layer with and without them in Transformer Engine's
# docs/examples/gemm_profiling (2.34 ms for 5 bytes of each of 2.48e9 elements, current scaling).
QUANTISE_RATE = 0.86


def pace(stack: Stack, op: Op) -> float:
    """Seconds of an operation over those at benchmarked rates. A quantising kernel is one pass in any stack."""
    if op.kind == "gemm":
        return 1 / stack.products
    if op.kind in ("attention", "scan"):
        return 1 / stack.attention_rate
    if op.elementwise == "quantise":
        return 1 / QUANTISE_RATE
    return 1.0 if op.kind == "host" else stack.elementwise


def device_time(device: Accelerator, precision: str, kernel: str, op: Op) -> Array:
    """Seconds of one occurrence of an operation at benchmarked rates."""
    dtype = op.dtype or precision
    if op.kind == "gemm":
        return gemm_time(device, dtype, op)
    if op.kind == "attention":
        return attention_time(device, dtype, op, kernel)
    if op.kind == "scan":
        return scan_time(device, dtype, op)
    return host_copy_time(device, op) if op.kind == "host" else memory_time(device, op)
