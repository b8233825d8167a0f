"""A device whose products sleep: the shapes, the seconds that the cost model gives, and torch's own kernels afterwards."""

import runpy
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from meshwright.cost.compute import attention_time, gemm_time
from meshwright.lower.program import Op

NAMES = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "sleeping.py"))
SleepingDevice, device_of = NAMES["SleepingDevice"], NAMES["device_of"]


def test_products_take_their_time_and_their_shape() -> None:
    x, weight = torch.ones(4, 128, 256), torch.ones(512, 256, requires_grad=True)
    device = device_of(1e9)
    with SleepingDevice(device) as sleeping:
        start = time.perf_counter()
        y = F.linear(x, weight)
        y.sum().backward()
        seconds = time.perf_counter() - start
    one = float(gemm_time(device, "fp32", Op("", "", "gemm", flops=2.0 * 512 * 512 * 256, shape=(1, 512, 512, 256))))
    assert (y.shape, weight.grad.shape) == ((4, 128, 512), weight.shape)
    assert not y.any()
    assert abs(sleeping.slept - 2 * one) < 1e-12  # the product, and the gradient of its weight
    assert seconds > 0.9 * sleeping.slept
    assert torch.equal(torch.mm(torch.ones(64, 64), torch.ones(64, 64)), torch.full((64, 64), 64.0))


def test_attention_takes_its_time_forward_and_backward() -> None:
    q, k, v = (torch.randn(2, 4, 64, 32, requires_grad=True) for _ in range(3))
    device = device_of(1e9)
    with SleepingDevice(device) as sleeping:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    flops = 4 * 2 * 4 * 64 * 64 * 32 / 2

    def seconds(times: float) -> float:
        return float(
            attention_time(device, "fp32", Op("", "", "attention", flops=times * flops, shape=(8, 64, 64, 32)), "")
        )

    assert abs(sleeping.slept - seconds(1.0) - seconds(2.5)) < 1e-9
    assert q.grad.shape == q.shape


def test_small_products_are_computed() -> None:
    tokens, router = torch.randn(64, 32), torch.randn(32, 8)
    expected = tokens @ router
    with SleepingDevice(device_of(1e9)) as sleeping:
        found = tokens @ router
        added = torch.addmm(torch.ones(8), tokens, router)
    assert sleeping.slept == 0
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(added, expected + 1)
