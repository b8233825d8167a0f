"""Which rank computes Muon's update of which matrix: all ranks agree, every element has a place, and the work is divided evenly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import boxes, degrees_of, matrices, newton_schulz_flops
from meshwright.describe.sharding.boxes import assign, work

DENSE = Model(hidden=32, layers=4, heads=4, kv_heads=2, ffn=48, vocab=64)
SPARSE = DENSE.but(experts=4, top_k=2, expert_ffn=24)


def by_rank(model, plan):
    layout = Layout(plan)
    d = degrees_of(model, plan)
    return [
        matrices(boxes(model, plan, layout, rank, range(model.layers)), d) for rank in range(plan.world)
    ]  # without a pipeline


@pytest.mark.parametrize(
    ("model", "plan", "cuts"),
    [
        (DENSE, {"replicate": 2}, {()}),
        (DENSE, {"shard": 4, "zero": 1}, {("shard_cp",)}),
        (DENSE, {"tp": 2}, {("tp",)}),
        (DENSE, {"tp": 2, "shard": 2, "cp": 2, "zero": 3}, {("shard_cp", "tp")}),
        (DENSE.but(kv_heads=1), {"tp": 2}, {("tp",), ()}),  # K and V are whole on every rank
        (DENSE, {"tp": 4}, {("tp",)}),
        (SPARSE, {"replicate": 2, "ep": 2}, {()}),
        (SPARSE, {"shard": 2, "zero": 1}, {("shard_cp",), ()}),  # ZeRO cuts between experts
        (SPARSE, {"shard": 8, "zero": 1}, {("shard_cp",), ("expert_shard",)}),  # more ranks than experts
        (SPARSE, {"shard": 2, "tp": 2, "zero": 2}, {("shard_cp", "tp"), ("expert_tp",)}),
    ],
)
def test_matrices_are_brought_together_over_the_axes_that_cut_them(model, plan, cuts):
    found = by_rank(model, Plan(**plan))
    assert {tuple(cut.axis for cut in m.cuts) for m in found[0]} == cuts
    for several in zip(*found, strict=True):
        assert len({(m.box.name, m.owner, m.cuts) for m in several}) == 1  # all ranks agree
        for cut, owner in zip(several[0].cuts, several[0].owner, strict=True):
            assert 0 <= owner < len(cut.ranges)
            covered = np.zeros(cut.length, bool)
            for start, stop in cut.ranges:
                covered[start:stop] = True
            assert covered.all()


@given(st.lists(st.floats(1, 100), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 4), st.randoms())
def test_the_work_is_divided_evenly(works, shards, tensor, random):
    """No rank has more than the mean and one matrix; of matrices cut over both axes no more than 4/3 of the best division (Graham 1969)."""
    owners = assign(works, [(True, True)] * len(works), (shards, tensor))
    load = np.zeros((shards, tensor))
    for amount, owner in zip(works, owners, strict=True):
        load[owner] += amount
    best = max(sum(works) / load.size, max(works))
    assert load.max() <= sum(works) / load.size + max(works) + 1e-9
    assert load.max() <= 2 * best
    on_axes = [random.choice([(True, True), (True, False), (False, True)]) for _ in works]
    for amount, owner, on in zip(works, assign(works, on_axes, (shards, tensor)), on_axes, strict=True):
        assert amount > 0
        assert all(place < size for place, size, is_cut in zip(owner, (shards, tensor), on, strict=True) if is_cut)


def test_the_work_of_a_matrix():
    assert newton_schulz_flops(100, 300) == newton_schulz_flops(300, 100) == 5 * (4 * 100**2 * 300 + 2 * 100**3)
    plan = Plan(shard=2, zero=1, tp=2)
    stack = next(m for m in by_rank(SPARSE, plan)[0] if m.box.expert)
    assert work(stack.box) == 4 * newton_schulz_flops(24, 32)  # four experts, before ZeRO
