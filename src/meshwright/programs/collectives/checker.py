"""Proof by symbolic execution that a program does what it promises.

Instead of numbers every slot holds a **value** made of contributions. At first rank r's own chunks are leaves, the
contribution of r. A store copies the value; a reduction makes a new one of two. In the end the value of every promised
slot must consist of the contribution of each rank that started with that chunk, each exactly once. As sums do not care
for order, that proves the result for every possible input. On the way the check refuses

- a chunk that is sent, or added to, before it was written;
- a chunk written twice in one step, or overwritten in the step that sends it (a race);
- a store of what the same rank has sent before, with nothing changed since (a step said twice).

**Each exactly once** is proved in one of two ways. If no value is an operand of two reductions, the values form a
forest, so the leaves under a value are all different and it is enough to *count* them: that settles rings, trees and
halving. Otherwise (two partners that both add the same pair) the sets of contributions are computed, as bits, and two
operands must be disjoint.

Deadlock is impossible in this form (see `program`); lists written by rank are lined up, or refused, by
`lists.assemble`. The loop runs over steps, with numpy on all moves of a step: a 1,024-rank ring, two million moves,
takes some tenths of a second.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError, listed
from meshwright.programs.collectives.contract import OPERATIONS, SHARDED, chunk_sizes, contract
from meshwright.programs.collectives.program import Array, Program

DENSE_SLOTS = 2**25  # up to here a plain array holds all slots; above, only those that the program touches


class Single(NamedTuple):
    """Moves of one chunk each: a run of chunks is told apart."""

    step: Array
    move: Array | None  # the row of the program's table; None: the same row
    chunk: Array
    source: Array  # slot read
    target: Array  # slot written
    reduce: Array
    bounds: Array  # rows of step t are [bounds[t], bounds[t+1])


def check(program: Program) -> Program:
    """The program itself, proved; or an error that names rank, step and chunk."""
    keeps_promise(program)
    singles = single_chunk_moves(program)
    if not program.moves.in_place:
        copies_fit(program, singles)
    slots = program.endpoints * program.chunks
    source, target, starts, ends = singles.source, singles.target, program.starts, program.ends
    first_switch = program.ranks * program.chunks
    if slots > DENSE_SLOTS:
        touched = np.unique(np.concatenate([source, target, starts, ends]))
        source, target, starts, ends = (np.searchsorted(touched, s) for s in (source, target, starts, ends))
        slots, first_switch = len(touched), int(np.searchsorted(touched, first_switch))
    singles = singles._replace(source=source, target=target)
    state = State(program, singles, slots, starts, first_switch)
    for step in range(program.steps):
        low, high = singles.bounds[step], singles.bounds[step + 1]
        if high > low:
            state.advance(slice(low, high))
    state.finish(ends)
    return program


def keeps_promise(program: Program) -> None:
    """A program named after an operation must start and end as that operation does."""
    if program.operation not in OPERATIONS:
        return
    target = int(program.ends[0]) // program.chunks if len(program.ends) else 0
    starts, ends = contract(program.operation, program.ranks, program.chunks, program.root, target)
    fits = np.array_equal(starts, program.starts) and np.array_equal(ends, program.ends)
    if program.operation in SHARDED or program.operation == "all-to-all":
        sizes = chunk_sizes(program.operation, program.ranks, program.elements, program.chunks)
        fits = fits and np.array_equal(sizes, program.sizes)
    elif int(program.sizes.sum()) != program.elements or (program.chunks and program.sizes.min() < 0):
        fits = False
    if not fits:
        raise MeshwrightError(
            "MW-PROG-010",
            f"{program!r} does not start and end as {program.operation} does",
            why=OPERATIONS[program.operation],
        )


def single_chunk_moves(program: Program) -> Single:
    """The program's moves, one row a chunk."""
    table, chunks = program.moves, program.chunks
    index = None
    chunk, into, source, target = table.chunk, table.into, table.source, table.target
    step, reduce = table.step, table.reduce
    if table.width.max(initial=1) > 1:
        index = np.repeat(np.arange(len(table.step)), table.width)
        within = np.arange(len(index)) - np.repeat(np.cumsum(table.width) - table.width, table.width)
        step, source, target, reduce = (column[index] for column in (step, source, target, reduce))
        chunk = chunk[index] + within.astype(np.int32)
        into = chunk if table.in_place else table.into[index] + within.astype(np.int32)
    number: type = np.int32 if program.endpoints * chunks < 2**31 else np.int64
    read: Array = source.astype(number)
    written: Array = target.astype(number)
    read *= chunks
    written *= chunks
    read += chunk
    written += into
    bounds = np.searchsorted(step, np.arange(program.steps + 1))
    return Single(step, index, chunk, read, written, reduce, bounds)


