"""All-to-all, and the collectives in which every rank exchanges with every other rank at once.

All-to-all: every rank has a block for every other rank. Together they transpose a P×P table of blocks of n/P.

**Direct.** Every rank posts all its sends and receives at once: α + (P−1)/P·nβ if no two ranks share a port. On a real
fabric P(P−1) flows compete; the walk shows the cost where links are shared.

**Pairwise.** Each rank has one partner at a time: in step t rank r sends to r+t+1 and receives from r−t−1. Each rank
sends one flow and receives one flow: (P−1)α + (P−1)/P·nβ.

**Direct all-reduce.** Pairwise reduce-scatter: in step t rank r sends shard r+t+1 to its owner, which adds it. Then every
rank sends its shard to all others in one step:

    T = Pα + 2(P−1)/P·nβ + (P−1)/P·nγ

with the bytes of a ring and half of its steps. In shared memory a shard that all ranks read is written once.

Bruck's algorithm, with fewer and larger messages, is in `bruck`; the node-aware algorithm is in `nodes`.
"""

import numpy as np

from meshwright.programs.collectives.compose import in_sequence
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Program, moves
from meshwright.programs.collectives.registry import algorithm


@algorithm("all-to-all", "direct")
def direct(ranks: int, elements: int) -> Program:
    """Exchange all blocks in one step."""
    source, target = np.nonzero(~np.eye(ranks, dtype=bool))
    return collective("all-to-all", ranks, elements, moves(0, source, target, source * ranks + target))


@algorithm("all-to-all", "pairwise")
def pairwise(ranks: int, elements: int) -> Program:
    """In step t rank r sends to rank r+t+1."""
    step, rank = np.ogrid[: ranks - 1, :ranks]
    target = (rank + step + 1) % ranks
    return collective("all-to-all", ranks, elements, moves(step, rank, target, rank * ranks + target))


@algorithm("reduce-scatter", "pairwise")
def reduce_scatter(ranks: int, elements: int) -> Program:
    """In step t rank r sends shard r+t+1 to its owner, which adds it."""
    step, rank = np.ogrid[: ranks - 1, :ranks]
    target = (rank + step + 1) % ranks
    return collective("reduce-scatter", ranks, elements, moves(step, rank, target, target, reduce=True))


@algorithm("all-reduce", "direct")
def all_reduce(ranks: int, elements: int) -> Program:
    """Pairwise reduce-scatter; then every rank sends its shard to all others."""
    source, target = np.nonzero(~np.eye(ranks, dtype=bool))
    gather = collective("all-gather", ranks, elements, moves(0, source, target, source))
    return in_sequence("all-reduce", reduce_scatter(ranks, elements), gather)
