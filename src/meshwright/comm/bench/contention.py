"""What a collective costs in a layer, where ranks share cores and caches: seconds added to a layer of fixed sizes.

A collective timed in a loop without computation is too fast to predict a training step. In a step every rank computes about a millisecond
between two collectives: its partner arrives late, a waiting rank must be woken, and returns to a core whose caches hold another rank's
data. So each rank runs the same layer, forward and backward (`layers`),

    without anything between its operations          seconds₀
    with an autograd function that does nothing      seconds₁     seconds₁ − seconds₀ : what the function costs
    with a collective in that function               seconds₂     seconds₂ − seconds₁ : what the collective costs

All ranks take part: in groups of two at the same time, then in one group of all. The clock runs until the last rank has finished: where
ranks share cores, one may compute to its end before another begins, and their mean would be too short without collectives and right with
them.

A library adds numbers of one dtype faster than those of another, so all-reduce and reduce-scatter run in the dtype that the training reduces.
The other collectives only move bytes. The layer computes in fp32 in any case: it takes the time between two collectives, and no more of it
where a CPU multiplies bf16 slowly.

`measure_overlap` overlaps computation with a long all-reduce: how much longer the two take together than the computation.

One rank of the calibration of this machine: `training.calibration` starts as many as the training will have.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from meshwright.calibrate.machine import SIZES, AddedTime
from meshwright.comm.bench.backends import DTYPE, BenchContext, Torch, do_nothing, rounded
from meshwright.comm.bench.device import DTYPES, measure_device
from meshwright.comm.bench.operations import CALLS_PER_LAYER, layers_call, unchanged
from meshwright.comm.bench.timing import ClockReading, Synchronization
from meshwright.units import Json

TOKENS, WIDTH, SEQUENCES = 128, 96, 2  # of a layer: about a millisecond of a slow core between two collectives
PASSES = 2  # of the layer, in one loop
LOOPS = 3  # their median counts
REPEATS = 3  # in each loop, of the layer without collectives: a function takes 1% of it
SHORTEST_S = 1e-6  # what a collective adds at least
OVERLAP_BYTES = 4 * 2**20
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point")
REDUCTIONS = ("all-reduce", "reduce-scatter")

Call = Callable[[], object]


class _Between(torch.autograd.Function):
    """A call in the forward or in the backward of a tensor, with the copies that the strategies make around their collectives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Call, in_backward: bool) -> torch.Tensor:
        ctx.call = call if in_backward else None
        if in_backward:
            return x.view_as(x)
        call()
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.call is None:
            return gradient, None, None
        gradient = gradient.clone()
        ctx.call()
        return gradient, None, None


Layers = Callable[[Call | None], Call]


def fixed_layers() -> Layers:
    """A layer, forward and backward, with a call in autograd functions between its parts, or without functions."""
    run = layers_call(DTYPE, TOKENS, WIDTH, SEQUENCES)

    def layers(call: Call | None) -> Call:
        def between(x: torch.Tensor, in_backward: bool) -> torch.Tensor:
            return _Between.apply(x, call, in_backward)

        return partial(run, unchanged if call is None else between)

    return layers


def seconds(calls: Sequence[Call]) -> tuple[float, float]:
    """Seconds of some calls: on the clock until the last rank has finished, and in which the threads of a rank computed (mean)."""
    distributed.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    for call in calls:
        call()
    times = time.perf_counter() - start, time.process_time() - cpu
    wall, used = (torch.tensor(x, dtype=torch.float64) for x in times)
    distributed.all_reduce(wall, distributed.ReduceOp.MAX)
    distributed.all_reduce(used)
    return float(wall), float(used) / distributed.get_world_size()


def measure_collectives(rank: int, world: int, reduced: torch.dtype) -> tuple[list[AddedTime], float]:
    """Seconds that each collective adds in a layer, on groups of two ranks and on all of them; and those of an autograd function. The groups
    have the backend of the default group; `reduced` is the dtype that reductions add up."""
    layers, backend, cpu = fixed_layers(), distributed.get_backend(), torch.device("cpu")
    seconds([layers(None)] * PASSES)  # warm-up
    groups = {tuple(range(i, i + 2)) for i in range(0, world - 1, 2)}
    pairs = [Torch(backend, ranks, cpu) for ranks in sorted(groups)]
    adapters = [next((pair for pair in pairs if rank in pair.ranks), pairs[0])]
    if world > 2:
        adapters.append(Torch(backend, tuple(range(world)), cpu))
    found, functions = [], []
    for adapter in adapters:
        times, function = added_times(layers, adapter, rank, reduced)
        found += times
        functions.append(function)
    return found, min(functions)


