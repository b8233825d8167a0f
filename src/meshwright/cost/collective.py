"""The time of a collective: the closed formula of the program that the library runs, with the rates that it reaches.

`cost.curve` has the seconds of each program. `cost.library` lists the programs of each library, the rule by which it chooses one, and the
measured corrections. So the time of an all-reduce is the smallest of ring, tree and in-switch reduction, each for
the shape of the group: P ranks on N nodes, g ranks per node. All values are arrays over a batch of plans.
"""

import math
from typing import NamedTuple

import numpy as np

from meshwright.cost.curve import Curve, SwitchCurve, TreeCurve, curves
from meshwright.cost.group import Group, ring_rates
from meshwright.describe.cluster import Cluster
from meshwright.lower.program import Array, Batch, Column, Op

OPERATIONS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "send": "point-to-point",
}


class ChosenProgram(NamedTuple):
    """The program that a library runs for one call, its seconds on the links, and the seconds of the call with measured corrections."""

    algorithm: str
    segments: int
    walked: float
    seconds: float


def choose(cluster: Cluster, operation: str, n: float, ranks: int) -> ChosenProgram:
    """The program that the library runs for n bytes on the first `ranks` devices of a cluster. `cost.library` explains the rule."""
    nodes = -(-ranks // cluster.node_size)
    top = cluster.level_between(0, ranks - 1)
    size, per_node, level = np.array([float(ranks)]), np.array([ranks / nodes]), np.zeros(1, dtype=np.int64)
    rings = ring_rates(cluster, size, per_node, lambda unit: np.minimum(size, unit))
    group = Group.of(size, per_node, level, [cluster.device_bandwidth(top)], rings)
    size, root = np.array([float(n)]), np.sqrt([float(n)])
    candidates = curves(cluster, operation, group)
    best = min(candidates, key=lambda curve: float(curve.time(size, root)[0]))
    segments = int(best.segments(size)[0]) if isinstance(best, SwitchCurve | TreeCurve) else 1
    return ChosenProgram(best.algorithm, segments, float(best.walked(size)[0]), float(best.time(size, root)[0]))


class CollectiveTimes:
    """Times of the library's collectives on a cluster, for a batch of plans. Inside nodes they reach the library's rates. Between nodes they share
    links with other groups and their ranks arrive one after another: they reach the stack's share of these rates (`Stack.network`)."""

    def __init__(self, cluster: Cluster, batch: Batch) -> None:
        self.cluster, self.batch = cluster, batch
        self._groups: dict[str, Group] = {}
        self._has_peers: dict[str, Column] = {}
        self._share: dict[str, Array] = {}  # of the library's rates, by axis
        self._curves: dict[tuple[str, str], list[Curve]] = {}
        self._times: dict[tuple[str, str, int, float], tuple[Column, Array]] = {}
        top = len(cluster.levels) - 1
        self.outside = [cluster.device_bandwidth(k) for k in range(1, top + 1)] or [cluster.device_bandwidth(0)]

    def group(self, axis: str) -> Group:
        """The group shapes of an axis. The bandwidth between nodes is that of the highest level that the groups span."""
        if axis not in self._groups:
            size = self.batch.size(axis)
            inner = np.minimum(self.batch.members(axis, self.cluster.node_size), size)
            level: Column = np.zeros(1, dtype=np.int64)
            for k in range(1, len(self.cluster.levels) - 1):
                level = np.maximum(level, k * (self.batch.members(axis, self.cluster.spans[k]) < size))
            rings = ring_rates(self.cluster, size, inner, lambda unit: self.batch.members(axis, unit))
            self._groups[axis] = Group.of(size, inner, level, self.outside, rings)
            self._has_peers[axis] = size > 1
            self._share[axis] = np.where(size > inner, self.batch.stack.network, 1.0)
        return self._groups[axis]

    def time(self, op: Op) -> Column:
        """Seconds of one occurrence of a collective or a send. Operations that share their message array are timed once."""
        key = (op.collective, op.axis, id(op.message_bytes), op.copies)
        if key not in self._times:
            self._times[key] = (self._time(op), op.message_bytes)  # the reference to the array prevents reuse of its id
        return self._times[key][0]

    def algorithm(self, op: Op, at: int = 0) -> str:
        """The program that the library runs for a collective in the plan at index `at`."""
        no_time = np.full(self.batch.n, np.inf)
        n = op.message_bytes
        times = [curve.improve(n, np.sqrt(n), no_time)[at] for curve in self._curves_of(op)]
        name = self._curves_of(op)[int(np.argmin(times))].algorithm
        return "ring" if name == "multi-ring" and self.nodes(op.axis)[at] == 1 else name

    def level(self, axis: str, at: int = 0) -> int:
        """The highest level of links that the groups of an axis use in the plan at index `at`."""
        size = self.batch.size(axis)[at]
        spans = enumerate(self.cluster.spans)
        return next(
            (k for k, span in spans if self.batch.members(axis, span)[at] >= size), len(self.cluster.levels) - 1
        )

    def bytes_by_level(self, op: Op, at: int = 0) -> dict[int, float]:
        """Bytes that one device sends at each level, by the program that the library runs."""
        n = op.message_bytes
        no_time = np.full(self.batch.n, np.inf)
        curve = min(self._curves_of(op), key=lambda curve: float(curve.improve(n, np.sqrt(n), no_time)[at]))
        inside, outside = curve.shares(int(curve.group.of_plan[at]))
        size = float(self.batch.full(n)[at])
        by_level = {0: inside * size}
        if outside:
            level = self.level(op.axis, at)
            by_level[level] = by_level.get(level, 0.0) + outside * size
        return by_level

    def nodes(self, axis: str) -> Column:
        """Number of nodes that a group of an axis spans, by plan."""
        group = self.group(axis)
        return group.nodes[group.of_plan]

    def distinct_share(self, op: Op) -> Column:
        """The share of the copies of tokens that a deduplicated dispatch sends: one to each distinct unit (node, or rank inside one node)
        that has experts of the token. k copies reach U(1 − (1 − 1/U)^k) of U units.

        U is the number N of units, or fewer if the router keeps K of G groups of experts, in consecutive units. Of s = max(G/N, 1) groups in a unit
        none is kept with probability Π (1 − s/(G − i)) over i < K, so N(1 − Π) units have a group that is kept."""
        nodes, k = self.nodes(op.axis), op.copies
        units = np.where(nodes > 1, np.ceil(nodes), self.batch.size(op.axis))
        router = self.batch.model.router
        if router.groups_kept:
            in_unit = np.maximum(router.groups / units, 1.0)
            missed = math.prod(np.maximum(1 - in_unit / (router.groups - i), 0.0) for i in range(router.groups_kept))
            units = units * (1 - missed)
        return units * (1 - (1 - 1 / np.maximum(units, 1.0)) ** k) / k

    def _curves_of(self, op: Op) -> list[Curve]:
        key = (op.collective, op.axis)
        if key not in self._curves:
            self._curves[key] = curves(self.cluster, OPERATIONS[op.collective], self.group(op.axis))
        return self._curves[key]

    def _time(self, op: Op) -> Column:
        first, *alternatives = self._curves_of(op)
        n = op.message_bytes
        if op.copies > 1 and self.batch.stack.dispatch == "deduplicated":
            n = n * self.distinct_share(op)
        root = np.sqrt(n)
        best = first.time(n, root) * self._has_peers[op.axis]
        for curve in alternatives:
            best = curve.improve(n, root, best)
        return best / self._share[op.axis]
