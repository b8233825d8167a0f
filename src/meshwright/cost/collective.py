"""The time of a collective: the closed formula of the program that the library runs, with the rates that it reaches.

    t = call + formula(n; hop, reached rates) + 2√(ℓ·w)        w: the formula's bandwidth term, without latency

`programs.collectives.formulas` has the formulas, each equal to the walk of its program. `cost.library` lists the programs of each library, the rule
by which it chooses one, and the measured corrections. So the time of an all-reduce is the smallest of ring, tree and in-switch reduction, each for
the shape of the group: P ranks on N nodes, g ranks per node. All values are arrays over a batch of plans.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meshwright.cost import library
from meshwright.describe.cluster import Cluster
from meshwright.errors import unknown
from meshwright.lower.batch import Batch
from meshwright.lower.op import Array, Op
from meshwright.programs.collectives.formulas import (
    FORMULAS,
    Rates,
    Shape,
    double_tree_fill,
    double_tree_segments,
    switch_segments,
    switch_shards,
    switch_wire,
)

OPERATIONS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "send": "point-to-point",
}

LARGEST_TABLE = 2**20  # entries of the lookup table of shapes; with more keys, sorting finds the shapes


class Group(NamedTuple):
    """The distinct group shapes of an axis: P ranks on N nodes, g per node, and the bytes/s of a device between nodes, while all devices send
    (`outside`) and in a ring or tree (`ring_outside`). `of_plan` is the index of the shape of each plan of the batch."""

    ranks: Array
    per_node: Array
    nodes: Array
    outside: Array
    ring_outside: Array
    of_plan: Array

    @classmethod
    def of(
        cls, ranks: Array, per_node: Array, level: Array, rates: list[float], ring_rates: Array | None = None
    ) -> Group:
        """Find the distinct shapes. Many plans share a shape, so constants are computed per shape and looked up per plan.

        `level` is the highest level above the node that the groups of each plan span; `rates` are the bytes/s of a device at these levels.
        `ring_rates` are the bytes/s of a device in a ring, by plan, where they are not those of the level.
        """
        if ring_rates is not None:
            return cls._of_rings(ranks, per_node, level, rates, ring_rates)
        key = ((ranks * (np.floor(per_node.max()) + 1) + per_node) * len(rates) + level).astype(np.int64)
        if key.max() < LARGEST_TABLE and all((np.floor(x) == x).all() for x in (ranks, per_node)):
            first = np.full(int(key.max()) + 1, -1)  # for each key, the index of a plan with this key
            first[key] = np.arange(len(key))
            found = np.flatnonzero(first >= 0)
            shape_index = np.empty_like(first)
            shape_index[found] = np.arange(len(found))
            first, of_plan = first[found], shape_index[key]
        else:
            columns = np.stack(np.broadcast_arrays(ranks, per_node, level))
            _, first, of_plan = np.unique(columns, axis=1, return_index=True, return_inverse=True)
            of_plan = of_plan.ravel()
        ranks, per_node = ranks[first], per_node[first]
        outside = np.array(rates)[np.broadcast_to(level, key.shape)[first]]
        return cls(ranks, per_node, ranks / per_node, outside, outside, of_plan)

    @classmethod
    def _of_rings(cls, ranks: Array, per_node: Array, level: Array, rates: list[float], ring_rates: Array) -> Group:
        columns = np.stack(np.broadcast_arrays(ranks, per_node, np.array(rates)[level], ring_rates))
        found, of_plan = np.unique(columns, axis=1, return_inverse=True)
        return cls(found[0], found[1], found[0] / found[1], found[2], found[3], of_plan.ravel())


class Choice(NamedTuple):
    """The program that a library runs for one call, its seconds on the links, and the seconds of the call with measured corrections."""

    algorithm: str
    segments: int
    walked: float
    seconds: float


class Curve:
    """One program on the groups of an axis: seconds as a function of the buffer size, with terms that do not depend on the size."""

    def __init__(self, cluster: Cluster, operation: str, algorithm: str, group: Group) -> None:
        self.operation, self.algorithm, self.group = operation, algorithm, group
        self.across = group.nodes > 1
        self.crosses = bool(np.any(self.across))
        self.cluster, added = cluster, cluster.collectives
        self.rates = rates_of(cluster, operation, algorithm, group)
        own = [added.factor(operation, across).call for across in (False, True)]
        self.call = np.where(self.across, added.call_across + own[1], added.call + own[0])
        if operation == "all-to-all":
            self.call = self.call + added.peer * group.ranks
        self.fit()

    def fit(self) -> None:
        """Multiply the terms of the formula by the rates and add the call."""
        terms = self.terms()
        start, byte = terms.alpha * self.rates.alpha, terms.beta * self.rates.beta
        self.start, self.byte, self.wire = start, byte, byte
        self.outer: tuple[Array, Array] | None = None
        self.inner_wire, self.outer_wire = byte, terms.outer_beta * self.rates.outer_beta
        if self.crosses:
            outer = terms.outer_alpha * self.rates.outer_alpha, terms.outer_beta * self.rates.outer_beta
            if terms.together:
                self.outer, self.wire = outer, np.maximum(byte, outer[1])
            else:
                self.start, self.byte = start + outer[0], byte + outer[1]
                self.wire = self.byte
        # 2√(ℓ·n·wire) as a multiple of √n; a send is not pipelined in chunks
        self.chunks = library.chunking(self.cluster, self.wire) if self.operation != "point-to-point" else None
        # by plan: start-up seconds and seconds per byte, inside nodes and between nodes, and seconds per √n
        at = self.group.of_plan
        self.begin, self.per_byte = (self.start + self.call)[at], np.broadcast_to(self.byte, self.call.shape)[at]
        self.outer_begin: Array = None
        if self.outer is not None:
            self.outer_begin, self.outer_per_byte = (self.outer[0] + self.call)[at], self.outer[1][at]
        self.per_root = None if self.chunks is None else self.chunks[at]

    def terms(self) -> Any:
        """The terms of the formula that do not depend on the size."""
        return FORMULAS[self.operation, self.algorithm][1](shape_of(self.group))

    def walked(self, n: Array) -> Array:
        """Seconds of the program on the library's links."""
        inside = self.start + n * self.byte
        return inside if self.outer is None else np.maximum(inside, self.outer[0] + n * self.outer[1])

    def time(self, n: Array, root: Array) -> Array:
        """Seconds of one call of n bytes, whose square root is `root`."""
        seconds = self.begin + n * self.per_byte
        if self.outer_begin is not None:
            seconds = np.maximum(seconds, self.outer_begin + n * self.outer_per_byte)
        return seconds if self.per_root is None else seconds + self.per_root * root

    def shares(self, shape: int) -> tuple[float, float]:
        """Bytes that a device sends inside its node and through its network card, per byte of the buffer."""
        rates = (np.broadcast_to(rate, self.call.shape)[shape] for rate in (self.rates.beta, self.rates.outer_beta))
        outer = self.outer_wire if self.crosses else 0.0
        wires = (np.broadcast_to(wire, self.call.shape)[shape] for wire in (self.inner_wire, outer))
        inside, outside = (float(wire / rate) for wire, rate in zip(wires, rates, strict=True))
        return inside, outside

    @cached_property
    def available(self) -> Array:
        """For which shapes the library has the program; `True` for all shapes."""
        return True

    def improve(self, n: Array, root: Array, best: Array) -> Array:
        """The minimum of `best` and the time of this program, for the plans for which the library has it."""
        seconds = self.time(n, root)
        if self.available is not True:
            seconds = np.where(self.available[self.group.of_plan], seconds, np.inf)
        return np.minimum(best, seconds)


