"""Go back to the last good checkpoint without a restart: after a loss spike, or a NaN with `optimizer.on_nan = "rollback"`.

    1st rollback at a step    restore, and repeat the same batches: a fault of the hardware does not come back
    2nd at the same step      restore, and leave out updates, since the batches are the cause: of the step with a NaN gradient; of all steps
                              from the checkpoint to a spike, since any of them may have caused it

All ranks see the same loss and norm, so they all raise `Rollback` in the same step, and all restore.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from meshwright.training.faults.spike import LossSpikes, Spike
from meshwright.training.optimizer.finite import Rollback
from meshwright.training.records import StepRecord

Restore = Callable[[Any], int | None]  # fills a trainer with the last good checkpoint; its step, None if there is none


def train_with_rollback(
    trainer: Any, until: int, restore: Restore, note: Callable[[int, int, str], None], most: int
) -> Iterator[StepRecord]:
    """Train until step `until`. `note(step, resumed, text)` is called for each rollback; after `most` of them without
    progress the run stops with the cause."""
    rollbacks: Counter[int] = Counter()
    while True:
        try:
            yield from trainer.until(until)
            return
        except Rollback as cause:
            rollbacks = Counter({step: count for step, count in rollbacks.items() if step >= cause.step})
            rollbacks[cause.step] += 1
            if rollbacks.total() > max(most, 1):
                raise
            resumed = restore(trainer)
            if resumed is None:
                raise
            text = f"{cause.cause}: back to step {resumed}"
            if rollbacks[cause.step] > 1:
                first = resumed if isinstance(cause, Spike) else cause.step
                trainer.skip_steps.update(range(first, cause.step + 1))
                steps = f"step {first}" if first == cause.step else f"steps {first} to {cause.step}"
                text += f"; the updates of {steps} are left out"
            for hook in trainer.hooks:
                if isinstance(hook, LossSpikes):
                    hook.reset()
            note(cause.step, resumed, text)
