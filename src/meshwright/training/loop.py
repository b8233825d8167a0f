"""The training step, top to bottom, the same for one device and for every plan.

    1  batch      this rank's share of the global batch
    2  count      valid tokens of the whole batch: the loss is a sum divided by their global number, never a mean of means
    3  run        forward and backward of every micro-batch, through the pipeline if there is one
    4  finish     sum gradients over the data-parallel ranks, and over every other axis that holds partial sums
    5  norm       the global gradient norm and loss, in one small all-reduce
    6  update     clip, step, zero; not if a gradient is NaN or infinite (`optimizer.norm`)

The host waits for the device once in a step: for the norm and the loss, which it reports and by which it decides. An optimizer that sees on the
device whether the norm is finite (`optimizer.make.FusedAdamW`) is launched before that, so that the device updates while the host ends this step
and begins the next one.

Everything else is a hook (`hooks`): metrics, evaluation, checkpoints, profiling, faults, proofs.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

import torch
from torch import Tensor

from meshwright.describe.optimizer import Optimizer
from meshwright.parallel.apply import Parallel
from meshwright.parallel.numerics.precision import LossScale, unscale
from meshwright.parallel.on_host import OnHost
from meshwright.training.data.samples import Loader, Samples
from meshwright.training.hooks import Hook, StepRecord
from meshwright.training.optimizer.average import WeightAverage
from meshwright.training.optimizer.make import FusedAdamW, make_optimizer
from meshwright.training.optimizer.norm import FinitePolicy, clip, counted_squares
from meshwright.training.optimizer.schedule import base_rate, set_learning_rate, share_at
from meshwright.training.step_graph import StepGraph


@dataclass
class Trainer:
    parallel: Parallel
    samples: Samples
    settings: Optimizer = field(default_factory=Optimizer)
    ahead: int = 0  # steps whose batches a thread prepares in advance
    hooks: list[Hook] = field(default_factory=list)
    step: int = 0  # the next one
    skip_steps: set[int] = field(default_factory=set)  # steps without an update: those that a rollback leaves out
    stopped: bool = False  # a hook ends the training after the current step
    graph: StepGraph | None = None  # that replays forward and backward
    unfinished: bool = False  # a step began and has not ended: true at the next step if this one raised

    def __post_init__(self) -> None:
        self.masters = self.parallel.masters
        self.optimizer = make_optimizer(self.parallel, self.settings)
        self.average = WeightAverage(self.parallel, self.settings.ema) if self.settings.ema else None
        self.policy = FinitePolicy(self.settings)
        mesh, batch = self.parallel.mesh, self.parallel.workload.batch
        share = batch // mesh.size("dp")
        self.indices: Sequence[int] = range(mesh.index("dp") * share, (mesh.index("dp") + 1) * share)
        self.dtype = self.parallel.dtype
        self.scale = LossScale.of(self.dtype)
        # The optimizer, if it sees on the device whether to update
        self.guarded = self.optimizer if isinstance(self.optimizer, FusedAdamW) and not self.scale.dynamic else None
        if self.guarded is not None:
            self.guarded.guarded = True
        self.loader = Loader(self.samples, mesh.device, self.dtype, self.parallel.position_ids, self.ahead)

    def train(self, steps: int) -> list[StepRecord]:
        """Train further steps and return their records."""
        return list(self.until(self.step + steps))

    def until(self, step: int) -> Iterator[StepRecord]:
        """Train until step `step` would be the next one, or until a hook stops the training."""
        for hook in self.hooks:
            hook.start(self)
        while self.step < step and not self.stopped:
            yield self.train_step()
        for hook in self.hooks:
            hook.finish(self)

    def train_step(self) -> StepRecord:
        for hook in reversed(self.hooks):
            hook.before_step(self)
        started = time.perf_counter()
        parallel = self.parallel

        batch = self.loader.batch(self.step, self.indices)
        if self.unfinished:
            parallel.abort_step()
        self.unfinished = True

        tokens = parallel.all_reduce(batch.valid.to(torch.float64), "dp_cp")
        scale = self.scale.value
        parallel.set_tokens(tokens, scale)

        parallel.begin_step(self.step, self.indices, batch.documents_BS)
        loss = (self.graph or parallel.forward_backward)(batch.inputs, batch.targets)

        parallel.finish_gradients()
        for hook in self.hooks:
            hook.after_gradients(self)

        partial = torch.stack((counted_squares(parallel.pieces), self.counted_loss(loss)))
        squares, loss = parallel.all_reduce(partial, "world")
        norm = squares.sqrt() / scale
        numbers, loads = OnHost(torch.stack((norm, loss / scale, tokens))), parallel.expert_loads()

        rate, wanted = self.learning_rate, self.step not in self.skip_steps
        guarded = self.guarded if wanted else None
        if guarded is not None:
            self.update(norm, scale, rate)
        norm_value, loss_value, count = numbers.values().tolist()
        updated = self.policy.accept(isfinite(norm_value), self.step, self.scale) and wanted
        if guarded is None and updated:
            self.update(norm, scale, rate)
        elif guarded is not None and not updated:
            guarded.take_back()
        if parallel.local is not None:
            parallel.local.after_update(tokens * updated)
        router = parallel.balance_experts(loads, updated)
        if updated and self.average is not None:
            self.average.update()
        parallel.zero_gradients()
        self.unfinished = False

        seconds = time.perf_counter() - started
        record = StepRecord(self.step, loss_value, norm_value, int(count), seconds, router, updated, learning_rate=rate)
        self.step += 1
        for hook in self.hooks:
            record = hook.after_step(self, record) or record
        if self.policy.error is not None:
            raise self.policy.error
        return record

    def update(self, norm: Tensor, scale: float, rate: float) -> None:
        """Clip and step."""
        unscale(self.parallel.pieces, scale)
        clip(self.parallel.pieces, norm, self.settings.clip if self.parallel.workload.clip else inf, self.optimizer)
        set_learning_rate(self.optimizer, rate)
        with self.parallel.updating():
            self.optimizer.step()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the current step, before the factors of parameter groups."""
        return base_rate(self.settings, self.parallel.workload) * share_at(self.settings, self.step)

    def counted_loss(self, loss: Tensor) -> Tensor:
        """Return the loss on the first rank of each tp group, zero on the others, which compute the same loss."""
        return loss if self.parallel.mesh.index("tp") == 0 else torch.zeros_like(loss)
