"""Closed-form cost of the algorithms on a uniform network: T = a·α + b·nβ + c·nγ.

The time is linear in three constants: α, the latency of a message; β = 1/bandwidth, seconds per byte; γ, seconds to add
one byte. n is **always the full, unsharded buffer**: the input of an all-reduce, the output of an all-gather, the input
of a reduce-scatter, and all blocks that one rank sends in an all-to-all. (Other texts use n for the shard; their
formulas differ by a factor P.) L = ⌈log₂P⌉.

    operation                algorithm           messages a    buffers sent b        remark
    broadcast, reduce        naive               P−1           P−1
                             binomial            L             L                     not 1: each round sends n bytes
                             chain, k segments   P+k−2         (P+k−2)/k             → 1 for large n
    scatter, gather          naive               P−1           (P−1)/P
                             binomial            L             (P−1)/P
    all-gather,              ring                P−1           (P−1)/P               minimal b
    reduce-scatter           recursive, Bruck    L             (P−1)/P               recursive: P a power of two
                             pairwise            P−1           (P−1)/P               reduce-scatter
    all-reduce               naive               2(P−1)        2(P−1)
                             tree                2L            2L
                             ring                2(P−1)        2(P−1)/P              minimal b
                             halving-doubling    2L            2(P−1)/P              P a power of two, else +2 and +2
                             direct              P             2(P−1)/P
    all-to-all               direct              1             (P−1)/P               one step
                             pairwise            P−1           (P−1)/P
                             Bruck               L             about L/2
    barrier                  dissemination       L             0

The formulas hold for equal chunks, one kind of link, and no shared links; a test checks that the walk then agrees up to
rounding. For a reduction, c is the part of b that is added. Node-aware algorithms have separate terms for the links
inside nodes (α, β) and between nodes (α', β'), with g ranks per node. If both kinds of link work in the same step
(`together`), the step takes as long as the slower link. Those formulas omit γ, because a library adds while it receives.
Ranks, nodes and segments may be arrays: the cost model prices a batch of plans at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from meshwright.describe.cluster import Link
from meshwright.errors import unknown
from meshwright.programs.collectives.double_tree import first_use
from meshwright.programs.collectives.recursive import core_of
from meshwright.programs.collectives.trees import SEGMENTS
from meshwright.programs.collectives.trees import rounds as log

Number = Any  # a number, or an array over a batch of plans
NONE = 0.0  # marks terms that an algorithm does not have


class Rates(NamedTuple):
    """α and β of the links inside nodes and between nodes."""

    alpha: Number
    beta: Number
    outer_alpha: Number
    outer_beta: Number


class Terms(NamedTuple):
    """Coefficients of α, nβ, nγ, and of α' and nβ' between nodes; `together`: both levels overlap, so the time is the maximum."""

    alpha: Number
    beta: Number
    gamma: Number = 0.0
    outer_alpha: Number = NONE
    outer_beta: Number = NONE
    together: bool = False

    def time(self, size: float, link: Link, gamma: float = 0.0, outer: Link | None = None) -> float:
        """Return the seconds for a buffer of `size` bytes."""
        outer = outer or link
        return self.seconds(size, Rates(link.alpha, link.beta, outer.alpha, outer.beta)) + self.gamma * size * gamma

    def seconds(self, size: Number, rates: Rates) -> Number:
        """Return the seconds without γ; the arguments may be arrays."""
        inside = self.alpha * rates.alpha + self.beta * (size * rates.beta)
        if self.outer_alpha is NONE:
            return inside
        outside = self.outer_alpha * rates.outer_alpha + self.outer_beta * size * rates.outer_beta
        return np.maximum(inside, outside) if self.together else inside + outside

    def __add__(self, other: tuple[Any, ...]) -> Terms:
        assert not self.together
        return Terms(*(a + b for a, b in zip(self[:5], other[:5], strict=True)))


class Steps(tuple[Any, ...]):
    """Terms of consecutive steps, each with `together`; their times add up."""

    def time(self, size: float, link: Link, gamma: float = 0.0, outer: Link | None = None) -> float:
        return sum(step.time(size, link, gamma, outer) for step in self)

    def seconds(self, size: Number, rates: Rates) -> Number:
        return sum(step.seconds(size, rates) for step in self)


class Shape(NamedTuple):
    """P ranks in `nodes` nodes of `per_node` ranks, and k segments."""

    ranks: Number
    segments: Number
    nodes: Number
    per_node: Number

    @property
    def share(self) -> Number:
        return (self.ranks - 1) / self.ranks


def terms(operation: str, algorithm: str, ranks: int, *, nodes: int = 1, segments: int = SEGMENTS) -> Terms | Steps:
    """Return the terms of an algorithm; `nodes` (of equal size) affects node-aware algorithms only."""
    if (operation, algorithm) not in FORMULAS:
        known = [a for o, a in FORMULAS if o == operation] or sorted({o for o, _ in FORMULAS})
        raise unknown("MW-PROG-005", f"closed formula of {operation}", algorithm, known)
    if ranks == 1:
        return Terms(0, 0)
    return FORMULAS[operation, algorithm][1](Shape(ranks, segments, nodes, ranks // nodes))


def text(operation: str, algorithm: str) -> str:
    """Return the formula as text; empty if there is none."""
    return FORMULAS.get((operation, algorithm), ("", None))[0]


def _recursive(s: Shape) -> Terms:
    p, extra = core_of(s.ranks)
    blocks = sum(2**k + min(2**k, extra) for k in range(log(p)))
    return Terms(log(p) + 2 * (extra > 0), (blocks + (s.ranks if extra else 0)) / s.ranks)


def _halving_doubling(s: Shape) -> Terms:
    p, extra = core_of(s.ranks)
    share = (p - 1) / p
    core = Terms(2 * log(p), 2 * share, share)
    return core + Terms(2, 2, 1) if extra else core


def _bruck_exchange(s: Shape) -> Terms:
    hops = sum(distance.bit_count() for distance in range(s.ranks))
    return Terms(log(s.ranks), hops / s.ranks)


def _hierarchical(s: Shape) -> Terms:
    g, nodes = s.per_node, s.nodes
    local = Terms(2 * (g - 1), 2 * (g - 1) / g, (g - 1) / g)
    if nodes == 1:
        return local
    between = Terms(0, 0, (nodes - 1) / nodes, 2 * (nodes - 1), 2 * (nodes - 1) / nodes)
    return local + between + Terms(log(g), log(g))


def _two_level(s: Shape) -> Terms:
    return Terms(s.per_node - 1, (s.per_node - 1) / s.per_node, 0, s.nodes - 1, (s.nodes - 1) / s.ranks)


def _direct(s: Shape) -> Terms:
    """All blocks at once: blocks inside the node use its links, the other blocks use the network cards."""
    local, across = s.per_node > 1, s.nodes > 1
    return Terms(1.0 * local, (s.per_node - 1) / s.ranks, 0.0, 1.0 * across, (s.ranks - s.per_node) / s.ranks, True)


def _multi_ring(s: Shape) -> Terms:
    """P−1 steps; in each step g−1 of the g rings stay inside a node and one leaves it. On one node it is a plain ring."""
    across = s.nodes > 1
    inside = np.where(across, (s.per_node - 1) / s.per_node, 1.0)
    steps = s.ranks - 1
    return Terms(steps * (inside > 0), s.share * inside, 0.0, steps * across, s.share * across / s.per_node, True)


def _rail_tree(s: Shape) -> Terms:
    up, between = log2ceil(s.per_node), log2ceil(s.nodes)
    local = (s.per_node - 1) / s.per_node
    return Terms(2 * up, 2 * local, local + between / s.per_node, 2 * between, 2 * between / s.per_node)


def _rail_double_tree(s: Shape) -> Terms:
    up, k = log2ceil(s.per_node), s.segments
    local = (s.per_node - 1) / s.per_node
    steps = (double_tree_fill(s.nodes) + 2 * k) * (s.nodes > 1)
    sent = steps / (2 * k * s.per_node)
    return Terms(2 * up, 2 * local, local + sent, 2 * steps, 2 * sent)


def double_tree_fill(nodes: Number) -> Number:
    """Return F − 2, the steps of a double tree besides two for each segment; F = 2⌈log₂N⌉ is exact or one too many."""
    return 2 * np.maximum(log2ceil(nodes) - 1, 0)


def double_tree_segments(size: Number, s: Shape, rates: Rates) -> Number:
    """Return the best number of segments per tree between nodes: k* = √((F−2)·n/g·β'/α')/2."""
    wire = size / s.per_node * rates.outer_beta
    best = np.rint(np.sqrt(double_tree_fill(s.nodes) * wire / np.maximum(rates.outer_alpha, 1e-12)) / 2)
    return np.clip(best, 1.0, 4096.0)


def switch_stages(nodes: Number, fabric: bool) -> Number:
    """Return the number of steps of one segment: four on the node's switch, plus the steps between nodes."""
    return 4 + (2 * (nodes > 1) if fabric else log2ceil(nodes))


