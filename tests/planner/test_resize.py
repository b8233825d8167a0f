"""Another plan for another number of devices: the same training, a legal layout, the most devices that have one."""

import pytest

from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.planner.resize import plan_for_world

MODEL = {"hidden": 32, "layers": 4, "heads": 4, "ffn": 64, "vocab": 256}
EXPERTS = {**MODEL, "experts": 4, "top_k": 2}
WORK = {"batch": 16, "seq": 32, "precision": "fp32"}
FP32 = {"param_dtype": "fp32", "grad_dtype": "fp64", "master": False}


def config(model=MODEL, **plan):
    return Config.from_parts(model, {"extends": "laptop", "gpus": 8}, "gloo-cpu", WORK, {**FP32, **plan})


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("model", [MODEL, EXPERTS])
def test_the_training_stays_the_same_on_every_number_of_devices(model, world):
    before = config(model, replicate=2, tp=2, pp=2, bucket=1e6)
    after = plan_for_world(before, world)
    assert after.plan.world <= world
    assert after is before or after.cluster.world == after.plan.world
    assert after.plan.world == world or world in (3, 6)  # no layout of 3 divides a batch of 16 or 4 heads; stages may
    after.check_trainable()
    assert (after.workload, after.model, after.stack) == (before.workload, before.model, before.stack)
    kept = (
        "param_dtype",
        "grad_dtype",
        "state_dtype",
        "comm_dtype",
        "master",
        "compression",
        "average_every",
        "bucket",
    )
    assert [getattr(after.plan, name) for name in kept] == [getattr(before.plan, name) for name in kept]


def test_a_plan_of_the_right_size_is_kept():
    before = config(tp=2, pp=2)
    assert plan_for_world(before, 4) is before


def test_devices_without_a_legal_layout_stay_idle():
    after = plan_for_world(config({**MODEL, "layers": 2}, replicate=8), 7)
    assert after.plan.world == 4


def test_local_sgd_changes_the_number_of_replicas_only():
    before = config(replicate=4, tp=2, average_every=4)
    after = plan_for_world(before, 7).plan
    assert after == before.plan.but(replicate=2)  # three replicas do not divide a batch of 16


def test_without_any_layout_the_error_has_the_ranks_that_are_needed():
    tight = config(shard=8, zero=3)
    small = tight.cluster.accelerator.but(memory=2e6)
    from dataclasses import replace

    tight = replace(tight, cluster=tight.cluster.but(accelerator=small))
    with pytest.raises(MeshwrightError, match="start at least 8 ranks") as refused:
        plan_for_world(tight, 2)
    assert (refused.value.code, refused.value.exit_code) == ("MW-PLANNER-009", 3)
