"""The communication roofline: is a step bound by arithmetic or by the network?

    CCR   = FLOPs per device and step / bytes a device sends per step
    CCR*  = peak FLOP/s / bandwidth                                  the ridge, one for each level of the cluster
    throughput ≤ min( peak, CCR · bandwidth ),  efficiency = min(1, CCR / CCR*)

Both sides are per device. CCR of data parallelism grows with the local batch, so below the ridge efficiency is proportional to the
batch and the **critical batch** is batch · CCR*/CCR. (The seeds' ridges use sparse peaks and count both directions of NVLink: an H100 has
989 TFLOP/s over 450 GB/s a direction, CCR* = 2,198; over one 400 Gb/s card 19,780. Their efficiency formula divides FLOP/s by samples.)

Regimes, with the seeds' cut-offs: below 0.2·CCR* severely communication-bound, below 0.8 communication-bound, below 1.2 near the
ridge, above compute-bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.describe.cluster import Cluster

REGIMES = (
    (0.2, "severely communication-bound", ("raise the batch by 4× or more", "compress gradients", "use a better interconnect",
                                            "choose a plan that moves fewer bytes")),
    (0.8, "communication-bound", ("raise the batch: efficiency follows it", "overlap communication with compute",
                                  "use hierarchy-aware algorithms")),
    (1.2, "near the ridge", ("a little more batch helps", "turn to compute optimisations", "this is the best place to scale from")),
    (float("inf"), "compute-bound", ("optimise kernels", "use mixed precision", "fuse operators", "raise utilisation per device")),
)  # fmt: skip


@dataclass(frozen=True)
class Ceiling:
    """One level's slope of the roof."""

    level: str
    bandwidth: float
    ridge: float
    efficiency: float


@dataclass(frozen=True)
class Position:
    """Where a step stands."""

    ccr: float
    ridge: float
    efficiency: float
    regime: str
    advice: tuple[str, ...]
    critical_batch: float
    batch_for_90: float
    ceilings: tuple[Ceiling, ...]


def ridge(peak: float, bandwidth: float) -> float:
    """CCR* = peak / bandwidth."""
    return peak / bandwidth


def ccr_data_parallel(
    parameters: float, tokens: float, dtype_bytes: float = 2, flops_per_parameter: float = 6
) -> float:
    """CCR of DDP on one device: 6·N·tokens over 2·N·bytes; the model's size cancels."""
    return flops_per_parameter * parameters * tokens / (2 * parameters * dtype_bytes)


def efficiency(ccr: float, ridge_point: float) -> float:
    return min(1.0, ccr / ridge_point) if ridge_point else 1.0


def regime(ccr: float, ridge_point: float) -> tuple[str, tuple[str, ...]]:
    share = ccr / ridge_point if ridge_point else float("inf")
    return next((name, advice) for limit, name, advice in REGIMES if share < limit or limit == float("inf"))


def position(
    flops: float, sent_bytes: float, batch: float, peak: float, bandwidth: float, ceilings: tuple[Ceiling, ...] = ()
) -> Position:
    """Place a step of `flops` and `sent_bytes` per device under a roof; CCR is taken as proportional to the batch."""
    if sent_bytes <= 0:
        return Position(float("inf"), ridge(peak, bandwidth), 1.0, "no communication", (), 0.0, 0.0, ceilings)
    ccr, top = flops / sent_bytes, ridge(peak, bandwidth)
    name, advice = regime(ccr, top)
    critical = batch * top / ccr
    return Position(ccr, top, efficiency(ccr, top), name, advice, critical, 0.9 * critical, ceilings)


def ceilings(cluster: Cluster, peak: float, ccr: float) -> tuple[Ceiling, ...]:
    """Every level's ridge: communication that stays inside a level meets only that level's roof."""
    out = []
    for k, level in enumerate(cluster.levels):
        bandwidth = cluster.device_bandwidth(k)
        out.append(Ceiling(level.name, bandwidth, ridge(peak, bandwidth), efficiency(ccr, ridge(peak, bandwidth))))
    return tuple(out)
