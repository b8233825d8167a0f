"""Simulate a pipeline program: start and end of each action, idle time and memory of each rank, in one pass.

A rank runs its list in order. An action also waits for the action it needs (`check.needs_and_order`); if that is on
another rank, the transfer takes `p2p` seconds. With e the end of an action, p the previous action on the same rank, n
the needed action:

    overlapped  start = max(e_p, e_n + p2p)                        transfers overlap with compute
    blocking    start = max(e_p + p2p_sent, max(e_p, e_n) + p2p)   transfers block compute

In the blocking case a rank sends its last result and receives its next input, both at the same time, before it
continues. A transfer between two stages on one rank takes no time. Actions are visited in the topological order that
`check` found, so each is computed once, and the result is exact for any stage times. A **joined** F and B (DualPipeV)
run one after the other, unless `hidden` is given: the share of the shorter action that overlaps with the longer one.
Then the pair starts when both inputs have arrived, and both results are available at its end.

From the times: **busy** and **idle** seconds of each rank up to the makespan; the **bubble fraction** is idle /
makespan, the **bubble overhead** is idle / busy. The **span** of a rank is the time from its first action to its last.
In zero-bubble schedules ranks start and end one after the other: a rank is free for the next step before other ranks
have finished the current one. If the optimizer step does not synchronise the ranks, a step takes `longest_span`, not
the makespan.

Memory depends only on the order of actions: an activation is held from its F to its B. With a split backward, the share
`released_at_input` is freed after I, and the remaining share after W.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines.check import IN_FLIGHT_STEP, count_in_flight, needs_and_order, run_order
from meshwright.programs.pipelines.program import F, PipelineProgram, W

Times = float | np.ndarray | list[float]


@dataclass(frozen=True, eq=False)
class Durations:
    """Seconds of each kind of action, by stage. `backward` is the full backward (B): I + W unless given."""

    forward: np.ndarray
    input: np.ndarray
    weight: np.ndarray
    backward: np.ndarray

    @classmethod
    def of(
        cls, stages: int, forward: Times = 1.0, input: Times = 1.0, weight: Times = 1.0, backward: Times | None = None
    ) -> Durations:
        """Build from one number for all stages, or one value per stage."""
        full = np.asarray(input, float) + np.asarray(weight, float) if backward is None else backward
        named = {"forward": forward, "input": input, "weight": weight, "backward": full}
        return cls(**{name: by_stage(value, stages, f"duration '{name}'") for name, value in named.items()})

    def scaled(self, factor: float) -> Durations:
        """All durations multiplied by a factor."""
        return Durations(*(factor * x for x in (self.forward, self.input, self.weight, self.backward)))

    @property
    def table(self) -> np.ndarray:
        """(kinds, stages) in the order F, B, I, W."""
        return np.stack([self.forward, self.backward, self.input, self.weight])


@dataclass(frozen=True, eq=False)
class Walked:
    """The result of a walk. Arrays over actions have the order of the program's arrays."""

    program: PipelineProgram
    durations: Durations
    start: np.ndarray  # (actions,)
    end: np.ndarray  # (actions,)
    busy: np.ndarray  # (ranks,) seconds of compute
    peak_in_flight: np.ndarray  # (ranks,) peak number of activations, counted in (stage, micro-batch)
    # (ranks,) the same multiplied by `activation`; default unit: micro-batches through all stages of a rank
    peak_memory: np.ndarray

    @cached_property
    def makespan(self) -> float:
        return float(self.end.max())

    @property
    def idle(self) -> np.ndarray:
        """(ranks,) seconds without compute between 0 and the makespan."""
        return self.makespan - self.busy

    @property
    def bubble_fraction(self) -> float:
        """Idle time / makespan, over all ranks."""
        return float(self.idle.sum() / (self.makespan * self.program.ranks)) if self.makespan else 0.0

    @property
    def bubble_overhead(self) -> float:
        """Idle time / busy time, over all ranks: the relative overhead of the pipeline."""
        return float(self.idle.sum() / self.busy.sum()) if self.busy.sum() else 0.0

    @property
    def bubble_fraction_by_rank(self) -> np.ndarray:
        return self.idle / self.makespan if self.makespan else np.zeros_like(self.busy)

    @property
    def span(self) -> np.ndarray:
        """(ranks,) seconds from a rank's first start to its last end."""
        return self.end[self.program.first[1:] - 1] - self.start[self.program.first[:-1]]

    @property
    def longest_span(self) -> float:
        """Seconds per step if ranks do not wait for each other between steps."""
        return float(self.span.max())


