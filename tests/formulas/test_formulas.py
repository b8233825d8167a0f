"""`mw.formulas`: values by hand and by independent calculations, equality with what the package computes elsewhere, and refused arguments."""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright import formulas as f
from meshwright.describe import catalog
from meshwright.describe.cluster import uniform
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.lower.program import scalar
from meshwright.lower.step import step_program
from meshwright.programs.collectives import build, walk
from meshwright.programs.collectives.comparison import SWITCHED
from meshwright.programs.pipelines import Durations
from meshwright.programs.pipelines import build as build_pipeline
from meshwright.programs.pipelines import walk as walk_pipeline

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")
NEEDS_NODES = ("multi-ring", "two-level", "hierarchical", "rail-tree", "rail-double-tree", *SWITCHED)


def test_they_load_without_torch() -> None:
    code = "import sys, meshwright as mw; mw.formulas.ridge(1, 1); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "False"


def test_every_function_is_exported_once() -> None:
    assert sorted(set(f.__all__)) == list(f.__all__)
    assert all(getattr(f, name).__doc__ for name in f.__all__)
    assert mw.formulas is f


@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [(o, a) for o in OPERATIONS for a in f.algorithms(o) if a not in NEEDS_NODES],
)
def test_times_are_those_of_the_walked_programs(operation: str, algorithm: str) -> None:
    """The closed form against a discrete-event walk of the program itself, on a uniform network."""
    ranks, elements, alpha, rate = 8, 8 * 3 * 1024, 2e-6, 1e9
    segments = {"segments": 4} if algorithm in ("chain", "double-tree") else {}
    program = build(operation, algorithm, ranks, elements, **segments)
    walked = walk(program, uniform(ranks, alpha, rate), element_bytes=4).makespan
    closed = f.collective_time(operation, 4 * elements, ranks, alpha, rate, algorithm, **segments)
    assert closed == pytest.approx(walked, rel=1e-9) or (algorithm == "double-tree" and walked <= closed)


def test_several_nodes_use_both_links() -> None:
    one = {"latency_between": 5e-6, "bandwidth_between": 50e9}
    n, p, g, nodes, a, b, a2, b2 = 1e9, 64, 8, 8, 1.5e-6, 1 / 450e9, 5e-6, 1 / 50e9
    ring = f.collective_time("all-reduce", n, p, a, 1 / b, "ring", nodes=nodes, **one)
    assert ring == pytest.approx(2 * (p - 1) * a2 + 2 * (p - 1) / p * n * b2)  # waits for the slower link
    two = f.collective_time("all-reduce", n, p, a, 1 / b, "two-level", nodes=nodes, **one)
    assert two == pytest.approx(2 * ((g - 1) * (a + n / g * b) + (nodes - 1) * (a2 + n / p * b2)))
    times = f.collective_times("all-reduce", n, p, a, 1 / b, nodes=nodes, **one)
    assert f.collective_time("all-reduce", n, p, a, 1 / b, nodes=nodes, **one) == min(times.values())


def test_algorithms_meet_at_the_equal_time_size() -> None:
    n = f.equal_time_size("all-reduce", "tree", "ring", 8, "1.5us", "450GB/s")
    assert n is not None
    tree, ring = (f.collective_time("all-reduce", n, 8, "1.5us", "450GB/s", a) for a in ("tree", "ring"))
    assert tree == pytest.approx(ring, rel=1e-9)
    assert n == pytest.approx((14 - 6) * 1.5e-6 * 450e9 / (6 - 14 / 8), rel=1e-9)
    assert f.equal_time_size("all-reduce", "halving-doubling", "ring", 8, "1.5us", "450GB/s") is None


def test_alpha_and_beta_come_back_from_noisy_times() -> None:
    """Against `numpy.polyfit`, as the guide's code measures them, on exact times; and with one outlier, which moves only polyfit."""
    sizes = [1024 * 2**i for i in range(20)]
    times = [20e-6 + n / 300e9 for n in sizes]
    slope, intercept = np.polyfit(sizes, times, 1)
    line = f.alpha_beta(sizes, times)
    assert (line.latency_s, line.seconds_per_byte) == (pytest.approx(intercept), pytest.approx(slope))
    assert line.residual < 1e-9
    times[-1] *= 5
    with_outlier = f.alpha_beta(sizes, times)
    assert with_outlier.latency_s == pytest.approx(20e-6, rel=1e-3)
    assert with_outlier.bandwidth == pytest.approx(300e9, rel=1e-2)
    assert with_outlier.deviates_at_bytes == sizes[-1]
    assert abs(np.polyfit(sizes, times, 1)[1] / 20e-6 - 1) > 0.5


