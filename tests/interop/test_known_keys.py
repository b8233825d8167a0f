"""Keys that are misspelt by one letter are reported as unknown, in a sample of published recipes."""

import json
import random
import runpy
from pathlib import Path

import pytest

from meshwright.interop.frameworks import READABLE, find
from meshwright.interop.keys import known_keys
from meshwright.interop.recipes import check

HERE = Path(__file__).parent
BENCHMARK = runpy.run_path(str(HERE.parents[1] / "benchmarks" / "recipes.py"))

# torchtitan 0.3 has its settings in Python; the others are read for what they refuse only.
WITHOUT_PACKAGE = ("torchtitan-0.3", "picotron", "verl", "nemo-rl", "nemo-1")


def test_misspelt_keys_are_noticed() -> None:
    """Every key of every tenth recipe of the sample, misspelt: at least 98% are noticed."""
    rng = random.Random(1)
    recipes = [json.loads(line) for line in (HERE / "recipes.jsonl").read_text("utf-8").splitlines()][::10]
    keys = [each for recipe in recipes for each in BENCHMARK["unnoticed"](recipe, rng)]
    missed = [name for name, noticed in keys if not noticed]
    assert len(keys) > 150
    assert len(missed) <= 0.02 * len(keys), missed


@pytest.mark.parametrize("name", [name for name in READABLE if name not in WITHOUT_PACKAGE])
def test_frameworks_have_a_table_of_known_keys(name: str) -> None:
    assert len(known_keys(name)) > 100


@pytest.mark.parametrize(
    ("framework", "right", "wrong"),
    [
        ("Megatron-Bridge", "optimizer.main_params_dtype", "optimizer.main_param_dtype"),
        ("Megatron-Bridge", "comm_overlap.tp_comm_overlap_cfg", "comm_overlap.tp_com_overlap_cfg"),
        ("DeepSpeed", "zero_optimization.contiguous_gradients", "zero_optimization.contigous_gradients"),
        ("axolotl", "fsdp_config.auto_wrap_policy", "fsdp_config.auto_wrap_polcy"),
    ],
)
def test_a_known_key_is_read_and_its_misspelling_is_unknown(framework: str, right: str, wrong: str) -> None:
    assert find(framework) is not None
    assert check({"id": "1", "framework": framework, "settings": {right: "x"}}).unknown in ([], [f"{right} = x"])
    assert check({"id": "1", "framework": framework, "settings": {wrong: "x"}}).unknown == [wrong]


def test_a_key_that_speaks_of_parallelism_and_that_no_package_has_is_unknown() -> None:
    for framework in ("ms-swift", "TRL", "Megatron-Bridge", "Automodel"):
        row = {"id": "1", "framework": framework, "settings": {"my_own.shard_everything_twice": 4}}
        assert check(row).unknown == ["my_own.shard_everything_twice"]


def test_halves_of_the_mistakes_do_not_change() -> None:
    """The rule that splits the published mistakes into those that were looked at and those that only count."""
    assert [BENCHMARK["half"](n) for n in (3, 4, 7, 10)] == ["build", "build", "held", "held"]
