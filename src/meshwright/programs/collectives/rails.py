"""What NCCL runs between nodes: work for every network card at once (a card and its mates in other nodes are a *rail*).

**Multi-ring.** With g ranks in each of N nodes, g rings pass all P ranks, each with 1/g of the buffer. Ring j enters a node at
place j, visits the whole node and leaves from place j−1, so every card sends for one ring and receives for one. In a step a rank
passes g−1 parts to its neighbour in the node and one part through its card, at the same time:

    T = (P−1) · max( α + (g−1)/(gP)·nβ , α' + 1/(gP)·nβ' )        all-gather and reduce-scatter; twice that for all-reduce

One node has nothing to share out: there it is the plain ring.

**Rail-tree** (all-reduce of small buffers). Reduce-scatter inside every node (Bruck), a binomial tree up and down between the
ranks at the same place of each node, all-gather inside. The number of messages grows with the logarithm of both sizes:

    T = 2⌈log₂g⌉α + 2(g−1)/g·nβ + 2⌈log₂N⌉(α' + n/g·β')

Unequal nodes have no common places: there one leader a node reduces, joins the tree and broadcasts.
"""

from __future__ import annotations

import numpy as np

from meshwright.programs.collectives.bruck import bruck_all_gather, bruck_reduce_scatter
from meshwright.programs.collectives.compose import in_turn, relabelled, reverse, then, together
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Moves, Program, moves
from meshwright.programs.collectives.registry import Groups, algorithm
from meshwright.programs.collectives.trees import binomial_broadcast, binomial_reduce


@algorithm("all-gather", "multi-ring")
def multi_ring_all_gather(ranks: int, elements: int, groups: Groups = ()) -> Program:
    """Ring j passes part j of every shard; at step t a rank sends on the shard that started t places before it."""
    rings = 1 if len(groups) == 1 else min(len(group) for group in groups)
    step, place = np.ogrid[: ranks - 1, :ranks]
    tables = []
    for j in range(rings):
        turned = [np.roll(group, -(j * len(group) // rings)) for group in groups]
        order = np.concatenate(turned)
        tables.append(moves(step, order[place], order[(place + 1) % ranks], order[(place - step) % ranks] * rings + j))
    return collective("all-gather", ranks, elements, together(tables), chunks=rings, groups=groups)


@algorithm("reduce-scatter", "multi-ring")
def multi_ring_reduce_scatter(ranks: int, elements: int, groups: Groups = ()) -> Program:
    """The all-gather backwards."""
    return reverse(multi_ring_all_gather(ranks, elements, groups=groups))


@algorithm("all-reduce", "multi-ring")
def multi_ring_all_reduce(ranks: int, elements: int, groups: Groups = ()) -> Program:
    """Reduce-scatter, then all-gather."""
    halves = [build(ranks, elements, groups=groups) for build in (multi_ring_reduce_scatter, multi_ring_all_gather)]
    return then("all-reduce", *halves)


@algorithm("all-reduce", "rail-tree")
def rail_tree_all_reduce(ranks: int, elements: int, groups: Groups = ()) -> Program:
    """Reduce-scatter inside nodes, a tree between nodes on every rail, all-gather inside."""
    equal = len({len(group) for group in groups}) == 1
    rails = len(groups[0]) if equal else 1

    def inside(program: Program, group: tuple[int, ...]) -> Moves:
        return relabelled(program.moves, group)

    def between(program: Program) -> Moves:
        return together(
            [relabelled(program.moves, [group[j] for group in groups], np.array([j, j + 1])) for j in range(rails)]
        )

    first, last = (bruck_reduce_scatter, bruck_all_gather) if equal else (binomial_reduce, binomial_broadcast)
    table = in_turn(
        together([inside(first(len(group), elements), group) for group in groups]),
        between(binomial_reduce(len(groups), elements)),
        between(binomial_broadcast(len(groups), elements)),
        together([inside(last(len(group), elements), group) for group in groups]),
    )
    return collective("all-reduce", ranks, elements, table, chunks=rails, groups=groups)


__all__ = [
    "multi_ring_all_gather", "multi_ring_all_reduce", "multi_ring_reduce_scatter", "rail_tree_all_reduce",
]  # fmt: skip
