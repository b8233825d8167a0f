"""Experts on many ranks train what one device trains: losses, every gradient and parameter to 1e-9 in float64."""

from functools import cache

import pytest

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.verify.compare import compare
from meshwright.verify.records import Job
from meshwright.verify.trace import record

WORKLOAD = Workload(batch=8, seq=8)
STEPS = 2
SHAPE = {
    "hidden": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 24,
    "vocab": 40,
    "experts": 4,
    "top_k": 2,
    "expert_ffn": 12,
}
LATENT = {"attention": "mla", "kv_heads": 0, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
MODELS = {
    "mixtral": Model(**SHAPE),
    "qwen": Model(**SHAPE, shared_experts=1, shared_gate=True, router_bias=True, ffn_bias=True, activation="gelu"),
    "deepseek": Model(**{**SHAPE, **LATENT, "experts": 6, "layers": 3}, q_rank=8, shared_experts=2, dense_layers=1,
                      balance_bias=True),
    "latent": Model(**{**SHAPE, **LATENT}, tied=True, moe_every=2),
}  # fmt: skip
Z3 = {"shard": 2, "zero": 3}
LAYOUTS = [
    ("mixtral", {"microbatch": 2}),
    ("mixtral", {"replicate": 2, "ep": 2, "microbatch": 4}),
    ("qwen", {"replicate": 2, "ep": 2, "microbatch": 2, "bucket": 2000, "overlap": ("ep",)}),
    ("deepseek", {"replicate": 2, "ep": 2, "microbatch": 2}),
    ("mixtral", {"replicate": 4, "ep": 2}),
    ("deepseek", {"tp": 2}),
    ("latent", {"tp": 2, "sp": True}),
    ("qwen", {"tp": 2, "sp": True}),
    ("mixtral", {"tp": 2, "expert_tp": 1, "ep": 2}),
    ("mixtral", {"tp": 2, "expert_tp": 1}),
    ("qwen", {"replicate": 2, "tp": 2, "ep": 2, "sp": True, "microbatch": 2}),
    ("qwen", {"replicate": 2, "tp": 2, "ep": 2, "order": ("dp", "pp", "cp", "tp")}),
    ("deepseek", {"shard": 2, "zero": 1, "ep": 2, "microbatch": 2}),
    ("qwen", {**Z3, "ep": 2, "microbatch": 2}),
    ("deepseek", {"shard": 4, "zero": 3, "ep": 2}),
    ("mixtral", {"replicate": 2, **Z3, "ep": 2}),
    ("deepseek", {"replicate": 2, "pp": 2, "ep": 2, "layers_per_stage": (1, 2)}),
    ("qwen", {"replicate": 2, "pp": 2, "ep": 2, "schedule": "zb-h1"}),
]


@cache
def one_device(name, router=(), microbatch=8):
    job = Job(MODELS[name], Plan(microbatch=microbatch), WORKLOAD, steps=STEPS, dtypes=("fp64",), router=dict(router))
    return ranks.run(1, record, job)[0]["fp64"]


def title(case):
    name, plan = case
    return f"{name}-{Plan(**plan).title()}"


def agree(name, said, router=()):
    plan = Plan(**said)
    job = Job(MODELS[name], plan, WORKLOAD, steps=STEPS, dtypes=("fp64",), router=dict(router))
    traces = [result["fp64"] for result in ranks.run(plan.world, record, job)]
    agreement = compare(one_device(name, router), traces)
    assert not agreement.breaks, "\n".join(map(str, agreement.breaks[:5]))
    held = {piece.name for trace in traces for piece in trace.pieces}
    assert held == {piece.name for piece in one_device(name, router).pieces}
    return traces


@pytest.mark.parametrize("case", LAYOUTS, ids=title)
def test_a_layout_trains_what_one_device_trains(case):
    agree(*case)
