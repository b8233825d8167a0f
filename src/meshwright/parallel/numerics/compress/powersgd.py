"""PowerSGD: a gradient matrix as the product of two thin ones, both small enough to all-reduce (Vogels et al. 2019).

For a matrix M (m × n), the sum over ranks of M_w, each step does one subspace iteration from the last step's Q:

    P = Σ_w M_w Q          all-reduce of m·r numbers
    P ← orthonormal basis of P's columns
    Q = Σ_w M_wᵀ P         all-reduce of n·r numbers
    M ≈ P Qᵀ = P Pᵀ Σ_w M_w        the best approximation within the span of P

Both are sums, so an all-reduce carries them: (m + n)·r numbers instead of m·n, whatever the number of ranks. Q is kept
for the next step (*warm start*): gradients change slowly, and after a few steps P spans their leading directions. The
part outside the span, e_w = (I − P Pᵀ) M_w, is fed back into the rank's next gradient.

Under ZeRO the factors are all-reduced as well, since they are small, and each rank computes only the rows of P Qᵀ that
it owns: (m + n)·r numbers all-reduced instead of m·n reduce-scattered.

All matrices of a message share one all-reduce for their P's and one for their Q's; vectors, and matrices that would
not shrink, are sent uncompressed with the P's. Messages are cut at parameters and each has its own two all-reduces,
issued in the same order on every rank: any number of messages runs on gloo and on NCCL. A column of Q that is zero
(because a gradient was) is drawn again at random; otherwise it would stay zero.
"""

import math
from collections.abc import Generator, Iterator
from itertools import accumulate

import torch
from torch import Tensor

from meshwright.models.parts import at_least_single
from meshwright.parallel.numerics.compress.base import Exchange, Feedback, Layout, generator


class PowerSGD:
    aligned = True

    def __init__(self, rank: int, seed: int = 0, feedback: bool = True) -> None:
        self.rank, self.seed, self.feedback = rank, seed, Feedback(feedback)
        self.bases: dict[tuple[int, int], Tensor] = {}  # Q by message and offset in it
        self.steps: dict[int, int] = {}

    def width(self, shape: torch.Size) -> int:
        """Columns of the factors of a parameter; 0 where it is sent uncompressed."""
        if len(shape) < 2:
            return 0
        m, n = shape[0], math.prod(shape[1:])
        r = min(self.rank, m, n)
        return r if r * (m + n) < m * n else 0

    def reduce(self, index: int, message: Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        sums = yield from self._sum(index, self.feedback.corrected(index, message), layout)
        for (start, shape), (left, right) in zip(layout, sums, strict=True):
            message[start : start + shape.numel()] = multiply(left, right).flatten()

    def scatter(self, index: int, rows: Tensor, layout: Layout, rank: int, out: Tensor) -> Iterator[Exchange]:
        """Each rank computes the rows of the product that it owns."""
        stops = [*(start for start, _ in layout[1:]), rows.shape[1]]
        whole = torch.cat(
            [rows[:, start:stop].flatten()[: shape.numel()] for (start, shape), stop in zip(layout, stops, strict=True)]
        )
        starts = accumulate((shape.numel() for _, shape in layout), initial=0)
        flat = [(offset, shape) for offset, (_, shape) in zip(starts, layout, strict=False)]
        running = self._sum(index, self.feedback.corrected(index, whole), flat)
        del whole
        sums = yield from running
        out.zero_()
        for (start, shape), (left, right) in zip(layout, sums, strict=True):
            each = -(-shape[0] // len(rows))
            mine = multiply(left[rank * each : (rank + 1) * each], right).flatten()
            out[start : start + mine.numel()] = mine

    def _sum(
        self, index: int, x: Tensor, layout: Layout
    ) -> Generator[Exchange, None, list[tuple[Tensor, Tensor | None]]]:
        """The sum of each parameter over ranks, as its two factors, or (sum, None) where it is uncompressed. `x` becomes the
        error."""
        step = self.steps[index] = self.steps.get(index, -1) + 1
        matrices = [x[start : start + shape.numel()].view(shape[0], -1) for start, shape in layout]
        thin = [i for i, (_, shape) in enumerate(layout) if self.width(shape)]
        starts = {i: self._initial_q(index, layout[i][0], matrices[i], step) for i in thin}

        first = yield from all_reduce_together([m @ starts[i] if i in starts else m for i, m in enumerate(matrices)])
        bases = {i: orthonormal(first[i]) for i in thin}

        own = {i: matrices[i].T @ bases[i] for i in thin}
        for i in range(len(matrices)):
            matrices[i].sub_(bases[i] @ own[i].T if i in bases else matrices[i])
        self.feedback.keep(index, x)
        del x, matrices
        second = dict(zip(thin, (yield from all_reduce_together(list(own.values()))), strict=True))
        for i, q in second.items():
            self.bases[index, layout[i][0]] = q.clone()
        return [(bases[i], second[i]) if i in second else (whole, None) for i, whole in enumerate(first)]

    def _initial_q(self, index: int, offset: int, matrix: Tensor, step: int) -> Tensor:
        shape = matrix.shape[1], self.width(matrix.shape)
        kept = self.bases.get((index, offset))
        if kept is not None and bool((kept.abs().amax(0) > 0).all()):
            return kept
        random = generator(matrix.device, self.seed, index, offset, step)
        fresh = torch.randn(shape, generator=random, device=matrix.device, dtype=torch.float32).to(matrix.dtype)
        return fresh if kept is None else torch.where(kept.abs().amax(0) > 0, kept, fresh)


def multiply(left: Tensor, right: Tensor | None) -> Tensor:
    return left if right is None else left @ right.T


def all_reduce_together(parts: list[Tensor]) -> Generator[Exchange, None, list[Tensor]]:
    """The sums of several tensors over ranks, in one all-reduce."""
    if not parts:
        return []
    shapes = [part.shape for part in parts]
    payload = torch.cat([part.flatten() for part in parts])
    del parts
    yield Exchange("all_reduce", payload, payload)
    return [s.view(shape) for shape, s in zip(shapes, payload.split([s.numel() for s in shapes]), strict=True)]


def orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns: QR, in float32 or wider. All ranks have the same input and get the same basis."""
    wide = matrix.to(at_least_single(matrix.dtype))
    return torch.linalg.qr(wide).Q.to(matrix.dtype)
