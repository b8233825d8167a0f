"""Seconds of one call: warm-up, synchronisation, median and quartiles of several samples.

A sample is a number of calls back to back, divided by that number, so that the clock and the synchronisation are negligible. All
ranks start a sample together (`barrier`) and the slowest rank counts (`agree`): a collective is finished when its last rank is.
The number of calls and samples is derived from the first timed call, as agreed by all ranks, so that ranks never disagree about how often to call.

How busy other processes keep this machine: before a run, and during it.

    busy cores of others = busy cores of the machine (/proc/stat) − those of our own processes (getrusage)

The kernel counts the seconds that its cores ran anything in `/proc/stat`. Machines without it (macOS) report the load average instead.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshwright.calibrate.points import Timed

SAMPLE_S = 2e-3  # a sample takes at least this long
# On a device that runs behind its host: the first launch, which nothing hides, becomes negligible
DEVICE_SAMPLE_S = 10e-3
MOST_CALLS = 1000
LEAST_SAMPLES, MOST_SAMPLES = 3, 25
WARM_UP = 2  # calls before the first that is timed


def no_operation() -> None:
    """Do nothing: the barrier of one rank, the synchronisation of a CPU."""


def unchanged(seconds: Sequence[float]) -> Sequence[float]:
    """The agreement of one rank with itself."""
    return seconds


class Synchronization(NamedTuple):
    """Functions by which the ranks of a measurement act together.

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


STAT = Path("/proc/stat")
LOOK_S = 0.5
LOOKS = 4


def busy_seconds(text: str) -> float:
    """Seconds that the cores of the machine have run anything, from the first line of /proc/stat."""
    fields = [float(x) for x in text.splitlines()[0].split()[1:9]]
    user, nice, system, _, _, irq, soft, steal = [*fields, *[0.0] * (8 - len(fields))]
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ClockReading:
    """The clocks at one moment: wall, and busy seconds of all cores (None where the system does not count them)."""

    wall: float
    busy: float | None

    @classmethod
    def read(cls) -> ClockReading:
        try:
            return cls(time.monotonic(), busy_seconds(STAT.read_text("ascii")))
        except (OSError, ValueError, IndexError):
            return cls(time.monotonic(), None)

    def busy_cores_since(self, start: ClockReading, own_seconds: float) -> float:
        """Cores that other processes used since `start`, where ours computed for `own_seconds`."""
        wall = self.wall - start.wall
        if self.busy is None or start.busy is None:
            return max(os.getloadavg()[0] - own_seconds / max(wall, 1e-9), 0.0)
        return max(self.busy - start.busy - own_seconds, 0.0) / max(wall, 1e-9)


def busy_cores(idle: float, seconds: float = LOOK_S, looks: int = LOOKS) -> float:
    """Cores that other processes keep busy. A process that is just ending disturbs no run: while more than `idle` cores are busy this looks
    again, and the least of all looks counts."""
    least = math.inf
    for _ in range(looks):
        least = min(least, look(seconds))
        if least <= idle:
            break
    return least


def look(seconds: float) -> float:
    """Cores that other processes use during these seconds."""
    start, own = ClockReading.read(), time.process_time()
    time.sleep(seconds)
    return ClockReading.read().busy_cores_since(start, time.process_time() - own)
