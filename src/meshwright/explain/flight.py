"""Name the rank that hung a program, from the flight records of all ranks.

Calls of one group and sequence number belong together. A member has *arrived* at a call once it has issued it; with NCCL, once its device has
started it. A rank is *blocked* in its first unfinished call at which another member has not arrived. The cause is, in this order:

    1. a difference   at one number, ranks issued other collectives, sizes or dtypes: what follows in that group means nothing
    2. a rank         follow the blocked ranks: from each to the members that it waits for. Who is reached and is not blocked itself is
                      late, busy elsewhere or dead. The call at which it is missing first is the hang
    3. a circle       all who are waited for wait themselves: groups are used in different orders
    4. the transport  all have arrived and the call does not end

Without a hang the records still show a rank that is always last. Its lateness needs clocks that agree between hosts; where NCCL measured durations
(TORCH_NCCL_ENABLE_TIMING=1) the last rank is the one that waits least, on any clock.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from meshwright.explain.flight_record import FlightFolder, FlightRecord, GroupKey, RecordedCall, place
from meshwright.units import counted, format_seconds

Key = tuple[GroupKey, int]
RANK = re.compile(r"[0-9]{1,7}").fullmatch
# A slow rank is last in at least this many calls, by at least this much each; it has this share of what all ranks are late, and that is this share
# of the time of the record
LEAST_CALLS, LEAST_LATE_S = 5, 1e-3
LATE_SHARE, SPAN_SHARE = 0.6, 0.05


@dataclass(frozen=True)
class WaitingRank:
    """A rank, the call in which it is blocked, and the line of the user's code."""

    rank: int
    call: str
    waits_for: tuple[int, ...]
    place: str


