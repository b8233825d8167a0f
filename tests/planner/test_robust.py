"""The plan with the best worst case, and the bands of the leaders."""

from dataclasses import replace

import pytest

from meshwright import planner
from meshwright.planner.api import with_best_worst_case
from meshwright.view.plan import step_bands


@pytest.fixture
def rivals_with_narrow_bands(monkeypatch):
    """A result that shows one plan only, whose rivals all have lower upper edges."""
    found = planner.plan(
        "llama3-8b", "dgx-h100", gpus=16, batch=64, seq=4096, without=["cp", "reorder", "recompute"], top=1
    )
    real = type(found)._predicted

    def narrow(self, candidate):
        _, p = real(self, candidate)
        return candidate, replace(p, step_time_high_s=0.9 * found.prediction.step_time_high_s)

    monkeypatch.setattr(type(found), "_predicted", narrow)
    return found


def test_the_robust_plan_does_not_depend_on_how_many_plans_are_shown(rivals_with_narrow_bands):
    found = rivals_with_narrow_bands
    assert len(found.leaders) == 1
    assert found.robust[0].plan == found.ranking.leaders[1].plan
    best = with_best_worst_case(found)
    assert best.chosen_from.startswith("the best worst case of the leaders of ")
    assert "slower than the fastest" in best.choice
    assert replace(found, worst_case=True).chosen_from.startswith("the fastest, and the best worst case")


def test_the_caption_of_the_leaders_has_the_widest_band(rivals_with_narrow_bands):
    found, p = rivals_with_narrow_bands, rivals_with_narrow_bands.prediction
    wide = replace(p, step_time_low_s=0.5 * p.step_time_s, step_time_high_s=2 * p.step_time_s)
    assert step_bands(found).startswith("every step -")
    found.__dict__["leaders"] = [*found.leaders, (found.ranking.leaders[1], wide)]
    assert step_bands(found).endswith("others at most -50% to +100%")
