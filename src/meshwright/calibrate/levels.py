"""Find the levels of a network in transfers between pairs of ranks, and fit α and β of each level.

Every pair has a time at a small and at a large message. In sorted order these times have gaps where one kind of link ends and a slower one
begins: NVLink and network, one socket and two, one rail group and the next. The pairs below a gap connect ranks to units; the gap is a
level if the units are of equal size, almost no pair inside a unit is slower than the gap, and the gap exceeds the spread of the
measurements. Hosts are a level in any case.

A host (or rank) whose transfers to all others are slow is not a level: its units would be unequal. It is named instead, and left out of the
fit. Pairs that exchange at the same time show whether devices share a link: k pairs that take k times as long share one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from meshwright.calibrate.fit import Line, fit_line
from meshwright.calibrate.points import Bench, Point
from meshwright.errors import MeshwrightError

PAIR = "point-to-point"
LARGE_GAP, SMALL_GAP = 1.5, 2.0  # factor between two kinds of links, at large and at small messages
CONTRADICTIONS = 0.1  # share of the pairs inside a unit that may be slower than the gap
SLOW = 1.5  # a unit whose transfers take this much longer than those of the others is slow
SHARED = 1.4  # pairs at the same time that take this much longer share a link

Pair = tuple[int, int]
Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SlowUnit:
    """A host or rank whose transfers are slower than those of its equals."""

    name: str
    ranks: tuple[int, ...]
    factor: float
    what: str  # "rate" or "latency"


@dataclass(frozen=True)
class FoundLevel:
    """One level: `units` of ranks joined by links of one kind."""

    name: str
    units: Partition
    line: Line
    pairs: int
    slowdown: float  # of pairs that exchange at the same time; 1: nothing is shared, or it was not measured
    together: int  # pairs that exchanged at the same time; 0: not measured
    slow: tuple[SlowUnit, ...] = ()

    @property
    def shared(self) -> bool:
        return self.slowdown > SHARED


def pair_points(bench: Bench, backend: str) -> dict[Pair, dict[int, Point]]:
    """Points of single pairs by pair and size."""
    by_pair: dict[Pair, dict[int, Point]] = {}
    for point in bench.points:
        if point.operation == PAIR and point.backend == backend and point.concurrent == 1 and len(point.ranks) == 2:
            a, b = sorted(point.ranks)
            by_pair.setdefault((a, b), {})[point.bytes] = point
    return by_pair


def find_levels(bench: Bench, backend: str) -> list[FoundLevel]:
    """The levels, from the fastest links to the slowest."""
    pairs = pair_points(bench, backend)
    if not pairs:
        late = bench.state == "interrupted" or any(" point-to-point" in text for text in bench.skipped)
        raise MeshwrightError(
            "MW-CALIB-001",
            "the bench has no transfers between pairs of ranks",
            why="Levels, latency and bandwidth are fitted to them"
            + ("; it was interrupted, or its time was over before" if late else ""),
            fix="meshwright bench --json bench.json, "
            + ("with a longer --budget" if late else "with point-to-point in --operations"),
        )
    ranks = tuple(sorted(info.rank for info in bench.ranks))
    hosts = {info.rank: info.host for info in bench.ranks}
    partitions = [*partitions_of(ranks, pairs, hosts), (ranks,)]
    levels = []
    for k, units in enumerate(partitions):
        below = partitions[k - 1] if k else tuple((rank,) for rank in ranks)
        here = {
            pair: points for pair, points in pairs.items() if joined(units, pair) and not (k and joined(below, pair))
        }
        if here:
            levels.append(level_of(level_name(units, hosts, k), units, below, here, bench, backend, hosts))
    return levels


def level_name(units: Partition, hosts: Mapping[int, str], k: int) -> str:
    """Name the units of a level: parts of a host, hosts, or groups of hosts."""
    by_host = {tuple(r for r in hosts if hosts[r] == host) for host in hosts.values()}
    if set(units) == by_host:
        return "node"
    inside = all(len({hosts[r] for r in unit}) == 1 for unit in units)
    if inside:
        return "part of a node" if k == 0 else f"part of a node {k + 1}"
    return "network" if len(units) == 1 else f"group of {len({hosts[r] for r in units[0]})} nodes"


def joined(units: Partition, pair: Pair) -> bool:
    """Whether one unit holds both ranks."""
    return any(pair[0] in unit and pair[1] in unit for unit in units)


def partitions_of(
    ranks: Sequence[int], pairs: Mapping[Pair, Mapping[int, Point]], hosts: Mapping[int, str]
) -> list[Partition]:
    """The partitions of the ranks into units, finest first, without the whole."""
    by_host = tuple(tuple(r for r in ranks if hosts[r] == host) for host in dict.fromkeys(hosts[r] for r in ranks))
    partitions = [by_host] if 1 < len(by_host) < len(ranks) else []
    smallest = min(min(points) for points in pairs.values())
    largest = common_largest(pairs)
    for n, gap in ((largest, LARGE_GAP), (smallest, SMALL_GAP)):
        times = {pair: points[n] for pair, points in pairs.items() if n in points}
        for threshold in gaps(list(times.values()), gap):
            units = components(ranks, [pair for pair, point in times.items() if point.median_s <= threshold])
            if is_level(units, len(ranks), times, threshold) and all(nested(units, other) for other in partitions):
                partitions.append(units)
    return sorted(dict.fromkeys(partitions), key=lambda units: len(units[0]))


def common_largest(pairs: Mapping[Pair, Mapping[int, Point]]) -> int:
    """The largest size at which at least nine tenths of the pairs were measured."""
    counts: dict[int, int] = {}
    for points in pairs.values():
        for n in points:
            counts[n] = counts.get(n, 0) + 1
    return max(n for n, count in counts.items() if count >= 0.9 * max(counts.values()))


def gaps(points: Sequence[Point], factor: float) -> list[float]:
    """Thresholds between two kinds of pairs: times that differ by `factor`, and by more than the spread of either."""
    ordered = sorted(points, key=lambda p: p.median_s)
    return [
        (a.median_s * b.median_s) ** 0.5
        for a, b in pairwise(ordered)
        if b.median_s > factor * a.median_s and b.low_s > a.high_s
    ]


def components(ranks: Sequence[int], edges: Sequence[Pair]) -> Partition:
    """Ranks that the edges connect."""
    unit_of = {rank: {rank} for rank in ranks}
    for a, b in edges:
        if unit_of[a] is not unit_of[b]:
            unit_of[a] |= unit_of[b]
            for rank in unit_of[b]:
                unit_of[rank] = unit_of[a]
    return tuple(dict.fromkeys(tuple(sorted(unit_of[rank])) for rank in ranks))


def is_level(units: Partition, ranks: int, times: Mapping[Pair, Point], threshold: float) -> bool:
    """Whether units are of equal size, more than one, and hold few pairs that are slower than the threshold."""
    sizes = {len(unit) for unit in units}
    if len(sizes) != 1 or not 1 < len(units[0]) < ranks:
        return False
    inside = [point.median_s for pair, point in times.items() if joined(units, pair)]
    return bool(inside) and sum(t > threshold for t in inside) <= CONTRADICTIONS * len(inside)


def nested(a: Partition, b: Partition) -> bool:
    """Whether every unit of one partition lies inside a unit of the other."""
    fine, coarse = (a, b) if len(a) >= len(b) else (b, a)
    return all(any(set(unit) <= set(other) for other in coarse) for unit in fine)


def level_of(
    name: str, units: Partition, below: Partition, pairs: Mapping[Pair, Mapping[int, Point]], bench: Bench, backend: str,
    hosts: Mapping[int, str],
) -> FoundLevel:  # fmt: skip
    """The fit of one level, without its slow units."""
    slow = slow_units(below, pairs, hosts)
    excluded = {rank for unit in slow for rank in unit.ranks}
    normal_pairs = {pair: points for pair, points in pairs.items() if not excluded & set(pair)} or pairs
    points = [point for by_size in normal_pairs.values() for point in by_size.values()]
    line = fit_line([p.bytes for p in points], [p.median_s for p in points])
    slowdown, together = sharing(bench, backend, units, below, normal_pairs)
    return FoundLevel(name, units, line, len(pairs), slowdown, together, slow)


def slow_units(
    below: Partition, pairs: Mapping[Pair, Mapping[int, Point]], hosts: Mapping[int, str]
) -> tuple[SlowUnit, ...]:
    """Units whose transfers are slower than those between the other units; at least three units are needed to tell."""
    slow: list[SlowUnit] = []
    for n, what, limit in (
        (common_largest(pairs), "rate", SLOW),
        (min(min(p) for p in pairs.values()), "latency", 2 * SLOW),
    ):
        times = {pair: float(np.log(points[n].median_s)) for pair, points in pairs.items() if n in points}
        left = [unit for unit in below if not any(unit == other.ranks for other in slow)]
        while len(left) >= 3:
            ratios = {unit: slowness(unit, left, times) for unit in left}
            worst = max(ratios, key=lambda unit: ratios[unit])
            if ratios[worst] < limit:
                break
            slow.append(SlowUnit(unit_name(worst, hosts), worst, ratios[worst], what))
            left.remove(worst)
        if len(slow) > len(below) / 2:
            return ()  # most units are "slow": there is no normal to compare with
    return tuple(slow)


def slowness(unit: tuple[int, ...], units: Sequence[tuple[int, ...]], times: Mapping[Pair, float]) -> float:
    """Median time of a unit's transfers to the others over the median time between the others."""
    ranks, everyone = set(unit), {rank for other in units for rank in other}
    considered = {pair: t for pair, t in times.items() if set(pair) <= everyone}
    own = [t for pair, t in considered.items() if len(ranks & set(pair)) == 1]
    others = [t for pair, t in considered.items() if not ranks & set(pair)]
    return float(np.exp(np.median(own) - np.median(others))) if own and others else 1.0


