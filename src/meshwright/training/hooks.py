"""What happens around the steps of a training: metrics, evaluation, checkpoints, profiling, faults and proofs are hooks of the trainer.

    start            before the first step of `Trainer.until`
      before_step    the step has not begun; its seconds do not count this
      after_gradients  gradients are complete: reduced over all ranks, not yet unscaled or clipped
      after_step     the update is done, and `trainer.step` is the next step; may return the record with more in it
    finish           after the last step. Not called if a step raised

Every rank calls its hooks in the same order, so a hook may communicate. The first hook of the list is the nearest to the
step: its `before_step` is called last, its `after_step` first. So a recorder of communication in front does not see what the hooks
behind it send, and a hook that reports the record runs after the hooks that add to it.

A hook ends the training after the current step with `trainer.stopped = True`, on all ranks in the same step.
"""

from __future__ import annotations

from typing import Any

from meshwright.training.records import StepRecord


class Hook:
    """Overwrite the methods that are needed. `trainer` is a `loop.Trainer`, which imports this file."""

    def start(self, trainer: Any) -> None:
        """Before the first step."""

    def before_step(self, trainer: Any) -> None:
        """Before step `trainer.step`."""

    def after_gradients(self, trainer: Any) -> None:
        """After backward and reduction of gradients, before the norm and the update."""

    def after_step(self, trainer: Any, record: StepRecord) -> StepRecord | None:
        """After the update. The record that is returned goes to the next hook and to the caller; None keeps it."""
        return None

    def finish(self, trainer: Any) -> None:
        """After the last step."""
