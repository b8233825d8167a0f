"""The ring: every rank sends to its right neighbour and receives from its left one; all links are busy in every step.

**All-gather.** Rank r starts with chunk r. In step t it sends the chunk that arrived last, r−t, and receives chunk
r−t−1. After P−1 steps every rank has every chunk.

**Reduce-scatter.** The same pattern, but a rank *adds* its local chunk to the received one before it forwards the sum.
The sum of chunk c starts at rank c+1, passes all other ranks and is complete at rank c: in step t rank r sends chunk
r−1−t.

**All-reduce** is a reduce-scatter followed by an all-gather. Each step transfers n/P bytes per rank, and no link is
idle:

    T = 2(P−1)(α + n/P·β) + (P−1)/P·nγ        bytes sent per rank: 2(P−1)/P·n, the minimum for any algorithm

The bandwidth term is almost independent of P; the latency term is proportional to P−1.

    step 0           step 1           step 2         P = 4, reduce-scatter: contributions in the sum of chunk 0
    r1: 1 of 4  ──►  r2: 2 of 4  ──►  r3: 3 of 4  ──►  r0: 4 of 4
"""

import numpy as np

from meshwright.programs.collectives.compose import composition
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Program, moves
from meshwright.programs.collectives.registry import algorithm


@algorithm("all-gather", "ring")
def all_gather(ranks: int, elements: int) -> Program:
    """In step t rank r sends chunk r−t to its right neighbour."""
    step, rank = np.ogrid[: ranks - 1, :ranks]
    table = moves(step, source=rank, target=(rank + 1) % ranks, chunk=(rank - step) % ranks)
    return collective("all-gather", ranks, elements, table)


@algorithm("reduce-scatter", "ring")
def reduce_scatter(ranks: int, elements: int) -> Program:
    """In step t rank r sends its partial sum of chunk r−1−t to its right neighbour, which adds its local chunk."""
    step, rank = np.ogrid[: ranks - 1, :ranks]
    table = moves(step, source=rank, target=(rank + 1) % ranks, chunk=(rank - 1 - step) % ranks, reduce=True)
    return collective("reduce-scatter", ranks, elements, table)


all_reduce = composition("all-reduce", "ring", reduce_scatter, all_gather)
