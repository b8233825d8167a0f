"""A training on one rank: apply the plan to the model, run the loop, report each step; then trace and observe further steps.

The timed steps run with a recorder of communication (`record_comm`), which costs microseconds. The steps
after them are not timed: traced ones give the timeline of actions and blocks, the observed one counts bytes sent and memory of tensors.
"""

from __future__ import annotations

import resource
import time
from dataclasses import asdict

import torch

from meshwright.cost.step import TRAFFIC_AXIS
from meshwright.describe.config import Config
from meshwright.lower.op import sent
from meshwright.parallel.apply import apply
from meshwright.parallel.expert.balance import kept_copies
from meshwright.parallel.numerics.precision import DTYPES
from meshwright.training.data.samples import training_samples, validation_samples
from meshwright.training.deterministic import deterministic_kernels
from meshwright.training.evaluation import Evaluation
from meshwright.training.hooks import Hook
from meshwright.training.loop import Trainer
from meshwright.training.lowered_names import AXES
from meshwright.training.machine import peak_resident_bytes
from meshwright.training.observe import Observer
from meshwright.training.rank import RankContext
from meshwright.training.record_comm import CommRecorder
from meshwright.training.records import RankReport, StepRecord
from meshwright.training.start import initial_weights
from meshwright.training.trace_step import trace_steps

PREDICTED_AXIS = {**AXES, **TRAFFIC_AXIS}  # observed axis → axis under which its bytes are predicted
AHEAD = 2  # steps whose batches are prepared in advance


def work(context: RankContext, config: Config, steps: int, seed: int) -> RankReport:
    with deterministic_kernels(config.run.deterministic):
        return train_and_report(context, config, steps, seed)


def train_and_report(context: RankContext, config: Config, steps: int, seed: int) -> RankReport:
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
    trainer = Trainer(parallel, training_samples(config, seed), config.optimizer, ahead=AHEAD)
    if (validation := validation_samples(config)) is not None:
        trainer.hooks.append(Evaluation(trainer, validation, config.data.eval_every))

    trainer.hooks.append(StepReport(context))
    with CommRecorder(trainer) as recorder:
        trainer.train(1)
        cpu = time.process_time()
        trainer.train(steps - 1)
        cpu = time.process_time() - cpu
    trainer.hooks.clear()
    traced = trace_steps(trainer, steps)
    if parallel.local is not None:
        parallel.local.since = parallel.local.every - 1  # local SGD averages in the observed step
    with Observer(trainer, separate_axes=True) as observer:
        trainer.train_step()
    seen = observer.observed()
    tensors, process = peak_memory(context.device, seen.peak_bytes)
    stage, traffic = parallel.mesh.coordinates["pp"], sent_by_axis(trainer, seen.collectives)
    return RankReport(
        context.rank, stage, tensors, process, traffic, kept_share(trainer), cpu, tuple(recorder.steps), traced
    )


class StepReport(Hook):
    """Rank 0 sends the record of every step to the parent process."""

    def __init__(self, context: RankContext) -> None:
        self.context = context

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if self.context.rank == 0:
            self.context.send(asdict(record))


def kept_share(trainer: Trainer) -> float | None:
    """The share of this rank's token copies that the routers kept in the last step; None if their capacity drops none."""
    parallel, plan, model = trainer.parallel, trainer.parallel.plan, trainer.parallel.model
    if not model.experts or not model.router.can_drop(model.experts, model.top_k):
        return None
    tokens = plan.microbatch * parallel.workload.seq / (plan.cp * plan.tp)
    return kept_copies(parallel.stages.values(), tokens * model.top_k)


def peak_memory(device: str, observed_bytes: int) -> tuple[int, int]:
    """Peak bytes of tensors and of the process. On a GPU the allocator counts them: allocated and reserved. On a CPU no
    allocator does: tensors are those of the observed step, the process is its resident memory."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return observed_bytes, peak_resident_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def sent_by_axis(trainer: Trainer, collectives: dict[tuple[str, str], tuple[int, int]]) -> dict[str, float]:
    """Bytes this rank sends per step by axis, if each collective runs a bandwidth-optimal algorithm."""
    out: dict[str, float] = {}
    for (observed_axis, operation), (_, size) in collectives.items():
        axis = PREDICTED_AXIS[observed_axis]
        out[axis] = out.get(axis, 0.0) + float(sent(operation, size, trainer.parallel.mesh.size(observed_axis)))
    if trainer.parallel.local is not None and "dp" in out:
        out["dp"] /= trainer.parallel.local.every
    return out
