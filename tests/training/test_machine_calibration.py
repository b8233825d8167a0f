"""The cached calibration of this machine, and the load of other processes."""

import json
import os
import stat
from pathlib import Path

import pytest

from meshwright import api
from meshwright.calibrate.machine import MachineMeasurement
from meshwright.comm.bench import timing
from meshwright.comm.bench.device import DTYPES
from meshwright.comm.bench.operations import cpu_cases
from meshwright.comm.bench.timing import ClockReading, busy_seconds
from meshwright.describe.run_folder import read_events
from meshwright.errors import MeshwrightError
from meshwright.training.launch.rank import RankFailure
from meshwright.training.measure import calibration
from meshwright.training.measure.calibration import Interference
from meshwright.training.measure.measurement import LoadWatch
from meshwright.training.run import run_training
from synthetic_machine import measurement

DEMO = "examples/demo-dp2-tp2.toml"
STAT = "cpu  1000 0 500 9000 100 0 0 0 0 0\ncpu0 500 0 250 4500 50 0 0 0 0 0\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "meshwright"


def kept(busy: float = 0.0, ranks: int = 4) -> MachineMeasurement:
    made = measurement(ranks=ranks, busy=busy).but(key=calibration.machine_key(ranks))
    calibration.write_cached(made)
    return made


def test_a_calibration_is_kept_for_its_user_only_and_found_again(cache: Path) -> None:
    made = kept()
    (file,) = cache.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert calibration.read_cached(made.key) == made
    assert calibration.machine_measurement(4) == made  # nothing is measured


def test_an_old_calibration_is_made_anew(cache: Path) -> None:
    made = kept()
    (file,) = cache.iterdir()
    os.utime(file, (file.stat().st_atime, file.stat().st_mtime - calibration.LONGEST_S - 60))
    assert calibration.read_cached(made.key) is None


CHANGED = [
    "processor", "cores", "ranks", "dtype", "reduced_dtype", "backend", "torch", "python", "version", "threads", "device",
]  # fmt: skip


@pytest.mark.parametrize("changed", CHANGED)
def test_another_machine_or_library_measures_anew(changed: str) -> None:
    made = kept()
    assert calibration.read_cached({**made.key, changed: "another"}) is None


