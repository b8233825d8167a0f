"""The efficiencies of a GPU, from the device part of a bench: the constants of `cost.compute`, each from the operations that it governs.

    copies      t = t₀ + bytes / (memory · bandwidth)                          → the share of the memory bandwidth
    products    t = t₀ + max(a, m) + c · min(a, m), a = flops / (gemm · peak)  → the share of the peak rate
    attention   t = t₀ + flops / (flash · s/(s + 700) · peak)                  → the share of the peak rate

t₀ and c are the catalog's: back to back, small kernels wait for the host to launch them, so their times do not show t₀. For the same reason only
shapes with at least a tenth of the largest work count. Each share is the median over these shapes, so one shape for which the library has no
good kernel does not move it. Their range is reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.calibrate.points import DevicePoint
from meshwright.cost.compute import SEQUENCE_HALF
from meshwright.describe.cluster import DTYPE_BYTES, Accelerator

BIG = 0.1  # share of the largest work
LEAST, MOST = 0.01, 1.0  # shares outside this range are errors of the measurement


def gpu_accelerator(points: Sequence[DevicePoint], base: Accelerator, source: str) -> tuple[Accelerator, list[str]]:
    """The catalog's device with measured shares, and a note for each."""
    device, notes = base, []
    for kind, name, shares_of in (
        ("copy", "memory", copy_share),
        ("gemm", "gemm", product_share),
        ("attention", "flash", attention_share),
    ):
        shares = [shares_of(point, device) for point in largest(points, kind)]
        if not shares:
            notes.append(f"{kind}: not measured, {base.name} of the catalog")
            continue
        found = share(float(np.median(shares)))
        device = device.but(efficiency=device.efficiency.but(**{name: found}, source=source))
        spread = (
            f", the median of {len(shares)} shapes from {min(shares):.0%} to {max(shares):.0%}"
            if len(shares) > 1
            else ""
        )
        notes.append(f"{kind}: {found:.0%} of the {'memory bandwidth' if kind == 'copy' else 'peak rate'}{spread}")
    return device, notes


def largest(points: Sequence[DevicePoint], kind: str) -> list[DevicePoint]:
    """Points of a kind, measured while nothing else ran, whose work is at least a tenth of the largest."""
    found = [point for point in points if point.kind == kind and not point.condition]
    return [point for point in found if point.work >= BIG * max(p.work for p in found)]


def copy_share(point: DevicePoint, device: Accelerator) -> float:
    """The share of the memory bandwidth with which the cost model gives the measured time of a copy."""
    return point.work / (max(point.median_s - device.efficiency.floor, 1e-9) * device.memory_bandwidth)


def product_share(point: DevicePoint, device: Accelerator) -> float:
    """The share of peak with which the cost model gives the measured time of a product."""
    m, n, k = (point.shape[name] for name in ("m", "n", "k"))
    eff = device.efficiency
    traffic = DTYPE_BYTES[point.dtype] * (m * k + n * k + m * n) / (eff.memory * device.memory_bandwidth)
    left = point.median_s - eff.floor - eff.gemm_traffic * traffic
    return point.work / (max(left, 1e-9) * device.peak_for(point.dtype))


def attention_share(point: DevicePoint, device: Accelerator) -> float:
    """The share of peak of a long sequence with which the cost model gives the measured time of attention, forward and backward."""
    seq, width = point.shape["seq"], point.shape["width"]
    left = max(point.median_s - 2 * device.efficiency.floor, 1e-9)
    reached = point.work / (left * device.peak_for(point.dtype))
    return reached * (seq + SEQUENCE_HALF) / seq / min(1.0, (width / 128.0) ** 0.25)


def share(value: float) -> float:
    return float(f"{min(max(value, LEAST), MOST):.4g}")
