"""List scheduling: simulate the step forward in time; each rank that becomes free picks its next action by a simple rule.

A rank picks from the backwards and forwards whose inputs have arrived, and from its pending Ws. The rule:

1. a backward whose input has arrived (it frees memory, and earlier stages wait for it);
2. else a forward whose input has arrived and that fits the memory limit, unless a backward will arrive within
   `patience` forwards;
3. else a pending W, if the time until the next known arrival is at least `least_gap` times the length of the W;
4. else wait.

A rank has at most `ahead` activations in flight. With several stages per rank, a memory limit could cause a deadlock:
the rank could fill its memory with activations of its first stage while the oldest micro-batch still needs memory for a
later stage. So a forward runs only if the memory that the oldest unfinished micro-batch still needs on this rank stays
free. If the limit allows one micro-batch through all stages of the rank, the rank never deadlocks. The result depends
on the fields of the `Policy`; `auto` tries a small grid of them.
"""

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from meshwright.programs.pipelines.program import PipelineProgram, program_of
from meshwright.programs.pipelines.walk import Durations

NEVER = float("inf")


@dataclass(frozen=True)
class ScheduleProblem:
    """The problem: micro-batches, placement, times and memory."""

    microbatches: int
    rank_of: np.ndarray
    durations: Durations
    p2p: np.ndarray  # (stages − 1,)
    activation: np.ndarray  # (stages,) memory of one activation
    released_at_input: np.ndarray  # (stages,) share of it that is freed after I
    limit: np.ndarray  # (ranks,) memory limit

    @property
    def ranks(self) -> int:
        return len(self.limit)


@dataclass(frozen=True)
class Policy:
    """The parameters of the rule."""

    split: bool  # run the backward as I and W instead of B
    ahead: np.ndarray  # (ranks,) most activations in flight
    patience: float = 0.0
    least_gap: float = 1.0
    breadth_first: bool = False  # among forwards: the earliest stage first, or the latest


