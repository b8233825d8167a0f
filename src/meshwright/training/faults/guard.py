"""The guard of one rank: puts the watchdog, the stop on a signal, the search for loss spikes and injected faults around its steps.

    guard = Guard(context, job, trainer, recorder)
    for record in guard.train(steps, saver): ...            # goes back to the last good checkpoint where a hook asks for it

Hooks, nearest to the step first: recorder of communication, watchdog, (evaluation), loss spikes, (checkpoints, rows of the run folder), stop on
a signal, injected faults. A spike is found before its step is saved or written.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator

import torch
from torch import distributed

from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint.background import Saver
from meshwright.training.checkpoint.resume import resume
from meshwright.training.faults.heartbeat import HeartbeatFolder, host_name
from meshwright.training.faults.inject import Injector, read_faults
from meshwright.training.faults.preemption import StopFile, StopKey, StopOnSignal, StopRequests, default_store
from meshwright.training.faults.rollback import train_with_rollback
from meshwright.training.faults.spike import LossSpikes
from meshwright.training.faults.watchdog import Watchdog
from meshwright.training.folder import RunFolder
from meshwright.training.hooks import Hook
from meshwright.training.job import Job
from meshwright.training.launch.failure import Failure, write_failure
from meshwright.training.launch.rank import RankContext
from meshwright.training.loop import Trainer
from meshwright.training.measure.record_comm import CommRecorder
from meshwright.training.records import StepRecord


class Guard:
    """Watches one attempt of a run on this rank. Made on all ranks together. `rows`: the run folder, on rank 0."""

    def __init__(
        self,
        context: RankContext,
        job: Job,
        trainer: Trainer,
        recorder: CommRecorder,
        rows: RunFolder | None = None,
    ) -> None:
        config, folder = job.config, job.folder
        self.context, self.folder, self.trainer, self.rows = context, folder, trainer, rows
        self.most = config.optimizer.most_skips
        identity, one_host = identify_run(context)
        self.stop_path = folder / f".stop-{identity}"
        requests: StopRequests = StopFile(self.stop_path) if one_host else StopKey(default_store(), f"stop-{identity}")
        self.stop = StopOnSignal(requests) if config.checkpoint.on_signal else None
        self.watchdog = Watchdog(
            context.rank,
            context.world,
            HeartbeatFolder(folder, identity),
            recorder,
            stage=trainer.parallel.mesh.coordinates["pp"],
            hang_s=config.run.hang_s,
            report=self.report_hang,
            note=self.note,
            signalled=self.stop.arrived if self.stop is not None else lambda: False,
            leave=self.leave,
        )
        self.spikes = LossSpikes(config.run.spike) if config.run.spike else None
        self.injector: Injector | None = None
        if job.faults:
            self.injector = Injector(read_faults(folder / job.faults), context.rank, folder)

    @property
    def signalled(self) -> bool:
        """Whether this process received the signal that ended the training; otherwise another rank did."""
        return self.stop is not None and self.stop.received is not None

    def attach(self) -> None:
        """Add the hooks to the trainer, whose first hook is the recorder."""
        near: list[Hook | None] = [self.watchdog, self.spikes]
        far: list[Hook | None] = [self.stop, self.injector]
        hooks = self.trainer.hooks
        hooks[1:1] = [hook for hook in near if hook is not None]
        hooks += [hook for hook in far if hook is not None]

    def train(self, until: int, saver: Saver | None) -> Iterator[StepRecord]:
        """Train until step `until` would be the next, or until a signal; after a rollback, from the last good checkpoint of `saver`."""

        def restore(trainer: Trainer) -> int | None:
            if saver is None:
                return None
            saver.finish()
            found = resume(trainer, saver.root, saver.group, lambda text: self.note("resumed", text))
            return found.manifest.step if found is not None else None

        self.attach()
        try:
            yield from train_with_rollback(self.trainer, until, restore, self.rolled_back, self.most)
        finally:
            self.watchdog.stop()
            if self.context.rank == 0:
                self.stop_path.unlink(missing_ok=True)
        if self.trainer.stopped:
            self.note("signal", f"stopped after step {self.trainer.step - 1} by a signal")

    # Reports

    def note(self, kind: str, text: str) -> None:
        if self.rows is not None:
            self.rows.event(kind, self.watchdog.step, text)

    def rolled_back(self, step: int, resumed: int, text: str) -> None:
        """Note a rollback as the end of an attempt and the begin of the next one, without a restart of the processes."""
        if self.rows is not None:
            self.rows.event("rollback", step, text)
            plan, world = self.trainer.parallel.plan.title(), self.context.world
            self.rows.begin_attempt(world=world, plan=plan, first_step=resumed, cause=text)

    def report_hang(self, error: MeshwrightError, rank: int) -> None:
        """Write the root cause under the rank that hangs: it cannot do so."""
        fields = {**error.as_dict(), "exit_code": error.exit_code}
        write_failure(self.folder, Failure(rank, "hung", str(error), time.time(), fields))

    def leave(self, code: int) -> None:
        """End this process because another rank hangs, or the launcher asked for it."""
        own = self.folder / f"rank-{self.context.rank}.failure.json"
        if not own.exists():
            text = "ended because another rank does not continue"
            write_failure(self.folder, Failure(self.context.rank, "ended", text, time.time()))
        os._exit(code)


def identify_run(context: RankContext) -> tuple[str, bool]:
    """A name of this attempt that all ranks share, and whether all ranks are on one host; a collective of all ranks."""
    here = zlib.crc32(host_name().encode())
    own = torch.tensor([time.time_ns() if context.rank == 0 else 0, here, -here], device=context.device)
    if context.world > 1:
        distributed.all_reduce(own, distributed.ReduceOp.MAX)
    identity, highest, lowest = own.tolist()
    return f"{identity:x}", highest == -lowest
