"""Memory of a save and of a load, by who collects the state."""

import pytest

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.result import GIB, Prediction
from meshwright.describe.workload import Workload
from meshwright.predict.prediction import predict

MODEL, DGX = catalog.load("models", "llama3-8b"), catalog.load("clusters", "dgx-h100")
N = MODEL.total
ROOT = 2 * MODEL.padded_vocab * MODEL.hidden + MODEL.hidden  # embedding, output projection and its norm
FSDP = {"shard": 16, "zero": 3}


def prediction(stack: str = "default", plan: dict | None = None, **changes) -> Prediction:
    plan_object = Plan(**(plan or FSDP))
    changed = catalog.load("stacks", stack).but(**changes)
    return predict(Config(MODEL, DGX.with_gpus(plan_object.world), plan_object, Workload(batch=64, seq=2048), changed))


def between_steps(p: Prediction) -> float:
    return max(stage["parameters"] + stage["optimizer"] + stage["context"] for stage in p.memory_by_stage)


@pytest.mark.parametrize(
    ("saves", "device", "host"),
    [
        ("sharded", 0, 0),
        ("copied", 0, 12 * N / 16 * 8),  # the shards of the 8 ranks of a host: fp32 weights and two moments
        ("rank-0", 8 * ROOT, 8 * N),  # the two moments of FSDP's root unit, which is larger than a layer
        ("weights", 2 * (ROOT + MODEL.hidden) / 2, 2 * N),
        ("device", 4 * N, 0),
    ],
)
def test_what_a_save_collects(saves: str, device: float, host: float) -> None:
    p = prediction(saves=saves)
    assert p.checkpoint_gib["save_device"] == pytest.approx(between_steps(p) + device / GIB)
    assert p.checkpoint_gib["save_host"] == pytest.approx(host / GIB)


@pytest.mark.parametrize(("loads", "host"), [("sharded", 0), ("rank-0", 8 * N), ("every-rank", 8 * 4 * N)])
def test_what_a_load_reads(loads: str, host: float) -> None:
    assert prediction(loads=loads).checkpoint_gib["load_host"] == pytest.approx(host / GIB)


@pytest.mark.parametrize(
    ("plan", "collectors"),
    [
        (
            {"tp": 4, "pp": 2, "shard": 2, "zero": 1, "sp": True},
            4,
        ),  # order tp, cp, dp, pp: a host has both dp ranks of one stage
        ({"tp": 2, "pp": 4, "shard": 1, "replicate": 1}, 8),  # all stages lie in one host
        ({"tp": 2, "shard": 8, "zero": 1, "sp": True}, 2),
    ],
)
def test_group_saves_count_the_first_ranks_of_a_host(plan: dict, collectors: int) -> None:
    p = prediction("megatron-lm", plan=plan)
    split = plan["tp"] * plan.get("pp", 1)
    assert p.checkpoint_gib["save_host"] == pytest.approx(12 * N / split * collectors / GIB)


def test_a_save_needs_less_than_a_step_if_shards_are_written() -> None:
    p = prediction("torchtitan")
    assert p.checkpoint_gib["save_device"] < (p.memory_gib or 0)
    assert p.checkpoint_gib["host_limit"] == pytest.approx(2e12 / GIB)


def test_unknown_host_memory_is_twice_that_of_the_devices() -> None:
    cluster = DGX.but(host_memory=0)
    assert cluster.host_limit == 2 * 8 * cluster.accelerator.memory
