"""Prove by symbolic execution that a program computes its operation.

Every slot holds a symbolic **value** instead of numbers. A value is a sum of contributions. At the start the chunks of
rank r are leaves: the contribution of r. A store copies a value. A reduction makes a new value from two operands. At
the end the value in every required slot must contain the contribution of each rank that started with that chunk,
exactly once. The order of a sum does not matter, so this proves the result for all inputs. The check also rejects

- a chunk that is sent, or added to, before it was written;
- a chunk that is written twice in one step, or overwritten in the step that sends it (a race);
- a chunk that the same rank sends again although neither side has changed (a duplicate transfer).

**Exactly once** is proved in one of two ways. If no value is an operand of two reductions, the values form a forest.
Then the leaves under a value are all different, and it is enough to *count* them. Rings, trees and recursive halving
are such programs. Otherwise (two partners that both add the same pair) the check computes the sets of contributions as
bit sets, and requires that the two operands of a reduction are disjoint.

A program in this form cannot deadlock (see `program`). The Python loop runs over steps and uses numpy for all moves of a step: a
1,024-rank ring with two million moves takes a few tenths of a second.
"""

from typing import NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError, listed
from meshwright.programs.collectives.contract import OPERATIONS, SHARDED, chunk_sizes, contract
from meshwright.programs.collectives.program import Array, Program

DENSE_SLOTS = 2**25  # above this, arrays cover only the slots that the program uses


class Single(NamedTuple):
    """Moves of one chunk each: a move of several chunks becomes several rows."""

    step: Array
    move: Array | None  # row in the program's table of moves; None: the rows are the same
    chunk: Array
    source: Array  # slot read
    target: Array  # slot written
    reduce: Array
    bounds: Array  # rows of step t are [bounds[t], bounds[t+1])


def check(program: Program) -> Program:
    """Return the program if it is correct; else raise an error that names the rank, step and chunk."""
    check_contract(program)
    singles = single_chunk_moves(program)
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


def check_contract(program: Program) -> None:
    """Check that the program starts and ends with the slots that its operation requires."""
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
        what = f"{program!r} does not start and end as {program.operation} does"
        raise MeshwrightError("MW-PROG-010", what, why=OPERATIONS[program.operation])


def single_chunk_moves(program: Program) -> Single:
    """Return the program's moves with one row per chunk."""
    table, chunks = program.moves, program.chunks
    index = None
    chunk, source, target = table.chunk, table.source, table.target
    step, reduce = table.step, table.reduce
    if table.width.max(initial=1) > 1:
        index = np.repeat(np.arange(len(table.step)), table.width)
        offset = np.arange(len(index)) - np.repeat(np.cumsum(table.width) - table.width, table.width)
        step, source, target, reduce = (column[index] for column in (step, source, target, reduce))
        chunk = chunk[index] + offset.astype(np.int32)
    number: type = np.int32 if program.endpoints * chunks < 2**31 else np.int64
    source_slot: Array = source.astype(number)
    target_slot: Array = target.astype(number)
    source_slot *= chunks
    target_slot *= chunks
    source_slot += chunk
    target_slot += chunk
    bounds = np.searchsorted(step, np.arange(program.steps + 1))
    return Single(step, index, chunk, source_slot, target_slot, reduce, bounds)


