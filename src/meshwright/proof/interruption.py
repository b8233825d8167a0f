"""A training that is evaluated, saved and resumed, on one rank of a proof: through the evaluation, the checkpoints and the token files of `train`.

    evaluate   every few steps, before parameters are recorded: an evaluation that moves a weight is seen in them
    save       once, while the training goes on, as `train` saves
    resume     a second trainer, whose weights are NaN and whose random generators were moved on, goes on from the save

One device does not interrupt its training. Its validation losses come from plain formulas (`oracle.network`).

What a training knows between two steps, `state_of_training`, is recorded bit by bit when it is saved, after the resume, and after the last step:
a resume on the same layout restores every bit.
"""

import hashlib
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.describe.run_folder import CHECKPOINTS
from meshwright.errors import MeshwrightError
from meshwright.models.loss import IGNORED
from meshwright.parallel.pieces import local_tensor
from meshwright.parallel.recompute import recompute
from meshwright.proof.oracle.network import Network, missing
from meshwright.proof.records import Job, Phases, Trace
from meshwright.training.checkpoint.folder import step_name
from meshwright.training.checkpoint.load import resume
from meshwright.training.checkpoint.save import Checkpoints, Saver, checkpoint_group
from meshwright.training.checkpoint.state import compression_tensors
from meshwright.training.data.samples import RandomSamples, Samples, training_samples, validation_samples
from meshwright.training.hooks import Hook, StepRecord
from meshwright.training.loop import Trainer
from meshwright.training.worker import Evaluation

Reads = dict[tuple[str, int, int], np.ndarray]  # by part, step and index


class RecordedSamples:
    """Samples of token files, recorded as they are read; tokens are taken modulo the vocabulary of the small model."""

    def __init__(self, samples: Any, part: str, vocabulary: int, reads: Reads) -> None:
        self.samples, self.part, self.vocabulary, self.reads = samples, part, vocabulary, reads
        self.batches = getattr(samples, "batches", 0)

    def sample(self, step: int, index: int) -> tuple[np.ndarray, ...]:
        inputs, targets, *documents = self.samples.sample(step, index)
        self.reads[self.part, step, index] = np.stack([inputs, targets, *documents])
        reduced = np.where(targets == IGNORED, IGNORED, targets % self.vocabulary)
        return inputs % self.vocabulary, reduced, *documents


def samples_of(job: Job, reads: Reads) -> Samples:
    """The training samples of a job; those of token files are recorded in `reads`."""
    if job.phases is None or not job.phases.trains_on_data:
        return RandomSamples(job.model, job.workload.seq, job.seed, job.documents)
    return RecordedSamples(training_samples(job.phases.config, job.seed), "training", job.model.vocab, reads)


def interrupt(trainer: Trainer, trace: Trace, job: Job, phases: Phases) -> None:
    """Evaluate and save the following steps; begin at the checkpoint of another run, `phases.start`, if it is set."""
    evaluate(trainer, trace, job, phases)
    if phases.start is not None:
        checkpoint = phases.start / CHECKPOINTS / step_name(phases.save_after)
        if resume(trainer, checkpoint, checkpoint_group()) is None:
            raise MeshwrightError(
                "MW-CKPT-001", f"'{checkpoint}' was not found", why="The save before the resume wrote none"
            )
        trace.first_step, trace.state = trainer.step, state_of_training(trainer)
    elif phases.save_after:
        settings, group = phases.config.checkpoint, checkpoint_group()
        saver = Saver(trainer, phases.folder / CHECKPOINTS, group, asynchronous=settings.asynchronous)
        trainer.hooks += [StateRecorder(trace, phases.save_after), SavesOnce(saver, phases.save_after)]
    trace.redrawn = job.plan.recompute == "none" or recompute_redraws()


def train_resumed(trainer: Trainer, trace: Trace, job: Job, phases: Phases) -> None:
    """Train the steps after the save with a trainer that resumes from it; its model has no weights yet. It has evaluated before, as one
    that goes back to a checkpoint without a restart: weights that ZeRO-3 gathered for an evaluation must not survive."""
    if (
        phases.evaluate_every
        and trainer.parallel.mesh.sharded
        and not (job.model.experts or job.workload.precision == "fp8")
    ):
        samples: Any = RecordedSamples(validation_samples(phases.config), "", job.model.vocab, {})
        # It has trained: dropout that an evaluation leaves on has its samples
        trainer.parallel.begin_step(0, trainer.indices)
        Evaluation(trainer, samples, 1).loss()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(job.seed + 1)
    interrupt(trainer, trace, job, replace(phases, start=phases.folder))
    list(trainer.until(job.steps))
    trace.end_state = state_of_training(trainer)


