"""A training run, as its user starts it: check, predict, start ranks on this machine or join those of a launcher, return the result.

    no launcher in the environment       `launch.local` starts the ranks here, and restarts them after a failure
    torchrun, Slurm, Open MPI, env://    this process is one rank (`launched`)

Ranks do the work (`worker`), and rank 0 writes the run folder (`describe.run_folder` lists its files). All that watch a run read the
folder, also the process that started it: `StepReader` reads the rows of finished steps while rank 0 appends them.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from meshwright.calibrate.machine import MachineMeasurement
from meshwright.describe.config import Config
from meshwright.describe.own_stack import with_own_stack
from meshwright.describe.run_folder import PLAN, PREDICTION, RunFollower, is_run
from meshwright.errors import MeshwrightError
from meshwright.planner.resize import plan_for_world
from meshwright.predict.prediction import resolve_recompute
from meshwright.training.data.sources import check_data
from meshwright.training.faults.inject import VARIABLE
from meshwright.training.folder import check_free, check_unused
from meshwright.training.hooks import StepRecord
from meshwright.training.job import TrainingJob
from meshwright.training.launch import local
from meshwright.training.launch.rank import placement
from meshwright.training.launch.temporary import temporary_folder
from meshwright.training.machine import check_machine, resolve_backend, resolve_device
from meshwright.training.measure import calibration
from meshwright.training.measure.measurement import LoadWatch, Training, conclude_interrupted
from meshwright.training.start import has_checkpoint

TARGET = "meshwright.training.worker:train"
Listen = Callable[[StepRecord], None]


def run_training(
    config: Config,
    steps: int,
    *,
    seed: int = 0,
    device: str = "cpu",
    backend: str = "auto",
    folder: Path | None = None,
    listen: Listen | None = None,
    machine: MachineMeasurement | None = None,
    uncalibrated: str = "",
    resume: bool = False,
    from_scratch: bool = False,
) -> Training | None:
    """Train a plan until it has done `steps` steps, or continue the run in the folder (`resume`), with `from_scratch` at step 0. `listen` is
    called with the record of every finished step. With a calibration of this `machine` its constants replace those of the plan's cluster and stack;
    `uncalibrated` says why there is none, if it failed. Among ranks of a launcher, only rank 0 returns a result."""
    place = placement(os.environ)

    def prepare(path: Path, ranks_here: int, restarted: bool) -> TrainingJob:
        planned = config
        if place is not None:
            planned = config_for_ranks(config, place.world, continues=restarted or resume)
        if resume:
            check_resume(path, from_scratch)
            check_keeps(planned)
            if not restarted:
                check_free(path)
        elif not restarted:
            check_unused(path)
        job = make_job(planned, steps, seed, device, backend, path, ranks_here, machine, uncalibrated)
        saves = folder is not None and planned.checkpoint.keep > 0
        aim = completed(config, steps) if planned.plan != config.plan else None
        faults = os.environ.get(VARIABLE, "")
        return replace(job, faults=faults, resume=resume, from_scratch=from_scratch, saves=saves, aim=aim)

    with temporary_folder() if folder is None else nullcontext(folder) as path:
        if place is None:
            return run_here(prepare(path, config.plan.world, False), listen, config.run.restarts if folder else 0)
        from meshwright.training.launch.launched import train_launched

        return train_launched(place, prepare, path, listen)


def make_job(
    config: Config,
    steps: int,
    seed: int,
    device: str,
    backend: str,
    folder: Path,
    ranks_here: int,
    machine: MachineMeasurement | None,
    uncalibrated: str = "",
) -> TrainingJob:
    """Check a run, complete its configuration and predict it; raises if it is illegal or does not fit on this machine."""
    check(config, steps, folder)
    device = resolve_device(device, ranks_here)
    watch = LoadWatch(completed(config, steps), machine, uncalibrated)
    backend = resolve_backend(backend, device)
    check_machine(watch.config.plan, watch.prediction, device, folder, steps, ranks_here)
    return TrainingJob(watch.config, watch, steps, seed, device, backend, folder)


def calibrate_run(
    config: Config,
    device: str,
    backend: str,
    folder: Path | None,
    resume: bool,
    recalibrate: bool,
    announce: Callable[[str], None] | None,
) -> tuple[MachineMeasurement | None, str]:
    """The calibration of this machine for a run on its CPU, or why there is none; (None, "") if the run does not need one. A run that
    cannot start is refused before it is measured."""
    if resolve_device(device, config.plan.world) != "cpu" or not calibration.is_for_this_machine(config):
        return None, ""
    check(config, config.run.steps, folder)
    if folder is not None and not resume:
        check_unused(folder)
    return calibration.measured_or_reason(config.plan, resolve_backend(backend, "cpu"), recalibrate, announce)


def completed(config: Config, steps: int) -> Config:
    """The configuration with what a run decides: full paths, the length of the schedule, our stack, the layers to recompute."""
    config = replace(
        config,
        data=config.data.with_paths_in(Path.cwd()),  # the plan in the run folder must find them
        run=config.run.with_paths_in(Path.cwd()),
        optimizer=config.optimizer.with_steps(steps),
    )
    config, memory = with_own_stack(config), config.cluster.accelerator.memory
    return replace(config, plan=resolve_recompute(config.model, config.plan, config.workload, config.stack, memory))


def check(config: Config, steps: int, folder: Path | None = None) -> None:
    """Raise if the plan is illegal, or `train` cannot run it on any machine. `folder`: the run folder, of a run that continues."""
    if steps < 1:
        raise MeshwrightError("MW-TRAIN-003", f"steps={steps}: a run needs at least one step", fix="--steps 1")
    config.check_trainable()
    check_data(config)
    if config.run.loggers:
        from meshwright.training.loggers import check_loggers

        check_loggers(config.run.loggers)
    if config.run.start_from or config.adapter.start_from:
        from meshwright.training.start import check_start

        check_start(config, folder)


def check_world(config: Config, world: int) -> None:
    """Raise if a launcher started another number of ranks than the plan has."""
    if config.plan.world != world:
        raise MeshwrightError(
            "MW-MESH-001",
            f"the plan needs {config.plan.world} ranks and {world} were started",
            why=config.plan.title(),
            fix=f"start {config.plan.world} processes, or find a plan for {world} with `meshwright plan`",
        )


def check_keeps(config: Config) -> None:
    """Raise if a run that writes no checkpoints is to be continued."""
    if not config.checkpoint.keep:
        why = "checkpoint.keep is 0: the run writes no checkpoints"
        raise MeshwrightError("MW-TRAIN-005", "the run cannot be continued", why=why, fix="--set checkpoint.keep=2")


def check_resume(folder: Path | None, from_scratch: bool) -> None:
    """Raise if there is nothing to continue in a folder, or if a new run is to begin from scratch: it does so anyway."""
    if folder is not None and not has_checkpoint(folder):  # a checkpoint that was converted has no plan.toml yet
        plan_of_run(folder)
    if from_scratch and folder is None:
        why = "A run that is not resumed begins at step 0"
        raise MeshwrightError("MW-CLI-005", "--from-scratch needs --resume", why=why, fix="leave out --from-scratch")


def plan_of_run(folder: Path) -> Path:
    """The plan file of a run that is to be continued; raises if there is no run in the folder."""
    if not is_run(folder):
        why = f"It has no {PLAN} and {PREDICTION} of a run"
        fix = "name a run folder; for a converted checkpoint also a run file: meshwright train RUN.toml --resume FOLDER"
        raise MeshwrightError("MW-TRAIN-005", f"'{folder}' is not a run folder", why=why, fix=fix)
    return folder / PLAN


def run_here(job: TrainingJob, listen: Listen | None, restarts: int) -> Training:
    """Train on ranks of this machine. The steps until an interruption or a failure are measured too."""
    reader = StepReader(job.folder, listen)
    job.folder.mkdir(parents=True, exist_ok=True)
    try:
        training: Training = local.run_restarting(
            TARGET,
            job.config.plan.world,
            job,
            folder=job.folder,
            device=job.device,
            backend=job.backend,
            append=job.resume,
            restarts=restarts,
            poll=reader.poll,
            restarting=lambda cause: reader.next_attempt(),
        )
    except BaseException as error:  # also Ctrl-C and SIGTERM
        with suppress(MeshwrightError, OSError):  # a folder that cannot be written does not hide the cause
            conclude_interrupted(job.folder, job.config, job.steps, job.device, job.watch, cause_of(error))
        raise
    return training


def config_for_ranks(config: Config, world: int, continues: bool) -> Config:
    """The configuration for the ranks that a launcher started. A run that continues on another number of ranks, because a node is gone
    or has come back, gets another plan for the same batch (`planner.resize`)."""
    if continues and world != config.plan.world:
        config = plan_for_world(config, world)
    check_world(config, world)
    return config


def cause_of(error: BaseException) -> str:
    """Return why a run ended, for run.json: "stopped" after Ctrl-C and SIGTERM."""
    return "stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else str(error) or type(error).__name__


class StepReader:
    """Calls `listen` with each finished step, as the run folder has it."""

    def __init__(self, folder: Path, listen: Listen | None) -> None:
        self.follower, self.listen = RunFollower(folder), listen
        self.steps = len(self.follower.new_steps())  # in all attempts; `listen` does not get those before a resume
        self.finished, self.tries = 0, 0  # steps of this attempt; attempts since the last one that finished a step

    def next_attempt(self) -> bool:
        """Whether another attempt is worth it: not if the first one, or two in a row, finished no step."""
        self.poll()
        self.tries = 0 if self.finished else self.tries + 1
        self.finished = 0
        return self.steps > 0 and self.tries < 2

    def poll(self) -> None:
        for row in self.follower.new_steps():
            self.steps += 1
            self.finished += 1
            if self.listen is not None:
                self.listen(StepRecord.of_row(row))
