"""What is timed on a GPU: the rates that it sustains in products, attention, copies and the fused optimizer, and the host's time per launch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.comm.bench.operations import Call, Case, attention_call, update_call

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
            yield Case("fp8-gemm", {"m": m, "n": n, "k": k}, 1, product, "fp8")
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
