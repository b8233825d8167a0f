"""Checkpoint files on a disk that fails: flipped bits, truncation, a full disk, kills. What is damaged is found before it is used."""

import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint import folder
from meshwright.training.checkpoint.convert import read_full, write_checkpoint
from meshwright.training.checkpoint.load import check_model, open_checkpoint
from meshwright.training.checkpoint.manifest import MANIFEST, check_files, read_manifest, with_digest
from meshwright.training.checkpoint.page import summary
from meshwright.training.checkpoint.save import save
from meshwright.training.checkpoint.state import TrainerState
from meshwright.training.checkpoint.store import BoxEntry

ABOUT = {"model": {"hidden": 4}, "plan": {}, "workload": {}, "order": ("tp",)}


def state_at(step, size=64):
    values = torch.arange(size, dtype=torch.float64) + step
    return TrainerState(
        step, [BoxEntry("weight/a", (size,), (0,), values), BoxEntry("weight/b", (2, 3), (0, 0), torch.ones(2, 3))], {}
    )


def saved(root, *steps):
    for step in steps:
        save(root, state_at(step), ABOUT, None)
    return root


def step_of(root):
    """The step that a resume would use, and the messages; the content is that of its step."""
    messages = []
    found = open_checkpoint(root, notify=messages.append)
    if found is None:
        return None, messages
    values = read_full(found.path, found.manifest, "weight/a")
    assert torch.equal(values, torch.arange(len(values), dtype=torch.float64) + found.manifest.step)
    return found.manifest.step, messages


def test_a_save_is_read_back_and_the_newest_are_kept(tmp_path):
    saved(tmp_path, 1, 2)
    save(tmp_path, state_at(3), ABOUT, None, keep=2)
    assert [step for step, _ in folder.complete(tmp_path)] == [2, 3]
    assert step_of(tmp_path) == (3, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_torch_reads_our_files_without_us(tmp_path):
    from torch.distributed import checkpoint as dcp

    saved(tmp_path, 5)
    found = {"weight/a": torch.zeros(64, dtype=torch.float64)}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "step-00000005"))
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert torch.equal(found["weight/a"], torch.arange(64, dtype=torch.float64) + 5)


def test_a_step_saved_again_replaces_the_first(tmp_path):
    saved(tmp_path, 7)
    first = read_manifest(tmp_path / "step-00000007")
    saved(tmp_path, 7)
    assert read_manifest(tmp_path / "step-00000007").created > first.created
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]


