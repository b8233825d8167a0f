"""The time of every collective by algorithm, on a uniform network or on nodes with two kinds of links."""

import math
from collections.abc import Callable

from meshwright.describe.cluster import Link
from meshwright.formulas import arguments
from meshwright.formulas.arguments import Quantity, one_of, refused
from meshwright.lower.program import sent
from meshwright.programs.collectives import formulas
from meshwright.programs.collectives.comparison import RAIL_DOUBLE_TREE, SWITCHED
from meshwright.programs.collectives.contract import OPERATIONS
from meshwright.programs.collectives.formulas import FORMULAS, Rates, Shape, Steps

NODE_AWARE = ("hierarchical", "two-level", "multi-ring", "rail-tree", RAIL_DOUBLE_TREE, *SWITCHED)
SENT_ALL = ("broadcast", "reduce", "point-to-point")  # one rank passes on the whole buffer
SMALLEST, LARGEST = 1.0, 2.0**50  # bytes between which two algorithms are compared
HALVINGS = 200


def algorithms(operation: str) -> tuple[str, ...]:
    """The algorithms of an operation that have a closed form."""
    one_of("operation", operation, OPERATIONS)
    return tuple(algorithm for known, algorithm in FORMULAS if known == operation)


def formula(operation: str, algorithm: str) -> str:
    """The closed form as text: n bytes of the full buffer, P = N·g ranks in N nodes, k segments."""
    return formulas.text(operation, one_of("algorithm", algorithm, algorithms(operation)))


def collective_time(
    operation: str,
    size: Quantity,
    ranks: int,
    latency: Quantity,
    bandwidth: Quantity,
    algorithm: str = "",
    *,
    nodes: int = 1,
    latency_between: Quantity = 0,
    bandwidth_between: Quantity = 0,
    segments: int = 0,
    add_rate: Quantity = 0,
) -> float:
    """Seconds of a collective of `size` bytes (the full, unsharded buffer) over `ranks`, by one algorithm or by the fastest.

    With several `nodes`, `latency_between` and `bandwidth_between` are those of one rank's link to other nodes. An algorithm that does not know
    nodes then waits for the slower link in every step. `segments` are those of pipelined algorithms (default: the best number). `add_rate` is the
    bytes per second at which a rank adds up what it receives (γ = 1/add_rate; 0: hidden).
    """
    network = _network(operation, ranks, latency, bandwidth, nodes, latency_between, bandwidth_between)
    size, gamma = arguments.size("size", size), 1 / arguments.rate("add_rate", add_rate) if add_rate else 0.0
    k = arguments.whole("segments", segments, least=0, most=2**16)
    if algorithm:
        return network(one_of("algorithm", algorithm, algorithms(operation)), size, k, gamma)
    return min(network(name, size, k, gamma) for name in _usable(operation, nodes))


def collective_times(
    operation: str,
    size: Quantity,
    ranks: int,
    latency: Quantity,
    bandwidth: Quantity,
    *,
    nodes: int = 1,
    latency_between: Quantity = 0,
    bandwidth_between: Quantity = 0,
) -> dict[str, float]:
    """Seconds by algorithm, the fastest first; reduction in switches is left out, since most networks lack it."""
    network = _network(operation, ranks, latency, bandwidth, nodes, latency_between, bandwidth_between)
    size = arguments.size("size", size)
    times = {name: network(name, size, 0, 0.0) for name in _usable(operation, nodes)}
    return dict(sorted(times.items(), key=lambda item: item[1]))


def equal_time_size(
    operation: str, first: str, second: str, ranks: int, latency: Quantity, bandwidth: Quantity
) -> float | None:
    """The size in bytes at which two algorithms take equally long on a uniform network; None if one is never slower than the other."""
    network = _network(operation, ranks, latency, bandwidth, 1, 0, 0)
    for name in (first, second):
        one_of("algorithm", name, algorithms(operation))

    def ahead(n: float) -> float:
        return network(first, n, 0, 0.0) - network(second, n, 0, 0.0)

    low, high = SMALLEST, LARGEST
    if ahead(low) * ahead(high) >= 0:
        return None
    rising = ahead(low) < 0
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (ahead(middle) < 0) == rising else (low, middle)
    return high


def bytes_sent(operation: str, size: Quantity, ranks: int) -> float:
    """Bytes that one rank sends by a bandwidth-optimal algorithm: 2(P−1)/P·n for an all-reduce, n for a broadcast, else (P−1)/P·n."""
    one_of("operation", operation, [name for name in OPERATIONS if name != "barrier"])
    n, p = arguments.size("size", size), arguments.whole("ranks", ranks)
    name = "send" if operation in SENT_ALL else operation.replace("-", "_")
    return float(sent(name, n, float(p)))


def _usable(operation: str, nodes: int) -> list[str]:
    named = [name for name in algorithms(operation) if name not in SWITCHED]
    return [name for name in named if nodes > 1 or name not in NODE_AWARE] or named


def _network(
    operation: str,
    ranks: int,
    latency: Quantity,
    bandwidth: Quantity,
    nodes: int,
    latency_between: Quantity,
    bandwidth_between: Quantity,
) -> Callable[[str, float, int, float], float]:
    """Return the function (algorithm, size, segments, γ) → seconds of a network."""
    one_of("operation", operation, OPERATIONS)
    p, n = arguments.whole("ranks", ranks, most=2**20), arguments.whole("nodes", nodes)
    if p % n:
        raise refused("nodes", nodes, f"The nodes must have equal numbers of the {p:,} ranks")
    inside = Link(
        name="link", alpha=arguments.latency("latency", latency), bandwidth=arguments.rate("bandwidth", bandwidth)
    )
    between = Link(
        name="between nodes",
        alpha=arguments.latency("latency_between", latency_between) or inside.alpha,
        bandwidth=arguments.rate("bandwidth_between", bandwidth_between) if bandwidth_between else inside.bandwidth,
    )
    slower = Link(
        name="slower link",
        alpha=max(inside.alpha, between.alpha),
        bandwidth=min(inside.bandwidth, between.bandwidth),
    )

    def time(algorithm: str, size: float, segments: int, gamma: float) -> float:
        k = segments or _segments(algorithm, p, n, size, slower, inside, between)
        terms = formulas.terms(operation, algorithm, p, nodes=n, segments=k)
        knows_nodes = isinstance(terms, Steps) or terms.together or terms.outer_alpha or terms.outer_beta
        return float(terms.time(size, inside if n == 1 or knows_nodes else slower, gamma, between))

    return time


def _segments(algorithm: str, ranks: int, nodes: int, size: float, slower: Link, inside: Link, between: Link) -> int:
    """The best number of segments of a pipelined algorithm; others ignore it."""
    shape, rates = Shape(ranks, 1, nodes, ranks / nodes), Rates(inside.alpha, inside.beta, between.alpha, between.beta)
    if algorithm == RAIL_DOUBLE_TREE:
        return int(formulas.double_tree_segments(size, shape, rates))
    if algorithm in SWITCHED:
        latency = max(rates.alpha, rates.outer_alpha)
        return int(formulas.switch_segments(size, shape, rates, algorithm == "sharp")) if latency else 2**12
    return formulas.best_segments(algorithm, ranks, size, slower) if algorithm in ("chain", "double-tree") else 1
