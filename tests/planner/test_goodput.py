"""Failures and checkpoints: formulas compared with published runs, with each other and with a plain simulation."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.planner import goodput as g
from meshwright.planner import sites
from meshwright.predict.estimate import Estimate, estimate

save_times = st.floats(0.1, 600)
mtbfs = st.floats(600, 1e6)


# Published runs


def test_llama3_interruptions() -> None:
    mtbf = g.system_mtbf(g.GPU_MTBF, 16_384)
    assert mtbf / 3600 == pytest.approx(54 * 24 / 419)  # one every 3.1 hours, as reported
    assert pytest.approx(5.8, abs=0.05) == g.GPU_MTBF / g.DAY / 365


def test_llama3_effective_time_needs_quick_saves_and_restarts() -> None:
    """Over 90% effective time with one interruption in 3.1 h: each may cost at most 20 minutes, including saves."""
    mtbf = g.system_mtbf(g.GPU_MTBF, 16_384)
    allowed = (1 / g.LLAMA3_EFFECTIVE - 1) * mtbf
    assert allowed == pytest.approx(20.6 * 60, rel=0.01)
    assert g.Reliability(mtbf, save=10, restart=300).goodput > g.LLAMA3_EFFECTIVE
    # Saving every minute for 10 s, or restarting in half an hour, would have missed it.
    assert g.goodput(60, 10, 300, mtbf) < g.LLAMA3_EFFECTIVE
    assert g.Reliability(mtbf, save=10, restart=1800).goodput < g.LLAMA3_EFFECTIVE


# The optimum


def test_young() -> None:
    assert g.young_interval(30, 11_135) == pytest.approx(math.sqrt(2 * 30 * 11_135))


@given(save_times, mtbfs)
def test_daly_is_the_best_interval(save: float, mtbf: float) -> None:
    best = g.daly_interval(save, mtbf)
    if save < 0.1 * mtbf:
        at = g.goodput(best, save, 0, mtbf)
        for factor in (0.5, 0.8, 1.25, 2):
            assert g.goodput(best * factor, save, 0, mtbf) <= at * (1 + 1e-3)


@given(mtbfs)
def test_daly_tends_to_young_where_failures_are_rare(mtbf: float) -> None:
    save = mtbf * 1e-6
    assert g.daly_interval(save, mtbf) == pytest.approx(g.young_interval(save, mtbf), rel=2e-3)


def test_saving_longer_than_machines_last() -> None:
    assert g.daly_interval(5000, 1000) == 1000
    assert g.goodput(1000, 1e6, 0, 1000) == 0.0


@given(save_times, mtbfs, st.floats(0, 3600))
def test_goodput_is_a_share_and_falls_with_every_cost(save: float, mtbf: float, restart: float) -> None:
    best = g.daly_interval(save, mtbf)
    at = g.goodput(best, save, restart, mtbf)
    assert 0 <= at < 1
    assert g.goodput(best, save * 2, restart, mtbf) <= at
    assert g.goodput(best, save, restart + 60, mtbf) <= at
    assert g.goodput(best, save, restart, mtbf * 2) >= at


def simulated(interval: float, save: float, restart: float, mtbf: float, segments: int) -> float:
    """Useful work over wall time, simulated failure by failure."""
    rng = random.Random(1)
    wall = 0.0
    for _ in range(segments):
        while True:
            failure = rng.expovariate(1 / mtbf)
            if failure >= interval + save:
                wall += interval + save
                break
            wall += failure
            while (again := rng.expovariate(1 / mtbf)) < restart:  # a failure may strike while restarting
                wall += again
            wall += restart
    return segments * interval / wall


@pytest.mark.parametrize(("interval", "save", "restart", "mtbf"), [(800, 30, 300, 11_000), (300, 60, 600, 2_000)])
def test_the_expectation_matches_a_simulation(interval: float, save: float, restart: float, mtbf: float) -> None:
    assert simulated(interval, save, restart, mtbf, 40_000) == pytest.approx(
        g.goodput(interval, save, restart, mtbf), rel=0.02
    )


def test_the_curve_is_flat_at_its_top_and_steep_at_its_ends() -> None:
    curve = g.curve(30, 300, 11_135)
    shares = [share for _, share in curve]
    assert max(shares) == shares[len(shares) // 2]
    assert shares[len(shares) // 2] - shares[len(shares) // 2 + 1] < 0.03
    assert shares[len(shares) // 2] - shares[0] > 0.15


def test_longest_restart_for_a_target() -> None:
    mtbf = 11_135.0
    longest = g.largest_restart(0.9, 30, mtbf)
    assert g.Reliability(mtbf, 30, longest).goodput == pytest.approx(0.9)
    assert g.largest_restart(0.99, 30, mtbf) == 0


def test_a_checkpoint_of_175b_is_2_45_tb() -> None:
    assert g.checkpoint_bytes(175e9) == pytest.approx(2.45e12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: g.system_mtbf(0, 8),
        lambda: g.goodput(0, 1, 1, 1),
        lambda: g.young_interval(-1, 5),
        lambda: g.goodput(1, -1, 0, 9),
        lambda: g.system_mtbf(math.inf, 3),
    ],
)
def test_impossible_durations_are_refused(call: object) -> None:
    with pytest.raises(MeshwrightError) as error:
        call()  # type: ignore[operator]
    assert error.value.code == "MW-GOOD-001"


# Past one cluster


@pytest.fixture(scope="module")
def pod() -> Estimate:
    c = Config.from_parts(
        "llama3.1-405b",
        {"extends": "dgx-h100", "gpus": 1024},
        "megatron-core",
        {"batch": 128, "seq": 8192},
        {"tp": 8, "sp": True, "pp": 16, "shard": 8, "zero": 1, "recompute": "selective", "bucket": 5e8},
    )
    return estimate(c)


def test_a_hundred_thousand_gpus(pod: Estimate) -> None:
    rows = sites.scale_out(pod, [1, 8, 98], save=10, restart=300)
    assert [r.gpus for r in rows] == [1024, 8192, 100_352]
    assert rows[0].efficiency == pytest.approx(1)
    assert all(a.efficiency >= b.efficiency for a, b in itertools.pairwise(rows))
    assert all(a.goodput > b.goodput for a, b in itertools.pairwise(rows))
    # 100,352 GPUs are interrupted every half hour: over a sixth of the time is lost even with quick saves.
    assert rows[-1].reliability.mtbf == pytest.approx(0.505 * 3600, rel=0.01)
    assert rows[-1].goodput < 5 / 6
    assert rows[-1].effective_mfu == pytest.approx(rows[-1].mfu * rows[-1].goodput)


def test_strong_scaling_stops_where_the_batch_ends(pod: Estimate) -> None:
    rows = sites.scale_out(pod, [1, 2, 16, 32], save=10, restart=300, weak=False)
    assert [r.gpus for r in rows] == [1024, 2048, 16_384]  # 128 sequences feed 8 × 16 ranks and no more
    assert rows[-1].efficiency < rows[0].efficiency


def test_two_sites_over_a_leased_line(pod: Estimate) -> None:
    c = sites.crossing(pod, 2, bandwidth=12.5e9, alpha=0.02, dtype="bf16")
    assert c.site_bytes == pytest.approx(pod.model.total * 2)
    assert c.transfer_s == pytest.approx(pod.model.total * 2 / 12.5e9 + 0.04)
    assert c.every > 1
    # Exchanged every `every` steps the exposed part stays below the share, one step less often it would not.
    for every, holds in ((c.every, True), (c.every - 1, False)):
        left = c.transfer_s - sites.OVERLAP * every * c.step_s
        assert (left <= c.share * every * c.step_s) is holds


def test_a_fast_line_hides_the_exchange(pod: Estimate) -> None:
    c = sites.crossing(pod, 4, bandwidth=1e13, alpha=1e-3)
    assert c.exposed_s == 0
    assert c.every == 1
    assert c.slowdown == 1


def test_one_site_has_no_exchange() -> None:
    with pytest.raises(MeshwrightError) as error:
        sites.crossing(None, 1, 1e9, 0)  # type: ignore[arg-type]
    assert error.value.code == "MW-GOOD-002"


def test_the_page_equals_the_generated_one() -> None:
    from pathlib import Path

    from meshwright.view.goodput import page

    written = (Path(__file__).parents[2] / "docs" / "past-one-cluster.md").read_text("utf-8")
    assert written == page(), "run `make pages`"
