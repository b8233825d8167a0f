"""The time to build, check, walk and search pipeline programs.

    python benchmarks/programs_pipelines.py

Targets: 64 ranks and 512 micro-batches interleaved under 2 s, 16 ranks and 64 micro-batches under 20 ms (build + check +
walk). Best of several runs in one process; the search is deterministic and runs once.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from meshwright.programs.pipelines import SCHEDULES, Durations, bubble_overhead, build, check, search, walk

SIZES = [(16, 64, 5, 0.020), (64, 512, 3, 2.0)]  # ranks, micro-batches, runs, target in seconds


def best(runs: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def time_schedule(name: str, ranks: int, microbatches: int, virtual: int, runs: int, target: float) -> None:
    def fresh():
        return build(name, ranks, microbatches, virtual)

    building = best(runs, fresh)
    unchecked = [fresh() for _ in range(runs)]  # check caches its result in the program
    checking = best(runs, lambda: check(unchecked.pop()))
    program = check(fresh())
    walking = best(runs, lambda: walk(program))
    total = building + checking + walking
    print(
        f"{name:<15} {ranks:>3} × {virtual} stages {microbatches:>4} micro-batches {len(program):>8,} actions   "
        f"build {building * 1e3:7.1f}  check {checking * 1e3:7.1f}  walk {walking * 1e3:7.1f}  "
        f"all {total * 1e3:7.1f} ms   {'within' if total <= target else 'OVER'} {target * 1e3:,.0f} ms"
    )


def searching(ranks: int, microbatches: int, virtual: int, limit: float) -> None:
    times = np.random.default_rng(0).uniform(0.8, 1.4, (3, ranks * virtual))
    durations = Durations.of(ranks * virtual, *times)
    began = time.perf_counter()
    found = search(ranks, microbatches, virtual, durations=durations, limit=limit)
    took = time.perf_counter() - began
    handmade = min(value for value in found.handmade.values() if value is not None)
    print(
        f"auto            {ranks:>3} × {virtual} stages {microbatches:>4} micro-batches, uneven, limit {limit:g}: "
        f"{took:5.2f} s, {100 * (found.walked.makespan / found.bound - 1):.2f}% above the bound, best handmade "
        f"{100 * (handmade / found.bound - 1):.2f}% ({found.origin})"
    )


def main() -> None:
    for ranks, microbatches, runs, target in SIZES:
        for name in SCHEDULES.having("paths"):
            for virtual in (2, 4) if SCHEDULES[name].most_virtual > 2 else (SCHEDULES[name].virtual,):
                time_schedule(name, ranks, microbatches, virtual, runs, target)
    for case in ((8, 32, 1, 8.0), (16, 64, 1, 16.0), (8, 32, 2, 8.0), (16, 64, 2, 16.0), (64, 512, 1, 64.0)):
        searching(*case)
    stages, counts = (np.random.default_rng(0).integers(1, 64, 1_000_000) for _ in range(2))
    for name in ("1f1b", "zb-h1", "zbv"):
        took = best(3, partial(bubble_overhead, name, stages, counts, SCHEDULES[name].virtual))
        print(f"closed form of {name:<8} over 1,000,000 plans: {took * 1e3:6.1f} ms")


if __name__ == "__main__":
    main()
