"""One rank of a training run, from joining the others to its report. The same code runs on one machine and on many.

    join      the process group of all ranks (`join`): local ranks of `launch.local`, or ranks of torchrun, Slurm, Open MPI
    plan      for this number of ranks
    apply     the plan on the model, and the trainer with its hooks
    resume    from the last good checkpoint of the run folder, if there is one
    loop      until the last step, or until a hook stops it
    measure   some further steps, traced and observed. No checkpoint contains them
    report    from every rank to rank 0, which compares the run with its prediction and writes the run folder

The timed steps run with a recorder of communication (`record_comm`), which costs microseconds. The steps after them are not
timed: traced ones give the timeline of actions and blocks, the observed one counts bytes sent and memory of tensors.

Deterministic mode: the same run file gives the same bits in every run on the same devices.

Batches, initial weights and dropout are functions of the seed and the step under every plan, and collectives add in a fixed order. What is
left are kernels that add with atomic operations, in an order that differs from run to run (the backward of an embedding on a GPU), and
libraries that choose a kernel by timing. `run.deterministic` makes torch use only kernels with a fixed order. On CPUs with one thread per
rank all kernels have one already.

Evaluation during training: a hook that adds the validation loss to the record of every n-th step.

The loss is the sum over the valid tokens of the validation samples divided by their global number, as in training, and the same
samples are evaluated every time. It runs forward only, through the plan of the training, between two steps: it changes no weight,
and the seconds of a step do not include it.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import distributed

from meshwright.describe.config import Config
from meshwright.describe.run_folder import CHECKPOINTS
from meshwright.errors import MeshwrightError
from meshwright.models.initialise import UnsetWeights
from meshwright.parallel.apply import apply
from meshwright.parallel.numerics.precision import DTYPES
from meshwright.training.checkpoint.folder import on_first, set_all_aside
from meshwright.training.checkpoint.load import none_intact, resume
from meshwright.training.checkpoint.save import Checkpoints, Saver, checkpoint_group
from meshwright.training.data.samples import Loader, ValidationSamples, training_samples, validation_samples
from meshwright.training.faults.guard import Guard, await_agent
from meshwright.training.folder import FULL, RunFolder, StepWriter, not_written, saved_before
from meshwright.training.hooks import Hook, StepRecord
from meshwright.training.job import TrainingJob
from meshwright.training.launch.rank import Attempt, RankContext
from meshwright.training.loggers import Logging
from meshwright.training.loop import Trainer
from meshwright.training.measure.measurement import Training, conclude
from meshwright.training.measure.profile import Profiler
from meshwright.training.measure.record_comm import CommRecorder
from meshwright.training.measure.reports import Metrics, gather_reports, rank_report
from meshwright.training.start import base_of, has_checkpoint, initial_weights
from meshwright.training.step_graph import StepGraph
from meshwright.units import Json

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS repeats its sums only with a workspace of fixed size


@contextmanager
def deterministic_kernels(on: bool) -> Iterator[None]:
    """Inside the `with` block torch uses only deterministic kernels. An operation that has none raises MW-OPT-005."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise MeshwrightError(
            "MW-OPT-005",
            "run.deterministic=true, and the model uses an operation without a deterministic kernel",
            why=str(error).split(". ")[0],
            fix="--set run.deterministic=false",
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        if before[2] is None:
            os.environ.pop(WORKSPACE, None)


class Evaluation(Hook):
    """Use as `trainer.hooks.insert(0, Evaluation(trainer, samples, every))`: before the hooks that report the record."""

    def __init__(self, trainer: Trainer, samples: ValidationSamples, every: int) -> None:
        self.trainer, self.samples, self.every = trainer, samples, every
        parallel = trainer.parallel
        self.loader = Loader(samples, parallel.mesh.device, trainer.dtype, parallel.position_ids)

    def after_step(self, trainer: Trainer, record: StepRecord) -> StepRecord:
        if (record.step + 1) % self.every:
            return record
        return replace(record, validation_loss=self.loss())

    def loss(self) -> float:
        """The mean loss over the valid tokens of all validation samples."""
        trainer, parallel = self.trainer, self.trainer.parallel
        loss = torch.zeros((), dtype=torch.float64, device=parallel.mesh.device)
        tokens = torch.zeros_like(loss)
        for i in range(self.samples.batches):
            batch = self.loader.batch(i, trainer.indices)
            tokens += batch.valid
            loss += parallel.evaluate(batch.inputs, batch.targets, batch.documents_BS)
        tokens = trainer.parallel.all_reduce(tokens, "dp_cp")
        loss = trainer.parallel.all_reduce(trainer.counted_loss(loss), "world")
        return (loss / tokens.clamp(min=1)).item()