@pytest.mark.parametrize("name", ["manifest", "tensors"])
def test_every_flipped_bit_and_every_truncation_is_found(name, tmp_path):
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001"
    file = path / (MANIFEST if name == "manifest" else next(iter(read_manifest(path).files)))
    content, draw = file.read_bytes(), random.Random(0)
    changes = [bytearray(content) for _ in range(150)]
    for change in changes:
        change[draw.randrange(len(change))] ^= 1 << draw.randrange(8)
    cuts = [content[:length] for length in (0, 1, len(content) // 2, len(content) - 1)]
    for changed in (*changes, *cuts, content + b"\0"):
        file.write_bytes(changed)
        with pytest.raises(MeshwrightError, match="MW-CKPT-002"):
            check_files(path, read_manifest(path))
    file.write_bytes(content)
    check_files(path, read_manifest(path))


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "manifest", "foreign"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(harm, tmp_path):
    saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002"
    file = path / next(iter(read_manifest(path).files))
    if harm == "flip":
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
    elif harm == "truncate":
        os.truncate(file, 40)
    elif harm == "remove":
        file.unlink()
    else:
        (path / MANIFEST).write_text("{" if harm == "manifest" else '{"format": "other", "version": 1}')
    assert not summary(path, verify=True)["good"]
    step, (message,) = step_of(tmp_path)
    assert step == 1
    assert "step-00000002 is damaged" in message
    assert (tmp_path / "damaged-step-00000002").is_dir()
    assert step_of(tmp_path) == (1, [])
    with pytest.raises(MeshwrightError, match="MW-CKPT-002"):  # a checkpoint that was named must be good
        open_checkpoint(tmp_path / "damaged-step-00000002")


def contents_of(root):
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("harm", ["damaged", "incomplete", "both"])
def test_a_resume_without_an_intact_checkpoint_names_each_and_changes_nothing(harm, tmp_path):
    saved(tmp_path, 1, 2)
    one, two = tmp_path / "step-00000001", tmp_path / "step-00000002"
    for path in (one, two) if harm == "incomplete" else (one,) if harm == "both" else ():
        (path / MANIFEST).unlink()
    for path in (one, two) if harm == "damaged" else (two,) if harm == "both" else ():
        os.truncate(next(path.glob("*.safetensors")), 40)
    before = contents_of(tmp_path)
    with pytest.raises(MeshwrightError, match="MW-CKPT-019") as raised:
        step_of(tmp_path)
    word = "incomplete" if harm == "incomplete" else "damaged"
    assert f"step-00000002 is {word}" in raised.value.why
    assert f"step-00000001 is {'damaged' if harm == 'damaged' else 'incomplete'}" in raised.value.why
    assert "--from-scratch" in raised.value.fix
    assert contents_of(tmp_path) == before
    assert summary(one)["problem"] == ("incomplete" if harm != "damaged" else "damaged")


def test_a_save_without_a_manifest_is_set_aside_and_never_replaced(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / MANIFEST).unlink()
    step, (message,) = step_of(tmp_path)
    assert (step, "step-00000002 is incomplete" in message) == (1, True)
    assert (tmp_path / "damaged-step-00000002").is_dir()
    (tmp_path / "step-00000001" / MANIFEST).unlink()
    with pytest.raises(MeshwrightError, match=r"step-00000001 is incomplete.*damaged-step-00000002 is set aside"):
        step_of(tmp_path)
    saved(tmp_path, 1)  # the new one has the name, and the old files stay
    assert list((tmp_path / "damaged-step-00000001").glob("*.safetensors"))
    assert step_of(tmp_path) == (1, [])


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_an_error_of_the_disk_is_not_damage(number, tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)
    before, unpatched = contents_of(tmp_path), Path.open

    def fail(path, *options, **more):
        if path.suffix == ".safetensors" and path.parent.name == "step-00000002":
            raise OSError(number, os.strerror(number), str(path))
        return unpatched(path, *options, **more)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(MeshwrightError, match="MW-CKPT-018") as raised:
        step_of(tmp_path)
    assert (os.strerror(number) in raised.value.why, raised.value.exit_code) == (True, 74)
    assert summary(tmp_path / "step-00000002", verify=True)["problem"] == "unreadable"
    monkeypatch.undo()
    assert contents_of(tmp_path) == before
    assert step_of(tmp_path) == (2, [])


def test_a_manifest_that_the_disk_does_not_give_is_not_absent(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    unpatched = Path.stat

    def fail(path, **options):
        if path.name == MANIFEST:
            raise PermissionError(errno.EACCES, "Permission denied")
        return unpatched(path, **options)

    monkeypatch.setattr(Path, "stat", fail)
    for ask in (folder.complete, step_of):
        with pytest.raises(MeshwrightError, match="MW-CKPT-018"):
            ask(tmp_path)


def test_a_checkpoint_whose_mount_disappears_is_not_damaged(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    manifest = read_manifest(tmp_path / "step-00000001")
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(MeshwrightError, match="MW-CKPT-018"):
        check_files(tmp_path / "step-00000001", manifest)


def test_from_scratch_keeps_everything_under_other_names(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000001").rename(tmp_path / "damaged-step-00000001")
    for path in ("unused-step-00000002", "unused-step-00000002-2"):
        folder.set_all_aside(tmp_path)
        assert (tmp_path / path / MANIFEST).is_file()
        assert step_of(tmp_path) == (None, [])
        saved(tmp_path, 2)
    assert (tmp_path / "unused-damaged-step-00000001").is_dir()


def test_a_newer_version_is_refused_and_left_as_it_is(tmp_path):
    saved(tmp_path, 1, 2)
    manifest = tmp_path / "step-00000002" / MANIFEST
    document = json.loads(manifest.read_text())
    document.pop("digest")
    manifest.write_text(with_digest({**document, "version": 99}))
    with pytest.raises(MeshwrightError, match="MW-CKPT-003"):
        step_of(tmp_path)
    assert (tmp_path / "step-00000002").is_dir()


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"hidden": 8}, "MW-CKPT-004", "hidden 4 and 8"),
        ({}, "MW-CKPT-005", "missing: c; not in the model: d"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(change, code, text, tmp_path):
    model = {"hidden": 4, **change}
    saved(tmp_path, 1)
    manifest = read_manifest(tmp_path / "step-00000001")
    with pytest.raises(MeshwrightError) as raised:
        check_model(model, manifest, {"a": (64,), "b": (2, 3), "c": (1,)}, {"a": (64,), "b": (2, 3), "d": (1,)})
    assert raised.value.code == code
    assert text in raised.value.why


def test_what_a_killed_run_left_is_cleaned_up(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".replaced-step-00000002")  # killed between the two renames
    (tmp_path / ".writing-step-00000003").mkdir()
    folder.recover(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert step_of(tmp_path) == (2, [])


def test_an_unwritable_folder_and_a_full_disk_are_refused_before_the_first_step(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(MeshwrightError, match="MW-CLI-004"):
        folder.check_writable(tmp_path / "file" / "checkpoints")
    folder.check_room(tmp_path, 1000, keep=2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 3 << 30})())
    with pytest.raises(MeshwrightError, match="MW-CKPT-006"):
        folder.check_room(tmp_path / "not yet there", 1 << 30, keep=2)
    folder.check_room(tmp_path, 1 << 30, keep=1)
    for size, keep in ((1 << 30, 1), (2 << 30, 0)):  # the fix fits on the disk
        with pytest.raises(MeshwrightError) as raised:
            folder.check_room(tmp_path, size, keep=2)
        assert f"checkpoint.keep={keep} " in raised.value.fix


def keep_saving(root, first):
    """Save until this process is killed."""
    step = first
    while True:
        save(root, state_at(step, size=20_000), ABOUT, None, keep=2)
        step += 1


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_during_a_save_leaves_a_good_checkpoint(seed, tmp_path):
    """The benchmark `chaos_save.py` does this a thousand times."""
    saved(tmp_path, 1)
    draw, last = random.Random(seed), 1
    for _ in range(6):
        child = os.fork()
        if child == 0:
            try:
                keep_saving(tmp_path, last + 1)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.005, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        folder.recover(tmp_path)
        step, messages = step_of(tmp_path)
        assert messages == []
        assert step >= last
        last = step


def test_a_conversion_overwrites_nothing(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(MeshwrightError, match="MW-CKPT-014"):
        write_checkpoint(tmp_path / "out", [], {"step": 0, **ABOUT})
