"""The efficiencies of a GPU, from the device part of a bench: the constants of `cost.compute`, each from the operations that it governs.

    copies      t = t₀ + bytes / (memory · bandwidth)                       → t₀ and the share of the memory bandwidth
    products    t = t₀ + max(a, m) + c · min(a, m), a = flops / (gemm · peak)  → the share of the peak rate, c as in the catalog
    attention   t = t₀ + flops / (flash · s/(s + 700) · peak)                → the share of the peak rate

Each share is the median over the measured shapes, so one shape for which the library has no good kernel does not move it. The spread of the shapes
around it is reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.calibrate.fit import fit_line
from meshwright.calibrate.points import DevicePoint
from meshwright.cost.compute import SEQUENCE_HALF
from meshwright.describe.cluster import DTYPE_BYTES, Accelerator

LEAST, MOST = 0.01, 1.0  # shares outside this range are errors of the measurement


def gpu_accelerator(points: Sequence[DevicePoint], base: Accelerator, source: str) -> tuple[Accelerator, list[str]]:
    """The catalog's device with measured shares, and a note for each."""
    idle = [point for point in points if not point.condition]
    found: dict[str, float] = {}
    notes = []
    copies = [point for point in idle if point.kind == "copy"]
    if len({point.work for point in copies}) >= 2:
        line = fit_line([point.work for point in copies], [point.median_s for point in copies])
        found["memory"] = share(line.bandwidth / base.memory_bandwidth)
        found["floor"] = line.alpha
        notes.append(
            f"memory: {found['memory']:.0%} of {base.memory_bandwidth / 1e12:.2f} TB/s from {len(copies)} copies"
        )
    device = base.but(efficiency=base.efficiency.but(**found))
    for kind, name, shares_of in (("gemm", "gemm", product_share), ("attention", "flash", attention_share)):
        shares = [shares_of(point, device) for point in idle if point.kind == kind]
        if shares:
            found[name] = share(float(np.median(shares)))
            low, high = min(shares), max(shares)
            notes.append(
                f"{kind}: {found[name]:.0%} of peak, the median of {len(shares)} shapes from {low:.0%} to {high:.0%}"
            )
    if not found:
        return base, [f"the device was not measured: {base.name} of the catalog"]
    return base.but(efficiency=base.efficiency.but(**found, source=source)), notes


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
