"""The time of one message on one link: the α-β model, or α-β-γ if the receiver reduces.

    T(n) = α + n·β + n·γ        n* = α/β

α is the time to start, β = 1/bandwidth the time per byte, γ the time to reduce one byte. Below the crossover n* latency
dominates: send fewer, larger messages, or use a tree. Above it bandwidth dominates: use a ring, compress, overlap. (450,000 B
is 450 kB or 439.5 KiB; texts that print "450 KB" mix the two units.)
"""

from meshwright.describe.cluster import Link
from meshwright.lower.program import Array
from meshwright.units import format_decimal_bytes

LATENCY_ADVICE = (
    "fuse small messages into buckets",
    "issue them asynchronously",
    "use fewer collectives",
    "use a tree or recursive doubling: log₂P steps instead of P",
)
BANDWIDTH_ADVICE = (
    "use a ring or halving-doubling: each link carries 2(P−1)/P·n",
    "compress or send a narrower dtype",
    "overlap with compute",
    "keep the traffic on the faster level",
)


def message_time(n: Array, alpha: Array, beta: Array, gamma: Array = 0.0) -> Array:
    """T(n) = α + n·β + n·γ."""
    return alpha + n * beta + n * gamma


def crossover(alpha: float, beta: float) -> float:
    """n* = α/β: the size at which latency and bandwidth cost the same."""
    return alpha / beta


def regime(n: float, link: Link) -> tuple[str, tuple[str, ...]]:
    """Name the dominant term of a message of n bytes, and advice for that case."""
    if n < link.crossover:
        return f"latency-bound (below n* = {format_decimal_bytes(link.crossover)})", LATENCY_ADVICE
    return f"bandwidth-bound (above n* = {format_decimal_bytes(link.crossover)})", BANDWIDTH_ADVICE
