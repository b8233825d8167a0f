"""Bruck's algorithms: ⌈log₂P⌉ rounds for any number of ranks. In round k the partner is 2ᵏ ranks away (mod P).

**All-gather.** Before round k rank r holds the chunks r, r+1, …, r+2ᵏ−1 (mod P). It sends them to rank r−2ᵏ and
receives the next 2ᵏ chunks from rank r+2ᵏ. The last round sends only the missing chunks. The cost is
⌈log₂P⌉α + (P−1)/P·nβ: the same as recursive doubling, but P need not be a power of two.

**Barrier** (dissemination) is that all-gather with empty chunks. After ⌈log₂P⌉ rounds every rank has a message that
depends on every other rank: ⌈log₂P⌉α.

**All-to-all.** The block from i to j must travel d = (j−i) mod P ranks. Write d in binary. In round k every block whose
bit k is set moves 2ᵏ ranks forward, and a rank sends all such blocks in one message. This needs ⌈log₂P⌉ messages
instead of P−1, but each block is sent once per set bit, about (log₂P)/2 times: log₂P·α + (log₂P)/2·nβ if P is a power
of two. It is the best choice for small blocks.
"""

import numpy as np

from meshwright.programs.collectives.compose import dual
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Moves, Program, Row, joined, moves, rows
from meshwright.programs.collectives.registry import algorithm
from meshwright.programs.collectives.trees import rounds, wrapped


def circle(ranks: int) -> Moves:
    """Return the moves of the all-gather."""
    table: list[Row] = []
    for k in range(rounds(ranks)):
        sent = min(2**k, ranks - 2**k)
        for rank in range(ranks):
            table += [(k, rank, (rank - 2**k) % ranks, *run) for run in wrapped(rank, sent, ranks)]
    return rows(table)


@algorithm("all-gather", "bruck")
def bruck_all_gather(ranks: int, elements: int) -> Program:
    """The number of chunks on each rank doubles in every round."""
    return collective("all-gather", ranks, elements, circle(ranks))


bruck_reduce_scatter = dual("reduce-scatter", "bruck", bruck_all_gather)


@algorithm("barrier", "dissemination")
def dissemination_barrier(ranks: int, elements: int = 0) -> Program:
    """An all-gather of P empty chunks: a rank that has chunk r knows that rank r has reached the barrier."""
    return collective("barrier", ranks, 0, circle(ranks))


@algorithm("all-to-all", "bruck")
def bruck_all_to_all(ranks: int, elements: int) -> Program:
    """In round k the blocks whose distance has bit k set move 2ᵏ ranks; earlier rounds have done the lower bits."""
    tables = []
    for k in range(rounds(ranks)):
        distance = np.arange(ranks)[(np.arange(ranks) >> k) & 1 == 1]
        origin, distance = np.meshgrid(np.arange(ranks), distance, indexing="ij")
        holder = (origin + distance % 2**k) % ranks
        chunk = origin * ranks + (origin + distance) % ranks
        tables.append(moves(k, holder, (holder + 2**k) % ranks, chunk))
    return collective("all-to-all", ranks, elements, joined(tables) if tables else rows([]))
