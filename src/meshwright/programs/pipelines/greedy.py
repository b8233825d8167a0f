"""List scheduling: play the step forward in time, and let every rank that falls free pick its next action by a simple
rule.

A rank may pick from the backwards and forwards whose inputs have arrived, and from the weights' halves it owes. The
rule:

1. a backward that is here (it frees memory, and the stages before wait for it);
2. else a forward that is here and fits the memory limit, unless a backward is known to arrive within `patience`
   forwards;
3. else an owed W, if what is known to arrive next leaves a gap of at least `least_gap` of its length;
4. else wait.

Forwards run at most `ahead` activations ahead. A memory limit could lock a rank with several stages: it might fill up
with first-stage activations while the oldest micro-batch still needs room in a later stage. So a forward is admitted
only if the room that the oldest unfinished micro-batch still needs on this rank stays free; with room for one whole
micro-batch a rank never locks. The result depends on the four numbers of the `Policy`; `auto` tries a small grid of
them.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from meshwright.programs.pipelines.program import PipelineProgram, program_of
from meshwright.programs.pipelines.walk import Durations

NEVER = float("inf")


@dataclass(frozen=True)
class Setting:
    """What a schedule is to be found for."""

    microbatches: int
    rank_of: np.ndarray
    durations: Durations
    p2p: np.ndarray  # (stages − 1,)
    activation: np.ndarray  # (stages,) memory of one activation
    released_at_input: np.ndarray  # (stages,) share of it that goes after I
    limit: np.ndarray  # (ranks,) most memory

    @property
    def ranks(self) -> int:
        return len(self.limit)


@dataclass(frozen=True)
class Policy:
    """The rule's numbers."""

    split: bool  # backward as I and W, or in one piece
    ahead: np.ndarray  # (ranks,) most activations in flight
    patience: float = 0.0
    least_gap: float = 1.0
    breadth_first: bool = False  # among forwards: the earliest stage first, or the latest


class _Play:
    """The state of the game: who has done what, what has arrived when, what each rank holds."""

    def __init__(self, setting: Setting, policy: Policy) -> None:
        s, self.policy = setting, policy
        self.m, stages = s.microbatches, len(s.rank_of)
        self.rank_of = s.rank_of.tolist()
        self.local = [[k for k, r in enumerate(self.rank_of) if r == rank] for rank in range(s.ranks)]
        d = s.durations
        self.f, self.w = d.forward.tolist(), d.weight.tolist()
        self.b = (d.input if policy.split else d.backward).tolist()
        self.hop = np.where(s.rank_of[1:] != s.rank_of[:-1], s.p2p, 0.0).tolist()
        self.weight = s.activation.tolist()
        at_input = s.activation * (s.released_at_input if policy.split else 1.0)
        self.freed, self.freed_late = at_input.tolist(), (s.activation - at_input).tolist()
        self.room = s.limit.tolist()
        self.ahead = policy.ahead.tolist()
        self.flying = [0] * s.ranks
        self.next_f, self.next_b = [0] * stages, [0] * stages
        self.here_f: list[list[float]] = [[0.0] * self.m if k == 0 else [] for k in range(stages)]
        self.here_b: list[list[float]] = [[] for _ in range(stages)]
        self.owed: list[deque[tuple[int, int]]] = [deque() for _ in range(s.ranks)]
        self.lists: list[list[tuple[int, str, int]]] = [[] for _ in range(s.ranks)]
        self.free = [0.0] * s.ranks
        self.events: list[tuple[float, int]] = [(0.0, r) for r in range(s.ranks)]

    def run(self) -> list[list[tuple[int, str, int]]]:
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] <= now:
                self.step(rank, now)
        return self.lists

    def step(self, rank: int, now: float) -> None:
        """Let a free rank pick."""
        backward, soon_b = self.pick(rank, now, self.next_b, self.here_b, latest=True)
        if backward >= 0:
            self.do_backward(rank, backward, now)
            return
        latest = not self.policy.breadth_first
        forward, soon_f = self.pick(rank, now, self.next_f, self.here_f, latest, forward=True)
        if forward >= 0 and soon_b > now + self.policy.patience * self.f[forward]:
            self.do_forward(rank, forward, now)
            return
        if self.owed[rank]:
            stage, _ = self.owed[rank][0]
            if min(soon_b, soon_f) >= now + self.policy.least_gap * self.w[stage]:
                self.do_weights(rank, now)

    def pick(
        self, rank: int, now: float, upto: list[int], here: list[list[float]], latest: bool, forward: bool = False
    ) -> tuple[int, float]:
        """The stage to run of those whose next input has arrived (−1: none), and when the next known one will."""
        chosen, soon = -1, NEVER
        for stage in self.local[rank]:
            batch, arrived = upto[stage], here[stage]
            if batch >= len(arrived) or (forward and not self.admits(rank, stage, batch)):
                continue
            if arrived[batch] > now:
                soon = min(soon, arrived[batch])
            elif chosen < 0 or latest:
                chosen = stage
        return chosen, soon

    def admits(self, rank: int, stage: int, batch: int) -> bool:
        """Whether memory allows a forward: within `ahead`, and leaving room for the oldest unfinished micro-batch."""
        stages = self.local[rank]
        oldest = self.next_f[stages[-1]]
        needed = self.weight[stage]
        if batch > oldest:
            needed += sum(self.weight[k] for k in stages if self.next_f[k] <= oldest)
        if (batch > oldest or stage == stages[0]) and self.flying[rank] >= self.ahead[rank]:
            return False
        return needed <= self.room[rank] * (1 + 1e-12) + 1e-12

    def do_forward(self, rank: int, stage: int, now: float) -> None:
        batch, end = self.next_f[stage], now + self.f[stage]
        self.next_f[stage] += 1
        self.flying[rank] += 1
        self.room[rank] -= self.weight[stage]
        self.log(rank, stage, "F", batch, end)
        if stage + 1 < len(self.here_f):
            self.arrive(self.here_f[stage + 1], stage + 1, end + self.hop[stage])
        else:
            self.arrive(self.here_b[stage], stage, end)

    def do_backward(self, rank: int, stage: int, now: float) -> None:
        batch, end = self.next_b[stage], now + self.b[stage]
        self.next_b[stage] += 1
        self.room[rank] += self.freed[stage]
        self.log(rank, stage, "I" if self.policy.split else "B", batch, end)
        if self.policy.split:
            self.owed[rank].append((stage, batch))
        else:
            self.flying[rank] -= 1
        if stage:
            self.arrive(self.here_b[stage - 1], stage - 1, end + self.hop[stage - 1])

    def do_weights(self, rank: int, now: float) -> None:
        stage, batch = self.owed[rank].popleft()
        self.flying[rank] -= 1
        self.room[rank] += self.freed_late[stage]
        self.log(rank, stage, "W", batch, now + self.w[stage])

    def log(self, rank: int, stage: int, kind: str, batch: int, end: float) -> None:
        self.lists[rank].append((stage, kind, batch))
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))

    def arrive(self, queue: list[float], stage: int, when: float) -> None:
        queue.append(when)
        heapq.heappush(self.events, (when, self.rank_of[stage]))


def list_schedule(setting: Setting, policy: Policy) -> PipelineProgram | None:
    """The program that a policy plays, or None when it comes to a halt (too little memory)."""
    lists = _Play(setting, policy).run()
    stages, m = len(setting.rank_of), setting.microbatches
    if sum(len(actions) for actions in lists) < (3 if policy.split else 2) * stages * m:
        return None
    return program_of("auto", lists, setting.rank_of, m)
