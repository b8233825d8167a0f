"""Offload is searched where nothing else fits or only much slower plans do; its bounds hold, and it never wins a tie."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from meshwright import planner
from meshwright.describe import catalog, legality
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.search import bounds
from meshwright.planner.search.branch_and_bound import Search, search
from meshwright.planner.search.choices import choices, read
from meshwright.planner.search.leaders import OFFLOAD_WORTH, candidates, memory_slows, offloads, solve
from meshwright.planner.search.space import Space, join
from meshwright.predict.estimate import estimate
from planner.spaces import DENSE, MOE, space
from ranks import soak

KINDS = ("states", "activations", "both")
FEW = {"without": ["reorder", "cp", "hsdp"]}  # fewer plans, to cost every one
PROBLEMS = {"dense": (DENSE, "default"), "experts": (MOE, "default"), "flat": (DENSE, "megatron-core")}
CASES = [("dense", "states"), ("experts", "both"), ("flat", "states"), *soak([("dense", "activations")])]


def offloading(where: Space, kind: str) -> Space:
    base = Plan(offload=kind)
    return Space(where.config.but(plan=base), where.choices, where.bucket)


@cache
def problem(name: str) -> Space:
    model, stack = PROBLEMS[name]
    return space(model, 4, 8, stack=stack, **FEW)


@cache
def frames_of(name: str):
    return search(problem(name)).frames


@cache
def every_plan(name: str, kind: str):
    where = offloading(problem(name), kind)
    one = Search(where, np.inf)
    return join([one.cost(part) for part in where.plans(8192)])


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_search_below_a_time_finds_what_costing_every_plan_finds(name, kind):
    where, rows = problem(name), every_plan(name, kind)
    limit = float(np.quantile(rows.memory, 0.3))
    frames = frames_of(name)
    fitting = rows.take(rows.memory <= limit)
    enough = 1.05 * float(fitting.high.min())
    there = offloading(where, kind)
    found = Search(there, limit).run_below(bounds.reused(there, frames, enough), enough, 10**9)
    assert found.rows.time.min() == pytest.approx(fitting.time.min(), rel=1e-12)
    close = float(found.incumbents.front[0]) * (1 + 1e-9)
    assert (found.rows.time <= close).sum() == (fitting.time <= close).sum()
    whole = Search(there, limit).run()
    assert whole.rows.time.min() == pytest.approx(fitting.time.min(), rel=1e-12)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_plan_that_offloads_beats_the_bounds_of_its_frame(name, kind):
    where, rows = offloading(problem(name), kind), every_plan(name, kind)
    frames = bounds.reused(where, frames_of(name))
    keys = ("tp", "cp", "pp", "dp", "ep", "expert_tp", "recompute", "sp", "cp_kind")
    best = {}
    for i, key in enumerate(zip(*(rows.columns[k].tolist() for k in keys), strict=True)):
        time, memory = best.get(key, (np.inf, np.inf))
        best[key] = min(time, rows.low[i]), min(memory, rows.memory[i])
    for i, key in enumerate(zip(*(frames.columns[k].tolist() for k in keys), strict=True)):
        time, memory = best[key]
        assert frames.time[i] <= time * (1 + 1e-9)
        assert frames.memory[i] <= memory * (1 + 1e-9)


def tight(*excluded: str) -> Space:
    """A problem in which plans fit with offload only."""
    least = [float(every_plan("dense", kind).memory.min()) for kind in ("none", "states")]
    memory = f"{(least[0] * least[1]) ** 0.5:.0f}B"
    return space(DENSE, 4, 8, memory=memory, without=[*FEW["without"], *excluded])


def test_offload_wins_where_nothing_else_fits():
    where = tight()
    found, ranking = solve(where)
    assert not len(found.rows)
    best = ranking.best
    assert best.plan.offload in KINDS
    assert all(c.plan.offload != "none" for c in ranking.leaders)
    assert best.memory <= where.cluster.accelerator.memory
    legality.check(best.plan, where.model, where.workload, where.cluster, where.stack, trainer=True, dtypes=True)
    e = estimate(where.config.but(plan=best.plan))
    assert e.prediction.memory_gib * 2**30 == pytest.approx(best.memory, rel=1e-9)
    assert e.prediction.step_time_s == pytest.approx(best.time, rel=0.02)
    assert solve(tight("offload"))[1] is None
    unable = where.stack.but(offloads=())
    assert solve(Space(where.config.but(stack=unable), where.choices))[1] is None


def test_offload_is_not_searched_where_the_question_or_the_stack_decides():
    where = problem("dense")
    assert offloads(where) == list(KINDS)
    assert offloads(offloading(where, "states")) == []
    assert offloads(problem("flat")) == []
    options = choices(Plan(), read(without=["offload"]), tuple(where.stack.order))
    assert offloads(Space(where.config, options)) == []
    deepspeed = catalog.load("stacks", "megatron-deepspeed")
    assert offloads(Space(where.config.but(stack=deepspeed))) == ["states"]


@pytest.mark.slow
def test_offload_needs_a_clear_gain():
    """With memory to spare no plan offloads; where it does, every plan without it is at least a tenth slower."""
    _, ranking = solve(problem("dense"))
    assert all(c.plan.offload == "none" for c in ranking.leaders)
    question = {"gpus": 4, "batch": 64, "seq": 1024}
    r = planner.plan("llama3-8b", "workstation-4x3090", **question)
    assert r.plan.offload in ("states", "both")
    without = [c.time for c in r.ranking.leaders if c.plan.offload == "none"]
    assert all(time >= r.ranking.fastest.time * (1 + OFFLOAD_WORTH) for time in without)
    assert "offload" in r.explanation.reasons
    for excluded in ({"without": ["offload"]}, {"settings": ["plan.offload=none"]}):
        with pytest.raises(MeshwrightError, match="MW-PLANNER-005"):
            planner.plan("llama3-8b", "workstation-4x3090", **question, **excluded)


def test_offload_is_not_searched_where_memory_is_not_short():
    where = problem("dense")
    found = search(where)
    fitting = candidates(where, found)
    assert not memory_slows(found, fitting)
    assert memory_slows(found, [])
    recomputed = [replace(c, plan=c.plan.but(recompute="full")) for c in fitting]
    assert memory_slows(found, recomputed)
    found.incumbents.front[2:] = 1.2 * found.incumbents.front[0]
    assert memory_slows(found, fitting)
    found.incumbents.front[2] = found.incumbents.front[0]
    assert not memory_slows(found, fitting)
