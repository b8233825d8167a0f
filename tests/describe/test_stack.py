"""Stacks and workloads: defaults, names and bounds."""

import pytest

from meshwright.describe import catalog
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError


@pytest.mark.parametrize("name", ["megatron-lm", "megatron-core", "nanotron", "megatron-deepspeed"])
def test_megatron_stacks_place_data_parallel_inside_pipeline(name) -> None:
    assert catalog.load("stacks", name).order == ("tp", "cp", "dp", "pp")


def test_an_entry_extends_another() -> None:
    core, nemo = catalog.load("stacks", "megatron-core"), catalog.load("stacks", "nemo-megatron")
    assert nemo.launch == core.launch
    assert nemo.source != core.source


def test_an_unknown_stack_suggests_a_similar_one() -> None:
    with pytest.raises(MeshwrightError) as caught:
        catalog.load("stacks", "megatronlm")
    assert caught.value.code == "MW-CAT-002"
    assert caught.value.fix == "megatron-lm"


@pytest.mark.parametrize(
    "fields",
    [{"launch": "-1us"}, {"fused": ["norms"]}, {"compute_slowdown": 1.0}, {"overlap": ["zz"]}, {"launch": "5m"}],
)
def test_bad_stacks(fields) -> None:
    with pytest.raises(MeshwrightError):
        Stack(**fields)


def test_workload_counts() -> None:
    work = Workload(batch=1024, seq=8192, optimizer="momentum", tokens="15T")
    assert work.tokens_per_step == 2**23
    assert work.state_copies == 1
    assert work.tokens == 15e12


@pytest.mark.parametrize(
    "fields", [{"batch": 0}, {"seq": -1}, {"precision": "bf17"}, {"imbalance": 0.5}, {"batch": True}, {"tokens": "NaN"}]
)
def test_bad_workloads(fields) -> None:
    with pytest.raises(MeshwrightError):
        Workload(**fields)