def added_times(layers: Layers, adapter: Torch, rank: int, reduced: torch.dtype) -> tuple[list[AddedTime], float]:
    """Return what one collective of each kind and size adds in a layer, and what the function around it takes. A transfer between two ranks
    counts one way."""
    ranks, count = len(adapter.ranks), CALLS_PER_LAYER * PASSES
    operations = [x for x in OPERATIONS if ranks == 2 or x != "point-to-point"]
    element = max(reduced.itemsize, DTYPE.itemsize)
    cases = [(operation, rounded(size, ranks, element)) for operation in operations for size in SIZES]
    calls = [call_of(adapter, operation, size, rank, reduced) for operation, size in cases]
    for call in calls:
        call()
    runs = [layers(None), layers(do_nothing)] * REPEATS + [layers(call) for call in calls]
    loops = [[seconds([run] * PASSES) for run in runs] for _ in range(LOOPS)]
    times_of = list(zip(*loops, strict=True))  # by run
    plain, function = ([x for times in times_of[k : 2 * REPEATS : 2] for x in times] for k in (0, 1))
    found = []
    for (operation, size), times in zip(cases, times_of[2 * REPEATS :], strict=True):
        ways = count * (2 if operation == "point-to-point" else 1)
        wall, cpu = (max(middle(times, k) - middle(function, k), 0.0) / ways + SHORTEST_S for k in (0, 1))
        found.append(AddedTime(operation=operation, ranks=ranks, bytes=size, wall_s=wall, cpu_s=cpu))
    return found, max(middle(function, 1) - middle(plain, 1), 0.0) / count


def middle(times: Sequence[tuple[float, float]], k: int) -> float:
    return median(x[k] for x in times)


def call_of(adapter: Torch, operation: str, size: int, rank: int, reduced: torch.dtype) -> Call:
    """This rank's part of a collective, or of a round trip between two ranks."""
    if operation != "point-to-point":
        return adapter.collective(operation, "", size, reduced if operation in REDUCTIONS else DTYPE)
    if rank not in adapter.ranks:
        return do_nothing  # an odd rank computes without exchanging
    peer = next(r for r in adapter.ranks if r != rank)
    return adapter.round_trip(peer, size, first=rank < peer)


def measure_overlap(reduced: torch.dtype) -> float:
    """Seconds that a hidden second of communication costs: 0 if computation hides all of it, 1 if nothing is gained."""
    layers = fixed_layers()(None)
    buffer = torch.zeros(OVERLAP_BYTES // reduced.itemsize, dtype=reduced)
    running: list[Any] = []

    def begin() -> None:
        running.append(distributed.all_reduce(buffer, async_op=True))

    runs: list[list[Call]] = [
        [begin, layers, lambda: running.pop().wait()], [lambda: distributed.all_reduce(buffer), layers], [layers]
    ]  # fmt: skip
    loops = [[seconds(run)[0] for run in runs] for _ in range(LOOPS)]
    overlapped, serial, computing = (median(loop[k] for loop in loops) for k in range(3))
    return min(max((overlapped - computing) / max(serial - computing, 1e-9), 0.0), 1.0)


BUDGET_S = 2.0  # seconds that a rank computes for the device part


def calibrate_rank(context: BenchContext, dtype: str, reduced_dtype: str) -> Json:
    """Return what this rank measured, as plain data; the parent reads rank 0's. Operations are timed in `dtype`, all-reduce and reduce-scatter
    in `reduced_dtype`."""

    def mean(values: Sequence[float]) -> list[float]:
        total = torch.tensor(list(values), dtype=torch.float64)
        distributed.all_reduce(total)
        return [float(x) for x in total / context.world]

    def report(text: str) -> None:
        if context.rank == 0:
            context.send(text)

    start, own = ClockReading.read(), time.process_time()
    report("timing operations")
    ranks = Synchronization(barrier=distributed.barrier, agree=mean)
    points = measure_device(context.device, ranks, dtype, BUDGET_S, context.rank)
    collectives, function, overlap = [], 0.0, 0.0
    if context.world > 1:
        report("timing collectives")
        added, function = measure_collectives(context.rank, context.world, DTYPES[reduced_dtype])
        collectives = [x.as_dict() for x in added]
        # Meaningless where ranks outnumber cores: `calibrate.machine` then assumes 1.
        overlap = measure_overlap(DTYPES[reduced_dtype])
    return {
        "operations": [p.as_dict() for p in points],
        "collectives": collectives,
        "function_s": function,
        "overlap_cost": mean([overlap])[0],
        "busy_cores": ClockReading.read().busy_cores_since(start, context.world * mean([time.process_time() - own])[0]),
        "seconds": time.monotonic() - start.wall,
    }
