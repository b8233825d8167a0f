"""`meshwright checkpoint`: what is printed, exit codes, and that no torch is needed to list, verify and prune."""

import json
import os
import subprocess
import sys

import pytest
import torch

from meshwright.cli import exit_code_of, run_command
from meshwright.training.checkpoint.save import save
from meshwright.training.checkpoint.state import TrainerState
from meshwright.training.checkpoint.store import BoxEntry

ABOUT = {"model": {}, "plan": {"tp": 2}, "workload": {}, "order": ("tp",)}


@pytest.fixture
def run(tmp_path):
    for step in (1, 2, 3):
        state = TrainerState(step, [BoxEntry("weight/a", (40,), (0,), torch.ones(40))], {})
        save(tmp_path / "checkpoints", state, ABOUT, None)
    return tmp_path


def cli(capsys, *words):
    code = exit_code_of(lambda: sys.exit(run_command("checkpoint", [str(word) for word in words])), "--json" in words)
    return code, capsys.readouterr()


def test_ls_verify_and_prune(run, capsys):
    code, out = cli(capsys, "ls", run)
    assert code == 0
    assert "step-00000002" in out.out
    assert "tp 2" in out.out
    code, out = cli(capsys, "verify", run, "--json")
    assert code == 0
    assert [row["state"] for row in json.loads(out.out)] == ["good"] * 3
    file = next((run / "checkpoints" / "step-00000002").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, out = cli(capsys, "verify", run)
    assert code == 1
    assert "the hash differs" in out.out
    code, out = cli(capsys, "prune", run, "--keep", 1, "--dry-run")
    assert code == 0
    assert "would be deleted" in out.out
    code, out = cli(capsys, "prune", run, "--keep", 1, "--json")
    assert len(json.loads(out.out)["deleted"]) == 2
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" || exit 99; exec "$@"'


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["checkpoint", "prune", "--keep", "1"], "MW-CLI-008"),
        pytest.param(["train", "examples/demo-dp2-tp2.toml", "--steps", "9", "--resume"], "MW-CLI-004", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_read_only_folder_is_refused_and_unchanged(run, words, code):
    """On a read-only mount, since root may write to every folder."""
    before = sorted(path.name for path in run.rglob("*"))
    command = ["unshare", "-m", "sh", "-c", READ_ONLY, str(run), sys.executable, "-m", "meshwright", *words, str(run)]
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if done.returncode in (1, 99) and code not in done.stderr:
        pytest.skip("this user may not mount")
    assert done.returncode == 2, done.stderr
    assert code in done.stderr
    assert "Read-only file system" in done.stderr
    assert sorted(path.name for path in run.rglob("*")) == before


def test_incomplete_and_damaged_checkpoints_are_reported_and_the_last_good_one_is_not_pruned(run, capsys):
    (run / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    code, out = cli(capsys, "ls", run, "--json")
    assert (code, [row["problem"] for row in json.loads(out.out)]) == (0, [None, "incomplete", None])
    assert cli(capsys, "verify", run)[0] == 1
    file = next((run / "checkpoints" / "step-00000003").glob("*.safetensors"))
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    code, out = cli(capsys, "prune", run, "--keep", 1)
    assert code == 2
    assert "MW-CKPT-002" in out.err
    assert (run / "checkpoints" / "step-00000001" / "manifest.json").is_file()


def test_convert_writes_one_whole_checkpoint(run, capsys):
    code, out = cli(capsys, "convert", run, "--out", run / "whole", "--json")
    assert code == 0
    assert json.loads(out.out)[0]["step"] == 3
    code, out = cli(capsys, "convert", run, "--out", run / "whole")
    assert code == 2
    assert "MW-CKPT-014" in out.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ls", "nowhere"], "MW-CKPT-001"),
        (["verify", "."], "MW-CKPT-001"),
        (["prune", "."], "--keep"),
        (["convert", ".", "--out", "x", "--to", "meshwrong"], "MW-CKPT-015"),
    ],
)
def test_bad_input(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out = cli(capsys, *words)
    assert code == 2
    assert text in out.err


def test_listing_loads_no_torch(run):
    words = ["verify", str(run)]
    code = f"import sys; from meshwright.cli import run_command as r; r('checkpoint', {words}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env={**os.environ, "COLUMNS": "200"})
