"""Parameter groups: which pieces have weight decay, and by which factor their learning rate is scaled to the width of the model.

    role        weight decay                    factor of the rate with scale_with_width = w
    matrix      yes                             w / hidden;  under Muon √(w / hidden)
    router      yes                             w / hidden
    head        yes                             w / hidden
    embedding   unless decay_embeddings = false 1
    vector      no: norm weights and biases     1

Weight decay shrinks a weight towards zero, which is a prior for the entries of a matrix; a norm weight is near 1 and a bias is an offset, so
decay would only harm them. A tied embedding is an embedding.

**Scaling with the width** (µP, Yang et al. 2021). In a product over `hidden` inputs, Adam's steps of equal size add up: a model twice as wide
moves its outputs twice as far, so the rate of its matrices is halved. An embedding is looked up, not summed over. Muon's update is an
orthogonal matrix times √hidden (`muon`): its effect grows with √hidden only.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from torch import nn

from meshwright.describe.optimizer import Optimizer
from meshwright.describe.variants import OPTIMIZERS
from meshwright.parallel.pieces import Piece


def role_of(piece: Piece) -> str:
    """matrix, router, head, embedding or vector."""
    return "embedding" if piece.box.tied else piece.box.parameter.role


def weight_decay(role: str, kind: str, settings: Optimizer) -> float:
    has_none = role == "vector" or (role == "embedding" and not settings.decay_embeddings)
    return 0.0 if has_none or "weight_decay" not in OPTIMIZERS[kind].settings else settings.weight_decay


def rate_factor(role: str, kind: str, settings: Optimizer, hidden: int) -> float:
    if not settings.scale_with_width or role in ("embedding", "vector"):
        return 1.0
    ratio = settings.scale_with_width / hidden
    return sqrt(ratio) if OPTIMIZERS[kind].by_matrix and role == "matrix" else ratio


def parameter_groups(pieces: list[Piece], kind: str, settings: Optimizer, hidden: int) -> list[dict[str, Any]]:
    """torch's parameter groups of these pieces: one for each combination of weight decay, rate factor and Muon."""
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for piece in pieces:
        role = role_of(piece)
        key = (
            weight_decay(role, kind, settings),
            rate_factor(role, kind, settings, hidden),
            OPTIMIZERS[kind].by_matrix and role == "matrix",
        )
        groups.setdefault(key, []).append(piece.parameter)
    return [
        {"params": parameters, "weight_decay": decay, "rate_factor": factor, "orthogonal": orthogonal}
        for (decay, factor, orthogonal), parameters in groups.items()
    ]
