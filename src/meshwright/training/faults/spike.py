"""Loss spikes: a loss far above the last ones. Training goes back to the last good checkpoint.

    spike    loss > factor × median of the last `WINDOW` losses

Large models diverge this way without any NaN: a few batches push the weights somewhere from which the loss takes thousands of steps to recover,
if it does. The remedy of published runs is to restart from an earlier checkpoint and to skip the batches. A spike may also
come from a hardware fault, and then the same batches do no harm. So

    first spike at a step      go back, repeat the same batches (a transient fault does not come back)
    second one at that step    go back, and skip the batches since the checkpoint up to this step

The loss is the sum over all ranks, so all ranks see the spike in the same step. Losses of replicas of local SGD differ: they agree
when they average.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median
from typing import Any

from meshwright.training.hooks import Hook
from meshwright.training.optimizer.finite import Rollback
from meshwright.training.records import StepRecord

WINDOW = 64
LEAST = 8  # losses before the first comparison


class Spike(Rollback):
    """A rollback after which any step since the checkpoint may be the cause."""


class LossSpikes(Hook):
    """Raises `Spike` after a step whose loss is `factor` times the usual one. It runs before the checkpoint hook."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.worst = 0.0  # since the ranks last compared; only under local SGD does it last longer than a step

    def after_step(self, trainer: Any, record: StepRecord) -> None:
        usual = median(self.losses) if len(self.losses) >= LEAST else float("inf")
        if isfinite(record.loss):  # NaN and infinity: `optimizer.on_nan`
            self.losses.append(record.loss)
            self.worst = max(self.worst, record.loss / usual if usual > 0 else 0.0)
        local = trainer.parallel.local
        if local is not None and local.since:
            return
        worst, self.worst = self.worst, 0.0
        if local is not None:
            worst = largest_over_replicas(trainer, worst)
        if worst > self.factor:
            raise Spike(
                record.step, f"the loss rose to {worst:.3g} times its median of the last {len(self.losses)} steps"
            )

    def reset(self) -> None:
        """Forget the losses after a rollback."""
        self.losses.clear()


def largest_over_replicas(trainer: Any, value: float) -> float:
    """The largest value of all replicas of local SGD."""
    import torch
    from torch import distributed

    group = trainer.parallel.mesh.group("replicate")
    if group is None:
        return value
    found = torch.tensor([value], dtype=torch.float64, device=trainer.parallel.mesh.device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX, group=group)
    return float(found)
