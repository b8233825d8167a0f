"""When does each action run, where does a rank wait, and how much does it hold? One pass over a checked program.

A rank runs its list in order; an action also waits for its one need (`check.needs_and_order`), which may come from
another rank over a link that takes `p2p` seconds. With e the end of an action, p the action before it on its rank, n
its need:

    overlapped  start = max(e_p, e_n + p2p)                        transfers run beside compute
    blocking    start = max(e_p + p2p_sent, max(e_p, e_n) + p2p)   compute stands still for them

In the blocking case a rank sends what it has just made and receives what it needs next, both at once, before it goes
on. A transfer costs nothing when both stages sit on one rank. Actions are visited in the order `check` found, so each
is computed once, and the result is exact for any stage times. A **joined** F and B (DualPipeV) run one after the
other unless `hidden` says which share of the shorter one disappears beside the longer; then the pair starts when both
inputs are there and both results appear at its end.

From the times: **busy** and **idle** seconds of each rank up to the makespan; the **bubble fraction** is idle /
makespan, the **bubble overhead** idle / busy. A rank's **span** runs from its first action to its last. Zero-bubble
schedules start and end like a staircase: a rank is free for the next step before the others have finished this one,
so where the optimizer does not make ranks wait for each other, steps follow at `longest_span`, not at the makespan.

Memory depends on the order alone: an activation is held from its F to its B; with split backwards a share
`released_at_input` goes after I, the rest after W.
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
    """Seconds of each kind of action, by stage. `backward` is the whole one; it is I + W unless measured otherwise."""

    forward: np.ndarray
    input: np.ndarray
    weight: np.ndarray
    backward: np.ndarray

    @classmethod
    def of(
        cls, stages: int, forward: Times = 1.0, input: Times = 1.0, weight: Times = 1.0, backward: Times | None = None
    ) -> Durations:
        """From numbers (the same for every stage) or one value a stage."""
        whole = np.asarray(input, float) + np.asarray(weight, float) if backward is None else backward
        named = {"forward": forward, "input": input, "weight": weight, "backward": whole}
        return cls(**{name: by_stage(value, stages, f"duration '{name}'") for name, value in named.items()})

    @property
    def table(self) -> np.ndarray:
        """(kinds, stages) in the order F, B, I, W."""
        return np.stack([self.forward, self.backward, self.input, self.weight])


@dataclass(frozen=True, eq=False)
class Walked:
    """What a walk found. Arrays over actions follow the program's; arrays over ranks follow the ranks."""

    program: PipelineProgram
    durations: Durations
    start: np.ndarray  # (actions,)
    end: np.ndarray  # (actions,)
    busy: np.ndarray  # (ranks,) seconds of compute
    peak_in_flight: np.ndarray  # (ranks,) most activations held, counted in (stage, micro-batch)
    peak_memory: np.ndarray  # (ranks,) the same weighed by `activation`; by default in micro-batches of a whole rank

    @cached_property
    def makespan(self) -> float:
        return float(self.end.max())

    @property
    def idle(self) -> np.ndarray:
        """(ranks,) seconds without compute between 0 and the makespan."""
        return self.makespan - self.busy

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the makespan, over all ranks."""
        return float(self.idle.sum() / (self.makespan * self.program.ranks)) if self.makespan else 0.0

    @property
    def bubble_overhead(self) -> float:
        """Idle over busy seconds, over all ranks: what the pipeline adds to the work."""
        return float(self.idle.sum() / self.busy.sum()) if self.busy.sum() else 0.0

    @property
    def bubble_fraction_by_rank(self) -> np.ndarray:
        return self.idle / self.makespan if self.makespan else np.zeros_like(self.busy)

    @property
    def bubble_overhead_by_rank(self) -> np.ndarray:
        return np.divide(self.idle, self.busy, out=np.zeros_like(self.busy), where=self.busy > 0)

    @property
    def span(self) -> np.ndarray:
        """(ranks,) seconds from a rank's first start to its last end."""
        return self.end[self.program.first[1:] - 1] - self.start[self.program.first[:-1]]

    @property
    def longest_span(self) -> float:
        """Seconds from step to step where ranks need not wait for each other between steps."""
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
    """Walk a program. `p2p`: one number or one a boundary (stage s to s+1, both ways); `activation`: memory."""
    durations = durations or Durations.of(program.stages)
    needs, order = needs_and_order(program)
    if len(durations.forward) != program.stages:
        raise MeshwrightError("MW-PIPE-020", f"durations are for {len(durations.forward)} stages, not {program.stages}")
    took = durations.table[program.kind, program.stage]
    pairs = np.empty(0, int) if hidden is None else np.flatnonzero(program.joined)
    if hidden is not None and len(pairs):
        needs, order, took = _join(program, needs, took, pairs, hidden)
    received, sent = _transfers(program, by_stage(p2p, program.stages - 1, "p2p"))
    start = _times(program, needs, order, took, received, None if overlap else sent)
    end = start + took
    busy = np.add.reduceat(took, program.first[:-1])
    start[pairs], end[pairs] = start[pairs + 1], end[pairs + 1]
    weights = by_stage(1.0 / program.virtual if activation is None else activation, program.stages, "activation")
    held = held_memory(program, weights, by_stage(released_at_input, program.stages, "released_at_input"))
    counted = _peaks(program, count_in_flight(program))
    return Walked(program, durations, start, end, busy, counted, _peaks(program, held))


