"""The update: AdamW, Adam, momentum or SGD on this rank's pieces, and clipping by the true global norm.

    g ← g · min(1, c / ‖g‖),   ‖g‖² = Σ over every element of the model, once

A piece is the part of a parameter on this rank. The elements of a shard count; of a parameter copied on several ranks one
copy counts; the second copy of a tied embedding does not count. So each rank sums the squares of the pieces it counts,
and one all-reduce over the world gives ‖g‖². A norm over local parameters, or one that counts every copy, would clip
differently under every layout.

Weight decay applies to matrices; biases and norm weights have none. The learning rate rises linearly over the first
`warmup` steps.
"""

from __future__ import annotations

import torch

from meshwright.describe.optimizer import Optimizer
from meshwright.describe.workload import Workload
from meshwright.parallel.numerics.precision import at_least_single
from meshwright.parallel.pieces import Piece


def make_optimizer(pieces: list[Piece], workload: Workload, settings: Optimizer) -> torch.optim.Optimizer:
    """The workload's optimizer over the trained pieces, in two groups: with and without weight decay."""
    trained = [p for p in pieces if p.parameter.requires_grad]
    matrices = [p.parameter for p in trained if p.parameter.ndim > 1 and not p.name.endswith("bias")]
    vectors = [p.parameter for p in trained if p.parameter.ndim <= 1 or p.name.endswith("bias")]
    rate = settings.learning_rate
    if workload.optimizer in ("adamw", "adam"):
        decay = settings.weight_decay if workload.optimizer == "adamw" else 0.0
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=rate, betas=settings.betas, eps=settings.epsilon
        )
    momentum = settings.momentum if workload.optimizer == "momentum" else 0.0
    return torch.optim.SGD([*matrices, *vectors], lr=rate, momentum=momentum)


def set_learning_rate(optimizer: torch.optim.Optimizer, settings: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warmup))


def counted_squares(pieces: list[Piece]) -> torch.Tensor:
    """Σ g² over the elements this rank counts; summed over the world it is the square of the global norm."""
    counted = [p.gradient.to(at_least_single(p.gradient.dtype)) for p in pieces if p.box.first_copy]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=pieces[0].local.device)
    return torch.nn.utils.get_total_norm(counted).to(torch.float64) ** 2


def clip(pieces: list[Piece], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients so that their global norm is at most `max_norm`."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for piece in pieces:
        piece.gradient.mul_(factor)
