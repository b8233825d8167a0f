"""Scaling laws: corrected published figures, and the optimum by search and by formula."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.describe import scale
from meshwright.errors import MeshwrightError

BUDGETS = st.floats(1e18, 1e27)
LAWS = pytest.mark.parametrize("law", [scale.PRINTED, scale.REFITTED], ids=lambda law: law.name)


def test_growth_of_models():
    assert scale.growth_factor() == pytest.approx(15_400, rel=0.002)
    assert scale.doubling_months() == pytest.approx(5.2, abs=0.05)
    years = [m.year for m in scale.GROWTH]
    assert years == sorted(years)
    assert all(a.parameters < b.parameters for a, b in zip(scale.GROWTH, scale.GROWTH[1:], strict=False))


def test_halving_the_loss_takes_nine_thousand_times_the_size():
    assert scale.size_factor_for_loss(0.5) == pytest.approx(9139, abs=1)
    assert scale.size_factor_for_loss(1) == 1


@settings(max_examples=50, deadline=None)
@given(st.floats(0.05, 1))
def test_size_and_loss_are_inverse(ratio):
    assert scale.loss_ratio_for_size(scale.size_factor_for_loss(ratio)) == pytest.approx(ratio)


def test_printed_law_orders_chinchilla_before_gopher():
    """70B on 1.4T tokens beats 280B on 300B tokens, at about the same FLOPs: the paper's headline."""
    chinchilla, gopher = (70e9, 1.4e12), (280e9, 300e9)
    for law in (scale.PRINTED, scale.REFITTED):
        assert law.loss(*chinchilla) < law.loss(*gopher)
    assert scale.PRINTED.loss(*chinchilla) == pytest.approx(1.69 + 406.4 / 70e9**0.34 + 410.7 / 1.4e12**0.28)
    assert scale.training_flops(*chinchilla) / scale.training_flops(*gopher) == pytest.approx(1.17, abs=0.01)


@LAWS
@settings(max_examples=40, deadline=None)
@given(flops=BUDGETS)
def test_optimum_is_the_lowest_point_of_its_budget(law, flops):
    parameters, tokens = law.optimum(flops)
    assert scale.training_flops(parameters, tokens) == pytest.approx(flops)
    best = law.loss(parameters, tokens)
    for step in (0.5, 0.9, 1.1, 2):
        assert law.loss(parameters * step, tokens / step) > best


@LAWS
@settings(max_examples=30, deadline=None)
@given(flops=BUDGETS, more=st.floats(1.5, 100))
def test_more_compute_is_better_larger_and_longer(law, flops, more):
    (n1, d1), (n2, d2) = law.optimum(flops), law.optimum(flops * more)
    assert n1 < n2
    assert d1 < d2
    assert law.loss(n1, d1) > law.loss(n2, d2) > law.irreducible


def test_twenty_tokens_per_parameter():
    assert scale.compute_optimal_tokens(70e9) == 1.4e12
    parameters, tokens = scale.compute_optimal(scale.training_flops(70e9, 1.4e12))
    assert (parameters, tokens) == pytest.approx((70e9, 1.4e12))


def test_tokens_per_parameter_by_law():
    """The printed constants do not give the rule of thumb; the refit does."""
    budget = scale.training_flops(70e9, 1.4e12)
    ratio = {}
    for law in (scale.PRINTED, scale.REFITTED):
        parameters, tokens = law.optimum(budget)
        ratio[law.name] = tokens / parameters
    assert ratio["hoffmann"] == pytest.approx(93, abs=1)
    assert ratio["besiroglu"] == pytest.approx(18.4, abs=0.2)


@LAWS
@settings(max_examples=40, deadline=None)
@given(parameters=st.floats(1e7, 1e12), tokens=st.floats(1e9, 1e13))
def test_tokens_for_a_loss(law, parameters, tokens):
    loss = law.loss(parameters, tokens)
    assert law.tokens_for_loss(parameters, loss) == pytest.approx(tokens, rel=1e-6)
    assert law.tokens_for_loss(parameters, law.irreducible) == math.inf


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, True])
def test_refusals(bad):
    for call in (
        lambda: scale.size_factor_for_loss(bad if bad is not True else 1.5),
        lambda: scale.training_flops(bad, 1e9),
        lambda: scale.compute_optimal(bad),
        lambda: scale.REFITTED.loss(1e9, bad),
    ):
        with pytest.raises(MeshwrightError) as caught:
            call()
        assert caught.value.code == "MW-SCALE-001"


def test_growth_needs_increasing_years():
    with pytest.raises(MeshwrightError):
        scale.doubling_months(scale.GROWTH[-1], scale.GROWTH[0])
