"""Calibration recovers the cluster that a bench was generated from: α and β within a derived bound, levels, shared links, slow nodes."""

import re

import numpy as np
import pytest

from calibrate import synthetic
from meshwright.calibrate.calibration import best_match, calibrate, notes_of
from meshwright.calibrate.fit import additions, crossovers, fit, fit_line, robust_fit, series_of
from meshwright.calibrate.levels import find_levels
from meshwright.calibrate.points import Bench, DevicePoint, Point, RankInfo
from meshwright.cli import main
from meshwright.cost.collective import choose
from meshwright.cost.compute import device_time
from meshwright.describe import catalog
from meshwright.describe.cluster import Factors
from meshwright.describe.config import load_cluster
from meshwright.errors import MeshwrightError
from meshwright.lower.program import Op
from meshwright.view.bench import header
from meshwright.view.tables import console

NOISE = 0.03
TWO_LEVELS = synthetic.cluster((4, 30e-6, 2e9), (4, 1e-3, 25e6), ports=1)


def bounds(sizes, alpha: float, beta: float, noise: float) -> tuple[float, float]:
    """How far a robust line may be off. Every residual, of outliers too, counts at most 1.345 · 1.4826 · noise ≈ 2 · noise (`fit`), so
    |error of a coefficient| ≤ 2 · noise · Σᵢ |Pᵢ|, P its row of the pseudo-inverse of the relative columns."""
    n = np.asarray(sizes, dtype=float)
    columns = np.stack([np.ones_like(n), n], axis=1) / (alpha + beta * n)[:, None]
    rows = np.abs(np.linalg.pinv(columns)).sum(axis=1)
    return 2 * noise * rows[0], 2 * noise * rows[1]


