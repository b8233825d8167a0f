"""A profiled step by group of kernels: names, shares, idle time, and what the cost model expects."""

import pytest

from meshwright.describe.config import Config
from meshwright.training.measure import timeline

CONFIG = Config.from_parts(
    model={"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    cluster="dgx-h200",
    stack="meshwright",
    workload={"batch": 4, "seq": 4096, "precision": "bf16"},
    plan={"microbatch": 4},
)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("triton_poi_fused__unsafe_view_mul_silu_4", "other"),
        ("adamw_kernel", "optimizer"),
        ("loss_kernel", "loss"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("ncclDevKernel_AllReduce_Sum_bf16", "comm"),
    ],
)
def test_a_kernel_belongs_to_the_group_of_its_name(name, group):
    assert timeline.group_of(name) == group


def test_time_is_counted_once_per_kernel_and_idle_where_none_runs():
    events = [("gemm", 0.0, 1.0), ("gemm", 0.5, 1.0), ("adamw_kernel", 3.0, 0.5)]
    trace = [{"ph": "X", "cat": "kernel", "name": n, "ts": 1e6 * s, "dur": 1e6 * d} for n, s, d in events]
    found = timeline.of_trace({"traceEvents": trace, "otherData": {"steps": [4, 4]}})
    assert found["products"] == pytest.approx(2.0)
    assert found["optimizer"] == pytest.approx(0.5)
    assert found["idle"] == pytest.approx(1.5)


@pytest.mark.parametrize("starts", [(), (3.0, 7.0)])
def test_kernels_that_took_no_time_are_no_timeline(starts):
    trace = [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": start, "dur": 0.0} for start in starts]
    assert timeline.of_trace({"traceEvents": trace, "otherData": {"steps": [0, 0]}}) == {}


def test_groups_are_expected_to_take_the_predicted_step_and_no_less_than_their_floor():
    from meshwright.predict.prediction import predict

    expected = timeline.expected(CONFIG)
    step = predict(CONFIG).step_time_s
    assert sum(seconds for seconds, _ in expected.values()) == pytest.approx(step, rel=0.02)
    assert all(floor <= seconds * 1.0001 for seconds, floor in expected.values())