def switch_shards(nodes: Number, fabric: bool) -> Number:
    """Return the number of shards that a rank sends to other nodes per buffer."""
    return 1.0 * (nodes > 1) if fabric else log2ceil(nodes)


def switch_wire(size: Number, s: Shape, rates: Rates, fabric: bool) -> Number:
    """Return the transfer seconds on the busiest link: (1 + 1/g)·nβ inside the node, or the shards between nodes."""
    shards = switch_shards(s.nodes, fabric)
    return size * np.maximum((1 + 1 / s.per_node) * rates.beta, shards / s.per_node * rates.outer_beta)


def switch_segments(size: Number, s: Shape, rates: Rates, fabric: bool) -> Number:
    """Return the best number of segments: about √(3w/a), w the transfer seconds, a the latency of a step; at least one per stage."""
    step = np.maximum(rates.alpha / 2, (0.5 if fabric else 1.0) * (s.nodes > 1) * rates.outer_alpha)
    best = np.rint(np.sqrt(3 / step * switch_wire(size, s, rates, fabric)))
    return np.minimum(np.maximum(best, switch_stages(s.nodes, fabric)), 4096.0)


def _switched(s: Shape, fabric: bool) -> Steps:
    """k segments that start one step apart, k at least `switch_stages`; links are partly idle in the first and last steps.

    A step in which a rank sends u segments through the node's links and x shards through its network card takes
    M(u, x) = max(α/2 + u·n/k·β, α' + x·n/(gk)·β'). With R exchanges between nodes (N a power of two)

        T = (k−R−1)·M(1+1/g, R) + 4·M(1, 0) + 2·Σⱼ M(1, j), j = 1 … R

    and with a switch in the fabric, which receives one shard and returns another in the same step with α'/2
    each, (k−3)·M(1+1/g, 1) + 4·M(1, 0) + 4·M(1, 1).
    """
    k, g = s.segments, s.per_node
    if np.max(s.nodes) == 1:
        return Steps((Terms(0.5 * k + 1.5, (1 + 1 / g) + (3 - 1 / g) / k),))
    switch, half = g > 1, 0.5 if fabric else 1.0

    def steps(count: Number, up: Number, shards: Number) -> Terms:
        active = count * (shards > 0)
        return Terms(0.5 * count * switch, count * up / k * switch, 0.0, half * active, active * shards / (g * k), True)

    if fabric:
        across = 1 * (s.nodes > 1)
        return Steps((steps(k - 1 - 2 * across, 1 + 1 / g, across), steps(4, 1, 0 * g), steps(4 * across, 1, across)))
    rounds = log2ceil(s.nodes)
    ramp = [steps(2 * (rounds >= j), 1, np.minimum(j, rounds)) for j in range(1, int(np.max(rounds)) + 1)]
    return Steps((steps(k - rounds - 1, 1 + 1 / g, rounds), steps(4, 1, 0 * g), *ramp))