def unit_name(unit: tuple[int, ...], hosts: Mapping[int, str]) -> str:
    """A host by its name, a rank by its number and host."""
    host = hosts[unit[0]]
    whole = tuple(r for r in sorted(hosts) if hosts[r] == host) == unit
    ranks = f"rank {unit[0]}" if len(unit) == 1 else f"ranks {unit[0]}–{unit[-1]}"
    return f"host {host} ({ranks})" if whole else f"{ranks} on host {host}"


def sharing(
    bench: Bench, backend: str, units: Partition, below: Partition, pairs: Mapping[Pair, Mapping[int, Point]]
) -> tuple[float, int]:
    """Return how much longer pairs take at the same time than alone, and how many pairs that were; (1, 0) if it was not measured."""
    single: dict[int, list[float]] = {}
    for by_size in pairs.values():
        for n, point in by_size.items():
            single.setdefault(n, []).append(point.median_s)
    by_count: dict[int, tuple[float, int]] = {}
    for point in bench.points:
        own = [(a, b) if a < b else (b, a) for a, b in zip(point.ranks[::2], point.ranks[1::2], strict=False)]
        crosses = all(joined(units, pair) and not (len(below[0]) > 1 and joined(below, pair)) for pair in own)
        if (
            point.operation == PAIR
            and point.backend == backend
            and point.concurrent > 1
            and crosses
            and point.bytes in single
        ):
            by_count[point.bytes] = (point.median_s / float(np.median(single[point.bytes])), point.concurrent)
    if not by_count:
        return 1.0, 0
    slowdown, together = by_count[max(by_count)]
    return max(slowdown, 1.0), together
