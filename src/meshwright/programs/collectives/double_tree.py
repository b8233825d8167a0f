"""The double binary tree: a tree's logarithmic latency at a ring's bandwidth (Sanders, Speck, Träff 2009; NCCL).

In a binary tree half of the ranks are leaves that only receive, so half of the sending capacity lies idle, and an inner
rank sends everything twice. Lay **two** trees over the ranks such that the inner ranks of one are leaves of the other,
and send half of the buffer down each: now every rank receives n (n/2 from each tree) and sends about n.

**The trees.** Number the ranks other than the root 1 … m and hang them in order: the root of a range is its largest
power of two counted from the range's start, so every odd number is a leaf. The second tree is the mirror image (m even)
or the first shifted by one (m odd): there the even numbers are leaves. The collective's root sends to both trees' tops.

**The steps.** Every rank receives over two edges and sends over at most two. Such a bipartite graph has even cycles and
paths only, so its edges take two colours without two of a colour meeting at a rank's sending or receiving side. Edges
of colour 0 work at even steps, of colour 1 at odd ones: at most one send and one receive a rank and step. Segment s
uses an edge 2s steps after segment 0.

With k segments a tree and F steps until the farthest rank has its first two, broadcast takes (F + 2(k−1))(α +
n/(2k)·β), F ≤ 2⌈log₂P⌉, which approaches nβ. Reduce is the reversal; all-reduce is both, approaching 2nβ with O(log
P) latency, for any P.
"""

from __future__ import annotations

from meshwright.programs.collectives.compose import reverse, then
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Program, Row, rows
from meshwright.programs.collectives.registry import algorithm
from meshwright.programs.collectives.trees import SEGMENTS

Edge = tuple[int, int, int]  # tree, parent, child


@algorithm("broadcast", "double-tree")
def double_tree_broadcast(ranks: int, elements: int, root: int = 0, segments: int = SEGMENTS) -> Program:
    """Half of the segments down each tree, edges taking turns by colour."""
    table: list[Row] = []
    for (tree, parent, child), first in first_use(ranks).items():
        source, target = (root + parent) % ranks, (root + child) % ranks
        table += [(first + 2 * s, source, target, tree * segments + s, 1) for s in range(segments)]
    return collective("broadcast", ranks, elements, rows(table), chunks=2 * segments, root=root)


@algorithm("reduce", "double-tree")
def double_tree_reduce(ranks: int, elements: int, root: int = 0, segments: int = SEGMENTS) -> Program:
    """The broadcast backwards."""
    return reverse(double_tree_broadcast(ranks, elements, root=root, segments=segments))


@algorithm("all-reduce", "double-tree")
def double_tree_all_reduce(ranks: int, elements: int, segments: int = SEGMENTS) -> Program:
    """Up both trees, then down both."""
    up = double_tree_reduce(ranks, elements, segments=segments)
    return then("all-reduce", up, double_tree_broadcast(ranks, elements, segments=segments))


def trees(ranks: int) -> list[Edge]:
    """The edges of both trees over the ranks 1 … P−1, and from rank 0 to both tops, parents before children."""
    m = ranks - 1
    edges: list[Edge] = []

    def hang(parent: int, low: int, high: int) -> None:
        """Hang the numbers [low, high] under `parent`, in both trees."""
        if low > high:
            return
        top = low - 1 + (1 << ((high - low + 1).bit_length() - 1))
        twin = [m + 1 - v if m % 2 == 0 else v % m + 1 for v in (top, parent)]
        edges.append((0, parent, top))
        edges.append((1, twin[1] if parent else 0, twin[0]))
        hang(top, low, top - 1)
        hang(top, top + 1, high)

    hang(0, 1, m)
    return edges


def colours(edges: list[Edge]) -> dict[Edge, int]:
    """0 or 1 for each edge, such that a rank neither sends nor receives over two edges of one colour.

    Edges that meet at a rank's sending side, or at its receiving side, must differ; each has at most one such neighbour on either
    side, so walking from neighbour to neighbour with alternating colours never contradicts itself.
    """
    meeting: dict[tuple[str, int], list[Edge]] = {}
    for edge in edges:
        meeting.setdefault(("send", edge[1]), []).append(edge)
        meeting.setdefault(("receive", edge[2]), []).append(edge)
    colour: dict[Edge, int] = {}
    for start in edges:
        todo = [] if start in colour else [(start, 0)]
        while todo:
            edge, shade = todo.pop()
            colour[edge] = shade
            around = meeting["send", edge[1]] + meeting["receive", edge[2]]
            todo += [(other, 1 - shade) for other in around if other != edge and other not in colour]
    return colour


def first_use(ranks: int) -> dict[Edge, int]:
    """The step at which each edge carries its first segment: after it arrived at the parent, at the edge's parity."""
    edges = trees(ranks)
    colour = colours(edges)
    arrival = {(0, 0): -1, (1, 0): -1}
    first: dict[Edge, int] = {}
    for edge in edges:
        tree, parent, child = edge
        earliest = arrival[tree, parent] + 1
        first[edge] = arrival[tree, child] = earliest + (earliest + colour[edge]) % 2
    return first


__all__ = ["double_tree_all_reduce", "double_tree_broadcast", "double_tree_reduce"]
