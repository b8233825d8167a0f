"""Closed costs of the algorithms on a uniform network: T = a·α + b·nβ + c·nγ.

Every algorithm's time there is linear in three constants: α, the latency of a message; β = 1/bandwidth, seconds a byte;
γ, seconds to add a byte. n is **always the full, unsharded buffer**: what an all-reduce reduces, what an all-gather
ends with, what a reduce-scatter starts with, what one rank of an all-to-all sends in all. (Tables that call the shard n
cost P times as much by the same letter.) L = ⌈log₂P⌉.

    operation                algorithm           messages a    buffers sent b        remark
    broadcast, reduce        naive               P−1           P−1
                             binomial            L             L                     not 1: every round sends all of n
                             chain, k segments   P+k−2         (P+k−2)/k             → 1 for large n
    scatter, gather          naive               P−1           (P−1)/P
                             binomial            L             (P−1)/P
    all-gather,              ring                P−1           (P−1)/P               the least b there is
    reduce-scatter           recursive, Bruck    L             (P−1)/P               recursive: P a power of two
    all-reduce               naive               2(P−1)        2(P−1)
                             tree                2L            2L
                             ring                2(P−1)        2(P−1)/P              the least b there is
                             halving-doubling    2L            2(P−1)/P              P a power of two, else +2 and +2
    all-to-all               direct              1             (P−1)/P               all at once
                             pairwise            P−1           (P−1)/P
                             Bruck               L             about L/2
    barrier                  dissemination       L             0

They hold for equal chunks, one kind of link, and no link shared; there the walk agrees to rounding (a test). A
reduction's c is its part of b. Node-aware algorithms have terms for the links inside (α, β) and between nodes (α', β')
of g ranks each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from meshwright.describe.cluster import Link
from meshwright.errors import unknown
from meshwright.programs.collectives.double_tree import first_use
from meshwright.programs.collectives.recursive import core_of
from meshwright.programs.collectives.trees import SEGMENTS
from meshwright.programs.collectives.trees import rounds as log


class Terms(NamedTuple):
    """Multiples of α, nβ, nγ, and of α' and nβ' between nodes."""

    alpha: float
    beta: float
    gamma: float = 0.0
    outer_alpha: float = 0.0
    outer_beta: float = 0.0

    def time(self, size: float, link: Link, gamma: float = 0.0, outer: Link | None = None) -> float:
        """Seconds for a buffer of `size` bytes."""
        outer = outer or link
        inside = self.alpha * link.alpha + self.beta * size * link.beta
        return inside + self.outer_alpha * outer.alpha + self.outer_beta * size * outer.beta + self.gamma * size * gamma

    def __add__(self, other: tuple) -> Terms:
        return Terms(*(a + b for a, b in zip(self, other, strict=True)))


class Shape(NamedTuple):
    """P ranks as `nodes` nodes of `per_node`, and k segments."""

    ranks: int
    segments: int
    nodes: int
    per_node: int

    @property
    def share(self) -> float:
        return (self.ranks - 1) / self.ranks


def terms(operation: str, algorithm: str, ranks: int, *, nodes: int = 1, segments: int = SEGMENTS) -> Terms:
    """The terms of an algorithm; `nodes` equal nodes matter to node-aware ones only."""
    if (operation, algorithm) not in FORMULAS:
        known = [a for o, a in FORMULAS if o == operation] or sorted({o for o, _ in FORMULAS})
        raise unknown("MW-PROG-005", f"closed formula of {operation}", algorithm, known)
    if ranks == 1:
        return Terms(0, 0)
    return FORMULAS[operation, algorithm][1](Shape(ranks, segments, nodes, ranks // nodes))


def text(operation: str, algorithm: str) -> str:
    """The formula as it is written."""
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


def _double_tree(s: Shape) -> Terms:
    steps = 1 + max(first_use(s.ranks).values()) + 2 * (s.segments - 1)
    return Terms(steps, steps / (2 * s.segments))


def _line(s: Shape) -> Terms:
    hops = s.ranks + s.segments - 2
    return Terms(hops, hops / s.segments)


def added(one_way: Callable[[Shape], Terms]) -> Callable[[Shape], Terms]:
    """The dual with additions: what arrives is added, so c = b."""
    return lambda s: (t := one_way(s))._replace(gamma=t.beta + t.outer_beta)


def both(one_way: Callable[[Shape], Terms]) -> Callable[[Shape], Terms]:
    """The dual and the way back."""
    return lambda s: added(one_way)(s) + one_way(s)


def _naive(s: Shape) -> Terms:
    return Terms(s.ranks - 1, s.ranks - 1)


def _tree(s: Shape) -> Terms:
    return Terms(log(s.ranks), log(s.ranks))


def _one_by_one(s: Shape) -> Terms:
    return Terms(s.ranks - 1, s.share)


def _halves(s: Shape) -> Terms:
    return Terms(log(s.ranks), s.share)


Formula = tuple[str, Callable[[Shape], Terms]]
FORMULAS: dict[tuple[str, str], Formula] = {
    ("broadcast", "naive"): ("(P−1)(α + nβ)", _naive),
    ("broadcast", "binomial"): ("⌈log₂P⌉(α + nβ)", _tree),
    ("broadcast", "chain"): ("(P+k−2)(α + nβ/k)", _line),
    ("broadcast", "double-tree"): ("≤ (F+2k−2)(α + nβ/2k)", _double_tree),
    ("reduce", "naive"): ("(P−1)(α + nβ + nγ)", added(_naive)),
    ("reduce", "binomial"): ("⌈log₂P⌉(α + nβ + nγ)", added(_tree)),
    ("reduce", "chain"): ("(P+k−2)(α + n(β+γ)/k)", added(_line)),
    ("reduce", "double-tree"): ("≤ (F+2k−2)(α + n(β+γ)/2k)", added(_double_tree)),
    ("scatter", "naive"): ("(P−1)α + (P−1)/P·nβ", _one_by_one),
    ("scatter", "binomial"): ("⌈log₂P⌉α + (P−1)/P·nβ", _halves),
    ("gather", "naive"): ("(P−1)α + (P−1)/P·nβ", _one_by_one),
    ("gather", "binomial"): ("⌈log₂P⌉α + (P−1)/P·nβ", _halves),
    ("all-gather", "ring"): ("(P−1)α + (P−1)/P·nβ", _one_by_one),
    ("all-gather", "bruck"): ("⌈log₂P⌉α + (P−1)/P·nβ", _halves),
    ("all-gather", "recursive-doubling"): ("log₂P·α + (P−1)/P·nβ", _recursive),
    ("all-gather", "tree"): ("2⌈log₂P⌉α + (⌈log₂P⌉ + (P−1)/P)nβ", lambda s: _halves(s) + _tree(s)),
    ("all-gather", "two-level"): ("(g−1)α + (g−1)/g·nβ + (N−1)α' + (N−1)/P·nβ'", _two_level),
    ("reduce-scatter", "ring"): ("(P−1)α + (P−1)/P·n(β+γ)", added(_one_by_one)),
    ("reduce-scatter", "bruck"): ("⌈log₂P⌉α + (P−1)/P·n(β+γ)", added(_halves)),
    ("reduce-scatter", "recursive-halving"): ("log₂P·α + (P−1)/P·n(β+γ)", added(_recursive)),
    ("reduce-scatter", "tree"): ("2⌈log₂P⌉α + (⌈log₂P⌉ + (P−1)/P)nβ + ⌈log₂P⌉nγ", lambda s: added(_tree)(s) + _halves(s)),
    ("reduce-scatter", "two-level"): ("(g−1)α + (g−1)/g·n(β+γ) + (N−1)α' + (N−1)/P·n(β'+γ)", added(_two_level)),
    ("all-reduce", "naive"): ("2(P−1)(α + nβ) + (P−1)nγ", both(_naive)),
    ("all-reduce", "tree"): ("2⌈log₂P⌉(α + nβ) + ⌈log₂P⌉nγ", both(_tree)),
    ("all-reduce", "ring"): ("2(P−1)α + 2(P−1)/P·nβ + (P−1)/P·nγ", both(_one_by_one)),
    ("all-reduce", "halving-doubling"): ("2log₂P·α + 2(P−1)/P·nβ + (P−1)/P·nγ", _halving_doubling),
    ("all-reduce", "double-tree"): ("≤ 2(F+2k−2)(α + nβ/2k) + (F+2k−2)nγ/2k", both(_double_tree)),
    ("all-reduce", "hierarchical"): (
        "2(g−1)(α + n/g·β) + 2(N−1)(α' + n/N·β') + ⌈log₂g⌉(α + nβ) + ((g−1)/g + (N−1)/N)nγ", _hierarchical),
    ("all-reduce", "two-level"): ("2(g−1)(α + n/g·β) + 2(N−1)(α' + n/P·β') + (P−1)/P·nγ", both(_two_level)),
    ("all-to-all", "direct"): ("α + (P−1)/P·nβ", lambda s: Terms(1, s.share)),
    ("all-to-all", "pairwise"): ("(P−1)α + (P−1)/P·nβ", _one_by_one),
    ("all-to-all", "bruck"): ("⌈log₂P⌉α + Σd₁(d)/P·nβ ≈ (log₂P)/2·nβ", _bruck_exchange),
    ("all-to-all", "two-level"): (
        "(g−1)(α + n/g·β) + (N−1)(α' + n/N·β')",
        lambda s: Terms(s.per_node - 1, (s.per_node - 1) / s.per_node, 0, s.nodes - 1, (s.nodes - 1) / s.nodes)),
    ("point-to-point", "direct"): ("α + nβ", lambda s: Terms(1, 1)),
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


__all__ = ["FORMULAS", "Terms", "best_segments", "terms", "text"]
