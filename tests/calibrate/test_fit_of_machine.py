"""Fits of this machine's constants to synthetic measurements, and what sharing of cores does to a prediction."""

from dataclasses import replace

import pytest

from meshwright import api
from meshwright.calibrate import device_fit, machine
from meshwright.calibrate.machine import MachineMeasurement
from meshwright.cost.collective import choose
from meshwright.describe.config import Config
from meshwright.predict.prediction import predict
from synthetic_machine import SIZES, TRUE, measurement, point, synthetic

DEMO = "examples/demo-dp2-tp2.toml"


def calibrated(measured: MachineMeasurement, busy: float = 0.0, **plan: object) -> Config:
    config = api.load(DEMO, set=[f"plan.{k}={v}" for k, v in plan.items()])
    cluster, stack = machine.calibrated(config.cluster, config.stack, measured, busy)
    return replace(config, cluster=cluster, stack=stack)


def seconds(config: Config) -> float:
    return predict(config).step_time_s


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_a_fit_finds_the_constants_that_made_the_points(dtype: str) -> None:
    found = device_fit.fit_device(synthetic(dtype=dtype))
    for name, value in TRUE.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
    assert max(found.residuals.values()) < 1e-9


def test_points_are_lowered_with_the_bytes_of_their_dtype() -> None:
    wide, narrow = (device_fit.features(point("residual", SIZES[1], dtype=dtype)) for dtype in ("fp32", "bf16"))
    assert (narrow.launches, narrow.bytes) == (wide.launches, wide.bytes / 2)


