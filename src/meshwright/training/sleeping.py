"""A device whose matrix products take time but no cores: each product sleeps as long as the cost model says it takes.

Eight ranks on two cores compute four times slower than eight devices would, and their communication waits for it. Under this mode a step
has the communication, the operators and the order of a real one, while products and attention are replaced by zeros of the same shape
and a sleep of

    products     `cost.compute.gemm_time`        of the local shape
    attention    `cost.compute.attention_time`   forward once, backward 2.5 times the FLOPs (five products for two)

on the given device, whose start-up time and memory traffic must be left out (`device_of`): elementwise operators, copies and the
optimizer still run. Short sleeps are collected, since a sleep ends late by about a tenth of a millisecond, and what one overslept is
taken from the next. Products with a dimension below `COMPUTED_BELOW` are computed: routers choose experts by their result.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.cost.compute import attention_time, gemm_time
from meshwright.describe.cluster import Accelerator, Efficiency
from meshwright.lower.op import Op

aten = torch.ops.aten
COMPUTED_BELOW = 16
SLEPT_AT_ONCE_S = 2e-3
CAUSAL, BACKWARD = 0.5, 2.5
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def device_of(flops: float, memory: float = 2e9) -> Accelerator:
    """A device of `flops` FLOP/s, with no other cost."""
    exact = Efficiency(gemm=1, gemm_traffic=0, floor=0, flash=1, fused=1, memory=1, source="defined by its sleeps")
    return Accelerator(
        name="cpu-sleeping", memory=memory, memory_bandwidth=1e30, peak={"fp32": flops, "bf16": flops}, efficiency=exact
    )


class SleepingDevice(TorchDispatchMode):
    """Replace products and attention by sleeps, while the mode is active."""

    def __init__(self, device: Accelerator, dtype: str = "fp32") -> None:
        super().__init__()
        self.device, self.dtype = device, dtype
        self.owed = 0.0  # seconds still to sleep
        self.slept = 0.0  # seconds of all products until now

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            first, second = args[-2:] if name.startswith(("add", "badd")) else args[:2]
            return self.product(func, first, second, args, kwargs or {})
        if name == ATTENTION:
            q, k = args[:2]
            self.spend_attention(q, k, 1.0)
            return torch.zeros_like(q), q.new_zeros(q.shape[:-1], dtype=torch.float32)
        if name == ATTENTION + "_backward":
            _, q, k, v = args[:4]
            self.spend_attention(q, k, BACKWARD)
            return tuple(map(torch.zeros_like, (q, k, v)))
        return func(*args, **(kwargs or {}))

    def product(self, func: Any, first: torch.Tensor, second: torch.Tensor, args: tuple, kwargs: dict) -> Any:
        *products, m, k = first.shape
        n, count = second.shape[-1], products[0] if products else 1
        if min(m, n, k) < COMPUTED_BELOW:
            return func(*args, **kwargs)
        op = Op("product", "", "gemm", flops=2.0 * count * m * n * k, shape=(count, m, n, k))
        self.spend(float(gemm_time(self.device, self.dtype, op)))
        return first.new_zeros(*products, m, n)

    def spend_attention(self, q: torch.Tensor, k: torch.Tensor, times: float) -> None:
        batch, heads, s_q, width = q.shape
        flops = 4.0 * batch * heads * s_q * k.shape[2] * width * CAUSAL * times
        op = Op("core", "", "attention", flops=flops, shape=(batch * heads, s_q, k.shape[2], width))
        self.spend(float(attention_time(self.device, self.dtype, op, "flash")))

    def spend(self, seconds: float) -> None:
        self.owed += seconds
        self.slept += seconds
        if self.owed >= SLEPT_AT_ONCE_S:
            start = time.perf_counter()
            time.sleep(self.owed)
            self.owed -= time.perf_counter() - start