def _double_tree(s: Shape) -> Terms:
    steps = 1 + max(first_use(s.ranks).values()) + 2 * (s.segments - 1)
    return Terms(steps, steps / (2 * s.segments))


def _line(s: Shape) -> Terms:
    hops = s.ranks + s.segments - 2
    return Terms(hops, hops / s.segments)


def with_additions(one_way: Callable[[Shape], Terms]) -> Callable[[Shape], Terms]:
    """Return the formula of the dual with additions: all received bytes are added, so c = b."""
    return lambda s: (t := one_way(s))._replace(gamma=t.beta + t.outer_beta)


def dual_then_self(one_way: Callable[[Shape], Terms]) -> Callable[[Shape], Terms]:
    """Return the formula of the dual followed by the operation itself, e.g. reduce-scatter + all-gather."""
    return lambda s: with_additions(one_way)(s) + one_way(s)


def _naive(s: Shape) -> Terms:
    return Terms(s.ranks - 1, s.ranks - 1)


def _tree(s: Shape) -> Terms:
    return Terms(log(s.ranks), log(s.ranks))


def _shard_per_step(s: Shape) -> Terms:
    return Terms(s.ranks - 1, s.share)


def _shard_per_round(s: Shape) -> Terms:
    return Terms(log(s.ranks), s.share)


