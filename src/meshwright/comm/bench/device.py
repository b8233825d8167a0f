"""Times of single operations on this rank's device: matrix products, attention, norms, activations, loss, optimizer, copies, launches.

All sizes are fixed (`host_cases`, `gpu_cases`), before any model is known: a calibration never runs the step that it will predict.

On a CPU the clock counts the seconds in which this thread computed (`time.thread_time`): other processes on the same cores lengthen a
measurement but do not change its result. All ranks measure at the same moment, so that what they share (caches, memory bandwidth, two
threads of one core) slows them as it will in training. On a GPU the clock is the wall clock around kernels that have finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from meshwright.calibrate.points import DevicePoint, Timed
from meshwright.comm.bench.gpu_cases import gpu_cases
from meshwright.comm.bench.host_cases import cpu_cases
from meshwright.comm.bench.operations import Call, Case
from meshwright.comm.bench.timing import LEAST_SAMPLES, MOST_SAMPLES, Synchronization, measure, timed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def measure_device(
    device: str,
    ranks: Synchronization,
    dtype: str = "fp32",
    budget_s: float = 4.0,
    rank: int = 0,
    so_far: Callable[[list[DevicePoint]], object] = lambda points: None,
) -> list[DevicePoint]:
    """Time all operations on this rank, while the other ranks time theirs. `so_far` gets what an interrupted bench would keep: on a GPU after
    each operation, on a CPU after each round."""
    torch.manual_seed(0)
    cuda = device.startswith("cuda")
    cases = list(gpu_cases(device, DTYPES[dtype]) if cuda else cpu_cases(DTYPES[dtype]))

    def points(times: list[Timed]) -> list[DevicePoint]:
        return [point_of(case, took, dtype, rank) for case, took in zip(cases, times, strict=False)]

    if not cuda:
        return points(measure_in_turn([case.call for case in cases], ranks, budget_s, lambda t: so_far(points(t))))
    times: list[Timed] = []
    for case in cases:
        times.append(measure(case.call, ranks, budget_s=budget_s / len(cases)))
        so_far(points(times))
    return points(times)


def point_of(case: Case, took: Timed, dtype: str, rank: int) -> DevicePoint:
    seconds = {k: v / case.repeats for k, v in took.as_dict().items() if k.endswith("_s")}
    work, unit = amount_of_work(case)
    return DevicePoint(
        **seconds,
        samples=took.samples,
        calls=took.calls,
        kind=case.kind,
        dtype=case.dtype or dtype,
        shape=dict(case.shape),
        work=work,
        unit=unit,
        rank=rank,
    )


def measure_in_turn(
    calls: list[Call],
    ranks: Synchronization,
    budget_s: float,
    so_far: Callable[[list[Timed]], object] = lambda times: None,
) -> list[Timed]:
    """Time calls one after the other, in rounds: each finds the caches filled by the others, as an operation of a step does. A call that
    is repeated alone takes two thirds of that. `so_far` gets the result of all rounds until then, after each."""

    def run_round() -> list[float]:
        ranks.barrier()
        out = []
        for call in calls:
            start = time.thread_time()
            call()
            out.append(max(time.thread_time() - start, 1e-9))
        return out

    def result() -> list[Timed]:
        medians = [median(column) for column in zip(*samples, strict=True)]
        return [timed([value]).but(samples=len(samples)) for value in ranks.agree(medians)]

    run_round()
    rounds = min(max(round(budget_s / ranks.agree([sum(run_round())])[0]), LEAST_SAMPLES), MOST_SAMPLES)
    samples: list[list[float]] = []
    for _ in range(rounds):
        samples.append(run_round())
        found = result()
        so_far(found)
    return found


def amount_of_work(case: Case) -> tuple[float, str]:
    """FLOPs, bytes or launches of one operation, for its rate."""
    s = case.shape
    if case.kind == "linear":
        return 6.0 * s["m"] * s["n"] * s["k"], "FLOP"
    if case.kind in ("gemm", "fp8-gemm"):
        return 2.0 * s["m"] * s["n"] * s["k"], "FLOP"
    if case.kind == "grouped-gemm":
        return 2.0 * s["experts"] * s["m"] * s["n"] * s["k"], "FLOP"
    if case.kind in (
        "attention",
        "fused-attention",
    ):  # causal, forward and backward: 2 and 5 products of half the positions
        return 3.5 * 2.0 * s["batch"] * s["heads"] * s["seq"] ** 2 * s["width"], "FLOP"
    if case.kind == "copy":
        return 2.0 * s["bytes"], "byte"
    if case.kind == "host-copy":
        return s["bytes"], "byte"
    if case.kind == "optimizer":
        return 28.0 * s["tensors"] * s["elements"], "byte"  # AdamW in fp32: reads 16 bytes per element, writes 12
    return 1.0, "launch"
