"""Fits of this machine's constants to synthetic measurements, and what sharing of cores does to a prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import api
from meshwright.calibrate import machine
from meshwright.calibrate.machine import MachineMeasurement
from meshwright.cost.collective import choose
from meshwright.cost.predict import predict
from meshwright.describe.config import Config
from synthetic_machine import SIZES, TRUE, measurement, point, synthetic

DEMO = "examples/demo-dp2-tp2.toml"


def calibrated(measured: MachineMeasurement, busy: float = 0.0, **plan: object) -> Config:
    config = api.load(DEMO, set=[f"plan.{k}={v}" for k, v in plan.items()])
    cluster, stack = machine.calibrated(config.cluster, config.stack, measured, busy)
    return replace(config, cluster=cluster, stack=stack)


def seconds(config: Config) -> float:
    return predict(config.model, config.cluster, config.plan, config.workload, config.stack).step_time_s


def test_a_fit_finds_the_constants_that_made_the_points() -> None:
    found = machine.fit_device(synthetic())
    for name, value in TRUE.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
    assert max(found.residuals.values()) < 1e-9


def test_a_term_that_would_be_negative_is_left_out() -> None:
    found, _ = machine.relative_fit([point("residual", size, 1e-5) for size in SIZES], ("launches", "bytes"), {})
    assert found[0] > 0
    assert found[1] >= 0


def test_prices_of_measured_collectives_are_those_measured() -> None:
    measured = measurement()
    config = calibrated(measured)
    for x in measured.collectives:
        if x.operation == "all-reduce" and x.ranks == 2:
            assert choose(config.cluster, x.operation, x.bytes, x.ranks).seconds == pytest.approx(x.wall_s, rel=0.3)


def test_all_times_of_a_slower_machine_scale() -> None:
    """Twice the seconds of every operation and collective are twice the step."""
    slow = measurement(wall=2e-3).but(operations=[p.as_dict() for p in synthetic(2.0)])
    fast = measurement()
    doubled = [{**x.as_dict(), "wall_s": 2 * x.wall_s, "cpu_s": 2 * x.cpu_s} for x in fast.collectives]
    slow = slow.but(collectives=doubled)
    assert seconds(calibrated(slow)) == pytest.approx(2 * seconds(calibrated(fast)), rel=1e-3)


def test_ranks_that_share_cores_take_longer_and_idle_ones_give_theirs_away() -> None:
    many, few = measurement(cores=16.0), measurement(cores=2.0)
    assert seconds(calibrated(few, replicate=4, tp=1)) > 1.5 * seconds(calibrated(many, replicate=4, tp=1))
    pipeline = {"replicate": 1, "tp": 1, "pp": 4, "schedule": "1f1b"}
    alone, shared = calibrated(many, **pipeline), calibrated(few, **pipeline)
    bubbles = [
        predict(c.model, c.cluster, c.plan, c.workload, c.stack).exposed_s.get("bubble", 0.0) / seconds(c)
        for c in (alone, shared)
    ]
    assert bubbles[1] < bubbles[0] / 2  # on two cores two ranks work while two wait, and both cores are busy
    assert api.estimate(shared).walked.time == pytest.approx(seconds(shared), rel=0.12)


def test_a_calibration_on_a_busy_machine_counts_the_seconds_that_ranks_computed() -> None:
    """The clock of a disturbed measurement is worth only the share that other processes left."""
    quiet = measurement(wall=1e-3)
    disturbed = measurement(wall=2e-3, busy=1.0)
    assert not disturbed.is_idle
    assert "other processes used 1.0 cores" in machine.source_of(disturbed)
    assert seconds(calibrated(disturbed)) == pytest.approx(seconds(calibrated(quiet)), rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "cores", "busy", "expected"),
    [(4, 2, 0, 1.0), (4, 16, 4, 1.0), (4, 2, 4, 2.0), (2, 2, 1, 1.5), (4, 4, 4, 2.0)],
)
def test_other_processes_slow_the_ranks_by_their_share(ranks: int, cores: float, busy: float, expected: float) -> None:
    assert machine.slowdown(ranks, cores, busy) == pytest.approx(expected)


def test_the_source_of_the_constants_is_told() -> None:
    config = calibrated(measurement())
    assert config.cluster.accelerator.efficiency.measured
    assert config.cluster.source.startswith("measured on this machine")
    assert (
        Config.from_parts(config.model, config.cluster, config.stack, config.workload, config.plan).cluster
        == config.cluster
    )