AHEAD = 2  # steps whose batches are prepared in advance
Listen = Callable[[StepRecord], None]


def train(context: RankContext, attempt: Attempt, job: TrainingJob, listen: Listen | None = None) -> Training | None:
    """Train on this rank; rank 0 returns the result of the run. `listen` is called on rank 0 with every finished step."""
    config = job.config
    from_scratch = job.from_scratch and attempt.number == 0
    with deterministic_kernels(config.run.deterministic), run_folder(context, job, attempt) as folder:
        group = checkpoint_group() if job.saves else None
        continues = job.saves and bool(attempt.number or job.resume) and not from_scratch
        unset = continues and on_first(lambda: has_checkpoint(job.folder), group)
        trainer = make_trainer(context, job, unset)
        saver = make_saver(trainer, job, folder, group)
        if saver is not None and continues:
            resume_run(trainer, job, attempt, saver, folder)
        elif from_scratch:
            on_first(lambda: set_all_aside(job.folder / CHECKPOINTS), group)
            if folder is not None:
                folder.begin_from_scratch()
        if folder is not None:
            title = config.plan.title()
            cause, at = attempt.cause, attempt.failed_at
            folder.begin_attempt(world=context.world, plan=title, first_step=trainer.step, cause=cause, failed_at=at)
            done = trainer.parallel.compilation
            folder.note_compilation(done.mode, done.notes, trainer.step)
            if job.watch.uncalibrated:
                folder.event("calibration", trainer.step, job.watch.uncalibrated)
        usage = Usage(job)
        with CommRecorder(trainer) as recorder:
            trainer.hooks += [*hooks_of(trainer, job, recorder, folder), usage]
            if folder is not None:
                trainer.hooks += writers_of(trainer, config, folder, listen)
            if saver is not None:
                trainer.hooks.append(Checkpoints(saver, config.checkpoint.every))
            guard = Guard(context, job, trainer, recorder, folder)
            with closed_loggers(trainer.hooks):
                for _ in guard.train(job.steps, saver):
                    pass
        trainer.hooks.clear()
        trainer.graph = None  # reports trace modules, which a graph does not call
        unsaved, last = saver.finish() if saver is not None else None, trainer.step
        reports = []
        if not trainer.stopped:
            reports = gather_reports(context, rank_report(context, trainer, job.steps, recorder, usage.cpu_s))
        training = None
        if folder is not None:
            training = conclude(config, folder, reports, job.steps, context.device, job.watch)
            folder.end_attempt("stopped" if trainer.stopped else str(unsaved or ""))
    trainer.loader.close()
    if distributed.is_initialized():
        distributed.barrier()  # no rank ends while another one still needs it
    if folder is not None:
        check_written(folder, unsaved, last)
    if trainer.stopped and job.rejoins and not guard.signalled:
        await_agent()
    return training


def make_trainer(context: RankContext, job: TrainingJob, unset: bool = False) -> Trainer:
    """The model under the plan with the first weights of the run; `unset`: a checkpoint will replace them, so none are drawn."""
    config, seed = job.config, job.seed
    parallel = apply(
        config.model,
        config.plan,
        config.workload,
        context.rank,
        device=context.device,
        dtype=DTYPES[config.plan.param_dtype],
        seed=seed,
        weights=UnsetWeights() if unset and not config.adapter.on else initial_weights(config, seed),
        order=config.plan.order or config.stack.order,
        compile=config.run.compile,
    )
    parallel.base = base_of(config, seed)
    graph = StepGraph(parallel) if config.run.graphs == "step" else None
    return Trainer(parallel, training_samples(config, seed), config.optimizer, ahead=AHEAD, graph=graph)


def hooks_of(trainer: Trainer, job: TrainingJob, recorder: CommRecorder, folder: RunFolder | None) -> list[Hook]:
    """The hooks of every rank, the nearest to the step first."""
    config = job.config
    hooks: list[Hook] = []
    if config.run.profile_steps:
        hooks.append(Profiler(job.folder, config.run.profile_steps, job.steps, folder))
    hooks.append(Metrics(config, recorder))
    if (validation := validation_samples(config)) is not None:
        hooks.append(Evaluation(trainer, validation, config.data.eval_every))
    return hooks


