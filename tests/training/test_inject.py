"""Injected faults: seeded, read and checked, and each happens once."""

import json
import runpy
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.errors import MeshwrightError
from meshwright.training.faults.inject import (
    KINDS,
    LOG,
    Fault,
    Injector,
    damage,
    newest_checkpoint,
    read_faults,
    set_disk_full,
)


def test_faults_are_the_same_for_the_same_seed():
    draw_faults = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "chaos.py"))["draw_faults"]
    faults = draw_faults(3, KINDS, world=4, first=10, spacing=20, save_every=5)
    assert faults == draw_faults(3, KINDS, world=4, first=10, spacing=20, save_every=5)
    assert faults != draw_faults(4, KINDS, world=4, first=10, spacing=20, save_every=5)
    assert [f.kind for f in faults] == list(KINDS)
    assert all(0 <= f.rank < 4 for f in faults)
    assert [f.step for f in faults] == sorted(f.step for f in faults)
    assert next(f for f in faults if f.kind == "kill-save").step % 5 == 0


def test_faults_are_read_back_and_checked(tmp_path):
    path = tmp_path / "faults.json"
    faults = [Fault("kill", 1, 20), Fault("slow", 0, 3, 0.5, 4)]
    path.write_text(json.dumps([asdict(fault) for fault in faults]))
    assert read_faults(path) == faults
    for text in ("", "{", "[3]", '[{"kind": "kill"}]', '[{"kind": "sleep", "rank": 0, "step": 1}]'):
        path.write_text(text)
        with pytest.raises(MeshwrightError, match="MW-FAULT-002"):
            read_faults(path)


def trainer(step):
    piece = SimpleNamespace(gradient=torch.ones(3), local=torch.ones(3))
    return SimpleNamespace(step=step, parallel=SimpleNamespace(pieces=[piece]))


def test_a_fault_happens_once_on_its_rank(tmp_path):
    faults = [Fault("exception", 1, 5), Fault("nan", 1, 6), Fault("spike", 0, 6)]
    Injector(faults, 0, tmp_path).before_step(trainer(5))
    injector = Injector(faults, 1, tmp_path)
    injector.before_step(trainer(4))
    with pytest.raises(RuntimeError, match="injected fault 0 in step 5"):
        injector.before_step(trainer(5))
    restarted = Injector(faults, 1, tmp_path)
    restarted.before_step(trainer(5))  # repeated after the restart
    for expected in (True, False):
        one = trainer(6)
        restarted.before_step(one)
        restarted.after_gradients(one)
        piece = one.parallel.pieces[0]
        assert bool(piece.gradient.isnan().all()) is expected
        assert bool((piece.local == 100).all()) is expected
    rows = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [(row["number"], row["kind"], row["step"]) for row in rows] == [
        (0, "exception", 5), (1, "nan", 6),
    ]  # fmt: skip


def test_a_slow_rank_sleeps_in_several_steps(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr("meshwright.training.faults.inject.time.sleep", slept.append)
    injector = Injector([Fault("slow", 0, 2, 0.5, 3)], 0, tmp_path)
    for step in range(8):
        injector.before_step(trainer(step))
        injector.after_gradients(trainer(step))
    assert slept == [0.5] * 3


@pytest.mark.parametrize("how", ["bit-flip", "truncate"])
def test_one_file_of_the_newest_checkpoint_is_damaged(tmp_path, how):
    for step in (10, 20):
        (tmp_path / f"step-{step:08}").mkdir()
        (tmp_path / f"step-{step:08}" / "a").write_bytes(bytes(range(256)))
    (tmp_path / ".writing-step-00000030").mkdir()
    newest = newest_checkpoint(tmp_path)
    assert newest.name == "step-00000020"
    file = damage(newest, how, seed=1)
    assert file == newest / "a"
    content = file.read_bytes()
    if how == "truncate":
        assert len(content) < 256
    else:
        assert sum(bin(a ^ b).count("1") for a, b in zip(content, bytes(range(256)), strict=True)) == 1
    assert newest_checkpoint(tmp_path / "nothing") is None


def test_a_disk_looks_full_and_recovers(tmp_path):
    file = tmp_path / "a"
    set_disk_full(True)
    try:
        with pytest.raises(OSError, match="large"):
            file.write_bytes(bytes(100_000))
    finally:
        set_disk_full(False)
    file.write_bytes(bytes(100_000))
