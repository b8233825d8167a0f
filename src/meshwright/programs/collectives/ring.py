"""The ring: every rank sends to its right neighbour and receives from its left, all links busy in every step.

**All-gather.** Rank r starts with chunk r. At step t it sends the chunk that arrived last, number r−t, and receives
r−t−1. After P−1 steps every chunk has been round the ring.

**Reduce-scatter.** The same walk, but what arrives is *added* to one's own part before it is sent on. The sum of chunk
c sets out from rank c+1, passes all other ranks and is complete when it reaches rank c: at step t rank r sends chunk
r−1−t.

**All-reduce** is the one, then the other. With n/P bytes a step and no idle link, per rank

    T = 2(P−1)(α + n/P·β) + (P−1)/P·nγ        bytes sent: 2(P−1)/P·n, the least any algorithm can do

so the bandwidth term hardly depends on P; the price is a latency term that grows with it.

    step 0           step 1           step 2         P = 4, reduce-scatter: who holds how much of chunk 0
    r1: 1 of 4  ──►  r2: 2 of 4  ──►  r3: 3 of 4  ──►  r0: 4 of 4
"""

from __future__ import annotations

import numpy as np

from meshwright.programs.collectives.compose import then
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Program, moves
from meshwright.programs.collectives.registry import algorithm


@algorithm("all-gather", "ring")
def all_gather(ranks: int, elements: int) -> Program:
    """At step t rank r passes chunk r−t to the right."""
    step, rank = np.ogrid[: ranks - 1, :ranks]
    table = moves(step, source=rank, target=(rank + 1) % ranks, chunk=(rank - step) % ranks)
    return collective("all-gather", ranks, elements, table)


@algorithm("reduce-scatter", "ring")
def reduce_scatter(ranks: int, elements: int) -> Program:
    """At step t rank r passes its sum of chunk r−1−t to the right, which adds its own."""
    step, rank = np.ogrid[: ranks - 1, :ranks]
    table = moves(step, source=rank, target=(rank + 1) % ranks, chunk=(rank - 1 - step) % ranks, reduce=True)
    return collective("reduce-scatter", ranks, elements, table)


@algorithm("all-reduce", "ring")
def all_reduce(ranks: int, elements: int) -> Program:
    """Reduce-scatter, then all-gather."""
    return then("all-reduce", reduce_scatter(ranks, elements), all_gather(ranks, elements))


__all__ = ["all_gather", "all_reduce", "reduce_scatter"]
