"""Small copies: legal, small, and with every flag and axis of the original."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.describe import catalog, legality
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.models.attention import frequencies
from meshwright.proof.fold import AXES, axis_sizes, folds
from meshwright.proof.small import UNSAID, shrink, small_copies, small_copy, small_seq

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
        legality.check(config.plan, config.model, config.workload, trainer=True)
    except MeshwrightError:
        return  # not a plan that can be trained to begin with
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
        assert small.plan.microbatches(small.workload) == min(6, config.plan.microbatches(config.workload))
    else:
        count = small.plan.microbatches(small.workload)
        assert count >= max(6, 2 * small.plan.pp)
        assert count % small.plan.pp
    check_changes(config, small)


def check_changes(config, small):
    """Every field of a section is equal, or the changes name it."""
    words = set(re.findall(r"[\w.]+", " ".join(small.changes)))
    for section in ("model", "workload", "plan", "optimizer"):
        before, after = getattr(config, section), getattr(small, section)
        for name in type(before).model_fields:
            listed = any(name in word.split(".")[:2] for word in words)
            if getattr(before, name) != getattr(after, name) and name not in UNSAID:
                assert listed, (section, name, getattr(before, name), getattr(after, name))


LARGE = {
    "tp": 16,
    "sp": True,
    "cp": 8,
    "pp": 4,
    "virtual": 4,
    "schedule": "interleaved",
    "replicate": 2,
    "microbatch": 4,
}
LOCAL = {"replicate": 8, "average_every": 7, "recompute": "full", "recompute_layers": 3, "bucket": 1e6}
EXPERTS = {"shard": 64, "zero": 3, "ep": 8, "recompute": "selective", "comm_dtype": "bf16", "overlap": ("dp",)}
SCHEDULE = {"schedule": "cosine", "betas": (0.9, 0.99), "scale_with_width": 256, "ema": 0.99}


@pytest.mark.parametrize(
    ("model", "plan", "optimizer"),
    [
        ("llama3-8b", LARGE, SCHEDULE),
        ("qwen3-8b", LOCAL, {}),
        ("deepseek-v3", EXPERTS, {}),
        ("gemma2-9b", {"cp": 16}, {}),
    ],
)
def test_the_changes_of_a_copy_are_complete(model, plan, optimizer):
    work = {"batch": 1024, "seq": 4096}
    config = Config.from_parts(model, "dgx-h100", workload=work, plan=plan, optimizer=optimizer)
    copies = small_copies(config, 32 if plan is LARGE else 8)
    for small in copies:
        check_changes(config, small)
    assert max(copy.plan.virtual for copy in copies) == min(3, config.plan.virtual)
    assert max(copy.plan.average_every for copy in copies) == min(4, config.plan.average_every)
    assert max(copy.plan.cp for copy in copies) == min(8, config.plan.cp)
    for copy in copies:
        if copy.plan.cp > 1:
            assert copy.workload.seq >= 4 * 2 * copy.plan.cp


def sizes(plan, ranks):
    return [axis_sizes(folded) for folded in folds(Plan(**plan), ranks)]


def test_a_plan_that_fits_is_not_folded():
    plan = Plan(tp=4, replicate=2)
    assert folds(plan, 8) == [plan]


def test_too_many_axes_need_more_ranks():
    plan = Plan(replicate=2, shard=4, zero=3, tp=8, pp=4)
    with pytest.raises(MeshwrightError, match="MW-VERIFY-001") as error:
        folds(plan, 8)
    assert error.value.fix == "--ranks 16"
    assert folds(plan, 16)[0].world == 16


def test_each_axis_is_folded_to_four_in_a_separate_copy():
    assert sizes({"cp": 16}, 8) == [{"cp": 8}]
    assert sizes({"cp": 16, "replicate": 2}, 8) == [{"replicate": 2, "cp": 4}, {"cp": 8}]
    assert sizes({"cp": 16}, 4) == [{"cp": 4}]
    assert sizes({"tp": 8, "pp": 16}, 8) == [{"tp": 4, "pp": 2}, {"tp": 2, "pp": 4}]
    assert sizes({"tp": 8, "pp": 16}, 4) == [{"tp": 2, "pp": 2}, {"tp": 4}, {"pp": 4}]
    assert sizes({"tp": 8, "pp": 4, "replicate": 16}, 8) == [
        {"replicate": 2, "tp": 2, "pp": 2},  # all axes together
        {"replicate": 4, "tp": 2},
        {"tp": 4, "pp": 2},
        {"replicate": 2, "pp": 4},
    ]
    assert sizes({"replicate": 3, "tp": 4}, 8) == [{"replicate": 3, "tp": 2}, {"replicate": 2, "tp": 4}]


def test_experts_are_spread_over_four_and_copied():
    assert sizes({"shard": 64, "zero": 3, "ep": 8}, 8) == [{"shard": 4, "ep": 2}, {"shard": 4, "ep": 4}]
    assert sizes({"shard": 8, "zero": 3, "ep": 8, "tp": 2, "expert_tp": 2}, 8) == [{"shard": 4, "tp": 2, "ep": 4}]


def test_copies_report_folded_axes_and_micro_batches():
    plan = {"cp": 4, "replicate": 4, "microbatch": 1}
    config = Config.from_parts("llama3-8b", "dgx-h100", workload={"batch": 32, "seq": 64}, plan=plan)
    first, second = small_copies(config, 8)
    assert first.folded == {"cp": (4, 2)}
    assert second.folded == {"replicate": (4, 2)}
    assert first.changes[0] == "folded: cp 4 → 2"
    assert first.microbatches == (8, 6)
    assert "6 micro-batches instead of 8" in first.changes


@pytest.mark.parametrize(("asked", "folded", "kv_heads"), [(16, 2, 1), (16, 4, 2), (64, 4, 2), (8, 2, 4)])
def test_fewer_kv_heads_than_ranks_stay_fewer(asked, folded, kv_heads):
    model = Model(hidden=512, layers=2, heads=64, kv_heads=8, ffn=512, vocab=64)
    assert shrink(model, Plan(tp=folded), Plan(tp=asked)).kv_heads == kv_heads


def test_uneven_sizes_stay_uneven():
    model = Model(hidden=64, layers=5, heads=8, ffn=100, vocab=51)
    plan = Plan(pp=2, tp=2)
    tiny = shrink(model, plan, plan)
    assert tiny.layers % 2 == 1
    assert tiny.padded_vocab % 2 == 1


ROPES = [
    {"kind": "dynamic", "factor": 4.0},
    {"kind": "yarn", "factor": 4.0, "original_positions": 4096},
    {
        "kind": "longrope",
        "factor": 4.0,
        "original_positions": 4096,
        "short_factor": (1.0,) * 16,
        "long_factor": (2.0,) * 16,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["kind"])
def test_scaled_rotary_positions_and_windows_stay_in_the_small_copy(rope):
    """The sequence of the copy is longer than the original positions, and it has a layer with a window and one without."""
    model = Model(
        hidden=512,
        layers=8,
        heads=8,
        ffn=512,
        vocab=99,
        max_positions=16384,
        rope=rope,
        rope_dim=32,
        window=64,
        full_layers=(6, 7),
    )
    plan = Plan(tp=2)
    tiny = shrink(model, plan, plan)
    assert tiny.rope.kind == rope["kind"]
    assert tiny.rotated_width == 4
    seq = small_seq(plan)
    assert not torch.equal(frequencies(tiny, seq), frequencies(tiny.but(rope={}), seq))
    assert {tiny.sees_all(i) for i in range(tiny.layers)} == {True, False}


def test_layers_per_stage_shrink_and_stay_uneven():
    plan = {"pp": 2, "layers_per_stage": (20, 60)}
    config = Config.from_parts("llama3-70b", "dgx-h100", workload={"batch": 8, "seq": 64}, plan=plan)
    small = small_copy(config, 8)
    assert small.plan.layers_per_stage == (1, 2)
    assert small.model.layers == 3


def test_the_choice_of_automatic_recompute_is_shown():
    made = Config.from_parts("nano", "laptop", "gloo-cpu", {"batch": 4}, {"tp": 2, "recompute": "auto"})
    assert any(change.startswith("recompute auto is none") for change in small_copy(made, 2).changes)


def test_recompute_and_offload_are_exercised():
    plan = {"tp": 2, "recompute": "full", "offload": "states", "param_dtype": "bf16"}
    config = Config.from_parts("llama3-8b", "dgx-h100", workload={"batch": 8, "seq": 64}, plan=plan)
    small = small_copy(config, 8)
    assert small.plan.recompute == "full"
    assert small.plan.offload == "states"
