"""Published training runs: their configurations are legal, their figures are compared with ours, and the pages are current."""

import json
from functools import cache
from pathlib import Path

import pytest

from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.alternatives import step
from meshwright.planner.cases import studies
from meshwright.view import cases as view

DOCS = Path(__file__).parents[2] / "docs" / "cases"
WANTED = {
    "gpt3",
    "llama-7b",
    "llama-13b",
    "llama-33b",
    "llama-65b",
    "llama2-70b",
    "llama3-405b",
    "mt-nlg",
    "palm",
    "bloom",
    "mixtral",
    "deepseek-v2",
    "deepseek-v3",
}
evaluate, pages = cache(studies.evaluate), cache(view.pages)  # once, and not when tests are collected


def test_all_cases_are_there() -> None:
    assert set(studies.CASES) >= WANTED


@pytest.mark.parametrize("name", studies.CASES)
def test_a_case_lists_published_values_assumptions_and_sources(name: str) -> None:
    case = studies.load(name)
    case.config.check()
    assert case.settings
    assert case.assumed
    assert case.sources
    assert case.story
    assert case.difference
    assert all(p.what in studies.UNITS and p.value > 0 and p.source for p in case.published)


@pytest.mark.parametrize("name", studies.CASES)
def test_our_values_have_the_published_order_of_magnitude(name: str) -> None:
    for row in evaluate(name).rows:
        assert 0.6 < row.ratio < 1.5, f"{row.what}: published {row.published}, ours {row.ours}"


def test_most_published_figures_are_in_our_band() -> None:
    rows = [row for r in map(evaluate, studies.CASES) for row in r.rows]
    assert sum(row.within for row in rows) >= 0.7 * len(rows)


@pytest.mark.parametrize(
    ("name", "days"),
    [
        ("llama-7b", 3.4),
        ("llama-13b", 5.5),
        ("llama-33b", 21.6),
        ("llama-65b", 20.8),
        ("llama2-70b", 35.0),
        ("deepseek-v3", 54.2),
    ],
)
def test_published_gpu_hours_in_days(name: str, days: float) -> None:
    """Corrected figures of a published table of days."""
    case = studies.load(name)
    (hours,) = (p.value for p in case.published if p.what == "gpu_hours")
    assert hours / case.config.cluster.world / 24 == pytest.approx(days, abs=0.06)


def test_a_published_plan_for_gpt3_does_not_fit() -> None:
    case = studies.load("gpt3")
    seeds = case.config.plan.but(pp=8, replicate=16)
    assert not studies.estimated(case, seeds).prediction.fits
    assert evaluate("gpt3").estimate.prediction.fits


def test_gpt3_data_parallel_volume() -> None:
    """175B/(tp·pp) parameters per GPU, not 175B/pp."""
    case = studies.load("gpt3-megatron")
    e = studies.estimated(case, case.config.plan)
    d = case.config.plan.dp
    expected = 2 * (d - 1) / d * 2 * 175e9 / 64
    assert e.prediction.traffic_bytes["dp"] == pytest.approx(expected, rel=0.06)


def test_deepseek_v2_cost() -> None:
    (hours,) = (p.value for p in studies.load("deepseek-v2").published)
    assert hours == pytest.approx(172.8e3 * 8.1)
    assert 2 * hours == pytest.approx(2.8e6, rel=0.01)


def test_an_expert_of_mixtral_is_5_6_billion() -> None:
    m = studies.load("mixtral").config.model
    assert 3 * m.hidden * m.expert_width * m.layers == pytest.approx(5.6e9, rel=0.01)
    assert m.total == pytest.approx(46.7e9, rel=1e-3)


def test_palm_runs_without_a_pipeline_on_two_pods() -> None:
    c = studies.load("palm").config
    assert (c.plan.tp, c.plan.shard, c.plan.replicate, c.plan.pp) == (12, 256, 2, 1)
    assert c.cluster.world == 6144
    assert c.cluster.accelerator.peak_for("bf16") == 275e12


def test_days_and_gpu_hours_follow_from_the_step_time() -> None:
    r = evaluate("bloom")
    steps = 366e9 / (2048 * 2048)
    assert r.days == pytest.approx(steps * step(r.estimate) / 86400)
    assert studies.gpu_hours(r.estimate) == pytest.approx(r.days * 24 * 384)


def test_gains_sum_to_the_difference() -> None:
    case = studies.load("llama-65b")
    was, now = evaluate("llama-65b").estimate, studies.estimated(case, case.config.plan.but(recompute="full"))
    gains = studies.gains(was, now, least=0.0)
    assert sum(s for _, s in gains) == pytest.approx(step(was) - step(now))
    assert gains[0][0] == "recompute"
    assert gains[0][1] < 0


def test_verdicts() -> None:
    r = evaluate("llama-65b")
    over = studies.estimated(r.case, r.case.config.plan.but(microbatch=8))
    assert f"{over.prediction.memory_gib:.0f} of" in studies.verdict(over, r.estimate)
    assert "within 1%" in studies.verdict(r.estimate, r.estimate)
    slow = studies.estimated(r.case, r.case.config.plan.but(recompute="full"))
    assert "less time" in studies.verdict(slow, r.estimate)


def test_as_dict_is_json() -> None:
    for r in map(evaluate, studies.CASES):
        data = json.loads(json.dumps(r.as_dict(), allow_nan=False))
        assert data["step_time_s"] == pytest.approx(step(r.estimate))
        assert Plan(**data["plan"]) == r.estimate.plan


def test_an_unknown_case_suggests_a_similar_one() -> None:
    with pytest.raises(MeshwrightError) as error:
        studies.load("gpt-3")
    assert error.value.code == "MW-CASE-001"
    assert "gpt3" in error.value.fix


@pytest.mark.parametrize("name", sorted(f"{name}.md" for name in ("README", *studies.CASES)))
def test_pages_equal_the_generated_ones(name: str) -> None:
    written = (DOCS / name).read_text("utf-8")
    assert written == pages()[name], "run `make pages`"


def test_there_is_no_page_without_a_case() -> None:
    assert {path.name for path in DOCS.iterdir()} == set(pages())


# The planner's choice


def test_the_choice_of_every_case_fits_and_is_not_slower() -> None:
    for name, r in zip(studies.CASES, map(evaluate, studies.CASES), strict=True):
        assert r.choice is not None, name
        assert r.choice.prediction.fits, name
        # A plan that does not fit by our memory is not among those that the planner chooses from.
        assert step(r.choice) <= step(r.estimate) or not r.estimate.prediction.fits, name
        assert r.choice.plan.world == r.estimate.plan.world


@pytest.mark.slow
@pytest.mark.parametrize("name", studies.CASES)
def test_the_stored_choice_matches_the_search(name: str) -> None:
    """A stored choice may be another plan within 1%, but not slower."""
    found = studies.choose(name)
    assert found is not None
    now, was = step(studies.estimated(studies.load(name), found)), evaluate(name).choice
    assert was is not None
    assert now == pytest.approx(step(was), rel=0.01), (
        "run `python -m meshwright.planner.cases.studies src/meshwright/planner/cases/case_choices.toml`"
    )
