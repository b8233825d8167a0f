"""How much slower a device computes while something else runs: the other ranks, or a collective.

One matrix product is timed on rank 0 while the other ranks wait, then on all ranks at once, then on all ranks during an all-reduce in the
background. The quotients say how much ranks that share cores (or memory bandwidth) slow each other down, and what communication takes from
compute: gloo copies and adds on the cores that compute, NCCL occupies some multiprocessors of a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import distributed

from meshwright.calibrate.points import DevicePoint, Timed
from meshwright.comm.bench.session import Session
from meshwright.comm.bench.timing import ONE_RANK, counts, measure, timed
from meshwright.units import format_bytes

CPU_WIDTH, GPU_WIDTH = 256, 4096
SMALLEST, LARGEST = 2**16, 2**24  # bytes of the all-reduce: as many as the time allows
MOST_PRODUCTS = 1000


def measure_slowdown(here: Session, budget_s: float) -> list[DevicePoint]:
    """A product alone, on all ranks at once, and during an all-reduce; every rank calls this, and rank 0's result is used."""
    cuda = here.device.type == "cuda"
    width, dtype, name = (GPU_WIDTH, torch.bfloat16, "bf16") if cuda else (CPU_WIDTH, torch.float32, "fp32")
    # random numbers: a GPU multiplies zeros at less power, and so at a higher clock
    a, b, out = (torch.randn(width, width, dtype=dtype, device=here.device) for _ in range(3))

    def product() -> None:
        torch.mm(a, b, out=out)

    def point(seconds: Timed, condition: str = "", slowdown: float = 1.0) -> DevicePoint:
        shape = {"m": width, "n": width, "k": width}
        fields = {"dtype": name, "shape": shape, "work": 2.0 * width**3, "condition": condition, "slowdown": slowdown}
        return DevicePoint(kind="gemm", **fields, **seconds.model_dump())

    synchronize = here.synchronization.synchronize
    here.barrier()
    own = ONE_RANK._replace(synchronize=synchronize)
    alone = measure(product, own, budget_s=budget_s / 3) if here.rank == 0 else None
    here.barrier()
    together = measure(product, here.synchronization, budget_s=budget_s / 3)
    first = alone.median_s if alone else together.median_s
    found = [point(alone or together)]
    if here.world > 1:
        found.append(point(together, f"all {here.world} ranks compute", together.median_s / first))
        size, during = time_during_all_reduce(here, product, together.median_s, budget_s / 3)
        condition = f"all ranks compute during an all-reduce of {format_bytes(size)}"
        found.append(point(during, condition, during.median_s / first))
    return found


def time_during_all_reduce(
    here: Session, product: Callable[[], None], product_s: float, budget_s: float
) -> tuple[int, Timed]:
    """The bytes of an all-reduce, and the seconds of a product while it is under way: as many products as fit into it, all of them started
    after it. Over a slow network the all-reduce is smaller: an eighth of the time has to be enough for one."""
    group, ranks = distributed.group.WORLD, here.synchronization
    small = torch.zeros(SMALLEST // 4, device=here.device)
    unit = measure(lambda: distributed.all_reduce(small, group=group), ranks, budget_s=budget_s / 8).median_s
    size = SMALLEST
    while size < LARGEST and 2 * unit * size / SMALLEST < budget_s / 8:
        size *= 2
    buffer = torch.zeros(size // 4, device=here.device)
    whole = measure(lambda: distributed.all_reduce(buffer, group=group), ranks, budget_s=budget_s / 3).median_s
    products = min(max(int(whole / product_s), 1), MOST_PRODUCTS)
    _, samples = counts(max(whole, products * product_s), budget_s)
    found = []
    for _ in range(samples):
        ranks.barrier()
        work = distributed.all_reduce(buffer, group=group, async_op=True)
        start = time.perf_counter()
        for _ in range(products):
            product()
        ranks.synchronize()
        found.append((time.perf_counter() - start) / products)
        work.wait()
    return size, timed(list(ranks.agree(found)), products)
