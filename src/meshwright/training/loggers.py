"""Loggers of other projects: TensorBoard, Weights & Biases, MLflow, trackio. The rows of the run folder are written in any case.

    [run]
    loggers = ["tensorboard", "wandb"]
    log_every = 10

Each logger is a function that opens it and returns how to log and how to close it; the package behind it is imported only if it is asked for, and a
missing one is an error before the first step. Everything stays on this machine unless the package's own variables (`WANDB_MODE`,
`MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`) say otherwise: files lie in the run folder. Only rank 0 logs.

A logger that raises during a run is dropped with an event, and training continues: a service that does not answer must not end a run.
A resumed run continues its curves: steps that are trained again replace or follow the old ones, as the package allows.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError, unknown
from meshwright.training.folder import RunFolder
from meshwright.training.hooks import Hook, StepRecord
from meshwright.units import Json

NOT_LOGGED = ("step", "attempt")  # of a row: the step is the x axis


Log = Callable[[int, dict[str, float]], None]  # step, values
Opened = tuple[Log, Callable[[], None]]  # how to log, and how to close


def check_loggers(names: Sequence[str]) -> None:
    """Raise if a logger is unknown or its package is not installed."""
    for name in names:
        if name not in OPEN:
            raise unknown("MW-LOG-001", "logger", name, OPEN, '--set run.loggers=["{}"]')
        if find_spec(name) is None:
            raise MeshwrightError(
                "MW-LOG-002",
                f"the logger '{name}' needs the package {name}, which is not installed",
                why="The run folder has every row without it",
                fix=f"pip install {name}",
            )


class Logging(Hook):
    """The hook of rank 0 that passes every n-th record to the loggers. It runs after the hooks that add to the record."""

    def __init__(
        self, names: Sequence[str], every: int, folder: RunFolder, config: Config, first_step: int = 0
    ) -> None:
        check_loggers(names)
        self.every, self.folder, self.step = every, folder, first_step
        self.loggers: dict[str, Opened] = {}
        for name in names:
            opened = self._call_or_drop(name, OPEN[name], folder.path, config, first_step)
            self.loggers |= {name: opened} if opened is not None else {}

    def after_step(self, trainer: Any, record: StepRecord) -> None:
        if record.step % self.every and record.validation_loss is None:
            return
        values, self.step = flat(record.row()), record.step
        for name, (log, _) in list(self.loggers.items()):
            self._call_or_drop(name, log, record.step, values)

    def finish(self, trainer: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close every logger, once."""
        for name, (_, close) in list(self.loggers.items()):
            self._call_or_drop(name, close)
        self.loggers.clear()

    def _call_or_drop(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call a logger; drop it if it raises, whatever that is: its package is not ours."""
        try:
            return call(*args)
        except Exception as error:
            self.loggers.pop(name, None)
            text = f"the logger {name} failed and is not used any more: {type(error).__name__}: {error}"
            self.folder.event("logger", self.step, text[:500], logger=name)
            return None


def flat(row: Json) -> dict[str, float]:
    """The numbers of a row; tables within it under `table/name`. NaN and infinity stay: loggers show them."""
    out: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            out |= {f"{key}/{inner}": float(x) for inner, x in value.items()}
        elif key not in NOT_LOGGED and isinstance(value, int | float):
            out[key] = float(value)
    return out


def open_tensorboard(folder: Path, config: Config, first_step: int) -> Opened:
    """Event files in `tensorboard/` of the run folder. Steps that are trained again hide the old ones (`purge_step`)."""
    make = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    writer = make(str(folder / "tensorboard"), purge_step=first_step or None, flush_secs=10)
    writer.add_text("run file", f"```toml\n{config.to_toml()}\n```")

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def open_wandb(folder: Path, config: Config, first_step: int) -> Opened:
    """A run of Weights & Biases, offline unless `WANDB_MODE` says otherwise: `wandb sync` sends it later."""
    run = importlib.import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT", "meshwright"),
        name=folder.name,
        id=stable_name(folder),
        resume="allow",
        dir=str(folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=config.to_dict(),
    )
    return lambda step, values: run.log(values, step=step), run.finish


def open_mlflow(folder: Path, config: Config, first_step: int) -> Opened:
    """A run of MLflow, in a database of the run folder unless `MLFLOW_TRACKING_URI` says otherwise."""
    mlflow = importlib.import_module("mlflow")
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute() / 'mlflow.db'}")
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "meshwright"))
    noted = folder / "mlflow-run.txt"  # so that a resumed run continues its curves
    before = noted.read_text("ascii").strip() if noted.is_file() else None
    started = mlflow.start_run(run_id=before, run_name=None if before else folder.name)
    noted.write_text(started.info.run_id, "ascii")
    if not before:
        mlflow.log_params(parameters(config))
    return lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run


def open_trackio(folder: Path, config: Config, first_step: int) -> Opened:
    """A run of trackio, in its local database unless `TRACKIO_SPACE_ID` names a space."""
    trackio = importlib.import_module("trackio")
    project = os.environ.get("TRACKIO_PROJECT", "meshwright")
    trackio.init(project=project, name=stable_name(folder), resume="allow", config=parameters(config))
    return lambda step, values: trackio.log(values, step=step), trackio.finish


# A logger is called like the package behind it.
OPEN: dict[str, Callable[[Path, Config, int], Opened]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
    "trackio": open_trackio,
}


def stable_name(folder: Path) -> str:
    """The same name each time a run is resumed: the folder and its parent."""
    parts = folder.absolute().parts[-2:]
    return "-".join("".join(c if c.isalnum() or c in "-_." else "-" for c in part) for part in parts)[-60:].strip("-")


def parameters(config: Config) -> dict[str, str]:
    """The values of a run file under `section.field`, or under `section` where it names an entry of the catalog."""
    out: dict[str, str] = {}
    for section, value in config.to_dict().items():
        fields = {f"{section}.{name}": x for name, x in value.items()} if isinstance(value, dict) else {section: value}
        out |= {name: str(x)[:250] for name, x in fields.items()}
    return out
