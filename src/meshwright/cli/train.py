"""`meshwright train`: run a plan on this machine, or as one rank of a launcher, and compare the run with its prediction."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import typer

from meshwright import api
from meshwright.cli.options import Overrides, described
from meshwright.cli.output import patient, writable
from meshwright.errors import MeshwrightError, cannot_write
from meshwright.units import Json
from meshwright.view.tables import show, show_json
from meshwright.view.trace import write_trace

if TYPE_CHECKING:
    from meshwright.describe.config import Config
    from meshwright.training.measure.measurement import Training


@described
def command(
    plan: Path | None = None,
    steps: int | None = None,
    seed: int | None = None,
    learning_rate: float | None = None,
    start_from: Path | None = None,
    device: str = "auto",
    backend: str = "auto",
    share_device: bool = False,
    out: Path | None = None,
    save_every: int | None = None,
    resume: Path | None = None,
    from_scratch: bool = False,
    profile: int | None = None,
    dry_run: bool = False,
    trace: Path | None = None,
    shrink: bool = False,
    allow_differences: str = "",
    calibrate: bool = True,
    recalibrate: bool = False,
    as_json: bool = False,
    **asked: Unpack[Overrides],
) -> None:
    """Train a plan and compare the run with its prediction.

    It starts one process for each rank on this machine; under torchrun, srun or mpirun it is one of their ranks (docs/launching.md).
    The text is that of [data] in the run file; without it, the source code of Python's standard library. Exit code 1 if the
    loss becomes NaN or infinite, 3 if the run does not fit on this machine."""
    from meshwright.training.folder import claimed
    from meshwright.training.launch.rank import placement
    from meshwright.training.machine import shared_device

    device = shared_device(device, share_device)
    place = placement(os.environ)
    reports = place is None or place.rank == 0  # the other ranks of a launcher print nothing
    if place is None and resume is not None:
        with claimed(resume):  # a folder in use is refused before torch is imported, which takes seconds
            pass
    plan = plan_to_train(plan, out, resume, from_scratch)
    asked["set"] += api.run_settings(steps, seed, learning_rate, save_every, start_from or "", profile)
    asked["set"] += api.difference_settings(allow_differences)
    config, changes = api.config_to_train(plan, device, shrink, resume is not None, **asked)
    if changes and reports and not as_json:
        show(*(f"[dim]{change}[/]" for change in changes))
    folder = resume or out or Path("runs") / f"{plan.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not (resume or out or dry_run or place):
        folder = made_alone(folder)
    if dry_run:
        check_only(config, device, backend, folder, as_json)
        return
    how: Json = {
        "device": device,
        "backend": backend,
        "calibrate": calibrate or recalibrate,
        "recalibrate": recalibrate,
    }
    run = partial(api.train, config, resume=resume, from_scratch=from_scratch, out=folder, **how)
    if reports:
        train_and_show(run, config.run.steps, folder, trace, as_json)
    else:
        run()


def made_alone(folder: Path) -> Path:
    """Make this folder, or one with a number behind its name: another run may begin in the same second."""
    for number in range(1, 1000):
        named = folder.with_name(folder.name + f"-{number}" * (number > 1))
        try:
            named.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise cannot_write(named, error) from error
        return named
    return folder


def plan_to_train(plan: Path | None, out: Path | None, resume: Path | None, from_scratch: bool) -> Path:
    """The plan file: the given one, or that of the run to resume."""
    from meshwright.training.run import check_resume, plan_of_run

    check_resume(resume, from_scratch)
    plan = plan or (plan_of_run(resume) if resume is not None else None)
    if plan is None:
        raise MeshwrightError(
            "MW-CLI-005", "there is no plan to train", fix="meshwright train PLAN.toml, or --resume RUN"
        )
    if out is not None and resume is not None and out != resume:
        raise MeshwrightError("MW-CLI-005", "--out and --resume name two folders", fix=f"--resume {resume}")
    return plan


def check_only(config: Config, device: str, backend: str, folder: Path, as_json: bool) -> None:
    """Print what `--dry-run` checked; of a launcher's ranks only the first one prints."""
    from meshwright.training.dry_run import dry_run

    checked = dry_run(config, config.run.steps, config.run.seed, device, backend, folder)
    if checked is not None and as_json:
        show_json(dict(checked))
    elif checked is not None:
        show(*(f"{what:<14} {result}" for what, result in checked), "Nothing was written.")


def train_and_show(
    run: Callable[..., Training | None], steps: int, folder: Path, trace: Path | None, as_json: bool
) -> None:
    """Train, show progress and then the result, and write the trace. Exit code 1 if the loss became NaN or infinite."""
    from meshwright.training.page import page
    from meshwright.view.watch import progress_display

    writable(folder / "measurement.json", make=True)
    writable(trace)
    with kept_after_interruption(folder):
        if as_json:
            with patient("training", measurable=False):
                training = run()
            assert training is not None, "rank 0 has the result"
            show_json(training.as_dict())
        else:
            with progress_display(steps, folder) as display:
                training = run(announce=display.announce)
            assert training is not None, "rank 0 has the result"
            show(page(training, str(folder)))
    if trace is not None:
        write_trace(training.trace(), trace)
        if not as_json:
            show(f"[dim]trace written to {trace}[/]")
    if training.diverged_at is not None:
        raise typer.Exit(1)


@contextmanager
def kept_after_interruption(folder: Path) -> Iterator[None]:
    """If the run ends early, say on stderr where the measurement of its steps is."""
    file = folder / "measurement.json"
    before = file.stat().st_mtime_ns if file.exists() else None
    try:
        yield
    except BaseException:
        if file.exists() and file.stat().st_mtime_ns != before:
            print(f"The steps until now were measured: {folder}", file=sys.stderr)
        raise
