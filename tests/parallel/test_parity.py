"""Every layout trains what one device trains: losses, norms, every gradient and every parameter, to 1e-9 in float64."""

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
STEPS = 3
LLAMA = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 50}
BIASED = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
MODELS = {
    "llama": Model(**LLAMA),
    "qwen": Model(**LLAMA, tied=True, qk_norm=True, qkv_bias=True),
    "gpt": Model(**{**LLAMA, "kv_heads": 0}, tied=True, norm="layernorm", positions="learned", max_positions=8,
                 activation="gelu", embedding_norm=True, **BIASED),
    "gemma": Model(**{**LLAMA, "vocab": 51}, tied=True, norms_per_layer=4, window=3, full_every=2, head_dim=10,
                   activation="geglu"),
    "mlp": Model(kind="mlp", hidden=16, layers=4, ffn_bias=True),
}  # fmt: skip
V = {"virtual": 2, "schedule": "zbv"}
INTERLEAVED = {"virtual": 2, "schedule": "interleaved"}
Z3 = {"shard": 2, "zero": 3}
LAYOUTS = [
    # data parallel, in buckets
    ("llama", {"microbatch": 2}),
    ("llama", {"replicate": 2, "microbatch": 2, "bucket": 2000}),
    ("gpt", {"replicate": 4, "bucket": 4000}),
    # ZeRO
    ("llama", {"shard": 2, "zero": 1, "microbatch": 2}),
    ("llama", {"shard": 2, "zero": 2, "microbatch": 2}),
    ("qwen", {**Z3, "microbatch": 2}),
    ("gpt", {**Z3, "microbatch": 2, "reshard": False}),
    ("gpt", {"shard": 4, "zero": 3, "reduce": "microbatch"}),
    ("llama", {"replicate": 2, **Z3}),
    # tensor and sequence
    ("llama", {"tp": 2}),
    ("qwen", {"tp": 2, "sp": True, "microbatch": 2}),
    ("gpt", {"tp": 4}),
    ("gpt", {"tp": 4, "sp": True}),
    ("gemma", {"tp": 2, "sp": True}),
    # pipeline
    ("llama", {"pp": 4}),
    ("qwen", {"pp": 2, "microbatch": 2}),
    ("gpt", {"pp": 2, **INTERLEAVED}),
    ("qwen", {"pp": 2, **V}),
    ("llama", {"pp": 2, "schedule": "gpipe", "layers_per_stage": (1, 3)}),
    ("gemma", {"pp": 2, "virtual": 2, "schedule": "interleaved-zb"}),
    ("gpt", {"pp": 2, "virtual": 2, "schedule": "dualpipev"}),
    ("qwen", {"pp": 2, "schedule": "zb-h1"}),
    ("llama", {"pp": 2, "virtual": 2, "schedule": "auto"}),
    # two at a time
    ("qwen", {"replicate": 2, "tp": 2, "microbatch": 2}),
    ("gemma", {**Z3, "tp": 2, "sp": True}),
    ("gpt", {"replicate": 2, "pp": 2}),
    ("llama", {"replicate": 2, "pp": 2, **V}),
    ("qwen", {**Z3, "pp": 2}),
    ("llama", {**Z3, "pp": 2, **V}),
    ("gpt", {**Z3, "pp": 2, **INTERLEAVED}),
    ("qwen", {"tp": 2, "sp": True, "pp": 2}),
    ("gpt", {"tp": 2, "sp": True, "pp": 2, **V}),
    ("llama", {"tp": 2, "pp": 2, "order": ("dp", "pp", "cp", "tp")}),
    # the deep MLP
    ("mlp", {"tp": 2, "replicate": 2}),
    ("mlp", {"tp": 2, "pp": 2}),
    ("mlp", {**Z3, "pp": 2}),
    # three at a time
    ("qwen", {"tp": 2, "pp": 2, "replicate": 2, "microbatch": 2}),
    ("gpt", {"tp": 2, "sp": True, "pp": 2, **Z3}),
]


@cache
def one_device(name):
    job = Job(MODELS[name], Plan(microbatch=8), WORKLOAD, steps=STEPS, dtypes=("fp64",))
    return ranks.run(1, record, job)[0]["fp64"]


def title(case):
    name, plan = case
    return f"{name}-{Plan(**plan).title()}"


@pytest.mark.parametrize("case", LAYOUTS, ids=title)
def test_a_layout_trains_what_one_device_trains(case):
    name, said = case
    plan = Plan(**said)
    job = Job(MODELS[name], plan, WORKLOAD, steps=STEPS, dtypes=("fp64",))
    traces = [result["fp64"] for result in ranks.run(plan.world, record, job)]
    agreement = compare(one_device(name), traces)
    assert not agreement.breaks, "\n".join(map(str, agreement.breaks[:5]))
    held = {piece.name for trace in traces for piece in trace.pieces}
    assert held == {piece.name for piece in one_device(name).pieces}
    assert all(error < 1e-11 for error in agreement.errors.values()), agreement.errors


def test_the_learning_is_real():
    """A comparison of two trainings that stand still would prove nothing."""
    trace = one_device("llama")
    for piece in trace.pieces:
        assert abs(piece.parameters[-1] - piece.parameters[0]).max() > 1e-5
    assert len(set(trace.losses)) == STEPS