def log2ceil(p: Number) -> Number:
    """Return ⌈log₂p⌉ for a number or an array."""
    return np.ceil(np.log2(np.maximum(p, 1)))


def twice(one_way: Callable[[Shape], Terms]) -> Callable[[Shape], Terms]:
    """Return the formula with all terms doubled and without γ."""
    return lambda s: (t := one_way(s))._replace(**{name: 2 * getattr(t, name) for name in t._fields[:5]})


Formula = tuple[str, Callable[[Shape], Any]]
FORMULAS: dict[tuple[str, str], Formula] = {
    ("broadcast", "naive"): ("(P−1)(α + nβ)", _naive),
    ("broadcast", "binomial"): ("⌈log₂P⌉(α + nβ)", _tree),
    ("broadcast", "chain"): ("(P+k−2)(α + nβ/k)", _line),
    ("broadcast", "double-tree"): ("≤ (F+2k−2)(α + nβ/2k)", _double_tree),
    ("reduce", "naive"): ("(P−1)(α + nβ + nγ)", with_additions(_naive)),
    ("reduce", "binomial"): ("⌈log₂P⌉(α + nβ + nγ)", with_additions(_tree)),
    ("reduce", "chain"): ("(P+k−2)(α + n(β+γ)/k)", with_additions(_line)),
    ("reduce", "double-tree"): ("≤ (F+2k−2)(α + n(β+γ)/2k)", with_additions(_double_tree)),
    ("scatter", "naive"): ("(P−1)α + (P−1)/P·nβ", _shard_per_step),
    ("scatter", "binomial"): ("⌈log₂P⌉α + (P−1)/P·nβ", _shard_per_round),
    ("gather", "naive"): ("(P−1)α + (P−1)/P·nβ", _shard_per_step),
    ("gather", "binomial"): ("⌈log₂P⌉α + (P−1)/P·nβ", _shard_per_round),
    ("all-gather", "ring"): ("(P−1)α + (P−1)/P·nβ", _shard_per_step),
    ("all-gather", "bruck"): ("⌈log₂P⌉α + (P−1)/P·nβ", _shard_per_round),
    ("all-gather", "recursive-doubling"): ("log₂P·α + (P−1)/P·nβ", _recursive),
    ("all-gather", "tree"): ("2⌈log₂P⌉α + (⌈log₂P⌉ + (P−1)/P)nβ", lambda s: _shard_per_round(s) + _tree(s)),
    ("all-gather", "multi-ring"): ("(P−1)·max(α + (g−1)/(gP)·nβ, α' + 1/(gP)·nβ')", _multi_ring),
    ("all-gather", "two-level"): ("(g−1)α + (g−1)/g·nβ + (N−1)α' + (N−1)/P·nβ'", _two_level),
    ("reduce-scatter", "ring"): ("(P−1)α + (P−1)/P·n(β+γ)", with_additions(_shard_per_step)),
    ("reduce-scatter", "bruck"): ("⌈log₂P⌉α + (P−1)/P·n(β+γ)", with_additions(_shard_per_round)),
    ("reduce-scatter", "recursive-halving"): ("log₂P·α + (P−1)/P·n(β+γ)", with_additions(_recursive)),
    ("reduce-scatter", "pairwise"): ("(P−1)α + (P−1)/P·n(β+γ)", with_additions(_shard_per_step)),
    ("reduce-scatter", "tree"): ("2⌈log₂P⌉α + (⌈log₂P⌉ + (P−1)/P)nβ + ⌈log₂P⌉nγ", lambda s: with_additions(_tree)(s) + _shard_per_round(s)),
    ("reduce-scatter", "multi-ring"): ("(P−1)·max(α + (g−1)/(gP)·nβ, α' + 1/(gP)·nβ')", _multi_ring),
    ("reduce-scatter", "two-level"): ("(g−1)α + (g−1)/g·n(β+γ) + (N−1)α' + (N−1)/P·n(β'+γ)", with_additions(_two_level)),
    ("all-reduce", "naive"): ("2(P−1)(α + nβ) + (P−1)nγ", dual_then_self(_naive)),
    ("all-reduce", "tree"): ("2⌈log₂P⌉(α + nβ) + ⌈log₂P⌉nγ", dual_then_self(_tree)),
    ("all-reduce", "ring"): ("2(P−1)α + 2(P−1)/P·nβ + (P−1)/P·nγ", dual_then_self(_shard_per_step)),
    ("all-reduce", "direct"): (
        "Pα + 2(P−1)/P·nβ + (P−1)/P·nγ", lambda s: with_additions(_shard_per_step)(s) + Terms(1, s.share)),
    ("all-reduce", "halving-doubling"): ("2log₂P·α + 2(P−1)/P·nβ + (P−1)/P·nγ", _halving_doubling),
    ("all-reduce", "double-tree"): ("≤ 2(F+2k−2)(α + nβ/2k) + (F+2k−2)nγ/2k", dual_then_self(_double_tree)),
    ("all-reduce", "hierarchical"): (
        "2(g−1)(α + n/g·β) + 2(N−1)(α' + n/N·β') + ⌈log₂g⌉(α + nβ) + ((g−1)/g + (N−1)/N)nγ", _hierarchical),
    ("all-reduce", "two-level"): ("2(g−1)(α + n/g·β) + 2(N−1)(α' + n/P·β') + (P−1)/P·nγ", dual_then_self(_two_level)),
    ("all-reduce", "multi-ring"): ("2(P−1)·max(α + (g−1)/(gP)·nβ, α' + 1/(gP)·nβ')", twice(_multi_ring)),
    ("all-reduce", "rail-tree"): (
        "2⌈log₂g⌉α + 2(g−1)/g·nβ + 2⌈log₂N⌉(α' + n/g·β') + ((g−1)/g + ⌈log₂N⌉/g)nγ", _rail_tree),
    ("all-reduce", "rail-double-tree"): (
        "≤ 2⌈log₂g⌉α + 2(g−1)/g·nβ + 2(F+2k−2)(α' + n/2kg·β') + ((g−1)/g + (F+2k−2)/2kg)nγ", _rail_double_tree),
    ("all-reduce", "nvls"): (
        "(k−R−1)·M(1+1/g, R) + 4·M(1, 0) + 2·Σⱼ M(1, j≤R), M(u, x) = max(α/2 + u·n/k·β, α' + x·n/(gk)·β'), R = log₂N",
        lambda s: _switched(s, False)),
    ("all-reduce", "sharp"): (
        "(k−3)·M(1+1/g, 1) + 4·M(1, 0) + 4·M(1, 1), M(u, x) = max(α/2 + u·n/k·β, α'/2 + x·n/(gk)·β')",
        lambda s: _switched(s, True)),
    ("all-to-all", "direct"): ("max(α + (g−1)/P·nβ, α' + (P−g)/P·nβ')", _direct),
    ("all-to-all", "pairwise"): ("(P−1)α + (P−1)/P·nβ", _shard_per_step),
    ("all-to-all", "bruck"): ("⌈log₂P⌉α + Σd₁(d)/P·nβ ≈ (log₂P)/2·nβ", _bruck_exchange),
    ("all-to-all", "two-level"): (
        "(g−1)(α + n/g·β) + (N−1)(α' + n/N·β')",
        lambda s: Terms(s.per_node - 1, (s.per_node - 1) / s.per_node, 0, s.nodes - 1, (s.nodes - 1) / s.nodes)),
    ("point-to-point", "direct"): (
        "α + nβ", lambda s: Terms(1.0 * (s.nodes == 1), 1.0 * (s.nodes == 1), 0.0, 1.0 * (s.nodes > 1), 1.0 * (s.nodes > 1))),
    ("barrier", "dissemination"): ("⌈log₂P⌉α", lambda s: Terms(log(s.ranks), 0)),
}  # fmt: skip


def best_segments(algorithm: str, ranks: int, size: float, link: Link) -> int:
    """The k that minimises (c + s·k)(α + nβ/(s·k)): k* = √(c·nβ/(s²·α)); a chain has c = P−2, s = 1, two trees c = F−2, s = 2."""
    if ranks < 2 or size <= 0:
        return 1
    fill, stride = ranks - 2, 1
    if algorithm == "double-tree":
        fill, stride = max(first_use(ranks).values()) - 1, 2
    if link.alpha == 0:
        return 2**12
    return min(2**12, max(1, round(math.sqrt(max(0, fill) * size * link.beta / link.alpha) / stride)))
