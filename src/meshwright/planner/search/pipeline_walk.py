"""Simulate rows of a space: their pipelines action by action, everything else as costed.

A schedule repeats itself between its ramps, so a long one is walked at two lengths and continued as a straight line. Lengths leave the same rest
in rounds of pp, so that what is added is whole rounds. Memory is that of the fullest of all ranks; the costing of a batch samples only a few.
"""

from functools import lru_cache

import numpy as np

from meshwright.cost.memory import rank_peaks
from meshwright.cost.phase import RankTime
from meshwright.cost.step import StepCost, step_cost
from meshwright.cost.walked import stage_times, walk_step
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import PlanArrays
from meshwright.lower.pipeline_ranks import pipeline_ranks
from meshwright.lower.program import StepProgram
from meshwright.lower.step import lower
from meshwright.planner.search.space import Space
from meshwright.programs import pipelines

ACTIONS = 2_000  # a longer walk is done at two lengths and continued


def walk(space: Space, rows: PlanArrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return seconds by closed form, simulated seconds and peak bytes of plans: lowered and costed as one batch, simulated one by one."""
    program = lower(space.batch(rows), stages=True)
    cost = step_cost(program, space.cluster)
    stages = stage_times(cost)
    closed = np.broadcast_to(cost.time, len(rows))
    plans = [space.plan(rows, k) for k in range(len(rows))]
    walked = [walked_time(cost, plan, k, stages) if plan.pp > 1 else closed[k] for k, plan in enumerate(plans)]
    return closed, np.array(walked), fullest(program)


def walked_time(cost: StepCost, plan: Plan, at: int, times: list[RankTime]) -> float:
    """Seconds of one plan's step with its pipeline simulated, a long one at two lengths."""
    b = cost.program.batch
    n, m, pp = b.n, int(b.rounds[at]), plan.pp
    enough = max(6 * pp, ACTIONS // (3 * plan.stages) // pp * pp)
    if plan.schedule == "auto":
        return walk_step(cost, plan, at, times).time
    durations = pipelines.Durations.of(
        plan.stages,
        *(np.array([np.broadcast_to(getattr(t, k), n)[at] for t in times[: plan.stages]]) for k in ("f", "i", "w")),
    )

    overlap = not b.stack.blocking_p2p

    def makespan(length: int) -> float:
        program_of_length = flow(plan.schedule, pp, length, plan.virtual)
        return pipelines.walked_makespan(program_of_length, durations, p2p=float(cost.boundary[at]), overlap=overlap)

    if m <= enough + pp:
        total = makespan(m)
    else:
        long = enough + m % pp
        total = makespan(long)
        total += (m - long) * (total - makespan(long - pp)) / pp
    slowest = float(np.broadcast_to(cost.ranks[int(cost.slowest[at])].total, n)[at])
    return total + float(cost.time[at] - np.asarray(cost.exposed["bubble"])[at]) - m * slowest


def fullest(program: StepProgram) -> np.ndarray:
    """Peak bytes of each plan's fullest rank, from all ranks."""
    ranks = program.ranks if program.every_rank else pipeline_ranks(program, every_rank=True)
    return rank_peaks(program, ranks).max(axis=0)


@lru_cache(maxsize=64)
def flow(schedule: str, ranks: int, microbatches: int, virtual: int) -> pipelines.PipelineProgram:
    """A schedule, built and checked once however many plans run it."""
    return pipelines.build(schedule, ranks, microbatches, virtual)
