"""The double binary tree: the logarithmic latency of a tree and the bandwidth of a ring (Sanders, Speck, Träff 2009; NCCL).

In a binary tree half of the ranks are leaves, which only receive. Half of the send bandwidth is therefore idle, and an
inner rank sends all data twice. Use **two** trees such that the inner ranks of one are leaves of the other, and send
half of the buffer through each. Then every rank receives n bytes (n/2 from each tree) and sends about n bytes.

**The trees.** Number the ranks other than the root 1 … m and build an in-order tree: the root of a range is its largest
power of two, counted from the start of the range, so every odd number is a leaf. The second tree is the mirror image
(m even) or the first tree shifted by one (m odd); its leaves are the even numbers. The root of the collective sends to
the top of both trees.

**The steps.** Every rank receives over two edges and sends over at most two. This bipartite graph consists of even
cycles and paths, so two colours suffice: no two edges of one colour share a sender or a receiver. Edges of colour 0 are
used in even steps, edges of colour 1 in odd steps. Each rank then has at most one send and one receive per step.
Segment s uses an edge 2s steps after segment 0.

With k segments per tree, and F steps until the farthest rank has its first two segments, a broadcast takes
(F + 2(k−1))(α + n/(2k)·β), F ≤ 2⌈log₂P⌉, which approaches nβ. Reduce is the reversed broadcast. All-reduce is reduce
and broadcast: it approaches 2nβ with O(log P) latency, for any P.
"""

from meshwright.programs.collectives.compose import composition, dual
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Program, Row, rows
from meshwright.programs.collectives.registry import algorithm
from meshwright.programs.collectives.trees import SEGMENTS

Edge = tuple[int, int, int]  # tree, parent, child


@algorithm("broadcast", "double-tree")
def double_tree_broadcast(ranks: int, elements: int, root: int = 0, segments: int = SEGMENTS) -> Program:
    """Half of the segments go down each tree; the colour of an edge selects even or odd steps."""
    table: list[Row] = []
    for (tree, parent, child), first in first_use(ranks).items():
        source, target = (root + parent) % ranks, (root + child) % ranks
        table += [(first + 2 * s, source, target, tree * segments + s, 1) for s in range(segments)]
    return collective("broadcast", ranks, elements, rows(table), chunks=2 * segments, root=root)


double_tree_reduce = dual("reduce", "double-tree", double_tree_broadcast)
double_tree_all_reduce = composition(
    "all-reduce", "double-tree", double_tree_reduce, double_tree_broadcast, options=("segments",)
)


def trees(ranks: int) -> list[Edge]:
    """Return the edges of both trees over the ranks 1 … P−1 and from rank 0 to both tops, parents before children."""
    m = ranks - 1
    edges: list[Edge] = []

    def add_subtree(parent: int, low: int, high: int) -> None:
        """Add the subtree of the numbers [low, high] under `parent`, in both trees."""
        if low > high:
            return
        top = low - 1 + (1 << ((high - low + 1).bit_length() - 1))
        twin = [m + 1 - v if m % 2 == 0 else v % m + 1 for v in (top, parent)]
        edges.append((0, parent, top))
        edges.append((1, twin[1] if parent else 0, twin[0]))
        add_subtree(top, low, top - 1)
        add_subtree(top, top + 1, high)

    add_subtree(0, 1, m)
    return edges


def colours(edges: list[Edge]) -> dict[Edge, int]:
    """Return colour 0 or 1 for each edge such that no rank sends, or receives, over two edges of one colour.

    Two edges with the same sender, or with the same receiver, need different colours. An edge has at most one such
    neighbour at each end, so alternating the colours along a chain of neighbours never causes a conflict.
    """
    edges_at: dict[tuple[str, int], list[Edge]] = {}
    for edge in edges:
        edges_at.setdefault(("send", edge[1]), []).append(edge)
        edges_at.setdefault(("receive", edge[2]), []).append(edge)
    colour: dict[Edge, int] = {}
    for start in edges:
        todo = [] if start in colour else [(start, 0)]
        while todo:
            edge, shade = todo.pop()
            colour[edge] = shade
            neighbours = edges_at["send", edge[1]] + edges_at["receive", edge[2]]
            todo += [(other, 1 - shade) for other in neighbours if other != edge and other not in colour]
    return colour


def first_use(ranks: int) -> dict[Edge, int]:
    """Return the step in which each edge carries its first segment: the first one of its parity after the parent has it."""
    edges = trees(ranks)
    colour = colours(edges)
    arrival = {(0, 0): -1, (1, 0): -1}
    first: dict[Edge, int] = {}
    for edge in edges:
        tree, parent, child = edge
        earliest = arrival[tree, parent] + 1
        first[edge] = arrival[tree, child] = earliest + (earliest + colour[edge]) % 2
    return first
