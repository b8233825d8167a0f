"""Times of single operations on this rank's device: matrix products, attention, norms, activations, loss, optimizer, copies, launches.

All sizes are fixed here, before any model is known: a calibration never runs the step that it will predict. On a CPU each operation runs
forward and backward through autograd, small and large, because a small training spends most of its time in the host's work per operation.
Operations stand in a chain, so that the cost of starting a backward is shared by several of them.

On a CPU the clock counts the seconds in which this thread computed (`time.thread_time`): other processes on the same cores lengthen a
measurement but do not change its result. All ranks measure at the same moment, so that what they share (caches, memory bandwidth, two
threads of one core) slows them as it will in training. On a GPU the clock is the wall clock around kernels that have finished.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.calibrate.points import DevicePoint, Timed
from meshwright.comm.bench.layers import layers_call, unchanged
from meshwright.comm.bench.timing import LEAST_SAMPLES, MOST_SAMPLES, Synchronization, measure, timed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
CHAIN = 4  # operations of one kind in a row
UNIT_PARAMETERS = 9  # of a ZeRO unit: as many as a transformer layer with gated FFN and without biases
SMALL, MIDDLE, LARGE = {"tokens": 4, "width": 16}, {"tokens": 128, "width": 64}, {"tokens": 512, "width": 256}
PARTS = ("norm", "activation", "residual", "rotation", "loss")
LINEARS = ((64, 32, 32), (64, 64, 64), (256, 64, 64), (256, 64, 192), (128, 64, 512), (512, 256, 256), (256, 512, 512))
ATTENTIONS = ((1, 1, 8, 8), (2, 4, 64, 16), (1, 4, 256, 16), (1, 4, 128, 64))
TILES = ((2, 2, 8, 8), (4, 4, 16, 16))
LAYERS = ((32, 32, 1), (160, 48, 5), (192, 96, 3), (384, 128, 2))  # tokens, width and sequences of whole layers
UPDATES = ((16, 64), (16, 16384))
SELECTED_FROM = 2**20  # elements, of which a top-k keeps one in a hundred
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
HOST_COPY = 2**28

Call = Callable[[], object]


class Case(NamedTuple):
    """One operation to time: its kind, its sizes, how many of them one call runs, and the call."""

    kind: str
    shape: Mapping[str, float]
    repeats: int
    call: Call


def measure_device(
    device: str, ranks: Synchronization, dtype: str = "fp32", budget_s: float = 4.0, rank: int = 0
) -> list[DevicePoint]:
    """Time all operations on this rank, while the other ranks time theirs."""
    torch.manual_seed(0)
    cuda = device.startswith("cuda")
    cases = list(gpu_cases(device, DTYPES[dtype]) if cuda else cpu_cases(DTYPES[dtype]))
    if cuda:
        times = [measure(case.call, ranks, budget_s=budget_s / len(cases)) for case in cases]
    else:
        times = measure_in_turn([case.call for case in cases], ranks, budget_s)
    out = []
    for case, took in zip(cases, times, strict=True):
        seconds = {k: v / case.repeats for k, v in took.as_dict().items() if k.endswith("_s")}
        counts = {"samples": took.samples, "calls": took.calls}
        work, unit = amount_of_work(case)
        precision = "fp8" if case.kind == "fp8-gemm" else dtype
        point = {
            "kind": case.kind,
            "dtype": precision,
            "shape": dict(case.shape),
            "work": work,
            "unit": unit,
            "rank": rank,
        }
        out.append(DevicePoint(**seconds, **counts, **point))
    return out


def measure_in_turn(calls: list[Call], ranks: Synchronization, budget_s: float) -> list[Timed]:
    """Time calls one after the other, in rounds: each finds the caches filled by the others, as an operation of a step does. A call that
    is repeated alone takes two thirds of that."""

    def run_round() -> list[float]:
        ranks.barrier()
        out = []
        for call in calls:
            start = time.thread_time()
            call()
            out.append(max(time.thread_time() - start, 1e-9))
        return out

    run_round()
    rounds = min(max(round(budget_s / ranks.agree([sum(run_round())])[0]), LEAST_SAMPLES), MOST_SAMPLES)
    samples = [run_round() for _ in range(rounds)]
    medians = [median(column) for column in zip(*samples, strict=True)]
    return [timed([value]).but(samples=rounds) for value in ranks.agree(medians)]


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


# CPU


def cpu_cases(dtype: torch.dtype) -> Iterator[Case]:
    for part in PARTS:
        for size in (SMALL, MIDDLE, LARGE):
            repeats = 1 if part == "loss" else CHAIN
            yield Case(part, {k: float(v) for k, v in size.items()}, repeats, part_call(part, dtype, **size))
    for m, n, k in LINEARS:
        yield Case("linear", {"m": m, "n": n, "k": k}, CHAIN, linear_call(dtype, m, n, k))
    for batch, heads, seq, width in ATTENTIONS:
        shape = {"batch": batch, "heads": heads, "seq": seq, "width": width}
        yield Case("attention", shape, 2, attention_call(dtype, batch, heads, seq, width))
    for tokens, width, sequences in LAYERS:
        layers = partial(layers_call(dtype, tokens, width, sequences, CHAIN), unchanged)
        sizes = {"tokens": float(tokens), "width": float(width), "sequences": float(sequences)}
        yield Case("layer", sizes, CHAIN, layers)
    for batch, heads, seq, width in TILES:
        tile = tile_call(dtype, batch, heads, seq, width)
        sizes = {"batch": float(batch), "heads": float(heads), "seq": float(seq), "width": float(width)}
        yield Case("tile", {**sizes, "operators": count_operators(tile)}, 1, tile)
    values = torch.randn(SELECTED_FROM, dtype=dtype)
    kept = SELECTED_FROM // 100
    yield Case("top-k", {"elements": SELECTED_FROM}, 1, lambda: values.abs().topk(kept, sorted=False))
    for tensors, elements in UPDATES:
        plain = [torch.randn(elements, dtype=dtype) for _ in range(tensors)]
        yield Case("optimizer", {"tensors": tensors, "elements": elements}, 1, update_call(plain))
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        yield from sharded_cases(dtype)


def part_call(part: str, dtype: torch.dtype, tokens: int, width: int, chain: int = CHAIN) -> Call:
    """Forward and backward of a chain of one part of a transformer layer."""
    x = torch.randn(1, tokens, width, dtype=dtype, requires_grad=True)
    start = torch.randn(1, tokens, width, dtype=dtype)
    if part == "loss":
        target = torch.zeros(tokens, dtype=torch.long)

        def loss() -> None:
            F.cross_entropy((x * 1.0).flatten(0, 1), target, reduction="sum").backward()

        return loss
    steps: list[Callable[[torch.Tensor], torch.Tensor]]
    if part == "norm":
        norms = [nn.RMSNorm(width, dtype=dtype) for _ in range(chain)]
        steps = list(norms)
    elif part == "activation":
        steps = [lambda y: F.silu(y) * y] * chain
    elif part == "residual":
        steps = [lambda y: y + x] * chain
    else:
        steps = [_rotation(tokens, width, dtype)] * chain

    def run() -> None:
        y = x
        for step in steps:
            y = step(y)
        y.backward(start)

    return run


def _rotation(tokens: int, width: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Queries and keys of heads of 16, rotated as RoPE does; their halves of the width are adjacent again afterwards."""
    cosine, sine = torch.randn(2, tokens, 16, dtype=dtype)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat((-second, first), dim=-1) * sine

    def step(y: torch.Tensor) -> torch.Tensor:
        heads = y.view(1, -1, tokens, 16)
        return (rotated(heads) + rotated(heads)).view_as(y)

    return step


