"""One message on one link: the α-β model, and α and β from measurements."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.calibrate.fit import fit_line
from meshwright.cost import link
from meshwright.describe.cluster import Link
from meshwright.formulas import arguments
from meshwright.formulas.arguments import Quantity, refused
from meshwright.programs.collectives import formulas


class MessageRegime(NamedTuple):
    """What bounds a message: latency or bandwidth, and what helps."""

    name: str
    crossover_bytes: float
    advice: tuple[str, ...]


class AlphaBeta(NamedTuple):
    """α and β of a link, fitted to measured times, and how well the line follows them."""

    latency_s: float  # α
    seconds_per_byte: float  # β
    bandwidth: float  # 1/β
    crossover_bytes: float  # n* = α/β: there half of the bandwidth is reached
    residual: float  # median of |fit/measured − 1|
    deviation: float  # largest |fit/measured − 1|: a switch of protocol, caches
    deviates_at_bytes: int
    points: int


def message_time(size: Quantity, latency: Quantity, bandwidth: Quantity) -> float:
    """T(n) = α + n·β, in seconds."""
    n, alpha = arguments.size("size", size), arguments.latency("latency", latency)
    return float(link.message_time(n, alpha, 1 / arguments.rate("bandwidth", bandwidth)))


def crossover_size(latency: Quantity, bandwidth: Quantity) -> float:
    """n* = α/β = α·B, in bytes: smaller messages are bound by latency, larger ones by bandwidth."""
    return link.crossover(arguments.seconds("latency", latency), 1 / arguments.rate("bandwidth", bandwidth))


def message_regime(size: Quantity, latency: Quantity, bandwidth: Quantity) -> MessageRegime:
    """Name what bounds a message of this size, with advice."""
    alpha, rate = arguments.seconds("latency", latency), arguments.rate("bandwidth", bandwidth)
    on = Link(name="link", alpha=alpha, bandwidth=rate)
    name, advice = link.regime(arguments.size("size", size), on)
    return MessageRegime(name.partition(" (")[0], on.crossover, advice)


def alpha_beta(
    sizes: Sequence[Quantity],
    seconds: Sequence[Quantity],
    operation: str = "point-to-point",
    ranks: int = 2,
    algorithm: str = "",
) -> AlphaBeta:
    """Fit T(n) = a·α + b·n·β to measured times; a and b are those of the collective's algorithm (1 and 1 for a message).

    Errors are relative and outliers have little weight (`calibrate.fit`), since the sizes span decades. Every size may be measured several times.
    Without an `algorithm` of a collective, α and β are those of the whole call: the intercept and the slope.
    """
    n, t = arguments.many("sizes", sizes, arguments.size), arguments.many("seconds", seconds, arguments.seconds)
    if len(n) != len(t):
        raise refused("seconds", len(t), f"There must be one time for each of the {len(n)} sizes")
    if len(set(n)) < 2:
        raise refused("sizes", sorted(set(n)), "A line needs at least two different sizes")
    line, messages, buffers = fit_line(n, t), 1.0, 1.0
    if algorithm:
        terms = formulas.terms(operation, algorithm, arguments.whole("ranks", ranks, least=2))
        if not isinstance(terms, formulas.Terms):
            raise refused(
                "algorithm", algorithm, "Its time is no line in the size, since steps of different lengths overlap"
            )
        messages, buffers = float(terms.alpha), float(terms.beta)
    alpha, beta = line.alpha / messages, line.beta / buffers if buffers else 0.0
    rate, crossover = (1 / beta, alpha / beta) if beta else (float("inf"), float("inf"))
    return AlphaBeta(alpha, beta, rate, crossover, line.residual, line.deviation, line.deviates_at, line.points)
