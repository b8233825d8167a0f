"""`meshwright check` under real frameworks: healthy trainings equal one device, whatever their layout and dtype is.

Each script in training/ is recorded as it is, under the patches of `--on-cpu`. A family of layouts has one reference on one device, whose rounding
is measured by two perturbed repetitions where the dtype is not float64.
"""

import re
from pathlib import Path

import pytest
from check_bugs import BUGS
from check_cases import FAMILIES, PERTURBED, Family, runs
from environments import ROOT
from recordings import Training, reference_of

from meshwright.check.compare import compare
from meshwright.check.folder import Recording

# What the layout line must say: that what the script asked for took effect.
EFFECT = {
    "ddp": ("DistributedDataParallel", "replicate"),
    "fsdp1": ("FSDP1",),
    "fsdp2": ("FSDP2",),
    "hsdp": ("FSDP2: ", "Replicate"),
    "sp2": ("DTensor", "sequence parallel"),
    "pp2": ("pp 2", "2 pipeline stages", "4 pipeline stages"),
    "pp4": ("4 pipeline stages",),
    "vpp2": ("pp 2",),
    "ep2": ("ep 2",),
    "dopt": ("distributed optimizer",),
    "zero1": ("ZeRO-1",),
    "zero2": ("ZeRO-2",),
    "zero3": ("ZeRO-3",),
}
RUNS = {
    f"{name}: {each.dtype} {each.words} {layout} on {world}".replace("  ", " "): (each, layout, world)
    for name, each, layout, world in runs()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


def reference(family: Family, folder: Path) -> Recording:
    number = [each for families in FAMILIES.values() for each in families].index(family)
    alone = Training(family.script, f"--dtype {family.dtype} {family.words} {family.alone}")
    return Recording.read(reference_of(alone, PERTURBED[family.dtype], folder / f"one-{number}"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_training_equals_one_device(folder: Path, tmp_path: Path, name: str) -> None:
    family, layout, world = RUNS[name]
    one = reference(family, folder)
    training = Training(family.script, f"{layout} --dtype {family.dtype} {family.words}", world)
    many = Recording.read(training.record(tmp_path / "many"))
    line = f"{many.ranks[0]['framework']}: {many.ranks[0]['layout']}"
    print(line)
    assert many.world == world
    for word in layout.split():
        assert word not in EFFECT or any(text in line for text in EFFECT[word]), f"{word} did not take effect: {line}"
    comparison = compare(one, many, one.perturbed())
    assert comparison.verdict == "equal within rounding", (
        comparison.diagnosis,
        comparison.untold,
        *comparison.differences[:3],
    )
    assert comparison.steps == 2
    assert comparison.compared["gradient"] == comparison.compared["parameter"] == 2 * len(one.ranks[0]["parameters"])


def test_a_layout_that_was_dropped_is_shown(folder: Path, tmp_path: Path) -> None:
    """The Trainer's `fsdp=` becomes DDP on processes of a CPU, without a word."""
    many = Recording.read(Training("hf_trainer", "fsdp2 --dtype fp32", 2).record(tmp_path / "many"))
    assert many.ranks[0]["layout"] == "DistributedDataParallel"


def test_the_page_counts_what_the_tables_have() -> None:
    rows = re.findall(
        r"^\| ([^|]+) " + r"\| (\d+) " * 7 + r"\|$", (ROOT / "docs" / "check.md").read_text("utf-8"), re.MULTILINE
    )
    scripts = {name: {each.script for each in families} for name, families in FAMILIES.items()}
    names = {"torch": "PyTorch", "torch pipelining": "torch.distributed.pipelining"}
    expected = []
    for name, families in FAMILIES.items():
        by_dtype = [sum(len(each.layouts) for each in families if each.dtype == dtype) for dtype in PERTURBED]
        planted = sum(bug.script in scripts[name] for bug in BUGS) if name != "a plain loop" else 0
        expected.append([names.get(name, name), sum(by_dtype), *by_dtype, sum(by_dtype), planted, planted])
    assert [[name, *map(int, numbers)] for name, *numbers in rows] == expected


def test_there_are_eighty_runs_and_eight_of_each_framework() -> None:
    counts = {name: sum(len(each.layouts) for each in families) for name, families in FAMILIES.items()}
    assert min(counts.values()) >= 8, counts
    assert sum(counts.values()) >= 80
