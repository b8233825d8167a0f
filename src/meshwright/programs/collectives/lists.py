"""Convert a program to one list of instructions per rank, and convert hand-written lists back to a program.

    >>> for line in instructions(build("all-reduce", "ring", 2, 4), rank=0): print(line)
    step 0: send chunk 1 to rank 1
    step 0: reduce chunk 0 from rank 1
    step 1: send chunk 0 to rank 1
    step 1: receive chunk 1 from rank 1

Hand-written lists may number their steps differently on each rank. **Alignment**: the k-th send from a to b matches
the k-th receive of b from a, as in MPI. A step of a and a step of b that share a message happen at the same time, so
they are merged. Each rank runs its steps in order. If the merged steps have a topological order, it gives the common
step numbers. If they have a cycle, some ranks wait for each other: a **deadlock**. The error names the rank and step
that can never start.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError, unknown
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import Array, Program, moves, take

KINDS = ("send", "receive", "reduce", "copy")
Visit = tuple[int, int]  # rank, step


class Instruction(NamedTuple):
    """One instruction of a rank in a step. `into` is the target chunk of a copy."""

    step: int
    kind: str
    peer: int
    chunk: int
    width: int = 1
    into: int | None = None

    def __str__(self) -> str:
        chunks = f"chunk {self.chunk}" if self.width == 1 else f"chunks {self.chunk} to {self.chunk + self.width - 1}"
        if self.kind == "copy":
            return f"step {self.step}: copy {chunks} to {self.into}"
        return f"step {self.step}: {self.kind} {chunks} {'to' if self.kind == 'send' else 'from'} rank {self.peer}"


def instructions(program: Program, rank: int) -> list[Instruction]:
    """Return the instructions of one rank in order; within a step, sends come before receives."""
    table = take(program.moves, np.flatnonzero((program.moves.source == rank) | (program.moves.target == rank)))
    steps = []
    for step, source, target, chunk, width, adds, into in zip(*(c.tolist() for c in table), strict=True):
        if source == target:
            steps.append(Instruction(step, "reduce" if adds else "copy", rank, chunk, width, into))
        elif source == rank:
            steps.append(Instruction(step, "send", target, chunk, width))
        else:
            steps.append(Instruction(step, "reduce" if adds else "receive", source, into, width))
    return sorted(steps, key=lambda i: (i.step, i.kind != "send"))


def rank_lists(program: Program) -> list[list[Instruction]]:
    """Return the instructions of all ranks, then of the switches."""
    return [instructions(program, rank) for rank in range(program.endpoints)]


def assemble(
    operation: str,
    lists: Sequence[Sequence[Instruction]],
    elements: int,
    *,
    sizes: Array | None = None,
    chunks: int = 1,
    root: int = 0,
    target: int = 0,
    switches: tuple[tuple[int, ...], ...] = (),
) -> Program:
    """Build a program from one list per rank (and switch) with aligned steps; raise for unmatched sends and deadlocks."""
    rows, visits = [], []
    for (a, send), (b, receive) in pairs(lists):
        rows.append((a, b, send.chunk, send.width, receive.kind == "reduce", receive.chunk))
        visits.append(((a, send.step), (b, receive.step)))
    for rank, program in enumerate(lists):
        for i in program:
            if i.kind == "copy" or (i.kind == "reduce" and i.peer == rank):
                rows.append((rank, rank, i.chunk, i.width, i.kind == "reduce", i.chunk if i.into is None else i.into))
                visits.append(((rank, i.step), (rank, i.step)))
    number = {visit: visit[1] for pair in visits for visit in pair}
    if any(a[1] != b[1] for a, b in visits):
        number = align_steps(visits, lists)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    source, receiver, chunk, width, adds, into = columns
    in_place = np.array_equal(chunk, into)
    step = np.array([number[a] for a, _ in visits], dtype=np.int64)
    table = moves(step, source, receiver, chunk, width, adds.astype(bool), None if in_place else into)
    ranks = len(lists) - len(switches)
    return collective(
        operation, ranks, elements, table, sizes=sizes, chunks=chunks, root=root, target=target, switches=switches
    )


def pairs(lists: Sequence[Sequence[Instruction]]) -> list[tuple[tuple[int, Instruction], tuple[int, Instruction]]]:
    """Return each send with its matching receive."""
    sends, receives = defaultdict(list), defaultdict(list)
    for rank, program in enumerate(lists):
        for i in sorted(program, key=lambda i: i.step):
            if i.kind not in KINDS:
                raise unknown("MW-PROG-017", f"rank {rank}, step {i.step}: instruction", i.kind, KINDS)
            if not 0 <= i.peer < len(lists):
                raise MeshwrightError("MW-PROG-017", f"rank {rank}, {i}: there is no rank {i.peer}")
            if i.kind == "send":
                sends[rank, i.peer].append(i)
            elif i.kind != "copy" and i.peer != rank:
                receives[i.peer, rank].append(i)
    matched = []
    for a, b in sorted(set(sends) | set(receives)):
        out, in_ = sends[a, b], receives[a, b]
        if len(out) != len(in_):
            rank, unmatched = (a, out[len(in_)]) if len(out) > len(in_) else (b, in_[len(out)])
            problem = f"rank {rank}, {unmatched}: waits forever"
            why = f"Rank {a} sends {len(out)} times to rank {b}, which receives {len(in_)} times from it"
            raise MeshwrightError("MW-PROG-018", problem, why=why)
        for send, receive in zip(out, in_, strict=True):
            if send.width != receive.width:
                what = f"rank {b}, {receive}: rank {a} sends {send.width} chunks at its step {send.step}"
                raise MeshwrightError("MW-PROG-018", what)
            matched.append(((a, send), (b, receive)))
    return matched


def align_steps(together: list[tuple[Visit, Visit]], lists: Sequence[Sequence[Instruction]]) -> dict[Visit, int]:
    """Return a number for each (rank, step): equal where two share a message, and increasing on each rank."""
    leader: dict[Visit, Visit] = {}

    def find(visit: Visit) -> Visit:
        while leader.setdefault(visit, visit) != visit:
            visit = leader[visit]
        return visit

    for a, b in together:
        leader[find(a)] = find(b)
    queue: dict[int, list[Visit]] = defaultdict(list)
    for visit in sorted(leader):
        queue[visit[0]].append(visit)
    waits_for: dict[Visit, set[Visit]] = defaultdict(set)
    for visits in queue.values():
        for before, after in pairwise(visits):
            waits_for[find(after)].add(find(before))
    number: dict[Visit, int] = {}
    open_steps = {find(visit) for visit in leader}
    while open_steps:
        free = {visit for visit in open_steps if waits_for[visit] <= number.keys()}
        if not free:
            raise stuck(open_steps, leader, find, lists)
        for visit in free:
            number[visit] = 1 + max((number[before] for before in waits_for[visit]), default=-1)
        open_steps -= free
    return {visit: number[find(visit)] for visit in leader}


def stuck(
    open_steps: set[Visit],
    leader: dict[Visit, Visit],
    find: Callable[[Visit], Visit],
    lists: Sequence[Sequence[Instruction]],
) -> MeshwrightError:
    """Return the error for the earliest step that can never start."""
    step, rank = min((step, rank) for rank, step in leader if find((rank, step)) in open_steps)
    waiting = next(i for i in lists[rank] if i.step == step)
    what = f"rank {rank}, {waiting}: waits forever"
    why = f"Deadlock: rank {waiting.peer} reaches the matching instruction only after a step that waits for rank {rank}"
    return MeshwrightError("MW-PROG-019", what, why=why)
