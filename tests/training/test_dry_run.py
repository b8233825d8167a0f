"""`train --dry-run`: every check, and a step of the full number of ranks with fake tensors."""

import pytest

import ranks
from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError

MODEL = {"hidden": 32, "layers": 4, "heads": 4, "ffn": 64, "vocab": 256}
WORKLOAD = {"batch": 512, "seq": 16, "precision": "fp32"}
FP32 = {"param_dtype": "fp32", "master": False}
EXPERTS = {
    **MODEL,
    "experts": 4,
    "top_k": 2,
    "expert_ffn": 32,
    "ffn_bias": True,
    "shared_experts": 1,
    "balance_bias": True,
}
BF16 = {"param_dtype": "bf16", "master": True}
PLANS = ((MODEL, {**BF16, "pp": 2, "shard": 128, "zero": 1}), (EXPERTS, {**BF16, "ep": 4, "replicate": 4}))
MORE_PLANS = (
    (EXPERTS, {"tp": 2, "sp": True, "expert_tp": 2, "ep": 2, "replicate": 4}),
    (MODEL, {"shard": 64, "zero": 3, "recompute": "full"}),
    (MODEL, {**BF16, "pp": 4, "tp": 2, "sp": True}),
    (MODEL, {"replicate": 8}),
    (MODEL, {"cp": 2, "replicate": 2, "shard": 2, "zero": 3}),
    (MODEL, {**BF16, "pp": 2, "tp": 2, "sp": True, "shard": 2, "zero": 1}),
    (EXPERTS, {"replicate": 2, "pp": 2}),
)


def config(model=MODEL, **plan):
    return Config.from_parts(model, "laptop", "gloo-cpu", WORKLOAD, {**FP32, **plan})


def steps(context, plans):
    from torch import distributed

    from meshwright.training.dry_run import fake_step

    distributed.destroy_process_group()  # that of the launcher of the tests
    return [fake_step(config(model, **plan)) for model, plan in plans]


def test_a_step_of_every_kind_of_plan_runs_without_memory():
    texts = ranks.run(1, steps, PLANS)[0]
    assert "2 ranks, one of each pipeline stage, of 256 in" in texts[0]
    assert "one step of rank 0 of 4 in" in texts[1]


@pytest.mark.slow
def test_a_step_of_more_plans_runs_without_memory():
    for plan, text in zip(MORE_PLANS, ranks.run(1, steps, MORE_PLANS, silence=300.0)[0], strict=True):
        assert text.startswith("one step of "), (plan, text)


def checks(context, folder):
    from torch import distributed

    from meshwright.training import dry_run

    distributed.destroy_process_group()
    found = dict(dry_run.dry_run(config(replicate=2), 10, 0, "cpu", "auto", folder))
    with pytest.raises(MeshwrightError, match="MW-PLAN-"):
        dry_run.dry_run(config(replicate=3), 10, 0, "cpu", "auto", folder)
    return found


def test_all_checks_are_listed_and_nothing_is_written(tmp_path):
    found = ranks.run(1, checks, tmp_path / "run")[0]
    assert list(found) == ["configuration", "data", "memory", "disk", "rendezvous", "step"]
    assert found["rendezvous"] == "2 ranks will be started on this machine"
    assert not (tmp_path / "run").exists()
