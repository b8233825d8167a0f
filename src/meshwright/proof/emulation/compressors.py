"""Compressed sums of all ranks on one device, written a second time: nothing here is shared with `parallel.numerics`.

A proof that runs the same compressor on one device would repeat its bugs. Here each kind follows its definition, with the gradients of all
ranks in one process, so that there is no exchange, only arithmetic:

    x_r ← g_r + e_r                     the gradient of a rank and its unsent part of earlier steps
    sum = Σ_r sent(x_r)                 sent: a cast, a quantisation, or a subset of the values
    e_r ← x_r − sent(x_r)               casts keep no error

    int8, int4, fp8   one scale for each owner's part of a message. An all-reduce rounds a second time, when each owner sends
                      its part of the sum; the owner keeps that error
    powersgd          P = basis of Σ_r x_r Q,  Q ← Σ_r x_rᵀ P,  sum = P Qᵀ,  e_r = x_r − P (x_rᵀ P)ᵀ

`x` is one message, or a matrix with a row for each owner (ZeRO's reduce-scatter). Random indices and the first basis of PowerSGD are drawn
from a hash of (seed, message, …, step): that hash is a convention between ranks, so it is repeated here.
"""

import hashlib
import math
from abc import ABC, abstractmethod

import torch

from meshwright.describe.plan import Plan
from meshwright.describe.variants import COMPRESSIONS
from meshwright.models.parts import at_least_single
from meshwright.proof.emulation.fp8_products import E4M3, nearest

Shapes = list[tuple[int, tuple[int, ...]]]  # where each parameter starts in a message, and its shape
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
SEED = 0
TIE = 1e-12  # relative: values that are equal but for the order of a sum


class CompressedSum(ABC):
    """One lossy sum over ranks. It keeps the error of every rank from step to step, by message."""

    def __init__(self) -> None:
        self.errors: dict[int, list[torch.Tensor]] = {}
        self.tied = False  # whether rounding decided what was sent, until now

    def __call__(self, index: int, given: list[torch.Tensor], shapes: Shapes) -> torch.Tensor:
        kept = self.errors.get(index)
        xs = [g + e for g, e in zip(given, kept, strict=True)] if kept else [g.clone() for g in given]
        total, self.errors[index] = self.summed(index, xs, shapes)
        return total

    @abstractmethod
    def summed(self, index: int, xs: list[torch.Tensor], shapes: Shapes) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The sum, and each rank's new error."""


class CastSum(CompressedSum):
    """Sum in 16 bits, rank by rank; or `backwards`, to measure the effect of the order."""

    def __init__(self, dtype: torch.dtype, backwards: bool) -> None:
        super().__init__()
        self.dtype, self.backwards = dtype, backwards

    def summed(self, index: int, xs: list[torch.Tensor], shapes: Shapes) -> tuple[torch.Tensor, list[torch.Tensor]]:
        first, *remaining = (x.to(self.dtype) for x in (xs[::-1] if self.backwards else xs))
        for other in remaining:
            first = first + other
        return first.to(xs[0].dtype), []


class QuantisedSum(CompressedSum):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def summed(self, index: int, xs: list[torch.Tensor], shapes: Shapes) -> tuple[torch.Tensor, list[torch.Tensor]]:
        if xs[0].ndim == 2:  # to owners: each adds up what it gets, exactly
            sent = [quantised(x, self.kind) for x in xs]
            return sum_of(sent), [x - s for x, s in zip(xs, sent, strict=True)]
        ranks, length = len(xs), xs[0].numel()
        width = 2 * math.ceil(length / (2 * ranks))
        rows = [torch.cat((x, x.new_zeros(width * ranks - length))).view(ranks, width) for x in xs]
        sent = [quantised(row, self.kind) for row in rows]
        total = sum_of(sent)
        passed_on = quantised(total, self.kind)
        errors = [row - s for row, s in zip(rows, sent, strict=True)]
        for owner, error in enumerate(errors):
            error[owner] += total[owner] - passed_on[owner]
        return passed_on.flatten()[:length], [error.flatten()[:length] for error in errors]