def copies_fit(program: Program, singles: Single) -> None:
    """A chunk that becomes another has its size."""
    into = singles.target % program.chunks
    bad = program.sizes[singles.chunk] != program.sizes[into]
    if bad.any():
        k = int(np.argmax(bad))
        raise MeshwrightError(
            "MW-PROG-015",
            f"{program.name}: rank {singles.target[k] // program.chunks}, step {singles.step[k]}: chunk {singles.chunk[k]} of "
            f"{program.sizes[singles.chunk[k]]} elements cannot become chunk {into[k]} of {program.sizes[into[k]]}",
        )


class State:
    """What every slot holds, step after step."""

    def __init__(self, program: Program, singles: Single, slots: int, starts: Array, first_switch: int) -> None:
        self.program, self.singles = program, singles
        self.first_switch = first_switch  # slots from here on are those of switches that reduce
        self.leaves, self.reductions = len(starts), int(singles.reduce.sum())
        self.held = np.full(slots, -1, dtype=np.int32)  # the number of a value, or nothing
        self.held[starts] = np.arange(self.leaves)
        self.origin = None  # the chunk that a slot's data is of, where copies may change it
        if not program.moves.in_place:
            self.origin = np.full(slots, -1, dtype=np.int32)
            self.origin[starts] = rank_and_chunk(program, program.starts)[1]
        self.size = np.ones(self.leaves + self.reductions, dtype=np.int32)  # leaves under a value, repeated ones too
        self.operands = np.zeros((2, self.reductions), dtype=np.int32)  # of the values after the leaves
        self.made_by = np.zeros(self.reductions, dtype=np.int32)
        self.made = 0
        self.added = np.concatenate([[0], np.cumsum(singles.reduce, dtype=np.int32)])  # reductions before each row
        self.writer = np.zeros(slots, dtype=np.int32)  # 1 + the row that last wrote a slot
        self.giver = np.full(slots, -1, dtype=np.int32)  # the slot that a slot's content was last stored from

    def advance(self, rows: slice) -> None:
        """All moves of one step, on what was there before it."""
        source, target = (slot[rows].astype(np.intp) for slot in (self.singles.source, self.singles.target))
        reduce = self.singles.reduce[rows]
        sent, there = self.held[source], self.held[target]
        if sent.min() < 0:
            self.refuse(rows, sent < 0, "MW-PROG-011", "sends chunk {chunk} to rank {target} before it was written")
        added = self.added[rows.stop] - self.added[rows.start]
        if added < len(sent) and (sent == there).any():
            self.find_repeats(rows, source, target, (sent == there) & ~reduce)
        in_switch = reduce & (target >= self.first_switch) if self.program.switches else None
        self.find_races(rows, source, target, reduce, in_switch)
        if in_switch is not None and in_switch.any():
            self.combine(rows, target, sent, there, np.flatnonzero(in_switch))
            self.unite(rows, sent, there, np.flatnonzero(reduce & ~in_switch))
        elif added:
            which = np.arange(len(sent)) if added == len(sent) else np.flatnonzero(reduce)
            self.unite(rows, sent, there, which)
        if added < len(sent):
            self.giver[target] = source
        if self.origin is not None:
            self.move_origin(rows, source, target, reduce)
        self.held[target] = sent

    def unite(self, rows: slice, sent: Array, there: Array, which: Array) -> None:
        """Where `reduce`, `sent` becomes a new value of what came and what was there."""
        if len(which) == 0:
            return
        a, b = sent[which], there[which]
        if b.min() < 0:
            self.refuse(
                rows,
                np.isin(np.arange(len(sent)), which[b < 0]),
                "MW-PROG-011",
                "adds chunk {chunk} from rank {source} to nothing: its own was never written",
                at="target",
            )
        first, self.made = self.made, self.made + len(which)
        self.operands[0, first : self.made], self.operands[1, first : self.made] = a, b
        self.made_by[first : self.made] = rows.start + which
        self.size[self.leaves + first : self.leaves + self.made] = self.size[a] + self.size[b]
        sent[which] = np.arange(self.leaves + first, self.leaves + self.made, dtype=np.int32)

    def combine(self, rows: slice, target: Array, sent: Array, there: Array, which: Array) -> None:
        """What arrives at one slot of a switch in one step becomes one value, whatever the switch passed on before."""
        which = which[np.argsort(target[which], kind="stable")]
        first = np.flatnonzero(np.append(True, target[which][1:] != target[which][:-1]))
        turn = np.arange(len(which)) - np.repeat(first, np.diff(np.append(first, len(which))))
        for k in range(1, int(turn.max()) + 1):
            here = np.flatnonzero(turn == k)
            there[which[here]] = sent[which[here - 1]]
            self.unite(rows, sent, there, which[here])

    def find_races(
        self, rows: slice, source: Array, target: Array, reduce: Array, in_switch: Array | None = None
    ) -> None:
        """No slot is written twice in a step (but a switch adds up all that arrives), nor overwritten in the step that sends it."""
        ticket = np.arange(rows.start + 1, rows.stop + 1, dtype=np.int32)
        self.writer[target] = ticket
        last = self.writer[target]
        twice, keeps = last != ticket, reduce
        if in_switch is not None:
            twice = twice & ~(in_switch & in_switch[last - rows.start - 1])
            keeps = reduce & ~in_switch
        if twice.any():
            self.refuse(rows, twice, "MW-PROG-014", "has chunk {into} written twice in one step", at="target")
        last = self.writer[source]
        if last.max() > rows.start:
            lost = (last > rows.start) & ~keeps[np.maximum(last - rows.start - 1, 0)]
            if lost.any():
                self.refuse(rows, lost, "MW-PROG-014", "has chunk {chunk} overwritten in the step that sends it")

    def find_repeats(self, rows: slice, source: Array, target: Array, same: Array) -> None:
        """No rank is sent what it got from the very same slot before, with neither written since."""
        again = same & (self.giver[target] == source) & (self.writer[source] < self.writer[target])
        if again.any():
            self.refuse(rows, again, "MW-PROG-012", "receives chunk {chunk} from rank {source} twice", at="target")

    def move_origin(self, rows: slice, source: Array, target: Array, reduce: Array) -> None:
        assert self.origin is not None
        mixed = reduce & (self.origin[source] != self.origin[target])
        if mixed.any():
            self.refuse(rows, mixed, "MW-PROG-015", "adds data of another chunk to chunk {into}", at="target")
        self.origin[target] = self.origin[source]

    def finish(self, ends: Array) -> None:
        """Every promised slot holds the contributions of all ranks that started with its chunk."""
        program = self.program
        rank, chunk = rank_and_chunk(program, program.ends)
        held = self.held[ends]
        if (held < 0).any():
            self.refuse_end(rank, chunk, held < 0, "never receives it")
        if self.origin is not None and (self.origin[ends] != chunk).any():
            self.refuse_end(rank, chunk, self.origin[ends] != chunk, "holds another chunk's data there")
        is_operand = np.zeros(len(self.size), dtype=bool)
        is_operand[self.operands[0, : self.made]] = is_operand[self.operands[1, : self.made]] = True
        sets = None if np.count_nonzero(is_operand) == 2 * self.made else self.contributions()
        starters = np.bincount(rank_and_chunk(program, program.starts)[1], minlength=program.chunks)
        wrong = self.size[held] != starters[chunk]  # disjoint leaves of one chunk: as many as there are is all of them
        if wrong.any():
            k = int(np.argmax(wrong))
            sets = sets or self.contributions()
            wanted = set((program.starts[program.starts % program.chunks == chunk[k]] // program.chunks).tolist())
            lacking = sorted(wanted - set(members(sets[held[k]])))
            self.refuse_end(rank, chunk, wrong, f"lacks the part of {ranks_of(lacking)}")

    def contributions(self) -> list[int]:
        """The ranks that each value is made of, as bits; two operands that share one are refused."""
        sets = [1 << rank for rank in rank_and_chunk(self.program, self.program.starts)[0].tolist()]
        for k, (a, b) in enumerate(self.operands[:, : self.made].T.tolist()):
            if sets[a] & sets[b]:
                move = int(self.made_by[k])
                self.refuse(
                    slice(move, move + 1),
                    np.ones(1),
                    "MW-PROG-013",
                    "adds chunk {chunk} from rank {source}, though it "
                    f"holds the part of {ranks_of(members(sets[a] & sets[b]))} already",
                    at="target",
                )
            sets.append(sets[a] | sets[b])
        return sets

    def refuse(self, rows: slice, bad: Array, code: str, what: str, at: str = "source") -> None:
        """Raise for the first bad move of a step."""
        k = rows.start + int(np.argmax(bad))
        table, move = self.program.moves, k if self.singles.move is None else int(self.singles.move[k])
        chunk = int(self.singles.chunk[k])
        into = chunk + int(table.into[move]) - int(table.chunk[move])
        who = int(getattr(table, at)[move])
        text = what.format(chunk=chunk, into=into, source=table.source[move], target=table.target[move])
        raise MeshwrightError(code, f"{self.program.name}: rank {who}, step {int(table.step[move])}: {text}")

    def refuse_end(self, rank: Array, chunk: Array, bad: Array, what: str) -> None:
        k = int(np.argmax(bad))
        slot = rank[k] * self.program.chunks + chunk[k]
        table = self.program.moves
        into = table.target.astype(np.int64) * self.program.chunks + table.into
        written = np.flatnonzero((into <= slot) & (slot < into + table.width))
        when = f"last written at step {table.step[written[-1]]}" if len(written) else "never written"
        raise MeshwrightError(
            "MW-PROG-016",
            f"{self.program.name}: rank {rank[k]}, after step {self.program.steps - 1}: chunk {chunk[k]} ({when}) is not what "
            f"was promised: the rank {what}",
        )


def rank_and_chunk(program: Program, slots: Array) -> tuple[Array, Array]:
    rank = slots // max(1, program.chunks)
    return rank, slots - rank * program.chunks


def members(bits: int) -> list[int]:
    """The ranks in a set."""
    return [k for k in range(bits.bit_length()) if bits >> k & 1]


def ranks_of(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + listed([str(r) for r in ranks], 8)


__all__ = ["check", "single_chunk_moves"]
