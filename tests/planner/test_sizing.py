"""The fewest GPUs for a number of tokens within days or dollars, with their plan and a table of sizes; bad input gives clear errors."""

import pytest

from meshwright import planner
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.sizing import Size, read_budget, undominated

SMALL = {"batch": 256, "seq": 1024, "tokens": "100B", "set": ["cluster.price=2.0"]}
FEW = {"fix": {"tp": 1, "cp": 1}}  # limits hold in any space, and a small one is searched sooner


def sized(**limits):
    return planner.size("gpt3-2.7b", "dgx-a100", **{**SMALL, **limits})


@pytest.fixture(scope="module")
def in_ten_days():
    return sized(days=10, **FEW)


def test_the_fewest_gpus_that_meet_the_days(in_ten_days):
    s = in_ten_days
    training, gpus = s.result.explanation.training, s.result.plan.world
    assert training.days <= 10
    assert gpus % 8 == 0
    assert s.result.plan.world == s.result.space.cluster.world
    smaller = [one for one in s.curve if one.gpus < gpus]
    assert smaller
    assert all(one.days > 10 for one in smaller)
    # The best plan of the next smaller size misses too: the full search was asked.
    less = planner.plan("gpt3-2.7b", "dgx-a100", gpus=gpus - 8, **SMALL, **FEW).explanation.training
    assert less.days > 10


def row(gpus, days):
    return Size(gpus, gpus // 8, Plan(), 1.0, 0.4, days, days, days, 24 * days * gpus, 0.0, True)


def test_a_size_that_is_slower_and_costs_more_is_dominated():
    curve = [row(32, 41.2), row(48, 29.2), row(56, 26.4), row(64, 20.6), row(128, 10.2)]
    assert undominated(curve, 48, curve[1]).gpus == 128  # 64 too is slower and costs more
    assert undominated(curve[:4], 48, curve[1]).gpus == 64
    assert undominated(curve[:3], 48, curve[1]) is None  # faster, but costs more
    assert undominated(curve, 128, curve[4]) is None


@pytest.mark.slow
def test_a_dominated_size_is_never_recommended():
    """The fewest GPUs may need a plan that suits them badly: a larger size that is faster and cheaper is recommended instead."""
    question = {"tokens": "1T", "days": 30, "batch": 512, "seq": 8192, "set": ["cluster.price=6"]}
    s = planner.size("llama3-8b", "dgx-h100", **question, fix={"tp": 1, "cp": 1, "ep": 1})
    t, gpus = s.result.explanation.training, s.result.plan.world
    assert not [one for one in s.curve if one.gpus != gpus and one.days < t.days and one.dollars < t.dollars]
    assert s.fewest is not None
    assert s.fewest.plan.world < gpus
    assert f"{s.fewest.plan.world}, the fewest, are slower and cost more" in s.answer
    assert s.as_dict()["sizing"]["fewest_gpus"] == s.fewest.plan.world


def test_the_curve_adds_up(in_ten_days):
    curve = in_ten_days.curve
    assert [one.gpus for one in curve] == sorted(one.gpus for one in curve)
    for one in curve:
        assert one.gpus == 8 * one.nodes == one.plan.world
        assert one.gpu_hours == pytest.approx(24 * one.days * one.gpus)
        assert one.dollars == pytest.approx(2.0 * one.gpu_hours)
        assert one.days == pytest.approx(100e9 / (256 * 1024) * one.step_s / 86400)
        assert one.days_low < one.days < one.days_high
        assert one.meets == (one.days <= 10)
    data = in_ten_days.as_dict()
    assert data["sizing"]["gpus"] == in_ten_days.result.plan.world
    assert len(data["sizing"]["curve"]) == len(curve)
    assert data["plans"][0]["step_time_s"] > 0


def test_a_budget_bounds_the_cost_and_the_days():
    both = sized(budget="$20k", days=10, **FEW)
    assert both.result.explanation.training.days <= 10
    assert both.result.explanation.training.dollars <= 20_000
    assert "the fewest within 10 days and $20,000" in both.answer


@pytest.mark.slow
def test_constraints_hold_on_the_curve_too():
    s = sized(days=10, fix={"tp": 2})
    assert {one.plan.tp for one in s.curve} == {2} == {s.result.plan.tp}


@pytest.mark.parametrize(
    ("limits", "code", "words"),
    [
        ({"days": "soon"}, "MW-PLANNER-007", "not a number of days"),
        ({"days": -1}, "MW-PLANNER-007", "not a number of days"),
        ({"days": "nan"}, "MW-PLANNER-007", "not a number of days"),
        ({"days": "0"}, "MW-PLANNER-007", "not a number of days"),
        ({"budget": "0$"}, "MW-PLANNER-007", "not an amount"),
        ({"budget": "much"}, "MW-PLANNER-007", "not an amount"),
        ({"days": 30, "tokens": ""}, "MW-PLANNER-007", "number of tokens"),
        ({"days": 30, "nodes": 4}, "MW-PLANNER-007", "--nodes"),
        ({"budget": "2M$", "set": ["cluster.price=0"]}, "MW-PLANNER-007", "price"),
        pytest.param(
            {"days": 0.001, "fix": {"tp": 1, "cp": 1}}, "MW-PLANNER-008", "within 0.001 days", marks=pytest.mark.slow
        ),
        ({"budget": 10, "fix": {"tp": 1, "cp": 1}}, "MW-PLANNER-008", "within $10"),
    ],
)
def test_bad_questions_are_refused(limits, code, words):
    with pytest.raises(MeshwrightError) as refused:
        sized(**limits)
    assert refused.value.code == code
    assert words in refused.value.what
    assert refused.value.fix


def test_budgets_in_the_usual_spellings():
    assert read_budget("2M$") == read_budget("$2M") == read_budget("2M USD") == read_budget(2e6) == 2e6
    assert read_budget("") == 0