def test_a_measured_machine_has_the_band_of_a_calibrated_stack() -> None:
    plain, found = api.load(DEMO), calibrated(measurement())
    assert (plain.stack.evidence, found.stack.evidence) == ("typical", "calibrated")
    widths = [
        p.step_time_high_s / p.step_time_low_s for p in (predict(c.but(cluster=found.cluster)) for c in (plain, found))
    ]
    assert widths[1] < widths[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_the_measured_dtype_has_the_measured_rate(dtype: str) -> None:
    measured = measurement().but(dtype=dtype, operations=synthetic(dtype=dtype))
    device = calibrated(measured).cluster.accelerator
    assert device.peak[dtype] == pytest.approx(1 / (TRUE["flop"] * measured.sharing))
    assert device.efficiency.measured_dtype == dtype


def test_a_term_that_would_be_negative_is_left_out() -> None:
    found, _ = device_fit.relative_fit([point("residual", size, 1e-5) for size in SIZES], ("launches", "bytes"), {})
    assert found[0] > 0
    assert found[1] >= 0


def test_prices_of_measured_collectives_are_those_measured() -> None:
    measured = measurement()
    config = calibrated(measured)
    for x in measured.collectives:
        found = choose(config.cluster, x.operation, x.bytes, x.ranks).seconds
        assert found == pytest.approx(x.wall_s, rel=0.1), (x.operation, x.ranks, x.bytes)


def test_what_a_call_takes_does_not_grow_with_the_ranks() -> None:
    """Waking a rank that waited takes as long in a group of two as of four: only the latency of the ring grows."""
    added = []
    for ranks, size in ((2, 1024), (2, 2**20), (4, 1024), (4, 2**20)):
        terms = machine.formula_terms("all-reduce", ranks)
        both = terms.alpha * 2e-5 + terms.beta * size * 1e-9  # seconds in which two ranks on a core compute
        added.append(
            {"operation": "all-reduce", "ranks": ranks, "bytes": size, "wall_s": 6e-4 + both, "cpu_s": both / 2}
        )
    cluster = calibrated(measurement().but(collectives=added)).cluster
    factors = cluster.collectives.factor("all-reduce")
    assert factors.call == pytest.approx(6e-4, rel=1e-3)
    assert factors.latency * machine.ALPHA == pytest.approx(2e-5, rel=1e-3)


def test_one_long_wait_does_not_change_the_others() -> None:
    """The clock of one collective ran too long: the wait of a rank is the median over operations and sizes."""
    plain = measurement()
    first, *others = (x.as_dict() for x in plain.collectives)
    disturbed = plain.but(collectives=[{**first, "wall_s": 10 * first["wall_s"]}, *others])
    assert machine.waits(disturbed) == pytest.approx(machine.waits(plain))


def test_each_elementwise_operation_has_its_own_factors() -> None:
    """Norms that take three times as long as their operators and bytes say are predicted so; others as before."""
    points = [p.but(median_s=3 * p.median_s, high_s=3 * p.median_s) if p.kind == "norm" else p for p in synthetic()]
    fit = device_fit.fit_device(points)
    names = ("launch", "byte", "exponential", "product_launch", "flop", "attention_launch", "attention_flop")
    factors = {part: (fit.elementwise_launch[part], fit.elementwise[part]) for part in device_fit.PARTS}
    single = device_fit.SingleOperation(*(getattr(fit, name) for name in names), factors)
    for p in points:
        if p.kind in device_fit.PARTS:
            assert sum(sum(single.seconds(op)) for op in device_fit.lowered(p)) == pytest.approx(p.median_s, rel=0.15)
    without = single._replace(factors={})
    norm = next(p for p in points if p.kind == "norm")
    assert sum(sum(without.seconds(op)) for op in device_fit.lowered(norm)) < 0.8 * norm.median_s


def test_hooks_of_units_run_in_every_micro_batch() -> None:
    """What fully_shard does around a unit that is gathered already counts once for each micro-batch."""
    units = [
        point(kind, {"units": 4.0}, t)
        for kind, t in (("plain-units", 1e-3), ("held-units", 5e-3), ("sharded-units", 8e-3))
    ]
    fit = device_fit.fit_device([*synthetic(), *units])
    assert fit.unit_hooks == pytest.approx(1e-3)
    assert fit.unit_launch == pytest.approx(2.5e-4)
    plan = {"replicate": 1, "tp": 1, "pp": 2, "shard": 2, "zero": 3, "schedule": "1f1b"}
    machine_with = measurement().but(operations=[*(p.as_dict() for p in (*synthetic(), *units))])
    config = calibrated(machine_with, **plan)
    free = replace(config, stack=config.stack.but(unit_hooks=0.0))
    batches = config.plan.microbatches(config.workload)
    layers = config.model.layers // 2
    assert seconds(config) - seconds(free) >= 0.9 * batches * layers * config.stack.unit_hooks


def test_points_without_one_of_the_kinds_of_units_are_fitted_without_units() -> None:
    """Such as those of a file that an older version wrote."""
    units = [point(kind, {"units": 4.0}, 1e-3) for kind in ("plain-units", "sharded-units")]
    assert device_fit.fit_device([*synthetic(), *units]).unit_hooks == 0


def test_whole_layers_raise_the_constants() -> None:
    """Twice the host's seconds in whole layers are twice the host's seconds in a prediction."""
    plain = device_fit.fit_device(synthetic())
    constants = device_fit.SingleOperation(**{name: TRUE[field] for name, field in (
        ("launch", "launch"), ("byte", "byte"), ("exponential", "exponential"), ("product", "product_launch"), ("flop", "flop"),
        ("attention", "attention_launch"), ("attention_flop", "attention_flop"))})  # fmt: skip
    chains = []
    for tokens, width in ((16.0, 32.0), (96.0, 96.0), (384.0, 128.0)):
        shape = {"tokens": tokens, "width": width, "sequences": 2.0}
        host, work = (
            sum(x) for x in zip(*map(constants.seconds, device_fit.lowered(point("layer", shape))), strict=True)
        )
        chains.append(point("layer", shape, 2.0 * host + 1.5 * work))
    slow = device_fit.fit_device([*synthetic(), *chains])
    assert slow.launch == pytest.approx(2.0 * plain.launch, rel=0.02)
    assert slow.product_launch == pytest.approx(2.0 * plain.product_launch, rel=0.02)
    assert slow.flop == pytest.approx(1.5 * plain.flop, rel=0.02)


def test_zero_1_pays_for_its_updates_as_zero_3_does() -> None:
    parts = [
        predict(c).exposed_s["optimizer"]
        for c in (calibrated(measurement(), replicate=1, tp=1, shard=4, zero=zero) for zero in (1, 3))
    ]
    assert parts[0] == pytest.approx(parts[1], rel=0.01)


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
    bubbles = [predict(c).exposed_s.get("bubble", 0.0) / seconds(c) for c in (alone, shared)]
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


def test_units_of_zero_block_where_the_host_computes() -> None:
    """`fully_shard` overlaps by the streams of a device; a CPU has none. Buckets of plain data parallelism still overlap."""
    many = measurement(cores=16.0)
    for zero in (1, 3):
        c = calibrated(many.but(overlap_cost=0.0), replicate=1, tp=1, shard=4, zero=zero)
        overlapped = replace(c, stack=c.stack.but(overlap=("dp",)))
        serial = replace(c, stack=c.stack.but(overlap=()))
        assert seconds(overlapped) == pytest.approx(seconds(serial), rel=1e-9)
    c = calibrated(many.but(overlap_cost=0.0), replicate=4, tp=1)
    buckets = replace(c, plan=c.plan.but(bucket=1e4))
    assert seconds(buckets) < seconds(replace(buckets, stack=buckets.stack.but(overlap=())))


def test_a_top_k_takes_the_time_of_its_selection() -> None:
    selecting = [*synthetic(), point("top-k", {"elements": 1e6}, 1e-2)]
    measured = measurement().but(operations=[p.as_dict() for p in selecting])
    c = calibrated(measured, replicate=4, tp=1, compression="top-k")
    elements = c.model.total
    added = seconds(c) - seconds(calibrated(measurement(), replicate=4, tp=1, compression="top-k"))
    assert added == pytest.approx(elements * 1e-8 * measured.sharing, rel=0.05)
