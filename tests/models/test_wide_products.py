"""Products of bf16 operands with results in float32: as exact as float32 sums."""

import torch

from meshwright.models.wide_products import in_parts, wide_linear, widened_linear


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_three_parts_add_up_to_a_float32_exactly():
    x = drawn(1000) * torch.logspace(-30, 30, 1000)
    parts = in_parts(x)
    assert all(p.dtype == torch.bfloat16 for p in parts)
    assert torch.equal(sum(p.double() for p in parts), x.double())
    assert not torch.equal(sum(p.double() for p in parts[:2]), x.double())


def test_a_wide_product_and_its_gradients_have_the_error_of_float32_sums():
    tokens, hidden, experts = 300, 64, 8
    x, weight = drawn(tokens, hidden, dtype=torch.bfloat16), drawn(experts, hidden, seed=1, dtype=torch.bfloat16)
    gradient = drawn(tokens, experts, seed=2)
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = wide_linear(a, b)
    y.backward(gradient)
    sums = [(y, x, weight.t(), hidden), (a.grad, gradient, weight, 3 * experts), (b.grad, gradient.t(), x, 3 * tokens)]
    for found, left, right, terms in sums:
        left, right = left.double(), right.double()
        exact, size = left @ right, left.abs() @ right.abs()
        rounding = 0.0 if found.dtype == torch.float32 else 2**-8  # of the result to 16 bits
        assert ((found.double() - exact).abs() <= terms * 2**-24 * size + rounding * exact.abs()).all()
    assert y.dtype == torch.float32
    assert torch.equal(y, widened_linear(x, weight))