def writers_of(trainer: Trainer, config: Config, folder: RunFolder, listen: Listen | None) -> list[Hook]:
    """The hooks of rank 0 that write the records of steps, which all other hooks have completed."""
    hooks: list[Hook] = [StepWriter(folder, listen)]
    if config.run.loggers:
        hooks.append(Logging(config.run.loggers, config.run.log_every, folder, config, trainer.step))
    return hooks


@contextmanager
def closed_loggers(hooks: list[Hook]) -> Iterator[None]:
    """Close the loggers also when a step raises: their packages write what they hold back."""
    try:
        yield
    finally:
        for hook in hooks:
            if isinstance(hook, Logging):
                hook.close()


@contextlib.contextmanager
def run_folder(context: RankContext, job: TrainingJob, attempt: Attempt) -> Iterator[RunFolder | None]:
    """The run folder, locked by rank 0 as long as it trains; None on the other ranks."""
    if context.rank:
        yield None
        return
    about = {"steps": job.steps, "seed": job.seed, "device": context.device.partition(":")[0], "backend": job.backend}
    about["agents"] = list(job.agents)
    make = RunFolder.reopen if attempt.number or job.resume else RunFolder.create
    folder = make(job.folder, job.config, job.watch.prediction, job.aim, **about)
    try:
        yield folder
    finally:
        folder.close()
        with contextlib.suppress(OSError):  # of a local rank, stderr is a file on the same disk
            for name in folder.lost:
                print(f"The disk is full: {name} was not written", file=sys.stderr, flush=True)


def check_written(folder: RunFolder, unsaved: MeshwrightError | None, step: int) -> None:
    """Raise at the end of a training if the last checkpoint, rows or results could not be written."""
    reason = unsaved.why if unsaved is not None else ""
    full = any(os.strerror(number) in reason for number in FULL)
    if unsaved is not None and not full and not folder.lost:
        raise unsaved
    if unsaved is not None or folder.lost:
        lost = [f"the checkpoint of step {step}"] if unsaved is not None else []
        raise not_written(folder.path, [*lost, *folder.lost], reason)


def make_saver(
    trainer: Trainer, job: TrainingJob, folder: RunFolder | None, group: distributed.ProcessGroup | None
) -> Saver | None:
    """Return the saver of a run; None if its folder is temporary. Rank 0 writes events about it."""
    if not job.saves:
        return None
    settings, root = job.config.checkpoint, job.folder / CHECKPOINTS
    options: Json = {"keep": settings.keep, "asynchronous": settings.asynchronous}
    if folder is not None:
        options |= {"report": folder.event, "sync": folder.sync}
    return Saver(trainer, root, group, data=job.config.data.as_dict(), **options)


def resume_run(trainer: Trainer, job: TrainingJob, attempt: Attempt, saver: Saver, folder: RunFolder | None) -> None:
    """Continue from the last good checkpoint of the run folder. A run that has not saved yet begins at step 0, with a message; one that has
    saved and whose checkpoints are gone or unusable does not."""

    def notify(text: str) -> None:
        if folder is not None:
            folder.event("resumed", trainer.step, text)

    if resume(trainer, job.folder, saver.group, notify) is None:
        if on_first(lambda: saved_before(job.folder), saver.group):
            raise none_intact(job.folder / CHECKPOINTS, {"every checkpoint that the run has saved": "missing"})
        notify("No checkpoint had been completed: the run begins again at step 0")
    if attempt.number == 0 and trainer.step >= job.steps:
        raise MeshwrightError(
            "MW-TRAIN-004",
            f"the run in '{job.folder}' has done {trainer.step} steps, and --steps is {job.steps}",
            why="--steps is the number of steps in all, those before the resume included",
            fix=f"--steps {2 * trainer.step}",
        )


class Usage(Hook):
    """Seconds that the threads of this process computed after the first step, and on rank 0 the load of its machine meanwhile."""

    def __init__(self, job: TrainingJob) -> None:
        self.watch, self.cpu_s = job.watch, 0.0
        self.began: float | None = None

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if self.began is None:
            self.began = time.process_time()
            self.watch.begin()

    def finish(self, trainer: Trainer) -> None:
        if self.began is not None:
            self.cpu_s = time.process_time() - self.began
            self.watch.end()
