"""Refine the leaders in fields that the search leaves out: gradient buckets, partial recompute and stage lengths (`stage_lengths`).

**Buckets.** Gradients are reduced bucket by bucket behind backward. Each bucket of P ranks costs a latency of about P·α, and the last one is
never hidden:

    exposed = max( reduce − what backward hides, last bucket ),      reduce = N/bandwidth + (N/bucket) · P·α

Small buckets pay latency, large ones a long tail, and which counts depends on how much backward hides. The search gives every plan a few
times P·α/β (`cost.advice.bucket_for`); the leaders try that size halved and doubled some times and keep the fastest that fits.

**Partial recompute.** The search knows recompute of all layers or none. A plan that recomputes every layer often has memory left: then some
layers of each stage keep their activations. Of the leaders that recompute every layer, each tries eighths of a stage and adds the fastest
variant that fits as one more candidate.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshwright.cost.advice import BUCKETS
from meshwright.cost.step import step_cost
from meshwright.cost.walked import stage_times
from meshwright.describe.plan import Plan
from meshwright.lower.step import step_program
from meshwright.planner.search.pipeline_walk import fullest, walked_time
from meshwright.planner.search.space import Space
from meshwright.planner.search.stage_lengths import PART, divided
from meshwright.planner.search.strategies import Candidate

TIMES = (1.0, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0)
WORTH = 0.001  # share of the step that another size must save
EIGHTHS = 8


def refined(space: Space, candidates: Sequence[Candidate], limit: float) -> list[Candidate]:
    """Return candidates with their best bucket size, and variants that recompute fewer layers or have unequal stages."""
    variants = rebucketed(space, [*candidates, *partial_recompute(space, candidates, limit)], limit)
    return [*variants, *divided(space, variants, limit)]


def partial_recompute(space: Space, candidates: Sequence[Candidate], limit: float) -> list[Candidate]:
    """For each candidate that recomputes every layer, the fastest variant that recomputes fewer and fits.

    None where a constraint is about recompute (the user has chosen) or the framework recomputes all layers or none."""
    full = [c for c in candidates if c.plan.recompute == "full"]
    chosen = any(c.field == "recompute" for c in space.choices.constraints)
    if not full or chosen or "recompute_layers" in space.stack.can.without:
        return []
    variants = [(c, plan) for c in full for plan in fewer_layers(c.plan, space.model.layers)]
    if not variants:
        return []
    plans = [plan for _, plan in variants]
    program = step_program(space.model, plans, space.workload, space.stack, stages=True)
    cost = step_cost(program, space.cluster)
    stages, peaks = stage_times(cost), fullest(program)
    best: dict[int, int] = {}
    for at, (c, _) in enumerate(variants):
        if peaks[at] <= limit and cost.time[at] < min(c.closed, cost.time[best.get(id(c), at)] + 1e-12):
            best[id(c)] = at
    out = []
    for at in best.values():
        c, plan = variants[at]
        closed = float(cost.time[at])
        time = walked_time(cost, plan, at, stages) if plan.pp > 1 else closed
        memory, parts = float(peaks[at]), c.complexity + PART
        out.append(replace(c, plan=plan, time=time, closed=closed, memory=memory, complexity=parts))
    return out


def fewer_layers(plan: Plan, layers: int) -> list[Plan]:
    """The plan with one to seven eighths of each stage's layers recomputed."""
    stage = max(plan.stage_layers(layers))
    counts = sorted({-(-stage * k // EIGHTHS) for k in range(1, EIGHTHS)} - {0, stage})
    return [plan.but(recompute_layers=count) for count in counts]


def rebucketed(space: Space, candidates: Sequence[Candidate], limit: float) -> list[Candidate]:
    """Candidates with their best buckets; unchanged where the bucket size was given."""
    if space.bucket or not candidates:
        return list(candidates)
    sizes = [
        sorted({float(np.clip(1e6 * round(c.plan.bucket * t / 1e6), *BUCKETS)) for t in TIMES}) for c in candidates
    ]
    plans = [c.plan.but(bucket=size) for c, some in zip(candidates, sizes, strict=True) for size in some]
    program = step_program(space.model, plans, space.workload, space.stack)
    times, peaks = step_cost(program, space.cluster).time, fullest(program)
    out, at = [], 0
    for c, some in zip(candidates, sizes, strict=True):
        mine, here = times[at : at + len(some)], some.index(c.plan.bucket)
        best = int(np.where(peaks[at : at + len(some)] <= limit, mine, np.inf).argmin())
        saved = float(mine[here] - mine[best])
        if saved > WORTH * c.time:
            c = replace(
                c, plan=plans[at + best], time=c.time - saved, closed=c.closed - saved, memory=float(peaks[at + best])
            )
        out.append(c)
        at += len(some)
    return out
