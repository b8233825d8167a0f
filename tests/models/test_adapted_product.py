"""Adapters: what a layer computes with one, where they are, and their first values."""

import math

import pytest
import torch

from meshwright.describe.adapter import Adapter
from meshwright.describe.model import Model
from meshwright.describe.sharding import parameters
from meshwright.models import DrawnWeights, build
from meshwright.models.dropout import sample_hashes
from meshwright.models.step_context import within
from meshwright.parallel.pieces import materialise

SHAPE = {"hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 32}


def network(**options):
    model = Model(**SHAPE, adapter=Adapter(**options))
    module, weights = build(model), DrawnWeights(model, 3, scatter=True)
    materialise(module, "cpu")
    for p in parameters(model, range(2)):
        with torch.no_grad():
            module.get_parameter(p.name).copy_(weights.read(p.name, p.shape, [0] * len(p.shape), p.shape))
    return model, module.double()


def test_only_adapters_have_gradients_and_they_are_those_of_the_formula():
    model, module = network(rank=3, alpha=6, targets=("q_proj", "down_proj"))
    names = {name for name, p in module.named_parameters() if p.requires_grad}
    assert names == {p.name for p in parameters(model, range(2)) if p.is_adapter}
    q = module.layers["1"].attention.q
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    y = q(x)
    expected = x @ (q.weight + 2 * q.lora_b.weight @ q.lora_a.weight).T
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    module(torch.arange(10).view(2, 5)).sum().backward()
    assert {name for name, p in module.named_parameters() if p.grad is not None} == names


def test_the_input_of_an_adapter_is_dropped_alone_and_kept_once():
    _, module = network(rank=2, dropout=0.5, targets=("q_proj",))
    q = module.layers["0"].attention.q
    x, saved = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t)
    with hooks, within(samples_B=sample_hashes(0, 0, range(2), torch.device("cpu"))):
        y = q(x)
        mask = q.lora_drop(torch.ones_like(x))
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert saved.count(x.data_ptr()) == 1
    a, b = q.lora_a.weight, q.lora_b.weight
    torch.testing.assert_close(y, x @ q.weight.T + (x * mask) @ a.T @ b.T, rtol=1e-13, atol=1e-13)
    got = torch.autograd.grad(y.square().sum(), (x, a, b))
    plain = x @ q.weight.T + (x * mask) @ a.T @ b.T
    for one, other in zip(got, torch.autograd.grad(plain.square().sum(), (x, a, b)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 32), (2, 4, 32)])
def test_a_is_uniform_and_b_is_zero(shape):
    model = Model(**SHAPE, adapter=Adapter(rank=4))
    a, b = (DrawnWeights(model, 1).read(f"x.lora_{n}.weight", shape, [0] * len(shape), shape) for n in "ab")
    bound = 1 / math.sqrt(32)
    assert float(b.abs().max()) == 0
    assert 0.9 * bound < float(a.abs().max()) <= bound
    assert abs(float(a.mean())) < 6 * bound / math.sqrt(3 * a.numel())
