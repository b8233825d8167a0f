"""The time of a collective: the closed formula of the program that a library runs, on the rates it reaches.

    t = call + formula(n; hop, reached rates) + 2√(ℓ·w)        w: the formula's bytes alone, without latency

`programs.collectives.formulas` has the formulas, each equal to the walk of its program; `cost.library` says which programs a library has, which of
them it runs, and the measured shares on top. So the price of an all-reduce is the smallest over ring, tree and in-switch reduction, each on
the group's own shape: P ranks as N nodes of g. Everything is an array over a batch of plans.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.cost import library
from meshwright.describe.cluster import Cluster
from meshwright.errors import unknown
from meshwright.lower.batch import Batch
from meshwright.lower.op import Array, Op
from meshwright.programs.collectives.formulas import FORMULAS, Rates, Shape, switch_segments, switch_shards, switch_wire

OPERATIONS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
              "all_to_all": "all-to-all", "send": "point-to-point"}  # fmt: skip


MOST_KEYS = 2**20  # entries of the table in which shapes are looked up; beyond it they are found by sorting


class Group(NamedTuple):
    """The different shapes of an axis's groups: P ranks as N nodes of g, the bytes/s that a device has between nodes, and which shape
    each plan of the batch has."""

    ranks: Array
    per_node: Array
    nodes: Array
    outside: Array
    of_plan: Array

    @classmethod
    def of(cls, ranks: Array, per_node: Array, level: Array, rates: list[float]) -> Group:
        """Plans have few shapes among them, so constants are worked out by shape and looked up by plan.

        `level` is the highest level that each plan's groups span, of those above the node; `rates` the bytes/s of a device there.
        """
        key = ((ranks * (np.floor(per_node.max()) + 1) + per_node) * len(rates) + level).astype(np.int64)
        if key.max() < MOST_KEYS and all((np.floor(x) == x).all() for x in (ranks, per_node)):
            first = np.full(int(key.max()) + 1, -1)  # of each key, a plan that has it
            first[key] = np.arange(len(key))
            found = np.flatnonzero(first >= 0)
            place = np.empty_like(first)
            place[found] = np.arange(len(found))
            first, of_plan = first[found], place[key]
        else:
            columns = np.stack(np.broadcast_arrays(ranks, per_node, level))
            _, first, of_plan = np.unique(columns, axis=1, return_index=True, return_inverse=True)
            of_plan = of_plan.ravel()
        ranks, per_node = ranks[first], per_node[first]
        outside = np.array(rates)[np.broadcast_to(level, key.shape)[first]]
        return cls(ranks, per_node, ranks / per_node, outside, of_plan)


class Choice(NamedTuple):
    """What a library runs for one call: the program, its seconds on the links, and with everything that is measured on top."""

    algorithm: str
    segments: int
    walked: float
    seconds: float


class Curve:
    """One program of constant terms on the groups of an axis: seconds as a function of the buffer's bytes."""

    def __init__(self, cluster: Cluster, operation: str, algorithm: str, group: Group) -> None:
        self.operation, self.algorithm, self.group = operation, algorithm, group
        self.across = group.nodes > 1
        self.crosses = bool(np.any(self.across))
        self.rates = rates_of(cluster, operation, algorithm, group)
        self.call = np.where(self.across, library.CALL_ACROSS, library.CALL)
        if operation == "all-to-all":
            self.call = self.call + library.PEER * group.ranks
        self.fit()

    def fit(self) -> None:
        """Fold the rates, and the call, into the formula's terms."""
        terms = FORMULAS[self.operation, self.algorithm][1](shape_of(self.group))
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
        # 2√(ℓ·n·wire) as a multiple of √n; a send is not cut
        self.chunks = library.chunking(self.wire) if self.operation != "point-to-point" else None
        # by plan: seconds before the first byte and a byte, inside nodes and between them, and of √n
        at = self.group.of_plan
        self.begin, self.per_byte = (self.start + self.call)[at], np.broadcast_to(self.byte, self.call.shape)[at]
        self.outer_begin: Array = None
        if self.outer is not None:
            self.outer_begin, self.outer_per_byte = (self.outer[0] + self.call)[at], self.outer[1][at]
        self.per_root = None if self.chunks is None else self.chunks[at]

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
        """Bytes that a device sends inside its node and through its card, for each byte of the buffer."""
        rates = (np.broadcast_to(rate, self.call.shape)[shape] for rate in (self.rates.beta, self.rates.outer_beta))
        outer = self.outer_wire if self.crosses else 0.0
        wires = (np.broadcast_to(wire, self.call.shape)[shape] for wire in (self.inner_wire, outer))
        inside, outside = (float(wire / rate) for wire, rate in zip(wires, rates, strict=True))
        return inside, outside

    @cached_property
    def available(self) -> Array:
        """Where the library would consider the program; `True` for everywhere."""
        return self.across if self.algorithm == "rail-tree" else True

    def improve(self, n: Array, root: Array, best: Array) -> Array:
        """The smaller of `best` and this program, where the library would consider it."""
        seconds = self.time(n, root)
        if self.available is not True:
            seconds = np.where(self.available[self.group.of_plan], seconds, np.inf)
        return np.minimum(best, seconds)