class TreeCurve(Curve):
    """NCCL's tree between nodes. Its number of segments depends on the size; with the best number (a real number, at least one)

        2(c + 2)α' + 2n/g·β' + 4√(c·α'·n/g·β')        c = F − 2 (`programs.collectives.rails`)

    so the formula has a term in √n, as pipelining in chunks has.
    """

    def terms(self) -> Any:
        return super().terms()._replace(outer_beta=2 * self.across / self.group.per_node)

    def fit(self) -> None:
        super().fit()
        rates, shape = self.rates, shape_of(self.group)
        fill = double_tree_fill(shape.nodes) * rates.outer_alpha * rates.outer_beta / shape.per_node
        assert self.chunks is not None
        self.per_root = (self.chunks + 4 * np.sqrt(fill) * self.across)[self.group.of_plan]

    def segments(self, n: Array) -> Array:
        return double_tree_segments(n, shape_of(self.group), self.rates)

    def walked(self, n: Array) -> Array:
        return FORMULAS[self.operation, self.algorithm][1](shape_of(self.group, self.segments(n))).seconds(
            n, self.rates
        )

    @cached_property
    def available(self) -> Array:
        if not library.runs_on(self.cluster, "nvls"):
            return self.across
        return self.across & ~reduces_in_switches(self.group)


