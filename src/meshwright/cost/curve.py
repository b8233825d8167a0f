"""The seconds of one collective program as a function of the buffer size, on the groups of an axis.

    t = call + formula(n; hop, reached rates) + 2√(ℓ·w)        w: the formula's bandwidth term, without latency

`programs.collectives.formulas` has the formulas, each equal to the walk of its program; `cost.library` has the measured corrections. All values
are arrays over the distinct group shapes, or over a batch of plans.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Any, Literal

import numpy as np

from meshwright.cost import library
from meshwright.cost.group import Group
from meshwright.describe.cluster import Cluster
from meshwright.errors import unknown
from meshwright.lower.program import Array, Column, present
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


class Curve:
    """One program on the groups of an axis: seconds as a function of the buffer size, with terms that do not depend on the size."""

    def __init__(self, cluster: Cluster, operation: str, algorithm: str, group: Group) -> None:
        self.operation, self.algorithm, self.group = operation, algorithm, group
        self.across = group.nodes > 1
        self.crosses = present(self.across)
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
        self.outer: tuple[Column, Column] | None = None
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
        self.outer_begin: Column | None = None
        if self.outer is not None:
            self.outer_begin, self.outer_per_byte = (self.outer[0] + self.call)[at], self.outer[1][at]
        self.per_root = None if self.chunks is None else self.chunks[at]

    def terms(self) -> Any:
        """The terms of the formula that do not depend on the size."""
        return FORMULAS[self.operation, self.algorithm][1](shape_of(self.group))

    def walked(self, n: Array) -> Column:
        """Seconds of the program on the library's links."""
        inside = self.start + n * self.byte
        return inside if self.outer is None else np.maximum(inside, self.outer[0] + n * self.outer[1])

    def time(self, n: Array, root: Array) -> Column:
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
    def available(self) -> Column | Literal[True]:
        """For which shapes the library has the program; `True` for all shapes."""
        return True

    def improve(self, n: Array, root: Array, best: Column) -> Column:
        """Lower `best` to the time of this program, for the plans whose library has it."""
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

    def segments(self, n: Array) -> Column:
        return double_tree_segments(n, shape_of(self.group), self.rates)

    def walked(self, n: Array) -> Column:
        return FORMULAS[self.operation, self.algorithm][1](shape_of(self.group, self.segments(n))).seconds(
            n, self.rates
        )

    @cached_property
    def available(self) -> Column:
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

    def at(self, shapes: Column) -> SwitchCurve:
        """This curve with one row for each index in `shapes`."""
        part = copy(self)
        part.group = self.group._replace(**{name: getattr(self.group, name)[shapes] for name in Group._fields[:5]})
        part.rates = Rates(*(x[shapes] if np.ndim(x) else x for x in self.rates))
        part.call, part.wire = self.call[shapes], self.wire[shapes]
        return part

    def segments(self, n: Array) -> Column:
        return switch_segments(n, shape_of(self.group), self.rates, self.fabric)

    def walked(self, n: Array) -> Column:
        shape = shape_of(self.group, self.segments(n))
        return FORMULAS[self.operation, self.algorithm][1](shape).seconds(n, self.rates)

    def time(self, n: Array, root: Array) -> Column:
        """Seconds of one call, with one size per shape."""
        return self.call + self.walked(n) + library.chunking(self.cluster, self.wire) * root

    @cached_property
    def available(self) -> Column:
        node = self.group.per_node > 2
        if self.fabric:
            return node & self.across
        return reduces_in_switches(self.group)

    @cached_property
    def lower_bound(self) -> tuple[Column, Column]:
        """Lower bounds by plan: seconds of a call and seconds per byte."""
        at = self.group.of_plan
        return np.where(self.available, self.call, np.inf)[at], self.wire[at]

    def improve(self, n: Array, root: Array, best: Column) -> Column:
        """As in `Curve`. The formula is evaluated only for plans whose lower bound (bandwidth without latency) is below `best`."""
        of_plan = self.group.of_plan
        if np.ndim(n) == 0:  # one size for all plans: compute per shape
            return np.minimum(best, np.where(self.available, self.time(n, root), np.inf)[of_plan])
        rows = np.flatnonzero((self.lower_bound[0] + n * self.lower_bound[1] < best) & (n > 0))
        if len(rows) == 0:
            return best
        best = best.copy()
        best[rows] = np.minimum(best[rows], self.at(of_plan[rows]).time(np.asarray(n)[rows], np.asarray(root)[rows]))
        return best


def reduces_in_switches(group: Group) -> Column:
    """For which shapes NVLS runs: more than two ranks per node, on a power of two of nodes."""
    rounds = np.log2(group.nodes)
    return (group.per_node > 2) & (rounds == np.floor(rounds))


CURVES: dict[str, type[Curve]] = {"rail-double-tree": TreeCurve, **dict.fromkeys(library.SWITCHED, SwitchCurve)}


def shape_of(group: Group, segments: Array = 1.0) -> Shape:
    return Shape(group.ranks, segments, group.nodes, group.per_node)


def rates_of(cluster: Cluster, operation: str, algorithm: str, group: Group) -> Rates:
    """Seconds per hop and per byte, inside nodes and between nodes, as the library reaches them."""
    share = library.in_switch(cluster, algorithm)
    inside = cluster.device_bandwidth(0) * share[0] * library.small_group(cluster, operation, group.per_node)
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
    candidates = [CURVES.get(name, Curve)(cluster, operation, name, group) for name in names]
    return [curve for curve in candidates if present(curve.available)]
