"""A device whose matrix products take time but no cores: each product sleeps as long as the cost model says it takes.

Eight ranks on two cores compute four times slower than eight devices would, and their communication waits for it. Under this mode a step
has the communication, the operators and the order of a real one, while products and attention are replaced by zeros of the same shape
and a sleep of

    products     `cost.compute.gemm_time`        of the local shape
    attention    `cost.compute.attention_time`   forward once, backward 2.5 times the FLOPs (five products for two)

on the given device, whose start-up time and memory traffic must be left out (`device_of`): elementwise operators, copies and the
optimizer still run. Short sleeps are collected, since a sleep ends late by about a tenth of a millisecond, and what one overslept is
taken from the next. Products with a dimension below `COMPUTED_BELOW` are computed: routers choose experts by their result.

The sleeping operators are registered as torch's CPU kernels while the device is active, so that all other operators keep their speed:
a dispatch mode would add Python to each of the thousands of operators of a step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.cost.compute import attention_time, gemm_time
from meshwright.describe.accelerator import Accelerator, Efficiency
from meshwright.lower.program import Op

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


class SleepingDevice:
    """Replace the products and the attention of the CPU by sleeps, between `with` and its end, in this process."""

    def __init__(self, device: Accelerator, dtype: str = "fp32") -> None:
        self.device, self.dtype = device, dtype
        self.owed = 0.0  # seconds still to sleep
        self.slept = 0.0  # seconds of all products until now
        self.known: dict[
            tuple[float, ...], float
        ] = {}  # seconds by shape: computing them takes longer than an operator
        self.library: torch.library.Library | None = None

    def __enter__(self) -> SleepingDevice:
        kernels: dict[str, Callable[..., Any]] = {
            "mm": self.product,
            "bmm": self.product,
            "addmm": self.added_product,
            "baddbmm": self.added_product,
            ATTENTION: self.attention,
            ATTENTION + "_backward": self.attention_backward,
        }
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # replacing kernels is the purpose
            for name, kernel in kernels.items():
                self.library.impl(name, kernel, "CPU")
        return self

    def __exit__(self, *error: object) -> None:
        assert self.library is not None
        self.library._destroy()  # torch's own kernels are back
        self.library = None

    def product(self, first: Tensor, second: Tensor) -> Tensor:
        *products, m, k = first.shape
        n, count = second.shape[-1], products[0] if products else 1
        if min(m, n, k) < COMPUTED_BELOW:
            return torch.from_numpy(first.detach().numpy() @ second.detach().numpy())
        self.spend(self.product_seconds(count, m, n, k))
        return first.new_zeros(*products, m, n)

    def product_seconds(self, count: int, m: int, n: int, k: int) -> float:
        if (count, m, n, k) not in self.known:
            op = Op("product", "", "gemm", flops=2.0 * count * m * n * k, shape=(count, m, n, k))
            self.known[count, m, n, k] = float(gemm_time(self.device, self.dtype, op))
        return self.known[count, m, n, k]

    def added_product(
        self, bias: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        return beta * bias + alpha * self.product(first, second)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple:
        self.spend_attention(q, k, 1.0)
        return torch.zeros_like(q), q.new_zeros(q.shape[:-1], dtype=torch.float32)

    def attention_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple:
        self.spend_attention(q, k, BACKWARD)
        return tuple(map(torch.zeros_like, (q, k, v)))

    def spend_attention(self, q: Tensor, k: Tensor, times: float) -> None:
        batch, heads, s_q, width = q.shape
        key = (*q.shape, k.shape[2], times)
        if key not in self.known:
            flops = 4.0 * batch * heads * s_q * k.shape[2] * width * CAUSAL * times
            op = Op("core", "", "attention", flops=flops, shape=(batch * heads, s_q, k.shape[2], width))
            self.known[key] = float(attention_time(self.device, self.dtype, op, "flash"))
        self.spend(self.known[key])

    def spend(self, seconds: float) -> None:
        self.owed += seconds
        self.slept += seconds
        if self.owed >= SLEPT_AT_ONCE_S:
            start = time.perf_counter()
            time.sleep(self.owed)
            self.owed -= time.perf_counter() - start
