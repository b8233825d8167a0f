"""The global gradient norm, and clipping by it.

    g ← g · min(1, c / ‖g‖),   ‖g‖² = Σ over every element of the model, once

A piece is the part of a parameter on this rank. The elements of a shard count; of a parameter copied on several ranks one
copy counts; the second copy of a tied embedding does not count. So each rank sums the squares of the pieces it counts,
and one all-reduce over the world gives ‖g‖². A norm over local parameters, or one that counts every copy, would clip
differently under every layout.

**Gradients that are not finite.** One NaN or infinite element anywhere makes the norm NaN or infinite on every rank. So all ranks see
it in the same step, before the update, without a further message. What happens then is `optimizer.on_nan`:

    stop       the step is reported without an update, and the run ends with MW-OPT-003
    skip       the update is left out; the next batch may be better. After `most_skips` such steps in a row the run stops
    rollback   `Rollback` is raised on every rank, and the run goes back to its last good checkpoint (`training.faults.guard`). After
               `most_skips` rollbacks without a later step that is finite the run stops

In fp16 an overflow is expected: the loss scale is halved and the step skipped, whatever on_nan says, until the scale is 1.
"""

from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from meshwright.describe.optimizer import Optimizer
from meshwright.errors import MeshwrightError
from meshwright.parallel.numerics.precision import LossScale, at_least_single, narrow
from meshwright.parallel.pieces import Piece
from meshwright.training.optimizer.make import FusedAdamW


def counted_squares(pieces: list[Piece]) -> Tensor:
    """Σ g² over the elements this rank counts; summed over the world it is the square of the global norm."""
    trained = [p for p in pieces if p.parameter.requires_grad]
    counted = [view for p in trained for box, view in p.views(p.gradient) if box.first_copy and view.numel()]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=pieces[0].local.device if pieces else None)
    if any(narrow(g.dtype) for g in counted):  # one kernel for all of them took 1.3 ms longer for 1.5e9 numbers
        norms = torch.stack([torch.linalg.vector_norm(g, dtype=at_least_single(g.dtype)) for g in counted])
        return norms.to(torch.float64).square().sum()
    return torch.nn.utils.get_total_norm(counted).to(torch.float64) ** 2


def clip(pieces: list[Piece], norm: Tensor, max_norm: float, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Scale all gradients so that their global norm is at most `max_norm`: in the update, where the optimizer can."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 0 or NaN if the norm is not finite
    if isinstance(optimizer, FusedAdamW):
        optimizer.gradient_factor = factor
        return
    for piece in pieces if max_norm < inf else ():
        if piece.parameter.requires_grad:
            piece.gradient.mul_(factor)


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
