"""The part of a collective program that one rank executes: which elements it sends, receives and reduces, step by step.

A program (`programs.collectives.program`) says which chunk moves from which rank to which in which step. This file
translates it for one rank into ranges of three buffers:

    input    the chunks the rank starts with, in chunk order; never written, unless it is the same memory as the output
    output   the chunks the rank ends with, in chunk order
    scratch  chunks that only pass through this rank

A chunk is read from the input until it is first written; from then on it is in its *home*: the output if the rank ends
with it, else scratch. The first reduction therefore reads the input and writes the home, and nothing is copied
beforehand. A chunk that ends where it started and was never written is copied from input to output at the end.

**Lanes.** With K lanes every chunk is cut into K slices, and lane j runs the whole program on slice j of every chunk.
The lanes are independent, so a rank reduces a slice of one lane while a slice of the next lane is in transfer.

**What a step may overwrite.** Receives are posted when their step begins, after all earlier steps of the lane are finished and their
sends complete. So a receive that stores may be written at any time from then on (`direct`). `sends_first` marks a step that writes into a
chunk which it also sends: those sends must be complete before anything is applied.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.programs.collectives.arrays import chunks_of
from meshwright.programs.collectives.program import Program, take

INPUT, OUTPUT, SCRATCH = range(3)


class BufferSpan(NamedTuple):
    """The elements [start, stop) of one of the rank's three buffers."""

    buffer: int
    start: int
    stop: int


class Target(NamedTuple):
    """The destination of received elements. With a `base` they are combined with it: into = base ∘ received."""

    into: BufferSpan
    base: BufferSpan | None


class Send(NamedTuple):
    """One message, to one rank or the same data to several."""

    peers: tuple[int, ...]
    spans: tuple[BufferSpan, ...]


class Receive(NamedTuple):
    peer: int
    targets: tuple[Target, ...]
    direct: bool  # nothing is reduced, and the step sends nothing of it


class Step(NamedTuple):
    """One step of one lane on a rank; `number` is the program's step number."""

    number: int
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]
    sends_first: bool


@dataclass(frozen=True)
class RankSchedule:
    """One rank's steps, by lane, and the sizes of its buffers in elements."""

    lanes: tuple[tuple[Step, ...], ...]
    inputs: int
    outputs: int
    scratch: int
    unmoved: tuple[tuple[BufferSpan, BufferSpan], ...]  # input → output, for chunks that no step writes
    sent: dict[int, int] = field(default_factory=dict)  # elements sent to each peer
    received: dict[int, int] = field(default_factory=dict)

    @cached_property
    def order(self) -> list[tuple[bool, int, int]]:
        """(begins or finishes, step, lane) of every step, in the order of execution.

        At time t lane t begins step 0, and lane t − 1 − s finishes step s and begins step s + 1. Time counts the
        program's steps, which are common to all ranks: so messages are sent in the order in which they are expected.
        """
        events = []
        for lane, steps in enumerate(self.lanes):
            for index, step in enumerate(steps):
                now = lane + step.number
                events += [((now, step.number, True), index, lane), ((now + 1, step.number + 1, False), index, lane)]
        return [(key[2], index, lane) for key, index, lane in sorted(events)]


def schedule(program: Program, rank: int, lanes: int = 1) -> RankSchedule:
    """Return the schedule of one rank; raise if the program needs a switch that reduces."""
    if program.switches:
        what, why = (
            f"{program.name} cannot run between processes",
            "It reduces data inside a network switch, and a switch is not a process",
        )
        raise MeshwrightError("MW-COMM-001", what, why=why, fix="--algorithm two-level")
    found = [Lane(program, rank, lane, lanes) for lane in range(lanes)]
    sent, received = Counter[int](), Counter[int]()
    for step in (step for lane in found for step in lane.steps):
        for send in step.sends:
            sent.update(dict.fromkeys(send.peers, length(send.spans)))
        for receive in step.receives:
            received[receive.peer] += length(target.into for target in receive.targets)
    steps, unmoved = (tuple(lane.steps) for lane in found), (pair for lane in found for pair in lane.unmoved())
    sizes = found[0].inputs, found[0].outputs, found[0].scratch
    return RankSchedule(tuple(steps), *sizes, tuple(unmoved), sent, received)


def largest_message(program: Program, hosts: Sequence[int]) -> int:
    """Return the elements of the largest message between ranks of different hosts; `hosts` has the host of each rank."""
    table, host = program.moves, np.asarray(hosts)
    between = host[table.source] != host[table.target]
    if not between.any():
        return 0
    key = (table.step.astype(np.int64) * program.ranks + table.source) * program.ranks + table.target
    _, message = np.unique(key[between], return_inverse=True)
    return int(np.bincount(message.ravel(), weights=np.asarray(program.moved)[between]).max())


def length(spans: Iterable[BufferSpan]) -> int:
    return sum(span.stop - span.start for span in spans)


