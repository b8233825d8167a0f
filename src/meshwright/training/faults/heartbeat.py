"""Heartbeats: a small file per rank with its step, its open collective and its speed, which every other rank can read.

A rank that is stopped or lost cannot report, so the others must find out from what it wrote before. The files are in the run folder, which
all hosts share (checkpoints need that too), so that one mechanism works for one host and for many. Nothing is sent between ranks.

    heartbeats/rank-3.json     written every `SLOW_BEAT_S` seconds; every `FAST_BEAT_S` while the rank makes no progress

A file is overwritten in place: this needs no work of a file system's metadata server, which thousands of ranks share.
Clocks of hosts differ. A reader therefore compares no times: it reads twice, and a rank whose `beat` did not change is silent.

Which rank makes all others wait: from the heartbeats of a run in which nothing moves.

When one rank hangs, every rank soon waits, almost all of them inside a collective. The cause is at the end of a chain: rank 0
waits in an all-reduce of dp for rank 2, which waits in an all-gather of tp for rank 3, which is in no collective at all. So follow

    rank → a rank of its open operation that has not yet issued this operation (it counts fewer operations of that group)

until one of these ends:

    silent      the rank writes no heartbeats: its process is stopped, or its host is gone
    computing   the rank answers and is in no collective: its own code hangs
    device      every rank has issued the operation, but the GPU of some has not started it: it hangs in a kernel before
    link        every rank of the operation is inside of it: the network or the backend hangs
    circle      ranks wait for each other: they issue operations in different orders
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from meshwright.errors import listed
from meshwright.units import Json, format_bytes

FOLDER = "heartbeats"
SLOW_BEAT_S = 1.0
FAST_BEAT_S = 0.5
BLOCK = 1024  # bytes: files grow by whole blocks, so that a shorter text overwrites a longer one
READS = 3  # of a file that is being written


@dataclass(frozen=True)
class Operation:
    """A collective or message that a rank has entered and not left. It is the `count`-th of its kind in its group."""

    operation: str  # all_reduce, all_gather, …, send, receive
    axis: str
    ranks: tuple[int, ...]  # the group, or sender and receiver of a message
    count: int
    bytes: int = 0
    started: bool = True  # False: issued to a GPU that still computes something before it

    @property
    def is_message(self) -> bool:
        return self.operation in ("send", "receive")

    @property
    def key(self) -> str:
        """The counter that this operation increased on its rank."""
        return operation_key(self.axis, self.ranks, self.operation if self.is_message else "")

    @property
    def needed_key(self) -> str:
        """The counter that every other rank of it must have increased as often: a receive needs its send, and the reverse."""
        opposite = {"send": "receive", "receive": "send"}.get(self.operation, "")
        return operation_key(self.axis, self.ranks, opposite)


def operation_key(axis: str, ranks: Iterable[int], direction: str = "") -> str:
    """The name of a counter: collectives of a group share one; sends and receives between two ranks have one each."""
    return f"{axis} {'-'.join(map(str, ranks))} {direction}".rstrip()


@dataclass(frozen=True)
class Heartbeat:
    """The state of one rank."""

    rank: int
    attempt: str  # of the run: heartbeats of an earlier attempt are ignored
    beat: int
    host: str = ""
    pid: int = 0
    started: int = 0  # start time of the process: the number of a process may be used again
    stage: int = 0  # pipeline stage
    step: int = 0
    phase: str = "start"  # start | step | hooks | end
    stalled_s: float = 0.0
    operation: Operation | None = None
    issued: dict[str, int] = field(default_factory=dict)  # operations so far, by `operation_key`
    own_s: float = 0.0  # median seconds of a step in which the rank was not blocked by communication
    usual_s: float = 0.0  # the same over many more steps
    step_s: float = 0.0  # median seconds of a step


class HeartbeatFolder:
    """The heartbeat files of one attempt of a run."""

    def __init__(self, run_folder: Path, attempt: str) -> None:
        self.run_folder, self.folder, self.attempt = run_folder, run_folder / FOLDER, attempt
        self.size = 0  # of this rank's file: it never shrinks

    def path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def write(self, heartbeat: Heartbeat) -> None:
        """Overwrite this rank's file, with one write."""
        text = json.dumps(asdict(heartbeat)).encode()
        self.size = max(self.size, -(-len(text) // BLOCK) * BLOCK)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path(heartbeat.rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(file, text.ljust(self.size), 0)
        finally:
            os.close(file)  # a network file system sends it now

    def read(self, rank: int) -> Heartbeat | None:
        """The last heartbeat of a rank; None if there is none of this attempt, or the file cannot be read."""
        for _ in range(READS):
            try:
                heartbeat = parse_heartbeat(self.path(rank).read_text("utf-8"))
            except OSError:
                return None
            except (ValueError, TypeError, KeyError):  # read while it was being written
                continue
            return heartbeat if heartbeat.attempt == self.attempt else None
        return None

    def read_all(self, world: int) -> dict[int, Heartbeat]:
        found = {rank: self.read(rank) for rank in range(world)}
        return {rank: heartbeat for rank, heartbeat in found.items() if heartbeat is not None}


def parse_heartbeat(text: str) -> Heartbeat:
    fields: Json = json.loads(text)
    operation = fields.pop("operation")
    if operation is not None:
        operation = Operation(**{**operation, "ranks": tuple(operation["ranks"])})
    return Heartbeat(operation=operation, **fields)


Kind = Literal["silent", "computing", "device", "link", "circle"]


@dataclass(frozen=True)
class HangVerdict:
    """The ranks at the root of a hang, and the operation that others cannot finish because of them."""

    kind: Kind
    ranks: tuple[int, ...]
    moment: str  # "in step 7", "after step 7" (in a hook between two steps)
    operation: Operation | None  # that others wait in; None if no rank is in one
    waiting: tuple[int, ...] = ()  # ranks inside this operation

    @property
    def what(self) -> str:
        """One sentence that names the rank and the collective."""
        who = ranks_in_words(self.ranks)
        one = len(self.ranks) == 1
        states = {
            "silent": f"{who} {'does' if one else 'do'} not respond (last seen {self.moment})",
            "computing": f"{who} {'hangs' if one else 'hang'} {self.moment}, outside of any collective",
            "device": f"the GPU of {who} hangs {self.moment}, in a kernel before the next collective",
            "link": f"{who} {'hangs' if one else 'hang'} {self.moment}",
            "circle": f"{who} wait for each other {self.moment}",
        }
        if self.operation is None:
            return states[self.kind]
        name = describe(self.operation)
        if self.kind in ("link", "circle"):
            return f"{states[self.kind]} in {name}"
        waits = "waits" if len(self.waiting) == 1 else "wait"
        return f"{states[self.kind]}; {ranks_in_words(self.waiting)} {waits} in {name}"

    @property
    def why(self) -> str:
        return {
            "silent": "Its process is stopped, or its host or network is gone",
            "computing": "Its Python stack is in its log",
            "device": "It has issued the collective, and its GPU has not started it",
            "link": "All ranks of the operation have entered it: the network or the backend hangs",
            "circle": "Ranks must issue the collectives of their groups in one order",
        }[self.kind]


def ranks_in_words(ranks: Collection[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed([str(rank) for rank in sorted(ranks)], 8)}"


def describe(operation: Operation) -> str:
    """An operation for a message: `all_reduce of dp (4 MiB, number 17)`."""
    size = f"{format_bytes(operation.bytes)}, " if operation.bytes else ""
    axis = f" of {operation.axis}" if operation.axis else ""
    return f"{operation.operation}{axis} ({size}number {operation.count})"


def blockers(heartbeat: Heartbeat, heartbeats: Mapping[int, Heartbeat], silent: Collection[int]) -> list[int]:
    """Ranks of the open operation of a rank that have not issued it; silent ones first."""
    operation = heartbeat.operation
    if operation is None:
        return []
    late = [
        rank
        for rank in operation.ranks
        if rank != heartbeat.rank
        and (rank not in heartbeats or heartbeats[rank].issued.get(operation.needed_key, 0) < operation.count)
    ]
    return sorted(late, key=lambda rank: rank not in silent)


def diagnose(heartbeats: Mapping[int, Heartbeat], silent: Collection[int]) -> HangVerdict:
    """The root of a hang. `heartbeats`: the last ones, by rank; `silent`: ranks that no longer write any."""
    blocked = sorted(rank for rank, beat in heartbeats.items() if beat.operation is not None and rank not in silent)
    if silent:
        return verdict("silent", tuple(sorted(silent)), heartbeats, waited_for(silent, blocked, heartbeats))
    if not blocked:
        slowest = min(heartbeats.values(), key=lambda beat: (beat.step, -beat.stalled_s, beat.rank))
        return verdict("computing", (slowest.rank,), heartbeats, None)
    path, rank = [], blocked[0]
    while rank not in path:
        path.append(rank)
        operation = heartbeats[rank].operation
        if operation is None:
            return verdict("computing", (rank,), heartbeats, heartbeats[path[-2]].operation)
        late = blockers(heartbeats[rank], heartbeats, silent)
        if not late:
            return inside(operation, heartbeats)
        rank = late[0]
    circle = tuple(sorted(path[path.index(rank) :]))
    return verdict("circle", circle, heartbeats, heartbeats[rank].operation)


def inside(operation: Operation, heartbeats: Mapping[int, Heartbeat]) -> HangVerdict:
    """The verdict if all ranks of an operation have issued it."""
    open_at = {rank: heartbeats[rank].operation for rank in operation.ranks if rank in heartbeats}
    pending = tuple(rank for rank, found in open_at.items() if found is not None and not found.started)
    if pending and len(pending) < len(open_at):
        return verdict("device", pending, heartbeats, operation)
    return verdict("link", operation.ranks, heartbeats, operation)


def waited_for(
    silent: Collection[int], blocked: Collection[int], heartbeats: Mapping[int, Heartbeat]
) -> Operation | None:
    """The operation in which a rank waits for a silent rank; else any open one."""
    for rank in blocked:
        operation = heartbeats[rank].operation
        if operation is not None and set(blockers(heartbeats[rank], heartbeats, silent)) & set(silent):
            return operation
    return next((heartbeats[rank].operation for rank in blocked), None)


def verdict(
    kind: Kind, ranks: tuple[int, ...], heartbeats: Mapping[int, Heartbeat], operation: Operation | None
) -> HangVerdict:
    waiting: tuple[int, ...] = ()
    if operation is not None:
        same = [
            beat.rank
            for beat in heartbeats.values()
            if beat.operation is not None
            and (beat.operation.axis, beat.operation.ranks, beat.operation.count)
            == (operation.axis, operation.ranks, operation.count)
        ]
        waiting = tuple(sorted(set(same) - set(ranks)))
    seen = [heartbeats[rank] for rank in ranks if rank in heartbeats] or list(heartbeats.values())
    return HangVerdict(kind, ranks, moment_of(max(seen, key=lambda beat: beat.step)), operation, waiting)


def moment_of(heartbeat: Heartbeat) -> str:
    """Return the phase of training that a rank is in."""
    return {
        "start": "before its first step",
        "step": f"in step {heartbeat.step}",
        "hooks": f"after step {heartbeat.step}",
        "end": "after the last step",
    }[heartbeat.phase]
