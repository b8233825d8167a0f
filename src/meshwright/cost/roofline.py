"""The communication roofline: the share of peak FLOP/s that the bandwidth of each level allows.

    CCR   = FLOPs per device and step / bytes that a device sends through the level per step
    CCR*  = peak FLOP/s / bandwidth of a device at the level                         the ridge
    throughput ≤ min( peak, CCR · bandwidth ),  efficiency = min(1, CCR / CCR*)

Bytes and ridge are computed per level: traffic inside NVLink does not count for the network. The bytes are those of the collective programs that the
cost model uses: a ring over nodes of g devices sends 1/g of its traffic through each of a node's g cards. The level with the lowest efficiency
limits the step.

(An H100 has 989 TFLOP/s dense and 450 GB/s per direction: CCR* = 2,198; over one 400 Gb/s card it is 19,780. The ridges in
"Parallelism Bandwidth & Efficiency Modeler" (docs/figures.md) use sparse peaks and count both directions of NVLink, and its efficiency formula
divides FLOP/s by samples.)

Regimes, with the cut-offs of the same text: below 0.2·CCR* severely communication-bound, below 0.8 communication-bound, below 1.2 near the
ridge, above compute-bound. The roofline is only a bound, since compute can hide communication. So the regime is communication-bound if and only if
communication is the largest part of the step in the cost model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.describe.cluster import Cluster

REGIMES = (
    (0.2, "severely communication-bound", ("raise the batch by 4× or more", "compress gradients", "use a better interconnect",
                                            "choose a plan that moves fewer bytes")),
    (0.8, "communication-bound", ("raise the batch: efficiency grows with it", "overlap communication with compute",
                                  "use hierarchy-aware algorithms")),
    (1.2, "near the ridge", ("a slightly larger batch helps", "optimise compute next", "a good point to scale out from")),
    (float("inf"), "compute-bound", ("optimise kernels", "use mixed precision", "fuse operators", "raise utilisation per device")),
)  # fmt: skip


@dataclass(frozen=True)
class Ceiling:
    """The roofline of one level: bytes that a device sends, bandwidth, ridge, and the share of the peak that this allows."""

    level: str
    bytes: float
    bandwidth: float
    ccr: float
    ridge: float
    efficiency: float

    @property
    def seconds(self) -> float:
        """Seconds that the traffic of a step takes at this level."""
        return self.bytes / self.bandwidth

    def as_dict(self) -> dict[str, float | str | None]:
        return {**self.__dict__, "ccr": None if self.ccr == float("inf") else self.ccr, "seconds": self.seconds}


@dataclass(frozen=True)
class Position:
    """The roofline of a step: the level with the lowest efficiency, and the ceilings of all levels."""

    level: str
    ccr: float
    ridge: float
    efficiency: float
    regime: str
    advice: tuple[str, ...]
    ceilings: tuple[Ceiling, ...]


def ridge(peak: float, bandwidth: float) -> float:
    """CCR* = peak / bandwidth."""
    return peak / bandwidth


def ccr_data_parallel(
    parameters: float, tokens: float, dtype_bytes: float = 2, flops_per_parameter: float = 6
) -> float:
    """CCR of DDP on one device: 6·N·tokens over 2·N·bytes; N cancels."""
    return flops_per_parameter * parameters * tokens / (2 * parameters * dtype_bytes)


def efficiency(ccr: float, ridge_point: float) -> float:
    return min(1.0, ccr / ridge_point) if ridge_point else 1.0


def regime(ccr: float, ridge_point: float) -> tuple[str, tuple[str, ...]]:
    share = ccr / ridge_point if ridge_point else float("inf")
    return next((name, advice) for limit, name, advice in REGIMES if share < limit or limit == float("inf"))


def position(
    flops: float, sent: Sequence[float], peak: float, cluster: Cluster, communication_bound: bool | None = None
) -> Position:
    """The roofline of a step, from its `flops` and the bytes sent per device at each level.

    `communication_bound` is the result of the cost model, which the regime follows; None: unknown.
    """
    ceilings = []
    for k, (level, size) in enumerate(zip(cluster.levels, sent, strict=True)):
        bandwidth = cluster.device_bandwidth(k)
        ccr, top = flops / size if size else float("inf"), ridge(peak, bandwidth)
        ceilings.append(Ceiling(level.name, size, bandwidth, ccr, top, efficiency(ccr, top)))
    lowest = min(ceilings, key=lambda c: c.ccr / c.ridge)
    if not any(sent):
        return Position(lowest.level, float("inf"), lowest.ridge, 1.0, "no communication", (), tuple(ceilings))
    share = lowest.ccr / lowest.ridge
    if communication_bound is not None:
        share = min(share, 0.79) if communication_bound else max(share, 0.8)
    name, advice = regime(share, 1.0)
    return Position(lowest.level, lowest.ccr, lowest.ridge, lowest.efficiency, name, advice, tuple(ceilings))
