"""Which rank makes all others wait: from the heartbeats of a run in which nothing moves.

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

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import listed
from meshwright.training.faults.heartbeat import Heartbeat, Operation
from meshwright.units import format_bytes

Kind = Literal["silent", "computing", "device", "link", "circle"]


@dataclass(frozen=True)
class Verdict:
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


def diagnose(heartbeats: Mapping[int, Heartbeat], silent: Collection[int]) -> Verdict:
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


def inside(operation: Operation, heartbeats: Mapping[int, Heartbeat]) -> Verdict:
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
) -> Verdict:
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
    return Verdict(kind, ranks, moment_of(max(seen, key=lambda beat: beat.step)), operation, waiting)


def moment_of(heartbeat: Heartbeat) -> str:
    """Where in the training a rank is."""
    return {
        "start": "before its first step",
        "step": f"in step {heartbeat.step}",
        "hooks": f"after step {heartbeat.step}",
        "end": "after the last step",
    }[heartbeat.phase]
