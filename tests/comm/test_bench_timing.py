"""Timing takes medians of samples that all ranks agree on; records are read back as they were written."""

import json

import pytest
import torch

from meshwright.calibrate.points import Bench, DevicePoint, Point, RankInfo, bus_factor
from meshwright.comm.bench import contention, device
from meshwright.comm.bench.operations import MeasuredCase
from meshwright.comm.bench.timing import MOST_SAMPLES, SAMPLE_S, Synchronization, counts, measure, timed
from meshwright.errors import MeshwrightError
from meshwright.view.bench import html

POINT = Point(operation="all-reduce", backend="gloo", ranks=(0, 1, 2, 3), bytes=4096, median_s=2e-3, low_s=1e-3, high_s=4e-3, samples=5)  # fmt: skip


class FakeClock:
    """Advances only when a call does."""

    def __init__(self) -> None:
        self.now, self.called = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def call_of(self, *seconds: float):
        def call() -> None:
            self.now += seconds[self.called % len(seconds)]
            self.called += 1

        return call


def test_median_ignores_one_stall() -> None:
    clock = FakeClock()
    found = measure(clock.call_of(*[0.01] * 6, 5.0, *[0.01] * 3), clock=clock, budget_s=0.1)
    assert found.median_s == pytest.approx(0.01)
    assert found.samples == 10


def test_first_call_is_not_counted() -> None:
    """The first call may allocate buffers and open connections."""
    clock = FakeClock()
    found = measure(clock.call_of(0.09, *[0.01] * 1000), clock=clock, budget_s=0.1)
    assert found.high_s == pytest.approx(0.01)


def test_short_calls_are_timed_in_groups_and_long_calls_once() -> None:
    assert counts(1e-6, 0.5) == (1000, MOST_SAMPLES)
    assert counts(1e-4, 0.5) == (round(SAMPLE_S / 1e-4), MOST_SAMPLES)
    assert counts(3.0, 0.5) == (1, 1)
    clock = FakeClock()
    assert measure(clock.call_of(3.0), clock=clock, budget_s=0.5).median_s == 3.0
    assert clock.called == 2


def test_a_sample_on_a_device_hides_its_first_launch() -> None:
    """A device starts late and then runs behind its host: the wait for the first launch is paid once per sample."""
    clock, launch, kernel, queued = FakeClock(), 1e-4, 1.5e-3, []

    def synchronize() -> None:
        clock.now += launch + kernel * len(queued)
        queued.clear()

    found = measure(lambda: queued.append(1), Synchronization(synchronize), clock=clock, budget_s=0.25)
    assert found.calls == 7
    assert found.median_s == pytest.approx(kernel + launch / 7)


def test_slowest_rank_counts_and_all_ranks_call_equally_often() -> None:
    clock, barriers, agreed = FakeClock(), [], []

    def agree(seconds):
        agreed.append(list(seconds))
        return [2 * s for s in seconds]

    found = measure(clock.call_of(0.01), Synchronization(lambda: None, lambda: barriers.append(1), agree), clock=clock, budget_s=0.2)  # fmt: skip
    assert found.median_s == pytest.approx(0.02)
    assert found.samples == 10  # derived from the agreed 0.02 s, not from this rank's 0.01 s
    assert len(barriers) == found.samples + 2
    assert [len(values) for values in agreed] == [1, 1, 10]


def test_a_round_that_would_end_after_the_deadline_is_not_started(monkeypatch) -> None:
    """Four ranks on two cores compute for half of the time on the clock; the budget of a bench counts the clock."""
    clock = FakeClock()
    monkeypatch.setattr(device.time, "monotonic", lambda: 2 * clock())
    monkeypatch.setattr(device.time, "thread_time", clock)
    calls = [clock.call_of(0.4), clock.call_of(0.6)]  # a round computes for 1 s, and takes 2
    (plain, _) = device.measure_in_turn(calls, Synchronization(), budget_s=10.0)
    assert plain.samples == 10
    clock.now = 0.0
    (late, _) = device.measure_in_turn(calls, Synchronization(), budget_s=10.0, deadline=9.0)
    assert (late.samples, 2 * clock()) == (4, 8.0)
    clock.now = 0.0
    (least, _) = device.measure_in_turn(calls, Synchronization(), budget_s=10.0, deadline=0.0)
    assert least.samples == 1


