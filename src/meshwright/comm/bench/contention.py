"""What a collective costs between computations, where ranks share cores and caches: seconds added to a loop of fixed operations.

A collective timed in a loop without computation is too fast to predict a training step.
In a step every rank computes between two collectives: its partner
arrives late, a waiting rank must be woken, and returns to a core whose caches hold another rank's data. So each rank runs

    compute, collective, compute, collective, …        against        compute, compute, …

with the same fixed operations (small linear layers, norms, attention, …, forward and backward, one after the other so that each finds the
caches filled by the others). The difference is the cost of a collective. All ranks take part: in groups of two at the same time, then in
one group of all. The clock runs until the last rank has finished: where ranks share cores, one may compute to its end before another
begins, and their mean would be too short without collectives and right with them.

`measure_overlap` overlaps computation with a long all-reduce: how much longer the two take together than the computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import distributed

from meshwright.calibrate.machine import AddedTime
from meshwright.comm.bench.backends import BACKENDS, Adapter, do_nothing, rounded
from meshwright.comm.bench.device import attention_call, linear_call, part_call

SIZES = (1024, 2**20)  # bytes
LOOPS = 5  # their median counts
PASSES = 2  # over the fixed computations, in one loop
OVERLAP_BYTES = 4 * 2**20
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point")

Call = Callable[[], object]


def fixed_computations(passes: int = 1) -> list[Call]:
    """Two computations of some milliseconds for each pass, of small operations through autograd. No operation follows itself, and each pass
    has other weights: after a switch to another process an operation finds cold caches, as in a step."""
    f32, out = torch.float32, list[Call]()
    for _ in range(passes):
        parts = {
            name: part_call(name, f32, 256, 64, chain=1) for name in ("norm", "rotation", "residual", "activation")
        }
        small, wide, narrow = (linear_call(f32, 256, n, k, chain=1) for n, k in ((64, 64), (192, 64), (64, 192)))
        first = [parts["norm"], small, parts["rotation"], wide, parts["residual"]]
        second = [narrow, parts["activation"], attention_call(f32, 2, 4, 64, 16, chain=1)]
        out += [partial(run_all, first), partial(run_all, second)]
    return out


def run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def seconds(computations: list[Call], after_each: Call = do_nothing) -> tuple[float, float]:
    """Seconds of one computation and what follows it: on the clock until the last rank has finished, and in which the threads of a rank
    computed (mean)."""
    calls = len(computations)
    distributed.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    for compute in computations:
        compute()
        after_each()
    wall, used = (
        torch.tensor(x, dtype=torch.float64) for x in (time.perf_counter() - start, time.process_time() - cpu)
    )
    distributed.all_reduce(wall, distributed.ReduceOp.MAX)
    distributed.all_reduce(used)
    return float(wall) / calls, float(used) / distributed.get_world_size() / calls


def measure_collectives(rank: int, world: int, backend: str = "gloo") -> list[AddedTime]:
    """Seconds that each collective adds between computations, on groups of two ranks and on all of them."""
    computations = fixed_computations(PASSES)
    seconds(computations)  # warm-up
    groups = {tuple(range(i, i + 2)) for i in range(0, world - 1, 2)}
    pairs = [BACKENDS[backend](ranks, torch.device("cpu")) for ranks in sorted(groups)]
    adapters = [next((pair for pair in pairs if rank in pair.ranks), pairs[0])]
    if world > 2:
        adapters.append(BACKENDS[backend](tuple(range(world)), torch.device("cpu")))
    found = []
    for adapter in adapters:
        for operation in OPERATIONS:
            if operation == "point-to-point" and len(adapter.ranks) > 2:
                continue
            found += added_times(computations, adapter, operation, rank)
    return found


def added_times(computations: list[Call], adapter: Adapter, operation: str, rank: int) -> list[AddedTime]:
    """What one collective of each size adds to a loop of computations; a transfer between two ranks counts one way."""
    sizes = [rounded(size, len(adapter.ranks)) for size in SIZES]
    calls = [call_of(adapter, operation, size, rank) for size in sizes]
    for call in calls:
        call()
    ways = 2 if operation == "point-to-point" else 1
    loops = [[seconds(computations, call) for call in (do_nothing, *calls)] for _ in range(LOOPS)]
    found = []
    for i, size in enumerate(sizes, start=1):
        wall, cpu = (max(median(loop[i][k] - loop[0][k] for loop in loops), 1e-6) / ways for k in (0, 1))
        found.append(AddedTime(operation=operation, ranks=len(adapter.ranks), bytes=size, wall_s=wall, cpu_s=cpu))
    return found


def call_of(adapter: Adapter, operation: str, size: int, rank: int) -> Call:
    """This rank's part of a collective, or of a round trip between two ranks."""
    if operation != "point-to-point":
        return adapter.collective(operation, "", size)
    if rank not in adapter.ranks:
        return do_nothing  # an odd rank computes without exchanging
    peer = next(r for r in adapter.ranks if r != rank)
    return adapter.round_trip(peer, size, first=rank < peer)


def measure_overlap() -> float:
    """Seconds that a hidden second of communication costs: 0 if computation hides all of it, 1 if nothing is gained."""
    computations = fixed_computations()
    buffer = torch.zeros(OVERLAP_BYTES // 4)
    running: list[Any] = []

    def begin() -> None:
        running.append(distributed.all_reduce(buffer, async_op=True))

    def finish() -> None:
        running.pop().wait()

    def exchange() -> None:
        distributed.all_reduce(buffer)

    loops = [
        (seconds([begin, *computations, finish])[0], seconds([exchange, *computations])[0], seconds(computations)[0])
        for _ in range(LOOPS)
    ]
    n = len(computations)
    overlapped, serial, computing = (
        median(loop[k] for loop in loops) * (n + extra) for k, extra in ((0, 2), (1, 1), (2, 0))
    )
    return min(max((overlapped - computing) / max(serial - computing, 1e-9), 0.0), 1.0)
