"""The learning rate of each step: a base rate, a linear warm-up, and a decay.

    base       learning_rate, scaled to the batch and (by group, `make`) to the width of the model
    warm-up    (step + 1) / warmup, up to 1
    constant   1
    cosine     m + (1 − m) · (1 + cos π·p) / 2        p = (step − warmup) / decay_steps, between 0 and 1
    linear     m + (1 − m) · (1 − p)
    wsd        as linear, with p = (step − decay_start) / decay_steps: the rate is stable in between

m is `min_learning_rate`, the share that is left. After the decay the rate stays at m.

**Scaling with the batch.** A batch that is k times larger averages away more noise and allows larger steps: k times larger for SGD, whose
step is the gradient (Goyal et al. 2017), √k times for Adam and Muon, whose step has a length that does not depend on the gradient's
(Malladi et al. 2022).
"""

from math import cos, pi, sqrt

import torch

from meshwright.describe.optimizer import Optimizer
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import Workload


def base_rate(settings: Optimizer, workload: Workload) -> float:
    """The learning rate after the warm-up, scaled to the batch of the workload."""
    if not settings.scale_with_batch:
        return settings.learning_rate
    ratio = workload.batch / settings.scale_with_batch
    return settings.learning_rate * (ratio if OPTIMIZERS[workload.optimizer].scales_linearly else sqrt(ratio))


def share_at(settings: Optimizer, step: int) -> float:
    """The share of the base rate at a step: warm-up and decay."""
    warm = min(1.0, (step + 1) / max(1, settings.warmup))
    if settings.schedule == "constant":
        return warm
    start = settings.decay_start if settings.schedule == "wsd" else settings.warmup
    p = min(1.0, max(0.0, (step - start) / max(1, settings.decay_steps)))
    left = (1 + cos(pi * p)) / 2 if settings.schedule == "cosine" else 1 - p
    return warm * (settings.min_learning_rate + (1 - settings.min_learning_rate) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group: `rate` times the factor of the group (`make.parameter_groups`)."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_factor"]
