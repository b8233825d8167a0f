"""`train --dry-run`: every check, and a step of the full number of ranks with fake tensors."""

import pytest

import ranks
from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError

MODEL = {"hidden": 32, "layers": 4, "heads": 4, "ffn": 64, "vocab": 256}
WORKLOAD = {"batch": 512, "seq": 16, "precision": "fp32"}
FP32 = {"param_dtype": "fp32", "master": False}
PLANS = (
    {"replicate": 256},
    {"pp": 4, "replicate": 2, "microbatch": 2},
)


def config(model=MODEL, **plan):
    return Config.from_parts(model, "laptop", "gloo-cpu", WORKLOAD, {**FP32, **plan})


def steps(context, plans):
    from torch import distributed

    from meshwright.training.dry_run import fake_step

    distributed.destroy_process_group()  # that of the launcher of the tests
    return [fake_step(config(**plan)) for plan in plans]


def test_a_step_of_every_kind_of_plan_runs_without_memory():
    texts = ranks.run(1, steps, PLANS, silence=120.0)[0]
    for plan, text in zip(PLANS, texts, strict=True):
        assert text.startswith("one step of "), (plan, text)
    assert "rank 0 of 256 in" in texts[0]
    assert "4 ranks, one of each pipeline stage, of 8 in" in texts[1]


def checks(context, folder):
    from torch import distributed

    from meshwright.training import dry_run

    distributed.destroy_process_group()
    found = dict(dry_run.dry_run(config(replicate=2), 10, 0, "cpu", "auto", folder))
    experts = dry_run.fake_step(config({**MODEL, "experts": 4, "top_k": 2, "expert_ffn": 32}, replicate=2))
    with pytest.raises(MeshwrightError, match="MW-PLAN-"):
        dry_run.dry_run(config(replicate=3), 10, 0, "cpu", "auto", folder)
    return found, experts


def test_all_checks_are_listed_and_nothing_is_written(tmp_path):
    found, experts = ranks.run(1, checks, tmp_path / "run", silence=120.0)[0]
    assert list(found) == ["configuration", "data", "memory", "disk", "rendezvous", "step"]
    assert found["rendezvous"] == "2 ranks will be started on this machine"
    assert experts.startswith("not run")
    assert not (tmp_path / "run").exists()
