"""`meshwright check`: a script of somebody else's, recorded on one process and on several, compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.check.compare import RunComparison, compare
from meshwright.check.folder import RankStep, RecordedValue, Recording
from meshwright.check.match import nearest
from meshwright.check.merge import merge
from meshwright.errors import MeshwrightError
from ranks import soak

SCRIPT = str(Path(__file__).parent / "small_training.py")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "meshwright", "check", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def record(out: Path, layout: str, world: int = 1, bug: str = "") -> Recording:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    done = run("record", "--out", str(out), "--", sys.executable, *start, SCRIPT, layout, bug)
    assert done.returncode == 0, done.stderr
    return Recording.read(out)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("one") / "recording", "one")


def compared(one: Recording, tmp_path: Path, layout: str, world: int, bug: str = "") -> RunComparison:
    return compare(one, record(tmp_path / "many", layout, world, bug))


@pytest.mark.parametrize(
    ("layout", "world"),
    [*soak([("ddp", 2), ("fsdp2-tp", 4), ("fsdp2", 2), ("fsdp1", 2), ("fsdp1", 4), ("tp", 2), ("fsdp2", 4)])],
)
def test_a_healthy_run_equals_one_device(one: Recording, tmp_path: Path, layout: str, world: int) -> None:
    comparison = compared(one, tmp_path, layout, world)
    assert comparison.verdict == "equal within rounding", comparison.differences[:3]
    assert comparison.compared["gradient"] == comparison.compared["parameter"] == 2 * 15
    assert comparison.steps == 2
    assert not comparison.unmapped


BUGS = {
    "factor": ("reduction", "factor", "× 0.5"),
    "samples": ("forward", "part", "2 of 4 samples"),
    "bias": ("update", "factor", "× 2"),
}


@pytest.mark.parametrize("bug", ["factor", *soak(["samples", "bias"])])
def test_a_planted_bug_is_named(one: Recording, tmp_path: Path, bug: str) -> None:
    comparison = compared(one, tmp_path, "ddp", 2, bug)
    assert comparison.verdict == "differs"
    assert comparison.diagnosis is not None
    phase, kind, text = BUGS[bug]
    assert (comparison.diagnosis.phase, comparison.diagnosis.pattern.kind) == (phase, kind), comparison.diagnosis
    assert text in comparison.diagnosis.pattern.detail


@pytest.mark.slow
def test_collectives_are_recorded_with_their_groups(tmp_path: Path) -> None:
    step = record(tmp_path / "ddp", "ddp", 2).rank_step(1, 1)
    sizes = [(c["operation"], c["bytes"]) for c in step.collectives if c["backward"]]
    assert sizes == [("all_reduce", 8 * sum(e.value.size for e in step.of("gradient")))]


def test_a_script_that_dies_leaves_its_steps(tmp_path: Path) -> None:
    done = run("record", "--out", str(tmp_path / "dead"), "--", sys.executable, SCRIPT, "one", "dies")
    assert done.returncode == 1
    assert "planted" in done.stderr
    about = json.loads((tmp_path / "dead" / "rank-00000" / "rank.json").read_text())
    assert about["steps"] == 0
    assert about["ended"]
    with pytest.raises(MeshwrightError, match="MW-CHECK-006"):
        compare(Recording.read(tmp_path / "dead"), Recording.read(tmp_path / "dead"))


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="MW-CHECK-001"):
        Recording.read(tmp_path / "nowhere")
    with pytest.raises(MeshwrightError, match="MW-CHECK-002"):
        Recording.read(tmp_path)
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / "rank-00000" / "rank.json").write_text("[]")
    with pytest.raises(MeshwrightError, match="MW-CHECK-005"):
        Recording.read(tmp_path)
    (tmp_path / "rank-00000" / "rank.json").write_text('{"format": 99}')
    with pytest.raises(MeshwrightError, match="MW-CHECK-003"):
        Recording.read(tmp_path)


def test_a_missing_rank_is_named(one: Recording, tmp_path: Path) -> None:
    about = {**one.ranks[0], "world": 2}
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / "rank-00000" / "rank.json").write_text(json.dumps(about))
    with pytest.raises(MeshwrightError, match="missing: 1"):
        Recording.read(tmp_path)


# Without processes


def test_flat_ranges_of_boxes_merge_to_the_whole() -> None:
    """Two tensor-parallel halves, each cut over two ranks without regard to its shape, as a distributed optimizer holds them."""
    whole = np.arange(24.0).reshape(4, 6)
    parts = []
    for rank, (start, flat) in enumerate([(0, (0, 5)), (0, (5, 12)), (3, (0, 7)), (3, (7, 12))]):
        value = whole[:, start : start + 3].reshape(-1)[slice(*flat)]
        parts.append(
            RecordedValue("gradient", "w", rank, value, shape=(4, 6), start=(0, start), size=(4, 3), flat=flat)
        )
    steps = [RankStep(part.rank, [part], []) for part in parts]
    merged = merge(steps, "gradient")["w"]
    assert np.array_equal(merged.whole, whole)
    assert all(np.array_equal(part.of(whole), part.value) for part in parts)
    assert merge(steps[:3], "gradient")["w"].whole is None  # elements that nobody holds


def test_a_row_is_found_where_it_belongs() -> None:
    samples = list(np.random.default_rng(0).normal(size=(3, 8, 6)))
    match = nearest(samples[1][4:, 3:], samples, None, 1.0)
    assert match is not None
    assert (match.sample, match.start, match.error) == (1, (4, 3), 0.0)
    assert nearest(np.zeros((5, 6)), samples, None, 1.0) is None