def walk(
    program: PipelineProgram,
    durations: Durations | None = None,
    *,
    p2p: Times = 0.0,
    overlap: bool = True,
    hidden: float | None = None,
    activation: Times | None = None,
    released_at_input: Times = 0.0,
) -> Walked:
    """Simulate a program. `p2p`: one number, or one per boundary (stage s to s+1, both ways); `activation`: memory per stage."""
    durations = durations or Durations.of(program.stages)
    run = running_order(program)
    took, received, sent = _seconds(program, durations, p2p, overlap)
    pairs = np.empty(0, int) if hidden is None else np.flatnonzero(program.joined)
    if hidden is not None and len(pairs):
        needs, order, took = _join(program, needs_and_order(program)[0], took, pairs, hidden)
        run = RunningOrder.of(program, needs, order)
    start = run.starts(took, received, sent)
    end = start + took
    busy = np.add.reduceat(took, program.first[:-1])
    start[pairs], end[pairs] = start[pairs + 1], end[pairs + 1]
    weights = by_stage(1.0 / program.virtual if activation is None else activation, program.stages, "activation")
    memory = held_memory(program, weights, by_stage(released_at_input, program.stages, "released_at_input"))
    counted = _peaks(program, count_in_flight(program))
    return Walked(program, durations, start, end, busy, counted, _peaks(program, memory))


def walked_makespan(program: PipelineProgram, durations: Durations, *, p2p: Times = 0.0, overlap: bool = True) -> float:
    """The makespan of `walk` alone. The planner walks long programs, most of them several times, and reads nothing else."""
    return max(running_order(program).ends(*_seconds(program, durations, p2p, overlap)))


def held_memory(program: PipelineProgram, activation: np.ndarray, released_at_input: np.ndarray) -> np.ndarray:
    """(actions,) memory of the activations that a rank holds after this action has started (F) or ended (B, I, W)."""
    if np.ptp(activation) == 0 and not released_at_input.any():
        return count_in_flight(program) * activation[0]  # avoids the rounding errors of a running sum
    early = released_at_input * activation
    change = np.stack([activation, -activation, -early, early - activation])[program.kind, program.stage]
    total = np.cumsum(change)
    before = np.concatenate([[0.0], total])[program.first[:-1]]  # rounding errors of the previous ranks
    return total - before[program.rank]


