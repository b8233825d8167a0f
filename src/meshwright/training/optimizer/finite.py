"""Gradients that are NaN or infinite: all ranks see them in the same step, before the update, and do the same.

The global norm of the gradients is a sum over all ranks, and it is NaN or infinite on every rank if one element on one rank is. So no
further message is needed. What happens then is `optimizer.on_nan`:

    stop       the step is reported without an update, and the run ends with MW-OPT-003
    skip       the update is left out; the next batch may be better. After `most_skips` such steps in a row the run stops
    rollback   `Rollback` is raised on every rank, and the run goes back to its last good checkpoint (`training.faults.rollback`). After
               `most_skips` rollbacks without a later step that is finite the run stops

In fp16 an overflow is expected: the loss scale is halved and the step skipped, whatever on_nan says, until the scale is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.describe.optimizer import Optimizer
from meshwright.errors import MeshwrightError
from meshwright.parallel.numerics.precision import LossScale


class Rollback(MeshwrightError):
    """Go back to the last good checkpoint.

    Raised on all ranks in the same step, when the state of the trainer is that after a complete step. The code that restores a checkpoint
    catches it; updates of steps in `trainer.skip_steps` are left out when they are trained again. If nothing catches it (no checkpoint), it
    ends the run."""

    def __init__(self, step: int, cause: str) -> None:
        self.step, self.cause = step, cause
        super().__init__(
            "MW-OPT-004",
            f"step {step}: {cause}, and going back to a checkpoint did not help",
            why="The run has no good checkpoint, or has gone back to it without getting further",
            fix="--save-every 100, and a lower learning rate (--learning-rate)",
            exit_code=1,
        )


@dataclass
class FinitePolicy:
    """Decides what a step does whose gradients are not finite, and counts such steps."""

    settings: Optimizer
    failures: int = 0  # steps in a row that were not finite, or rollbacks since the last finite step beyond `furthest`
    furthest: int = -1  # the last step that was not finite
    error: MeshwrightError | None = field(default=None, repr=False)  # to be raised at the end of the step

    def accept(self, finite: bool, step: int, scale: LossScale) -> bool:
        """Whether to update in this step. Sets `error` if the run cannot simply continue after it."""
        self.error = None
        lowered = scale.dynamic and scale.value > 1.0
        scale.adapt(finite)
        if finite:
            if step > self.furthest:
                self.failures = 0
            return True
        if lowered:
            return False
        self.failures += 1
        self.furthest = max(step, self.furthest)
        if self.settings.on_nan == "stop" or self.failures > self.settings.most_skips:
            self.error = self._stop(step)
        elif self.settings.on_nan == "rollback":
            self.error = Rollback(step, "gradients are NaN or infinite")
        return False

    def _stop(self, step: int) -> MeshwrightError:
        what = f"gradients are NaN or infinite at step {step}"
        if self.settings.on_nan != "stop":
            verb = "rolled back to an earlier checkpoint" if self.settings.on_nan == "rollback" else "skipped"
            what += f", after {self.settings.most_skips} steps that were {verb}"
        return MeshwrightError(
            "MW-OPT-003",
            what,
            why="The parameters are those before this step: nothing was updated",
            fix="a lower learning rate (--learning-rate), or --set optimizer.on_nan=skip",
            exit_code=1,
        )
