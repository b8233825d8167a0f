"""A training on one rank: put the plan on the model, run the loop, tell the parent each step; then watch one step more.

Timed steps run bare. The watched step counts what was sent and the memory held, and is not timed.
"""

from __future__ import annotations

import resource
from dataclasses import asdict

import torch

from meshwright.cost.step import AXIS_OF, TOLD_AS
from meshwright.describe.config import Config
from meshwright.lower.op import sent
from meshwright.parallel.apply import apply
from meshwright.parallel.numerics.precision import DTYPES
from meshwright.training.data import Corpus
from meshwright.training.loop import Trainer
from meshwright.training.observe import Observer
from meshwright.training.rank import RankContext
from meshwright.training.records import RankReport, Settings, StepRecord

TOLD = {**AXIS_OF, "shard": "dp", "dp": "dp", **TOLD_AS}  # the axis under which a prediction tells these bytes


def work(context: RankContext, config: Config, steps: int, seed: int, settings: Settings) -> RankReport:
    parallel = apply(
        config.model,
        config.plan,
        config.workload,
        context.rank,
        device=context.device,
        dtype=DTYPES[config.plan.param_dtype],
        seed=seed,
        order=config.plan.order or config.stack.order,
    )
    trainer = Trainer(parallel, Corpus(config.model, config.workload.seq, seed), settings)

    def tell(record: StepRecord) -> None:
        if context.rank == 0:
            context.tell(asdict(record))

    trainer.after_step.append(tell)
    trainer.train(steps)
    trainer.after_step.clear()
    if parallel.local is not None:
        parallel.local.since = parallel.local.every - 1  # the step that is watched is the one that averages
    with Observer(trainer, apart=True) as observer:
        trainer.train_step()
    seen = observer.observed()
    stage, traffic = parallel.mesh.coordinates["pp"], sent_by_axis(trainer, seen.collectives)
    return RankReport(context.rank, stage, seen.peak_bytes, process_memory(context.device), traffic)


def process_memory(device: str) -> int:
    """The most the process held: what the allocator reserved on a GPU, what was resident on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sent_by_axis(trainer: Trainer, collectives: dict[tuple[str, str], tuple[int, int]]) -> dict[str, float]:
    """Bytes this rank sends in a step, by axis, each collective run bandwidth-optimally."""
    out: dict[str, float] = {}
    for (axis, operation), (_, size) in collectives.items():
        told = TOLD[axis]
        out[told] = out.get(told, 0.0) + float(sent(operation, size, trainer.parallel.mesh.size(axis)))
    if trainer.parallel.local is not None and "dp" in out:
        out["dp"] /= trainer.parallel.local.every
    return out
