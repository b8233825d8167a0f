"""Recursive doubling and halving: log₂P exchanges with ever farther, or ever nearer, partners.

**All-gather by doubling** (P a power of two). In round k rank r exchanges all it has with rank r XOR 2ᵏ: blocks of 1,
2, 4, … chunks double until all is there: log₂P·α + (P−1)/P·nβ. The ring's bytes at a logarithmic number of messages.

**Reduce-scatter by halving** is its reversal: exchange the half that the partner's side must own, add what comes, halve
again.

**All-reduce by halving and doubling** (Rabenseifner): 2log₂P·α + 2(P−1)/P·nβ + (P−1)/P·nγ. On an ideal network it beats
ring and tree at every size; its far partners, though, cross the slow links with large messages, where a ring crosses
with one.

**Any P.** Let p be the largest power of two up to P and e = P − p. The first 2e ranks pair up; the odd one of each pair
hands its part to the even one before, and gets its result after: two more messages. All-reduce pays 2(α + nβ) + nγ for
it.
"""

from __future__ import annotations

from meshwright.programs.collectives.compose import in_turn, relabelled, reverse, then
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Program, Row, rows
from meshwright.programs.collectives.registry import algorithm


def core_of(ranks: int) -> tuple[int, int]:
    """(p, e): the largest power of two up to P, and the rest."""
    p = 1 << (ranks.bit_length() - 1)
    return p, ranks - p


@algorithm("all-gather", "recursive-doubling")
def doubling_all_gather(ranks: int, elements: int) -> Program:
    """Exchange everything with the partner at distance 1, 2, 4, …; odd ranks of the first pairs wait outside."""
    p, e = core_of(ranks)

    def first(k: int) -> int:
        """The rank, and the first chunk, of the k-th member of the core; member k keeps the chunks up to first(k+1)."""
        return k + min(k, e)

    table: list[Row] = [(0, 2 * i + 1, 2 * i, 2 * i + 1, 1) for i in range(e)]
    step, distance = int(e > 0), 1
    while distance < p:
        for k in range(p):
            block = k // distance * distance
            chunks = first(block), first(block + distance) - first(block)
            table.append((step, first(k), first(k ^ distance), *chunks))
        step, distance = step + 1, 2 * distance
    for i in range(e):  # all but the odd rank's own chunk
        runs = [(0, 2 * i + 1), (2 * i + 2, ranks - 2 * i - 2)]
        table += [(step, 2 * i, 2 * i + 1, *run) for run in runs if run[1]]
    return collective("all-gather", ranks, elements, rows(table))


@algorithm("reduce-scatter", "recursive-halving")
def halving_reduce_scatter(ranks: int, elements: int) -> Program:
    """Recursive doubling backwards."""
    return reverse(doubling_all_gather(ranks, elements))


@algorithm("all-reduce", "halving-doubling")
def halving_doubling_all_reduce(ranks: int, elements: int) -> Program:
    """Halving then doubling in the core; outside ranks send all they have in, and get all back."""
    p, e = core_of(ranks)
    core = [k + min(k, e) for k in range(p)]
    inner = then("all-reduce", halving_reduce_scatter(p, elements), doubling_all_gather(p, elements))
    fold = rows([(0, 2 * i + 1, 2 * i, 0, p) for i in range(e)], reduce=True)
    unfold = rows([(0, 2 * i, 2 * i + 1, 0, p) for i in range(e)])
    table = in_turn(fold, relabelled(inner.moves, core), unfold)
    return collective("all-reduce", ranks, elements, table, chunks=p)


__all__ = ["doubling_all_gather", "halving_doubling_all_reduce", "halving_reduce_scatter"]
