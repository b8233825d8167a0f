"""Small copies: legal, small, and with every flag and axis of the original."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.proof.fold import AXES, fold, shrink, small_copy

FLAGS = (
    "kind",
    "activation",
    "tied",
    "positions",
    "norm",
    "norms_per_layer",
    "final_norm",
    "embedding_norm",
    "qk_norm",
    "qkv_bias",
    "out_bias",
    "ffn_bias",
    "causal",
    "full_every",
)
DENSE = [
    n
    for n in catalog.names("models")
    if not catalog.load("models", n).experts and catalog.load("models", n).kind != "counts"
]


@given(
    name=st.sampled_from(DENSE),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 8]),
    dp=st.sampled_from([1, 4, 64]),
    zero=st.sampled_from([0, 1, 3]),
    sp=st.booleans(),
    accumulation=st.sampled_from([1, 8]),
    schedule=st.sampled_from([("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("interleaved", 4)]),
)
def test_a_small_copy_is_legal_and_faithful(name, tp, pp, dp, zero, sp, accumulation, schedule):
    model = catalog.load("models", name)
    if model.kind == "transformer" and model.kv_groups % tp:
        tp = 1
    axis = {"shard": dp, "zero": zero} if zero else {"replicate": dp}
    words = {"schedule": schedule[0], "virtual": schedule[1]} if pp > 1 else {}
    plan = {"tp": tp, "sp": sp and model.kind == "transformer", "pp": pp, **axis, **words}
    try:
        config = Config.from_parts(name, "dgx-h100", workload={"batch": dp * accumulation * pp, "seq": 64}, plan=plan)
        config.plan.check(config.model, config.workload)
    except MeshwrightError:
        return  # not a legal plan to begin with
    small = small_copy(config, ranks=8)
    small.plan.check(small.model, small.workload)
    assert small.plan.world <= 8
    for axis_name in AXES:
        assert (getattr(small.plan, axis_name) > 1) == (getattr(config.plan, axis_name) > 1)
    assert all(getattr(small.model, flag) == getattr(model, flag) for flag in FLAGS)
    assert (small.model.kv_groups < small.model.heads) == (model.kv_groups < model.heads)
    assert small.plan.schedule == config.plan.schedule
    assert (small.plan.virtual > 1) == (config.plan.virtual > 1)
    assert small.model.total < 1_000_000
    if pp == 1:
        accumulates = config.plan.microbatches(config.workload) > 1
        assert (small.plan.microbatches(small.workload) > 1) == accumulates


def test_what_fits_is_kept_as_it_is():
    plan = Plan(tp=4, replicate=2)
    folded, changes = fold(plan, 8)
    assert (folded.tp, folded.replicate, changes) == (4, 2, [])


def test_too_many_axes_ask_for_more_ranks():
    plan = Plan(replicate=2, shard=4, zero=3, tp=8, pp=4)
    with pytest.raises(MeshwrightError, match="MW-VERIFY-001") as error:
        fold(plan, 8)
    assert error.value.fix == "--ranks 16"
    assert fold(plan, 16)[0].world == 16


@pytest.mark.parametrize(("asked", "folded", "kv_heads"), [(16, 2, 1), (16, 4, 2), (64, 4, 1), (8, 2, 4)])
def test_fewer_kv_heads_than_ranks_stay_fewer(asked, folded, kv_heads):
    model = Model(hidden=512, layers=2, heads=64, kv_heads=8, ffn=512, vocab=64)
    assert shrink(model, Plan(tp=folded), Plan(tp=asked)).kv_heads == kv_heads


def test_what_is_uneven_stays_uneven():
    model = Model(hidden=64, layers=5, heads=8, ffn=100, vocab=51)
    plan = Plan(pp=2, tp=2)
    tiny = shrink(model, plan, plan)
    assert tiny.layers % 2 == 1
    assert tiny.padded_vocab % 2 == 1


def test_said_layers_per_stage_shrink_with_their_shape():
    plan = {"pp": 2, "layers_per_stage": (20, 60)}
    config = Config.from_parts("llama3-70b", "dgx-h100", workload={"batch": 8, "seq": 64}, plan=plan)
    small = small_copy(config, 8)
    assert small.plan.layers_per_stage == (1, 2)
    assert small.model.layers == 3


def test_what_automatic_recompute_comes_to_is_told():
    made = Config.from_parts("nano", "laptop", "gloo-cpu", {"batch": 4}, {"tp": 2, "recompute": "auto"})
    assert any(change.startswith("recompute auto comes to none") for change in small_copy(made, 2).changes)


def test_recompute_and_offload_are_exercised():
    plan = {"tp": 2, "recompute": "full", "offload": "states", "param_dtype": "bf16"}
    config = Config.from_parts("llama3-8b", "dgx-h100", workload={"batch": 8, "seq": 64}, plan=plan)
    small = small_copy(config, 8)
    assert small.plan.recompute == "full"
    assert small.plan.offload == "states"
