"""Times of single operations on this rank's device: matrix products, attention, norms, activations, loss, optimizer, copies, launches.

All sizes are fixed, before any model is known: a calibration never runs the step that it will predict.

On a CPU the clock counts the seconds in which this thread computed (`time.thread_time`): other processes on the same cores lengthen a
measurement but do not change its result. All ranks measure at the same moment, so that what they share (caches, memory bandwidth, two
threads of one core) slows them as it will in training. On a GPU the clock is the wall clock around kernels that have finished.

What is timed on a GPU: the rates that it sustains in products, attention, copies, the copies of a ZeRO unit and the fused optimizer, and the
host's time per launch.

Private names of torch: `torch._chunk_cat`, with which `fully_shard` brings gradients to the order of their reduce-scatter.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.calibrate.points import DevicePoint, Timed
from meshwright.comm.bench.operations import Call, MeasuredCase, attention_call, cpu_cases, update_call
from meshwright.comm.bench.timing import LEAST_SAMPLES, MOST_SAMPLES, Synchronization, measure, timed
from meshwright.models.wide_products import scaled_product

GPU_PRODUCTS = ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 8192))
# m, n, k, and whether sums keep fewer bits, as in forward (torch's use_fast_accum)
FP8_PRODUCTS = (
    (8192, 8192, 8192, True),
    (16384, 8192, 2048, True),
    (16384, 2048, 8192, False),
    (8192, 2048, 16384, False),
)
GROUPED_PRODUCTS = ((8, 4096, 8192, 2048), (64, 1024, 1408, 2048))  # experts, rows of each, n, k
GPU_ATTENTIONS = ((32, 16, 1024, 128), (2, 16, 4096, 128), (1, 16, 8192, 64))
GPU_UPDATES = ((16, 2**16), (4, 2**26))
GPU_COPIES = (2**20, 2**26, 2**30)
# Ranks, and the tensors of one unit of `fully_shard`: a layer of 8 billion parameters.
GPU_UNITS = (8, 64)
UNIT_SHAPES = ((4096, 4096),) * 2 + ((1024, 4096),) * 2 + ((14336, 4096),) * 2 + ((4096, 14336),) + ((4096,),) * 2
HOST_COPY = 2**28
CHAIN = 16  # operators in a row, forward and backward, whose time is the host's


def gpu_cases(device: str, dtype: torch.dtype) -> Iterator[MeasuredCase]:
    """What a GPU sustains: products, attention (torch's own kernel, and the vendor's), copies on the device and to the host, the fused optimizer;
    and the host's time per launch."""
    for m, n, k in GPU_PRODUCTS:
        a, b = torch.randn(m, k, dtype=dtype, device=device), torch.randn(n, k, dtype=dtype, device=device)
        out = torch.empty(m, n, dtype=dtype, device=device)
        yield MeasuredCase("gemm", {"m": m, "n": n, "k": k}, 1, partial(torch.mm, a, b.t(), out=out))
    for m, n, k, fast in FP8_PRODUCTS:
        product = fp8_product_call(device, m, n, k, fast)
        if works(product):
            yield MeasuredCase("fp8-gemm", {"m": m, "n": n, "k": k}, 1, product, "fp8")
    for experts, m, n, k in GROUPED_PRODUCTS:
        product = grouped_product_call(device, dtype, experts, m, n, k)
        if works(product):
            yield MeasuredCase("grouped-gemm", {"experts": experts, "m": m, "n": n, "k": k}, 1, product)
    for batch, heads, seq, width in GPU_ATTENTIONS:
        shape = {"batch": batch, "heads": heads, "seq": seq, "width": width}
        attention = attention_call(dtype, batch, heads, seq, width, device)
        yield MeasuredCase("attention", shape, 2, partial(with_kernel, attention, SDPBackend.FLASH_ATTENTION))
        fused = partial(with_kernel, attention, SDPBackend.CUDNN_ATTENTION)
        if works(fused):
            yield MeasuredCase("fused-attention", shape, 2, fused)
    for size in GPU_COPIES:
        source = torch.empty(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        yield MeasuredCase("copy", {"bytes": float(size)}, 1, partial(target.copy_, source))
        del source, target
    for ranks in GPU_UNITS:
        yield from unit_copies(device, dtype, ranks)
    pinned = torch.empty(HOST_COPY, dtype=torch.uint8, pin_memory=True)
    held = torch.empty(HOST_COPY, dtype=torch.uint8, device=device)
    yield MeasuredCase("host-copy", {"bytes": float(HOST_COPY)}, 1, partial(pinned.copy_, held, non_blocking=True))
    for tensors, elements in GPU_UPDATES:
        values = [torch.randn(elements, device=device) for _ in range(tensors)]
        yield MeasuredCase("optimizer", {"tensors": tensors, "elements": elements}, 1, update_call(values, fused=True))
    little = torch.zeros(16, device=device)
    yield MeasuredCase("launch", {}, 1, lambda: little.add_(1.0))
    yield MeasuredCase("operator", {}, 2 * CHAIN, chain_of_operators(little))


def chain_of_operators(little: torch.Tensor) -> Call:
    """Small operators through autograd, forward and backward."""
    x = torch.ones_like(little, requires_grad=True)

    def run() -> None:
        y = x
        for _ in range(CHAIN):
            y = y * little
        y.backward(little)

    return run


def unit_copies(device: str, dtype: torch.dtype, ranks: int) -> Iterator[MeasuredCase]:
    """The copies of `fully_shard` around the collectives of a unit: gathered shards to the parameters, and gradients in the order and the dtype of
    their reduction."""
    whole = [torch.randn(shape, dtype=dtype, device=device) for shape in UNIT_SHAPES]
    elements = sum(x.numel() for x in whole)
    gathered = torch.empty(ranks, elements // ranks, dtype=dtype, device=device)
    sizes, rows = [x.numel() // ranks for x in whole], [x.view(ranks, -1) for x in whole]
    shape = {"ranks": ranks, "elements": elements}
    out = partial(torch.split_with_sizes_copy, gathered, sizes, dim=1, out=rows)
    yield MeasuredCase("unit-copy-out", shape, 1, out)
    sums = torch.empty(ranks, elements // ranks, dtype=torch.float32, device=device)
    yield MeasuredCase("unit-copy-in", shape, 1, partial(torch._chunk_cat, whole, 0, ranks, out=sums))


def fp8_product_call(device: str, m: int, n: int, k: int, fast: bool) -> Call:
    """A product of E4M3 operands with a scale per tensor."""
    a, b = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
    one = torch.ones((), device=device)
    return partial(scaled_product, a, b, one, one, torch.bfloat16, fast)


def grouped_product_call(device: str, dtype: torch.dtype, experts: int, m: int, n: int, k: int) -> Call:
    """The products of several experts, with the same number of rows each, in one kernel."""
    a = torch.randn(experts * m, k, dtype=dtype, device=device)
    b = torch.randn(experts, n, k, dtype=dtype, device=device)
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * m
    return lambda: F.grouped_mm(a, b.transpose(-2, -1), offs=ends)


def with_kernel(call: Call, kernel: SDPBackend) -> None:
    with sdpa_kernel(kernel):
        call()


def works(call: Call) -> bool:
    """Whether this device has a kernel for a call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at length why a kernel does not support the shapes
        try:
            call()
        except (RuntimeError, AttributeError):  # "No available kernel"; a torch without fp8 products
            return False
    return True


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def measure_device(
    device: str,
    ranks: Synchronization,
    dtype: str = "fp32",
    budget_s: float = 4.0,
    rank: int = 0,
    so_far: Callable[[list[DevicePoint]], object] = lambda points: None,
    wall_s: float = math.inf,
    others: Sequence[MeasuredCase] = (),
) -> list[DevicePoint]:
    """Time all operations on this rank, and `others`, while the other ranks time theirs. `so_far` gets what an interrupted bench would keep:
    on a GPU after each operation, on a CPU after each round. A CPU computes for `budget_s`, or less where `wall_s` have passed on the clock."""
    torch.manual_seed(0)
    start, cuda = time.monotonic(), device.startswith("cuda")
    cases = [*(gpu_cases(device, DTYPES[dtype]) if cuda else cpu_cases(DTYPES[dtype])), *others]

    def points(times: list[Timed]) -> list[DevicePoint]:
        return [point_of(case, took, dtype, rank) for case, took in zip(cases, times, strict=False)]

    if not cuda:
        cases = affordable(cases, ranks, budget_s / 4)
        calls = [case.call for case in cases]
        return points(measure_in_turn(calls, ranks, budget_s, lambda t: so_far(points(t)), start + wall_s))
    times: list[Timed] = []
    for case in cases:
        times.append(measure(case.call, ranks, budget_s=budget_s / len(cases)))
        so_far(points(times))
    return points(times)


def point_of(case: MeasuredCase, took: Timed, dtype: str, rank: int) -> DevicePoint:
    seconds = {k: v / case.repeats for k, v in took.as_dict().items() if k.endswith("_s")}
    unit, amount = WORK.get(case.kind, ("launch", lambda sizes: 1.0))
    return DevicePoint(
        **seconds,
        samples=took.samples,
        calls=took.calls,
        kind=case.kind,
        dtype=case.dtype or dtype,
        shape=dict(case.shape),
        work=amount(case.shape),
        unit=unit,
        rank=rank,
    )


def affordable(cases: Sequence[MeasuredCase], ranks: Synchronization, limit_s: float) -> list[MeasuredCase]:
    """Run each case once, as a warm-up, and return those that were run. Cases of one kind go from small to large: after one that takes longer
    than `limit_s` its larger ones are left out. A CPU without instructions for bf16 multiplies it a hundred times more slowly than fp32; all
    sizes would take minutes, and the small ones give its rate as well."""
    out: list[MeasuredCase] = []
    slow: set[str] = set()
    for case in cases:
        if case.kind in slow:
            continue
        start = time.thread_time()
        case.call()
        if ranks.agree([time.thread_time() - start])[0] > limit_s:  # the same decision on all ranks
            slow.add(case.kind)
        out.append(case)
    return out


def measure_in_turn(
    calls: list[Call],
    ranks: Synchronization,
    budget_s: float,
    so_far: Callable[[list[Timed]], object] = lambda times: None,
    deadline: float = math.inf,
) -> list[Timed]:
    """Time calls one after the other, in rounds: each finds the caches filled by the others, as an operation of a step does. A call that
    is repeated alone takes two thirds of that. `so_far` gets the result of all rounds until then, after each. Ranks that share cores, with each
    other or with other processes, compute for a part of the time only: no round starts that would end after `deadline` (`time.monotonic`),
    except the first. Calls of which one round takes longer than the budget are sampled once."""

    def run_round() -> list[float]:
        ranks.barrier()
        out = []
        for call in calls:
            start = time.thread_time()
            call()
            out.append(max(time.thread_time() - start, 1e-9))
        return out

    def result() -> list[Timed]:
        own, names = [timed(column) for column in zip(*samples, strict=True)], ("median_s", "low_s", "high_s")
        agreed = zip(*(ranks.agree([getattr(t, name) for t in own]) for name in names), strict=True)
        return [t.but(**dict(zip(names, values, strict=True))) for t, values in zip(own, agreed, strict=True)]

    samples: list[list[float]] = []
    rounds = MOST_SAMPLES
    while len(samples) < rounds:
        start = time.monotonic()
        samples.append(run_round())
        found = result()
        so_far(found)
        if len(samples) == 1:
            took = ranks.agree([sum(samples[0])])[0]
            rounds = min(max(round(budget_s / took), LEAST_SAMPLES), MOST_SAMPLES) if took < budget_s else 1
        end = time.monotonic()
        if ranks.agree([2 * end - start - deadline])[0] > 0:
            break
    return found


# By kind: what one operation counts (FLOPs, bytes or launches), and its amount from the sizes. Attention is causal, forward and backward:
# 2 and 5 products of half the positions. AdamW in fp32 reads 16 bytes per element and writes 12.
WORK: dict[str, tuple[str, Callable[[Mapping[str, float]], float]]] = {
    "linear": ("FLOP", lambda s: 6.0 * s["m"] * s["n"] * s["k"]),
    "gemm": ("FLOP", lambda s: 2.0 * s["m"] * s["n"] * s["k"]),
    "fp8-gemm": ("FLOP", lambda s: 2.0 * s["m"] * s["n"] * s["k"]),
    "grouped-gemm": ("FLOP", lambda s: 2.0 * s["experts"] * s["m"] * s["n"] * s["k"]),
    "attention": ("FLOP", lambda s: 3.5 * 2.0 * s["batch"] * s["heads"] * s["seq"] ** 2 * s["width"]),
    "fused-attention": ("FLOP", lambda s: 3.5 * 2.0 * s["batch"] * s["heads"] * s["seq"] ** 2 * s["width"]),
    "copy": ("byte", lambda s: 2.0 * s["bytes"]),
    "unit-copy-out": ("byte", lambda s: 4.0 * s["elements"]),  # both in 16 bits; sums of gradients in 32
    "unit-copy-in": ("byte", lambda s: 6.0 * s["elements"]),
    "host-copy": ("byte", lambda s: s["bytes"]),
    "optimizer": ("byte", lambda s: 28.0 * s["tensors"] * s["elements"]),
}
