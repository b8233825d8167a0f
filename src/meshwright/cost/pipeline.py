"""The time of a pipeline with unequal ranks, by the closed forms of `programs.pipelines.formulas`, for a batch of plans.

The formulas are exact for equal stages. Real stages are not equal: the first has the embedding, the last has the head, and the layers
may not divide evenly. The slowest rank sets the pace, and filling and draining pass through all ranks, so

    T = M · t_slowest + ( makespan of M micro-batches on stages of the mean − M · t_mean )

The second term is the ramp: (P−1)·t for 1F1B, (P−1)·t/V interleaved, less for the zero-bubble schedules.
"""

from __future__ import annotations

import numpy as np

from meshwright.lower.batch import Batch
from meshwright.lower.op import Array
from meshwright.programs.pipelines import formulas


def ramp(batch: Batch, f: Array, i: Array, w: Array, p2p: Array, sharing: float = 1.0) -> Array:
    """Idle time beyond M micro-batches of work; f, i, w are one rank's times per micro-batch, averaged over ranks, while all of them
    compute. Where `sharing` ranks share a core, an idle rank gives it to the others: a schedule with cores of its own runs that many times
    faster, and only what it takes beyond M micro-batches at the shared speed is idle."""
    out = np.zeros(batch.n)
    f, i, w, p2p = (batch.full(x) for x in (f, i, w, p2p))
    for schedule, at, p, m, v in batch.schedules:
        f_, i_, w_ = (x[at] / v for x in (f, i, w))
        span = formulas.makespan(schedule, p, m, v, f_ / sharing, i_ / sharing, w_ / sharing, p2p[at])
        out[at] = np.maximum(span - m * v * (f_ + i_ + w_), 0.0)
    return out