class State:
    """The symbolic value in every slot, updated step by step."""

    def __init__(self, program: Program, singles: Single, slots: int, starts: Array, first_switch: int) -> None:
        self.program, self.singles = program, singles
        self.first_switch = first_switch  # slots from this index on belong to switches
        self.leaves, self.reductions = len(starts), int(singles.reduce.sum())
        self.value_in = np.full(slots, -1, dtype=np.int32)  # index of the value in each slot; −1: empty
        self.value_in[starts] = np.arange(self.leaves)
        # The number of leaves under a value, counted with repetition
        self.size = np.ones(self.leaves + self.reductions, dtype=np.int32)
        # Of each reduction, whose values are numbered after the leaves
        self.operands = np.zeros((2, self.reductions), dtype=np.int32)
        self.reduction_row = np.zeros(self.reductions, dtype=np.int32)
        self.reduced = 0
        self.added = np.concatenate([[0], np.cumsum(singles.reduce, dtype=np.int32)])  # reductions before each row
        self.writer = np.zeros(slots, dtype=np.int32)  # 1 + the row that last wrote a slot
        self.stored_from = np.full(slots, -1, dtype=np.int32)  # the slot from which this slot was last stored

    def advance(self, rows: slice) -> None:
        """Apply all moves of one step to the values before the step."""
        source, target = (slot[rows].astype(np.intp) for slot in (self.singles.source, self.singles.target))
        reduce = self.singles.reduce[rows]
        sent, there = self.value_in[source], self.value_in[target]
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
            self.stored_from[target] = source
        self.value_in[target] = sent

    def unite(self, rows: slice, sent: Array, there: Array, which: Array) -> None:
        """For the rows `which`, replace `sent` by a new value: the sum of `sent` and `there`."""
        if len(which) == 0:
            return
        a, b = sent[which], there[which]
        if b.min() < 0:
            self.refuse(
                rows,
                np.isin(np.arange(len(sent)), which[b < 0]),
                "MW-PROG-011",
                "adds chunk {chunk} from rank {source} to a chunk that was never written",
                at="target",
            )
        first, self.reduced = self.reduced, self.reduced + len(which)
        self.operands[0, first : self.reduced], self.operands[1, first : self.reduced] = a, b
        self.reduction_row[first : self.reduced] = rows.start + which
        self.size[self.leaves + first : self.leaves + self.reduced] = self.size[a] + self.size[b]
        sent[which] = np.arange(self.leaves + first, self.leaves + self.reduced, dtype=np.int32)

    def combine(self, rows: slice, target: Array, sent: Array, there: Array, which: Array) -> None:
        """Sum all messages that reach one slot of a switch in one step; a switch keeps no value from earlier steps."""
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
        """Reject a slot that is written twice in a step (except in a switch, which adds), or overwritten in the step that sends it."""
        ticket = np.arange(rows.start + 1, rows.stop + 1, dtype=np.int32)
        self.writer[target] = ticket
        last = self.writer[target]
        twice, keeps = last != ticket, reduce
        if in_switch is not None:
            twice = twice & ~(in_switch & in_switch[last - rows.start - 1])
            keeps = reduce & ~in_switch
        if twice.any():
            self.refuse(rows, twice, "MW-PROG-014", "has chunk {chunk} written twice in one step", at="target")
        last = self.writer[source]
        if last.max() > rows.start:
            lost = (last > rows.start) & ~keeps[np.maximum(last - rows.start - 1, 0)]
            if lost.any():
                self.refuse(rows, lost, "MW-PROG-014", "has chunk {chunk} overwritten in the step that sends it")

    def find_repeats(self, rows: slice, source: Array, target: Array, same: Array) -> None:
        """Reject a transfer that repeats an earlier one although neither slot was written since."""
        repeated = same & (self.stored_from[target] == source) & (self.writer[source] < self.writer[target])
        if repeated.any():
            self.refuse(rows, repeated, "MW-PROG-012", "receives chunk {chunk} from rank {source} twice", at="target")

    def finish(self, ends: Array) -> None:
        """Check that every required slot holds the contributions of all ranks that started with its chunk."""
        program = self.program
        rank, chunk = rank_and_chunk(program, program.ends)
        values = self.value_in[ends]
        if (values < 0).any():
            self.refuse_end(rank, chunk, values < 0, "never receives it")
        is_operand = np.zeros(len(self.size), dtype=bool)
        is_operand[self.operands[0, : self.reduced]] = is_operand[self.operands[1, : self.reduced]] = True
        sets = None if np.count_nonzero(is_operand) == 2 * self.reduced else self.contributions()
        starters = np.bincount(rank_and_chunk(program, program.starts)[1], minlength=program.chunks)
        wrong = self.size[values] != starters[chunk]  # the leaves are distinct, so the right count means all of them
        if wrong.any():
            k = int(np.argmax(wrong))
            sets = sets or self.contributions()
            wanted = set((program.starts[program.starts % program.chunks == chunk[k]] // program.chunks).tolist())
            lacking = sorted(wanted - set(members(sets[values[k]])))
            self.refuse_end(rank, chunk, wrong, f"lacks the contribution of {ranks_of(lacking)}")

    def contributions(self) -> list[int]:
        """Return the ranks that contribute to each value, as bit sets; raise if two operands of a reduction share a rank."""
        sets = [1 << rank for rank in rank_and_chunk(self.program, self.program.starts)[0].tolist()]
        for k, (a, b) in enumerate(self.operands[:, : self.reduced].T.tolist()):
            if sets[a] & sets[b]:
                move = int(self.reduction_row[k])
                self.refuse(
                    slice(move, move + 1),
                    np.ones(1),
                    "MW-PROG-013",
                    "adds chunk {chunk} from rank {source}, though it "
                    f"already holds the contribution of {ranks_of(members(sets[a] & sets[b]))}",
                    at="target",
                )
            sets.append(sets[a] | sets[b])
        return sets

    def refuse(self, rows: slice, bad: Array, code: str, what: str, at: str = "source") -> None:
        """Raise an error for the first move in `bad`."""
        k = rows.start + int(np.argmax(bad))
        table, move = self.program.moves, k if self.singles.move is None else int(self.singles.move[k])
        chunk = int(self.singles.chunk[k])
        who = int(getattr(table, at)[move])
        text = what.format(chunk=chunk, source=table.source[move], target=table.target[move])
        raise MeshwrightError(code, f"{self.program.name}: rank {who}, step {int(table.step[move])}: {text}")

    def refuse_end(self, rank: Array, chunk: Array, bad: Array, what: str) -> None:
        k = int(np.argmax(bad))
        slot = rank[k] * self.program.chunks + chunk[k]
        table = self.program.moves
        into = table.target.astype(np.int64) * self.program.chunks + table.chunk
        written = np.flatnonzero((into <= slot) & (slot < into + table.width))
        when = f"last written at step {table.step[written[-1]]}" if len(written) else "never written"
        raise MeshwrightError(
            "MW-PROG-016",
            f"{self.program.name}: rank {rank[k]}, after step {self.program.steps - 1}: chunk {chunk[k]} ({when}) has the "
            f"wrong content: the rank {what}",
        )


def rank_and_chunk(program: Program, slots: Array) -> tuple[Array, Array]:
    rank = slots // max(1, program.chunks)
    return rank, slots - rank * program.chunks


def members(bits: int) -> list[int]:
    """Return the ranks in a bit set."""
    return [k for k in range(bits.bit_length()) if bits >> k & 1]


def ranks_of(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + listed([str(r) for r in ranks], 8)
