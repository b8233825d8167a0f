"""Replay of Muon's updates, by another way than the run's: from a singular value decomposition of the whole matrix.

The pieces of all ranks are put together to the whole gradient that the optimizer was given. Momentum and the look-ahead are recomputed, and
the iteration X ← a·X + (b·X·Xᵀ + c·(X·Xᵀ)²)·X is applied to each singular value σ of X = U·Σ·Vᵀ: it maps σ to a·σ + b·σ³ + c·σ⁵.

A run sends the momentum in bf16. Where its float32 value lies next to the middle of two bf16 numbers, the replay may round to the other one: one
element in ten thousand or so, which changes the matrix by 2⁻⁸/√elements. The iteration enlarges a change by up to a⁵ = 485: for the
matrices of a small copy by up to a tenth of the update. A loss scale, a decay, a learning rate or a box in the wrong place change all of it.
"""

from collections.abc import Iterator
from math import sqrt

import numpy as np

from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.proof.compare import Break
from meshwright.proof.parts import Merged, RecordedValue
from meshwright.proof.records import PieceTrace, Trace

BOUND = 0.25  # of the norm of an update: twice what a few elements that are rounded differently change
A, B, C, STEPS = 3.4445, -4.7750, 2.0315, 5


def orthogonal(matrices: np.ndarray) -> np.ndarray:
    """Each matrix with its singular values mapped five times; in float64."""
    norms = np.maximum(np.sqrt((matrices**2).sum(axis=(-2, -1), keepdims=True)), 1e-7)
    u, sigma, v = np.linalg.svd(matrices / norms, full_matrices=False)
    for _ in range(STEPS):
        sigma = A * sigma + B * sigma**3 + C * sigma**5
    return (u * sigma[..., None, :]) @ v


def replay_matrices(ranks: list[Trace], plan: Plan, rates: list[float], settings: Optimizer) -> list[Break]:
    """The updates of matrices that differ from the replay; `rates` are the learning rates of the steps."""
    found = []
    for trace, pieces in by_matrix(ranks, plan):
        momentum: np.ndarray | None = None
        for step, rate in enumerate(rates):
            updates = [(piece, piece.updates[step]) for piece in pieces]
            made = [(piece, update) for piece, update in updates if update is not None]
            if len(made) < len(pieces):  # a step that overflowed
                continue
            gradient, before, after = (
                whole_of([(piece.start, getattr(update, what)) for piece, update in made])
                for what in ("gradient", "before", "after")
            )
            momentum, expected = next_update(momentum, gradient, settings.momentum)
            size = rate * 0.2 * sqrt(max(gradient.shape[-2:]))
            moved = (before * (1 - rate * settings.weight_decay) - after) / size
            error = float(np.sqrt(((moved - expected) ** 2).sum() / max((expected**2).sum(), 1e-300)))
            if not error <= BOUND:
                found.append(Break(step, "updated matrix", pieces[0].name, trace.rank, error, BOUND, made[0][1].dtype))
    return found


def whole_of(parts: list[tuple[tuple[int, ...], np.ndarray]]) -> np.ndarray:
    """The matrix of parts and their starts."""
    shape = tuple(np.max([np.add(start, value.shape) for start, value in parts], axis=0))
    values = [RecordedValue("", "", 0, v, shape=shape, start=start, size=v.shape) for start, v in parts]
    whole = Merged("", "", values).whole
    assert whole is not None
    return whole


def next_update(momentum: np.ndarray | None, gradient: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The momentum after this gradient, and the orthogonal update."""
    momentum = (1 - share) * gradient + (0.0 if momentum is None else share * momentum)
    return momentum, orthogonal((1 - share) * gradient + share * momentum)


def by_matrix(ranks: list[Trace], plan: Plan) -> Iterator[tuple[Trace, list[PieceTrace]]]:
    """The pieces of each matrix on all ranks (of each replica, if replicas train alone), and the first of these ranks."""
    found: dict[tuple[str, int], tuple[Trace, list[PieceTrace]]] = {}
    for trace in ranks:
        replica = trace.coordinates.get("replicate", 0) if plan.average_every else 0
        for piece in trace.pieces:
            if piece.orthogonal and any(update is not None for update in piece.updates):
                found.setdefault((piece.name, replica), (trace, []))[1].append(piece)
    yield from found.values()
