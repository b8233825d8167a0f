"""The memory and the traffic of a step of our trainer are those that the cost model predicts for it (`benchmarks/footprint.py` shows all plans)."""

import runpy
from pathlib import Path

import pytest

import ranks
from meshwright.describe.config import Config
from meshwright.predict.prediction import predict

FOOTPRINT = str(Path(__file__).parents[2] / "benchmarks" / "footprint.py")
PLANS = [
    {"replicate": 2},
    {"shard": 2, "zero": 1},
    {"shard": 2, "zero": 3},
    {"pp": 2},
    {"pp": 2, "schedule": "zb-h1", "microbatch": 1},
    {"pp": 2, "schedule": "zbv", "virtual": 2, "recompute": "full"},
]
BOUND = 0.10


def measure(context, configs):
    return runpy.run_path(FOOTPRINT)["measure"](context, configs)


@pytest.mark.slow
def test_predicted_memory_is_that_of_a_step():
    known = runpy.run_path(FOOTPRINT)
    configs = [
        Config.from_parts(known["SMALL"], "laptop", "gloo-cpu", known["WORKLOAD"], {"microbatch": 2, **known["FP32"], **plan})
        for plan in PLANS
    ]  # fmt: skip
    by_rank = ranks.run(2, measure, configs)
    for i, (config, plan) in enumerate(zip(configs, PLANS, strict=True)):
        found, peak = predict(config), max(rank[i][1] for rank in by_rank)
        assert max(found.tensors_gib) * 2**30 == pytest.approx(peak, rel=BOUND), plan
        for axis, size in found.traffic_bytes.items():
            assert max(rank[i][2][axis] for rank in by_rank) == pytest.approx(size, abs=100), (plan, axis)
