"""The gradient of every rank, computed on one device: each has its own tokens, and their sum is the full gradient."""

import pytest
import torch

from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.models import build, initial_value, loss_function
from meshwright.parallel.numerics import fp8
from meshwright.parallel.pieces import materialise
from meshwright.proof.emulation.per_rank import PerRankGradients, tokens_of

SHAPE = {"hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 33}
MODELS = {
    "gpt": Model(**SHAPE, tied=True, positions="learned", max_positions=8, norm="layernorm", qkv_bias=True),
    "moe": Model(**SHAPE, experts=4, top_k=2, expert_ffn=12, shared_experts=1, shared_gate=True, router_bias=True,
                 ffn_bias=True, qk_norm=True, router={"aux": 0.1, "capacity": 1.0}),
    "mla": Model(**{**SHAPE, "kv_heads": 0}, attention="mla", kv_rank=10, nope_dim=6, rope_dim=4, value_dim=5),
    "mlp": Model(kind="mlp", hidden=16, layers=2, ffn_bias=True),
}  # fmt: skip
SEQ = 8


def network(model):
    module = build(model, range(model.layers)).double()
    materialise(module, "cpu")
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(initial_value(model, name, p.shape, 0, True))
    return module


def batch(model, plan):
    random = torch.Generator().manual_seed(1)
    rows = plan.microbatch * plan.dp
    if model.kind == "mlp":
        return tuple(torch.randn(2, rows, model.hidden, generator=random, dtype=torch.float64))
    return tuple(torch.randint(0, 33, (2, rows, SEQ), generator=random))


PLANS = [Plan(replicate=2, microbatch=2), Plan(tp=2, replicate=2), Plan(shard=2, zero=1, cp=2)]


@pytest.mark.parametrize(("kind", "plan"), [(k, p) for k in MODELS for p in PLANS[: 2 if k == "mlp" else 3]])
def test_gradients_of_the_ranks_sum_to_the_full_gradient(kind, plan):
    model = MODELS[kind]
    layout, (x, y), loss = Layout(plan), batch(model, plan), loss_function(model)
    whole = network(model)
    loss(whole(x), y).backward()
    module = network(model)
    emulated = PerRankGradients(module, layout, model, SEQ)
    value = loss(module(x), y)
    value.backward()
    assert value.item() == pytest.approx(loss(whole(x), y).item(), rel=1e-14)
    taken = emulated.take_gradients()
    assert all(p.grad is None for p in module.parameters())  # every use is some rank's
    assert {s[:3] for s in taken} == {
        (0, d, c) if plan.shard > 1 else (d, 0, c) for d in range(2) for c in range(plan.cp)
    }
    names = {name: p for name, p in whole.named_parameters(remove_duplicate=False) if p.requires_grad}
    for p in whole.parameters():
        uses = [n for n, q in names.items() if q is p]
        parts = [mine[use] for mine in taken.values() for use in uses if use in mine]
        if p.requires_grad:
            torch.testing.assert_close(sum(parts), p.grad, rtol=1e-12, atol=1e-12)
            assert len(parts) in (len(uses) * plan.dp * plan.cp, plan.world)
    assert emulated.take_gradients() == {s: {} for s in taken}


def test_a_data_parallel_rank_has_the_gradient_of_its_samples():
    model, plan = MODELS["gpt"], Plan(replicate=2, microbatch=2)
    (x, y), loss = batch(model, plan), loss_function(model)
    module = network(model)
    emulated = PerRankGradients(module, Layout(plan), model, SEQ)
    loss(module(x), y).backward()
    taken = emulated.take_gradients()
    for rank in range(2):
        alone, mine = network(model), slice(2 * rank, 2 * rank + 2)
        loss(alone(x[mine]), y[mine]).backward()
        for name, p in alone.named_parameters():
            uses = [name, "head.project.weight"] if name == "embedding.tokens.weight" else [name]
            torch.testing.assert_close(sum(taken[rank, 0, 0, 0][use] for use in uses), p.grad, rtol=1e-12, atol=1e-13)


def test_expert_gradients_belong_to_the_rank_that_routed_the_tokens():
    """A sequence over cp in zigzag, and half of each part for each of two tp ranks."""
    plan = Plan(cp=2, tp=2, sp=True, microbatch=2)
    rows = tokens_of(Layout(plan), MODELS["moe"], SEQ)
    assert rows[0, 0, 0, 0].tolist() == [0, 1, 8, 9]
    assert rows[0, 0, 0, 1].tolist() == [6, 7, 14, 15]
    assert rows[0, 0, 1, 1].tolist() == [4, 5, 12, 13]


def test_parts_of_one_data_rank_share_the_scales_of_fp8():
    """Two parts: their gradients sum to that of one product, although each part has another maximum."""
    model, plan = MODELS["gpt"], Plan(cp=2, microbatch=2)
    (x, y), loss = batch(model, plan), loss_function(model)
    gradients = []
    for per_rank in (False, True):
        module = network(model)
        fp8.enable_fp8(module.layers.values())
        made = PerRankGradients(module, Layout(plan), model, SEQ, scaled=True) if per_rank else None
        loss(module(x), y).backward()
        of = "layers.1.attention.q"
        names = [f"{of}.weight", f"{of}.bias", "layers.0.ffn.up.weight", "layers.0.attention_norm.weight"]
        parts = made.take_gradients().values() if made else [{name: module.get_parameter(name).grad for name in names}]
        assert len(parts) == 1 + per_rank
        gradients.append([sum(mine[name] for mine in parts) for name in names])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
