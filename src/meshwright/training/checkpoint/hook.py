"""The hook that saves during a training: every n steps, and at its end."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint.background import Saver
from meshwright.training.hooks import Hook, StepRecord


class Checkpoints(Hook):
    """Saves after every n-th step while training continues (0: no saves), and after the last one, which is complete when `finish` returns,
    unless `Saver.finish` returns its error."""

    def __init__(self, saver: Saver, every: int) -> None:
        self.saver, self.every = saver, every
        self.requested_step: int | None = None  # the last step that was saved, or is being saved

    def start(self, trainer: Any) -> None:
        if self.requested_step is None:
            self.saver.check()

    def after_step(self, trainer: Any, record: StepRecord) -> StepRecord | None:
        if trainer.policy.error is not None:
            return None  # gradients were not finite: the run goes back or stops, and the state of this step is not one to go back to
        if self.every and trainer.step % self.every == 0:
            self.requested_step = trainer.step
            self.saver.save()
        return None

    def finish(self, trainer: Any) -> None:
        failed = self.saver.finish() is not None
        if self.requested_step != trainer.step or failed:
            self.requested_step = trainer.step
            with suppress(MeshwrightError):
                self.saver.save(wait=True)
