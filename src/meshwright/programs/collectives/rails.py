"""The algorithms that NCCL runs between nodes. They use all network cards at once.

The network cards of equal local rank in all nodes are a *rail*.

**Multi-ring.** With g ranks in each of N nodes, g rings pass through all P ranks, each with 1/g of the buffer. Ring j
enters a node at local rank j, visits all ranks of the node and leaves at local rank j−1. So every card sends for one
ring and receives for one ring. In a step a rank sends g−1 parts to its neighbour in the node and, at the same time, one
part through its card:

    T = (P−1) · max( α + (g−1)/(gP)·nβ , α' + 1/(gP)·nβ' )        all-gather and reduce-scatter; twice that for all-reduce

On one node it is the plain ring.

**Rail-tree** (all-reduce of small buffers). Reduce-scatter inside every node (Bruck), reduce and broadcast by binomial
trees between the ranks of equal local rank, all-gather inside every node. The number of messages is logarithmic in the
node size and in the number of nodes:

    T = 2⌈log₂g⌉α + 2(g−1)/g·nβ + 2⌈log₂N⌉(α' + n/g·β')

If the nodes have different sizes, one leader per node reduces, takes part in the tree, and broadcasts.

**Rail-double-tree** (NCCL's tree). As rail-tree, with a double binary tree between the nodes (`double_tree`) in k segments per tree, so that
the bandwidth between nodes does not fall with their number:

    T = 2⌈log₂g⌉α + 2(g−1)/g·nβ + 2(F+2k−2)(α' + n/(2kg)·β'),  F = 2⌈log₂N⌉

With the best k this is 2(F−2)α' + 2n/g·β' + 4√((F−2)α'·n/g·β') between the nodes.
"""

import numpy as np

from meshwright.programs.collectives.bruck import bruck_all_gather, bruck_reduce_scatter
from meshwright.programs.collectives.compose import composition, dual, in_turn, relabelled, together
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.double_tree import double_tree_broadcast, double_tree_reduce
from meshwright.programs.collectives.program import Moves, Program, moves
from meshwright.programs.collectives.registry import Groups, algorithm
from meshwright.programs.collectives.trees import SEGMENTS, binomial_broadcast, binomial_reduce


@algorithm("all-gather", "multi-ring")
def multi_ring_all_gather(ranks: int, elements: int, groups: Groups = ()) -> Program:
    """Ring j transfers part j of every shard; in step t a rank forwards the shard that started t positions before it."""
    rings = 1 if len(groups) == 1 else min(len(group) for group in groups)
    step, place = np.ogrid[: ranks - 1, :ranks]
    tables = []
    for j in range(rings):
        rotated = [np.roll(group, -(j * len(group) // rings)) for group in groups]
        order = np.concatenate(rotated)
        tables.append(moves(step, order[place], order[(place + 1) % ranks], order[(place - step) % ranks] * rings + j))
    return collective("all-gather", ranks, elements, together(tables), chunks=rings, groups=groups)


multi_ring_reduce_scatter = dual("reduce-scatter", "multi-ring", multi_ring_all_gather)
multi_ring_all_reduce = composition(
    "all-reduce", "multi-ring", multi_ring_reduce_scatter, multi_ring_all_gather, options=("groups",)
)


@algorithm("all-reduce", "rail-tree")
def rail_tree_all_reduce(ranks: int, elements: int, groups: Groups = ()) -> Program:
    """Reduce-scatter inside nodes, a tree between nodes on every rail, all-gather inside nodes."""
    between = binomial_reduce(len(groups), elements), binomial_broadcast(len(groups), elements)
    return on_rails(ranks, elements, groups, *between, chunks=1)


@algorithm("all-reduce", "rail-double-tree")
def rail_double_tree_all_reduce(ranks: int, elements: int, groups: Groups = (), segments: int = SEGMENTS) -> Program:
    """Reduce-scatter inside nodes, two trees between nodes on every rail, all-gather inside nodes."""
    up = double_tree_reduce(len(groups), elements, segments=segments)
    down = double_tree_broadcast(len(groups), elements, segments=segments)
    return on_rails(ranks, elements, groups, up, down, chunks=2 * segments)


def on_rails(ranks: int, elements: int, groups: Groups, up: Program, down: Program, chunks: int) -> Program:
    """Reduce-scatter inside nodes; on every rail the programs `up` and `down` over the nodes, of `chunks` chunks; all-gather inside nodes.
    If the nodes have different sizes, their leaders form the only rail."""
    equal = len({len(group) for group in groups}) == 1
    rails = len(groups[0]) if equal else 1
    edges = np.arange(rails + 1) * chunks

    def inside(program: Program, group: tuple[int, ...]) -> Moves:
        return relabelled(program.moves, group, edges)

    def between(program: Program) -> Moves:
        fine = np.arange(chunks + 1)
        return together(
            [relabelled(program.moves, [group[j] for group in groups], j * chunks + fine) for j in range(rails)]
        )

    first, last = (bruck_reduce_scatter, bruck_all_gather) if equal else (binomial_reduce, binomial_broadcast)
    table = in_turn(
        together([inside(first(len(group), elements), group) for group in groups]),
        between(up),
        between(down),
        together([inside(last(len(group), elements), group) for group in groups]),
    )
    return collective("all-reduce", ranks, elements, table, chunks=rails * chunks, groups=groups)
