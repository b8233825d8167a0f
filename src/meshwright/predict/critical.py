"""The critical batch: the smallest batch at which data-parallel communication is hidden, except the part that can never overlap.

A larger micro-batch makes backward longer but not the gradients larger, so more communication is hidden. The search varies the micro-batch and
keeps the number of micro-batches at the minimum (P with a pipeline, 1 without). For each size, the cost model gives the communication that could
overlap but finds too little compute: gradients reduced behind the last backward, parameters gathered behind the next forward, and the weights of
a layer (ZeRO-3) gathered behind the previous layer. Communication that can never overlap does not count: the last bucket, the weights of the first
block, compression, averages of parameters.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from meshwright.cost.step import step_cost
from meshwright.describe.config import Config
from meshwright.lower.step import step_program

LARGEST = 2**16  # sequences of a micro-batch; the search stops here


class CriticalBatch(NamedTuple):
    """The critical batch in sequences (None if no batch hides the communication), with the reason as text."""

    sequences: int | None
    reason: str


def critical_batch(config: Config) -> CriticalBatch:
    """The critical batch of a plan on a cluster, in sequences (in samples for a model without sequences)."""
    model, cluster, plan, stack = config.model, config.cluster, config.plan, config.stack
    unit = "sequences" if model.kind == "transformer" else "samples"
    if plan.dp * plan.cp == 1:
        return CriticalBatch(None, "none: no data-parallel communication")
    overlaps = plan.overlapped(stack, cluster.node_size)
    if "dp" not in overlaps:
        return CriticalBatch(None, "none: data-parallel communication does not overlap under this stack")
    rounds = plan.pp if plan.pp > 1 else 1

    def batch(microbatch: int) -> int:
        return microbatch * plan.dp * rounds

    def hidden(microbatch: int) -> bool:
        trial = plan.but(microbatch=microbatch, recompute_layers=plan.recompute_layers)
        work = config.workload.but(batch=batch(microbatch))
        cost = step_cost(step_program(model, trial, work, stack, every_rank=True), cluster)
        return float(np.broadcast_to(cost.unhidden, 1)[0]) <= 1e-9 * float(cost.time[0])

    if hidden(1):
        return CriticalBatch(batch(1), f"already hidden at the smallest batch, {batch(1):,} {unit}")
    high = 2
    while high < LARGEST and not hidden(high):
        high *= 2
    if high >= LARGEST:
        return CriticalBatch(None, "none: no batch hides data-parallel communication")
    least = batch(bisect_left(range(high), True, lo=high // 2, key=hidden))
    return CriticalBatch(
        least, f"{least:,} {unit}: for smaller batches, part of the data-parallel communication is exposed"
    )
