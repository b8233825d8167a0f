"""Ranks beside each other: the same collective on every rank of its group, the difference of their clocks, and who arrived last.

The n-th collective of a group in a step is the same one on all its ranks. It ends on all of them at the same time, but for what its last message
takes: the median difference of the ends is the difference of the clocks. Ranks of one host share its clock. On the common clock the last start is
when the last rank arrived; until then the others wait, however fast the network is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.explain.collectives import UNNAMED, traced_collectives
from meshwright.explain.recognise import RecognisedTrace
from meshwright.explain.trace import NamedSpan, TracedCollectives

# Complete on all ranks at the same time
SYNCHRONOUS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
MESSAGES = ("send", "receive")  # waiting for those is the bubble of a pipeline
NOTABLE_NS = 1_000_000  # a difference of clocks that is worth a note
ANOTHER_CLOCK_NS = 1_000_000_000  # ranks of one host with a larger difference do not share its clock
CONSTANT = 0.7  # share of a rank's collectives at which it must be last to be called constantly late


@dataclass
class RankInGroup:
    """A rank with its collectives, and what its peers say about them."""

    found: RecognisedTrace
    collectives: TracedCollectives
    clock: int  # nanoseconds to add to a time of this trace for the common clock
    # Per collective, on this rank's clock: when the last rank arrived; its own start where that is not known
    last_start: NDArray[np.int64]
    last_rank: NDArray[np.int64]  # which rank that was; −1: not known

    @property
    def rank(self) -> int:
        return self.found.trace.rank

    @property
    def steps(self) -> tuple[NamedSpan, ...]:
        return self.found.steps


@dataclass(frozen=True)
class LateRank:
    """A rank that arrives last at collectives."""

    rank: int
    share: float  # of the collectives that were matched
    late_s: float  # median time between its arrival and that of the rank before it
    by_step: dict[str, float] = field(default_factory=dict)  # step → the largest such time in it

    @property
    def constant(self) -> bool:
        return self.share >= CONSTANT


@dataclass(frozen=True)
class TracedRun:
    """All ranks that were traced."""

    ranks: list[RankInGroup]
    late: list[LateRank]
    notes: list[str]

    @property
    def world(self) -> int:
        return max(r.found.trace.world for r in self.ranks)

    def rank(self, number: int) -> RankInGroup:
        return next(r for r in self.ranks if r.rank == number)


@dataclass(frozen=True)
class _Match:
    """Collectives of one group in one step: for each rank of `ranks`, their indices."""

    step: str
    ranks: list[int]
    indices: NDArray[np.int64]  # rank × collective


def traced_run(traces: Sequence[RecognisedTrace]) -> TracedRun:
    """Match the collectives of all ranks."""
    ranks = []
    for found in traces:
        own = traced_collectives(found)
        ranks.append(RankInGroup(found, own, found.trace.origin_ns, own.start.copy(), np.full(len(own), -1)))
    by_rank = {r.rank: r for r in ranks}
    notes = differing_programs(ranks)
    matches = list(matched(by_rank, notes))
    align_clocks(by_rank, matches, notes)
    return TracedRun(ranks, arrivals(by_rank, matches), notes)


def differing_programs(ranks: list[RankInGroup]) -> list[str]:
    """Notes on ranks whose steps, or names of operators, have little in common with those of the first rank."""
    first, notes = ranks[0], []
    names = set(first.found.events.names)
    for r in ranks[1:]:
        own = set(r.found.events.names)
        if len(names & own) < 0.3 * len(names | own):
            notes.append(
                f"rank {r.rank} ran another program than rank {first.rank}, or another part of it: few operators are the same"
            )
        if not {s.name for s in r.steps} & {s.name for s in first.steps}:
            notes.append(f"rank {r.rank} was traced in other steps than rank {first.rank}: they cannot be compared")
    return notes


def matched(by_rank: dict[int, RankInGroup], notes: list[str]) -> list[_Match]:
    """Groups of collectives that are the same on several ranks."""
    positions: dict[tuple[tuple[int, ...], str], dict[int, NDArray[np.int64]]] = {}
    everyone = tuple(sorted(by_rank))
    for rank, r in by_rank.items():
        c = r.collectives
        groups = [ranks or (() if UNNAMED in name else everyone) for ranks, name in zip(c.ranks, c.group, strict=True)]
        usable = [len(g) > 1 and k not in MESSAGES for g, k in zip(groups, c.kind, strict=True)]
        for step in r.steps:
            inside = np.flatnonzero((c.start >= step.start) & (c.start < step.end)).tolist()
            for group in {groups[i] for i in inside if usable[i]}:
                positions.setdefault((group, step.name), {})[rank] = np.array(
                    [i for i in inside if usable[i] and groups[i] == group]
                )
    out, unequal = [], set[str]()
    for (_, step_name), indices in positions.items():
        if len({len(of_rank) for of_rank in indices.values()}) > 1:
            unequal.add(step_name)
        elif len(indices) > 1:
            out.append(_Match(step_name, list(indices), np.array(list(indices.values()))))
    if any(UNNAMED in name for r in by_rank.values() for name in r.collectives.group):
        notes.append(
            "collectives of several groups are not told apart in these traces (gloo): waiting for slower ranks is part of communication"
        )
    if unequal:
        notes.append(
            f"ranks have different numbers of collectives in step {', '.join(sorted(unequal)[:5])}: not compared there"
        )
    return out


def align_clocks(by_rank: dict[int, RankInGroup], matches: list[_Match], notes: list[str]) -> None:
    """Set the clock of every rank that shares collectives with the first one, directly or through others."""
    aligned = {min(by_rank)}
    while True:
        progress = False
        for rank in sorted(set(by_rank) - aligned):
            differences = []
            for m in matches:
                others = [r for r in m.ranks if r in aligned]
                if rank in m.ranks and others:
                    other, r = by_rank[others[0]], by_rank[rank]
                    mine, theirs = m.indices[m.ranks.index(rank)], m.indices[m.ranks.index(others[0])]
                    together = np.array([r.collectives.kind[i] in SYNCHRONOUS for i in mine.tolist()], bool)
                    ends = other.collectives.end[theirs] + other.clock - r.collectives.end[mine] - r.clock
                    differences.append(ends[together])
            if differences and len(all_of := np.concatenate(differences)):
                shift = int(np.median(all_of))
                same_host = by_rank[rank].found.trace.host == by_rank[min(by_rank)].found.trace.host != ""
                shift = 0 if same_host and abs(shift) < ANOTHER_CLOCK_NS else shift
                by_rank[rank].clock += shift
                aligned.add(rank)
                progress = True
                if abs(shift) > NOTABLE_NS:
                    notes.append(
                        f"the clock of rank {rank} was moved by {shift / 1e6:,.1f} ms: so its {len(all_of)} collectives end with those of its peers"
                    )
        if not progress:
            break
    if len(by_rank) > 1 and set(by_rank) - aligned:
        notes.append(
            f"no collective of rank {min(set(by_rank) - aligned)} was matched with another rank: its clock is taken as it is"
        )


def arrivals(by_rank: dict[int, RankInGroup], matches: list[_Match]) -> list[LateRank]:
    """Fill in when the last rank arrived, and sum up which ranks are late, the latest first."""
    last_at, lateness, steps, total = dict[int, int](), dict[int, list[float]](), dict[int, dict[str, float]](), 0
    for m in matches:
        starts = np.array(
            [by_rank[r].collectives.start[i] + by_rank[r].clock for r, i in zip(m.ranks, m.indices, strict=True)]
        )
        latest, order = starts.max(0), np.sort(starts, axis=0)
        margin, who = (order[-1] - order[-2]) / 1e9, np.array(m.ranks)[starts.argmax(0)]
        total += len(latest)
        for r, indices in zip(m.ranks, m.indices, strict=True):
            own = by_rank[r]
            end = own.collectives.end[indices]
            own.last_start[indices] = np.clip(latest - own.clock, own.collectives.start[indices], end)
            own.last_rank[indices] = who
            mine = who == r
            if mine.any():
                last_at[r] = last_at.get(r, 0) + int(mine.sum())
                lateness.setdefault(r, []).extend(margin[mine].tolist())
                worst = steps.setdefault(r, {})
                worst[m.step] = max(worst.get(m.step, 0.0), float(margin[mine].max()))
    late = [LateRank(r, last_at[r] / total, float(np.median(lateness[r])), steps[r]) for r in last_at]
    return sorted(late, key=lambda x: -x.share * x.late_s)
