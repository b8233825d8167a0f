"""The sweep: every operation of every backend over message sizes, and transfers between pairs of ranks, within a time budget.

Order: pairs first, smallest messages first, since `calibrate` finds the levels of the network in them; then the collectives, at every
third size, then at the sizes between. So a bench that runs out of time has every operation at a few sizes instead of a few operations at
every size. A measurement that is expected to take more than its part of the remaining time is skipped, and the result says so; pairs leave
a third of the time to the collectives.

All ranks run the same loop. Each decision depends only on values that the ranks have agreed on, so no rank waits for one that
decided otherwise. Ranks outside a measured group take part in the barriers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from meshwright.calibrate.points import Point, Timed
from meshwright.comm.bench.backends import (
    BACKENDS,
    BUFFERS,
    ELEMENT_BYTES,
    OPERATIONS,
    BenchLibrary,
    Session,
    do_nothing,
    rounded,
)
from meshwright.comm.bench.timing import measure
from meshwright.errors import MeshwrightError
from meshwright.units import Json, format_bytes, format_seconds

SMALLEST, LARGEST, STEP = 2**10, 2**30, 4
PAIR_SIZES = (2**10, 2**16, 2**20, 2**24)
MOST_PAIRS = 120  # all pairs of 16 ranks; of more ranks some pairs of each kind
SHORTEST_S, LONGEST_S = 0.01, 1.0  # time given to one measurement
CALLS = 3  # calls that a measurement needs at least
LARGE = 2**20  # a pair reaches its rate from this size on
PART = 0.25  # a measurement that needs more than this part of the remaining time is skipped
# Of the time for pairs, if collectives are measured too: there are many pairs, and a slow network has time for few.
PAIR_PART = 2 / 3
PAIR, DEVICE = "point-to-point", "device"
Emit = Callable[[Json], None]


@dataclass(frozen=True)
class Sweep:
    """The measurements to make, and their time budget."""

    backends: tuple[str, ...] = ()  # empty: NCCL on GPUs, else gloo
    operations: tuple[str, ...] = (PAIR, *OPERATIONS, DEVICE)
    smallest: int = SMALLEST
    largest: int = LARGEST
    budget_s: float = 60.0
    memory_bytes: float = float("inf")  # that the buffers of all ranks of one host may take


class Task(NamedTuple):
    """One measurement: a collective of a group, or transfers of pairs that run at the same time."""

    adapter: BenchLibrary
    operation: str
    algorithm: str
    n: int
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for pair in self.pairs for rank in pair) or self.adapter.ranks

    @property
    def series(self) -> tuple[object, ...]:
        return self.adapter.name, self.operation, self.algorithm, self.ranks

    def __str__(self) -> str:
        name = f"{self.algorithm} {self.operation}".strip()
        return f"{self.adapter.name} {name}, {format_bytes(self.n)}, {len(self.ranks)} ranks"


def run(session: Session, sweep: Sweep, emit: Emit) -> None:
    """Measure, and emit {"point": …}, {"skipped": …} and {"left_s": …, "doing": …} on rank 0."""
    tell = emit if session.rank == 0 else (lambda message: None)
    tasks = tasks_of(session, sweep)
    state = SweepProgress(len(tasks), sweep.budget_s, time.monotonic(), all(task.pairs for task in tasks))
    for task in tasks:
        left = -session.agree([state.elapsed() - sweep.budget_s])[0]
        tell({"left_s": max(left, 0.0), "doing": str(task)})
        reason = state.reason_to_skip(task, left)
        if reason:
            tell({"skipped": f"{task}: {reason}"})
        else:
            budget = min(max(left / (state.total - state.done), SHORTEST_S), LONGEST_S)
            point = measured(session, task, budget)
            if isinstance(point, str):
                state.refused.add((task.adapter.name, task.operation, task.algorithm))
                tell({"skipped": f"{task}: {point}"})
            else:
                state.measured.setdefault(task.series, []).append(point)
                tell({"point": point.model_dump(mode="json")})
        state.done += 1


@dataclass
class SweepProgress:
    """Measurements so far; the same on all ranks."""

    total: int
    budget_s: float
    start: float
    only_pairs: bool = False
    done: int = 0
    measured: dict[tuple, list[Point]] = field(default_factory=dict)
    refused: set[tuple] = field(default_factory=set)

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def reason_to_skip(self, task: Task, left: float) -> str:
        """Return why a task is skipped; empty if it is measured."""
        if (task.adapter.name, task.operation, task.algorithm) in self.refused:
            return "the library refused a smaller size"
        if task.pairs and not self.only_pairs:
            left -= (1 - PAIR_PART) * self.budget_s
        if left <= 0:
            return "out of time"
        expected = self.expected(task)
        if expected * CALLS > PART * left:
            return f"no time: one call takes about {format_seconds(expected)}"
        return ""

    def expected(self, task: Task) -> float:
        """Seconds of one call, extrapolated from the sizes of the same series; 0 if there are none.

        From two sizes on, along the line through the last two; from one size, with the rate of the slowest pair for all bytes
        that the ranks of the group exchange, or in proportion to the size if no pair was measured."""
        known = sorted(self.measured.get(task.series, []), key=lambda point: point.bytes)
        below = [point for point in known if point.bytes <= task.n]
        if not below:
            return 0.0
        last, trips = below[-1], 2 if len(task.pairs) == 1 else 1
        if len(below) > 1:
            slope = max(last.median_s - below[-2].median_s, 0.0) / (last.bytes - below[-2].bytes)
            return trips * (last.median_s + slope * (task.n - last.bytes))
        slowest = min((p.algorithm_bandwidth for p in self.pairs() if p.bytes >= LARGE), default=0.0)
        if not slowest:
            return trips * last.median_s * task.n / max(last.bytes, 1)
        return trips * last.median_s + len(task.ranks) * (task.n - last.bytes) / slowest

    def pairs(self) -> list[Point]:
        return [point for series, points in self.measured.items() if series[1] == PAIR for point in points]


def measured(session: Session, task: Task, budget_s: float) -> Point | str:
    """The point of a task, or the reason why the library refused it."""
    error = ""
    call: Callable[[], object] = do_nothing
    try:
        call = call_of(session, task)
    except (RuntimeError, MeshwrightError) as found:  # no memory; an algorithm that this number of ranks cannot run
        error = str(found).splitlines()[0][:160]
    if session.agree([float(bool(error))])[0]:
        return error or "another rank refused it"
    try:
        seconds = measure(call, session.synchronization, budget_s=budget_s)
    except RuntimeError as found:
        session.barrier()  # raises too if a rank has ended; passes if all ranks were refused
        return str(found).splitlines()[0][:160]
    if len(task.pairs) == 1:
        seconds = halved(seconds)
    return Point(
        operation=task.operation,
        backend=task.adapter.name,
        algorithm=task.algorithm,
        ranks=task.ranks,
        bytes=task.n if task.operation != "barrier" else 0,
        concurrent=max(len(task.pairs), 1),
        **seconds.model_dump(),
    )


def call_of(session: Session, task: Task) -> Callable[[], object]:
    """This rank's part of a task; ranks outside the group do nothing.

    One pair exchanges equal messages, and half of the round trip counts. Pairs at the same time send in one direction and are answered
    by a few bytes: in round trips one pair's messages would meet the answers of another, which a link in two directions carries at once.
    """
    if not task.pairs:
        return task.adapter.collective(task.operation, task.algorithm, task.n)
    for a, b in task.pairs:
        if session.rank in (a, b):
            answer = task.n if len(task.pairs) == 1 else ELEMENT_BYTES
            return task.adapter.round_trip(b if session.rank == a else a, task.n, session.rank == a, answer)
    return do_nothing


def halved(seconds: Timed) -> Timed:
    """One way of a round trip."""
    return seconds.but(**{name: getattr(seconds, name) / 2 for name in ("median_s", "low_s", "high_s")})


def tasks_of(session: Session, sweep: Sweep) -> list[Task]:
    """All measurements, in order. Every rank makes the same process groups in the same order."""
    pairs: list[Task] = []
    collectives: list[list[Task]] = []
    per_host = max(session.hosts.count(host) for host in session.hosts)
    for backend in sweep.backends:
        for k, ranks in enumerate(groups_of(session.hosts)):
            adapter = BACKENDS[backend](ranks, session.device, session.hosts)
            if k == 0 and PAIR in sweep.operations and adapter.has_pairs:
                pairs += pair_tasks(adapter, session.hosts, sweep)
            for operation in sweep.operations:
                if operation in (PAIR, DEVICE):
                    continue
                most = sweep.memory_bytes / (per_host * BUFFERS.get(operation, 1))
                sizes = [n for n in sizes_of(sweep) if n <= most]
                for algorithm in adapter.algorithms(operation):
                    one = [Task(adapter, operation, algorithm, rounded(n, len(ranks))) for n in sizes]
                    collectives.append(one[:1] if operation == "barrier" else one)
    return sorted(pairs, key=lambda task: task.n) + list(coarse_to_fine(collectives))


def sizes_of(sweep: Sweep) -> list[int]:
    """1 KB, 4 KB, … up to the largest size; both ends included."""
    sizes, n = [], sweep.smallest
    while n < sweep.largest:
        sizes.append(n)
        n *= STEP
    return [*sizes, sweep.largest]


def coarse_to_fine(series: Sequence[Sequence[Task]]) -> Iterator[Task]:
    """Every third size of all series, smallest first, then the sizes between."""
    longest = max((len(one) for one in series), default=0)
    order = [*range(0, longest, 3), *(k for k in range(longest) if k % 3)]
    for k in order:
        for one in series:
            if k < len(one):
                yield one[k]


def groups_of(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """The groups whose collectives are measured: all ranks; and, on several hosts, the ranks of the first host and one rank of each."""
    groups = [tuple(range(len(hosts)))]
    if len(set(hosts)) > 1:
        groups.append(tuple(r for r, host in enumerate(hosts) if host == hosts[0]))
        groups.append(tuple(hosts.index(host) for host in dict.fromkeys(hosts)))
    return list(dict.fromkeys(group for group in groups if len(group) > 1)) or groups[:1]


def pair_tasks(adapter: BenchLibrary, hosts: Sequence[str], sweep: Sweep) -> list[Task]:
    """Round trips of single pairs, of pairs at the same time, and over all sizes for one pair inside a host and one between two."""
    sizes = [n for n in PAIR_SIZES if sweep.smallest <= n <= sweep.largest] or [sweep.smallest]
    tasks = [Task(adapter, PAIR, "", n, (pair,)) for pair in pairs_of(hosts) for n in sizes]
    tasks += [Task(adapter, PAIR, "", n, pairs) for pairs in concurrent_pairs(hosts) for n in sizes]
    others = [n for n in sizes_of(sweep) if n not in sizes and n <= sweep.memory_bytes / len(hosts)]
    kinds = {hosts[a] == hosts[b]: (a, b) for a, b in reversed(list(combinations(range(len(hosts)), 2)))}
    return tasks + [Task(adapter, PAIR, "", n, (pair,)) for pair in kinds.values() for n in others]


def pairs_of(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """All pairs of ranks; if they are too many, all pairs of the first host, the first rank with every other rank, and every host's
    first rank with that of the next two hosts, so that a slow host is seen from several others."""
    ranks = range(len(hosts))
    if len(hosts) * (len(hosts) - 1) // 2 <= MOST_PAIRS:
        return list(combinations(ranks, 2))
    first = [r for r in ranks if hosts[r] == hosts[0]]
    leaders = [list(hosts).index(host) for host in dict.fromkeys(hosts)]
    found = [*combinations(first, 2), *((0, r) for r in ranks[1:])]
    following = [(a, leaders[(k + d) % len(leaders)]) for k, a in enumerate(leaders) for d in (1, 2)]
    found += [(min(pair), max(pair)) for pair in following if pair[0] != pair[1]]
    return list(dict.fromkeys(found))


def concurrent_pairs(hosts: Sequence[str]) -> list[tuple[tuple[int, int], ...]]:
    """Sets of disjoint pairs that exchange at the same time: inside the first host, and between the first two hosts. They show links
    that devices share."""
    by_host = {host: [r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)}
    first, *others = by_host.values()
    half = len(first) // 2
    found = [tuple(zip(first[:half], first[half : 2 * half], strict=True))]
    if others:
        found.append(tuple(zip(first, others[0], strict=False)))
    return [pairs for pairs in found if len(pairs) > 1]