def test_operations_of_a_cpu_have_a_spread(monkeypatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(device.time, "thread_time", clock)
    (found,) = device.measure_in_turn([clock.call_of(0.1, 0.2, 0.3, 0.2)], Synchronization(), budget_s=1.0)
    assert found.samples == 10  # 0.1, 0.2, 0.3, 0.2, …
    assert (found.low_s, found.median_s, found.high_s) == pytest.approx((0.125, 0.2, 0.2))


def test_sizes_that_would_take_minutes_are_left_out(monkeypatch) -> None:
    """After a case that took too long on the slowest rank, larger ones of its kind are not run; a round above the budget is not repeated."""
    clock, seen = FakeClock(), []
    monkeypatch.setattr(device.time, "thread_time", clock)
    seconds = {("linear", 1): 0.1, ("linear", 2): 0.4, ("linear", 3): 9.0, ("tile", 1): 0.1, ("tile", 2): 0.2}

    def case(kind: str, m: int) -> MeasuredCase:
        call = clock.call_of(seconds[kind, m])
        return MeasuredCase(kind, {"m": m}, 1, lambda: (seen.append((kind, m)), call()))

    cases = [case(*key) for key in seconds]
    slower_rank = Synchronization(agree=lambda values: [2 * x for x in values])
    kept = device.affordable(cases, slower_rank, 0.5)
    assert seen == [(c.kind, c.shape["m"]) for c in kept] == [key for key in seconds if key != ("linear", 3)]
    calls = [c.call for c in kept]
    assert device.measure_in_turn(calls, Synchronization(), budget_s=0.7)[0].samples == 1  # a round takes 0.8 s
    assert device.measure_in_turn(calls, Synchronization(), budget_s=0.9)[0].samples == 3


@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16, torch.float64])
def test_reductions_of_a_calibration_run_in_the_dtype_of_the_training(reduced, monkeypatch) -> None:
    """Other collectives only move bytes. Sizes are of whole elements of both dtypes on all ranks."""
    seen = []

    class Adapter:
        ranks = (0, 1, 2, 3, 4)

        def collective(self, operation, algorithm, n, dtype):
            seen.append((operation, n, dtype))
            return contention.do_nothing

    monkeypatch.setattr(contention, "seconds", lambda calls: (1.0, 1.0))
    found, _ = contention.added_times(lambda call: contention.do_nothing, Adapter(), 0, reduced)
    assert [(x.operation, x.bytes) for x in found] == [(operation, n) for operation, n, _ in seen]
    assert {operation for operation, _, dtype in seen if dtype == reduced} >= {"all-reduce", "reduce-scatter"}
    assert {dtype for operation, _, dtype in seen if operation in ("all-gather", "all-to-all")} == {torch.float32}
    assert all(n % (5 * dtype.itemsize) == 0 for _, n, dtype in seen)


def test_a_page_shows_the_device_and_why_a_bench_stopped() -> None:
    gemm = DevicePoint(
        kind="gemm", shape={"m": 8, "bytes": 2**20}, work=1e9, median_s=0.1, low_s=0.1, high_s=0.1, samples=1
    )
    bench = Bench(state="interrupted", why="stopped", device=(gemm,), ranks=(RankInfo(rank=0, host="a"),))
    shown = html(bench)
    assert '["gemm","fp32","m 8 × bytes 1 MiB","100 ms","","10 GFLOP/s"]' in shown
    assert '"interrupted: stopped"' in shown


def test_quartiles() -> None:
    found = timed([1.0, 2.0, 3.0, 4.0, 50.0])
    assert (found.low_s, found.median_s, found.high_s, found.spread) == (2.0, 3.0, 4.0, pytest.approx(1 / 3))


def test_bandwidths_follow_the_conventions() -> None:
    assert POINT.algorithm_bandwidth == 4096 / 2e-3
    assert POINT.bus_bandwidth == pytest.approx(1.5 * 4096 / 2e-3)
    assert [bus_factor(op, 4) for op in ("all-gather", "reduce-scatter", "all-to-all", "gather", "scatter")] == [
        0.75
    ] * 5
    assert [bus_factor(op, 4) for op in ("broadcast", "reduce", "point-to-point")] == [1.0] * 3


def test_lectures_rates_are_equal_by_bus_bandwidth() -> None:
    """277 GB/s counts 2(P−1)/P of the buffer, 75 GB/s one shard's share: the text's reduce-scatter reads P times the bytes it counts."""
    ranks, shard = 4, 4e8
    seconds = shard * (ranks - 1) / ranks / 75e9
    assert bus_factor("reduce-scatter", ranks) * ranks * shard / seconds / 1e9 == pytest.approx(300)


def test_bench_is_read_as_it_was_written(tmp_path) -> None:
    device = DevicePoint(kind="gemm", dtype="bf16", shape={"m": 4096}, work=1e12, median_s=1e-3, low_s=1e-3, high_s=2e-3, samples=3)  # fmt: skip
    bench = Bench(
        made="2026-01-01T00:00:00Z",
        state="interrupted",
        why="Ctrl-C",
        ranks=tuple(RankInfo(rank=r, host=f"node{r // 2}") for r in range(4)),
        topology={"node0": {"numa": 1}},
        points=(POINT,),
        device=(device,),
    )
    bench.write(tmp_path / "bench.json")
    assert Bench.read(tmp_path / "bench.json") == bench
    assert bench.hosts == {"node0": [0, 1], "node1": [2, 3]}
    assert device.rate == 1e15


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "MW-BENCH-001"),
        ("[1, 2]", "MW-BENCH-001"),
        ('{"version": 1}', "MW-BENCH-001"),
        ('{"version": 1, "ranks": [], "points": [{"operation": "all-reduce"}]}', "MW-BENCH-001"),
        ('{"version": 1, "ranks": [], "points": [], "surprise": 1}', "MW-BENCH-001"),
        ('{"version": 99, "ranks": [], "points": []}', "MW-BENCH-002"),
        ("[" * 100_000, "MW-BENCH-001"),
        (json.dumps({"version": 1, "ranks": [], "points": [POINT.model_dump(mode="json") | {"median_s": float("nan")}]}), "MW-BENCH-001"),
    ],
)  # fmt: skip
def test_other_files_are_refused(text, code, tmp_path) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(MeshwrightError) as found:
        Bench.read(tmp_path / "bench.json")
    assert found.value.code == code


def test_missing_file_is_an_error(tmp_path) -> None:
    with pytest.raises(MeshwrightError, match="MW-CONF-004"):
        Bench.read(tmp_path / "none.json")
