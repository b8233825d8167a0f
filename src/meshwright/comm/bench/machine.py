"""One rank of the calibration of this machine: `training.calibration` starts as many as the training will have."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import distributed

from meshwright.comm.bench.contention import measure_collectives, measure_overlap
from meshwright.comm.bench.device import DTYPES, measure_device
from meshwright.comm.bench.interference import Moment
from meshwright.comm.bench.timing import Synchronization

BUDGET_S = 2.0  # seconds that a rank computes for the device part


class Context(Protocol):
    """What the local launcher gives a rank (`training.rank.RankContext`)."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def send(self) -> Callable[[Any], None]: ...


def calibrate_rank(context: Context, dtype: str, reduced_dtype: str) -> dict[str, Any]:
    """What this rank measured, as plain data; the parent reads rank 0's. Operations are timed in `dtype`, all-reduce and reduce-scatter
    in `reduced_dtype`."""

    def mean(values: Sequence[float]) -> list[float]:
        total = torch.tensor(list(values), dtype=torch.float64)
        distributed.all_reduce(total)
        return [float(x) for x in total / context.world]

    def report(text: str) -> None:
        if context.rank == 0:
            context.send(text)

    start, own = Moment.read(), time.process_time()
    report("timing operations")
    ranks = Synchronization(barrier=distributed.barrier, agree=mean)
    points = measure_device(context.device, ranks, dtype, BUDGET_S, context.rank)
    collectives, function, overlap = [], 0.0, 0.0
    if context.world > 1:
        report("timing collectives")
        added, function = measure_collectives(context.rank, context.world, DTYPES[reduced_dtype])
        collectives = [x.as_dict() for x in added]
        overlap = measure_overlap(
            DTYPES[reduced_dtype]
        )  # meaningless where ranks outnumber cores: `calibrate.machine` then assumes 1
    return {
        "operations": [p.as_dict() for p in points],
        "collectives": collectives,
        "function_s": function,
        "overlap_cost": mean([overlap])[0],
        "busy_cores": Moment.read().busy_cores_since(start, context.world * mean([time.process_time() - own])[0]),
        "seconds": time.monotonic() - start.wall,
    }
