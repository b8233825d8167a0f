"""The representation of a collective: chunks that move between ranks, step by step.

The buffer of n elements is split into **chunks**. A chunk id names one piece of the data, on any rank.
Every rank has one *slot* for each chunk; the slot is empty unless the rank starts with the chunk. A program is a table
of moves:

    in `step`, rank `source` sends chunks [chunk, chunk + width) to rank `target`, which stores or adds them

The rows of one rank are its list of instructions: *send* where it is the source, *receive* or *reduce* (receive and
add) where it is the target. Rules:

- Step numbers are common to all ranks, and a send has the same step number as its receive. A rank starts a step when it
  has completed its previous one. So a program **cannot deadlock**: the ranks at the lowest unfinished step wait only
  for each other, and each of their sends has its receive in that step.
- Within a step all sends read the values before the step. All data from one rank to another in one step is one message.
- Received data replaces the content of the slot, or with `reduce` is added to it.

A **reducing switch** (NVLink SHARP, InfiniBand SHARP) is an endpoint whose number is above those of the ranks. It keeps
no data between steps: it adds all `reduce` messages that arrive for a chunk in one step, and sends the sum to any
number of ranks. It starts with no data and needs none at the end.

The contract is two sets of slots: a chunk **starts** in some slots, and must **end** in others as the sum of all its
initial copies, each exactly once. This covers broadcast (starts at the root, ends everywhere), reduce (the reverse),
all-gather, reduce-scatter, all-reduce and all-to-all (`contract`).

The table is a struct of numpy arrays, because a ring of 1,024 ranks has 2·1023·1024 ≈ 2.1 million moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from meshwright.errors import MeshwrightError

Array = np.ndarray
Numbers = ArrayLike  # an array, a nested list, or one number
Row = tuple[int, int, int, int, int]  # step, source, target, chunk, width


class Moves(NamedTuple):
    """Columns of equal length, sorted by step, source and target."""

    step: Array
    source: Array
    target: Array
    chunk: Array
    width: Array
    reduce: Array


def moves(
    step: Numbers,
    source: Numbers,
    target: Numbers,
    chunk: Numbers,
    width: Numbers = 1,
    reduce: Numbers = False,
) -> Moves:
    """Return a sorted table from arrays or numbers, which are broadcast against each other."""
    numbers = [np.asarray(column, dtype=np.int32) for column in (step, source, target, chunk, width)]
    columns = np.broadcast_arrays(*numbers, np.asarray(reduce, dtype=bool))
    return in_order(Moves(*(column.ravel() for column in columns)))


def rows(table: Iterable[Row], reduce: bool = False) -> Moves:
    """Return a table from (step, source, target, chunk, width) tuples."""
    step, source, target, chunk, width = np.array(list(table), dtype=np.int32).reshape(-1, 5).T
    return moves(step, source, target, chunk, width, reduce)


def in_order(table: Moves) -> Moves:
    """Return the table sorted by step, source, target; a sorted table is returned unchanged."""
    ordered = np.ones(max(0, len(table.step) - 1), dtype=bool)
    for column in (table.target, table.source, table.step):
        ordered &= column[1:] == column[:-1]
        ordered |= column[1:] > column[:-1]
    if ordered.all():
        return table
    return take(table, np.lexsort((table.target, table.source, table.step)))


def take(table: Moves, index: Array) -> Moves:
    """Return the rows at `index`."""
    return Moves(*(column[index] for column in table))


def joined(tables: Sequence[Moves]) -> Moves:
    """Return several tables as one; equal step numbers stay the same step."""
    return in_order(Moves(*map(np.concatenate, zip(*tables, strict=True))))


@dataclass(frozen=True, eq=False)
class Program:
    """One collective on `ranks` ranks: the chunk sizes, the initial and the required slots, and the moves."""

    operation: str
    algorithm: str
    ranks: int
    elements: int  # n: the full, unsharded buffer (in an all-to-all: all blocks that one rank sends)
    sizes: Array  # elements of each chunk
    starts: Array  # slots, rank·chunks + chunk, that hold data before the first step
    ends: Array  # slots that must hold the chunk's sum after the last
    moves: Moves
    root: int = 0  # of broadcast, reduce, scatter, gather; the sender of point-to-point
    groups: tuple[tuple[int, ...], ...] = ()  # the nodes that a node-aware algorithm was built for
    # The ranks that each reducing switch connects; switch k has the number ranks + k
    switches: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        self._validate()
        for column in (self.sizes, self.starts, self.ends, *self.moves):
            column.flags.writeable = False

    def _validate(self) -> None:
        table = self.moves
        if len(table.step) == 0:
            return
        bad = table.source == table.target
        for column, least, most in (
            (table.step, 0, np.inf),
            (table.source, 0, self.endpoints - 1),
            (table.target, 0, self.endpoints - 1),
            (table.chunk, 0, np.inf),
            (table.width, 1, np.inf),
        ):
            bad |= (column < least) | (column > most)
        bad |= table.chunk + table.width > self.chunks
        if not bad.any():
            return
        k = int(np.argmax(bad))
        raise MeshwrightError(
            "MW-PROG-001",
            f"step {table.step[k]}: the move of chunk {table.chunk[k]} (width {table.width[k]}) from rank "
            f"{table.source[k]} to rank {table.target[k]} is outside {self.ranks} ranks and {self.chunks} chunks, or to itself",
        )

    @property
    def chunks(self) -> int:
        return len(self.sizes)

    @property
    def endpoints(self) -> int:
        """Number of senders and receivers: the ranks, then the reducing switches."""
        return self.ranks + len(self.switches)

    @cached_property
    def steps(self) -> int:
        return int(self.moves.step[-1]) + 1 if len(self.moves.step) else 0

    @cached_property
    def offsets(self) -> Array:
        """Offset of each chunk in the buffer, and the end of the last chunk."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def moved(self) -> Array:
        """Number of elements of each move."""
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
        left, right = ([p.sizes, p.starts, p.ends, *p.moves] for p in (self, other))
        a, b = ((p.operation, p.ranks, p.root, p.switches) for p in (self, other))
        return a == b and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return (
            f"<{self.name}: {self.ranks} ranks, {self.elements} elements in {self.chunks} chunks, "
            f"{self.steps} steps, {len(self.moves.step)} moves>"
        )


def split(elements: int, parts: int) -> Array:
    """Return the sizes of C = `parts` chunks of n elements: chunk c covers [c·n//C, (c+1)·n//C)."""
    edges = np.arange(parts + 1, dtype=object if elements * parts >= 2**62 else np.int64) * elements // parts
    return np.diff(edges).astype(np.int64)
