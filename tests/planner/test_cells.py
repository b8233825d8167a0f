"""The map of tp × pp: every cell is the best common plan of its degrees, or has a true reason."""

import numpy as np
import pytest

from meshwright.planner.question import read
from meshwright.planner.search.branch_and_bound import Search
from meshwright.planner.search.cells import CLOSE, MEMORY, CellMap
from meshwright.planner.search.common_plans import HEADROOM, common_choices
from meshwright.planner.search.space import Space
from meshwright.predict.estimate import estimate


@pytest.fixture(scope="module", params=[("llama3-8b", "dgx-h100", 16, 32), ("llama2-13b", "dgx-a100", 16, 16)])
def found(request):
    model, cluster, gpus, batch = request.param
    space = read(model, cluster, gpus=gpus, batch=batch).space()
    plans = CellMap(space)
    return space, plans.first, plans.complete


def test_each_cell_is_as_fast_as_every_common_plan(found):
    space, _, last = found
    few = Space(space.config, common_choices(space.choices, space))
    limit = space.cluster.accelerator.memory * (1 - HEADROOM)
    search, best = Search(few, limit), {}
    for rows in few.plans(4096):
        costed = search.cost(rows)
        for k in np.flatnonzero(costed.memory <= limit):
            pair = int(costed.tp[k]), int(costed.pp[k])
            best[pair] = min(best.get(pair, np.inf), float(costed.estimate[k]))
    assert {(c.tp, c.pp) for c in last if c.fits} == set(best)
    for cell in last:
        if cell.fits and cell.pp == 1:  # without a pipeline the simulated time is the costed one
            assert cell.best.time <= best[cell.tp, cell.pp] * (1 + 2 * CLOSE)


def test_the_first_map_has_the_same_cells_and_is_never_faster(found):
    _, first, last = found
    assert [(c.tp, c.pp) for c in first] == [(c.tp, c.pp) for c in last]
    for a, b in zip(first, last, strict=True):
        if a.fits and a.pp == 1:
            assert b.best.time <= a.best.time * (1 + 1e-9)


def test_the_leaders_of_the_first_map_are_near_the_best_of_the_complete_one():
    """The first answer of a search is drawn from them: it must not send the reader elsewhere, and its times are simulated ones."""
    plans = CellMap(read("llama3-70b", "dgx-h100", gpus=64, batch=64).space())
    outcome, ranking = plans.leaders
    first = outcome.costed
    best = min(cell.best.time for cell in plans.complete if cell.fits)
    assert ranking.fastest.time <= 1.05 * best
    assert first < plans.search.costed
    config = plans.space.config.but(plan=ranking.fastest.plan)
    assert ranking.fastest.time == pytest.approx(estimate(config).walked.time, rel=2e-3)


def test_a_first_map_without_a_plan_that_fits_has_no_leaders():
    assert CellMap(read("llama3.1-405b", "dgx-h100", gpus=8, batch=8).space()).leaders is None


def test_cells_without_a_plan_have_a_reason(found):
    space, _, last = found
    for cell in last:
        assert cell.fits != bool(cell.reason)
        if cell.code == MEMORY:
            assert cell.best.memory > space.cluster.accelerator.memory * (1 - HEADROOM)
        if cell.best is not None:
            cell.best.plan.check(space.model, space.workload, space.cluster, space.stack)
    by_pair = {(c.tp, c.pp): c for c in last}
    assert by_pair[16, 16].reason == f"tp 16 × pp 16 = 256 does not divide {space.cluster.world} GPUs"


def test_heads_that_do_not_divide_are_the_reason():
    space = read("gpt3-175b", "dgx-a100", gpus=64, batch=64).space()
    (cell,) = [c for c in CellMap(space).first if (c.tp, c.pp) == (64, 1)]
    assert cell.code == "MW-PLAN-004"
    assert "96 attention heads" in cell.reason


def test_what_a_framework_cannot_run_is_the_reason():
    """Megatron-LM of 2021 divides layers evenly over stages: four stages of six layers have no plan, and no search is needed to say so."""
    space = read("tiny", "dgx-h100", gpus=8, batch=64, seq=1024, stack="megatron-lm").space()
    reasons = {(c.tp, c.pp): c.reason for c in CellMap(space).complete}
    assert "6 layers of tiny do not divide over pp" in reasons[1, 4]