def test_alpha_and_beta_of_a_ring_are_those_of_its_link() -> None:
    sizes = [1e3, 1e5, 1e7, 1e9]
    times = [f.collective_time("all-reduce", n, 8, "2us", "100GB/s", "ring") for n in sizes]
    line = f.alpha_beta(sizes, times, "all-reduce", 8, "ring")
    assert (line.latency_s, line.bandwidth) == (pytest.approx(2e-6), pytest.approx(100e9))


def test_the_roofline_by_hand() -> None:
    assert f.ridge("989TFLOP/s", "450GB/s") == pytest.approx(989e12 / 450e9)
    point = f.roofline_point(1e12, 1e9, "989TFLOP/s", "450GB/s")
    assert (point.ccr, point.efficiency) == (1000.0, pytest.approx(1000 * 450 / 989e3))
    batch = f.critical_batch("989TFLOP/s", "450GB/s", 2048)
    assert f.compute_to_communication(7e9, batch * 2048) == pytest.approx(point.ridge)
    levels = f.cluster_ridges("dgx-h100")
    cluster = catalog.load("clusters", "dgx-h100")
    assert [level.ridge for level in levels] == [
        pytest.approx(cluster.accelerator.peak_for("bf16") / cluster.device_bandwidth(k)) for k in range(3)
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_pipelines_are_those_of_the_walked_schedules(schedule: str) -> None:
    p, m, forward, backward = 4, 8, 1.0, 2.0
    v = 2 if schedule == "interleaved" else 1
    durations = Durations.of(p * v, forward / v, backward / 2 / v, backward / 2 / v)
    walked = walk_pipeline(build_pipeline(schedule, p, m, v), durations)
    assert f.pipeline_time(schedule, p, m, forward, backward) == pytest.approx(walked.makespan)
    busy = m * (forward + backward)
    assert f.bubble_fraction(schedule, p, m) == pytest.approx(1 - busy / walked.makespan)
    assert f.bubble_overhead(schedule, p, m) == pytest.approx(walked.makespan / busy - 1)


def test_pipelines_by_hand() -> None:
    assert f.bubble_fraction("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert f.bubble_fraction("interleaved", 4, 8) == pytest.approx(3 / 19)
    assert f.bubble_overhead("1f1b", 16, 4) == pytest.approx(15 / 4)
    assert [f.microbatches_in_flight(s, 4, 8) for s in ("gpipe", "1f1b")] == [8, 4]
    assert f.microbatches_in_flight("1f1b", 4, 8, rank=3) == 1
    assert f.microbatches_for_efficiency("1f1b", 4, 0.8) == 12
    assert f.stages_for_efficiency("1f1b", 4, 8, 0.8) == 3
    assert f.microbatches_for_efficiency("naive", 4, 0.8) is None
    assert f.pipeline_traffic("64MiB", 8, 4) == 2 * 8 * 3 * 64 * 2**20
    assert f.stage_bandwidth("64MiB", "10.24ms") == pytest.approx(2 * 64 * 2**20 / 10.24e-3)


def test_overlap_by_hand() -> None:
    assert f.communication_share(10, "5.6s") == pytest.approx(5.6 / 15.6)
    assert f.overlap_ratio(2, 4) == 0.5
    assert f.overlapped_step(1, 0.2) == 1
    assert f.overlapped_step(1, 0.8, hideable=0.5) == pytest.approx(1.3)
    best = f.optimal_chunks("3.33ms", "5us")
    assert best.chunks == 26
    assert all(best.seconds <= f.chunked_time(k, "3.33ms", "5us") for k in range(1, 100))
    assert f.smallest_bucket("5us", "50GB/s", ranks=8) == pytest.approx(2e6)


def test_buckets_are_the_best_count() -> None:
    """Against all counts: T(k) = k·α + (hidden time)/k, none below n*."""
    total, alpha, rate, window = 500e6, 5e-6, 300e9, 0.2
    count = f.bucket_count(total, alpha, rate, window)
    times = {k: k * alpha + min(total / rate, window) / k for k in range(1, 500)}
    assert count == min(times, key=times.__getitem__)


def test_memory_by_hand() -> None:
    stages = [f.state_memory("7B", 8, stage).total / 1e9 for stage in range(4)]
    assert stages == [pytest.approx(x) for x in (112, 38.5, 26.25, 14)]
    assert f.state_memory("7B", 8, 1) == pytest.approx((14e9, 14e9, 10.5e9, 38.5e9))
    assert (f.gpus_for_state("175B", "80GB"), f.largest_model("80GB")) == (35, 5e9)
    assert f.ring_attention_buffer(2**17, 64, 8192, 1) == 64 * 2**20


def test_activations_are_those_of_our_layer() -> None:
    """Korthikanti's 34sbh + 5as²b against our tensors of the same layer: GELU, dropout and stored probabilities."""
    s, h, a = 128, 256, 8
    shape = {"hidden": h, "heads": a, "ffn": 4 * h, "activation": "gelu", "vocab": 512, "dropout": True}
    one, two = (Model(layers=n, **shape).activations(s, flash=False) for n in (1, 2))
    assert sum(two.values()) - sum(one.values()) == f.activation_memory(s, 1, h, a)
    assert f.activation_memory(s, 2, h, a, layers=3) == 6 * f.activation_memory(s, 1, h, a)


@pytest.mark.parametrize("sp", [False, True])
def test_activations_with_tensor_parallelism_are_those_of_the_step_program(sp: bool) -> None:
    """What the step program of a plan saves per layer, against sbh(10 + 24/t) and 34sbh/t: Korthikanti's forms without the probabilities."""
    shape = {"layers": 2, "hidden": 256, "heads": 8, "ffn": 1024, "activation": "gelu", "vocab": 512, "dropout": True}
    plan = {"tp": 4, "sp": sp, "replicate": 2, "recompute": "none"}
    config = mw.load(Model(name="one", **shape), cluster="dgx-h100", plan=plan, batch=8, seq=128)
    program = step_program(config.model, config.plan, config.workload, config.stack)
    saved = sum(scalar(size) for size in program.saved["dense"].values())
    statistics = 4 * 8 / 4 * 128  # flash attention keeps the logarithms of its sums, 4 bytes per head and token
    expected = f.activation_memory(128, 1, 256, 8, tp=4, sequence_parallel=sp, recompute="selective")
    assert saved == expected + statistics


def test_recompute_leaves_less() -> None:
    full, selective, none = (
        f.activation_memory(2048, 1, 12288, 96, recompute=r) for r in ("full", "selective", "none")
    )
    assert (full, selective) == (2 * 2048 * 12288, 34 * 2048 * 12288)
    assert none > selective


def test_the_kv_cache_of_models() -> None:
    """By hand from the configurations that their authors publish."""
    assert f.model_kv_cache("llama2-70b", 4096) == 2 * 8 * 128 * 4096 * 80 * 2 == f.kv_cache(4096, 80, 8, 128)
    assert (
        f.model_kv_cache("deepseek-v2", 4096)
        == (512 + 64) * 4096 * 60 * 2
        == f.kv_cache(4096, 60, latent=512, rope_dim=64)
    )
    windowed = Model(layers=4, hidden=64, heads=4, ffn=128, vocab=64, window=100, full_every=2)
    assert f.model_kv_cache(windowed, 1000) == 2 * 64 * 2 * (2 * 1000 + 2 * 100)
    assert f.kv_cache(1000, 4, 4, 16, window=100) == f.kv_cache(100, 4, 4, 16)


def test_scaling_laws() -> None:
    assert f.kaplan_size_factor(0.5) == pytest.approx(2 ** (1 / 0.076))
    assert f.kaplan_loss("1B") == pytest.approx(8.8e4**0.076)
    assert f.kaplan_loss(tokens="100B") == pytest.approx(540**0.095)
    assert f.chinchilla_loss("70B", "1.4T", "hoffmann") == pytest.approx(
        1.69 + 406.4 / 70e9**0.34 + 410.7 / 1.4e12**0.28
    )


@pytest.mark.parametrize("fit", ["besiroglu", "hoffmann"])
def test_compute_optimal_has_the_smallest_loss(fit: str) -> None:
    """The closed form against a search over models of the same FLOPs."""
    best = f.compute_optimal(5.76e23, fit)
    assert f.training_flops(best.parameters, best.tokens) == pytest.approx(5.76e23)
    assert f.optimal_tokens(best.parameters, fit) == pytest.approx(best.tokens)
    sizes = best.parameters * np.geomspace(0.1, 10, 201)
    losses = [f.chinchilla_loss(n, 5.76e23 / 6 / n, fit) for n in sizes]
    assert int(np.argmin(losses)) == 100
    assert best.loss == pytest.approx(min(losses))


def test_the_constants_that_were_fitted_again_give_about_20_tokens_per_parameter() -> None:
    assert 15 < f.optimal_tokens("70B") / 70e9 < 25
    assert (
        f.optimal_tokens("70B", "hoffmann") / 70e9 > 100
    )  # as printed: the discrepancy that Besiroglu et al. describe


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: f.crossover_size(0, 1e9), "MW-FORM-001"),
    (lambda: f.crossover_size("1us", 0), "MW-FORM-001"),
    (lambda: f.message_time("-1B", 0, 1e9), "MW-UNIT"),
    (lambda: f.message_time("1 parsec", 0, 1e9), "MW-UNIT-002"),
    (lambda: f.collective_time("all-reduce", 0, 8, 0, 1e9), "MW-FORM-001"),
    (lambda: f.collective_time("all-reduce", "1GB", 0, 0, 1e9), "MW-FORM-001"),
    (lambda: f.collective_time("all-reduce", "1GB", 8, 0, 1e9, nodes=3), "MW-FORM-001"),
    (lambda: f.collective_time("all-reduc", "1GB", 8, 0, 1e9), "MW-FORM-002"),
    (lambda: f.collective_time("all-reduce", "1GB", 8, 0, 1e9, "rings"), "MW-FORM-002"),
    (lambda: f.bytes_sent("barrier", 1, 8), "MW-FORM-002"),
    (lambda: f.alpha_beta([1, 2], [1]), "MW-FORM-001"),
    (lambda: f.alpha_beta([1, 1], [1, 1]), "MW-FORM-001"),
    (lambda: f.alpha_beta([1, 2], [1, 2], "all-reduce", 8, "nvls"), "MW-FORM-001"),
    (lambda: f.bubble_fraction("1f1b", 0, 8), "MW-FORM-001"),
    (lambda: f.bubble_fraction("interleaved", 4, 8, 1), "MW-PIPE-004"),
    (lambda: f.bubble_fraction("2f2b", 4, 8), "MW-PIPE-002"),
    (lambda: f.microbatches_in_flight("1f1b", 4, 8, rank=4), "MW-FORM-001"),
    (lambda: f.microbatches_for_efficiency("1f1b", 4, 1.0), "MW-FORM-001"),
    (lambda: f.state_memory("7B", 8, 4), "MW-FORM-001"),
    (lambda: f.state_memory(0), "MW-FORM-001"),
    (lambda: f.activation_memory(2048, 1, 64, 8, recompute="some"), "MW-FORM-002"),
    (lambda: f.kv_cache(10, 1), "MW-FORM-001"),
    (lambda: f.kv_cache(10, 1, 8, 64, latent=512), "MW-FORM-001"),
    (lambda: f.model_kv_cache("resnet-50", 10), "MW-FORM-001"),
    (lambda: f.overlapped_step(1, 1, 2), "MW-FORM-001"),
    (lambda: f.kaplan_loss(), "MW-FORM-001"),
    (lambda: f.kaplan_loss("1B", "1T"), "MW-FORM-001"),
    (lambda: f.chinchilla_loss("1B", "20B", "deepmind"), "MW-FORM-002"),
    (lambda: f.critical_batch("1TFLOP/s", "1GB/s", 0), "MW-FORM-001"),
    (lambda: f.communication_share(0, 1), "MW-FORM-001"),
    (lambda: f.crossover_size(math.nan, 1e9), "MW-UNIT-003"),
    (lambda: f.gpus_for_state(True, "80GB"), "MW-UNIT-001"),
]


@pytest.mark.parametrize(("call", "code"), REFUSED)
def test_impossible_numbers_are_refused(call: Callable[[], Any], code: str) -> None:
    with pytest.raises(MeshwrightError, match=code):
        call()
