"""Stages with unequal numbers of layers: the divisions are the best there are, and the planner takes them where they pay."""

from itertools import combinations

import numpy as np
import pytest

from meshwright.describe import legality
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.planner.search.leaders import TIE, solve
from meshwright.planner.search.stage_lengths import balanced, block_seconds, filled, simulated, slowest_rank
from meshwright.predict.estimate import estimate
from planner.spaces import DENSE, MOE, space

SIZES = {"hidden": 2048, "heads": 16, "vocab": 131072}  # large enough that kernels outlast their launches
HEAVY = DENSE.but(**SIZES, kv_heads=8, ffn=8192)  # its head costs as much as four layers
EXPERTS = MOE.but(**SIZES, ffn=8192, expert_ffn=4096, layers=8)


def heavy(model=HEAVY, gpus=4, **words):
    return space(model, gpus, 16, seq=2048, **words)


def divisions(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every division of layers into stages of one layer or more."""
    edges = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    return [tuple(np.diff(e).tolist()) for e in edges]


@pytest.mark.parametrize("seed", range(12))
def test_no_division_has_a_shorter_longest_stage(seed):
    rng = np.random.default_rng(seed)
    layers, stages = int(rng.integers(3, 9)), int(rng.integers(2, 4))
    kinds = rng.uniform(1, 3, 2)  # layers of two kinds, as in a model whose first layers are dense
    seconds = (rng.uniform(0, 2), *kinds[np.sort(rng.integers(0, 2, layers))], rng.uniform(0, 6))
    plan = Plan(pp=stages)
    times = {d: slowest_rank(plan.but(layers_per_stage=d), seconds) for d in divisions(layers, stages)}
    found = balanced(seconds, stages)
    assert times[found] == pytest.approx(min(times.values()), rel=1e-12)
    most = tuple(rng.integers(1, layers, stages).tolist())
    fitting = [time for d, time in times.items() if all(n <= m for n, m in zip(d, most, strict=True))]
    found = balanced(seconds, stages, most)
    assert bool(found) == bool(fitting)
    assert not fitting or times[found] == pytest.approx(min(fitting), rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("interleaved", 2), ("interleaved", 3), ("zbv", 2), ("dualpipev", 2)]
)
@pytest.mark.parametrize("head", [0.3, 1.2, 4.0])
def test_no_division_of_equal_layers_has_a_shorter_slowest_rank(schedule, virtual, head):
    plan, seconds = Plan(pp=2, virtual=virtual, schedule=schedule), (0.2, *[1.0] * 9, head)
    times = [slowest_rank(plan.but(layers_per_stage=d), seconds) for d in divisions(9, plan.stages)]
    found = filled(plan, seconds)
    assert sum(found) == 9
    assert slowest_rank(plan.but(layers_per_stage=found), seconds) == pytest.approx(min(times), rel=1e-12)


PIPED = {"fix": ["microbatch=1"], "without": ["reorder", "recompute", "cp", "sp"], "least": ["pp=2"]}


def problem(name):
    """A small problem with a pipeline. In `experts` the best plan is one of which the usual division is slower than other plans by 10%."""
    if name == "experts":
        return space(MOE, 4, 8, fix=["pp=2", "microbatch=2", "tp=1"], without=["reorder", "recompute", "cp"])
    schedule, gpus = name
    return heavy(gpus=gpus, **{**PIPED, "fix": [*PIPED["fix"], f"schedule={schedule}"]})


@pytest.mark.parametrize(
    "name",
    [("1f1b", 4), ("zb-h1", 4), *(pytest.param(name, marks=pytest.mark.slow) for name in (("zb-h2", 8), "experts"))],
)
def test_the_winner_is_within_one_percent_of_every_division_of_every_plan(name):
    where = problem(name)
    _, ranking = solve(where)
    best = np.inf
    for rows in where.plans():
        for i in range(len(rows)):
            plan = where.plan(rows, i)
            tried = [plan.but(layers_per_stage=d) for d in divisions(where.model.layers, plan.stages)]
            times = [estimate(where.config.but(plan=p)).walked.time for p in tried]
            best = min(best, *times)
    assert ranking.best.plan.layers_per_stage
    assert ranking.fastest.time <= best * (1 + 1e-3)
    assert ranking.best.time <= best * (1 + TIE) * (1 + 1e-3)


@pytest.mark.parametrize(("model", "gpus"), [(HEAVY, 8), (EXPERTS, 4)])
def test_a_lighter_last_stage_wins_where_the_head_is_heavy(model, gpus):
    where = heavy(model, gpus, least=["pp=2"], without=["reorder", "recompute"])
    _, ranking = solve(where)
    _, even = solve(heavy(model, gpus, least=["pp=2"], without=["reorder", "recompute", "uneven"]))
    assert ranking.fastest.time < 0.97 * even.fastest.time
    assert not any(c.plan.layers_per_stage for c in even.leaders)
    uneven = [c for c in ranking.leaders if c.plan.layers_per_stage]
    assert uneven
    for c in uneven[:3]:
        assert c.plan.layers_per_stage[-1] < max(c.plan.layers_per_stage)
        legality.check(c.plan, where.model, where.workload, where.cluster, where.stack, trainer=True, dtypes=True)
        e = estimate(where.config.but(plan=c.plan))
        assert e.walked.time == pytest.approx(c.time, rel=2e-3)
        assert e.prediction.memory_gib * 2**30 == pytest.approx(c.memory, rel=1e-9)


def test_a_division_that_does_not_fit_or_is_no_faster_is_left_out():
    words = {**PIPED, "fix": [*PIPED["fix"], "schedule=1f1b"]}
    where = heavy(**words)
    _, ranking = solve(heavy(**{**words, "without": [*PIPED["without"], "uneven"]}))
    c = ranking.fastest
    (seconds,) = block_seconds(where, [c.plan])
    lighter = c.plan.but(layers_per_stage=balanced(seconds, c.plan.stages))
    worst = c.plan.but(layers_per_stage=(*[1] * (c.plan.stages - 1), where.model.layers - c.plan.stages + 1))
    assert len(simulated(where, [(c, lighter)], np.inf)) == 1
    assert not simulated(where, [(c, lighter)], 1.0)
    assert not simulated(where, [(c, worst)], np.inf)


def test_a_division_that_fits_is_found_where_equal_stages_do_not_fit():
    """The first of four 1F1B stages keeps four micro-batches. With a little less memory than equal stages need, one with fewer layers there fits."""
    model = DENSE.but(hidden=1024, heads=16, kv_heads=16, ffn=4096, layers=12)
    words = {
        "fix": ["pp=4", "microbatch=1", "schedule=1f1b"],
        "without": ["reorder", "cp", "sp", "recompute", "offload"],
    }
    _, even = solve(space(model, 4, 16, seq=2048, **{**words, "without": [*words["without"], "uneven"]}))
    memory = f"{0.95 * even.fastest.memory / 2**20:.3f}MiB"
    where = space(model, 4, 16, seq=2048, memory=memory, **words)
    limit = where.cluster.accelerator.memory
    fitting = []
    for d in divisions(model.layers, 4):
        e = estimate(
            Config(model, where.cluster, even.fastest.plan.but(layers_per_stage=d), where.workload, where.stack)
        )
        if e.prediction.memory_gib * 2**30 <= limit:
            fitting.append(e.walked.time)
    _, ranking = solve(where)
    assert (
        solve(space(model, 4, 16, seq=2048, memory=memory, **{**words, "without": [*words["without"], "uneven"]}))[1]
        is None
    )
    assert ranking.best.plan.layers_per_stage
    assert ranking.best.memory <= limit
    assert ranking.best.time <= min(fitting) * (1 + TIE)