def held_changes(walked: Walked, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (times, counts) of the activations on a rank: +1 when an F starts, −1 when a B or W ends."""
    actions = slice(int(walked.program.first[rank]), int(walked.program.first[rank + 1]))
    step = IN_FLIGHT_STEP[walked.program.kind[actions]]
    times = np.where(step > 0, walked.start[actions], walked.end[actions])[step != 0]
    return times, np.cumsum(step[step != 0])


def by_stage(value: Times, count: int, what: str) -> np.ndarray:
    """Return one finite, non-negative number for each stage or boundary."""
    array = np.asarray(value, float)
    if array.ndim > 1 or (array.ndim == 1 and len(array) != count):
        problem = f"{what} has shape {array.shape}"
        why = "It must be one number, or one per stage, boundary or rank"
        raise MeshwrightError("MW-PIPE-020", problem, why=why, valid=[f"shape ({count},)"])
    if not np.isfinite(array).all() or (array < 0).any():
        raise MeshwrightError("MW-PIPE-021", f"{what} = {value!r} must be finite and at least 0")
    return np.broadcast_to(array, (count,))


def _peaks(program: PipelineProgram, memory: np.ndarray) -> np.ndarray:
    return np.maximum.reduceat(memory, program.first[:-1])


def _transfers(program: PipelineProgram, p2p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(actions,) seconds to receive the input of an action from another rank, and to send its result to another rank."""
    crosses_ranks = program.rank_of[1:] != program.rank_of[:-1]
    hop = np.concatenate([[0.0], np.where(crosses_ranks, p2p, 0.0), [0.0]])  # hop[s]: between stages s−1 and s
    up, down = hop[program.stage], hop[program.stage + 1]
    forward, weights = program.kind == F, program.kind == W
    received = np.where(weights, 0.0, np.where(forward, up, down))
    sent = np.where(weights, 0.0, np.where(forward, down, up))
    return received, sent


def _seconds(
    program: PipelineProgram, durations: Durations, p2p: Times, overlap: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(actions,) seconds of each action, of receiving its input and, where transfers block, of sending its result."""
    if len(durations.forward) != program.stages:
        raise MeshwrightError("MW-PIPE-020", f"durations are for {len(durations.forward)} stages, not {program.stages}")
    received, sent = _transfers(program, by_stage(p2p, program.stages - 1, "p2p"))
    return durations.table[program.kind, program.stage], received, None if overlap else sent


@dataclass(frozen=True, eq=False)
class RunningOrder:
    """The actions in the order of running, and for each of them the places in this order of the previous action of its rank and of the action
    that it needs. Place 0 is "nothing", done at 0."""

    order: np.ndarray
    before: np.ndarray  # the previous action of the rank; −1: none
    previous: list[int]
    needed: list[int]

    @classmethod
    def of(cls, program: PipelineProgram, needs: np.ndarray, order: np.ndarray) -> RunningOrder:
        before = np.arange(-1, len(program) - 1)
        before[program.first[:-1]] = -1
        place = np.zeros(len(program) + 1, int)  # index −1: nothing
        place[order] = np.arange(1, len(program) + 1)
        return cls(order, before[order], place[before[order]].tolist(), place[needs[order]].tolist())

    def ends(self, took: np.ndarray, received: np.ndarray, sent: np.ndarray | None) -> list[float]:
        """The end of each place. Plain lists, because one action is a few float operations, far cheaper than a numpy call."""
        ends = [0.0]
        done = ends.append
        columns = [self.previous, self.needed, took[self.order].tolist(), received[self.order].tolist()]
        if sent is None:
            for p, n, t, lag in zip(*columns, strict=True):
                free, there = ends[p], ends[n] + lag
                done((free if free > there else there) + t)
            return ends
        for p, n, t, lag, out in zip(*columns, self.sending(sent).tolist(), strict=True):
            free, made = ends[p], ends[n]
            there = (free if free > made else made) + lag
            free += out
            done((free if free > there else there) + t)
        return ends

    def sending(self, sent: np.ndarray) -> np.ndarray:
        """Seconds in which the previous action of the rank sends its result."""
        return np.append(sent, 0.0)[self.before]

    def starts(self, took: np.ndarray, received: np.ndarray, sent: np.ndarray | None) -> np.ndarray:
        """(actions,) start times."""
        end = np.array(self.ends(took, received, sent))
        free, made, lag = end[self.previous], end[self.needed], received[self.order]
        start = np.empty(len(took))
        if sent is None:
            start[self.order] = np.maximum(free, made + lag)
        else:
            start[self.order] = np.maximum(free + self.sending(sent), np.maximum(free, made) + lag)
        return start


def running_order(program: PipelineProgram) -> RunningOrder:
    """The order of a program, which is checked first; the result is cached on the program."""
    known = program.__dict__.get("_running_order")
    if known is None:
        known = RunningOrder.of(program, *needs_and_order(program))
        program.__dict__["_running_order"] = known
    return known


def _join(
    program: PipelineProgram, needs: np.ndarray, took: np.ndarray, pairs: np.ndarray, hidden: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give each joined F length 0 and its B the length of the pair; actions that needed the F now wait for the B."""
    moved = np.arange(len(program) + 1)
    moved[pairs] = pairs + 1
    moved[-1] = -1
    needs = moved[needs]
    forward, backward = took[pairs], took[pairs + 1]
    took = took.copy()
    took[pairs] = 0.0
    took[pairs + 1] = forward + backward - hidden * np.minimum(forward, backward)
    order = np.array(run_order(needs.tolist(), program.first.tolist()))
    if len(order) < len(program):
        what = f"deadlock: {program.schedule} cannot run its joined pairs as one action"
        raise MeshwrightError("MW-PIPE-013", what, why="The pairs wait for each other", fix="walk without hidden=")
    return needs, order, took
