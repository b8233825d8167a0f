"""The form of a collective: chunks that move between ranks, step by step.

The buffer of n elements is split into **chunks**. A chunk id names one piece of the data wherever it lies; every rank
has one place (a *slot*) for each chunk, empty at first unless the rank starts with it. A program is a table of moves:

    at `step`, rank `source` sends chunks [chunk, chunk + width) to rank `target`, which stores them or adds them up

Read along one rank, the same table is that rank's list of steps: *send* here, *receive* or *reduce* (receive and add)
there; a move from a rank to itself is a *copy*, from chunk to chunk `into`. The meaning of a step is fixed:

- Steps are numbered for all ranks together, and a send stands at the same step as its receive. A rank begins a step
  when it is done with its step before. So a program **cannot deadlock**: among the ranks that are not done, those at
  the lowest step wait for nobody but each other, and their sends and receives meet there. (Lists that were written by
  hand, rank by rank, may deadlock: `lists.assemble` finds it when it lines their steps up.)
- Within a step all sends read what was there before the step; what a rank sends to one peer in one step is one message.
- What arrives replaces the slot, or with `reduce` is added to it.

A **switch that reduces** (NVLink SHARP, InfiniBand SHARP) takes part as a node with a number above the ranks'. It keeps nothing
from step to step: what arrives for a chunk with `reduce` in one step is added up there, and what it sends goes to any number of
ranks. It starts with no data and owes none.

The promise is two sets of slots: a chunk **starts** in some, and must **end** in others as the sum of all the copies it
started as, each exactly once. That one sentence is broadcast (starts at the root, ends everywhere), reduce (the
reverse), all-gather, reduce-scatter, all-reduce and all-to-all (`contract`).

The table is a struct of numpy arrays, for a ring of 1,024 ranks has 2·1023·1024 ≈ 2.1 million moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError

Array = np.ndarray
Numbers = Any  # an array, a nested list, or one number
Row = tuple[int, int, int, int, int]  # step, source, target, chunk, width


class Moves(NamedTuple):
    """Columns of equal length, sorted by step, source and target."""

    step: Array
    source: Array
    target: Array
    chunk: Array
    width: Array
    reduce: Array
    into: Array  # the chunk it becomes at the target: the very array `chunk`, unless the program copies between chunks

    @property
    def in_place(self) -> bool:
        return self.into is self.chunk


def moves(
    step: Numbers,
    source: Numbers,
    target: Numbers,
    chunk: Numbers,
    width: Numbers = 1,
    reduce: Numbers = False,
    into: Numbers | None = None,
) -> Moves:
    """A table from arrays or numbers that broadcast against each other, sorted."""
    given = [step, source, target, chunk, width, chunk if into is None else into]
    numbers = [np.asarray(column, dtype=np.int32) for column in given]
    flat = [column.ravel() for column in np.broadcast_arrays(*numbers, np.asarray(reduce, dtype=bool))]
    return in_order(Moves(flat[0], flat[1], flat[2], flat[3], flat[4], flat[6], flat[3 if into is None else 5]))


def rows(table: Iterable[Row], reduce: bool = False) -> Moves:
    """A table from (step, source, target, chunk, width) tuples."""
    step, source, target, chunk, width = np.array(list(table), dtype=np.int32).reshape(-1, 5).T
    return moves(step, source, target, chunk, width, reduce)


def in_order(table: Moves) -> Moves:
    """Sorted by step, source, target; a table that is so already is returned as it is."""
    ordered = np.ones(max(0, len(table.step) - 1), dtype=bool)
    for column in (table.target, table.source, table.step):
        ordered &= column[1:] == column[:-1]
        ordered |= column[1:] > column[:-1]
    if ordered.all():
        return table
    return take(table, np.lexsort((table.target, table.source, table.step)))


def take(table: Moves, index: Array) -> Moves:
    """The rows at `index`."""
    chunk = table.chunk[index]
    into = chunk if table.in_place else table.into[index]
    return Moves(
        table.step[index],
        table.source[index],
        table.target[index],
        chunk,
        table.width[index],
        table.reduce[index],
        into,
    )


def joined(tables: Sequence[Moves]) -> Moves:
    """Several tables as one."""
    step, source, target, chunk, width, reduce = (np.concatenate([t[k] for t in tables]) for k in range(6))
    in_place = all(table.in_place for table in tables)
    into = chunk if in_place else np.concatenate([table.into for table in tables])
    return in_order(Moves(step, source, target, chunk, width, reduce, into))


@dataclass(frozen=True, eq=False)
class Program:
    """One collective on `ranks` ranks: chunk sizes, what starts and ends where, and the moves between."""

    operation: str
    algorithm: str
    ranks: int
    elements: int  # n: the full, unsharded buffer (of all-to-all: what one rank sends in all)
    sizes: Array  # elements of each chunk
    starts: Array  # slots, rank·chunks + chunk, that hold data before the first step
    ends: Array  # slots that must hold the chunk's sum after the last
    moves: Moves
    root: int = 0  # of broadcast, reduce, scatter, gather; the sender of point-to-point
    groups: tuple[tuple[int, ...], ...] = ()  # the nodes that a node-aware algorithm was built for
    switches: tuple[
        tuple[int, ...], ...
    ] = ()  # the ranks that each reducing switch joins; switch k has the number ranks + k

    def __post_init__(self) -> None:
        self._validate()
        for column in (self.sizes, self.starts, self.ends, *self.moves):
            column.flags.writeable = False

    def _validate(self) -> None:
        table = self.moves
        if len(table.step) == 0:
            return
        places = [table.chunk] if table.in_place else [table.chunk, table.into]
        single = int(table.width.max()) == 1
        end = max(int((place if single else place + table.width - 1).max()) for place in places)
        lowest = min(int(column.min()) for column in (table.step, table.source, table.target, *places))
        highest_rank = max(int(table.source.max()), int(table.target.max()))
        if lowest >= 0 and int(table.width.min()) >= 1 and end < self.chunks and highest_rank < self.endpoints:
            return
        bad = np.minimum.reduce([table.step, table.source, table.target, table.chunk, table.into, table.width - 1]) < 0
        bad |= np.maximum(table.chunk, table.into) + table.width > self.chunks
        bad |= np.maximum(table.source, table.target) >= self.endpoints
        k = int(np.argmax(bad))
        raise MeshwrightError(
            "MW-PROG-001",
            f"step {table.step[k]}: the move of chunk {table.chunk[k]} (width {table.width[k]}) from rank "
            f"{table.source[k]} to rank {table.target[k]} is outside {self.ranks} ranks and {self.chunks} chunks",
        )

    @property
    def chunks(self) -> int:
        return len(self.sizes)

    @property
    def endpoints(self) -> int:
        """Everything that sends or receives: the ranks, then the switches that reduce."""
        return self.ranks + len(self.switches)

    @cached_property
    def steps(self) -> int:
        return int(self.moves.step[-1]) + 1 if len(self.moves.step) else 0

    @cached_property
    def offsets(self) -> Array:
        """Where each chunk begins, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def moved(self) -> Array:
        """Elements of each move."""
        if len(self.moves.width) and self.moves.width.max() == 1:
            return self.sizes[self.moves.chunk]
        return self.offsets[self.moves.chunk + self.moves.width] - self.offsets[self.moves.chunk]

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.algorithm, self.operation])) or "program"

    def but(self, **changes: Any) -> Program:
        return replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        same = (self.operation, self.ranks, self.root, self.switches) == (
            other.operation,
            other.ranks,
            other.root,
            other.switches,
        )
        mine, theirs = ([p.sizes, p.starts, p.ends, *p.moves] for p in (self, other))
        return same and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return (
            f"<{self.name}: {self.ranks} ranks, {self.elements} elements in {self.chunks} chunks, "
            f"{self.steps} steps, {len(self.moves.step)} moves>"
        )


def split(elements: int, parts: int) -> Array:
    """Sizes of `parts` chunks of whole elements: chunk c covers [c·n//C, (c+1)·n//C)."""
    edges = np.arange(parts + 1, dtype=object if elements * parts >= 2**62 else np.int64) * elements // parts
    return np.diff(edges).astype(np.int64)


__all__ = ["Moves", "Program", "in_order", "joined", "moves", "rows", "split", "take"]
