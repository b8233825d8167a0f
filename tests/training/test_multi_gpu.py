"""benchmarks/multi_gpu.py, which users with several GPUs run: here on CPU processes over gloo, with small models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REDUCED = ["--device", "cpu", "--reduced", "--only", "zero 3"]


@pytest.fixture
def multi_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import multi_gpu

    return multi_gpu


def assert_complete(result):
    assert [(row["layout"], row["passed"]) for row in result["parity"]] == [("zero 3", True)]
    (run,) = result["runs"]
    assert run["step_time_s"] > 0
    assert len(run["predicted_step_time_s"]) == 3
    assert {"compute", "optimizer"} <= set(run["exposed_s"])
    assert result["machine"]["ranks"] == 2


@pytest.mark.slow
def test_it_checks_a_layout_and_writes_what_to_send(multi_gpu, tmp_path, capsys):
    assert multi_gpu.main([*REDUCED, "--ranks", "2", "--out", str(tmp_path / "sent.json")]) == 0
    assert_complete(json.loads((tmp_path / "sent.json").read_text()))
    printed = capsys.readouterr().out
    assert "All layouts agree with one device." in printed
    assert f"Please send us {tmp_path / 'sent.json'}" in printed


def test_it_needs_an_even_number_of_ranks(multi_gpu, capsys):
    assert multi_gpu.main(["--device", "cpu", "--ranks", "3"]) == 2
    assert "an even number from 2 on" in capsys.readouterr().out


def test_its_layouts_use_all_ranks(multi_gpu):
    from meshwright.describe.plan import Plan

    for ranks in (2, 4, 8, 16):
        assert {Plan(**fields).world for fields in multi_gpu.layouts(ranks).values()} == {ranks}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(BENCHMARKS / "multi_gpu.py"), *REDUCED, "--out", str(tmp_path / "sent.json")]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert_complete(json.loads((tmp_path / "sent.json").read_text()))
