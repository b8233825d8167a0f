"""Dropout that drops the same elements under every plan: masks are computed from a hash, not drawn from a generator.

    y = x · keep / (1 − r),     keep: hash(seed, step, site, sample, position, feature) ≥ r · 2¹⁶

A random generator returns the n-th number to the n-th call, so a mask depends on the calls before it: another number of
ranks, another micro-batch or another order gives another mask, and no two layouts train the same. Here every number is a
function of the *position* of the element: the sample in the global batch, the token in the whole sequence, the feature
in the whole width. Each rank computes the part of the mask it needs, with the same result in forward, in a recomputed
layer and in backward, which computes the mask a second time. Eight bytes per token are saved for backward; other
frameworks save a mask of one byte per element (`Model.dropout` counts those).

**Why neither one seed for all tensor-parallel ranks nor one seed per rank is right.** Between tensor-parallel regions all ranks have the
same tensor: with different seeds they would drop different elements, and their copies would diverge. Inside a region, or
with sequence parallelism also between regions, each rank has a *part*: with equal seeds they drop the same positions of
different parts, so every head or every part of the sequence gets the same mask, and the noise is correlated. Frameworks
that draw random numbers keep two generators, one with the same seed on all ranks and one with a seed per rank, and must
use the right one at each site. A hash of global positions needs no such choice.

The hash is SplitMix64's mixing of a counter (Steele, Lea & Flood 2014), for the token and then for four features at a
time, 16 bits each: the rate is a multiple of 1/65,536. Dropout applies to the output of the embedding and to what
attention and the feed-forward network add to the residual stream.

Attention probabilities have a separate rate, `attention_dropout`, as in GPT-2 and GPT-3: their positions are sample,
head, query and key (`Probabilities`). Fused kernels never store the probabilities, and draw numbers that depend on how
they tile the work; so with attention dropout, attention runs in plain torch operations, tile by tile, also on a GPU,
where this is several times slower than a fused kernel. Recent models do not use it.

Legend: B batch, S sequence, H hidden, N heads, R queries, C keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.errors import MeshwrightError
from meshwright.models.step_context import current

FEATURES_PER_NUMBER = 4  # features that share one 64-bit number, 16 bits each
SMALLEST = -(2**15)  # the smallest value of a 16-bit part
GOLDEN, FIRST, SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
INVERSE = pow(GOLDEN, -1, 2**64) - 2**64  # times GOLDEN it is 1, modulo 2⁶⁴


class HasPositions(Protocol):
    """Has the positions of this rank's tokens in the sequence; None means 0, 1, 2, …"""

    position_ids: Tensor | None


def mixed(x: Tensor) -> Tensor:
    """Mix the 64 bits of each number, in place. Products wrap around; `>>` copies the sign bit, and the mask removes
    those copies."""
    x ^= (x >> 30).bitwise_and_(2**34 - 1)
    x *= FIRST
    x ^= (x >> 27).bitwise_and_(2**37 - 1)
    x *= SECOND
    x ^= (x >> 31).bitwise_and_(2**33 - 1)
    return x


def parts_of(rate: float) -> int:
    """The rate as a number of 65,536ths."""
    return min(round(rate * 2**16), 2**16 - 1)


