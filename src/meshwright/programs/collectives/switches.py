"""All-reduce with switches that add: the switch is a node of the program, and a byte crosses a link once instead of twice.

**NVLS** (NVLink SHARP, in NVSwitch since Hopper). The buffer is cut into segments, a segment into one shard for each rank of the node.

    gather up     every rank sends its whole segment to the switch, which adds what arrives         n out of a rank
    hand down     the switch gives every rank the sum of the rank's own shard                       n/g into a rank
    hand up       the rank stores that sum back to the switch's multicast address                   n/g out
    spread down   the switch sends all shards to all ranks                                          n in

Segments follow one another by one step, so the phases of different segments overlap and links work in both directions:
with k segments, T = (k+3)·α/2 + ((k+3) + (k−1)/g)/k · nβ, which approaches (1 + 1/g)·nβ where a ring needs 2(g−1)/g·nβ. A message to or
from a switch makes half of the way between two ranks and pays α/2.

Across N nodes (NCCL's NVLS-tree) the ranks that hold the same shard add it up between the two middle phases: recursive doubling where N
is a power of two, R = log₂N exchanges of n/g through every card; else up and down a binomial tree.

**SHARP** (in InfiniBand switches; NCCL's CollNet). Instead of those exchanges every rank sends its shard to the switch of the fabric, which
adds and returns it: n/g out of a card and n/g in, whatever the number of nodes.

Switches add while bytes pass: no γ. A node of one rank skips its own switch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshwright.programs.collectives.compose import together
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.nodes import coordinates
from meshwright.programs.collectives.program import Array, Moves, Program, moves
from meshwright.programs.collectives.registry import Groups, algorithm
from meshwright.programs.collectives.trees import SEGMENTS, binomial_broadcast, binomial_reduce

Phase = Callable[
    [int, Array], Moves
]  # of a shard's place and its chunks, one a segment, each a step after the one before


@algorithm("all-reduce", "nvls")
def nvls_all_reduce(ranks: int, elements: int, groups: Groups = (), segments: int = SEGMENTS) -> Program:
    """In-switch reduction inside nodes, exchanges of shards between them."""
    _, _, at = coordinates(groups)
    return switched(ranks, elements, groups, segments, exchanges(at), groups)


@algorithm("all-reduce", "sharp")
def sharp_all_reduce(ranks: int, elements: int, groups: Groups = (), segments: int = SEGMENTS) -> Program:
    """In-switch reduction inside nodes and in the fabric between them."""
    _, _, at = coordinates(groups)
    fabric = ranks + len(groups)
    between: list[Phase] = []
    if len(groups) > 1:
        between = [
            lambda j, chunk: moves(np.arange(len(chunk)), at[:, j, None], fabric, chunk, reduce=True),
            lambda j, chunk: moves(np.arange(len(chunk)), fabric, at[:, j, None], chunk),
        ]
    switches = (*groups, tuple(range(ranks))) if between else groups
    return switched(ranks, elements, groups, segments, between, switches)


def exchanges(at: Array) -> list[Phase]:
    """All-reduce of a shard between the ranks at its place of every node."""
    nodes = len(at)
    everyone = np.arange(nodes)
    if nodes & (nodes - 1) == 0:
        return [exchange(at, everyone, everyone ^ 2**k, True) for k in range(nodes.bit_length() - 1)]
    phases: list[Phase] = []
    for program in (binomial_reduce(nodes, 1), binomial_broadcast(nodes, 1)):
        table = program.moves
        for step in range(program.steps):
            pick = np.flatnonzero(table.step == step)
            phases.append(exchange(at, table.source[pick], table.target[pick], bool(table.reduce[pick][0])))
    return phases


def exchange(at: Array, source: Array, target: Array, adds: bool) -> Phase:
    """The ranks of the source nodes send their shard to those at the same place of the target nodes."""

    def phase(place: int, chunk: Array) -> Moves:
        return moves(np.arange(len(chunk)), at[source, place, None], at[target, place, None], chunk, reduce=adds)

    return phase


def switched(
    ranks: int, elements: int, groups: Groups, segments: int, between: Sequence[Phase], switches: Groups
) -> Program:
    """The four phases of every node's switch with `between` in the middle; phase i of segment s stands at step s + i."""
    _, _, at = coordinates(groups)
    shards = at.shape[1]
    tables: list[Moves] = []

    def put(first: int, table: Moves) -> None:
        tables.append(table._replace(step=table.step + np.int32(first)))

    last = 2 + len(between)
    for j in range(shards):
        chunk = np.arange(segments) * shards + j
        step = np.arange(segments)
        for node, group in enumerate(groups):
            if len(group) == 1:
                continue
            switch, owner, members = ranks + node, at[node, j], np.array(group)[:, None]
            put(0, moves(step, members, switch, chunk, reduce=True))
            put(1, moves(step, switch, owner, chunk))
            put(last, moves(step, owner, switch, chunk))
            put(last + 1, moves(step, switch, members, chunk))
        for k, phase in enumerate(between):
            put(2 + k, phase(j, chunk))
    table = together(tables) if ranks > 1 else moves([], [], [], [])
    used = switches if any(len(group) > 1 for group in switches) else ()
    return collective("all-reduce", ranks, elements, table, chunks=segments * shards, groups=groups, switches=used)


__all__ = ["nvls_all_reduce", "sharp_all_reduce"]
