"""A run that this machine cannot hold is refused before any process starts; its small copy trains."""

import multiprocessing
import shutil
import sys
from types import SimpleNamespace

import pytest

import ranks  # noqa: F401  preloads what ranks need
from meshwright import api
from meshwright.describe.config import load
from meshwright.errors import MeshwrightError
from meshwright.proof.shrink import small_config
from meshwright.training import machine
from meshwright.training.launch import join
from meshwright.training.launch.rank import Placement
from meshwright.training.run import run_training
from meshwright.view.report import page

LARGE = "examples/llama3-70b-64xh100.toml"
DEMO = "examples/demo-dp2-tp2.toml"


@pytest.fixture
def no_process(monkeypatch):
    monkeypatch.setattr(
        multiprocessing.context.ForkServerProcess, "start", lambda process: pytest.fail("a process was started")
    )


def test_a_plan_for_64_gpus_is_refused_with_the_numbers(no_process, capsys):
    from meshwright.cli import main

    with pytest.raises(SystemExit) as leaving:
        main(["train", LARGE, "--device", "cpu", "--out", "/tmp"])
    assert leaving.value.code == 3
    error = capsys.readouterr().err
    assert error.startswith("MW-TRAIN-002: ")
    assert "64 processes of up to " in error
    assert " TiB of memory, and " in error
    assert error.endswith("Fix: --shrink\n")


def test_the_sum_over_ranks_counts_not_one_rank(no_process, monkeypatch):
    config = load(DEMO)
    prediction = machine.Prediction(1, 1, 1, memory_by_stage=[{"activations": 1.0, "context": 9.0}])
    needed = 4 * (2**30 + machine.PROCESS_BYTES)  # four ranks; the context is no tensor
    monkeypatch.setattr(machine, "available_memory", lambda: needed)
    machine.check_cpu_memory(config.plan, prediction)
    monkeypatch.setattr(machine, "available_memory", lambda: needed - 1.0)
    with pytest.raises(MeshwrightError, match="MW-TRAIN-002"):
        machine.check_cpu_memory(config.plan, prediction)


def test_a_full_disk_is_refused(no_process, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(MeshwrightError, match=r"MW-TRAIN-002.*of disk, and 1,000 B are free"):
        run_training(load(DEMO), 5, folder=tmp_path / "deep" / "folder")


def test_too_few_gpus_are_refused_and_auto_uses_the_cpu(no_process, monkeypatch):
    monkeypatch.setattr(machine, "gpu_count", lambda: 3)
    assert machine.resolve_device("auto", 4) == "cpu"
    assert machine.resolve_device("auto", 3) == "cuda"
    with pytest.raises(MeshwrightError, match="MW-RANK-002: 4 ranks need 4 GPUs, and this machine has 3"):
        run_training(load(DEMO), 5, device="cuda")


def test_available_memory_is_at_most_what_the_container_allows(monkeypatch):
    assert 2**28 < machine.available_memory() < 2**60
    monkeypatch.setattr(machine, "container_memory", lambda: 1000.0)
    assert machine.available_memory() == 1000.0


@pytest.mark.parametrize(("platform", "size"), [("linux", 5 * 1024), ("darwin", 5)])
def test_resident_memory_has_the_unit_of_its_system(monkeypatch, platform, size):
    monkeypatch.setattr(sys, "platform", platform)
    assert machine.peak_resident_bytes(5) == size


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=gpt2-xl", "plan.sp=false"],
        ["model=mixtral-8x7b", "plan.ep=2"],
        ["plan.pp=1", "plan.cp=2", "plan.cp_kind=ring"],
    ],
)
def test_a_small_copy_keeps_the_axes_and_fits(overrides):
    config = load(LARGE, [*overrides, "run.steps=7", "optimizer.warmup=3"])
    small, changes = small_config(config)
    assert (small.run, small.optimizer) == (config.run, config.optimizer)
    assert small.plan.world <= 8
    assert [small.plan.tp > 1, small.plan.pp > 1, small.plan.cp > 1, small.plan.ep > 1] == [
        config.plan.tp > 1,
        config.plan.pp > 1,
        config.plan.cp > 1,
        config.plan.ep > 1,
    ]
    assert any("shrunk" in change for change in changes)
    assert small.cluster.accelerator.name == "cpu"
    assert small.model.vocab >= 256


def test_a_small_copy_of_a_plan_for_cpu_processes_keeps_its_links():
    link = 'cluster.levels=[{name="machine", size=4, link={name="slow", alpha=0.01, bandwidth=1e6}}]'
    small, _ = small_config(load("examples/demo-dp2-tp2.toml", [link]))
    assert [level.link.name for level in small.cluster.levels] == ["slow"]
    assert small.cluster.gpus == small.plan.world


@pytest.mark.slow
def test_a_small_copy_trains_and_is_reported_under_its_own_plan(tmp_path):
    training = api.train(LARGE, steps=2, device="cpu", shrink=True, out=tmp_path, calibrate=False)
    assert training.measurement.steps == 2
    assert training.diverged_at is None
    assert training.config.plan.title() in page([tmp_path])


def test_ranks_share_a_gpu_only_if_asked(monkeypatch):
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    with pytest.raises(
        MeshwrightError, match=r"MW-RANK-002: 4 ranks need 4 GPUs, and this machine has 1.*--share-device"
    ):
        machine.resolve_device("cuda", 4)
    assert machine.resolve_device(machine.shared_device("auto", True), 4) == "cuda-shared"
    assert machine.resolve_device(machine.shared_device("auto", False), 4) == "cpu"
    assert machine.resolve_backend("auto", "cuda-shared") == "meshwright"
    for backend in ("gloo", "nccl"):
        with pytest.raises(MeshwrightError, match="MW-RANK-005"):
            machine.resolve_backend(backend, "cuda-shared")
    with pytest.raises(MeshwrightError, match="contradict"):
        machine.shared_device("cpu", True)
    monkeypatch.setattr(machine, "gpu_count", lambda: 0)
    with pytest.raises(MeshwrightError, match=r"MW-RANK-002: ranks that share a GPU need one.*--device cpu"):
        machine.resolve_device("cuda-shared", 4)


def test_launched_ranks_share_the_gpus_of_their_host(monkeypatch):
    monkeypatch.setattr(machine, "gpu_count", lambda: 2)
    monkeypatch.setattr(join, "gpu_count", lambda: 2)
    places = [Placement(rank, 4, rank, "127.0.0.1", 1) for rank in range(4)]
    assert [join.device_of("cuda-shared", place) for place in places] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    same = [{"host": "a", "device": "cuda:0", "id": "x"}] * 2
    join.check_devices(same, share=True)
    with pytest.raises(
        MeshwrightError, match=r"ranks 0, 1 use the same GPU.*--share-device|ranks 0 and 1 use the same GPU"
    ):
        join.check_devices(same)
