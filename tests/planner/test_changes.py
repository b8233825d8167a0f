"""Single changes of a plan have the times and memory of `estimate`, and a pair is found where one change alone does not fit."""

import math

import pytest
from test_lint import config, overridden

from meshwright.describe.config import Config
from meshwright.describe.result import USABLE_MEMORY
from meshwright.lower.step import step_program
from meshwright.planner.advice.changes import Change, both, candidates, first_changes, priced, seconds_of
from meshwright.predict import prediction
from meshwright.predict.estimate import estimate
from meshwright.predict.prediction import peak, recomputing

WIDE = config("llama3-8b", "dgx-h100", 64, 128, 8192, tp=8, sp=True, pp=2, shard=4, zero=1, recompute="full")
EXPERTS = config("mixtral-8x7b", "dgx-h100", 64, 512, tp=2, sp=True, shard=32, zero=1, ep=8, recompute="full")


def same_as_estimate(c: Config, change: Change) -> None:
    prediction = estimate(overridden(c, change.fix)).prediction
    assert change.step_time_s == pytest.approx(prediction.step_time_s, rel=1e-9)
    assert change.memory_gib == pytest.approx(prediction.memory_gib, rel=1e-9)
    assert change.saves_s == pytest.approx(estimate(c).prediction.step_time_s - prediction.step_time_s, rel=1e-4)


@pytest.mark.parametrize("c", [WIDE, EXPERTS])
def test_a_chip_shows_what_estimate_says(c: Config) -> None:
    changes = priced(c, candidates(c, c.plan))
    assert {"tp", "pp", "zero", "microbatch", "recompute", "schedule"} <= {change.fields[0][0] for change in changes}
    legal = [change for change in changes if change.plan]
    for change in legal[:: len(legal) // 12]:
        same_as_estimate(c, change)


def test_changes_of_an_automatic_recompute_have_the_fewest_layers_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    monkeypatch.setattr(prediction, "step_program", lambda *a, **k: batches.append(a) or step_program(*a, **k))
    c = config("llama3-70b", "dgx-h100", 64, 512, 8192, tp=4, sp=True, pp=4, shard=4, zero=1, recompute="auto")
    limit = USABLE_MEMORY * c.cluster.accelerator.memory
    changes = [change for change in candidates(c, c.plan) if change.plan and change.fields[0][0] != "recompute"]
    found = [change.plan for change in priced(c, changes) if change.plan]
    layers = [plan.recompute_layers if plan.recompute == "full" else 0 for plan in found]
    assert {0, 1, *layers} > {0, 1}
    assert len(batches) < 6  # one for several numbers of layers of all plans
    for plan, count in list(zip(found, layers, strict=True))[::8]:
        assert peak(c.model, plan, c.workload, c.stack) <= limit
        if count:
            assert peak(c.model, recomputing(plan, count - 1), c.workload, c.stack) > limit


def test_an_illegal_value_has_its_reason() -> None:
    refused = [change for change in priced(EXPERTS, candidates(EXPERTS, EXPERTS.plan)) if change.plan is None]
    assert refused
    assert all(change.reason and change.step_time_s is None for change in refused)


def test_the_best_single_change_comes_first() -> None:
    best, *_ = first_changes(WIDE)
    singles = [change for change in priced(WIDE, candidates(WIDE, WIDE.plan)) if change.fits]
    assert best.saved >= max(change.saved for change in singles) > 0
    same_as_estimate(WIDE, best)


def test_a_pair_makes_room_for_the_faster_plan() -> None:
    c = config("llama3-70b", "dgx-h100", 64, 512, 8192, tp=8, sp=True, pp=4, shard=2, zero=1, recompute="selective")
    best = first_changes(c)[0]
    assert len(best.fields) == 2
    assert best.fits
    same_as_estimate(c, best)


def test_a_plan_that_does_not_fit_gets_the_cheapest_change_that_does() -> None:
    c = config("llama3-70b", "dgx-h100", 64, 512, 8192, tp=4, sp=True, pp=2, shard=8, zero=1, recompute="none")
    assert not estimate(c).prediction.fits
    changes = first_changes(c)
    assert changes
    assert all(change.fits for change in changes)


FAR = config("llama3-70b", "dgx-h100", 64, 512, 8192, shard=64, zero=1, recompute="selective")


def test_the_first_change_of_a_pair_makes_room_where_the_plan_is_far_from_fitting() -> None:
    best = first_changes(FAR)[0]  # with tp = 32 it would take three times as long
    assert {name for name, _ in best.fields} == {"zero", "recompute"}
    assert best.saved > -0.3 * estimate(FAR).prediction.step_time_s


@pytest.mark.slow
@pytest.mark.parametrize("c", [FAR, config("llama2-7b", "dgx-a100", 8, 64, 2048, replicate=8)])
def test_a_plan_far_from_fitting_gets_the_fastest_of_all_pairs(c: Config) -> None:
    now = estimate(c).prediction
    singles = priced(c, candidates(c, c.plan))
    firsts = [change for change in singles if change.plan]
    seconds = ((first, candidates(c, first.plan, seconds_of(c, first))) for first in firsts)
    pairs = priced(c, [both(first, second, c.plan) for first, others in seconds for second in others if second.plan])
    most = max(change.saved for change in (*singles, *pairs) if change.fits)
    best, *others = first_changes(c, most=50)
    assert best.saved >= most - 0.005 * now.step_time_s
    alone = {change.fields[0]: change.saved for change in singles if change.fits}
    for change in (best, *others):  # no pair of which one value does nothing
        if len(change.fields) == 2:
            assert all(change.saved > alone.get(chosen, -math.inf) for chosen in change.fields)


def test_a_pair_has_the_values_of_its_plan_where_the_second_change_overwrites_the_first() -> None:
    c = config("llama2-7b", "dgx-a100", 8, 64, 2048, replicate=8)
    pairs = [change for change in first_changes(c, most=50) if len(change.fields) > 1]
    assert pairs
    for change in pairs:
        values = {name: (value, getattr(change.plan, name)) for name, value in change.fields if value != "auto"}
        assert all(chosen == planned for chosen, planned in values.values()), (change.title, change.fix)
