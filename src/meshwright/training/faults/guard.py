"""The guard of one rank: puts the watchdog, the stop on a signal, the search for loss spikes and injected faults around its steps.

    guard = Guard(context, job, trainer, recorder)
    for record in guard.train(steps, saver): ...            # goes back to the last good checkpoint where a hook asks for it

Hooks, nearest to the step first: recorder of communication, watchdog, (evaluation), loss spikes, (checkpoints, rows of the run folder), stop on
a signal, injected faults. A spike is found before its step is saved or written.

**A preemption signal** (SIGTERM, SIGUSR1): all ranks finish the same step, save, and exit cleanly. The scheduler may signal only some
ranks, and at different moments. They must agree on the last step, without a collective in every step:

    before step s    a rank that was signalled writes the request "stop after step s" where all ranks can read it
    after step s     every rank reads it

This suffices: no rank can finish step s before the signalled rank has entered it, since every step sums its loss over all ranks. So when a
rank looks after step s, the request is there. A rank that sees it earlier waits for step s. Replicas of local SGD
meet only when they average, so there the request names the next step that averages.

The request is a key of the process group's store: a file system of a network may show a new file only seconds later.

A launcher also sends SIGTERM to end ranks whose peer has died. Such a rank is blocked in a collective and never reaches its next step: Python
runs no handler there. The kernel's part of the handler writes a byte to a socket at once; the watchdog reads it (`arrived`), and ends a rank
that makes no progress after a signal.

**Loss spikes.** After a loss far above the last ones, training goes back to the last good checkpoint.

    spike    loss > factor × median of the last `WINDOW` losses

Large models diverge this way without any NaN: a few batches push the weights somewhere from which the loss takes thousands of steps to recover,
if it does. The remedy of published runs is to restart from an earlier checkpoint and to skip the batches. A spike may also
come from a hardware fault, and then the same batches do no harm. The loss is the sum over all ranks, so all ranks see the spike in the
same step. Losses of replicas of local SGD differ: they agree when they average.

**Rollback** without a restart: after a spike, or a NaN with `optimizer.on_nan = "rollback"`.

    1st rollback at a step    restore, and repeat the same batches: a fault of the hardware does not come back
    2nd at the same step      restore, and leave out updates, since the batches are the cause: of the step with a NaN gradient; of all steps
                              from the checkpoint to a spike, since any of them may have caused it

All ranks see the same loss and norm, so they all raise `Rollback` in the same step, and all restore.
"""

import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from math import isfinite
from statistics import median
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import distributed

from meshwright.comm.communicator import group_store
from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint.load import resume
from meshwright.training.checkpoint.save import Saver
from meshwright.training.faults.heartbeat import HeartbeatFolder
from meshwright.training.faults.inject import Injector, read_faults
from meshwright.training.faults.watchdog import Watchdog
from meshwright.training.folder import RunFolder
from meshwright.training.hooks import Hook, StepRecord
from meshwright.training.job import TrainingJob
from meshwright.training.launch.rank import Failure, RankContext, write_failure
from meshwright.training.loop import Trainer
from meshwright.training.measure.record_comm import CommRecorder
from meshwright.training.optimizer.norm import Rollback

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
AGENT_S = 10.0  # for an agent of torchrun to notice that a node joins; it looks every few seconds at most


class StopRequest:
    """The step after which all ranks stop: a key of a torch.distributed store. The first request stays."""

    def __init__(self, store: Any, key: str = "stop-after-step") -> None:
        self.store, self.key = store, key

    def make(self, step: int) -> None:
        self.store.compare_set(self.key, "", str(step))

    def step(self) -> int | None:
        return int(self.store.get(self.key)) if self.store.check([self.key]) else None