class SwitchCurve(Curve):
    """A program whose switches reduce: the number of its segments, and with it its terms, depend on the size."""

    def fit(self) -> None:
        self.fabric = self.algorithm == "sharp"
        shape = shape_of(self.group)
        self.wire = switch_wire(1.0, shape, self.rates, self.fabric)
        self.inner_wire = (1 + 1 / self.group.per_node) * self.rates.beta
        self.outer_wire = switch_shards(self.group.nodes, self.fabric) / self.group.per_node * self.rates.outer_beta

    def at(self, shapes: Array) -> SwitchCurve:
        """The same with a row for each of `shapes`."""
        part = copy(self)
        part.group = self.group._replace(**{name: getattr(self.group, name)[shapes] for name in Group._fields[:4]})
        part.rates = Rates(*(x[shapes] if np.ndim(x) else x for x in self.rates))
        part.call, part.wire = self.call[shapes], self.wire[shapes]
        return part

    def segments(self, n: Array) -> Array:
        return switch_segments(n, shape_of(self.group), self.rates, self.fabric)

    def walked(self, n: Array) -> Array:
        shape = shape_of(self.group, self.segments(n))
        return FORMULAS[self.operation, self.algorithm][1](shape).seconds(n, self.rates)

    def time(self, n: Array, root: Array) -> Array:
        """Of one size for each shape."""
        return self.call + self.walked(n) + library.chunking(self.wire) * root

    @cached_property
    def available(self) -> Array:
        node = self.group.per_node > 2
        if self.fabric:
            return node & self.across
        rounds = np.log2(self.group.nodes)
        return node & (rounds == np.floor(rounds))

    @cached_property
    def least(self) -> tuple[Array, Array]:
        """By plan: the seconds that a call takes at least, and a byte."""
        at = self.group.of_plan
        return np.where(self.available, self.call, np.inf)[at], self.wire[at]

    def improve(self, n: Array, root: Array, best: Array) -> Array:
        """Only where there are bytes and they alone, without any latency, would be faster: elsewhere the formula need not be worked
        out."""
        of_plan = self.group.of_plan
        if np.ndim(n) == 0:  # one size: once for each shape
            return np.minimum(best, np.where(self.available, self.time(n, root), np.inf)[of_plan])
        rows = np.flatnonzero((self.least[0] + n * self.least[1] < best) & (n > 0))
        if len(rows) == 0:
            return best
        best = best.copy()
        best[rows] = np.minimum(best[rows], self.at(of_plan[rows]).time(n[rows], root[rows]))
        return best


def shape_of(group: Group, segments: Array = 1.0) -> Shape:
    return Shape(group.ranks, segments, group.nodes, group.per_node)


def rates_of(cluster: Cluster, operation: str, algorithm: str, group: Group) -> Rates:
    """Hops and seconds a byte inside nodes and between them, as the library reaches them."""
    share = library.in_switch(cluster, algorithm)
    inside = cluster.device_bandwidth(0) * share[0]
    if operation != "point-to-point":
        inside = inside * library.small_group(group.per_node)
    hops = [cluster.levels[min(k, len(cluster.levels) - 1)].link.library_hop for k in (0, 1)]
    return Rates(hops[0], 1 / inside, hops[1], 1 / (group.outside * share[1]))


def curves(cluster: Cluster, operation: str, group: Group) -> list[Curve]:
    """Every program that the cluster's library might run for an operation on these groups."""
    names = library.algorithms(cluster, operation)
    if not names:
        raise unknown("MW-PROG-005", "collective of a library", operation, sorted(library.RINGS | {"all-reduce": ()}))
    found = [(SwitchCurve if name in library.SWITCHED else Curve)(cluster, operation, name, group) for name in names]
    return [curve for curve in found if np.any(curve.available)]