class SwitchCurve(Curve):
    """A program with reducing switches. Its number of segments depends on the size, and so do its terms."""

    def fit(self) -> None:
        self.fabric = self.algorithm == "sharp"
        shape = shape_of(self.group)
        self.wire = switch_wire(1.0, shape, self.rates, self.fabric)
        self.inner_wire = (1 + 1 / self.group.per_node) * self.rates.beta
        self.outer_wire = switch_shards(self.group.nodes, self.fabric) / self.group.per_node * self.rates.outer_beta

    def at(self, shapes: Array) -> SwitchCurve:
        """This curve with one row for each index in `shapes`."""
        part = copy(self)
        part.group = self.group._replace(**{name: getattr(self.group, name)[shapes] for name in Group._fields[:5]})
        part.rates = Rates(*(x[shapes] if np.ndim(x) else x for x in self.rates))
        part.call, part.wire = self.call[shapes], self.wire[shapes]
        return part

    def segments(self, n: Array) -> Array:
        return switch_segments(n, shape_of(self.group), self.rates, self.fabric)

    def walked(self, n: Array) -> Array:
        shape = shape_of(self.group, self.segments(n))
        return FORMULAS[self.operation, self.algorithm][1](shape).seconds(n, self.rates)

    def time(self, n: Array, root: Array) -> Array:
        """Seconds of one call, with one size per shape."""
        return self.call + self.walked(n) + library.chunking(self.cluster, self.wire) * root

    @cached_property
    def available(self) -> Array:
        node = self.group.per_node > 2
        if self.fabric:
            return node & self.across
        return reduces_in_switches(self.group)

    @cached_property
    def lower_bound(self) -> tuple[Array, Array]:
        """Lower bounds by plan: seconds of a call and seconds per byte."""
        at = self.group.of_plan
        return np.where(self.available, self.call, np.inf)[at], self.wire[at]

    def improve(self, n: Array, root: Array, best: Array) -> Array:
        """As in `Curve`. The formula is evaluated only for plans whose lower bound (bandwidth without latency) is below `best`."""
        of_plan = self.group.of_plan
        if np.ndim(n) == 0:  # one size for all plans: compute per shape
            return np.minimum(best, np.where(self.available, self.time(n, root), np.inf)[of_plan])
        rows = np.flatnonzero((self.lower_bound[0] + n * self.lower_bound[1] < best) & (n > 0))
        if len(rows) == 0:
            return best
        best = best.copy()
        best[rows] = np.minimum(best[rows], self.at(of_plan[rows]).time(n[rows], root[rows]))
        return best


def reduces_in_switches(group: Group) -> Array:
    """For which shapes NVLS runs: more than two ranks per node, on a power of two of nodes."""
    rounds = np.log2(group.nodes)
    return (group.per_node > 2) & (rounds == np.floor(rounds))


def ring_rates(cluster: Cluster, size: Array, per_node: Array, members: Callable[[int], Array]) -> Array | None:
    """Bytes/s of a device between nodes in a ring or tree; None if no level is slower than the one below it.

    A ring visits every unit of a level once. Of the m ranks of a group in a unit, g on each node, only the g cards of one node send to another
    unit. So the uplinks of a level, of which each device gets B_k while all send, leave B_k·m/g to each card: min(B₁, B_k·m/g). `members` are
    the ranks of a group in a unit of this many devices.
    """
    rates = [cluster.device_bandwidth(k) for k in range(1, len(cluster.levels))]
    if len(set(rates)) < 2:
        return None
    found = np.full(np.shape(size), rates[0])
    for rate, span in zip(rates[1:], cluster.spans[1:], strict=False):
        inside = members(span)
        found = np.where(inside < size, np.minimum(found, rate * inside / per_node), found)
    return found


CURVES: dict[str, type[Curve]] = {"rail-double-tree": TreeCurve, **dict.fromkeys(library.SWITCHED, SwitchCurve)}


def shape_of(group: Group, segments: Array = 1.0) -> Shape:
    return Shape(group.ranks, segments, group.nodes, group.per_node)


def rates_of(cluster: Cluster, operation: str, algorithm: str, group: Group) -> Rates:
    """Seconds per hop and per byte, inside nodes and between nodes, as the library reaches them."""
    share = library.in_switch(cluster, algorithm)
    inside = cluster.device_bandwidth(0) * share[0]
    if operation != "point-to-point":
        inside = inside * library.small_group(cluster, group.per_node)
    factors = [cluster.collectives.factor(operation, across=k > 0) for k in (0, 1)]
    hops = [cluster.levels[min(k, len(cluster.levels) - 1)].link.library_hop * factors[k].latency for k in (0, 1)]
    outside = group.outside if operation in ("point-to-point", "all-to-all") else group.ring_outside
    if operation == "point-to-point" and len(cluster.levels) > 1:
        # Ranks send to their neighbours in the group: of several on one node only one sends to another node.
        outside = np.minimum(outside * group.per_node, max(cluster.card_bandwidth, float(np.max(outside))))
    return Rates(hops[0], factors[0].bytes / inside, hops[1], factors[1].bytes / (outside * share[1]))


