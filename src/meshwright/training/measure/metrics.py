"""The hook that adds to the record of a step what the step itself does not measure: MFU, memory, compilation, exposed communication.

    MFU       seconds that the model's FLOPs take at the peak rate of all devices, over the seconds of the step
    memory    peak of this rank so far: what a GPU's allocator has reserved, or the resident memory of the process
    compiler  seconds of this rank in `torch.compile`, in the first steps of a run
    exposed   seconds that this rank was blocked in communication, by the parts of a prediction. Waiting for another rank counts

Nothing is communicated: the values are those of this rank. The measurement at the end of a run has memory and parts of all ranks.
"""

from __future__ import annotations

import resource
from dataclasses import replace
from functools import cached_property

import torch

from meshwright.cost.predict import seconds_at_peak
from meshwright.describe.config import Config
from meshwright.describe.result import GIB
from meshwright.parallel.compile import compile_seconds
from meshwright.training.hooks import Hook
from meshwright.training.loop import Trainer
from meshwright.training.machine import peak_resident_bytes
from meshwright.training.measure.lowered_names import LoweredNames
from meshwright.training.measure.record_comm import CommRecorder
from meshwright.training.records import RecordedStep, StepRecord


class Metrics(Hook):
    """Runs before the hooks that write or log the record, and after a recorder of communication if there is one."""

    def __init__(self, config: Config, recorder: CommRecorder | None = None) -> None:
        self.config, self.recorder = config, recorder
        self.peak_s = seconds_at_peak(config.model, config.cluster, config.plan, config.workload)
        self.compiled_s = 0.0

    def before_step(self, trainer: Trainer) -> None:
        self.compiled_s = self.compile_seconds(trainer)

    def compile_seconds(self, trainer: Trainer) -> float:
        return compile_seconds() if trainer.parallel.compilation.mode != "off" else 0.0

    def after_step(self, trainer: Trainer, record: StepRecord) -> StepRecord:
        recorded = self.recorder.steps[-1] if self.recorder is not None and self.recorder.steps else None
        return replace(
            record,
            mfu=self.peak_s / record.seconds if record.seconds else None,
            memory_gib=process_memory(trainer.parallel.mesh.device) / GIB,
            exposed_s=self.exposed(trainer.parallel.mesh.rank, recorded) if recorded is not None else None,
            compile_s=self.compile_seconds(trainer) - self.compiled_s or None,
        )

    @cached_property
    def names(self) -> LoweredNames:
        return LoweredNames(self.config)

    def exposed(self, rank: int, step: RecordedStep) -> dict[str, float]:
        """Blocked seconds by part. The small sums of the optimizer (tokens, norm, loss) are not communication of an axis."""
        out: dict[str, float] = {}
        for event in step.events:
            part = self.names.matches(rank, event)[0].part
            if part != "optimizer":
                out[part] = out.get(part, 0.0) + event.returned - event.issued + event.resumed - event.waited
        return out


def process_memory(device: str) -> int:
    """Peak bytes of this process so far: reserved on a GPU, resident on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved()
    return peak_resident_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