def held_memory(program: PipelineProgram, activation: np.ndarray, released_at_input: np.ndarray) -> np.ndarray:
    """(actions,) weighed activations that a rank holds once this action has begun (F) or ended (B, I, W)."""
    if np.ptp(activation) == 0 and not released_at_input.any():
        return count_in_flight(program) * activation[0]  # without the rounding of a running sum
    early = released_at_input * activation
    change = np.stack([activation, -activation, -early, early - activation])[program.kind, program.stage]
    total = np.cumsum(change)
    before = np.concatenate([[0.0], total])[program.first[:-1]]  # rounding left over from the ranks before
    return total - before[program.rank]


def held_changes(walked: Walked, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(times, counts) of activations that a rank holds over time: up when an F starts, down when a B or W ends."""
    own = slice(int(walked.program.first[rank]), int(walked.program.first[rank + 1]))
    step = IN_FLIGHT_STEP[walked.program.kind[own]]
    times = np.where(step > 0, walked.start[own], walked.end[own])[step != 0]
    return times, np.cumsum(step[step != 0])


def by_stage(value: Times, count: int, what: str) -> np.ndarray:
    """One finite number, not negative, for each stage or boundary."""
    array = np.asarray(value, float)
    if array.ndim > 1 or (array.ndim == 1 and len(array) != count):
        raise MeshwrightError(
            "MW-PIPE-020",
            f"{what} has shape {array.shape}",
            why="It is one number, or one for each",
            valid=[f"shape ({count},)"],
        )
    if not np.isfinite(array).all() or (array < 0).any():
        raise MeshwrightError("MW-PIPE-021", f"{what} = {value!r} is not finite and not negative")
    return np.broadcast_to(array, (count,))


def _peaks(program: PipelineProgram, held: np.ndarray) -> np.ndarray:
    return np.maximum.reduceat(held, program.first[:-1])


def _transfers(program: PipelineProgram, p2p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(actions,) seconds to bring an action's input from another rank, and to bring its result to another rank."""
    apart = program.rank_of[1:] != program.rank_of[:-1]
    hop = np.concatenate([[0.0], np.where(apart, p2p, 0.0), [0.0]])  # hop[s]: between stages s−1 and s
    up, down = hop[program.stage], hop[program.stage + 1]
    forward, weights = program.kind == F, program.kind == W
    received = np.where(weights, 0.0, np.where(forward, up, down))
    sent = np.where(weights, 0.0, np.where(forward, down, up))
    return received, sent


def _times(
    program: PipelineProgram,
    needs: np.ndarray,
    order: np.ndarray,
    took: np.ndarray,
    received: np.ndarray,
    sent: np.ndarray | None,
) -> np.ndarray:
    """(actions,) start times. Plain lists: one action is a handful of float operations, far below numpy's call cost."""
    before = np.arange(-1, len(program) - 1)
    before[program.first[:-1]] = -1
    start = [0.0] * len(program)
    end = [0.0] * (len(program) + 1)  # index −1 is "nothing": done at 0
    columns = [order, before[order], needs[order], took[order], received[order]]
    if sent is None:
        for i, p, n, t, lag in zip(*(c.tolist() for c in columns), strict=True):
            free, there = end[p], end[n] + lag
            start[i] = begin = free if free > there else there
            end[i] = begin + t
        return np.array(start)
    sending = np.append(sent, 0.0)[before[order]]
    for i, p, n, t, lag, out in zip(*(c.tolist() for c in [*columns, sending]), strict=True):
        free = end[p]
        made = end[n]
        there = (free if free > made else made) + lag
        free += out
        start[i] = begin = free if free > there else there
        end[i] = begin + t
    return np.array(start)


def _join(
    program: PipelineProgram, needs: np.ndarray, took: np.ndarray, pairs: np.ndarray, hidden: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make each joined F a gate of no length and its B the whole pair, for which whoever needed the F now waits."""
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
        raise MeshwrightError(
            "MW-PIPE-013",
            f"deadlock: {program.schedule} cannot run its joined pairs as one",
            why="They wait for each other in a circle",
            fix="walk without hidden=",
        )
    return needs, order, took
