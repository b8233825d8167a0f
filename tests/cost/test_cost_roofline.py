"""The roofline and the small closed forms: corrected published figures, and each formula at its turning point."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import advice, roofline
from meshwright.describe import catalog
from meshwright.describe.cluster import uniform
from meshwright.programs.collectives import build, walk
from meshwright.view.simulate import spans

H100, A100 = (catalog.load("accelerators", n) for n in ("h100-sxm", "a100-80gb"))


def test_ridges_are_dense_peak_over_one_direction():
    """2,199 for an H100 on NVLink, 19,788 over one 400 Gb/s card, 1,040 for an A100 on NVLink."""
    assert roofline.ridge(H100.peak_for("bf16"), 450e9) == pytest.approx(2198.7, abs=0.1)
    assert roofline.ridge(H100.peak_for("bf16"), 50e9) == pytest.approx(19788, abs=1)
    assert roofline.ridge(A100.peak_for("bf16"), 300e9) == pytest.approx(1040)


def test_ccr_of_data_parallelism_does_not_depend_on_the_model():
    """3,072 for one sequence of 2,048 tokens, and proportional to the tokens."""
    printed = {1: 3072, 4: 12288, 16: 49152, 64: 196608, 256: 786432}
    for batch, ccr in printed.items():
        assert roofline.ccr_data_parallel(175e9, batch * 2048) == roofline.ccr_data_parallel(7e9, batch * 2048) == ccr


@pytest.mark.parametrize(
    ("share", "name"),
    [
        (0.19, "severely communication-bound"),
        (0.2, "communication-bound"),
        (0.79, "communication-bound"),
        (0.8, "near the ridge"),
        (1.19, "near the ridge"),
        (1.2, "compute-bound"),
        (50, "compute-bound"),
    ],
)
def test_regimes_change_at_their_cut_offs(share, name):
    regime_name, how = roofline.regime(share * 1000, 1000)
    assert regime_name == name
    assert len(how) >= 3


@settings(max_examples=30, deadline=None)
@given(st.floats(1e9, 1e18), st.floats(1, 1e12), st.floats(1e12, 1e16), st.floats(1e9, 1e12))
def test_position_is_consistent(flops, sent, peak, bandwidth):
    place = roofline.position(flops, [sent], peak, uniform(8, 1e-6, bandwidth))
    assert 0 < place.efficiency <= 1
    assert place.ceilings[0].seconds == pytest.approx(sent / bandwidth)
    # Below the ridge the network's seconds rule, above it the device's.
    assert (place.efficiency < 1) == (sent / bandwidth > flops / peak)
    # The regime follows the cost model's word on what bounds the step.
    assert "communication-bound" in roofline.position(flops, [sent], peak, uniform(8, 1e-6, bandwidth), True).regime
    assert (
        "communication-bound" not in roofline.position(flops, [sent], peak, uniform(8, 1e-6, bandwidth), False).regime
    )


def test_no_traffic_gives_no_communication_bound():
    place = roofline.position(1e15, [0.0], 1e15, uniform(8, 1e-6, 1e11))
    assert (place.efficiency, place.regime) == (1, "no communication")


def test_every_level_has_bytes_and_a_ceiling():
    cluster = catalog.load("clusters", "dgx-h100").with_gpus(1024)
    place = roofline.position(1e15, [1e12, 1e9, 0.0], 989.4e12, cluster)
    tops = place.ceilings
    assert [t.level for t in tops] == [level.name for level in cluster.levels]
    assert all(t.ridge == pytest.approx(989.4e12 / t.bandwidth) for t in tops)
    assert tops[0].ridge < tops[1].ridge
    assert tops[0].efficiency < 1 == tops[1].efficiency == tops[2].efficiency
    assert (place.level, place.efficiency) == (tops[0].level, tops[0].efficiency)


# Chunks, buckets, overlap


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-6, 1), st.floats(1e-7, 1e-3))
def test_optimal_chunks_is_the_minimum(exposed, overhead):
    k = advice.optimal_chunks(exposed, overhead)

    def total(chunks):
        return chunks * overhead + exposed / chunks

    best = min(
        total(max(1, math.floor(math.sqrt(exposed / overhead)))), total(math.ceil(math.sqrt(exposed / overhead)))
    )
    assert total(k) <= best * 1.02


def test_chunk_example_and_overlap():
    """500 MB twice over 300 GB/s, 5 µs per chunk: 26 chunks (a published example says 16). 1000 ms of compute hide 200 ms of communication."""
    assert advice.optimal_chunks(2 * 500e6 / 300e9, 5e-6) == 26
    assert advice.overlap_ratio(0.2, 1.0) == pytest.approx(0.2)
    assert advice.overlapped_step(1.0, 0.2) == 1.0
    assert advice.overlapped_step(1.0, 1.5) == 1.5
    assert advice.overlapped_step(1.0, 0.2, hideable=0.0) == 1.2


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 10), st.floats(0, 10), st.floats(0, 1))
def test_overlapped_step_is_between_the_maximum_and_the_sum(compute, communication, hideable):
    step = advice.overlapped_step(compute, communication, hideable)
    assert max(compute, communication) - 1e-12 <= step <= compute + communication + 1e-12


def test_buckets():
    assert advice.minimum_bucket(5e-6, 1 / 25e9) == pytest.approx(125e3)
    count = advice.buckets(1e9, 5e-6, 1 / 25e9, window=1.0)
    assert count == advice.optimal_chunks(0.04, 5e-6) == 89
    assert 1e9 / count > advice.minimum_bucket(5e-6, 1 / 25e9)
    assert advice.buckets(100e3, 5e-6, 1 / 25e9, window=1.0) == 1  # below n*: one bucket
    assert advice.buckets(1e9, 5e-6, 1 / 25e9, window=0.0) == 1  # nothing to hide behind


# Pipelines, ring attention, batches


def test_bandwidth_between_stages():
    """64 MiB in both directions in 10.24 ms per micro-batch is 104.86 Gb/s; a published 97.66 is in Gibit/s."""
    rate = advice.minimum_stage_bandwidth(64 * 2**20, 81.92e-3 / 8)
    assert rate * 8 / 1e9 == pytest.approx(104.86, abs=0.005)
    assert rate * 8 / 2**30 == pytest.approx(97.66, abs=0.005)


def test_ring_attention_buffers_and_hidden_transfers():
    assert advice.ring_buffer(131072, 64, 8192, 1) == 64 * 2**20
    assert advice.ring_buffer(2**20, 8, 8192, 1) == 4 * 2**30
    flops, bandwidth = 400e12, 50e9
    block = advice.ring_free_block(64, 8, flops, bandwidth)
    for ranks in (2, 8):
        compute, transfer = advice.ring_step(block * ranks, ranks, 64, 128, 8, flops, bandwidth)
        assert compute == pytest.approx(transfer)


def test_accumulation():
    assert advice.accumulation(1024, 4, 32) == 8


def test_communication_share():
    assert advice.communication_share(10, 5.6) == pytest.approx((0.359, 0.641), abs=0.001)
    assert advice.communication_share(3, 5.6) == pytest.approx((0.651, 0.349), abs=0.001)


def test_top_k_compression():
    assert advice.topk_compression(0.01) == pytest.approx(33.3, abs=0.05)
    assert advice.topk_compression(0.01, ranks=8) == pytest.approx(8.33, abs=0.01)
    assert advice.topk_compression(0.01, 4, 4) == pytest.approx(50)


def test_compression_pays_below_its_break_even_bandwidth():
    """1 GB compressed 4× in 5 ms: sending 1.5 GB less is faster below 300 GB/s."""
    even = advice.compression_break_even(1e9, 4, 5e-3)
    assert even == pytest.approx(300e9)
    for bandwidth, pays in ((0.9 * even, True), (1.1 * even, False)):
        plain, small = 2 * 1e9 / bandwidth, 2 * 0.25e9 / bandwidth + 5e-3
        assert (small < plain) == pays


def test_tensor_parallelism_reduces_inference_latency():
    """A token reads every weight once: tp divides this time, a pipeline does not. At some degree the latency exceeds the gain."""
    args = (70e9, 80, 8192)
    alone = advice.inference_latency(*args, 1, 3.35e12, 1.5e-6, 1 / 450e9)
    assert alone == pytest.approx(140e9 / 3.35e12)
    eight = advice.inference_latency(*args, 8, 3.35e12, 1.5e-6, 1 / 450e9)
    messages = walk(
        build("all-reduce", "halving-doubling", 8, 8192), uniform(8, 1.5e-6, 450e9), element_bytes=2
    ).makespan
    assert eight == pytest.approx(alone / 8 + 2 * 80 * messages, rel=1e-6)
    slow_link = [advice.inference_latency(*args, tp, 3.35e12, 500e-6, 1 / 1e9) for tp in (1, 8)]
    assert slow_link[1] > slow_link[0]


SMALL = ("llama3-8b", "dgx-a100")
TRAFFIC = [  # plan, and the level of each axis and group size
    ({"replicate": 2, "shard": 8, "zero": 3}, {("dp", 8): "node", ("dp", 2): "rail"}),
    ({"replicate": 2, "shard": 4, "zero": 3, "cp": 2}, {("cp", 2): "node", ("dp", 8): "node", ("dp", 2): "rail"}),
    ({"tp": 8, "sp": True, "replicate": 2}, {("tp", 8): "node", ("dp", 2): "rail"}),
    ({"tp": 4, "cp": 2, "pp": 2}, {("tp", 4): "node", ("cp", 2): "node", ("dp", 2): "node", ("pp", 2): "rail"}),
    ({"cp": 8, "pp": 2}, {("cp", 8): "node", ("dp", 8): "node", ("pp", 2): "rail"}),
]


@pytest.mark.parametrize(("plan", "levels"), TRAFFIC, ids=str)
def test_the_traffic_table_has_the_bytes_of_the_roofline_at_every_level(plan, levels):
    """No group of these plans has several ranks on each of several nodes, so no collective is divided between levels."""
    import meshwright as mw

    settings = [f"plan.{name}={str(value).lower()}" for name, value in plan.items()]
    e = mw.estimate(SMALL[0], cluster=SMALL[1], nodes=2, set=["workload.batch=64", *settings])
    rows = e.prediction.traffic_by_level
    assert sorted((row["axis"], row["ranks"], row["level"]) for row in rows) == sorted(
        (axis, ranks, level) for (axis, ranks, *_), level in levels.items()
    )
    for axis, size in e.prediction.traffic_bytes.items():
        assert sum(row["bytes"] for row in rows if row["axis"] == axis) == pytest.approx(size)
    for ceiling in e.roofline.ceilings:
        assert sum(row["bytes"] for row in rows if row["level"] == ceiling.level) == pytest.approx(
            ceiling.bytes, rel=0.01
        )


def test_a_ring_overlaps_only_if_the_plan_says_so():
    import meshwright as mw

    def ring(*settings):
        long = ["workload.seq=65536", "workload.batch=8", "plan.cp=8", "plan.replicate=2", *settings]
        return mw.estimate(SMALL[0], cluster=SMALL[1], nodes=2, set=long)

    default, none, named = ring(), ring("plan.overlap=[]"), ring('plan.overlap=["cp"]')
    assert none.prediction.hidden_s == {}
    assert none.prediction.exposed_s["cp"] == pytest.approx(default.prediction.hidden_s["cp"])
    assert named.prediction.hidden_s["cp"] == pytest.approx(default.prediction.hidden_s["cp"])
    assert none.prediction.step_time_s > named.prediction.step_time_s > default.prediction.step_time_s
    for e, hidden in ((none, False), (named, True)):
        drawn = [s for s in spans(e, e.walked, "operations") if s.rank == 0][:40]
        message = next(s for s in drawn if s.stream == "comm:cp")
        end = message.start + message.duration
        assert hidden == any(s.stream == "compute" and message.start - 1e-9 <= s.start < end - 1e-9 for s in drawn)
