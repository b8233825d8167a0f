"""Whole runs under faults: every loss is that of a run without faults, and the events say what happened."""

import json
import os
import shutil
import signal
from dataclasses import asdict, replace

import pytest

import ranks
from meshwright.describe.config import Config, load
from meshwright.describe.run_folder import new_lines, read_about, read_events, read_steps, state
from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint.folder import complete
from meshwright.training.faults.inject import Fault
from meshwright.training.launch import local
from meshwright.training.run import config_for_ranks, run_training

MODEL = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 256}
WORKLOAD = {"batch": 4, "seq": 8, "precision": "fp32"}
PLAN = {"param_dtype": "fp32", "master": False, "replicate": 2}
STEPS = 24


def config(**run):
    return Config.from_parts(
        MODEL,
        "laptop",
        "gloo-cpu",
        WORKLOAD,
        PLAN,
        optimizer={"on_nan": "rollback"},
        checkpoint={"every": 5, "keep": 3, "asynchronous": False},  # which checkpoints exist is then certain
        run={"spike": 3.0, **run},
    )


def train(folder, faults=(), **options):
    local.ensure_forkserver(
        "meshwright.training.worker"
    )  # before the variable is set, which all later ranks would inherit
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_FAULTS", "faults.json")
        (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))
        run_training(config(), STEPS, folder=folder, **options)
    return [row["loss"] for row in read_steps(folder)]


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    return train(tmp_path_factory.mktemp("reference"))


def kinds_of(folder):
    return [(e["kind"], e["text"]) for e in read_events(folder) if not e["kind"].startswith("checkpoint")]


def test_a_run_survives_a_kill_a_nan_a_spike_and_a_damaged_checkpoint(tmp_path, losses):
    faults = [Fault("nan", 1, 9), Fault("bit-flip", 0, 12), Fault("spike", 1, 18), Fault("exception", 1, 21)]
    assert train(tmp_path, faults) == losses
    events = kinds_of(tmp_path)
    assert ("rollback", "gradients are NaN or infinite: back to step 5") in events
    assert ("fault", "rank 0 died: SIGKILL") in events
    assert any(kind == "resumed" and "damaged" in text for kind, text in events)
    assert any(kind == "rollback" and "the loss rose" in text and "back to step 15" in text for kind, text in events)
    assert any(kind == "fault" and "rank 1 raised: RuntimeError: injected fault 3" in text for kind, text in events)
    resumed = [attempt["resumed_from"] for attempt in read_about(tmp_path)["attempts"]]
    assert resumed == [None, 5, 5, 15, 20]  # step 10 was damaged
    assert (tmp_path / "checkpoints" / "damaged-step-00000010").is_dir()


@pytest.mark.slow
def test_a_full_disk_loses_no_row(tmp_path, losses):
    """Rank 0 cannot write for some steps: its rows wait, a checkpoint fails, and the run goes on."""
    assert train(tmp_path, [Fault("disk-full", 0, 8, steps=4)]) == losses
    assert [e["step"] for e in read_events(tmp_path) if e["kind"] == "checkpoint-failed"] == [10]
    assert len(read_about(tmp_path)["attempts"]) == 1


def test_a_run_continues_on_fewer_ranks_with_a_plan_of_the_planner(tmp_path):
    """In fp64 sums in another order differ by rounding errors of 1e-16, which 18 steps of Adam do not raise to 1e-9."""
    fp64 = {"param_dtype": "fp64", "grad_dtype": "fp64", "state_dtype": "fp64"}
    whole = Config.from_parts(
        MODEL, "laptop", "gloo-cpu", {**WORKLOAD, "precision": "fp64"}, {**PLAN, **fp64}, checkpoint={"every": 6}
    )
    folders = [tmp_path / name for name in ("whole", "fewer")]
    run_training(whole, 24, folder=folders[0])
    run_training(replace(whole, optimizer=whole.optimizer.with_steps(24)), 6, folder=folders[1])
    fewer = config_for_ranks(load(folders[1] / "plan.toml"), 1, continues=True)
    assert (fewer.plan.world, fewer.workload) == (1, whole.workload)
    run_training(fewer, 24, folder=folders[1], resume=True)
    expected, found = ([row["loss"] for row in read_steps(folder)] for folder in folders)
    assert found == pytest.approx(expected, rel=1e-9)
    assert read_about(folders[1])["attempts"][-1]["world"] == 1


def test_a_new_run_needs_the_ranks_of_its_plan():
    with pytest.raises(MeshwrightError):
        config_for_ranks(config(), 1, continues=False)
    assert config_for_ranks(config(), 2, continues=True) == config()


