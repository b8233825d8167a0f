"""Build larger programs from smaller ones.

    in_turn(a, b)            the moves of a, then the moves of b; the numbers of steps add up
    together([a, b])         the moves of both in the same steps: for disjoint groups of ranks or parts of the buffer
    relabelled(a, …)         the moves of a small program on a subset of the ranks of a larger one, with finer chunks
    in_sequence(op, p, q)    two programs on the same chunks as one, e.g. all-reduce = reduce-scatter then all-gather
    reverse(p)               the dual: the steps in reverse order, each move in the opposite direction, stores become sums
    dual(…), composition(…)  registered algorithms that are the reverse of one, or several in sequence

Why reversal works: in a broadcast every rank receives each chunk once, so the moves form a tree (or chain, or ring)
that leads away from the root. Reverse the direction of every move and the order of the steps, and the same tree brings
every rank's contribution to the root exactly once. Stores become additions. In a scatter each chunk travels along one
path, so its dual, gather, has stores in both directions.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import wraps
from inspect import Signature, signature
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.programs.collectives.contract import DUAL, collective
from meshwright.programs.collectives.program import Array, Moves, Program, in_order, joined
from meshwright.programs.collectives.registry import Builder, algorithm

together = joined


def in_turn(*tables: Moves) -> Moves:
    """Return the moves of the tables one after the other."""
    shifted, first = [], 0
    for table in tables:
        shifted.append(table._replace(step=table.step + np.int32(first)))
        first += int(table.step[-1]) + 1 if len(table.step) else 0
    return joined(shifted)


def relabelled(table: Moves, members: Sequence[int], edges: Array | None = None) -> Moves:
    """Rank k becomes members[k]; chunk c becomes the finer chunks [edges[c], edges[c+1])."""
    rank = np.asarray(members, dtype=np.int32)
    source, target = rank[table.source], rank[table.target]
    chunk, width = table.chunk, table.width
    if edges is not None:
        edges = np.asarray(edges, dtype=np.int32)
        chunk, width = edges[chunk], edges[chunk + width] - edges[chunk]
    return in_order(Moves(table.step, source, target, chunk, width, table.reduce))


def in_sequence(operation: str, *programs: Program) -> Program:
    """Run programs one after the other as one program of `operation`."""
    first, *following = programs
    for other in following:
        if other.ranks != first.ranks or not np.array_equal(other.sizes, first.sizes):
            what = f"{first!r} and {other!r} cannot be combined"
            raise MeshwrightError("MW-PROG-002", what, why="Both need the same number of ranks and the same chunks")
    table = in_turn(*(p.moves for p in programs))
    groups = next((p.groups for p in programs if p.groups), ())
    return collective(operation, first.ranks, first.elements, table, sizes=first.sizes, root=first.root, groups=groups)


def reverse(program: Program) -> Program:
    """Return the dual program: broadcast ↔ reduce, scatter ↔ gather, all-gather ↔ reduce-scatter."""
    if program.operation not in DUAL:
        raise MeshwrightError("MW-PROG-003", f"{program.operation or 'this program'} has no dual", valid=sorted(DUAL))
    dual, table = DUAL[program.operation], program.moves
    reduces = np.full(len(table.step), dual in ("reduce", "reduce-scatter"))
    reversed_moves = table._replace(
        step=np.int32(program.steps - 1) - table.step, source=table.target, target=table.source, reduce=reduces
    )
    return collective(
        dual,
        program.ranks,
        program.elements,
        in_order(reversed_moves),
        sizes=program.sizes,
        root=program.root,
        groups=program.groups,
    )


def dual(operation: str, name: str, of: Builder) -> Builder:
    """Register the reverse of an algorithm, with its options."""

    @wraps(of)
    def build(ranks: int, elements: int, **options: Any) -> Program:
        return reverse(of(ranks, elements, **options))

    return algorithm(operation, name)(build)


def composition(operation: str, name: str, *parts: Builder, options: Sequence[str] = ()) -> Builder:
    """Register algorithms that run one after the other; `options` of the parts can be chosen, for all alike."""

    def build(ranks: int, elements: int, **chosen: Any) -> Program:
        return in_sequence(operation, *(part(ranks, elements, **chosen) for part in parts))

    accepted = signature(parts[0]).parameters
    build.__signature__ = Signature([accepted[word] for word in ("ranks", "elements", *options)])  # type: ignore[attr-defined]
    return algorithm(operation, name)(build)


def grid(elements: int, parts: set[int]) -> tuple[Array, dict[int, Array]]:
    """Return chunk sizes such that every p in `parts` divides the buffer at chunk boundaries, and the first chunk of each part.

    The boundaries are the fractions c/p of the buffer, rounded down to whole elements, as in `split(n, p)`.
    """
    cuts = sorted({Fraction(c, p) for p in parts for c in range(p + 1)})
    place = {cut: k for k, cut in enumerate(cuts)}
    offsets = np.array([int(cut * elements) for cut in cuts], dtype=np.int64)
    return np.diff(offsets), {p: np.array([place[Fraction(c, p)] for c in range(p + 1)]) for p in parts}
