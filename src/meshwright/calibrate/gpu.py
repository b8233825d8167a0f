"""The efficiencies of a GPU, from the device part of a bench: the constants of `cost.compute`, each from the operations that it governs.

    copies      t = t₀ + bytes / (memory · bandwidth)                          → the share of the memory bandwidth
    products    t = t₀ + max(a, m) + c · min(a, m), a = flops / (gemm · peak)  → the share of the peak rate
    attention   t = t₀ + flops / (flash · s/(s + 700) · peak)                  → the share of the peak rate; `fused` for the vendor's kernel
    host-copy   t = bytes / bandwidth                                          → the bandwidth to the host, with pinned memory

Each share is the one with which `cost.compute` gives the measured time. t₀ and c are the catalog's: back to back, small kernels wait
for the host to launch them, so their times do not show t₀. For the same reason only shapes with at least a tenth of the largest work
count. The median over these shapes is taken, so one shape for which the library has no good kernel does not move it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.calibrate.points import DevicePoint
from meshwright.cost.compute import device_time
from meshwright.describe.cluster import DTYPE_BYTES, Accelerator
from meshwright.lower.op import Op
from meshwright.units import format_rate

BIG = 0.1  # share of the largest work
LEAST, MOST = 0.01, 1.0  # a share outside this range is an error of the measurement
BISECTIONS = 30
# kind of operation → the share that governs it
SHARES = (
    ("copy", "memory"),
    ("gemm", "gemm"),
    ("fp8-gemm", "gemm_fp8"),
    ("grouped-gemm", "grouped"),
    ("attention", "flash"),
    ("fused-attention", "fused"),
)

WHOLE = {"copy": "the memory bandwidth", "grouped-gemm": "the rate of one product"}


def gpu_accelerator(points: Sequence[DevicePoint], base: Accelerator, source: str) -> tuple[Accelerator, list[str]]:
    """The catalog's device with measured shares, and a note for each."""
    device, notes = base, []
    for kind, name in SHARES:
        shares = [share_of(point, device, name) for point in largest(points, kind)]
        if not shares:
            notes.append(f"{kind}: not measured, {base.name} of the catalog")
            continue
        found = round(float(np.median(shares)), 4)
        device = device.but(efficiency=device.efficiency.but(**{name: found}, source=source))
        spread = (
            f", the median of {len(shares)} shapes from {min(shares):.0%} to {max(shares):.0%}"
            if len(shares) > 1
            else ""
        )
        notes.append(f"{kind}: {found:.0%} of {WHOLE.get(kind, 'the peak rate')}{spread}")
    rates = [point.rate for point in largest(points, "host-copy")]
    if rates:
        device = device.but(host_bandwidth=round(float(np.median(rates))))
        notes.append(f"copies to the host: {format_rate(device.host_bandwidth)}")
    return device, notes


def largest(points: Sequence[DevicePoint], kind: str) -> list[DevicePoint]:
    """Points of a kind, measured while nothing else ran, whose work is at least a tenth of the largest."""
    found = [point for point in points if point.kind == kind and not point.condition]
    return [point for point in found if point.work >= BIG * max(p.work for p in found)]


def operation(point: DevicePoint) -> Op:
    """The operation that the cost model prices, as the bench ran it: attention causal, forward and backward."""
    shape, flops = point.shape, np.array([point.work])
    if point.kind == "copy":
        return Op("copy", "other", "memory", bytes=flops)
    if point.kind in ("gemm", "fp8-gemm", "grouped-gemm"):
        m, n, k = (np.array([shape[name]]) for name in ("m", "n", "k"))
        experts = np.array([shape.get("experts", 1.0)])
        traffic = experts * (DTYPE_BYTES[point.dtype] * (m * k + n * k) + 2.0 * m * n)
        part = "experts" if point.kind == "grouped-gemm" else "ffn"
        return Op("gemm", part, "gemm", flops=flops, bytes=traffic, shape=(experts, m, n, k))
    rows = np.array([shape["batch"] * shape["heads"]])
    seq, width = np.array([shape["seq"]]), np.array([shape["width"]])
    return Op("core", "attention", "attention", flops=flops, shape=(rows, seq, seq, width))


def share_of(point: DevicePoint, device: Accelerator, name: str) -> float:
    """The share with which the cost model gives the measured time. Times fall as the share grows, so it is found by bisection."""
    op, low, high = operation(point), LEAST, MOST
    kernel = "fused" if name == "fused" else "flash"
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        priced = device.but(efficiency=device.efficiency.but(**{name: middle}))
        slower = float(np.max(device_time(priced, point.dtype, kernel, op))) > point.median_s
        low, high = (middle, high) if slower else (low, middle)
    return (low + high) / 2
