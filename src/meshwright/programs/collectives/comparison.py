"""Find the fastest algorithm for each message size on a given cluster.

Every algorithm is built and simulated (`walk`) at every size; formulas are not used. If different algorithms are fastest
at two neighbouring sizes, the crossover is the size at which their times are equal, interpolated linearly. It is exact
where the α-β model holds, because times are then linear in the size. Node-aware algorithms receive the cluster's nodes.
Pipelined algorithms receive the best number of segments for the size and the slowest link.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshwright.describe.cluster import Cluster
from meshwright.describe.result import values_of
from meshwright.programs.collectives.formulas import Rates, Shape, best_segments, double_tree_segments, switch_segments
from meshwright.programs.collectives.registry import accepts, algorithms_of, build, groups_of, place
from meshwright.programs.collectives.walker import walk

SWITCHED = ("nvls", "sharp")
RAIL_DOUBLE_TREE = "rail-double-tree"
SIZES = tuple(4.0**k * 1024 for k in range(11))  # 1 KiB to 1 GiB


@dataclass(frozen=True)
class Crossover:
    """From `size` bytes on, `after` is faster than `before`."""

    size: float
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """Time in seconds of each algorithm at each size."""

    operation: str
    cluster: str
    ranks: int
    sizes: tuple[float, ...]
    times: dict[str, tuple[float, ...]]

    @property
    def best(self) -> list[str]:
        """The fastest algorithm at each size; the first one of a tie."""
        return [min(self.times, key=lambda name: self.times[name][k]) for k in range(len(self.sizes))]

    @property
    def crossovers(self) -> list[Crossover]:
        """Sizes at which another algorithm becomes the fastest, in ascending order."""
        sizes = []
        for k, (before, after) in enumerate(pairwise(self.best)):
            if before != after:
                lead = [self.times[after][j] - self.times[before][j] for j in (k, k + 1)]
                share = lead[0] / (lead[0] - lead[1]) if lead[0] > lead[1] else 0.0
                size = self.sizes[k] + share * (self.sizes[k + 1] - self.sizes[k])
                sizes.append(Crossover(size, before, after))
        return sizes

    def as_dict(self) -> dict[str, Any]:
        return {
            **values_of(self, "operation", "cluster", "ranks"),
            "size_bytes": list(self.sizes),
            "time_s": {name: list(times) for name, times in self.times.items()},
            "best": self.best,
            "crossovers": [{"size_bytes": c.size, "before": c.before, "after": c.after} for c in self.crossovers],
        }


def options_for(
    operation: str, algorithm: str, cluster: Cluster, ranks: int, size: float, placement: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the builder's options: nodes for node-aware algorithms, the number of segments for pipelined ones."""
    options: dict[str, Any] = {}
    accepted = accepts(operation, algorithm)
    devices = place(cluster, ranks, placement)
    if "groups" in accepted:
        options["groups"] = groups_of(cluster, ranks, devices)
    if algorithm in (*SWITCHED, RAIL_DOUBLE_TREE) and ranks > 1:
        options["segments"] = segments_for(algorithm, cluster, ranks, len(options["groups"]), size)
    elif "segments" in accepted and ranks > 1:
        level = cluster.level_between(min(devices), max(devices))
        options["segments"] = best_segments(algorithm, ranks, size, cluster.levels[level].link)
    return options


def segments_for(algorithm: str, cluster: Cluster, ranks: int, nodes: int, size: float) -> int:
    """Return the number of segments of an algorithm with nodes, by its formula for equal nodes."""
    inner, outer = (cluster.levels[min(k, len(cluster.levels) - 1)].link for k in (0, 1))
    rates = Rates(inner.alpha, inner.beta, outer.alpha, outer.beta)
    shape = Shape(ranks, 1, nodes, ranks / nodes)
    if algorithm == RAIL_DOUBLE_TREE:
        return int(double_tree_segments(size, shape, rates))
    return int(switch_segments(size, shape, rates, algorithm == "sharp"))


def runs_on(cluster: Cluster, algorithm: str) -> bool:
    """Whether the cluster has the switches that an algorithm needs: NVLS needs in-node reduction, SHARP also the fabric's."""
    needed = {"nvls": 1, "sharp": 2}.get(algorithm, 0)
    return len(cluster.levels) >= needed and all(level.reduces for level in cluster.levels[:needed])


def compare(
    operation: str,
    cluster: Cluster,
    ranks: int,
    sizes: Sequence[float] = SIZES,
    algorithms: Sequence[str] = (),
    placement: Sequence[int] | None = None,
    element_bytes: float = 4.0,
) -> Comparison:
    """Simulate all algorithms, or the named ones, at every size in bytes."""
    times: dict[str, tuple[float, ...]] = {}
    for name in algorithms or [a for a in algorithms_of(operation) if runs_on(cluster, a)]:
        row = []
        for size in sizes:
            options = options_for(operation, name, cluster, ranks, size, placement)
            program = build(operation, name, ranks, int(size / element_bytes), **options)
            row.append(walk(program, cluster, placement, element_bytes).makespan)
        times[name] = tuple(row)
    return Comparison(operation, cluster.name, ranks, tuple(float(s) for s in sizes), times)
