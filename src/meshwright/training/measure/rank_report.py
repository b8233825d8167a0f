"""The report of one rank at the end of a run: its recorded steps, a few traced ones, and one that is observed.

These steps follow the timed ones: tracing gives the timeline of actions and blocks, observing counts bytes sent and memory of tensors.
No checkpoint contains their updates. Long steps are not traced, and where one rank trains on a GPU nothing is observed: it sends no bytes, and the
allocator counts its memory.
"""

from __future__ import annotations

import resource

import torch

from meshwright.cost.step import TRAFFIC_AXIS
from meshwright.parallel.expert.balance import copies_sent
from meshwright.training.launch.rank import RankContext
from meshwright.training.loop import Trainer
from meshwright.training.machine import peak_resident_bytes
from meshwright.training.measure.lowered_names import AXES
from meshwright.training.measure.observe import Observer
from meshwright.training.measure.record_comm import CommRecorder
from meshwright.training.measure.trace_step import trace_steps
from meshwright.training.records import Observed, RankReport

PREDICTED_AXIS = {**AXES, **TRAFFIC_AXIS}  # observed axis → axis under which its bytes are predicted


def rank_report(context: RankContext, trainer: Trainer, steps: int, recorder: CommRecorder, cpu_s: float) -> RankReport:
    """The report of this rank; trains the further steps. `cpu_s`: seconds that it computed in the timed ones."""
    parallel, of_steps = trainer.parallel, device_memory(context.device)
    traced = trace_steps(trainer, steps, mean_step_s(trainer, recorder))
    seen = observe(trainer) if of_steps is None or context.world > 1 else Observed()
    tensors, process = of_steps or (
        seen.peak_bytes,
        peak_resident_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
    )
    stage, traffic = parallel.mesh.coordinates["pp"], sent_by_axis(trainer, seen)
    return RankReport(
        context.rank, stage, tensors, process, traffic, routing(trainer), cpu_s, tuple(recorder.steps), traced
    )


def mean_step_s(trainer: Trainer, recorder: CommRecorder) -> float:
    """Seconds of the last recorded step, mean over all ranks, which must agree on how many more they train."""
    last = recorder.steps[-1] if recorder.steps else None
    seconds = torch.tensor(
        last.ended - last.began if last else 0.0, dtype=torch.float64, device=trainer.parallel.mesh.device
    )
    return float(trainer.all_reduce(seconds, "world")) / trainer.parallel.plan.world


def observe(trainer: Trainer) -> Observed:
    """Train one step, and return the bytes it sends and the memory it takes."""
    if (local := trainer.parallel.local) is not None:
        local.since = local.every - 1  # local SGD averages in this step
    with Observer(trainer, separate_axes=True) as observer:
        trainer.train_step()
    return observer.observed()


def routing(trainer: Trainer) -> tuple[float, float] | None:
    """The share of this rank's token copies that the routers kept in the last step, and that which they sent to other ranks; None if their
    capacity drops none."""
    parallel, plan, model = trainer.parallel, trainer.parallel.plan, trainer.parallel.model
    if not model.experts or not model.router.can_drop(model.experts, model.top_k):
        return None
    tokens = plan.microbatch * parallel.workload.seq / (plan.cp * plan.tp)
    return copies_sent(parallel.stages.values(), tokens * model.top_k)


def device_memory(device: str) -> tuple[int, int] | None:
    """Peak bytes that the allocator of a GPU has allocated and reserved; None on a CPU, where no allocator counts them: there tensors are
    those of the observed step, and the process is its resident memory."""
    if not device.startswith("cuda"):
        return None
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def sent_by_axis(trainer: Trainer, seen: Observed) -> dict[str, float]:
    """Bytes this rank sends per step, under the axes of a prediction."""
    out: dict[str, float] = {}
    for observed_axis, size in seen.sent.items():
        axis = PREDICTED_AXIS[observed_axis]
        out[axis] = out.get(axis, 0.0) + size
    if trainer.parallel.local is not None and "dp" in out:
        out["dp"] /= trainer.parallel.local.every
    return out
