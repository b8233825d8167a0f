"""A moving average of the weights (EMA), which often evaluates better than the weights themselves.

    a ← d · a + (1 − d) · w        after every update, d = optimizer.ema

Each rank averages the pieces that its optimizer updates, so the average is sharded as they are and nothing is sent. It is kept in at least
float32: with d = 0.999 a step adds a thousandth of the difference, which 16 bits would round away.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.parallel.numerics.precision import at_least_single
from meshwright.parallel.sharded import Sharded


class WeightAverage:
    """The moving average of the pieces of one rank; `values` are in the order of `Parallel.updated`, without frozen ones."""

    def __init__(self, parallel: Sharded, decay: float) -> None:
        self.parallel, self.decay = parallel, decay
        self.pieces = [piece for piece in parallel.updated if not piece.frozen]
        self.values = [p.local.detach().to(at_least_single(p.local.dtype), copy=True) for p in self.pieces]

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the current weights."""
        for value, piece in zip(self.values, self.pieces, strict=True):
            value.copy_(piece.local)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        for value, piece in zip(self.values, self.pieces, strict=True):
            value.lerp_(piece.local.to(value.dtype), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside the `with` block: for an evaluation, or an export."""
        trained = [p.local.detach().clone() for p in self.pieces]
        self._assign(self.values)
        try:
            yield
        finally:
            self._assign(trained)

    @torch.no_grad()
    def _assign(self, values: list[Tensor]) -> None:
        for piece, value in zip(self.pieces, values, strict=True):
            piece.local.copy_(value)
        if self.parallel.masters is not None:
            self.parallel.masters.give_parameters()
