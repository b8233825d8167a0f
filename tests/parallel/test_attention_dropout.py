"""Dropout of attention probabilities is the same on every layout, and tiles equal the formula."""

from functools import cache

import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.models.attention import AttentionRule, Geometry
from meshwright.models.dropout import Dropped, Probabilities, runs_in, sample_hashes
from meshwright.models.step_context import within
from meshwright.parallel.context import blocks
from meshwright.parallel.context import sequence as context
from meshwright.parallel.context.attend import tiled_attention
from meshwright.proof.compare import compare
from meshwright.proof.records import Job
from meshwright.proof.trace import record

SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 32, "attention_dropout": 0.3}
LATENT = {"attention": "mla", "kv_heads": 0, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
MODELS = {
    "gqa": Model(**SHAPE),
    "window": Model(**SHAPE, window=3),
    "mla": Model(**{**SHAPE, **LATENT}, dropout_rate=0.1),
}
WORKLOAD = Workload(batch=4, seq=16)
LAYOUTS = [
    ("gqa", {"tp": 2, "cp": 2, "recompute": "full"}),
    *ranks.soak([("gqa", {"cp": 2, "tp": 2, "cp_kind": "ulysses", "recompute": "selective"})]),
    *ranks.soak([("window", {"cp": 2, "replicate": 2, "cp_kind": "all-gather", "microbatch": 2})]),
    ("mla", {"tp": 2, "pp": 2, "sp": True, "recompute": "selective"}),
]


@cache
def one_device(name):
    job = Job(MODELS[name], Plan(microbatch=4), WORKLOAD, steps=2, dtypes=("fp64",))
    return ranks.run(1, record, job)[0]["fp64"]


@pytest.mark.parametrize(("name", "fields"), LAYOUTS)
def test_every_layout_drops_the_same_as_one_device(name, fields):
    plan = Plan(**fields)
    job = Job(MODELS[name], plan, WORKLOAD, steps=2, dtypes=("fp64",))
    agreement = compare(one_device(name), [rank["fp64"] for rank in ranks.run(plan.world, record, job)])
    assert not agreement.breaks, agreement.breaks[:2]
    kept = Job(MODELS[name].but(attention_dropout=0.0), Plan(microbatch=4), WORKLOAD, steps=1, dtypes=("fp64",))
    if fields == LAYOUTS[0][1]:  # and it does drop
        assert abs(ranks.run(1, record, kept)[0]["fp64"].losses[0] - one_device(name).losses[0]) > 1e-4


def random(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("window", "causal", "rate", "more"),
    [(0, True, 0.4, {}), (3, True, 0.4, {}), (0, False, 0.4, {}), (3, True, 0.0, {}), (0, True, 0.0, {"softcap": 0.5}),
     (5, True, 0.4, {"softcap": 0.5, "chunked": True}), (5, False, 0.0, {"softcap": 0.5, "chunked": True})],
)  # fmt: skip
def test_tiles_equal_the_formula(window, causal, rate, more, sinks, monkeypatch):
    """Grouped queries, with a scale of the scores that is not 1/√D; a tile of a few rows."""
    monkeypatch.setattr(blocks, "TILE", 2 * 4 * 16 * 3)
    geometry = Geometry(Model(**SHAPE, causal=causal))
    rule = AttentionRule(
        window, 0.7, dropped=Dropped(torch.tensor([11, 12]), range(4, 8), rate) if rate else None, **more
    )
    results = []
    for attend in (
        lambda *x: geometry.attend_whole(*x, rule),
        lambda q, k, v, z: tiled_attention(q, k, v, context.pattern_of(geometry, rule, 16), rule.dropped, z),
    ):
        parts = [random(2, n, 16, 8, seed=i) for i, n in enumerate((4, 2, 2))]
        parts.append(random(2, 4, 16, seed=4) if sinks else None)
        output = attend(*parts)
        output.backward(random(2, 4, 16, 8, seed=9).detach())
        results.append([output.detach(), *(x.grad for x in parts if x is not None)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_each_probability_has_a_different_random_number():
    module = Probabilities(0.25, "layers.0.probabilities")
    with within(samples_B=sample_hashes(3, 7, range(2, 5), torch.device("cpu"))):
        whole = module(torch.empty(3, 4, 64, 8))
        module.share = (1, 2)
        half = module(torch.empty(3, 2, 64, 8))
    places = torch.arange(64)
    factor = whole.factor(places, places, torch.float64)
    assert factor.unique().tolist() == pytest.approx([0, 4 / 3])
    assert factor.mean() == pytest.approx(1, abs=4 * (1 / 3 / factor.numel()) ** 0.5)
    rows = factor.flatten(0, 2)
    assert len(rows.unique(dim=0)) == len(rows)  # of every sample, head and query
    assert torch.equal(half.factor(places, places, torch.float64), factor[:, 2:])
    assert torch.equal(whole.part(1, 4).factor(places, places, torch.float64), factor[:, 1:2])
    some = torch.tensor([1, 2, 3, 5, 9, 10, 63])
    assert [list(run) for run in runs_in(some)] == [[1, 2, 3], [5], [9, 10], [63]]
    assert torch.equal(whole.factor(some, some, torch.float64), factor[:, :, some][..., some])
    assert module.eval()(torch.empty(3, 2, 64, 8)) is None
