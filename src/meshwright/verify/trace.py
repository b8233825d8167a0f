"""What one rank records while it trains the proof's small model: every loss, norm, gradient and parameter of every
step.

It runs `train`'s own step: nothing here trains. Gradients are taken complete and unclipped, parameters after the
update. After the recorded steps one more is watched by an `Observer`, which counts collectives and memory; watching
slows it, not changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.parallel.apply import apply
from meshwright.train.data import RandomSamples
from meshwright.train.loop import StepRecord, Trainer
from meshwright.train.rank import RankContext, resolve
from meshwright.verify.observe import Observed, Observer

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True)
class Job:
    """What to train, and how often. `prepare` names a function each rank calls first: a place to inject a fault."""

    model: Model
    plan: Plan
    workload: Workload
    order: tuple[str, ...] = ("tp", "cp", "pp", "dp")
    steps: int = 5
    seed: int = 0
    dtypes: tuple[str, ...] = ("fp64", "fp32")
    watch: bool = False
    prepare: str = ""


@dataclass
class PieceTrace:
    """One piece on one rank: where it starts in the full tensor, its gradient and its value after each step."""

    name: str
    start: tuple[int, ...]
    gradients: list[np.ndarray] = field(default_factory=list)
    parameters: list[np.ndarray] = field(default_factory=list)


@dataclass
class Trace:
    rank: int
    dtype: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    pieces: list[PieceTrace] = field(default_factory=list)
    observed: Observed | None = None


def record(context: RankContext, job: Job) -> dict[str, Trace]:
    """Run on every rank: one trace a dtype."""
    if job.prepare:
        resolve(job.prepare)()
    return {dtype: record_one(context, job, dtype) for dtype in job.dtypes}


def record_one(context: RankContext, job: Job, dtype: str) -> Trace:
    parallel = apply(job.model, job.plan, job.workload, context.rank, device=context.device, dtype=DTYPES[dtype],
                     seed=job.seed, scatter=True, order=job.order)  # fmt: skip
    trainer = Trainer(parallel, RandomSamples(job.model, job.workload.seq, job.seed))
    trace = Trace(context.rank, dtype, pieces=[PieceTrace(p.name, p.start) for p in parallel.pieces])

    def take_gradients(step: int) -> None:
        for piece, kept in zip(parallel.pieces, trace.pieces, strict=True):
            kept.gradients.append(as_array(piece.gradient))

    def take_parameters(step: StepRecord) -> None:
        trace.losses.append(step.loss)
        trace.norms.append(step.gradient_norm)
        for piece, kept in zip(parallel.pieces, trace.pieces, strict=True):
            kept.parameters.append(as_array(piece.local))

    trainer.after_gradients.append(take_gradients)
    trainer.after_step.append(take_parameters)
    trainer.train(job.steps)
    if job.watch and dtype == job.dtypes[-1]:
        trainer.after_gradients.clear()
        trainer.after_step.clear()
        with Observer(trainer) as observer:
            trainer.train_step()
        trace.observed = observer.observed()
    return trace


def as_array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()
