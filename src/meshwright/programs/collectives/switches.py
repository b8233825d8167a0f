"""All-reduce with reducing switches: the switch is an endpoint of the program and adds the data that it receives.

**NVLS** (NVLink SHARP, in NVSwitch since Hopper). The buffer is divided into segments, and each segment into one shard
per rank of the node.

    reduce in       every rank sends its full segment to the switch, which adds the messages      n out of a rank
    reduce out      the switch sends each rank the sum of its shard                               n/g into a rank
    multicast in    the rank stores the sum to the switch's multicast address                     n/g out
    multicast out   the switch sends all shards to all ranks                                      n in

Each segment starts one step after the previous one, so the phases of different segments overlap and links work in both
directions. With k segments, T = (k+3)·α/2 + ((k+3) + (k−1)/g)/k · nβ, which approaches (1 + 1/g)·nβ; a ring needs
2(g−1)/g·nβ. A message to or from a switch covers half of the path between two ranks and takes α/2.

Across N nodes (NCCL's NVLS-tree) the ranks with the same shard all-reduce it between the two middle phases. If N is a
power of two they use recursive doubling: R = log₂N exchanges of n/g through every card. Otherwise they reduce and
broadcast along a binomial tree.

**SHARP** (in InfiniBand switches; NCCL's CollNet). Instead of those exchanges every rank sends its shard to a switch of
the fabric, which adds the shards and returns the sum: n/g out of a card and n/g in, for any number of nodes.

Switches add while bytes pass, so there is no γ. A node with one rank does not use its switch.
"""

from collections.abc import Callable, Sequence

import numpy as np

from meshwright.programs.collectives.compose import together
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.nodes import coordinates
from meshwright.programs.collectives.program import Array, Moves, Program, moves
from meshwright.programs.collectives.registry import Groups, algorithm
from meshwright.programs.collectives.trees import SEGMENTS, binomial_broadcast, binomial_reduce

# (local rank of a shard, its chunk in each segment) → moves; each segment is one step after the previous
Phase = Callable[[int, Array], Moves]


@algorithm("all-reduce", "nvls")
def nvls_all_reduce(ranks: int, elements: int, groups: Groups = (), segments: int = SEGMENTS) -> Program:
    """In-switch reduction inside nodes; the ranks exchange shards between nodes."""
    _, _, at = coordinates(groups)
    return switched(ranks, elements, groups, segments, exchanges(at), groups)


@algorithm("all-reduce", "sharp")
def sharp_all_reduce(ranks: int, elements: int, groups: Groups = (), segments: int = SEGMENTS) -> Program:
    """In-switch reduction inside nodes and, between nodes, in the fabric."""
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
    """Return the phases that all-reduce a shard between the ranks of equal local rank in all nodes."""
    nodes = len(at)
    all_nodes = np.arange(nodes)
    if nodes & (nodes - 1) == 0:
        return [exchange(at, all_nodes, all_nodes ^ 2**k, True) for k in range(nodes.bit_length() - 1)]
    phases: list[Phase] = []
    for program in (binomial_reduce(nodes, 1), binomial_broadcast(nodes, 1)):
        table = program.moves
        for step in range(program.steps):
            pick = np.flatnonzero(table.step == step)
            phases.append(exchange(at, table.source[pick], table.target[pick], bool(table.reduce[pick][0])))
    return phases


def exchange(at: Array, source: Array, target: Array, adds: bool) -> Phase:
    """Return the phase in which ranks of the source nodes send their shard to ranks of equal local rank in the target nodes."""

    def phase(place: int, chunk: Array) -> Moves:
        return moves(np.arange(len(chunk)), at[source, place, None], at[target, place, None], chunk, reduce=adds)

    return phase


def switched(
    ranks: int, elements: int, groups: Groups, segments: int, between: Sequence[Phase], switches: Groups
) -> Program:
    """Build the four phases of every node's switch with `between` in the middle; phase i of segment s is step s + i."""
    _, _, at = coordinates(groups)
    shards = at.shape[1]
    tables: list[Moves] = []

    def append_at(first: int, table: Moves) -> None:
        tables.append(table._replace(step=table.step + np.int32(first)))

    last = 2 + len(between)
    for j in range(shards):
        chunk = np.arange(segments) * shards + j
        step = np.arange(segments)
        for node, group in enumerate(groups):
            if len(group) == 1:
                continue
            switch, owner, members = ranks + node, at[node, j], np.array(group)[:, None]
            append_at(0, moves(step, members, switch, chunk, reduce=True))
            append_at(1, moves(step, switch, owner, chunk))
            append_at(last, moves(step, owner, switch, chunk))
            append_at(last + 1, moves(step, switch, members, chunk))
        for k, phase in enumerate(between):
            append_at(2 + k, phase(j, chunk))
    table = together(tables) if ranks > 1 else moves([], [], [], [])
    used = switches if any(len(group) > 1 for group in switches) else ()
    return collective("all-reduce", ranks, elements, table, chunks=segments * shards, groups=groups, switches=used)