def choose(cluster: Cluster, operation: str, n: float, ranks: int) -> Choice:
    """What the library runs for n bytes over the first `ranks` devices of a cluster: see `cost.library` for the rule."""
    nodes = -(-ranks // cluster.node_size)
    outside = cluster.device_bandwidth(cluster.level_between(0, ranks - 1))
    group = Group.of(np.array([float(ranks)]), np.array([ranks / nodes]), np.zeros(1, dtype=np.int64), [outside])
    size, root = np.array([float(n)]), np.sqrt([float(n)])
    found = curves(cluster, operation, group)
    best = min(found, key=lambda curve: float(curve.time(size, root)[0]))
    segments = int(best.segments(size)[0]) if isinstance(best, SwitchCurve) else 1
    return Choice(best.algorithm, segments, float(best.walked(size)[0]), float(best.time(size, root)[0]))


class Network:
    """The library's collectives on a cluster, for a batch of plans."""

    def __init__(self, cluster: Cluster, batch: Batch) -> None:
        self.cluster, self.batch = cluster, batch
        self._groups: dict[str, Group] = {}
        self._several: dict[str, Array] = {}
        self._curves: dict[tuple[str, str], list[Curve]] = {}
        self._times: dict[tuple[str, str, int], tuple[Array, Array]] = {}
        top = len(cluster.levels) - 1
        self.outside = [cluster.device_bandwidth(k) for k in range(1, top + 1)] or [cluster.device_bandwidth(0)]

    def group(self, axis: str) -> Group:
        """The shape of an axis's groups; the bandwidth between nodes is that of the highest level they span."""
        if axis not in self._groups:
            size = self.batch.size(axis)
            inner = np.minimum(self.batch.members(axis, self.cluster.node_size), size)
            level: Array = np.zeros(1, dtype=np.int64)
            for k in range(1, len(self.cluster.levels) - 1):
                level = np.maximum(level, k * (self.batch.members(axis, self.cluster.spans[k]) < size))
            self._groups[axis] = Group.of(size, inner, level, self.outside)
            self._several[axis] = size > 1
        return self._groups[axis]

    def time(self, op: Op) -> Array:
        """Seconds of one occurrence of a collective or a send. Operations that share their message array are timed once."""
        key = (op.collective, op.axis, id(op.message_bytes))
        if key not in self._times:
            self._times[key] = (self._time(op), op.message_bytes)  # holding the array keeps its id from being reused
        return self._times[key][0]

    def algorithm(self, op: Op, at: int = 0) -> str:
        """The program that the library runs for a collective, of one plan of the batch."""
        none = np.full(self.batch.n, np.inf)
        n = op.message_bytes
        times = [curve.improve(n, np.sqrt(n), none)[at] for curve in self._of(op)]
        name = self._of(op)[int(np.argmin(times))].algorithm
        return "ring" if name == "multi-ring" and self.nodes(op.axis)[at] == 1 else name

    def level(self, axis: str, at: int = 0) -> int:
        """The highest level of links that the groups of an axis use, of one plan of the batch."""
        size = self.batch.size(axis)[at]
        spans = enumerate(self.cluster.spans)
        return next(
            (k for k, span in spans if self.batch.members(axis, span)[at] >= size), len(self.cluster.levels) - 1
        )

    def bytes_by_level(self, op: Op, at: int = 0) -> dict[int, float]:
        """Bytes that one device sends through its links in the node and through its card, by the program that runs."""
        n = op.message_bytes
        none = np.full(self.batch.n, np.inf)
        curve = min(self._of(op), key=lambda curve: float(curve.improve(n, np.sqrt(n), none)[at]))
        inside, outside = curve.shares(int(curve.group.of_plan[at]))
        size = float(np.broadcast_to(n, self.batch.n)[at])
        found = {0: inside * size}
        if outside:
            level = self.level(op.axis, at)
            found[level] = found.get(level, 0.0) + outside * size
        return found

    def nodes(self, axis: str) -> Array:
        """Nodes that a group of an axis spans."""
        group = self.group(axis)
        return group.nodes[group.of_plan]

    def _of(self, op: Op) -> list[Curve]:
        key = (op.collective, op.axis)
        if key not in self._curves:
            self._curves[key] = curves(self.cluster, OPERATIONS[op.collective], self.group(op.axis))
        return self._curves[key]

    def _time(self, op: Op) -> Array:
        first, *others = self._of(op)
        n, root = op.message_bytes, np.sqrt(op.message_bytes)
        best = first.time(n, root) * self._several[op.axis]
        for curve in others:
            best = curve.improve(n, root, best)
        return best