@pytest.mark.parametrize(
    ("dtype", "reduced", "backend", "plan"),
    [
        ("fp32", "fp32", "auto", []),
        ("fp32", "fp32", "meshwright", []),
        ("bf16", "bf16", "gloo", []),  # tp reduces activations
        ("bf16", "fp32", "gloo", ["plan.tp=1", "plan.replicate=4"]),  # only gradients are reduced, in fp32
        ("bf16", "fp16", "gloo", ["plan.tp=1", "plan.replicate=4", "plan.comm_dtype=fp16"]),
        ("bf16", "fp32", "gloo", ["plan.tp=1", "plan.replicate=4", "plan.comm_dtype=fp8"]),
    ],
)
def test_a_run_is_calibrated_in_its_dtypes_and_backend(
    dtype: str, reduced: str, backend: str, plan: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations are timed in the dtype of the parameters; the update, which works on masters, and top-k of summed gradients in fp32;
    reductions in the dtype of what most of them add up."""
    asked = []

    def measure(target: str, ranks: int, *args: object, **options: object) -> None:
        asked.append((target, ranks, args, options["backend"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration.local, "run", measure)
    with pytest.raises(KeyboardInterrupt):
        api.train(DEMO, set=[f"workload.precision={dtype}", f"plan.param_dtype={dtype}", *plan], backend=backend)
    assert asked == [(calibration.TARGET, 4, (dtype, reduced), "gloo" if backend == "auto" else backend)]
    cases = {(case.kind, case.dtype) for case in cpu_cases(DTYPES[dtype])}
    assert {kind for kind, other in cases if other} == ({"optimizer", "top-k"} if dtype == "bf16" else set())


def test_a_busy_or_damaged_calibration_is_not_used(cache: Path) -> None:
    made = kept(busy=1.0)
    assert calibration.read_cached(made.key) is None
    (file,) = cache.iterdir()
    for text in ("{", "[]", '{"ranks": 0}', ""):
        file.write_text(text)
        assert calibration.read_cached(made.key) is None


def test_a_calibration_of_an_unknown_dtype_is_made_anew(cache: Path) -> None:
    made = kept()
    (file,) = cache.iterdir()
    file.write_text(made.model_dump_json(exclude={"dtype"}))
    assert calibration.read_cached(made.key) is None


def test_a_cache_that_cannot_be_written_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    made = kept()
    assert calibration.read_cached(made.key) is None


def test_only_cpu_processes_without_measured_constants_are_calibrated() -> None:
    config = api.load(DEMO)
    assert calibration.is_for_this_machine(config)
    assert not calibration.is_for_this_machine(calibration.with_this_machine(config, kept()))
    assert not calibration.is_for_this_machine(api.load("examples/llama3-70b-64xh100.toml"))


def test_load_of_other_processes_is_what_the_cores_ran_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.os, "sysconf", lambda name: 100)
    assert busy_seconds(STAT) == 15.0
    start, end = ClockReading(0.0, 100.0), ClockReading(10.0, 118.0)
    assert end.busy_cores_since(start, 5.0) == pytest.approx(1.3)
    assert end.busy_cores_since(start, 30.0) == 0.0


def test_a_process_that_is_ending_is_no_load(monkeypatch):
    """The least of the looks counts, and an idle machine is looked at once."""
    loads = iter([1.5, 0.8, 0.02, 1.0])
    monkeypatch.setattr(timing, "look", lambda seconds: next(loads))
    assert timing.busy_cores(idle=0.2) == 0.02
    assert next(loads) == 1.0
    loads = iter([1.5, 0.9, 1.1, 1.2])
    assert timing.busy_cores(idle=0.2) == 0.9


def test_a_prediction_on_a_busy_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config, made = api.load(DEMO), kept()
    monkeypatch.setattr("meshwright.training.measure.measurement.busy_cores", lambda idle: 0.0)
    quiet = LoadWatch(config, made)
    assert quiet.prediction.step_time_s == pytest.approx(quiet.idle_s)
    assert any("measured on this machine" in line for line in quiet.prediction.assumed)
    monkeypatch.setattr("meshwright.training.measure.measurement.busy_cores", lambda idle: 1.0)
    loaded = LoadWatch(config, made)
    assert loaded.idle_s == pytest.approx(quiet.idle_s)
    assert loaded.prediction.step_time_s == pytest.approx(1.25 * quiet.idle_s, rel=0.02)  # 4 of 5 processes on 2 cores
    assert any("1.0 of 2 cores" in line for line in loaded.prediction.assumed)


def test_the_report_says_how_busy_the_machine_was() -> None:
    assert Interference(2, 0.05, 0.1, 0.1, 0.1).sentences() == []
    (text,) = Interference(2, 0.0, 1.3, 0.100, 0.125).sentences()
    for words in ("1.3 during it", "idle machine: 100 ms", "125 ms"):
        assert words in text


@pytest.mark.slow
def test_a_run_records_the_load_during_its_steps(tmp_path: Path) -> None:
    config = api.load(DEMO, set=["plan.replicate=2", "plan.tp=1", "workload.batch=8", "workload.seq=16"])
    training = run_training(config, 4, folder=tmp_path, machine=kept(ranks=2))
    seen = training.interference
    assert seen is not None
    assert seen.during is not None
    assert seen.loaded_s is not None
    assert (tmp_path / "interference.json").exists()
    assert training.as_dict()["interference"]["idle_s"] == seen.idle_s
    assert "measured on this machine" in (tmp_path / "plan.toml").read_text()


def test_a_used_folder_is_refused_before_the_machine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    monkeypatch.setattr(calibration, "machine_measurement", lambda *a, **k: pytest.fail("measured"))
    with pytest.raises(MeshwrightError, match="MW-FOLDER-002"):
        api.train(DEMO, out=tmp_path)


def test_a_failed_calibration_does_not_end_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*given: object, **options: object) -> None:
        raise RankFailure(1, "hung", "Thread 0x1\n" * 40, {}, None)

    monkeypatch.setattr(calibration, "machine_measurement", hang)
    small = ["plan.replicate=1", "plan.tp=1", "workload.batch=8", "workload.seq=16"]
    training = api.train(DEMO, set=small, steps=2, device="cpu", out=tmp_path)
    text = "This machine could not be calibrated (rank 1 hung): the prediction has the constants of the catalog's CPU"
    assert training.as_dict()["uncalibrated"] == text
    assert text in json.loads((tmp_path / "prediction.json").read_text())["assumed"]
    assert [event["text"] for event in read_events(tmp_path) if event["kind"] == "calibration"] == [text]


def test_a_calibration_in_another_dtype_is_another():
    keys = [calibration.machine_key(4, *dtypes) for dtypes in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"))]
    assert len({calibration.cache_file(key) for key in keys}) == 3


GIVEN = """
[cluster]
extends = "laptop"
source = "written by hand"
levels = [{ name = "machine", size = 4, link = { name = "slow", alpha = 0.01, bandwidth = 1e6 } }]
"""


def test_links_of_a_cluster_file_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction takes the links of the file and the device of this machine; without a file it takes both of this machine."""
    monkeypatch.setattr("meshwright.training.measure.measurement.busy_cores", lambda idle: 0.0)
    file, made = tmp_path / "cluster.toml", kept()
    file.write_text(GIVEN)
    plain, given = api.load(DEMO), api.load(DEMO, cluster=file)
    assert calibration.is_for_this_machine(given)
    here, there = LoadWatch(plain, made), LoadWatch(given, made)
    assert there.config.cluster.levels == given.cluster.levels
    assert there.config.cluster.collectives == given.cluster.collectives
    assert (
        there.config.cluster.accelerator.peak == here.config.cluster.accelerator.peak != plain.cluster.accelerator.peak
    )
    assert here.config.cluster.levels != plain.cluster.levels
    sent = (
        sum(there.prediction.traffic_bytes.values()) / 1e6
    )  # seconds on the slow link, and at least 10 ms for each message
    assert there.prediction.step_time_s > here.prediction.step_time_s + sent
    assert here.predicted_from == ""
    assert there.predicted_from == f"the links of {file} and the device of this machine"
    (assumed,) = [line for line in there.prediction.assumed if "written by hand" in line]
    assert "operations in fp32, of fixed sizes" in assumed


def test_rates_of_a_cluster_file_are_used(tmp_path: Path) -> None:
    """Nothing is measured for a file that gives rates. A changed memory or number of devices is not a rate."""
    file = tmp_path / "cluster.toml"
    file.write_text(GIVEN + '[cluster.accelerator]\nextends = "cpu"\npeak = { fp32 = 1e12 }\n')
    given = api.load(DEMO, cluster=file)
    assert not calibration.is_for_this_machine(given)
    watch = LoadWatch(given, None)
    assert watch.config == given
    assert watch.predicted_from == str(file)
    assert calibration.is_for_this_machine(api.load(DEMO, set=["cluster.accelerator.memory=8GiB", "cluster.gpus=8"]))
    assert LoadWatch(api.load(DEMO), None).predicted_from == ""
