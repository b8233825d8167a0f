"""More tensor-parallel ranks than KV heads: the program sums the gradients of the copies once per step."""

import pytest

from lower.cases import traffic
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program

MODEL = Model(hidden=32, layers=4, heads=8, kv_heads=2, ffn=64, vocab=64, qkv_bias=True)
WORKLOAD = Workload(batch=16, seq=8)
ONE_HEAD = 2 * (32 + 1) * 4  # K and V, a bias each, of one head of four
FP32 = 4


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"tp": 2}, 0),
        ({"tp": 4}, ONE_HEAD * FP32),
        ({"tp": 8, "pp": 2, "sp": True}, ONE_HEAD * FP32),
        ({"tp": 4, "shard": 2, "zero": 1}, ONE_HEAD * FP32 / 2),
        ({"tp": 4, "grad_dtype": "bf16"}, ONE_HEAD * 2),
    ],
)
def test_gradients_of_kv_copies_are_summed_once_per_step(plan, expected):
    records = traffic(step_program(MODEL, Plan(**plan), WORKLOAD))
    layers = MODEL.layers / plan.get("pp", 1)
    assert [(r.count, r.bytes) for r in records if r.axis == "kv_copies"] == [(1, layers * expected)] * (expected > 0)