class Lane:
    """Translates the rows of one rank and lane, in the order of the steps."""

    def __init__(self, program: Program, rank: int, lane: int, lanes: int) -> None:
        self.program, self.rank, self.lane, self.lanes = program, rank, lane, lanes
        self.sizes = program.sizes.tolist()
        starts, ends = (chunks_of(program, slots, rank) for slots in (program.starts, program.ends))
        self.home: dict[int, BufferSpan] = {}
        self.current: dict[int, BufferSpan] = {}
        self.inputs = self.place(starts, INPUT, self.current)
        self.outputs = self.place(ends, OUTPUT, self.home)
        table = program.moves
        rows = take(table, np.flatnonzero((table.source == rank) | (table.target == rank)))
        written = rows.target == rank
        passing: set[int] = set()
        for into, width in zip(rows.chunk[written].tolist(), rows.width[written].tolist(), strict=True):
            passing |= set(range(into, into + width)) - self.home.keys()
        self.scratch = self.place(sorted(passing), SCRATCH, self.home)
        self.ends = ends
        self.steps: list[Step] = []
        columns = [column.tolist() for column in rows]
        for number, group in groupby(zip(*columns, strict=True), key=lambda row: row[0]):
            self.add_step(number, list(group))

    def place(self, chunks: Iterable[int], buffer: int, table: dict[int, BufferSpan]) -> int:
        """Lay chunks one after the other into a buffer; return its elements."""
        at = 0
        for chunk in chunks:
            table[chunk] = BufferSpan(buffer, at, at + self.sizes[chunk])
            at += self.sizes[chunk]
        return at

    def add_step(self, number: int, rows: list[tuple]) -> None:
        """Add one step. Its sends read the values before the step, so they are translated first."""
        rank = self.rank
        sent: set[int] = set()
        outgoing = [row for row in rows if row[1] == rank]
        sends: dict[tuple[BufferSpan, ...], list[int]] = {}
        for peer, group in groupby(outgoing, key=lambda row: row[2]):
            chunks = [chunk for row in group for chunk in range(row[3], row[3] + row[4])]
            spans = tuple(joined(self.cut(self.located(chunk)) for chunk in chunks))
            sends.setdefault(spans, []).append(peer)
            sent |= set(chunks)
        incoming = [row for row in rows if row[2] == rank]  # by step, then by peer
        receives, sends_first = [], False
        for peer, group in groupby(incoming, key=lambda row: row[1]):
            writes = [(row[3] + k, row[5]) for row in group for k in range(row[4])]  # chunk, whether it is reduced
            overwrites = any(chunk in sent for chunk, _ in writes)
            targets = joined_targets(self.write(chunk, adds) for chunk, adds in writes)
            direct = not overwrites and not any(adds for _, adds in writes)
            receives.append(Receive(peer, tuple(targets), direct))
            sends_first |= overwrites
        messages = tuple(Send(tuple(peers), spans) for spans, peers in sends.items())
        self.steps.append(Step(number, messages, tuple(receives), sends_first))

    def write(self, chunk: int, adds: bool) -> Target:
        """Record that a step writes a chunk into its home."""
        base = self.cut(self.located(chunk)) if adds else None
        self.current[chunk] = self.home[chunk]
        return Target(self.cut(self.home[chunk]), base)

    def located(self, chunk: int) -> BufferSpan:
        if chunk not in self.current:
            what = f"{self.program.name}: rank {self.rank} reads chunk {chunk} before it has it"
            raise MeshwrightError(
                "MW-COMM-001", what, why="The program is wrong; `programs.collectives.check` says where"
            )
        return self.current[chunk]

    def cut(self, span: BufferSpan) -> BufferSpan:
        """The lane's slice of a chunk."""
        if self.lanes == 1:
            return span
        size = span.stop - span.start
        low, high = (size * k // self.lanes for k in (self.lane, self.lane + 1))
        return BufferSpan(span.buffer, span.start + low, span.start + high)

    def unmoved(self) -> list[tuple[BufferSpan, BufferSpan]]:
        """Chunks that end here and were never written: they are still in the input."""
        kept = [(self.located(chunk), self.home[chunk]) for chunk in self.ends]
        return [(self.cut(at), self.cut(home)) for at, home in kept if at.buffer == INPUT and at.stop > at.start]


def follows(a: BufferSpan | None, b: BufferSpan | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.buffer == b.buffer and a.stop == b.start


def joined(spans: Iterable[BufferSpan]) -> list[BufferSpan]:
    """Join neighbouring ranges; empty ones are left out."""
    return [into for into, _ in joined_targets(Target(span, None) for span in spans)]


def joined_targets(targets: Iterable[Target]) -> list[Target]:
    """Join neighbouring targets whose bases are neighbours too."""
    found: list[Target] = []
    for into, base in targets:
        if into.stop == into.start:
            continue
        last = found[-1] if found else None
        if last is not None and follows(last.into, into) and follows(last.base, base):
            merged = None if base is None or last.base is None else BufferSpan(base.buffer, last.base.start, base.stop)
            found[-1] = Target(BufferSpan(into.buffer, last.into.start, into.stop), merged)
        else:
            found.append(Target(into, base))
    return found