class _ListScheduler:
    """The state: completed actions, arrival times, and memory of each rank."""

    def __init__(self, setting: ScheduleProblem, policy: Policy) -> None:
        s, self.policy = setting, policy
        self.m, stages = s.microbatches, len(s.rank_of)
        self.rank_of = s.rank_of.tolist()
        self.local = [[k for k, r in enumerate(self.rank_of) if r == rank] for rank in range(s.ranks)]
        d = s.durations
        self.f, self.w = d.forward.tolist(), d.weight.tolist()
        self.b = (d.input if policy.split else d.backward).tolist()
        self.hop = np.where(s.rank_of[1:] != s.rank_of[:-1], s.p2p, 0.0).tolist()
        self.memory = s.activation.tolist()
        at_input = s.activation * (s.released_at_input if policy.split else 1.0)
        self.freed_at_input, self.freed_at_weight = at_input.tolist(), (s.activation - at_input).tolist()
        self.free_memory = s.limit.tolist()
        self.ahead = policy.ahead.tolist()
        self.in_flight = [0] * s.ranks
        self.next_f, self.next_b = [0] * stages, [0] * stages
        self.arrivals_f: list[list[float]] = [[0.0] * self.m if k == 0 else [] for k in range(stages)]
        self.arrivals_b: list[list[float]] = [[] for _ in range(stages)]
        self.pending_weights: list[deque[tuple[int, int]]] = [deque() for _ in range(s.ranks)]
        self.lists: list[list[tuple[int, str, int]]] = [[] for _ in range(s.ranks)]
        self.free_at = [0.0] * s.ranks
        self.events: list[tuple[float, int]] = [(0.0, r) for r in range(s.ranks)]

    def run(self) -> list[list[tuple[int, str, int]]]:
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free_at[rank] <= now:
                self.step(rank, now)
        return self.lists

    def step(self, rank: int, now: float) -> None:
        """Pick the next action of a free rank."""
        backward, soon_b = self.pick(rank, now, self.next_b, self.arrivals_b, latest=True)
        if backward >= 0:
            self.do_backward(rank, backward, now)
            return
        latest = not self.policy.breadth_first
        forward, soon_f = self.pick(rank, now, self.next_f, self.arrivals_f, latest, forward=True)
        if forward >= 0 and soon_b > now + self.policy.patience * self.f[forward]:
            self.do_forward(rank, forward, now)
            return
        if self.pending_weights[rank]:
            stage, _ = self.pending_weights[rank][0]
            if min(soon_b, soon_f) >= now + self.policy.least_gap * self.w[stage]:
                self.do_weights(rank, now)

    def pick(
        self,
        rank: int,
        now: float,
        next_batch: list[int],
        arrivals: list[list[float]],
        latest: bool,
        forward: bool = False,
    ) -> tuple[int, float]:
        """Return the stage to run among those whose next input has arrived (−1: none), and the time of the next known arrival."""
        chosen, soon = -1, NEVER
        for stage in self.local[rank]:
            batch, arrived = next_batch[stage], arrivals[stage]
            if batch >= len(arrived) or (forward and not self.admits(rank, stage, batch)):
                continue
            if arrived[batch] > now:
                soon = min(soon, arrived[batch])
            elif chosen < 0 or latest:
                chosen = stage
        return chosen, soon

    def admits(self, rank: int, stage: int, batch: int) -> bool:
        """Whether a forward may run: within `ahead`, and with enough memory left for the oldest unfinished micro-batch."""
        stages = self.local[rank]
        oldest = self.next_f[stages[-1]]
        needed = self.memory[stage]
        if batch > oldest:
            needed += sum(self.memory[k] for k in stages if self.next_f[k] <= oldest)
        if (batch > oldest or stage == stages[0]) and self.in_flight[rank] >= self.ahead[rank]:
            return False
        return needed <= self.free_memory[rank] * (1 + 1e-12) + 1e-12

    def do_forward(self, rank: int, stage: int, now: float) -> None:
        batch, end = self.next_f[stage], now + self.f[stage]
        self.next_f[stage] += 1
        self.in_flight[rank] += 1
        self.free_memory[rank] -= self.memory[stage]
        self.log(rank, stage, "F", batch, end)
        if stage + 1 < len(self.arrivals_f):
            self.arrive(self.arrivals_f[stage + 1], stage + 1, end + self.hop[stage])
        else:
            self.arrive(self.arrivals_b[stage], stage, end)

    def do_backward(self, rank: int, stage: int, now: float) -> None:
        batch, end = self.next_b[stage], now + self.b[stage]
        self.next_b[stage] += 1
        self.free_memory[rank] += self.freed_at_input[stage]
        self.log(rank, stage, "I" if self.policy.split else "B", batch, end)
        if self.policy.split:
            self.pending_weights[rank].append((stage, batch))
        else:
            self.in_flight[rank] -= 1
        if stage:
            self.arrive(self.arrivals_b[stage - 1], stage - 1, end + self.hop[stage - 1])

    def do_weights(self, rank: int, now: float) -> None:
        stage, batch = self.pending_weights[rank].popleft()
        self.in_flight[rank] -= 1
        self.free_memory[rank] += self.freed_at_weight[stage]
        self.log(rank, stage, "W", batch, now + self.w[stage])

    def log(self, rank: int, stage: int, kind: str, batch: int, end: float) -> None:
        self.lists[rank].append((stage, kind, batch))
        self.free_at[rank] = end
        heapq.heappush(self.events, (end, rank))

    def arrive(self, queue: list[float], stage: int, when: float) -> None:
        queue.append(when)
        heapq.heappush(self.events, (when, self.rank_of[stage]))


def list_schedule(setting: ScheduleProblem, policy: Policy) -> PipelineProgram | None:
    """Return the schedule of a policy, or None if it cannot finish (too little memory)."""
    lists = _ListScheduler(setting, policy).run()
    stages, m = len(setting.rank_of), setting.microbatches
    if sum(len(actions) for actions in lists) < (3 if policy.split else 2) * stages * m:
        return None
    return program_of("auto", lists, setting.rank_of, m)