def linear_call(dtype: torch.dtype, m: int, n: int, k: int, chain: int = CHAIN) -> Call:
    """Forward and backward of linear layers k → n → k → …; weight gradients accumulate."""
    sizes = [(k, n) if i % 2 == 0 else (n, k) for i in range(chain)]
    layers = [nn.Linear(a, b, bias=False, dtype=dtype) for a, b in sizes]
    for layer in layers:
        layer.weight.grad = torch.zeros_like(layer.weight)
    x = torch.randn(1, m, k, dtype=dtype, requires_grad=True)
    start = torch.randn(1, m, sizes[-1][1], dtype=dtype)

    def run() -> None:
        y = x
        for layer in layers:
            y = layer(y)
        y.backward(start)

    return run


def attention_call(
    dtype: torch.dtype, batch: int, heads: int, seq: int, width: int, device: str = "cpu", chain: int = 2
) -> Call:
    """Forward and backward of causal attention, twice, with the reshapes into heads and back."""
    shape = (batch, seq, heads * width)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    start = torch.randn(shape, dtype=dtype, device=device)

    def attend(x: torch.Tensor) -> torch.Tensor:
        in_heads = [y.unflatten(-1, (heads, width)).transpose(1, 2) for y in (x, k, v)]
        mixed = F.scaled_dot_product_attention(in_heads[0], in_heads[1], in_heads[2], is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def run() -> None:
        y = q
        for _ in range(chain):
            y = attend(y)
        y.backward(start)

    return run


def tile_call(dtype: torch.dtype, batch: int, heads: int, seq: int, width: int) -> Call:
    """Attention to one block of keys in torch operators, forward and backward, outside autograd: scores, log-sum-exp, probabilities, the
    merge with an earlier block, and the gradients."""
    shape, scale = (batch, heads, seq, width), width**-0.5
    q, k, v, grad = (torch.randn(shape, dtype=dtype) for _ in range(4))
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    before, merged = torch.randn(shape[:-1], dtype=dtype), torch.randn(shape, dtype=dtype)

    @torch.no_grad()
    def run() -> None:
        rows = slice(0, seq)
        scores = q[:, :, rows].mul(scale) @ k[:, :, rows].transpose(-1, -2)
        scores.masked_fill_(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        probability = scores.sub_(lse.unsqueeze(-1)).exp_()
        output = (probability @ v[:, :, rows]).reshape(shape)
        after = torch.logaddexp(before, lse)
        weight = (before - after).exp_().unsqueeze(-1)
        (merged[:, :, rows] * weight).add_(output * (lse - after).exp_().unsqueeze(-1))
        delta = (grad * output).sum(-1)
        ds = grad[:, :, rows] @ v[:, :, rows].transpose(-1, -2)
        ds.sub_(delta.unsqueeze(-1)).mul_(probability).mul_(scale)
        gradients = ds @ k, ds.transpose(-1, -2) @ q, probability.transpose(-1, -2) @ grad
        for gradient in gradients:
            gradient.reshape(shape)[:, :, rows].add_(gradient)

    return run


def count_operators(call: Call) -> float:
    """Torch operators that a call dispatches, views included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return operator(*args, **(kwargs or {}))

    with Counter() as counter:
        call()
    return float(counter.count)


def update_call(values: list[torch.Tensor], fused: bool | None = None) -> Call:
    """The norm of the gradients, clipping and AdamW, tensor by tensor as the training loop runs them."""
    parameters = [nn.Parameter(value) for value in values]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=fused)

    def update() -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm([g.to(g.dtype) for g in gradients])
        factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for g in gradients:
            g.mul_(factor)
        optimizer.step()

    return update


def sharded_cases(dtype: torch.dtype) -> Iterator[Case]:
    """ZeRO units of a few parameters each: with their gathers and reductions, with hooks alone, and the same modules without ZeRO."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # A slice of a larger mesh, as with pipeline or tensor parallelism: torch compares meshes in every operator.
    mesh = init_device_mesh("cpu", (1, distributed.get_world_size()), mesh_dim_names=("stage", "shard"))["shard"]
    units, held, plain = (nn.Sequential(*(small_unit(dtype) for _ in range(CHAIN))) for _ in range(3))
    for sharded, reshard in ((units, True), (held, False)):
        for unit in sharded:
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(units, mesh=mesh)
    kept = fully_shard(held, mesh=mesh, reshard_after_forward=False)
    x, start = torch.randn(1, 16, 16, dtype=dtype), torch.randn(1, 16, 16, dtype=dtype)
    kept.set_reshard_after_backward(False)  # a micro-batch that neither gathers nor reduces
    kept.set_requires_gradient_sync(False)
    for kind, module in (("sharded-units", units), ("held-units", held), ("plain-units", plain)):
        yield Case(kind, {"units": CHAIN}, 1, partial(forward_backward, module, x, start))


def small_unit(dtype: torch.dtype) -> nn.Module:
    """A ZeRO unit of some parameters."""
    return nn.Sequential(*(nn.Linear(16, 16, bias=False, dtype=dtype) for _ in range(UNIT_PARAMETERS)))


def forward_backward(module: nn.Module, x: torch.Tensor, start: torch.Tensor) -> None:
    module(x).backward(start)


# GPU


def gpu_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """What a GPU sustains: products, attention (torch's own kernel, and the vendor's), copies on the device and to the host, the fused optimizer;
    and the host's time per launch."""
    for m, n, k in GPU_PRODUCTS:
        a, b = torch.randn(m, k, dtype=dtype, device=device), torch.randn(n, k, dtype=dtype, device=device)
        out = torch.empty(m, n, dtype=dtype, device=device)
        yield Case("gemm", {"m": m, "n": n, "k": k}, 1, partial(torch.mm, a, b.t(), out=out))
    for m, n, k, fast in FP8_PRODUCTS:
        product = fp8_product_call(device, m, n, k, fast)
        if works(product):
            yield Case("fp8-gemm", {"m": m, "n": n, "k": k}, 1, product)
    for experts, m, n, k in GROUPED_PRODUCTS:
        product = grouped_product_call(device, dtype, experts, m, n, k)
        if works(product):
            yield Case("grouped-gemm", {"experts": experts, "m": m, "n": n, "k": k}, 1, product)
    for batch, heads, seq, width in GPU_ATTENTIONS:
        shape = {"batch": batch, "heads": heads, "seq": seq, "width": width}
        attention = attention_call(dtype, batch, heads, seq, width, device)
        yield Case("attention", shape, 2, partial(with_kernel, attention, SDPBackend.FLASH_ATTENTION))
        fused = partial(with_kernel, attention, SDPBackend.CUDNN_ATTENTION)
        if works(fused):
            yield Case("fused-attention", shape, 2, fused)
    for size in GPU_COPIES:
        source = torch.empty(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        yield Case("copy", {"bytes": float(size)}, 1, partial(target.copy_, source))
        del source, target
    pinned = torch.empty(HOST_COPY, dtype=torch.uint8, pin_memory=True)
    held = torch.empty(HOST_COPY, dtype=torch.uint8, device=device)
    yield Case("host-copy", {"bytes": float(HOST_COPY)}, 1, partial(pinned.copy_, held, non_blocking=True))
    for tensors, elements in GPU_UPDATES:
        values = [torch.randn(elements, device=device) for _ in range(tensors)]
        yield Case("optimizer", {"tensors": tensors, "elements": elements}, 1, update_call(values, fused=True))
    little = torch.zeros(16, device=device)
    yield Case("launch", {}, 1, lambda: little.add_(1.0))


def fp8_product_call(device: str, m: int, n: int, k: int, fast: bool) -> Call:
    """A product of E4M3 operands with a scale per tensor. `torch._scaled_mm` is a private name, and torch's only fp8 product in 2.11."""
    a, b = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
    one = torch.ones((), device=device)
    return partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


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
