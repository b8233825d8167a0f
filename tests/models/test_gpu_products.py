"""The forms of experts' products that a GPU uses, on a CPU: equal to the plain ones, and as exact as float32."""

import copy

import torch
from torch.nn import functional as F

from meshwright.describe.model import Model
from meshwright.models.joined import join, joined, joined_product
from meshwright.models.moe import Experts, run_by_run
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


def experts_of(**shape):
    torch.manual_seed(0)
    model = Model(hidden=16, layers=1, heads=2, ffn=24, vocab=32, experts=4, top_k=2, expert_ffn=24, **shape)
    made = Experts(model)
    for p in made.parameters():
        torch.nn.init.normal_(p)
    return made.to(torch.bfloat16)


def test_joined_weights_keep_names_shapes_and_values():
    plain = experts_of()
    made = copy.deepcopy(plain)
    assert made.joined_weights() is None
    join(made.gate, made.up)
    both = made.joined_weights()
    assert torch.equal(both, torch.cat((plain.gate.weight, plain.up.weight), 1))
    made.up.weight.detach()[2, 3, 4] = 7.0  # views of one tensor: what is written to a parameter is seen by the product
    assert both[2, 24 + 3, 4] == 7.0
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    assert joined(made.up.weight, made.gate.weight) is None
    assert joined(made.gate.weight, made.gate.weight) is None


def test_a_joined_product_equals_two_products(monkeypatch):
    """In one grouped product, with an expert without rows; the gradient of x is rounded once, not three times."""
    plain = experts_of()
    made = copy.deepcopy(plain)
    join(made.gate, made.up)
    monkeypatch.setattr(Experts, "in_one_kernel", lambda self, x, counts: self is made)
    counts = torch.tensor([3, 0, 9, 4])
    results = []
    for experts in (plain, made):
        x = drawn(16, 16, seed=3, dtype=torch.bfloat16).requires_grad_()
        y = experts(x, counts)
        y.backward(drawn(16, 16, seed=4, dtype=torch.bfloat16))
        results.append([y.detach(), x.grad, *(p.grad for _, p in sorted(experts.named_parameters()))])
    (y, dx, *weights), (joined_y, joined_dx, *joined_weights) = results
    assert torch.equal(y, joined_y)
    for one, other in zip(weights, joined_weights, strict=True):
        assert torch.equal(one, other)
        assert other.is_contiguous()
    assert ((dx - joined_dx).abs() <= 3 * 2**-8 * dx.abs().max()).all()


def test_the_gradient_of_a_joined_product_is_that_of_its_formula():
    gate, up = (drawn(2, 8, 16, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    holders = [torch.nn.Module(), torch.nn.Module()]
    for holder, weight in zip(holders, (gate, up), strict=True):
        holder.weight = torch.nn.Parameter(weight)
    join(*holders)
    x = drawn(5, 16, dtype=torch.bfloat16).requires_grad_()
    weights = [holder.weight for holder in holders]
    y = joined_product(x, *weights, joined(*weights), torch.tensor([2, 3]))
    gradient = drawn(5, 16, seed=5, dtype=torch.bfloat16)
    y.backward(gradient)
    both = torch.cat((gate, up), 1)
    assert torch.equal(y, run_by_run(x, both, [2, 3]))
    exact = F.linear(gradient[:2].double(), both[0].double().t())
    assert ((x.grad[:2].double() - exact).abs() <= 2**-7 * exact.abs().max()).all()
