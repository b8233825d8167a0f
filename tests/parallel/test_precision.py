"""16-bit parameters with fp32 masters and sums, loss scales, fp8 products: compared with one device in the same precision."""

import numpy as np
import pytest
import torch
from torch import nn

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.models.parts import ProductLinear
from meshwright.parallel.numerics import fp8, fp8_grouped
from meshwright.parallel.numerics.precision import LossScale, cast
from meshwright.training.hooks import Hook

MODEL = Model(hidden=16, layers=2, heads=2, ffn=24, vocab=32, ffn_bias=True)
WORKLOAD = Workload(batch=4, seq=4, precision="fp32", optimizer="momentum")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64, "fp32": torch.float32}


def trained(context, plan, workload, dtype, steps=2, break_at=None):
    """Pieces (rounded and master), losses, scales and taken steps, after a few steps.

    `break_at` makes one gradient of the last rank infinite in that step.
    """
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    parallel = apply(MODEL, plan, workload, context.rank, dtype=DTYPES[dtype])
    trainer = Trainer(parallel, RandomSamples(MODEL, workload.seq, 0))
    scales, history = [], []

    class Spoil(Hook):
        def after_gradients(self, trainer):
            if trainer.step == break_at and context.rank == context.world - 1:
                parallel.pieces[-1].gradient.view(-1)[0] = float("inf")

    trainer.hooks.append(Spoil())
    records = []
    for _ in range(steps):
        records.append(trainer.train_step())
        scales.append(trainer.scale.value)
        wide = trainer.masters.pieces if trainer.masters is not None else parallel.pieces
        history.append(wide[0].local.detach().double().numpy().copy())
    masters = {p.name: p.local.detach().double().numpy().copy() for p in wide}
    rounded = {p.name: p.local.detach().double().numpy().copy() for p in parallel.pieces}
    kinds = {str(p.local.dtype) for p in parallel.pieces}, {str(p.gradient.dtype) for p in parallel.pieces}
    return {
        "masters": masters,
        "rounded": rounded,
        "losses": [r.loss for r in records],
        "scales": scales,
        "taken": [r.updated for r in records],
        "history": history,
        "kinds": kinds,
    }


