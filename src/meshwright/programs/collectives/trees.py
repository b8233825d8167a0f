"""Broadcast, scatter and their duals, in three ways: naive, binomial tree, pipelined chain.

**Naive.** The root sends to one rank after the other: (P−1)(α + nβ). The link of the root is the bottleneck; all other
links are idle.

**Binomial tree.** Every rank that has the data sends it on: in round k, 2ᵏ ranks send to 2ᵏ ranks that do not have it.
After ⌈log₂P⌉ rounds all have it: ⌈log₂P⌉(α + nβ). Every round sends the full buffer, so the bandwidth term also has the
factor ⌈log₂P⌉; only pipelining approaches nβ. A **scatter** sends halves: the root sends the upper half of the ranks
their half of the buffer, then both halves continue independently: ⌈log₂P⌉α + (P−1)/P·nβ.

**Pipelined chain.** Divide the buffer into k segments and send them along a chain; up to k links work at once. The last
segment arrives after P−1+k−1 hops: (P+k−2)(α + nβ/k). With k* = √((P−2)nβ/α) segments it approaches nβ, which is best
for large n.

Reduce and gather are the same trees in the opposite direction (`compose.reverse`). All-reduce = reduce + broadcast,
all-gather = gather + broadcast and reduce-scatter = reduce + scatter are compositions. They are simple, but the root is
their bottleneck.
"""

import numpy as np

from meshwright.programs.collectives.compose import composition, dual, in_sequence
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Program, Row, moves, rows
from meshwright.programs.collectives.registry import algorithm

SEGMENTS = 8  # default of pipelined algorithms; `formulas.best_segments` computes the best for a link and size


@algorithm("broadcast", "naive")
def naive_broadcast(ranks: int, elements: int, root: int = 0, chunks: int = 1) -> Program:
    """The root sends to each rank in turn."""
    step = np.arange(ranks - 1)
    table = moves(step, root, (root + 1 + step) % ranks, 0, chunks)
    return collective("broadcast", ranks, elements, table, chunks=chunks, root=root)


@algorithm("broadcast", "binomial")
def binomial_broadcast(ranks: int, elements: int, root: int = 0, chunks: int = 1) -> Program:
    """In round k the first 2ᵏ ranks, counted from the root, send to the next 2ᵏ."""
    table = [
        (k, (root + r) % ranks, (root + r + 2**k) % ranks, 0, chunks)
        for k in range(rounds(ranks))
        for r in range(min(2**k, ranks - 2**k))
    ]
    return collective("broadcast", ranks, elements, rows(table), chunks=chunks, root=root)


@algorithm("broadcast", "chain")
def chain_broadcast(ranks: int, elements: int, root: int = 0, segments: int = SEGMENTS) -> Program:
    """Segment s travels hop h in step h + s."""
    hop, segment = np.ogrid[: ranks - 1, :segments]
    table = moves(hop + segment, (root + hop) % ranks, (root + hop + 1) % ranks, segment)
    return collective("broadcast", ranks, elements, table, chunks=segments, root=root)


@algorithm("scatter", "naive")
def naive_scatter(ranks: int, elements: int, root: int = 0) -> Program:
    """The root sends each rank its shard in turn."""
    step = np.arange(ranks - 1)
    shard = (root + 1 + step) % ranks
    return collective("scatter", ranks, elements, moves(step, root, shard, shard), root=root)


@algorithm("scatter", "binomial")
def binomial_scatter(ranks: int, elements: int, root: int = 0) -> Program:
    """Counted from the root, rank r sends the shards [r+2ᵏ, r+2ᵏ⁺¹) to rank r+2ᵏ; k decreases from step to step."""
    table: list[Row] = []
    for step, k in enumerate(reversed(range(rounds(ranks)))):
        for r in range(0, ranks - 2**k, 2 ** (k + 1)):
            half = min(2**k, ranks - r - 2**k)
            source, target = (root + r) % ranks, (root + r + 2**k) % ranks
            table += [(step, source, target, *run) for run in wrapped(target, half, ranks)]
    return collective("scatter", ranks, elements, rows(table), root=root)


naive_reduce = dual("reduce", "naive", naive_broadcast)
binomial_reduce = dual("reduce", "binomial", binomial_broadcast)


chain_reduce = dual("reduce", "chain", chain_broadcast)
naive_gather = dual("gather", "naive", naive_scatter)


binomial_gather = dual("gather", "binomial", binomial_scatter)
naive_all_reduce = composition("all-reduce", "naive", naive_reduce, naive_broadcast)


tree_all_reduce = composition("all-reduce", "tree", binomial_reduce, binomial_broadcast)


@algorithm("all-gather", "tree")
def tree_all_gather(ranks: int, elements: int) -> Program:
    """Gather to rank 0, then broadcast, by binomial trees."""
    return in_sequence(
        "all-gather", binomial_gather(ranks, elements), binomial_broadcast(ranks, elements, chunks=ranks)
    )


@algorithm("reduce-scatter", "tree")
def tree_reduce_scatter(ranks: int, elements: int) -> Program:
    """Reduce to rank 0, then scatter, by binomial trees."""
    return in_sequence(
        "reduce-scatter", binomial_reduce(ranks, elements, chunks=ranks), binomial_scatter(ranks, elements)
    )


@algorithm("point-to-point", "direct")
def point_to_point(ranks: int, elements: int, root: int = 0, target: int | None = None) -> Program:
    """One message from `root` to `target`; the default target is the next rank."""
    target = (root + 1) % ranks if target is None else target
    table = rows([(0, root, target, 0, 1)] if target != root else [])
    return collective("point-to-point", ranks, elements, table, root=root, target=target)


def rounds(ranks: int) -> int:
    """Return ⌈log₂P⌉."""
    return (ranks - 1).bit_length()


def wrapped(first: int, count: int, modulus: int) -> list[tuple[int, int]]:
    """Return `count` chunks from `first` on, modulo `modulus`, as one or two (first, count) runs."""
    first %= modulus
    head = min(count, modulus - first)
    return [run for run in ((first, head), (0, count - head)) if run[1] > 0]