class SparseSum(CompressedSum):
    """Some of the values: the largest (top-k), drawn ones (random-k), or those above a threshold. Where a value that is sent and one that is not
    are equal, or one is at the threshold, rounding decides: a proof cannot tell (`tied`)."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.draws: dict[int, int] = {}

    def summed(self, index: int, xs: list[torch.Tensor], shapes: Shapes) -> tuple[torch.Tensor, list[torch.Tensor]]:
        drawn = self.draws[index] = self.draws.get(index, -1) + 1
        masks = [self.mask(x, index, drawn) for x in xs]
        sent = [torch.where(mask, x, 0.0) for x, mask in zip(xs, masks, strict=True)]
        return sum_of(sent), [torch.where(mask, 0.0, x) for x, mask in zip(xs, masks, strict=True)]

    def mask(self, x: torch.Tensor, index: int, drawn: int) -> torch.Tensor:
        if self.plan.wire in ("threshold", "absolute-threshold"):
            size = x.pow(2).mean().sqrt() if self.plan.wire == "threshold" else x.new_ones(())
            least = self.plan.compression_threshold * size
            self.tied |= bool(((x.abs() - least).abs() <= TIE * least).any() and least > 0)
            return x.abs() >= least
        length = x.shape[-1]
        count = max(1, min(length, math.ceil(math.floor(length * self.plan.compression_ratio * 1e6) / 1e6)))
        mask = torch.zeros_like(x, dtype=torch.bool)
        if self.plan.wire == "random-k":
            random = generator(x.device, SEED, index, drawn)
            mask[..., torch.randperm(length, generator=random, device=x.device)[:count]] = True
            return mask
        sizes, order = x.abs().sort(-1, descending=True)
        if count < length:
            sent, left = sizes[..., count - 1], sizes[..., count]
            self.tied |= bool(((sent - left <= TIE * sent) & (sent > 0)).any())
        return mask.scatter(-1, order[..., :count], True)


class PowerSum(CompressedSum):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.bases: dict[tuple[int, int], torch.Tensor] = {}
        self.steps: dict[int, int] = {}

    def summed(self, index: int, xs: list[torch.Tensor], shapes: Shapes) -> tuple[torch.Tensor, list[torch.Tensor]]:
        step = self.steps[index] = self.steps.get(index, -1) + 1
        total, errors = sum_of(xs), [torch.zeros_like(x) for x in xs]
        for start, shape in shapes:
            m, n = shape[0], math.prod(shape[1:])
            r, here = min(self.rank, m, n), slice(start, start + m * n)
            if len(shape) < 2 or r * (m + n) >= m * n:
                continue  # sent whole
            matrices = [x[here].view(m, n) for x in xs]
            seen = sum_of([matrix @ self.basis(index, start, matrix, r, step) for matrix in matrices])
            left = torch.linalg.qr(seen.to(at_least_single(seen.dtype))).Q.to(seen.dtype)
            rights = [matrix.T @ left for matrix in matrices]
            self.bases[index, start] = sum_of(rights)
            total[here] = (left @ sum_of(rights).T).flatten()
            for error, matrix, right in zip(errors, matrices, rights, strict=True):
                error[here] = (matrix - left @ right.T).flatten()
        return total, errors

    def basis(self, index: int, start: int, matrix: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        """The last step's Q; columns that are zero, and the first Q, are drawn."""
        kept = self.bases.get((index, start))
        random = generator(matrix.device, SEED, index, start, step)
        fresh = torch.randn(matrix.shape[1], rank, generator=random, device=matrix.device).to(matrix.dtype)
        return fresh if kept is None else torch.where(kept.abs().amax(0) > 0, kept, fresh)


def sum_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def quantised(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """Each row rounded to multiples of its scale, a float32: max|row| / 127 (int8) or / 7 (int4); fp8: to E4M3 of row / scale."""
    scale = (rows.abs().amax(1, keepdim=True) / LARGEST[kind]).float()
    scale = scale.masked_fill(scale == 0, 1.0)
    level = (rows / scale).clamp(-LARGEST[kind], LARGEST[kind])
    return (nearest(level.float(), E4M3) if kind == "fp8" else level.round()).to(rows.dtype) * scale.to(rows.dtype)


def generator(device: torch.device, *key: int) -> torch.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def compressed_sum(plan: Plan, backwards: bool = False) -> CompressedSum:
    """The compressed sum of a plan's gradients."""
    found: CompressedSum = COMPRESSIONS.part(plan.wire, "emulate")(plan, backwards)
    return found


COMPRESSIONS.provide("fp16", emulate=lambda plan, backwards: CastSum(torch.float16, backwards))
COMPRESSIONS.provide("bf16", emulate=lambda plan, backwards: CastSum(torch.bfloat16, backwards))
for name in LARGEST:
    COMPRESSIONS.provide(name, emulate=lambda plan, backwards: QuantisedSum(plan.wire))
for name in ("top-k", "random-k", "threshold", "absolute-threshold"):
    COMPRESSIONS.provide(name, emulate=lambda plan, backwards: SparseSum(plan))
COMPRESSIONS.provide("powersgd", emulate=lambda plan, backwards: PowerSum(plan.compression_rank))
