"""Bruck's algorithms: ⌈log₂P⌉ rounds for any number of ranks, with partners at distance 2ᵏ round a circle.

**All-gather.** Before round k rank r has the chunks r, r+1, …, r+2ᵏ−1 (mod P). It sends them to rank r−2ᵏ, and so gets
the next 2ᵏ from r+2ᵏ; the last round sends only what lacks: ⌈log₂P⌉α + (P−1)/P·nβ. Recursive doubling's cost without
its powers of two.

**Barrier** (dissemination) is that all-gather with empty chunks: after ⌈log₂P⌉ rounds everyone has heard of everyone:
⌈log₂P⌉α.

**All-to-all.** The block from i to j must travel d = (j−i) mod P places. Write d in binary: in round k every block
whose bit k is set, wherever it is by then, hops 2ᵏ ranks on, all of a rank's together in one message. ⌈log₂P⌉ messages
instead of P−1, but a block is sent once for every bit set, about (log₂P)/2 times: log₂P·α + (log₂P)/2·nβ at powers of
two. Best for small blocks.
"""

from __future__ import annotations

import numpy as np

from meshwright.programs.collectives.compose import reverse
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Moves, Program, Row, joined, moves, rows
from meshwright.programs.collectives.registry import algorithm
from meshwright.programs.collectives.trees import rounds, wrapped


def circle(ranks: int) -> Moves:
    """The moves of the all-gather."""
    table: list[Row] = []
    for k in range(rounds(ranks)):
        sent = min(2**k, ranks - 2**k)
        for rank in range(ranks):
            table += [(k, rank, (rank - 2**k) % ranks, *run) for run in wrapped(rank, sent, ranks)]
    return rows(table)


@algorithm("all-gather", "bruck")
def bruck_all_gather(ranks: int, elements: int) -> Program:
    """Blocks double round the circle."""
    return collective("all-gather", ranks, elements, circle(ranks))


@algorithm("reduce-scatter", "bruck")
def bruck_reduce_scatter(ranks: int, elements: int) -> Program:
    """The all-gather backwards."""
    return reverse(bruck_all_gather(ranks, elements))


@algorithm("barrier", "dissemination")
def dissemination_barrier(ranks: int, elements: int = 0) -> Program:
    """The all-gather of P empty chunks: who has chunk r knows that rank r arrived."""
    return collective("barrier", ranks, 0, circle(ranks))


@algorithm("all-to-all", "bruck")
def bruck_all_to_all(ranks: int, elements: int) -> Program:
    """In round k the blocks whose distance has bit k set hop 2ᵏ ranks; they have made the lower bits' hops already."""
    tables = []
    for k in range(rounds(ranks)):
        distance = np.arange(ranks)[(np.arange(ranks) >> k) & 1 == 1]
        origin, distance = np.meshgrid(np.arange(ranks), distance, indexing="ij")
        holder = (origin + distance % 2**k) % ranks
        chunk = origin * ranks + (origin + distance) % ranks
        tables.append(moves(k, holder, (holder + 2**k) % ranks, chunk))
    return collective("all-to-all", ranks, elements, joined(tables) if tables else rows([]))


__all__ = ["bruck_all_gather", "bruck_all_to_all", "bruck_reduce_scatter", "dissemination_barrier"]