def same(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_two_ranks_in_16_bits_equal_one_device_with_two_micro_batches(dtype):
    """The sum of two numbers does not depend on their order, so results are bitwise equal: the same rounding, masters and sums in fp32."""
    fields = {"param_dtype": dtype, "microbatch": 2}
    (one,) = ranks.run(1, trained, Plan(**fields), WORKLOAD, dtype)
    for rank in ranks.run(2, trained, Plan(replicate=2, **fields), WORKLOAD, dtype):
        assert rank["kinds"] == ({f"torch.{'bfloat16' if dtype == 'bf16' else 'float16'}"}, {"torch.float32"})
        assert same(rank["masters"], one["masters"])
        assert rank["losses"] == one["losses"]
        for name, master in rank["masters"].items():
            small = torch.from_numpy(master).to(DTYPES[dtype]).double().numpy()
            assert (rank["rounded"][name] == small).all()  # the parameters are the masters, rounded
            assert (master != small).any() or master.ndim == 1
    # ZeRO-3 keeps the masters as its shards and does the same arithmetic, but for the order of the norm's sum.
    shards = ranks.run(2, trained, Plan(shard=2, zero=3, **fields), WORKLOAD, dtype)
    for name, master in one["masters"].items():
        joined = np.concatenate([s["rounded"][name] for s in shards])[: len(master)]
        np.testing.assert_allclose(joined, master, rtol=1e-5, atol=1e-6)
    assert shards[0]["kinds"][0] == {"torch.float32"}


@pytest.mark.parametrize(("dtype", "unit"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_16_bits_stay_close_to_32_bits(dtype, unit):
    """A few hundred roundings of relative size `unit` between parameters and loss; most cancel."""
    plan = Plan(microbatch=2)
    (exact,), (rounded,) = (ranks.run(1, trained, plan, WORKLOAD, d) for d in ("fp64", dtype))
    for a, b in zip(exact["losses"], rounded["losses"], strict=True):
        assert 0 < abs(a - b) < 8 * unit * abs(a)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    """In a pipeline ranks share no gradient, so the first stage learns of the overflow only through the global norm."""
    plan = Plan(pp=2, param_dtype="fp16")
    for rank in ranks.run(2, trained, plan, WORKLOAD, "fp16", 3, 1):
        assert rank["taken"] == [True, False, True]
        assert rank["scales"] == [2.0**16, 2.0**15, 2.0**15]
        first, second, third = rank["history"]
        assert (first == second).all()
        assert (second != third).any()


def test_the_scale_grows_after_good_steps_and_is_constant_without_fp16():
    scale = LossScale(4.0, True, growth_interval=2)
    good, bad = torch.tensor(1.0), torch.tensor(float("nan"))
    assert [scale.accept(norm) for norm in (good, good, bad, good, good)] == [True, True, False, True, True]
    assert (scale.value, scale.skipped) == (8.0, 1)
    assert LossScale.of(torch.bfloat16).accept(bad)
    assert LossScale.of(torch.bfloat16).value == 1.0


def test_buffers_have_a_separate_dtype():
    module = cast(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.bfloat16, torch.float32)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module[1].running_mean.dtype == torch.float32
    table = nn.Module()
    table.register_buffer("frequency", torch.tensor([0.1234567, 3.0]))
    assert torch.equal(cast(table, torch.bfloat16, torch.float32).frequency, torch.tensor([0.1234567, 3.0]))
    assert module[1].num_batches_tracked.dtype == torch.int64


def random(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def test_fp8_products_are_within_their_bounds_forward_and_backward():
    x, w, b = random(3, 5, 32).requires_grad_(), random(24, 32, seed=1).requires_grad_(), random(24, seed=2)
    gradient = random(3, 5, 24, seed=3, scale=1e-6)  # far below fp8's range: the scale brings it there
    y = fp8.linear(x, w, b)
    y.backward(gradient)
    exact_x, exact_w = gradient @ w, gradient.flatten(0, 1).T @ x.flatten(0, 1)

    def bound(a, c, fine_a, fine_c):
        """(u_a + u_c + u_a·u_c) Σ|a||c|, plus half of the smallest step for subnormal numbers."""
        below = a.abs().max() * c.abs().sum(-1).max() * 2.0**-17 + c.abs().max() * a.abs().sum(-1).max() * 2.0**-17
        return (fine_a + fine_c + fine_a * fine_c) * (a.abs() @ c.abs().mT) + below

    e4, e5 = 2.0**-4, 2.0**-3
    assert ((y - (x @ w.T + b)).abs() <= bound(x, w, e4, e4)).all()
    assert ((x.grad - exact_x).abs() <= bound(gradient, w.T, e5, e4)).all()
    assert ((w.grad - exact_w).abs() <= bound(gradient.flatten(0, 1).T, x.flatten(0, 1).T, e5, e4)).all()
    assert (w.grad - exact_w).norm() > 1e-3 * exact_w.norm()  # and it was fp8


def test_fp8_rounds_to_representable_values():
    x = torch.tensor([448.0, 1.0, 1.05, 0.0, -448.0])  # the scale is 1
    assert fp8.rounded(x, fp8.E4M3).tolist() == [448.0, 1.0, 1.0, 0.0, -448.0]
    assert fp8.rounded(torch.zeros(3), fp8.E5M2).tolist() == [0.0] * 3
    assert fp8.rounded(torch.full((2,), 1e30), fp8.E5M2).isfinite().all()


def test_a_weight_that_is_quantised_in_each_call_is_saved_as_it_is():
    """Saved units would be a copy of each weight that ZeRO-3 could not free."""
    x, w = torch.randn(4, 32, requires_grad=True), torch.randn(64, 32, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fp8.linear(x, w)
    own = [t for t in saved if t.data_ptr() != w.data_ptr()]
    assert len(own) == len(saved) - 1
    assert max(t.numel() for t in own) == x.numel()


def test_fp8_layers_use_the_weights_that_were_quantised_last():
    layer, x = ProductLinear(16, 16), torch.randn(4, 16)
    fp8.enable_fp8([layer], keeps=True)
    fp8.quantise_weights([layer])
    first = layer(x)
    assert torch.equal(first, fp8.linear(x, layer.weight, layer.bias))
    with torch.no_grad():
        layer.weight.mul_(3.0)
    assert torch.equal(layer(x), first)
    fp8.quantise_weights([layer])
    y, expected = layer(x), fp8.linear(x, layer.weight, layer.bias)
    assert torch.equal(y, expected)
    gradients = []
    for output in (y, expected):
        output.sum().backward()
        gradients.append(layer.weight.grad)
        layer.weight.grad = None
    assert torch.equal(*gradients)


def test_fp8_on_two_ranks_equals_fp8_on_one_device():
    """Scales are computed per micro-batch, so one device with the same micro-batches does the same arithmetic."""
    workload = WORKLOAD.but(precision="fp8")
    (one,) = ranks.run(1, trained, Plan(microbatch=2), workload, "fp64")
    (wide,) = ranks.run(1, trained, Plan(microbatch=2), WORKLOAD, "fp64")
    for rank in ranks.run(2, trained, Plan(replicate=2, microbatch=2, recompute="full"), workload, "fp64"):
        assert same(rank["masters"], one["masters"])
    for a, b in zip(one["losses"], wide["losses"], strict=True):
        assert 1e-6 < abs(a - b) < 0.05 * abs(b)


def test_fp8_of_experts_is_within_its_bounds_for_any_grouping_of_tokens():
    counts = [5, 0, 3]
    x, w = random(8, 32).requires_grad_(), random(3, 24, 32, seed=1).requires_grad_()
    x.data[6] *= 1e-6  # scaled with the others of its expert it would be gone
    gradient = random(8, 24, seed=3) * torch.logspace(-9, 0, 8, dtype=torch.float64)[:, None]
    y = fp8_grouped.Fp8Grouped()(x, w, counts)
    y.backward(gradient)
    start = 0
    for count, weight, learnt in zip(counts, w.detach(), w.grad, strict=True):
        rows = slice(start, start := start + count)
        a, g = x.detach()[rows], gradient[rows]
        below = 2.0**-17 * a.abs().amax(1, keepdim=True) * weight.abs().max() * 32
        assert ((y[rows] - a @ weight.T).abs() <= (2**-3 + 2**-8) * (a.abs() @ weight.abs().T) + 2 * below).all()
        assert ((x.grad[rows] - g @ weight).abs() <= (2**-3 + 2**-4 + 2**-7) * (g.abs() @ weight.abs()) * 1.01).all()
        below = 2.0**-17 * g.abs().T @ a.abs().amax(1, keepdim=True)
        assert ((learnt - g.T @ a).abs() <= (2**-3 + 2**-4 + 2**-7) * (g.abs().T @ a.abs()) + 2 * below).all()
    assert (w.grad[0] - gradient[:5].T @ x[:5]).norm() > 1e-3 * w.grad[0].norm()  # and it was fp8
    assert not w.grad[1].any()
    alone = fp8_grouped.Fp8Grouped()(x.detach()[6:7], w.detach(), [0, 0, 1])
    assert torch.equal(alone[0], y.detach()[6])
