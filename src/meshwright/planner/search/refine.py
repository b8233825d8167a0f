"""The gradient bucket that suits a plan, tried last and on the leaders alone.

Gradients are reduced bucket by bucket behind backward. Each bucket of P ranks costs a latency of about P·α, and the last one is never hidden:

    exposed = max( reduce − what backward hides, last bucket ),      reduce = N/bandwidth + (N/bucket) · P·α

Small buckets pay latency, large ones a long tail, and which counts depends on how much backward hides. The search gives every plan a few
times P·α/β (`space.bucket_for`); here the leaders try that size halved and doubled some times and keep what is fastest and fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshwright.cost.step import step_cost
from meshwright.lower.step import step_program
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.pipeline_walk import fullest
from meshwright.planner.search.space import BUCKETS, Space

TIMES = (1.0, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0)
WORTH = 0.001  # share of the step that another size must save


def rebucketed(space: Space, candidates: Sequence[Candidate], limit: float) -> list[Candidate]:
    """Candidates with their best buckets; as they are where a person said the size."""
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
