"""The global gradient norm, and clipping by it.

    g ← g · min(1, c / ‖g‖),   ‖g‖² = Σ over every element of the model, once

A piece is the part of a parameter on this rank. The elements of a shard count; of a parameter copied on several ranks one
copy counts; the second copy of a tied embedding does not count. So each rank sums the squares of the pieces it counts,
and one all-reduce over the world gives ‖g‖². A norm over local parameters, or one that counts every copy, would clip
differently under every layout.

One NaN or infinite element anywhere makes the norm NaN or infinite on every rank: `finite` decides by it.
"""

from __future__ import annotations

import torch

from meshwright.parallel.numerics.precision import at_least_single, narrow
from meshwright.parallel.pieces import Piece
from meshwright.training.optimizer.fused import FusedAdamW


def counted_squares(pieces: list[Piece]) -> torch.Tensor:
    """Σ g² over the elements this rank counts; summed over the world it is the square of the global norm."""
    trained = [p for p in pieces if p.parameter.requires_grad]
    counted = [view for p in trained for box, view in p.views(p.gradient) if box.first_copy and view.numel()]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=pieces[0].local.device if pieces else None)
    if any(narrow(g.dtype) for g in counted):
        norms = torch.stack([torch.linalg.vector_norm(g, dtype=at_least_single(g.dtype)) for g in counted])
        return norms.to(torch.float64).square().sum()
    return torch.nn.utils.get_total_norm(counted).to(torch.float64) ** 2


def clip(
    pieces: list[Piece], norm: torch.Tensor, max_norm: float, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Scale all gradients so that their global norm is at most `max_norm`: in the update, where the optimizer can."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if isinstance(optimizer, FusedAdamW):
        optimizer.gradient_factor = factor
        return
    for piece in pieces:
        piece.gradient.mul_(factor)
