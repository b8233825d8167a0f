"""The communication roofline on one's own numbers: FLOPs per byte, ridge, regime, critical batch."""

from typing import Any, NamedTuple

from meshwright.cost import roofline
from meshwright.cost.closed_forms import tensor_parallel_bytes
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import load_cluster
from meshwright.formulas import arguments
from meshwright.formulas.arguments import Quantity


class LevelRidge(NamedTuple):
    """The ridge of one level of a cluster."""

    level: str
    link: str
    bandwidth: float  # bytes/s of one device in one direction, while all devices send
    ridge: float  # FLOPs per byte


class RooflinePoint(NamedTuple):
    """Where a step lies on the communication roofline."""

    ccr: float  # FLOPs per byte sent
    ridge: float
    efficiency: float  # share of the peak that the bandwidth allows
    regime: str
    advice: tuple[str, ...]
    critical_factor: float  # the batch times this lies at the ridge


def compute_to_communication(parameters: Quantity, tokens: Quantity, dtype_bytes: float = 2) -> float:
    """CCR of data parallelism: 6·N·tokens FLOPs over 2·N·bytes of gradients; N cancels. `tokens` are those of one device and step."""
    sizes = arguments.count("parameters", parameters), arguments.count("tokens", tokens)
    return roofline.ccr_data_parallel(*sizes, arguments.above_zero("dtype_bytes", dtype_bytes))


def ridge(peak: Quantity, bandwidth: Quantity) -> float:
    """CCR* = peak FLOP/s / bandwidth, in FLOPs per byte. Dense peak and one direction of the link, since a byte is sent once."""
    return roofline.ridge(arguments.flop_rate("peak", peak), arguments.rate("bandwidth", bandwidth))


def cluster_ridges(cluster: Any, dtype: str = "bf16") -> list[LevelRidge]:
    """The ridge of every level of a cluster (a catalog name, a file or a `Cluster`), at the achievable bandwidth of one device."""
    described = cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster))
    peak = described.accelerator.peak_for(dtype)
    rows = [(level, described.device_bandwidth(k)) for k, level in enumerate(described.levels)]
    return [LevelRidge(level.name, level.link.name, rate, roofline.ridge(peak, rate)) for level, rate in rows]


def roofline_point(flops: Quantity, sent: Quantity, peak: Quantity, bandwidth: Quantity) -> RooflinePoint:
    """Place a step of `flops` FLOPs that sends `sent` bytes per device: CCR against the ridge, the regime and advice.

    efficiency = min(1, CCR / CCR*). Below 0.2 severely communication-bound, below 0.8 communication-bound, below 1.2 near the ridge.
    """
    ccr = arguments.count("flops", flops) / arguments.size("sent", sent)
    top = ridge(peak, bandwidth)
    name, advice = roofline.regime(ccr, top)
    return RooflinePoint(ccr, top, roofline.efficiency(ccr, top), name, advice, top / ccr)


def critical_batch(peak: Quantity, bandwidth: Quantity, seq: Quantity = 1, dtype_bytes: float = 2) -> float:
    """Sequences per device at the ridge of data parallelism: CCR* · 2·bytes / (6·seq); with seq = 1 tokens. The model does not matter.

    `estimate` prints the critical batch of a plan, which counts the achieved rates and the communication that can never overlap.
    """
    tokens = ridge(peak, bandwidth) / compute_to_communication(1, 1, dtype_bytes)
    return tokens / arguments.count("seq", seq)


def tensor_parallel_traffic(batch: int, seq: int, hidden: int, tp: int, dtype_bytes: float = 2) -> float:
    """Bytes that one rank sends per layer and micro-batch: 4 all-reduces, 4 · 2(T−1)/T · b·s·h·bytes."""
    b, s, h = (arguments.count(name, x) for name, x in (("batch", batch), ("seq", seq), ("hidden", hidden)))
    width = arguments.above_zero("dtype_bytes", dtype_bytes)
    return tensor_parallel_bytes(b, s, h, arguments.whole("tp", tp), width)
