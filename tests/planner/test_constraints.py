"""Any request gives a plan that meets its constraints or a clear error; never an exception or an empty table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.advice import bucket_for
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.infeasible import no_plan, none_fits
from meshwright.planner.search.choices import read
from meshwright.planner.search.leaders import solve
from meshwright.planner.search.space import Space
from meshwright.predict.estimate import estimate
from planner.spaces import MODELS, space

NUMBERS = ("dp", "replicate", "shard", "tp", "cp", "pp", "virtual", "ep", "expert_tp", "microbatch", "zero")
BOUND = st.tuples(st.sampled_from(NUMBERS), st.integers(1, 8)).map(lambda pair: f"{pair[0]}={pair[1]}")
WORDS = st.sampled_from(
    [
        "schedule=zbv",
        "schedule=interleaved",
        "schedule=gpipe",
        "recompute=full",
        "cp_kind=ulysses",
        "sp=true",
        "reshard=false",
        "order=dp,tp,cp,pp",
    ]
)
WITHOUT = st.sampled_from(
    [
        "tp",
        "pp",
        "cp",
        "ep",
        "dp",
        "zero",
        "zero3",
        "hsdp",
        "uneven",
        "sp",
        "recompute",
        "interleaved",
        "1f1b",
        "virtual",
    ]
)


@settings(max_examples=7)
@given(
    model=st.sampled_from(sorted(MODELS)),
    gpus=st.sampled_from([1, 2, 3, 4, 5]),
    batch=st.integers(1, 9),
    memory=st.sampled_from(["", "1.4GB"]),
    fix=st.lists(st.one_of(BOUND, WORDS), max_size=2),
    most=st.lists(BOUND, max_size=1),
    least=st.lists(BOUND, max_size=1),
    without=st.lists(WITHOUT, max_size=3),
)
def test_any_question_has_an_answer(model, gpus, batch, memory, fix, most, least, without):
    try:
        where = space(MODELS[model], gpus, batch, memory=memory, fix=fix, most=most, least=least, without=without)
    except MeshwrightError:
        return  # contradictory, or not a value
    assert bool(len(where.frames)) == bool(len(where))
    if not len(where):
        error = no_plan(where)
        assert error.code == "MW-PLANNER-004"
        assert error.fix
        return
    found, ranking = solve(where)
    if ranking is None:
        error = none_fits(where, found, 0.0)
        assert error.exit_code == 3
        assert "GiB" in error.what
        return
    plan = ranking.best.plan
    peak = estimate(where.config.but(plan=plan)).prediction.memory_gib * 2**30
    assert peak <= where.cluster.accelerator.memory
    assert all(plan.zero != 3 for word in without if word == "zero3")
    for word in (w for w in fix if w.startswith(("tp=", "pp=", "cp=", "dp=", "microbatch="))):
        name, value = word.split("=")
        assert getattr(plan, name) == int(value)


def test_a_batch_that_is_offered_has_plans():
    where = space(MODELS["dense"], 8, 6, fix=["dp=4", "pp=2", "schedule=interleaved"])
    offered = int(no_plan(where).fix.rpartition("--batch ")[2])
    assert len(space(MODELS["dense"], 8, offered, fix=["dp=4", "pp=2", "schedule=interleaved"]))


@pytest.mark.parametrize("words", [",", "", "tp,,pp"])
def test_an_empty_name_is_refused(words):
    with pytest.raises(MeshwrightError, match="MW-PLANNER-002: --without '' is not known"):
        read(without=[words])
    assert [c.value for c in read(without=["tp, pp,"])] == ["tp", "pp"]


def test_buckets_follow_the_group_and_the_leaders_try_others():
    where = space(MODELS["dense"], 8, 8, without=["pp", "tp", "cp"])
    free = Space(where.config, where.choices)
    fixed, own = solve(where)[1], solve(free)[1]
    assert fixed.best.plan.bucket == 25e6
    assert own.best.time <= fixed.best.time * (1 + 1e-9)
    sizes = bucket_for(where.cluster, np.array([2, 2000, 2_000_000]))
    assert sizes[0] == 25e6 < sizes[1] < sizes[2] == 4e9
    slow = estimate(where.config.but(plan=own.best.plan))
    assert slow.prediction.step_time_s == pytest.approx(own.best.time, rel=1e-9)
