"""`meshwright check`: a script of somebody else's, recorded on one process and on several, compared."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ranks
import small_training
from meshwright.check import cpu
from meshwright.check.compare import compare
from meshwright.check.folder import RankStep, Recording, of_ranks
from meshwright.check.match import nearest
from meshwright.check.names import TableCut, read_table
from meshwright.check.recorder import StepRecorder
from meshwright.errors import MeshwrightError
from meshwright.proof.parts import RecordedValue, merge
from ranks import soak

SCRIPT = small_training.__file__
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "meshwright", "check", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def recorded_training(context: Any, out: Path, layout: str, bug: str, dtype: str, limit: float, perturb: int) -> None:
    recorder = StepRecorder(str(out), limit=limit, perturb=perturb)
    recorder.attach()
    rank, world = (context.rank, torch.distributed.get_world_size()) if context else (0, 1)
    small_training.train(layout, bug, rank, world, DTYPES[dtype])
    recorder.close()


def record(
    out: Path, layout: str, world: int = 1, bug: str = "", dtype: str = "fp64", limit: float = 1e9, perturb: int = 0
) -> Recording:
    words = out, layout, bug, dtype, limit, perturb
    if world == 1:
        recorded_training(None, *words)
    else:
        ranks.run(world, recorded_training, *words, backend="gloo")
    return Recording.read(out)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("one") / "recording", "one")


@pytest.fixture(scope="module")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("clipped") / "recording", "one-clip")


@pytest.mark.parametrize(
    ("layout", "world"),
    [("ddp", 2), ("fsdp2", 2), *soak([("fsdp2-tp", 4), ("fsdp1", 2), ("fsdp1", 4), ("tp", 2), ("fsdp2", 4)])],
)
def test_a_healthy_run_equals_one_device(one: Recording, tmp_path: Path, layout: str, world: int) -> None:
    comparison = compare(one, record(tmp_path / "many", layout, world))
    assert comparison.verdict == "equal within rounding", comparison.differences[:3]
    assert comparison.compared["gradient"] == comparison.compared["parameter"] == 2 * 15
    assert comparison.steps == 2
    assert not comparison.unmapped


BUGS = {
    "factor": ("reduction", "factor", "× 0.5"),
    "samples": ("forward", "part", "2 of 4 samples"),
    "stale": ("reduction", "stale", "the step before is added"),
    "rate": ("update", "factor", "learning rate × 2 on rank 1"),
    "norm": ("clipping", "factor", "× 0.5"),
}


@pytest.mark.parametrize("bug", ["factor", *soak(["rate", "samples", "stale", "norm"])])
def test_a_planted_bug_is_named(one: Recording, clipped: Recording, tmp_path: Path, bug: str) -> None:
    clips = bug == "norm"
    comparison = compare(clipped if clips else one, record(tmp_path / "many", "ddp-clip" if clips else "ddp", 2, bug))
    assert comparison.verdict == "differs"
    assert comparison.diagnosis is not None
    phase, kind, text = BUGS[bug]
    assert (comparison.diagnosis.phase, comparison.diagnosis.pattern.kind) == (phase, kind), comparison.diagnosis
    assert text in comparison.diagnosis.pattern.detail


@pytest.mark.parametrize("bug", soak(["factor", ""]))
def test_sketches_tell_as_tensors_do(one: Recording, tmp_path: Path, bug: str) -> None:
    """Of both runs, of one of them, and of a layout that cuts tensors."""
    sketched = record(tmp_path / "one", "one", limit=0)
    many = record(tmp_path / "many", "fsdp2", 2, bug, limit=0)
    assert sketched.ranks[0]["bytes"] < one.ranks[0]["bytes"] / 2
    for reference in (one, sketched):
        comparison = compare(reference, many)
        assert comparison.verdict == ("differs" if bug else "equal within rounding"), comparison.differences[:3]
        assert comparison.compared["gradient"] == 15 * (1 if bug else 2)
        if bug:
            assert comparison.diagnosis is not None
            assert str(comparison.diagnosis).startswith("reduction: a factor, × 0.5"), str(comparison.diagnosis)


@pytest.mark.parametrize("dtype", ["fp32", *soak(["bf16"])])
def test_rounding_is_told_from_a_difference(tmp_path: Path, dtype: str) -> None:
    one = record(tmp_path / "one", "one", dtype=dtype)
    moved = [record(tmp_path / f"moved-{seed}", "one", dtype=dtype, perturb=seed) for seed in (1, 2)]
    assert compare(one, record(tmp_path / "many", "ddp", 2, dtype=dtype), moved).verdict == "equal within rounding"
    assert compare(one, record(tmp_path / "wrong", "ddp", 2, "samples", dtype=dtype), moved).verdict == "differs"


@pytest.mark.parametrize(("bug", "code"), [("data", "MW-CHECK-014"), ("seed", "MW-CHECK-009")])
def test_runs_that_are_not_the_same_training_are_refused(one: Recording, tmp_path: Path, bug: str, code: str) -> None:
    with pytest.raises(MeshwrightError, match=code):
        compare(one, record(tmp_path / "other", "one", bug=bug))


def test_other_dtypes_are_refused(one: Recording, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="MW-CHECK-015"):
        compare(one, record(tmp_path / "other", "one", dtype="fp32"))


def test_collectives_are_recorded_with_their_groups(tmp_path: Path) -> None:
    step = record(tmp_path / "ddp", "ddp", 2).rank_step(1, 1)
    sizes = [(c["operation"], c["bytes"]) for c in step.collectives if c["backward"]]
    assert sizes == [("all_reduce", 8 * sum(e.value.size for e in step.of("gradient")))]


@pytest.mark.slow
def test_scripts_are_recorded_without_a_change(tmp_path: Path) -> None:
    """Through the start-up hook, under torchrun; the script is ended when its steps are recorded."""
    many = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, "ddp"]
    for name, words in (("one", [sys.executable, SCRIPT, "one"]), ("many", many)):
        done = run("record", "--out", str(tmp_path / name), "--", *words)
        assert done.returncode == 0, done.stderr
        assert "recorded 2 steps" in done.stdout
    done = run("compare", str(tmp_path / "one"), str(tmp_path / "many"))
    assert done.returncode == 0, done.stdout
    assert "equal within rounding" in done.stdout


@pytest.mark.slow
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


DAMAGED = {
    "rank.json": {"format": 2},
    "step-000.json": {"entries": 3},
    "step-001.json": {"entries": [{"kind": "loss"}]},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(one: Recording, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(one.folder, tmp_path / "recording")
    (folder / "rank-00000" / name).write_text(json.dumps(DAMAGED[name]))
    with pytest.raises(MeshwrightError, match=f"MW-CHECK-005: cannot read .*{name}"):
        compare(one, Recording.read(folder))


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
    merged = merge(of_ranks(steps, "gradient"))["w"]
    assert np.array_equal(merged.whole, whole)
    assert all(np.array_equal(part.of(whole), part.value) for part in parts)
    assert merge(of_ranks(steps[:3], "gradient"))["w"].whole is None  # elements that nobody holds


def test_a_row_is_found_where_it_belongs() -> None:
    samples = list(np.random.default_rng(0).normal(size=(3, 8, 6)))
    match = nearest(samples[1][4:, 3:], samples, None, 1.0)
    assert match is not None
    assert (match.sample, match.start, match.error) == (1, (4, 3), 0.0)
    assert nearest(np.zeros((5, 6)), samples, None, 1.0) is None


def test_a_users_table_says_what_a_rank_holds(tmp_path: Path) -> None:
    """Of layers that communicate by hand, as people wrote them before DTensor: a rank's parameters are plain tensors."""
    one = record(tmp_path / "one", "one")
    many = record(tmp_path / "many", "by-hand", 2)
    with pytest.raises(MeshwrightError, match=r"MW-CHECK-008.*--table"):
        compare(one, many)
    path = tmp_path / "table.toml"
    path.write_text('[axes]\ntp = 2\n[sharding]\n"layers.*.up" = "column"\n"layers.*.down" = "row"\n')
    comparison = compare(one, many, table=read_table(path))
    assert comparison.verdict == "equal within rounding", comparison.differences[:3]
    assert comparison.compared["gradient"] == 2 * 15
    assert not comparison.unmapped
    wrong = compare(one, record(tmp_path / "wrong", "by-hand", 2, "lost"), table=read_table(path))
    assert wrong.diagnosis is not None
    assert (wrong.diagnosis.phase, wrong.diagnosis.pattern.kind) == ("backward", "missing sum"), wrong.diagnosis
    assert wrong.losses[0][0] == pytest.approx(wrong.losses[0][1], rel=1e-14)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[axes]\ntp = 3\n[sharding]\n", "multiply to the number of ranks"),
        ('[axes]\ntp = 2\n[sharding]\n"layer.*.up" = "column"\n', "matches no parameter"),
        ('[axes]\ntp = 2\n[sharding]\n"layers.*.up" = "colum"\n', "none of column"),
        ('[sharding]\n"layers.*.up" = "column"\n', "does not name 'tp'"),
        ('[sharding]\n"layers.*.up" = 3\n', "none of column"),
        ("[name]\n", "unknown section"),
        ("[names]\n'(' = 'a'\n", "cannot read the table"),
    ],
)
def test_a_wrong_table_is_refused(one: Recording, tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "table.toml"
    path.write_text(text)
    two = Recording(one.folder, [one.ranks[0], {**one.ranks[0], "rank": 1}])
    with pytest.raises(MeshwrightError, match=why):
        read_table(path).applied(two)


def test_parts_of_a_parameter_are_cut_one_by_one() -> None:
    whole = np.arange(12.0).reshape(6, 2)  # parts of 4 and 2 rows
    cut = TableCut.parse("column:2,1")
    assert cut is not None
    out, seen = np.zeros((6, 2)), np.zeros((6, 2), bool)
    for rank, rows in enumerate(([0, 1, 4], [2, 3, 5])):
        value = RecordedValue("gradient", "w", rank, whole[rows], shape=(3, 2), start=(0, 0), size=(3, 2))
        for box in cut.boxes(value, rank, 2):
            box.put(out, seen)
    assert seen.all()
    assert np.array_equal(out, whole)


def test_frameworks_are_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    cpu.install()
    cpu.install()
    assert sum(isinstance(finder, cpu.PatchOnImport) for finder in sys.meta_path) == 1
