"""Seconds of one call: warm-up, synchronisation, median and quartiles of several samples.

A sample is a number of calls back to back, divided by that number, so that the clock and the synchronisation are negligible. All
ranks start a sample together (`barrier`) and the slowest rank counts (`agree`): a collective is finished when its last rank is.
The number of calls and samples is derived from the first timed call, as agreed by all ranks, so that ranks never disagree about how often to call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.calibrate.points import Timed

SAMPLE_S = 2e-3  # a sample takes at least this long
DEVICE_SAMPLE_S = (
    10e-3  # on a device that runs behind its host: the first launch, which nothing hides, becomes negligible
)
MOST_CALLS = 1000
LEAST_SAMPLES, MOST_SAMPLES = 3, 25
WARM_UP = 2  # calls before the first that is timed


def no_operation() -> None:
    """Do nothing: the barrier of one rank, the synchronisation of a CPU."""


def unchanged(seconds: Sequence[float]) -> Sequence[float]:
    """The agreement of one rank with itself."""
    return seconds


class Synchronization(NamedTuple):
    """How the ranks of a measurement act together.

    `synchronize` waits until the device has finished; `barrier` waits for the other ranks; `agree` returns the largest value of any
    rank, element by element.
    """

    synchronize: Callable[[], object] = no_operation
    barrier: Callable[[], object] = no_operation
    agree: Callable[[Sequence[float]], Sequence[float]] = unchanged


ONE_RANK = Synchronization()


def measure(
    call: Callable[[], object],
    ranks: Synchronization = ONE_RANK,
    *,
    budget_s: float = 0.25,
    warm_up: int = WARM_UP,
    clock: Callable[[], float] = time.perf_counter,
) -> Timed:
    """Time `call` for about `budget_s` seconds. A call that alone takes longer than the budget is sampled once."""

    def seconds_of(calls: int) -> float:
        ranks.barrier()
        start = clock()
        for _ in range(calls):
            call()
        ranks.synchronize()
        return max((clock() - start) / calls, 1e-9)

    first = ranks.agree([seconds_of(1)])[0]
    if first < budget_s:
        for _ in range(warm_up - 1):
            first = min(first, ranks.agree([seconds_of(1)])[0])
    waits = ranks.synchronize is not no_operation
    calls, samples = counts(first, budget_s, DEVICE_SAMPLE_S if waits else SAMPLE_S)
    return timed(ranks.agree([seconds_of(calls) for _ in range(samples)]), calls)


def counts(first_s: float, budget_s: float, sample_s: float = SAMPLE_S) -> tuple[int, int]:
    """Calls per sample of at least `sample_s` seconds, and samples that fit into the budget, for a call of `first_s` seconds."""
    calls = min(max(math.ceil(sample_s / first_s), 1), MOST_CALLS)
    samples = int(budget_s / (first_s * calls))
    if samples < 1:
        return 1, 1
    return calls, min(max(samples, LEAST_SAMPLES), MOST_SAMPLES)


def timed(samples: Sequence[float], calls: int = 1) -> Timed:
    """Median and quartiles of samples."""
    low, median, high = (float(x) for x in np.quantile(samples, [0.25, 0.5, 0.75]))
    return Timed(median_s=median, low_s=low, high_s=high, samples=len(samples), calls=calls)