# Lines


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("alpha", "rate"), [(2e-6, 300e9), (200e-6, 2e9), (5e-3, 25e6)])
def test_line_is_recovered_in_spite_of_outliers(alpha: float, rate: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = np.tile(synthetic.SIZES, 3)
    seconds = (alpha + sizes / rate) * random.uniform(1 - NOISE, 1 + NOISE, len(sizes))
    seconds[random.choice(len(sizes), 5, replace=False)] *= random.uniform(3, 10, 5)
    line = fit_line(sizes, seconds)
    off_alpha, off_beta = bounds(sizes, alpha, 1 / rate, NOISE)
    assert abs(line.alpha - alpha) <= off_alpha
    assert abs(line.beta - 1 / rate) <= off_beta
    assert line.residual <= 2 * NOISE


def test_constants_are_never_negative() -> None:
    line = fit_line([1e3, 1e4, 1e5], [1e-3, 0.9e-3, 0.8e-3])
    assert line.beta == 0
    assert line.alpha > 0
    assert fit_line([1e6, 2e6, 4e6], [1e-3, 2.1e-3, 4.4e-3]).alpha == 0
    assert robust_fit(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([2.0, 2.0])) == pytest.approx([2.0, 0.0])


def test_bend_is_reported_where_it_is() -> None:
    sizes = np.array(synthetic.SIZES)
    seconds = 1e-4 + sizes / 1e9
    seconds[4] *= 2
    line = fit_line(sizes, seconds)
    assert line.deviates_at == sizes[4]
    assert line.deviation == pytest.approx(0.5, abs=0.05)


# Levels


@pytest.mark.parametrize(
    ("truth", "sizes"),
    [
        (synthetic.cluster((4, 30e-6, 2e9)), [4]),
        (TWO_LEVELS, [4, 16]),
        (synthetic.cluster((2, 5e-6, 100e9), (2, 10e-6, 20e9), (3, 50e-6, 2e9)), [2, 4, 12]),
    ],
)
def test_levels_and_links_are_found(truth, sizes) -> None:
    found = find_levels(synthetic.bench(truth, noise=NOISE, outliers=0.04, seed=3), "gloo")
    assert [len(level.units[0]) for level in found] == sizes
    for level, known in zip(found, truth.levels, strict=True):
        off_alpha, off_beta = bounds(synthetic.SIZES, known.link.alpha, known.link.beta, NOISE)
        assert abs(level.line.alpha - known.link.alpha) <= off_alpha
        assert abs(level.line.beta - known.link.beta) <= off_beta


def test_ranks_placed_round_robin_form_the_same_nodes() -> None:
    devices = [4 * (rank % 4) + rank // 4 for rank in range(16)]
    result = calibrate([synthetic.bench(TWO_LEVELS, device_of=devices)])
    assert result.levels[0].units == tuple(tuple(range(node, 16, 4)) for node in range(4))
    assert any("not consecutive" in note for note in result.notes)


def test_shared_bus_and_shared_cards_are_found() -> None:
    result = calibrate([synthetic.bench(synthetic.cluster((4, 30e-6, 2e9), (4, 1e-3, 25e6), ports=1, shared=True))])
    inside, between = result.cluster.levels
    assert inside.shared
    assert inside.link.bandwidth == pytest.approx(2e9, rel=4 * NOISE)
    assert between.ports == 1
    (own,) = calibrate([synthetic.bench(synthetic.cluster((4, 30e-6, 2e9)))]).cluster.levels
    assert not own.shared


def test_slow_node_is_named_and_left_out_of_the_fit() -> None:
    bench = synthetic.bench(TWO_LEVELS, slow=lambda rank: 4.0 if rank // 4 == 2 else 1.0, outliers=0.02)
    result = calibrate([bench])
    (slow,) = result.levels[1].slow
    assert slow.name == "host node2 (ranks 8–11)"
    assert slow.factor == pytest.approx(4.0, rel=4 * NOISE)
    assert any("node2" in cause for cause in result.verdicts[1].causes)
    _, off_beta = bounds(synthetic.SIZES, 1e-3, 1 / 25e6, NOISE)
    assert abs(result.levels[1].line.beta - 1 / 25e6) <= off_beta
    assert all(not level.slow for level in calibrate([synthetic.bench(TWO_LEVELS)]).levels)


# The cluster file


def test_factors_of_the_collectives_are_recovered() -> None:
    known = {"all-reduce": Factors(latency=2.0, bytes=1.4), "all-gather": Factors(latency=1.5, bytes=1.0)}
    result = calibrate([synthetic.bench(synthetic.cluster((4, 30e-6, 2e9), factors=known), noise=NOISE, outliers=0.03)])
    found = {f.operation: f for f in result.factors}
    for operation, factors in known.items():
        # the link and the factor are both fitted within 2 · noise · Σ|P|, and Σ|P| · coefficient ≤ 3 for these sizes
        assert found[operation].factors.latency == pytest.approx(factors.latency, rel=12 * NOISE)
        assert found[operation].factors.bytes == pytest.approx(factors.bytes, rel=12 * NOISE)
        assert found[operation].residual <= 2 * NOISE


def test_few_nodes_stand_for_many() -> None:
    """A calibration of two nodes prices sixteen nodes as the true cluster does."""
    truth = synthetic.cluster((4, 30e-6, 2e9), (16, 1e-3, 25e6), ports=1)
    result = calibrate([synthetic.bench(truth.with_nodes(2), noise=NOISE)])
    assert any("more than 2 nodes" in note for note in result.notes)
    for n in (2**12, 2**20, 2**26):
        known = choose(truth, "all-reduce", n, 64).seconds
        assert choose(result.cluster.with_nodes(16), "all-reduce", n, 64).seconds == pytest.approx(known, rel=6 * NOISE)


def test_file_loads_as_the_same_cluster(tmp_path, capsys) -> None:
    bench = synthetic.bench(TWO_LEVELS)
    bench.write(tmp_path / "bench.json")
    with pytest.raises(SystemExit) as left:
        main(["calibrate", str(tmp_path / "bench.json"), "--out", str(tmp_path / "cluster.toml"), "--name", "lab"])
    assert left.value.code == 0
    found = load_cluster(tmp_path / "cluster.toml")
    assert found == calibrate([bench], name="lab").cluster
    assert (found.name, found.node_size, found.world) == ("lab", 4, 16)
    assert "more than 4 nodes" in (tmp_path / "cluster.toml").read_text()
    assert "verdict" in capsys.readouterr().out


def test_factors_differ_inside_a_node_and_between_nodes() -> None:
    inside, across = Factors(latency=3.0, bytes=2.0), Factors(latency=1.2, bytes=1.1)
    truth = synthetic.cluster((4, 30e-6, 2e9), (3, 1e-3, 25e6), ports=1)
    known = truth.but(
        collectives=truth.collectives.but(factors={"all-gather": inside}, factors_across={"all-gather": across})
    )
    result = calibrate([synthetic.bench(known, noise=NOISE, operations={"all-gather": "multi-ring"})])
    added = result.cluster.collectives
    assert added.factor("all-gather").bytes == pytest.approx(2.0, rel=12 * NOISE)
    assert added.factor("all-gather", across=True).bytes == pytest.approx(1.1, rel=12 * NOISE)
    assert all(f.residual <= 2 * NOISE for f in result.factors)


def test_factors_between_nodes_are_found_where_links_inside_a_node_have_more_latency() -> None:
    """At factors of 1 the links inside nodes are the slower ones, so that changing the factors between nodes changes nothing."""
    truth = synthetic.cluster((2, 1e-3, 2e9), (4, 5e-4, 25e6), ports=1)
    across = Factors(latency=9.0, bytes=3.0)
    known = truth.but(collectives=truth.collectives.but(factors_across={"all-gather": across}))
    bench = synthetic.bench(known, operations={"all-gather": "multi-ring"})
    small = [p for p in bench.points if p.operation == "all-gather" and len(p.ranks) == 8 and p.bytes <= 65536]
    found = fit(truth, "all-gather", small, across=True)
    assert found.residual < 0.01
    assert found.factors.latency == pytest.approx(9.0, rel=0.05)


# Verdicts


def gpus(*levels: tuple[int, float, float], device: str = "NVIDIA H100 80GB HBM3", **options) -> Bench:
    found = synthetic.bench(synthetic.cluster(*levels), backend="nccl", operations={}, **options)
    return found.but(ranks=tuple(RankInfo(rank=i.rank, host=i.host, device=device) for i in found.ranks))


H100 = ((8, 10e-6, 370e9), (2, 36e-6, 45e9))


def test_healthy_cluster_is_normal() -> None:
    bench = gpus(*H100)
    assert best_match(bench).accelerator.name.startswith("h100")
    result = calibrate([bench], "dgx-h100")
    assert [str(v) for v in result.verdicts] == ["normal", "normal"]
    assert result.cluster.accelerator.name == "h100-sxm"
    # a send costs the call of the library and the latency of the link, together what was measured
    off, _ = bounds(synthetic.SIZES, 36e-6, 1 / 45e9, NOISE)
    assert abs(choose(result.cluster.with_gpus(16), "point-to-point", 0.0, 16).seconds - 36e-6) <= off


@pytest.mark.parametrize(
    ("levels", "topology", "level", "says"),
    [
        (((8, 14e-6, 22e9), H100[1]), {"node0": {"gpu_links": [["X", "SYS"], ["SYS", "X"]]}}, 0, "PCIe instead of NVLink.*SYS"),
        ((H100[0], (2, 90e-6, 5e9)), {}, 1, "TCP instead of RDMA.*no RDMA device"),
        (
            (H100[0], (2, 90e-6, 1.2e9)),
            {"node0": {"rdma": {"mlx5_0": "400 Gb/sec"}, "interfaces": {"eth0": {"state": "up", "bytes_per_s": 1.25e9}}}},
            1,
            "wrong interface.*eth0",
        ),
        ((H100[0], (2, 36e-6, 9e9)), {}, 1, "oversubscribed"),
    ],
)  # fmt: skip
def test_causes_are_named(levels, topology, level, says) -> None:
    verdict = calibrate([gpus(*levels, topology=topology)], "dgx-h100").verdicts[level]
    assert not verdict.normal
    assert verdict.factor > 1.5
    assert re.search(says, " ".join(verdict.causes))


# Algorithms


def test_crossover_between_algorithms() -> None:
    truth = synthetic.cluster((8, 1e-3, 1e9))
    points = [
        Point(operation="all-reduce", backend="meshwright", algorithm=name, ranks=tuple(range(8)), bytes=n, median_s=t, low_s=t, high_s=t, samples=3)
        for name in ("ring", "tree")
        for n in synthetic.SIZES
        for t in [synthetic.collective_seconds(truth, "all-reduce", name, 8, n)]
    ]  # fmt: skip
    series = series_of(points)
    (found,) = crossovers(series)
    assert (found.before, found.after) == ("meshwright tree", "meshwright ring")
    noisy = [p.but(median_s=p.median_s * (1 + 0.04 * (-1) ** k)) for k, p in enumerate(points)]
    assert crossovers(series_of([*points, *(p.but(algorithm="other") for p in noisy if p.algorithm == "ring")])) != []
    assert [c.after for c in crossovers(series_of(noisy))] == ["meshwright ring"]
    # 2·7·α + 2·7/8·nβ = 2·3·α + 2·3·nβ at n* = 8α / (6 − 1.75)β ≈ 1.9 MB: the next measured size
    assert found.bytes == min(n for n in synthetic.SIZES if n > 8 * 1e-3 / (4.25 / 1e9))
    assert {s.algorithm: s.alpha for s in series} == {"ring": pytest.approx(1e-3), "tree": pytest.approx(1e-3)}


def test_additions_are_the_difference_of_reduce_scatter_and_all_gather() -> None:
    gamma, beta = 0.4e-9, 1e-9
    points = [
        Point(
            operation=op,
            backend="meshwright",
            algorithm="ring",
            ranks=(0, 1, 2, 3),
            bytes=n,
            median_s=t,
            low_s=t,
            high_s=t,
            samples=3,
        )
        for op, cost in (("all-gather", beta), ("reduce-scatter", beta + gamma))
        for n in synthetic.SIZES
        for t in [1e-4 + 0.75 * n * cost]
    ]
    assert additions(series_of(points)) == {"meshwright ring": pytest.approx(gamma, rel=1e-6)}


# The device


def test_shares_of_a_gpu_are_recovered() -> None:
    """Device points generated by the cost model with known shares give these shares; the links stay the catalog's."""
    plain = catalog.load("accelerators", "h200")
    known = plain.but(
        efficiency=plain.efficiency.but(gemm=0.61, gemm_fp8=0.57, grouped=0.85, flash=0.42, fused=0.55, memory=0.88)
    )
    points = []

    def add(kind: str, seconds: float, work: float, unit: str, shape: dict, dtype: str) -> None:
        times = {"median_s": seconds, "low_s": seconds, "high_s": seconds, "samples": 3}
        points.append(DevicePoint(kind=kind, dtype=dtype, shape=shape, work=work, unit=unit, **times))

    for size in (2**20, 2**26, 2**30):
        op = Op("copy", "other", "memory", bytes=np.array([2.0 * size]))
        add("copy", float(device_time(known, "bf16", "flash", op)[0]), 2.0 * size, "byte", {"bytes": size}, "fp32")
    for m in (4096, 8192):
        shape, flops = tuple(map(np.array, (1.0, m, m, m))), np.array([2.0 * m**3])
        narrow = Op("gemm", "ffn", "gemm", flops=flops, bytes=np.array([4.0 * m * m]), shape=shape)
        seconds = float(device_time(known, "fp8", "flash", narrow)[0])
        eight = tuple(map(np.array, (8.0, m, m, m)))
        grouped = Op("gemm", "experts", "gemm", flops=8 * flops, bytes=np.array([48.0 * m * m]), shape=eight)
        sizes = {"experts": 8, "m": m, "n": m, "k": m}
        add("grouped-gemm", float(device_time(known, "bf16", "flash", grouped)[0]), 16.0 * m**3, "FLOP", sizes, "bf16")
        add("fp8-gemm", seconds, 2.0 * m**3, "FLOP", {"m": m, "n": m, "k": m}, "fp8")
        op = Op("gemm", "ffn", "gemm", flops=flops, bytes=np.array([6.0 * m * m]), shape=shape)
        add(
            "gemm",
            float(device_time(known, "bf16", "flash", op)[0]),
            2.0 * m**3,
            "FLOP",
            {"m": m, "n": m, "k": m},
            "bf16",
        )
    for seq in (4096, 8192):
        work = 7.0 * 16 * seq**2 * 128
        op = Op(
            "core",
            "attention",
            "attention",
            flops=np.array([work]),
            shape=tuple(map(np.array, (16.0, seq, seq, 128.0))),
        )
        shape = {"batch": 1, "heads": 16, "seq": seq, "width": 128}
        for kind, kernel in (("attention", "flash"), ("fused-attention", "fused")):
            add(kind, float(device_time(known, "bf16", kernel, op)[0]), work, "FLOP", shape, "bf16")
    for kind, factor in (("unit-copy-out", 1.4), ("unit-copy-in", 1.9)):
        op = Op(kind, "copies", "memory", bytes=np.array([2.0**30]))
        seconds = factor * float(device_time(known, "bf16", "flash", op)[0])
        add(kind, seconds, 2.0**30, "byte", {"ranks": 8, "elements": 2.0**28}, "bf16")
    add("host-copy", 2**28 / 50e9, 2**28, "byte", {"bytes": 2**28}, "bf16")
    bench = Bench(ranks=(RankInfo(rank=0, host="a", device="NVIDIA H200"),), device=tuple(points))
    result = calibrate([bench])
    found = result.cluster.accelerator.efficiency
    assert (found.memory, found.gemm) == (pytest.approx(0.88, rel=1e-3), pytest.approx(0.61, rel=1e-3))
    assert found.grouped == pytest.approx(0.85, rel=1e-3)
    assert found.gemm_fp8 == pytest.approx(0.57, rel=1e-3)
    assert (found.flash, found.fused) == (pytest.approx(0.42, rel=1e-3), pytest.approx(0.55, rel=1e-3))
    factors = found.elementwise
    assert (factors["unit-copy-out"], factors["unit-copy-in"]) == (
        pytest.approx(1.4, rel=1e-3),
        pytest.approx(1.9, rel=1e-3),
    )
    assert result.cluster.accelerator.host_bandwidth == pytest.approx(50e9)
    assert found.measured
    assert result.cluster.levels == catalog.load("clusters", result.expected.name).levels
    assert any("not measured" in note for note in result.notes)


def test_a_busy_machine_is_noted() -> None:
    ranks = tuple(RankInfo(rank=r, host="a", cores=4) for r in range(2))
    assert [Bench(ranks=ranks, topology={"a": {"busy_cores": busy}}).load() for busy in (0.3, 0, "x")] == [[], [], []]
    busy = Bench(ranks=ranks, topology={"a": {"busy_cores": 1.3}, "b": []})
    assert busy.load() == ["a was busy: other processes used 1.3 of 4 cores before the measurements"]
    assert f"{busy.load()[0]}: an idle machine is faster" in notes_of(
        busy, [], catalog.load("clusters", "laptop"), "gloo"
    )
    with (out := console()).capture() as text:
        out.print(header(busy))
    assert "other processes used 1.3 of 4 cores" in text.get()


# Bad input


def test_bench_without_pairs_or_without_files_is_refused(capsys) -> None:
    empty = Bench(ranks=tuple(RankInfo(rank=r, host="a") for r in range(2)))
    with pytest.raises(MeshwrightError, match="MW-CALIB-001"):
        calibrate([empty])
    with pytest.raises(SystemExit) as left:
        main(["calibrate"])
    assert left.value.code == 2
    assert "MW-CALIB-002" in capsys.readouterr().err


def test_results_of_different_clusters_are_refused() -> None:
    one_host, two_hosts = (
        synthetic.bench(synthetic.cluster(*levels)) for levels in (((4, 1e-5, 2e9),), ((2, 1e-5, 2e9), (2, 1e-3, 2e7)))
    )
    with pytest.raises(MeshwrightError, match=r"MW-CALIB-009.*4 ranks on 1 host \(cpu\), and 4 ranks on 2 hosts"):
        calibrate([one_host, two_hosts])
    with pytest.raises(MeshwrightError, match="MW-CALIB-009"):
        calibrate([two_hosts, two_hosts.but(ranks=tuple(info.but(device="NVIDIA L4") for info in two_hosts.ranks))])
    assert "from 6 pairs in 1 unit of 4 ranks" in " ".join(calibrate([one_host, one_host]).notes)


@pytest.mark.parametrize(
    ("points", "factor", "refused"), [(4, 1, "4 points of 4 sizes"), (5, 1, ""), (8, 500, "not both between")]
)
def test_factors_need_points_to_spare_and_stay_near_one(points: int, factor: float, refused: str) -> None:
    """Two points are met exactly by some factors, whatever was measured."""
    bench = synthetic.bench(synthetic.cluster((4, 30e-6, 2e9)))
    kept = sorted({p.bytes for p in bench.points if p.operation == "all-reduce"})[:points]
    few = [p for p in bench.points if p.operation != "all-reduce" or (p.bytes in kept and len(p.ranks) == 4)]
    slow = [p.but(median_s=p.median_s * factor) if p.operation == "all-reduce" else p for p in few]
    result = calibrate([bench.but(points=tuple(slow))])
    (found,) = [f for f in result.factors if f.operation == "all-reduce"]
    assert refused in found.refused
    assert bool(found.refused) == bool(refused)
    assert ("all-reduce" in result.cluster.collectives.factors) == (not refused)
    assert any("all-reduce inside a node: no factors" in note for note in result.notes) == bool(refused)
