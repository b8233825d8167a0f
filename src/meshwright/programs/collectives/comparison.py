"""Which algorithm is fastest for which message size, on a given cluster.

Every algorithm is built and walked at every size; nothing is read off formulas. Between two sizes at which different
algorithms lead, the crossover is where their times, taken as linear in the size, meet: exact where α-β holds, for then
they *are* linear. Node-aware algorithms get the cluster's nodes; pipelined ones the number of segments that suits the
size and the slowest link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshwright.describe.cluster import Cluster
from meshwright.programs.collectives.formulas import Rates, Shape, best_segments, switch_segments
from meshwright.programs.collectives.registry import accepts, algorithms_of, build, groups_of, place
from meshwright.programs.collectives.walker import walk

SWITCHED = ("nvls", "sharp")
SIZES = tuple(4.0**k * 1024 for k in range(11))  # 1 KiB to 1 GiB


@dataclass(frozen=True)
class Crossover:
    """From `size` bytes on, `after` is faster than `before`."""

    size: float
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """Seconds by algorithm and size."""

    operation: str
    cluster: str
    ranks: int
    sizes: tuple[float, ...]
    times: dict[str, tuple[float, ...]]

    @property
    def best(self) -> list[str]:
        """The fastest at each size; the first of equals."""
        return [min(self.times, key=lambda name: self.times[name][k]) for k in range(len(self.sizes))]

    @property
    def crossovers(self) -> list[Crossover]:
        """Where the lead changes, smallest size first."""
        found = []
        for k, (before, after) in enumerate(pairwise(self.best)):
            if before != after:
                ahead = [self.times[after][j] - self.times[before][j] for j in (k, k + 1)]
                share = ahead[0] / (ahead[0] - ahead[1]) if ahead[0] > ahead[1] else 0.0
                size = self.sizes[k] + share * (self.sizes[k + 1] - self.sizes[k])
                found.append(Crossover(size, before, after))
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "cluster": self.cluster,
            "ranks": self.ranks,
            "size_bytes": list(self.sizes),
            "time_s": {name: list(times) for name, times in self.times.items()},
            "best": self.best,
            "crossovers": [{"size_bytes": c.size, "before": c.before, "after": c.after} for c in self.crossovers],
        }


def options_for(
    operation: str, algorithm: str, cluster: Cluster, ranks: int, size: float, placement: Sequence[int] | None = None
) -> dict[str, Any]:
    """Nodes for node-aware algorithms, segments for pipelined ones."""
    options: dict[str, Any] = {}
    accepted = accepts(operation, algorithm)
    devices = place(cluster, ranks, placement)
    if "groups" in accepted:
        options["groups"] = groups_of(cluster, ranks, devices)
    if algorithm in SWITCHED and ranks > 1:
        options["segments"] = segments_for(algorithm, cluster, ranks, len(options["groups"]), size)
    elif "segments" in accepted and ranks > 1:
        level = cluster.level_between(min(devices), max(devices))
        options["segments"] = best_segments(algorithm, ranks, size, cluster.levels[level].link)
    return options


def segments_for(algorithm: str, cluster: Cluster, ranks: int, nodes: int, size: float) -> int:
    """Segments of a program whose switches reduce, as `formulas.switch_segments` has them for equal nodes."""
    inner, outer = (cluster.levels[min(k, len(cluster.levels) - 1)].link for k in (0, 1))
    rates = Rates(inner.alpha, inner.beta, outer.alpha, outer.beta)
    return int(switch_segments(size, Shape(ranks, 1, nodes, ranks / nodes), rates, algorithm == "sharp"))


def runs_on(cluster: Cluster, algorithm: str) -> bool:
    """Whether the cluster has the switches that an algorithm needs: ones that reduce inside nodes, and in the fabric."""
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
    """Walk every algorithm (or those named) at every size, in bytes."""
    times: dict[str, tuple[float, ...]] = {}
    for name in algorithms or [a for a in algorithms_of(operation) if runs_on(cluster, a)]:
        row = []
        for size in sizes:
            options = options_for(operation, name, cluster, ranks, size, placement)
            program = build(operation, name, ranks, int(size / element_bytes), **options)
            row.append(walk(program, cluster, placement, element_bytes).makespan)
        times[name] = tuple(row)
    return Comparison(operation, cluster.name, ranks, tuple(float(s) for s in sizes), times)


__all__ = ["SIZES", "Comparison", "Crossover", "compare", "options_for"]
