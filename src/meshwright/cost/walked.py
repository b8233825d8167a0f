"""The walked step: a simulation of the pipeline program with the times of each stage, instead of the closed form.

The closed form of `cost.step.ramp` assumes equal stages while the pipeline fills and drains. Here each stage has separate forward, input-gradient
and weight-gradient times. The schedule is built and walked action by action; then the parts that run once per step are added. `simulate`
draws the result, and the planner ranks its leaders by it.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.cost.phase import RankTime, rank_time
from meshwright.cost.step import StepCost
from meshwright.describe.plan import Plan
from meshwright.programs import pipelines

ONCE_PER_STEP = ("dp", "optimizer", "overhead")


@dataclass(frozen=True)
class WalkedStep:
    """The step of one plan: the walk of its pipeline, the times of its stages, and the closing parts."""

    walk: pipelines.Walked
    stages: list[RankTime]
    closing: dict[str, float]

    @property
    def time(self) -> float:
        return self.walk.makespan + sum(self.closing.values())


def stage_times(cost: StepCost) -> list[RankTime]:
    """Forward, input-gradient and weight-gradient seconds of every stage; arrays over the plans, 0 if a plan has fewer stages."""
    no_message = np.zeros(cost.program.batch.n)
    return [rank_time(cost.program, cost.times, stage, no_message) for stage in cost.program.stages]


def walk_step(cost: StepCost, plan: Plan, at: int = 0, times: list[RankTime] | None = None) -> WalkedStep:
    """Build the schedule of the plan at index `at` of the batch, and walk it with the times of each stage."""
    b = cost.program.batch
    times = stage_times(cost) if times is None else times
    stages = [RankTime(*(b.full(x)[at : at + 1] for x in (t.f, t.i, t.w, t.waits))) for t in times[: plan.stages]]
    durations = pipelines.Durations.of(
        len(stages), *(np.array([float(getattr(s, k)[0]) for s in stages]) for k in ("f", "i", "w"))
    )
    microbatches = int(b.rounds[at])
    p2p, overlap = float(cost.boundary[at]), not b.stack.blocking_p2p
    if plan.schedule == "auto" and plan.pp > 1:
        limit = 2.0 * plan.pp  # micro-batches in flight, as `cost.memory` counts them for `auto`
        flow = pipelines.auto(
            plan.pp, microbatches, plan.virtual, durations=durations, p2p=p2p, overlap=overlap, limit=limit
        )
    else:
        flow = pipelines.build(
            plan.schedule if plan.pp > 1 else "1f1b", plan.pp, microbatches, virtual=plan.virtual if plan.pp > 1 else 1
        )
    walked = pipelines.walk(flow, durations, p2p=p2p, overlap=overlap)
    if cost.sharing > 1 and plan.pp > 1:
        speed = _mean_speed(walked, flow, durations, cost.sharing, p2p, overlap)
        walked = pipelines.walk(flow, durations.scaled(1 / speed), p2p=p2p / speed, overlap=overlap)
    closing = {name: float(b.full(cost.exposed.get(name, 0.0))[at]) for name in ONCE_PER_STEP}
    closing["dp"] -= _exposed_gathers(cost, b.n, at) * microbatches
    closing["sums"] = float(b.full(cost.after)[at])
    return WalkedStep(walked, stages, closing)


def _mean_speed(
    walked: pipelines.Walked,
    flow: pipelines.PipelineProgram,
    durations: pipelines.Durations,
    sharing: float,
    p2p: float,
    overlap: bool,
) -> float:
    """Mean speed of the actions, 1 while all ranks are at work. Idle ranks give their cores to the others, so the schedule takes what
    all ranks need together, or what it takes with a core for each rank: the longer of the two."""
    alone = pipelines.walk(flow, durations.scaled(1 / sharing), p2p=p2p, overlap=overlap).makespan
    return walked.makespan / max(alone, float(walked.busy.mean()))


def _exposed_gathers(cost: StepCost, n: int, at: int) -> float:
    """Exposed seconds of ZeRO-3's weight gathers in one micro-batch of the slowest rank. The stage times already include them."""
    rank = cost.program.ranks[int(cost.slowest[at])]
    return sum(
        float(np.broadcast_to(t.parts.get("dp", 0.0) * rank.times(*key), n)[at]) for key, t in cost.times.items()
    )