def test_a_signal_saves_and_the_run_continues_where_it_stopped(tmp_path, losses):
    def listen(record):
        if record.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        train(tmp_path, listen=listen)
    done = len(read_steps(tmp_path))
    assert 8 <= done < STEPS
    assert complete(tmp_path / "checkpoints")[-1][0] == done  # saved between the regular ones
    assert read_about(tmp_path)["attempts"][-1]["cause"] == "stopped"
    assert kinds_of(tmp_path)[-1] == ("signal", f"stopped after step {done - 1} by a signal")
    assert train(tmp_path, resume=True) == losses
    assert read_about(tmp_path)["attempts"][-1]["resumed_from"] == done


def resume_and_count(context, made, folder):
    """Train two steps, resume, and begin from scratch after all checkpoints were damaged. Returns the number of weights drawn each time."""
    from dataclasses import replace

    from meshwright.models.initialise import DrawnWeights
    from meshwright.training.launch.rank import Attempt
    from meshwright.training.run import make_job
    from meshwright.training.worker import train

    drawn, draw = [], DrawnWeights.read

    def counted(weights, *box):
        drawn.append(box)
        return draw(weights, *box)

    DrawnWeights.read = counted
    counts = []
    job = make_job(made, 2, 0, "cpu", "gloo", folder, 1, None)
    for one in (job, replace(job, resume=True, steps=4), replace(job, resume=True, from_scratch=True)):
        if len(counts) == 2:
            for file in folder.glob("checkpoints/step-*/*.safetensors"):
                file.write_bytes(file.read_bytes()[:-1])
            files = ("steps.jsonl", "run.json", "measurement.json", "events.jsonl", "plan.toml")
            before = [(folder / name).read_bytes() for name in files]
            with pytest.raises(MeshwrightError, match="MW-CKPT-019"):
                train(context, Attempt(), replace(one, from_scratch=False, steps=9))
            assert [(folder / name).read_bytes() for name in files] == before  # a refused resume changes nothing
        drawn.clear()
        train(context, Attempt(), one)
        counts.append(len(drawn))
    return counts


@pytest.mark.slow
def test_no_weights_are_drawn_that_a_checkpoint_replaces(tmp_path):
    made = Config.from_parts(MODEL, "laptop", "gloo-cpu", WORKLOAD, {**PLAN, "replicate": 1})
    ((first, resumed, again),) = ranks.run(1, resume_and_count, made, tmp_path)
    assert first == again > 0
    assert resumed == 0
    assert [row["step"] for row in read_steps(tmp_path)] == [0, 1]
    assert [row["step"] for row in new_lines(tmp_path / "unused-steps.jsonl", 0)[0]] == [0, 1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000002", "unused-step-00000002", "unused-step-00000004",
    ]  # fmt: skip


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(tmp_path):
    """Neither with --resume nor in a restart; one that has not saved yet does, with a message."""
    made = Config.from_parts(MODEL, "laptop", "gloo-cpu", WORKLOAD, {**PLAN, "replicate": 1}, checkpoint={"every": 2})
    ranks.run(1, lose_checkpoints, made, tmp_path)


def lose_checkpoints(context, made, folder):
    from meshwright.training.launch.rank import Attempt
    from meshwright.training.run import make_job
    from meshwright.training.worker import train

    job = replace(make_job(made, 3, 0, "cpu", "gloo", folder, 1, None), resume=True)
    folder.joinpath("run.json").write_text("{}")
    train(context, Attempt(), job)
    assert any("begins again at step 0" in text for kind, text in kinds_of(folder) if kind == "resumed")
    shutil.rmtree(folder / "checkpoints")
    rows = read_steps(folder)
    for attempt in (Attempt(), Attempt(1, "rank 0 died")):
        with pytest.raises(MeshwrightError, match=r"MW-CKPT-019.* missing"):
            train(context, attempt, replace(job, steps=6))
    assert read_steps(folder) == rows


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_what_was_not_written(tmp_path, losses):
    """The rows wait in memory until the end; a resume with room trains their steps again."""
    with pytest.raises(MeshwrightError, match="MW-FOLDER-003: the disk is full") as raised:
        train(tmp_path, [Fault("disk-full", 0, 8, steps=10**6)])
    assert raised.value.exit_code == 74
    assert f"the checkpoint of step {STEPS}" in raised.value.what
    assert "timeline.json" in raised.value.what
    written = len(read_steps(tmp_path))
    assert f"{STEPS - written} rows of steps.jsonl (steps {written} to {STEPS - 1})" in raised.value.what
    assert [state(tmp_path), len(read_about(tmp_path)["attempts"])] == ["failed", 1]
    assert train(tmp_path, resume=True) == losses