def key_of(text: str) -> int:
    """64 bits of the text's digest."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def sample_hashes(seed: int, step: int, samples: Sequence[int], device: torch.device) -> Tensor:
    """[B]: a hash of each sample of the global batch in this step; every site mixes its own key into it."""
    if isinstance(samples, range):  # the usual case: created on the device, without waiting for the host
        samples_B = torch.arange(samples.start, samples.stop, samples.step, device=device)
    else:
        samples_B = torch.tensor(list(samples), device=device)
    return mixed(samples_B * GOLDEN + key_of(f"{seed}:{step}"))


def advanced(state: Tensor, numbers: Tensor | int) -> Tensor:
    """state + GOLDEN · numbers, modulo 2⁶⁴.

    `numbers` may be an `arange`, and the compiler computes `arange` times a constant as an index: with exact integers, of 32 bits on a GPU, so that
    GOLDEN is out of range there. The product is therefore one of computed numbers: (state · GOLDEN⁻¹ + numbers) · GOLDEN."""
    return (state * INVERSE + numbers).mul_(GOLDEN)


def counted(numbers: range, device: torch.device) -> Tensor:
    """Consecutive numbers as a tensor."""
    return torch.arange(numbers.start, numbers.stop, device=device)


def tokens(sample_B: Tensor, position_S: Tensor) -> Tensor:
    """[B, S]: a hash for each token, from which the hashes of its features are computed."""
    return mixed(advanced(sample_B[:, None], position_S))


def kept(token_BS: Tensor, rate: float, width: int) -> Tensor:
    """[B, S, H]: True for the elements that are kept."""
    groups = range(-(-width // FEATURES_PER_NUMBER))
    number_BSG = mixed(advanced(token_BS[..., None], counted(groups, token_BS.device)))
    if torch.compiler.is_compiling():  # the same 16 bits by arithmetic, which fuses; a view of them would be stored
        shift_4 = torch.arange(FEATURES_PER_NUMBER, device=token_BS.device) * 16
        part_BSG4 = ((number_BSG[..., None] >> shift_4) & 0xFFFF) ^ 0x8000
        return part_BSG4.flatten(-2)[..., :width] >= parts_of(rate)
    return number_BSG.view(torch.int16)[..., :width] >= SMALLEST + parts_of(rate)


def drop(x: Tensor, token_BS: Tensor, rate: float) -> Tensor:
    """x with the dropped elements set to zero and the kept ones scaled by 1 / (1 − rate)."""
    scale = 1 / (1 - parts_of(rate) / 2**16)
    if x.is_cuda and not torch.compiler.is_compiling() and kernel() is not None and x.dtype in kernel().DTYPES:
        return kernel().drop(x, token_BS, parts_of(rate), scale)
    dropped = ~kept(token_BS, rate, x.shape[-1]).reshape(x.shape)
    if torch.compiler.is_compiling():
        return (x * scale).masked_fill(dropped, 0.0)  # not in place: see `parallel.exchange.in_order`
    return (x * scale).masked_fill_(dropped, 0.0)


@cache
def kernel() -> Any:
    """The one-pass Triton kernel, or None without Triton (torch for GPUs includes it)."""
    try:
        from meshwright.models import dropout_kernel
    except ImportError:
        return None
    return dropout_kernel


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token_BS: Tensor, rate: float) -> Tensor:
        ctx.token_BS, ctx.rate = token_BS, rate
        return drop(x, token_BS, rate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return drop(gradient, ctx.token_BS, ctx.rate), None, None


class DrawsForSamples(nn.Module):
    """A module that drops elements by the samples of the current step (`step_context`)."""

    def __init__(self, rate: float, site: str) -> None:
        super().__init__()
        self.rate, self.site = rate, site
        self.key: int | Tensor = key_of(site)

    def prepare(self, device: torch.device) -> None:
        """Make the key of the site an input of compiled graphs: as a number it would be a constant, and every layer another graph."""
        self.key = torch.tensor(key_of(self.site), device=device)

    def sample_hashes(self, x: Tensor) -> Tensor:
        """[B]: a hash of each sample at this site, from which the hashes of its tokens are computed."""
        samples_B = current().samples_B
        if samples_B is None or len(samples_B) != len(x):
            raise MeshwrightError(
                "MW-BUILD-004",
                f"dropout at {self.site} has a batch of {len(x)} samples, and the step names "
                + ("none" if samples_B is None else str(len(samples_B))),
                why="The dropped elements depend on the step and on the samples of the micro-batch",
                fix="with within(samples_B=sample_hashes(seed, step, samples, device)): model(x)",
            )
        return mixed(samples_B + self.key)


class Dropout(DrawsForSamples):
    """Drops a share `rate` of [B, S, H] or [B, H] in training. `site` is its name in the whole model; `share` = (index,
    count) is this rank's part of a sequence divided into `count` equal parts."""

    def __init__(self, rate: float, site: str, geometry: HasPositions | None = None) -> None:
        super().__init__(rate, site)
        self.geometry = geometry
        self.share = (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        return _Drop.apply(x, self.tokens(x), self.rate)

    def tokens(self, x: Tensor) -> Tensor:
        """A hash for each token, from which the hashes of its features are computed."""
        return tokens(self.sample_hashes(x), self.positions(x))

    def positions(self, x: Tensor) -> Tensor:
        """The positions of this rank's tokens in the whole sequence; 0 for rows without a sequence."""
        length, (index, _) = x.shape[1] if x.ndim > 2 else 1, self.share
        own = range(index * length, (index + 1) * length)
        positions = self.geometry.position_ids if self.geometry is not None else None
        if positions is None:
            return counted(own, x.device)
        return positions[own.start : own.stop].to(x.device)


class InputDropout(Dropout):
    """Drops from the input of a product x Wᵀ. Backward computes the mask and the dropped input a second time, so that of several products with
    one input this input is kept once. `first`: the first feature that this rank has of a wider input."""

    first = 0

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return F.linear(x, weight)
        group, before = divmod(self.first, FEATURES_PER_NUMBER)
        token_BS = advanced(self.tokens(x), group)
        return _DroppedProduct.apply(x, weight, token_BS, self.rate, before)


class _DroppedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, token_BS: Tensor, rate: float, before: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.drop = lambda x: drop(F.pad(x, (before, 0)) if before else x, token_BS, rate)[..., before:]
        return F.linear(ctx.drop(x), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = ctx.drop(gradient @ weight) if ctx.needs_input_grad[0] else None
        return dx, gradient.flatten(0, -2).T @ ctx.drop(x).flatten(0, -2), None, None, None


def make_dropout(rate: float, site: str, geometry: HasPositions | None = None) -> nn.Module:
    return Dropout(rate, site, geometry) if rate else nn.Identity()


@dataclass(frozen=True)
class Dropped:
    """Selects the attention probabilities to drop, for these samples and heads, by the positions of query and key."""

    sample_B: Tensor
    heads: range
    rate: float

    def part(self, index: int, parts: int) -> Dropped:
        """The part for one of several equal ranges of the heads."""
        count = len(self.heads) // parts
        return replace(self, heads=self.heads[index * count : (index + 1) * count])

    def factor(self, queries_R: Tensor, keys_C: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, N, R, C]: 0 for dropped probabilities, 1 / (1 − rate) for the others. Key positions must be sorted."""
        device, drops = self.sample_B.device, parts_of(self.rate)
        number_BN = mixed(advanced(self.sample_B[:, None], counted(self.heads, device)))
        number_BNR = mixed(advanced(number_BN[..., None], queries_R.to(device)))
        keep = [self._numbers_of_run(number_BNR, run) >= SMALLEST + drops for run in runs_in(keys_C)]
        return torch.cat(keep, dim=-1).to(dtype).div_(1 - drops / 2**16)

    def _numbers_of_run(self, number_BNR: Tensor, keys: range) -> Tensor:
        first = keys.start // FEATURES_PER_NUMBER
        groups = range(first, -(-keys.stop // FEATURES_PER_NUMBER))
        number_BNRG = mixed(advanced(number_BNR[..., None], counted(groups, number_BNR.device)))
        return number_BNRG.view(torch.int16)[
            ..., keys.start - first * FEATURES_PER_NUMBER : keys.stop - first * FEATURES_PER_NUMBER
        ]


def runs_in(positions: Tensor) -> list[range]:
    """Split sorted positions into ranges of consecutive numbers."""
    ends = ((positions[1:] - positions[:-1]) != 1).nonzero().flatten().tolist()
    starts = [0, *(end + 1 for end in ends)]
    return [
        range(int(positions[a]), int(positions[b]) + 1)
        for a, b in zip(starts, [*ends, len(positions) - 1], strict=True)
    ]


class Probabilities(DrawsForSamples):
    """Return which attention probabilities are dropped in training, or None without dropout. `share` = (index, count) is this
    rank's part of the heads, divided into `count` equal parts."""

    def __init__(self, rate: float, site: str) -> None:
        super().__init__(rate, site)
        self.share = (0, 1)

    def forward(self, q_BNSD: Tensor) -> Dropped | None:
        if not self.training or not self.rate:
            return None
        count, (index, _) = q_BNSD.shape[1], self.share
        return Dropped(self.sample_hashes(q_BNSD), range(index * count, (index + 1) * count), self.rate)
