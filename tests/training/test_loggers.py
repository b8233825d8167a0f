"""Loggers: each receives the rows, a missing or failing one does not end a run."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from meshwright.describe.config import Config
from meshwright.describe.run import Run
from meshwright.describe.run_folder import read_events
from meshwright.errors import MeshwrightError
from meshwright.predict.prediction import predict
from meshwright.training.folder import RunFolder
from meshwright.training.hooks import StepRecord
from meshwright.training.loggers import OPEN, Logging, check_loggers, flat, stable_name
from meshwright.training.worker import closed_loggers

CONFIG = Config.from_parts(
    {"hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab": 256},
    "laptop",
    "gloo-cpu",
    {"batch": 8, "seq": 16, "precision": "fp32"},
    {"param_dtype": "fp32", "master": False},
)


def record(step: int, **more: Any) -> StepRecord:
    return StepRecord(step, 5.0 - step, 1.0, 128, 0.5, exposed_s={"tp": 0.1}, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    made = RunFolder.create(tmp_path / "run", CONFIG, predict(CONFIG), steps=10)
    made.begin_attempt(world=1, plan="one device")
    yield made
    made.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Fakes of all packages, which note their calls."""
    seen: list[tuple[Any, ...]] = []

    def note(name: str, answer: Any = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, args, kwargs))
            return answer

        return call

    run = SimpleNamespace(log=note("wandb.log"), finish=note("wandb.finish"))
    begun = SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    fakes: dict[str, dict[str, Any]] = {
        "wandb": {"init": note("wandb.init", run)},
        "mlflow": {name: note(f"mlflow.{name}", begun) for name in (
            "set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics", "end_run")},
        "trackio": {name: note(f"trackio.{name}") for name in ("init", "log", "finish")},
        "tensorboard": {},
        "torch.utils.tensorboard": {"SummaryWriter": lambda *args, **kwargs: SimpleNamespace(
            add_text=note("tensorboard.text"), add_scalar=note("tensorboard.scalar"), close=note("tensorboard.close"))},
    }  # fmt: skip
    for name, members in fakes.items():
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for variable in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    return seen


def test_every_logger_receives_each_nth_row(folder: RunFolder, calls: list[tuple[Any, ...]]) -> None:
    logging = Logging(tuple(OPEN), 2, folder, CONFIG)
    for step in range(5):
        logging.after_step(None, record(step, validation_loss=4.5 if step == 1 else None))
    logging.finish(None)
    steps = {name: [kwargs["step"] for n, _, kwargs in calls if n == name] for name in ("wandb.log", "trackio.log")}
    assert steps == {"wandb.log": [0, 1, 2, 4], "trackio.log": [0, 1, 2, 4]}  # step 1 was evaluated
    metrics = [(args[0], kwargs["step"]) for name, args, kwargs in calls if name == "mlflow.log_metrics"]
    assert metrics[0] == (flat(record(0).row()), 0)
    assert metrics[0][0]["exposed_s/tp"] == 0.1
    assert "attempt" not in metrics[0][0]
    scalars = {args for name, args, _ in calls if name == "tensorboard.scalar"}
    assert ("loss", 5.0, 0) in scalars
    assert ("validation_loss", 4.5, 1) in scalars
    assert {"wandb.finish", "mlflow.end_run", "trackio.finish", "tensorboard.close"} <= {name for name, *_ in calls}
    assert read_events(folder.path) == []


def test_a_worker_logs_where_the_run_file_says_so(folder: RunFolder, calls: list[tuple[Any, ...]]) -> None:
    from meshwright.training.worker import writers_of

    trainer: Any = SimpleNamespace(step=5)
    named = replace(CONFIG, run=Run(loggers=("trackio",), log_every=3))
    for config, kinds in ((CONFIG, ["StepWriter"]), (named, ["StepWriter", "Logging"])):
        assert [type(hook).__name__ for hook in writers_of(trainer, config, folder, None)] == kinds
    hook = writers_of(trainer, named, folder, None)[-1]
    assert isinstance(hook, Logging)
    assert (hook.every, hook.step, list(hook.loggers)) == (3, 5, ["trackio"])


def test_nothing_leaves_this_machine_by_default(folder: RunFolder, calls: list[tuple[Any, ...]]) -> None:
    Logging(("wandb", "mlflow"), 1, folder, CONFIG)
    (wandb,) = [kwargs for name, _, kwargs in calls if name == "wandb.init"]
    assert wandb["mode"] == "offline"
    assert wandb["dir"] == str(folder.path)
    (address,) = [args[0] for name, args, _ in calls if name == "mlflow.set_tracking_uri"]
    assert address.startswith("sqlite:///")
    assert str(folder.path) in address


def test_a_resumed_run_continues_its_curves(folder: RunFolder, calls: list[tuple[Any, ...]]) -> None:
    for first_step in (0, 5):
        Logging(("wandb", "mlflow"), 1, folder, CONFIG, first_step)
    identities = {kwargs["id"] for name, _, kwargs in calls if name == "wandb.init"}
    assert identities == {stable_name(folder.path)}
    runs = [kwargs["run_id"] for name, _, kwargs in calls if name == "mlflow.start_run"]
    assert runs == [None, "abc"]


def test_a_logger_that_fails_is_dropped_and_training_continues(folder: RunFolder, calls: list[tuple[Any, ...]]) -> None:
    logging = Logging(("trackio", "mlflow"), 1, folder, CONFIG)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no answer")

    sys.modules["mlflow"].log_metrics = fail  # type: ignore[attr-defined]
    for step in range(3):
        logging.after_step(None, record(step))
    assert list(logging.loggers) == ["trackio"]
    (event,) = read_events(folder.path)
    assert (event["kind"], event["step"], event["logger"]) == ("logger", 0, "mlflow")
    assert "ConnectionError: no answer" in event["text"]


def test_loggers_are_closed_once_when_a_step_raises(folder: RunFolder, calls: list[tuple[Any, ...]]) -> None:
    logging = Logging(("wandb",), 1, folder, CONFIG)
    with pytest.raises(ZeroDivisionError), closed_loggers([logging]):
        raise ZeroDivisionError
    logging.finish(None)
    assert [name for name, *_ in calls].count("wandb.finish") == 1


def test_a_missing_or_unknown_logger_is_an_error_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshwrightError, match=r"MW-LOG-001: logger 'tensorbord' is not known.*\[\"tensorboard\"\]"):
        check_loggers(["tensorbord"])
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setattr("meshwright.training.loggers.find_spec", lambda name: None)
    with pytest.raises(MeshwrightError, match=r"MW-LOG-002: .*pip install trackio"):
        check_loggers(["trackio"])


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_itself_writes_curves(folder: RunFolder) -> None:
    logging = Logging(("tensorboard",), 1, folder, CONFIG)
    logging.after_step(None, record(3))
    logging.finish(None)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(3, 2.0)]