class StopOnSignal(Hook):
    """Stops the training after a signal. The checkpoint's `finish` saves the last step, as at the end of any training."""

    def __init__(self, request: StopRequest, signals: tuple[signal.Signals, ...] = SIGNALS) -> None:
        self.request, self.signals = request, signals
        self.received: signal.Signals | None = None
        self.stop_step: int | None = None
        self.previous: dict[signal.Signals, Any] = {}
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)

    def start(self, trainer: Any) -> None:
        """Begin to receive signals; in a thread (Ray runs a rank in one) no signal can be received, and the process keeps its handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self.signals:
            self.previous.setdefault(number, signal.signal(number, self.receive))  # after a rollback it starts again
        signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)

    def arrived(self) -> bool:
        """Whether one of the signals arrived since the last call, also if the main thread is blocked; for another thread."""
        try:
            return any(number in self.signals for number in self.reader.recv(64))
        except BlockingIOError:
            return False

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

    def before_step(self, trainer: Any) -> None:
        if self.received is not None and self.stop_step is None:
            self.stop_step = next_common_step(trainer)
            self.request.make(self.stop_step)

    def after_step(self, trainer: Any, record: StepRecord) -> None:
        stop = self.request.step()
        if stop is not None and record.step >= stop:
            self.stop_step, trainer.stopped = stop, True

    def finish(self, trainer: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if self.previous:
            signal.set_wakeup_fd(-1)
        self.previous.clear()


def await_agent() -> NoReturn:
    """End a rank of torchrun that stopped because of a signal to another node.

    Its agent would take a normal exit as the end of the job, and leave. If a node joins, the agent ends this process a moment later, and
    restarts it. If a node leaves, the agent does not know of it: an exit code makes it restart this rank, with the nodes that remain."""
    time.sleep(AGENT_S)
    raise SystemExit(128 + signal.SIGTERM)


def next_common_step(trainer: Any) -> int:
    """The next step in which all ranks communicate: the coming one, or under local SGD the one that averages."""
    local = trainer.parallel.local
    return int(trainer.step) if local is None else int(trainer.step + local.every - 1 - local.since)


WINDOW = 64
LEAST = 8  # losses before the first comparison


class Spike(Rollback):
    """A rollback after which any step since the checkpoint may be the cause."""


class LossSpikes(Hook):
    """Raises `Spike` after a step whose loss is `factor` times the usual one. It runs before the checkpoint hook."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.worst = 0.0  # since the ranks last compared; only under local SGD does it last longer than a step

    def after_step(self, trainer: Any, record: StepRecord) -> None:
        usual = median(self.losses) if len(self.losses) >= LEAST else float("inf")
        if isfinite(record.loss):  # NaN and infinity: `optimizer.on_nan`
            self.losses.append(record.loss)
            self.worst = max(self.worst, record.loss / usual if usual > 0 else 0.0)
        local = trainer.parallel.local
        if local is not None and local.since:
            return
        worst, self.worst = self.worst, 0.0
        if local is not None:
            worst = largest_over_replicas(trainer, worst)
        if worst > self.factor:
            raise Spike(
                record.step, f"the loss rose to {worst:.3g} times its median of the last {len(self.losses)} steps"
            )

    def reset(self) -> None:
        """Forget the losses after a rollback."""
        self.losses.clear()


def largest_over_replicas(trainer: Any, value: float) -> float:
    """The largest value of all replicas of local SGD."""
    found = torch.tensor([value], dtype=torch.float64, device=trainer.parallel.mesh.device)
    if (group := trainer.parallel.mesh.group("replicate")) is not None:
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=group)
    return float(found)


Restore = Callable[[Any], int | None]  # fills a trainer with the last good checkpoint; its step, None if there is none


def train_with_rollback(
    trainer: Any, until: int, restore: Restore, note: Callable[[int, int, str], None], most: int
) -> Iterator[StepRecord]:
    """Train until step `until`. `note(step, resumed, text)` is called for each rollback; after `most` of them without
    progress the run stops with the cause."""
    rollbacks: Counter[int] = Counter()
    while True:
        try:
            yield from trainer.until(until)
            return
        except Rollback as cause:
            rollbacks = Counter({step: count for step, count in rollbacks.items() if step >= cause.step})
            rollbacks[cause.step] += 1
            if rollbacks.total() > max(most, 1):
                raise
            resumed = restore(trainer)
            if resumed is None:
                raise
            text = f"{cause.cause}: back to step {resumed}"
            if rollbacks[cause.step] > 1:
                first = resumed if isinstance(cause, Spike) else cause.step
                trainer.skip_steps.update(range(first, cause.step + 1))
                steps = f"step {first}" if first == cause.step else f"steps {first} to {cause.step}"
                text += f"; the updates of {steps} are left out"
            for hook in trainer.hooks:
                if isinstance(hook, LossSpikes):
                    hook.reset()
            note(cause.step, resumed, text)


class Guard:
    """Watches one attempt of a run on this rank. Made on all ranks together. `rows`: the run folder, on rank 0."""

    def __init__(
        self,
        context: RankContext,
        job: TrainingJob,
        trainer: Trainer,
        recorder: CommRecorder,
        rows: RunFolder | None = None,
    ) -> None:
        config, folder = job.config, job.folder
        self.context, self.folder, self.trainer, self.rows = context, folder, trainer, rows
        self.most = config.optimizer.most_skips
        identity = identify_run(context)
        request = StopRequest(group_store(distributed.group.WORLD), f"stop-{identity}")
        self.stop = StopOnSignal(request) if config.checkpoint.on_signal else None
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
        hooks = self.trainer.hooks
        hooks[1:1] = [hook for hook in (self.watchdog, self.spikes) if hook is not None]
        hooks += [hook for hook in (self.stop, self.injector) if hook is not None]

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


def identify_run(context: RankContext) -> str:
    """A name of this attempt that all ranks share; a collective of all ranks."""
    started = torch.tensor([time.time_ns() if context.rank == 0 else 0], device=context.device)
    if context.world > 1:
        distributed.all_reduce(started, distributed.ReduceOp.MAX)
    return f"{int(started):x}"
