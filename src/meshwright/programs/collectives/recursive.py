"""Recursive doubling and halving: log₂P exchanges; the distance to the partner doubles or halves each time.

**All-gather by doubling** (P a power of two). In round k rank r exchanges all its chunks with rank r XOR 2ᵏ. The blocks
grow from 1 to 2, 4, … chunks until every rank has all: log₂P·α + (P−1)/P·nβ. It sends as many bytes as the ring in a
logarithmic number of messages.

**Reduce-scatter by halving** is the reversal: send the half that the partner's side will own, add the received half,
and repeat with half the distance.

**All-reduce by halving and doubling** (Rabenseifner): 2log₂P·α + 2(P−1)/P·nβ + (P−1)/P·nγ. On an ideal network it is
faster than ring and tree at every size. On a real one every rank sends large messages to distant partners over the slow
links, while only one link per node of a ring crosses them.

**Any P.** Let p be the largest power of two up to P and e = P − p. The first 2e ranks form pairs. The odd rank of each
pair sends its data to the even rank first, and receives the result at the end: two more messages. An all-reduce takes
2(α + nβ) + nγ longer.
"""

from meshwright.programs.collectives.compose import dual, in_sequence, in_turn, relabelled
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Program, Row, rows
from meshwright.programs.collectives.registry import algorithm


def core_of(ranks: int) -> tuple[int, int]:
    """Return (p, e): the largest power of two p ≤ P, and e = P − p."""
    p = 1 << (ranks.bit_length() - 1)
    return p, ranks - p


@algorithm("all-gather", "recursive-doubling")
def doubling_all_gather(ranks: int, elements: int) -> Program:
    """Exchange all chunks with the partner at distance 1, 2, 4, …; the odd ranks of the first e pairs do not take part."""
    p, e = core_of(ranks)

    def first(k: int) -> int:
        """Return the rank of the k-th of the p ranks, which is also its first chunk; it has the chunks up to first(k+1)."""
        return k + min(k, e)

    table: list[Row] = [(0, 2 * i + 1, 2 * i, 2 * i + 1, 1) for i in range(e)]
    step, distance = int(e > 0), 1
    while distance < p:
        for k in range(p):
            block = k // distance * distance
            chunks = first(block), first(block + distance) - first(block)
            table.append((step, first(k), first(k ^ distance), *chunks))
        step, distance = step + 1, 2 * distance
    for i in range(e):  # all chunks except the one that the odd rank started with
        runs = [(0, 2 * i + 1), (2 * i + 2, ranks - 2 * i - 2)]
        table += [(step, 2 * i, 2 * i + 1, *run) for run in runs if run[1]]
    return collective("all-gather", ranks, elements, rows(table))


halving_reduce_scatter = dual("reduce-scatter", "recursive-halving", doubling_all_gather)


@algorithm("all-reduce", "halving-doubling")
def halving_doubling_all_reduce(ranks: int, elements: int) -> Program:
    """Halving, then doubling, on p ranks; the other e ranks send their buffer first and receive the result at the end."""
    p, e = core_of(ranks)
    core = [k + min(k, e) for k in range(p)]
    inner = in_sequence("all-reduce", halving_reduce_scatter(p, elements), doubling_all_gather(p, elements))
    fold = rows([(0, 2 * i + 1, 2 * i, 0, p) for i in range(e)], reduce=True)
    unfold = rows([(0, 2 * i, 2 * i + 1, 0, p) for i in range(e)])
    table = in_turn(fold, relabelled(inner.moves, core), unfold)
    return collective("all-reduce", ranks, elements, table, chunks=p)
