"""PowerSGD: a gradient matrix as the product of two thin ones, both small enough to all-reduce (Vogels et al. 2019).

For a matrix M (m × n), the sum over ranks of M_w, one step of subspace iteration from where the last step ended:

    P = Σ_w M_w Q          all-reduce of m·r numbers
    P ← orthonormal basis of P's columns
    Q = Σ_w M_wᵀ P         all-reduce of n·r numbers
    M ≈ P Qᵀ = P Pᵀ Σ_w M_w        the best there is within the span of P

Both are sums, so a ring carries them: (m + n)·r numbers instead of m·n, whatever the number of ranks. Q is kept for
the next step (*warm start*): gradients change slowly, and after a few steps P spans their leading directions. What is
outside the span, e_w = (I − P Pᵀ) M_w, is fed back into the rank's next gradient.

All matrices of a message share one all-reduce for their P's and one for their Q's; vectors, and matrices that would
not shrink, ride along whole with the P's. Messages are cut at parameters and each has its own two exchanges, issued
in the same order on every rank: any number of messages runs on gloo and NCCL alike. A column of Q that is zero (a
gradient that was) is drawn anew, else it would stay zero for good.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from meshwright.parallel.compress import Exchange, Feedback, Layout, generator


class PowerSGD:
    aligned = True

    def __init__(self, rank: int, seed: int = 0, feedback: bool = True) -> None:
        self.rank, self.seed, self.feedback = rank, seed, Feedback(feedback)
        self.bases: dict[tuple[int, int], torch.Tensor] = {}  # Q by message and place in it
        self.steps: dict[int, int] = {}

    def width(self, shape: torch.Size) -> int:
        """Columns of the factors of a parameter; 0 where it goes whole."""
        if len(shape) < 2:
            return 0
        m, n = shape[0], math.prod(shape[1:])
        r = min(self.rank, m, n)
        return r if r * (m + n) < m * n else 0

    def scatter(self, index: int, rows: torch.Tensor, out: torch.Tensor, rank: int) -> Iterator[Exchange]:
        raise NotImplementedError("factors are of whole matrices: `Plan` refuses PowerSGD under ZeRO")

    def traffic(self, elements: int, size: int, layout: Layout, ranks: int, scattered: bool = False,
                index: int = 0, back: int = 0) -> list[tuple[str, int]]:  # fmt: skip
        first = second = 0
        for _, shape in layout:
            r = self.width(shape)
            first += r * shape[0] if r else shape.numel()
            second += r * math.prod(shape[1:]) if r else 0
        return [("all_reduce", n * size) for n in (first, second) if n]

    def reduce(self, index: int, message: torch.Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message)
        step = self.steps[index] = self.steps.get(index, -1) + 1
        thin = [(start, shape) for start, shape in layout if self.width(shape)]
        whole = [slice(start, start + shape.numel()) for start, shape in layout if not self.width(shape)]
        matrices = [x[start : start + shape.numel()].view(shape[0], -1) for start, shape in thin]
        starts = [self._start(index, start, m, step) for (start, _), m in zip(thin, matrices, strict=True)]

        first = [(m @ q).flatten() for m, q in zip(matrices, starts, strict=True)]
        payload = torch.cat([*first, *(x[part] for part in whole)]) if layout else x.new_empty(0)
        yield Exchange("all_reduce", payload, payload)
        sizes = [f.numel() for f in first]
        *sums, rest = payload.split([*sizes, payload.numel() - sum(sizes)])
        bases = [orthonormal(s.view(m.shape[0], -1)) for s, m in zip(sums, matrices, strict=True)]

        own = [m.T @ p for m, p in zip(matrices, bases, strict=True)]
        error = torch.zeros_like(x)
        for (start, _), m, p, q in zip(thin, matrices, bases, own, strict=True):
            error[start : start + m.numel()] = (m - p @ q.T).flatten()
        self.feedback.keep(index, error)
        if own:
            second = torch.cat([q.flatten() for q in own])
            yield Exchange("all_reduce", second, second)
            for (start, _), m, p, q in zip(thin, matrices, bases, second.split([q.numel() for q in own]), strict=True):
                factor = q.view(m.shape[1], -1)
                self.bases[index, start] = factor.clone()
                message[start : start + m.numel()] = (p @ factor.T).flatten()
        for part, values in zip(whole, rest.split([part.stop - part.start for part in whole]), strict=True):
            message[part] = values

    def _start(self, index: int, at: int, matrix: torch.Tensor, step: int) -> torch.Tensor:
        shape = matrix.shape[1], self.width(matrix.shape)
        kept = self.bases.get((index, at))
        if kept is not None and bool((kept.abs().amax(0) > 0).all()):
            return kept
        random = generator(matrix.device, self.seed, index, at, step)
        fresh = torch.randn(shape, generator=random, device=matrix.device, dtype=torch.float32).to(matrix.dtype)
        return fresh if kept is None else torch.where(kept.abs().amax(0) > 0, kept, fresh)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns: QR, in float32 or wider. The same on all ranks, whose input is the same."""
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    return torch.linalg.qr(wide).Q.to(matrix.dtype)
