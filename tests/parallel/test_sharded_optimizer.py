"""ZeRO-1 on plain parameters: ranks with shards of the optimizer states train the same as one device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import ranks

OPTIMIZERS = {
    "adamw": (partial(torch.optim.AdamW, lr=1e-2), False),
    "momentum": (partial(torch.optim.SGD, lr=1e-2, momentum=0.9), False),
    "muon": (partial(torch.optim.Muon, lr=1e-2), True),
}


def network(name):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(5, 7, bias=name != "muon"), nn.Tanh(), nn.Linear(7, 5, bias=name != "muon")).double()
    made[2].weight.requires_grad_()
    return made


def groups_of(module):
    return [{"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1}] + (
        [{"params": [p for p in module.parameters() if p.ndim == 1], "weight_decay": 0.0}]
        if module[0].bias is not None
        else []
    )


def trained(context, name):
    from meshwright.parallel.data.sharded_optimizer import ShardedOptimizer

    make, whole = OPTIMIZERS[name]
    module, plain = network(name), network(name)
    sharded = ShardedOptimizer(groups_of(module), make, whole=whole)
    single = make(groups_of(plain))
    batch = torch.linspace(-1, 1, 5 * 2 * context.world, dtype=torch.float64).view(-1, 5).sin()
    mine = batch.chunk(context.world)[context.rank]
    norms = []
    for _ in range(3):
        module(mine).square().mean().backward()
        plain(batch).square().mean().backward()
        norms.append((float(sharded.clip_norm(0.01)), float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01))))
        for optimizer in (sharded, single):
            optimizer.step()
            optimizer.zero_grad()
    held = sum(s.numel() for state in sharded.optimizer.state.values() for s in state.values() if s.ndim)
    error = max(float((p - q).abs().max()) for p, q in zip(module.parameters(), plain.parameters(), strict=True))
    return error, norms, held, sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_optimizer_states_equal_one_device(name):
    found = ranks.run(3, trained, name)
    states = 2 if name == "adamw" else 1
    for error, norms, held, total in found:
        assert error < 1e-12
        assert all(abs(a / b - 1) < 1e-12 for a, b in norms)
        assert held < states * total
    assert sum(rank[2] for rank in found) == states * found[0][3]