def curves(cluster: Cluster, operation: str, group: Group) -> list[Curve]:
    """All programs that the cluster's library can run for an operation on these groups."""
    names = library.algorithms(cluster, operation)
    if not names:
        raise unknown("MW-PROG-005", "collective of a library", operation, sorted(library.RINGS | {"all-reduce": ()}))
    found = [CURVES.get(name, Curve)(cluster, operation, name, group) for name in names]
    return [curve for curve in found if np.any(curve.available)]


def choose(cluster: Cluster, operation: str, n: float, ranks: int) -> Choice:
    """The program that the library runs for n bytes on the first `ranks` devices of a cluster. `cost.library` explains the rule."""
    nodes = -(-ranks // cluster.node_size)
    top = cluster.level_between(0, ranks - 1)
    size, per_node, level = np.array([float(ranks)]), np.array([ranks / nodes]), np.zeros(1, dtype=np.int64)
    rings = ring_rates(cluster, size, per_node, lambda unit: np.minimum(size, unit))
    group = Group.of(size, per_node, level, [cluster.device_bandwidth(top)], rings)
    size, root = np.array([float(n)]), np.sqrt([float(n)])
    found = curves(cluster, operation, group)
    best = min(found, key=lambda curve: float(curve.time(size, root)[0]))
    segments = int(best.segments(size)[0]) if isinstance(best, SwitchCurve | TreeCurve) else 1
    return Choice(best.algorithm, segments, float(best.walked(size)[0]), float(best.time(size, root)[0]))


class Network:
    """Times of the library's collectives on a cluster, for a batch of plans, at the stack's share of the library's rates."""

    def __init__(self, cluster: Cluster, batch: Batch) -> None:
        self.cluster, self.batch = cluster, batch
        self._groups: dict[str, Group] = {}
        self._has_peers: dict[str, Array] = {}
        self._curves: dict[tuple[str, str], list[Curve]] = {}
        self._times: dict[tuple[str, str, int, float], tuple[Array, Array]] = {}
        top = len(cluster.levels) - 1
        self.outside = [cluster.device_bandwidth(k) for k in range(1, top + 1)] or [cluster.device_bandwidth(0)]

    def group(self, axis: str) -> Group:
        """The group shapes of an axis. The bandwidth between nodes is that of the highest level that the groups span."""
        if axis not in self._groups:
            size = self.batch.size(axis)
            inner = np.minimum(self.batch.members(axis, self.cluster.node_size), size)
            level: Array = np.zeros(1, dtype=np.int64)
            for k in range(1, len(self.cluster.levels) - 1):
                level = np.maximum(level, k * (self.batch.members(axis, self.cluster.spans[k]) < size))
            rings = ring_rates(self.cluster, size, inner, lambda unit: self.batch.members(axis, unit))
            self._groups[axis] = Group.of(size, inner, level, self.outside, rings)
            self._has_peers[axis] = size > 1
        return self._groups[axis]

    def time(self, op: Op) -> Array:
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
        size = float(np.broadcast_to(n, self.batch.n)[at])
        found = {0: inside * size}
        if outside:
            level = self.level(op.axis, at)
            found[level] = found.get(level, 0.0) + outside * size
        return found

    def nodes(self, axis: str) -> Array:
        """Number of nodes that a group of an axis spans, by plan."""
        group = self.group(axis)
        return group.nodes[group.of_plan]

    def distinct_share(self, op: Op) -> Array:
        """The share of the copies of tokens that a deduplicated dispatch sends: one to each distinct unit (node, or rank inside one node)
        that has experts of the token. k copies reach N(1 − (1 − 1/N)^k) of N units."""
        nodes, k = self.nodes(op.axis), op.copies
        units = np.where(nodes > 1, np.ceil(nodes), self.batch.size(op.axis))
        return units * (1 - (1 - 1 / np.maximum(units, 1.0)) ** k) / k

    def _curves_of(self, op: Op) -> list[Curve]:
        key = (op.collective, op.axis)
        if key not in self._curves:
            self._curves[key] = curves(self.cluster, OPERATIONS[op.collective], self.group(op.axis))
        return self._curves[key]

    def _time(self, op: Op) -> Array:
        first, *alternatives = self._curves_of(op)
        n = op.message_bytes
        if op.copies > 1 and self.batch.stack.dispatch == "deduplicated":
            n = n * self.distinct_share(op)
        root = np.sqrt(n)
        best = first.time(n, root) * self._has_peers[op.axis]
        for curve in alternatives:
            best = curve.improve(n, root, best)
        return best / self.batch.stack.network
