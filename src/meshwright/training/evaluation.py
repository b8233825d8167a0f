"""Evaluation during training: a hook that adds the validation loss to the record of every n-th step.

The loss is the sum over the valid tokens of the validation samples divided by their global number, as in training, and the same
samples are evaluated every time. It runs forward only, through the plan of the training, between two steps: it changes no weight,
and the seconds of a step do not include it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.training.data.loader import Loader
from meshwright.training.data.samples import ValidationSamples
from meshwright.training.hooks import Hook
from meshwright.training.loop import Trainer
from meshwright.training.records import StepRecord


class Evaluation(Hook):
    """Use as `trainer.hooks.insert(0, Evaluation(trainer, samples, every))`: before the hooks that report the record."""

    def __init__(self, trainer: Trainer, samples: ValidationSamples, every: int) -> None:
        self.trainer, self.samples, self.every = trainer, samples, every
        parallel = trainer.parallel
        self.loader = Loader(samples, parallel.mesh.device, trainer.dtype, parallel.position_ids)

    def after_step(self, trainer: Trainer, record: StepRecord) -> StepRecord:
        if (record.step + 1) % self.every:
            return record
        return replace(record, validation_loss=self.loss())

    def loss(self) -> float:
        """The mean loss over the valid tokens of all validation samples."""
        trainer, parallel = self.trainer, self.trainer.parallel
        loss = torch.zeros((), dtype=torch.float64, device=parallel.mesh.device)
        tokens = torch.zeros_like(loss)
        for i in range(self.samples.batches):
            batch = self.loader.batch(i, trainer.indices)
            tokens += batch.valid
            loss += parallel.evaluate(batch.inputs, batch.targets, batch.documents_BS)
        tokens = trainer.all_reduce(tokens, "dp_cp")
        loss = trainer.all_reduce(trainer.counted_loss(loss), "world")
        return (loss / tokens.clamp(min=1)).item()
