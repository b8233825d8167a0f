"""One rank of a training run, from joining the others to its report. The same code runs on one machine and on many.

    join      the process group of all ranks (`join`): local ranks of `elastic`, or ranks of torchrun, Slurm, Open MPI
    plan      for this number of ranks
    apply     the plan on the model, and the trainer with its hooks
    resume    from the last good checkpoint of the run folder, if there is one
    loop      until the last step, or until a hook stops it
    measure   some further steps, traced and observed. No checkpoint contains them
    report    from every rank to rank 0, which compares the run with its prediction and writes the run folder

The timed steps run with a recorder of communication (`record_comm`), which costs microseconds. The steps after them are not
timed: traced ones give the timeline of actions and blocks, the observed one counts bytes sent and memory of tensors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait

import torch
from torch import distributed

from meshwright.describe.config import Config
from meshwright.describe.run_folder import rank_log
from meshwright.parallel.apply import apply
from meshwright.parallel.numerics.precision import DTYPES
from meshwright.training.data.samples import training_samples, validation_samples
from meshwright.training.deterministic import deterministic_kernels
from meshwright.training.evaluation import Evaluation
from meshwright.training.failure import failure_of, write_failure
from meshwright.training.folder import RunFolder
from meshwright.training.hooks import Hook
from meshwright.training.job import Attempt, Job
from meshwright.training.join import GROUP_TIMEOUT_S, Meeting, join
from meshwright.training.loop import Trainer
from meshwright.training.measurement import Training, conclude
from meshwright.training.metrics import Metrics
from meshwright.training.placement import placement
from meshwright.training.rank import RankContext, end_with_parent, prepare_local_rank, redirect_output
from meshwright.training.rank_report import rank_report
from meshwright.training.record_comm import CommRecorder
from meshwright.training.records import StepRecord
from meshwright.training.reports import gather_reports
from meshwright.training.start import initial_weights

AHEAD = 2  # steps whose batches are prepared in advance
Listen = Callable[[StepRecord], None]


def local_rank(attempt: Attempt, job: Job) -> Training | None:
    """A rank that `elastic` started on this machine. A failure is written to the run folder before the connections close."""
    place = placement(os.environ)
    assert place is not None, "the agent sets RANK and WORLD_SIZE"
    stream = redirect_output(str(job.folder / rank_log(place.rank)), append=attempt.number > 0 or job.resume)
    faulthandler.register(signal.SIGUSR2, file=stream, all_threads=True)
    prepare_local_rank()
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with_parent(lambda: wait([parent.sentinel]))
    torch.set_num_threads(1)
    try:
        context = join(place, job.device, job.backend, GROUP_TIMEOUT_S, Meeting(place))
        return train(context, job, attempt)
    except BaseException as error:  # also SystemExit: every rank that does not return has failed
        write_failure(job.folder, failure_of(place.rank, error))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def train(context: RankContext, job: Job, attempt: Attempt, listen: Listen | None = None) -> Training | None:
    """Train on this rank; rank 0 returns the result of the run. `listen` is called on rank 0 with every finished step."""
    config = job.config
    with deterministic_kernels(config.run.deterministic):
        trainer = make_trainer(context, config, job.seed)
        usage = Usage(job)
        with run_folder(context, job, attempt, trainer) as folder:
            with CommRecorder(trainer) as recorder:
                trainer.hooks += [*hooks_of(trainer, config, recorder), usage]
                if folder is not None:
                    trainer.hooks.append(StepRows(folder, listen))
                for _ in trainer.until(job.steps):
                    pass
            trainer.hooks.clear()
            reports = []
            if not trainer.stopped:
                reports = gather_reports(context, rank_report(context, trainer, job.steps, recorder, usage.cpu_s))
            training = None
            if folder is not None:
                training = conclude(config, folder, reports, job.steps, context.device, job.watch)
                folder.end_attempt("stopped" if trainer.stopped else "")
    trainer.loader.close()
    if distributed.is_initialized():
        distributed.barrier()  # no rank ends while another one still needs it
    return training


def make_trainer(context: RankContext, config: Config, seed: int) -> Trainer:
    parallel = apply(
        config.model,
        config.plan,
        config.workload,
        context.rank,
        device=context.device,
        dtype=DTYPES[config.plan.param_dtype],
        seed=seed,
        weights=initial_weights(config),
        order=config.plan.order or config.stack.order,
    )
    return Trainer(parallel, training_samples(config, seed), config.optimizer, ahead=AHEAD)


def hooks_of(trainer: Trainer, config: Config, recorder: CommRecorder) -> list[Hook]:
    """The hooks of every rank, the nearest to the step first."""
    hooks: list[Hook] = [Metrics(config, recorder)]
    if (validation := validation_samples(config)) is not None:
        hooks.append(Evaluation(trainer, validation, config.data.eval_every))
    return hooks


@contextlib.contextmanager
def run_folder(context: RankContext, job: Job, attempt: Attempt, trainer: Trainer) -> Iterator[RunFolder | None]:
    """The run folder, locked by rank 0 as long as it trains; None on the other ranks."""
    if context.rank:
        yield None
        return
    config, prediction = job.config, job.watch.prediction
    about = {"steps": job.steps, "seed": job.seed, "device": context.device.partition(":")[0], "backend": job.backend}
    make = RunFolder.reopen if attempt.number or job.resume else RunFolder.create
    folder = make(job.folder, config, prediction, **about)
    try:
        plan = config.plan.title()
        folder.begin_attempt(world=context.world, plan=plan, first_step=trainer.step, cause=attempt.cause)
        yield folder
    finally:
        folder.close()


class StepRows(Hook):
    """Rank 0 writes the row of every step."""

    def __init__(self, folder: RunFolder, listen: Listen | None) -> None:
        self.folder, self.listen = folder, listen

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self.folder.add(record)
        if self.listen is not None:
            self.listen(record)


class Usage(Hook):
    """Seconds that the threads of this process computed after the first step, and on rank 0 the load of its machine meanwhile."""

    def __init__(self, job: Job) -> None:
        self.watch, self.began, self.cpu_s = job.watch, None, 0.0

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if self.began is None:
            self.began = time.process_time()
            self.watch.begin()

    def finish(self, trainer: Trainer) -> None:
        if self.began is not None:
            self.cpu_s = time.process_time() - self.began
            self.watch.end()