class SavesOnce(Checkpoints):
    """One save of `train`, after step `every`, while the training goes on."""

    def after_step(self, trainer: Any, record: StepRecord) -> StepRecord | None:
        return super().after_step(trainer, record) if trainer.step == self.every else None

    def finish(self, trainer: Any) -> None:
        if error := self.saver.finish():
            raise error


class StateRecorder(Hook):
    """Records the state of a training at the moment of its save."""

    def __init__(self, trace: Trace, step: int) -> None:
        self.trace, self.step = trace, step

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if trainer.step == self.step:
            self.trace.state = state_of_training(trainer)

    def finish(self, trainer: Trainer) -> None:
        self.trace.end_state = state_of_training(trainer)


def state_of_training(trainer: Trainer) -> dict[str, Any]:
    """Numbers, and a hash of each tensor: weights, every state of the optimizer, moving averages, residuals of compression, random generators."""
    parallel, scale = trainer.parallel, trainer.scale
    out: dict[str, Any] = {"step": trainer.step, "loss scale": [scale.value, scale.good_steps]}
    if parallel.local is not None:
        out["local SGD"] = [parallel.local.since, float(parallel.local.tokens)]
    averages = iter(trainer.average.values if trainer.average is not None else [])
    for i, (piece, updated) in enumerate(zip(parallel.pieces, parallel.updated, strict=True)):
        average = None if piece.frozen else next(averages, None)
        states = dict(trainer.optimizer.state.get(updated.parameter, {}))
        tensors = {"weight": piece.local, "master": updated.local, "average": average, **states}
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                local = local_tensor(value)
                out[f"{name} of {piece.name} ({i})"] = digest(local) if local.ndim else float(local)
    for name, buffer, _ in parallel.buffers():
        out[f"buffer {name}"] = digest(buffer)
    out |= {name: digest(tensor) for name, tensor in compression_tensors(trainer).items()}
    generators = torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state(legacy=True)
    return out | {"random generators": hashlib.sha256(repr(generators).encode()).hexdigest()[:16]}


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()[:16]


# Evaluation


def evaluate(trainer: Trainer, trace: Trace, job: Job, phases: Phases) -> None:
    """Record the validation losses of the following steps: on ranks those of `train`, on one device those of plain formulas."""
    if not phases.evaluate_every:
        return
    samples: Any = validation_samples(phases.config)
    samples = RecordedSamples(samples, "validation", job.model.vocab, trace.reads)
    if job.reference:
        if not missing(job.model):
            trainer.hooks.append(PlainEvaluation(trace, job, samples, phases.evaluate_every))
    else:
        trainer.hooks.insert(0, Evaluation(trainer, samples, phases.evaluate_every))
        trainer.hooks.append(EvaluationRecorder(trace))


class EvaluationRecorder(Hook):
    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if record.validation_loss is not None:
            self.trace.evaluations[record.step + 1] = record.validation_loss


class PlainEvaluation(Hook):
    """−Σ log p(target) over the valid targets of all validation samples, divided by their number, without dropout."""

    def __init__(self, trace: Trace, job: Job, samples: RecordedSamples, every: int) -> None:
        self.trace, self.job, self.samples, self.every = trace, job, samples, every
        adapter = job.model.adapter.but(dropout=0.0)
        self.model = job.model.but(dropout_rate=0.0, attention_dropout=0.0, embedding_dropout=None, adapter=adapter)

    @torch.no_grad()
    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if (record.step + 1) % self.every:
            return
        weights = {piece.name: piece.numbers.detach().cpu().double() for piece in trainer.parallel.pieces}
        total, valid, size = 0.0, 0, self.job.plan.microbatch
        order = list(trainer.indices)
        for batch in range(self.samples.batches):
            for start in range(0, len(order), size):
                indices = order[start : start + size]
                rows = [self.samples.sample(batch, i) for i in indices]
                inputs, targets, *documents = (
                    torch.from_numpy(np.stack(side)).long() for side in zip(*rows, strict=True)
                )
                network = Network(self.model, weights, self.job.seed, 0, indices, documents[0] if documents else None)
                total += float(network.loss(inputs, targets))
                valid += int((targets != IGNORED).sum())
        self.trace.evaluations[record.step + 1] = total / max(valid, 1)


# Recompute


class Squares(nn.Module):
    """Dropout of squares: its derivative is 2x where an element was kept, scaled as that element was."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * x, 0.5)


def recompute_redraws() -> bool:
    """Whether a recomputed forward draws the numbers of the original, and leaves the random generator as it was."""
    (module,) = recompute([Squares()])
    x = torch.ones(64, dtype=torch.float64, requires_grad=True)
    with torch.random.fork_rng(devices=[]):
        y = module(x)
        torch.rand(7)
        before = torch.get_rng_state()
        (y * y).sum().backward()
        after = torch.get_rng_state()
    assert x.grad is not None
    return torch.equal(x.grad, 4 * (y * y).detach()) and torch.equal(before, after)
