"""The critical batch: the smallest batch at which data-parallel communication, without the part that can never overlap, is hidden.

A larger micro-batch makes the backward longer and the gradients no larger, so communication that did not fit behind it comes to fit. The
batch is varied by the micro-batch, with as few micro-batches as the pipeline needs (P of them, one without a pipeline), and the cost model says
for each whether anything is left over: gradients reduced behind the last backward, parameters gathered behind the next forward, the
weights of a layer (ZeRO-3) behind the layer before. What can never overlap does not count: the last bucket, the weights of the first block,
compression, averages of parameters.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from meshwright.cost.step import step_cost
from meshwright.describe.cluster import Cluster
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program

LARGEST = 2**16  # sequences of a micro-batch; what is not hidden by then never will be


class CriticalBatch(NamedTuple):
    """Whole sequences, or None where no batch changes anything; and the sentence that says it."""

    sequences: int | None
    reason: str


def critical_batch(model: Model, cluster: Cluster, plan: Plan, workload: Workload, stack: Stack) -> CriticalBatch:
    """The critical batch of a plan on a cluster, in whole sequences (samples, of a model without a sequence)."""
    unit = "sequences" if model.kind == "transformer" else "samples"
    if plan.dp * plan.cp == 1:
        return CriticalBatch(None, "none: no data-parallel communication")
    overlaps = stack.overlap if plan.overlap is None else plan.overlap
    if "dp" not in overlaps:
        return CriticalBatch(None, "none: data-parallel communication does not overlap under this stack")
    rounds = plan.pp if plan.pp > 1 else 1

    def batch(microbatch: int) -> int:
        return microbatch * plan.dp * rounds

    def hidden(microbatch: int) -> bool:
        tried = plan.but(microbatch=microbatch, recompute_layers=plan.recompute_layers)
        work = workload.but(batch=batch(microbatch))
        cost = step_cost(step_program(model, tried, work, stack), cluster, every_rank=True)
        return float(np.broadcast_to(cost.unhidden, 1)[0]) <= 1e-9 * float(cost.time[0])

    if hidden(1):
        return CriticalBatch(batch(1), f"already hidden at the smallest batch, {batch(1):,} {unit}")
    high = 2
    while high < LARGEST and not hidden(high):
        high *= 2
    if high >= LARGEST:
        return CriticalBatch(None, "none: no batch hides data-parallel communication")
    found = bisect_left(range(high), True, lo=high // 2, key=hidden)
    return CriticalBatch(
        batch(found), f"{batch(found):,} {unit}: below it part of the data-parallel communication is not hidden"
    )
