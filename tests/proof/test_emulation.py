"""The compressors of the emulation, written independently, give the sums of the ranks' compressors, step after step."""

import numpy as np
import pytest
import torch

from meshwright.describe.plan import Plan
from meshwright.parallel.numerics import fp8, fp8_grouped
from meshwright.parallel.numerics.compress.compressors import compressor_of
from meshwright.proof.emulation import fp8_products
from meshwright.proof.emulation.compressors import compressed_sum
from meshwright.proof.emulation.update import rounded

KINDS = ("fp16", "bf16", "int8", "int4", "fp8", "top-k", "random-k", "threshold", "absolute-threshold", "powersgd")
OPTIONS = {"compression_ratio": 0.1, "compression_rank": 2, "compression_threshold": 1.5}
SHAPES = [(0, (6, 5)), (30, (7,)), (37, (4, 3, 2))]
LENGTH = 61


def exchanged(requests):
    """One kind of exchange between all ranks, in this process."""
    given = [request.given.clone() for request in requests]
    for rank, request in enumerate(requests):
        if request.operation == "all_reduce":
            request.out.copy_(sum(given[1:], given[0]))
        elif request.operation == "reduce_scatter":
            request.out.copy_(sum((g[rank] for g in given[1:]), given[0][rank]))
        elif request.operation == "all_gather":
            request.out.view(-1).copy_(torch.cat([g.flatten() for g in given]))
        else:
            request.out.copy_(torch.cat([g.chunk(len(given))[rank] for g in given]))


def run(generators):
    while requests := [request for g in generators if (request := next(g, None)) is not None]:
        exchanged(requests)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_emulated_all_reduce_equals_that_of_the_ranks(kind, ranks):
    plan = Plan(replicate=ranks, compression=kind, **OPTIONS)
    sum_up, compressors = compressed_sum(plan), [compressor_of(plan) for _ in range(ranks)]
    layout = [(start, torch.Size(shape)) for start, shape in SHAPES]
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        given = [torch.randn(LENGTH, dtype=torch.float64, generator=random) for _ in range(ranks)]
        messages = [g.clone() for g in given]
        run([c.reduce(0, m, layout, r, ranks) for r, (c, m) in enumerate(zip(compressors, messages, strict=True))])
        torch.testing.assert_close(sum_up(0, given, SHAPES), messages[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "powersgd"])
def test_an_emulated_reduce_scatter_equals_that_of_the_ranks(kind):
    plan = Plan(replicate=2, compression=kind, **OPTIONS)
    sum_up, compressors = compressed_sum(plan), [compressor_of(plan) for _ in range(2)]
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        given = [torch.randn(2, 15, dtype=torch.float64, generator=random) for _ in range(2)]
        out = torch.zeros(2, 15, dtype=torch.float64)
        run([c.scatter(0, given[r], [], r, out[r]) for r, c in enumerate(compressors)])
        torch.testing.assert_close(sum_up(0, given, []), out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "values", "tied"),
    [
        ("top-k", [4.0, 2.0, 2.0, 1.0], True),
        ("top-k", [4.0, 2.0, -2.0 * (1 + 1e-15), 1.0], True),
        ("top-k", [4.0, 2.0, 1.9, 1.9], False),  # both are left
        ("top-k", [4.0, 0.0, 0.0, 0.0], False),  # whichever zero is sent
        ("threshold", [3.0, 1.0, 1.0, 1.0], False),
        ("threshold", [1.0, 1.0, 1.0, 1.0], True),
        ("absolute-threshold", [3.0, 2.0, 0.5, 0.5], False),
        ("absolute-threshold", [3.0, 1.0, 0.5, 0.5], True),
    ],
)
def test_values_between_which_rounding_decides_are_noted(kind, values, tied):
    plan = Plan(replicate=2, compression=kind, compression_ratio=0.5, compression_threshold=1.0)
    sum_up = compressed_sum(plan)
    sum_up(0, [torch.tensor(values, dtype=torch.float64), torch.arange(4.0, 8.0, dtype=torch.float64)], [])
    assert sum_up.tied == tied


def test_rounding_equals_that_of_torch():
    x = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 4000)
    x = torch.cat((x, torch.tensor([0.0, 1.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 2.0**-24, 2.0**-25, 3 * 2.0**-10])))
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        np.testing.assert_array_equal(rounded(x.numpy(), name), x.to(dtype).double().numpy())
    for form, dtype in ((fp8_products.E4M3, torch.float8_e4m3fn), (fp8_products.E5M2, torch.float8_e5m2)):
        limit = torch.finfo(dtype).max
        large = torch.cat((x, 1e3 * x, torch.tensor([limit, -limit])))
        assert torch.equal(fp8_products.nearest(large, form), large.clamp(-limit, limit).to(dtype).float())


def results(function, *inputs):
    """The output, and the gradients of all inputs that are tensors."""
    inputs = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in inputs]
    y = function(*inputs)
    (y * torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)).sum().backward()
    return [y.detach(), *(x.grad for x in inputs if isinstance(x, torch.Tensor))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_emulated_fp8_products_equal_those_of_the_ranks(dtype):
    random = torch.Generator().manual_seed(2)
    x, w = torch.randn(3, 4, 6, generator=random).to(dtype), torch.randn(5, 6, generator=random).to(dtype)
    for got, expected in zip(results(fp8_products._Linear.apply, x, w), results(fp8.linear, x, w), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    rows, experts, counts = x.flatten(0, 1), torch.randn(3, 5, 6, generator=random).to(dtype), [7, 0, 5]
    ours = results(fp8_products._Experts.apply, rows, experts, counts)
    for got, expected in zip(ours, results(fp8_grouped.Fp8Grouped(), rows, experts, counts), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