@dataclass(frozen=True)
class FlightReport:
    """What the records of a program say."""

    ranks: tuple[int, ...]
    kind: str  # operation, sizes, dtypes, groups, missing, circle, transport, slow, none
    culprits: tuple[int, ...]
    call: str
    summary: tuple[str, ...]
    waiting: tuple[WaitingRank, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class Matched:
    """The calls of all ranks side by side."""

    folder: FlightFolder
    world: set[int]
    calls: dict[Key, dict[int, list[RecordedCall]]] = field(default_factory=lambda: defaultdict(dict))
    users: dict[GroupKey, set[int]] = field(default_factory=lambda: defaultdict(set))
    finished: dict[tuple[int, GroupKey], int] = field(default_factory=dict)  # the last number that a rank finished
    messages: Counter[tuple[int, GroupKey, str]] = field(default_factory=Counter)

    @classmethod
    def of(cls, folder: FlightFolder) -> "Matched":
        seen = {*folder.records, *folder.damaged, *folder.stacks}
        listed = {rank for record in folder.records.values() for group in record.groups for rank in group.members}
        out = cls(folder, listed | set(range(max(seen | listed) + 1)) if max(seen | listed) < 2**17 else seen | listed)
        for rank, record in folder.records.items():
            for call in record.calls:
                out.users[call.group].add(rank)
                if call.p2p:
                    out.messages[rank, call.group, call.operation] += 1
                    continue
                out.calls[call.key].setdefault(rank, []).append(call)
                if call.done:
                    out.finished[rank, call.group] = max(call.sequence, out.finished.get((rank, call.group), -1))
        return out

    def members(self, group: GroupKey) -> set[int]:
        """The recorded members; without them all ranks for the default group, and for others the ranks that used it."""
        if group.members:
            return set(group.members)
        if group.description == "default_pg":
            return self.world
        return self.users[group]

    def absent(self, rank: int, call: RecordedCall) -> set[int]:
        """The members that have not arrived at a call of a rank. A member that finished a later one was there: its record overwrote the call."""
        if call.p2p:
            return self._absent_peer(rank, call)
        arrived = {other for other, calls in self.calls[call.key].items() if any(c.started for c in calls)}
        return {
            other
            for other in self.members(call.group) - arrived
            if self.finished.get((other, call.group), -1) <= call.sequence
        }

    def _absent_peer(self, rank: int, call: RecordedCall) -> set[int]:
        """The partner of a message, if it has issued fewer receives than this rank sends (or the other way round)."""
        kind, _, ends = call.operation.partition(" ")
        first, _, second = ends.replace("<-", "->").partition("->")
        ranks = sorted(self.members(call.group) or self.world)
        if not (RANK(first) and RANK(second)) or max(int(first), int(second)) >= len(ranks):
            return set()
        peer = ranks[int(second)]
        partner = f"recv {second}<-{first}" if kind == "send" else f"send {second}->{first}"
        issued = self.messages[rank, call.group, call.operation]
        return {peer} - {rank} if self.messages[peer, call.group, partner] < issued else set()


@dataclass(frozen=True)
class CallDifference:
    """Ranks that issued other calls under one number of a group."""

    kind: str
    key: Key
    by_rank: dict[int, RecordedCall]

    def value(self, call: RecordedCall) -> Any:
        return {"operation": call.operation, "sizes": call.elements, "dtypes": call.dtype}[self.kind]

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that differ from most; of two equal camps, all."""
        counts = Counter(self.value(call) for call in self.by_rank.values()).most_common()
        if counts[0][1] == counts[1][1]:
            return tuple(sorted(self.by_rank))
        return tuple(sorted(rank for rank, call in self.by_rank.items() if self.value(call) != counts[0][0]))


def differences(matched: Matched) -> list[CallDifference]:
    """The first difference of each group, earliest first."""
    first: dict[GroupKey, CallDifference] = {}
    for key in sorted(matched.calls, key=lambda key: key[1]):
        if key[0] in first:
            continue
        for aligned in _aligned(matched.calls[key]):
            for kind in ("operation", "sizes", "dtypes"):
                found = CallDifference(kind, key, aligned)
                values = {found.value(call) for call in aligned.values()} - {-1, ""}
                if len(values) > 1 and key[0] not in first:
                    first[key[0]] = found
    return sorted(first.values(), key=lambda d: min(call.created_ns for call in d.by_rank.values()))


def _aligned(by_rank: dict[int, list[RecordedCall]]) -> list[dict[int, RecordedCall]]:
    """Calls that were issued as one (coalesced) share a number: they are compared one by one."""
    longest = max(len(calls) for calls in by_rank.values())
    return [{rank: calls[i] for rank, calls in by_rank.items() if i < len(calls)} for i in range(longest)]


def explain_flight(folder: FlightFolder) -> FlightReport:
    """The cause of a hang, or the rank that is slow, or that the records show neither."""
    matched = Matched.of(folder)
    blocked: dict[int, tuple[RecordedCall, set[int]]] = {}
    for rank, record in sorted(folder.records.items()):
        if pending := _blocked_in(matched, rank, record):
            blocked[rank] = pending
    waiting = tuple(
        WaitingRank(rank, str(call), tuple(sorted(absent)), where(folder, rank, call))
        for rank, (call, absent) in blocked.items()
    )
    found = (
        _by_groups(matched)
        or _by_difference(matched, blocked)
        or (_by_missing(matched, blocked) if blocked else _transport(matched))
        or slow_rank(matched)
        or ("none", (), "", ("No rank waits for another one in these records, and none is always last.",))
    )
    lost = sorted(matched.world - set(folder.records) - set(folder.damaged))
    notes = [f"no record of {ranks_of(lost)}"] * bool(lost) + folder.notes
    return FlightReport(tuple(sorted(folder.records)), *found, waiting, tuple(notes))


Cause = tuple[str, tuple[int, ...], str, tuple[str, ...]]  # kind, culprits, call, sentences


def _blocked_in(matched: Matched, rank: int, record: FlightRecord) -> tuple[RecordedCall, set[int]] | None:
    """The first unfinished call of a rank at which it has arrived and others have not, and these."""
    for call in record.calls:
        if not call.done and call.started and (absent := matched.absent(rank, call) - {rank}):
            return call, absent
    return None


def _by_groups(matched: Matched) -> Cause | None:
    """Members that disagree on who is in a group."""
    first: dict[tuple[str, str, int], tuple[int, GroupKey]] = {}
    for rank, record in sorted(matched.folder.records.items()):
        for group in record.groups:
            for member in group.members if rank in group.members else ():
                other, theirs = first.setdefault((group.name, group.description, member), (rank, group))
                if theirs is not group and theirs.members != group.members and rank in theirs.members:
                    sentence = f"Rank {rank} made {group} of {ranks_of(group.members)}, rank {other} of {ranks_of(theirs.members)}."
                    why = "Every rank must call new_group for every group, in one order and with the same ranks."
                    return "groups", (other, rank), str(group), (sentence, why)
    return None


def _by_difference(matched: Matched, blocked: dict[int, tuple[RecordedCall, set[int]]]) -> Cause | None:
    """The earliest difference in a group in which a rank does not come further."""
    for found in differences(matched):
        group, number = found.key
        calls = (call for record in matched.folder.records.values() for call in record.calls)
        if not any(c.group == group and c.sequence >= number and not c.done and not c.p2p for c in calls):
            continue
        camps: dict[Any, list[int]] = defaultdict(list)
        for rank, call in sorted(found.by_rank.items()):
            camps[found.value(call)].append(rank)
        usual = max(camps.values(), key=len)
        sentences = [f"At number {number} of {group} the ranks do not call the same:"]
        for ranks in sorted(camps.values(), key=len):
            call = found.by_rank[ranks[0]]
            at = where(matched.folder, ranks[0], call, now=False)
            sentences.append(
                f"{ranks_of(ranks)}: {call.operation} {call.shapes} {call.dtype}".rstrip() + f", from {at}" * bool(at)
            )
        after = matched.calls.get((group, number + 1), {}).get(usual[0], [])
        odd = next((found.by_rank[r] for r in found.culprits if r not in usual), None)
        if found.kind == "operation" and odd and any(c.operation == odd.operation for c in after):
            left_out, culprits = found.by_rank[usual[0]].operation, ranks_of(found.culprits)
            sentences.append(
                f"{odd.operation} is what {ranks_of(usual)} call next: {culprits} left {left_out} out, or has another order."
            )
        return found.kind, found.culprits, str(found.by_rank[found.culprits[0]]), tuple(sentences)
    return None


def _by_missing(matched: Matched, blocked: dict[int, tuple[RecordedCall, set[int]]]) -> Cause:
    """The rank at the end of the chain of waiting ranks, or the circle."""
    folder = matched.folder
    lost = matched.world - set(folder.records) - set(folder.damaged)
    certain = lost if 2 * len(lost) < len(matched.world) else set()  # of many, the files were not collected
    missing_at = [
        (call.created_ns, rank not in certain, rank not in folder.records, rank, call)
        for call, absent in blocked.values()
        for rank in absent
        if rank not in blocked
    ]
    if not missing_at:
        circle = _circle({rank: absent for rank, (_, absent) in blocked.items()})
        sentences = ["Ranks wait for each other in a circle: groups are used in different orders."]
        for rank in circle:
            call, absent = blocked[rank]
            at = where(folder, rank, call)
            sentences.append(f"rank {rank} is in {call} and waits for {ranks_of(absent)}" + f", at {at}" * bool(at))
        return "circle", tuple(circle), str(blocked[circle[0]][0]), tuple(sentences)
    call = min(missing_at, key=lambda m: m[:4])[4]
    here = [m[3] for m in sorted(missing_at, key=lambda m: m[1:4]) if m[4].key == call.key]
    culprits = tuple(dict.fromkeys(rank for rank in here if rank not in folder.damaged)) or (here[0],)
    there = sorted(rank for rank, (other, _) in blocked.items() if other.key == call.key)
    verb = "has" if len(culprits) == 1 else "have"
    wait = "waits" if len(there) == 1 else "wait"
    sentence = f"R{ranks_of(culprits)[1:]} {verb} not arrived at {call}; {ranks_of(there)} {wait} there."
    return "missing", culprits, str(call), (sentence, *(_story(matched, rank, call) for rank in culprits[:4]))


def _story(matched: Matched, rank: int, call: RecordedCall) -> str:
    """What a rank that did not arrive did last, and where it is now."""
    folder = matched.folder
    record = folder.records.get(rank)
    if record is None:
        why = folder.damaged.get(rank, "it ended, was killed, or could not write one; its own log has the cause")
        return f"Rank {rank} has no record: {why}."
    issued = any(c.key == call.key and c.operation == call.operation for c in record.calls)
    if issued:
        text = (
            f"Rank {rank} issued it, but its device has not started it: an earlier kernel of its stream does not end."
        )
    elif record.calls:
        last = record.calls[-1]
        at = where(folder, rank, last, now=False)
        text = f"Rank {rank} last issued {last}{', which is done' * last.done}" + f", from {at}" * bool(at) + "."
    else:
        text = f"Rank {rank} has issued nothing."
    here = place(folder.stacks.get(rank, ()))
    return text + (f" It is now at {here}." if here else "")


def _circle(waits: dict[int, set[int]]) -> list[int]:
    """A circle of ranks, each waiting for the next; every rank waits for at least one of them."""
    path, rank = [], min(waits)
    while rank not in path:
        path.append(rank)
        rank = min(waits[rank])
    return path[path.index(rank) :]


def _transport(matched: Matched) -> Cause | None:
    """A call that all members have started and none has finished, and that was not just issued."""
    for (group, _), by_rank in sorted(matched.calls.items(), key=lambda item: item[0][1]):
        calls = [call for calls in by_rank.values() for call in calls]
        if set(by_rank) == matched.members(group) and not any(call.done for call in calls) and len(by_rank) > 1:
            sentence = f"All ranks of {group} are in {calls[0]} and none has finished it."
            why = "The network or a device hangs, or the records were written while it ran: NCCL_DEBUG=INFO shows the connections."
            return "transport", (), str(calls[0]), (sentence, why)
    return None


def slow_rank(matched: Matched) -> Cause | None:
    """The rank that makes the others of a group wait most often, by how much, and where it came from."""
    slow: list[tuple[float, float, int, GroupKey, int, bool]] = []
    by_group: dict[GroupKey, list[dict[int, RecordedCall]]] = defaultdict(list)
    for (group, _), by_rank in sorted(matched.calls.items(), key=lambda item: item[0][1]):
        if len(by_rank) > 1 and set(by_rank) == matched.members(group):
            by_group[group].append({rank: calls[0] for rank, calls in by_rank.items()})
    for group, rows in by_group.items():
        timed = [row for row in rows if all(call.duration_ms > 0 for call in row.values())]
        by_duration = len(timed) >= LEAST_CALLS
        late = [_lateness(row, by_duration) for row in (timed if by_duration else rows[1:])]
        late = [(rank, seconds) for rank, seconds in late if seconds > LEAST_LATE_S]
        span = max(rows[-1][rank].created_ns - rows[0][rank].created_ns for rank in rows[0]) * 1e-9  # on one clock
        for rank, times in Counter(rank for rank, _ in late).most_common(1):
            own = [seconds for other, seconds in late if other == rank]
            least = max(LATE_SHARE * sum(seconds for _, seconds in late), SPAN_SHARE * span)
            if times >= LEAST_CALLS and sum(own) >= least:
                slow.append((sum(own), median(own), rank, group, times, by_duration))
    if not slow:
        return None
    _, typical, rank, group, count, by_duration = max(slow, key=lambda f: f[0])
    rows = sorted((row for row in by_group[group]), key=lambda row: _lateness(row, by_duration)[1])
    call = next(row for row in reversed(rows) if _lateness(row, by_duration)[0] == rank)[rank]
    at = where(matched.folder, rank, call, now=False)
    calls, behind = counted(count, "call"), format_seconds(typical)
    sentence = f"No hang. Rank {rank} is the last to arrive in {calls} of {group}, {behind} after all others (median)"
    how = "NCCL's durations" if by_duration else "the hosts' clocks, which must agree"
    return "slow", (rank,), str(call), (sentence + f", at {at}" * bool(at) + f" (by {how}).",)


def _lateness(row: dict[int, RecordedCall], by_duration: bool) -> tuple[int, float]:
    """The last rank of a call, and the seconds between it and the one before it."""
    arrival = {r: -c.duration_ms * 1e-3 if by_duration else c.created_ns * 1e-9 for r, c in row.items()}
    before, last = sorted(arrival, key=lambda r: arrival[r])[-2:]
    return last, arrival[last] - arrival[before]


def where(folder: FlightFolder, rank: int, call: RecordedCall, now: bool = True) -> str:
    """The line of the user's code: where the rank is now if its stack is there, else where it issued the call."""
    return (place(folder.stacks.get(rank, ())) if now else "") or place(call.frames)


def ranks_of(ranks: Iterable[int]) -> str:
    """The ranks as words: rank 3; ranks 0-7 and 9."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans]
    shown = ", ".join(texts[:12]) + " …" * (len(texts) > 12)
    return f"rank{'s' * (sum(b - a + 1 for a, b in spans) != 1)} {shown}"
