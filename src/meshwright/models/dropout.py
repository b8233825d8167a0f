"""Dropout that drops the same elements under every plan: masks are computed, not drawn.

    y = x · keep / (1 − r),     keep: hash(seed, step, site, sample, position, feature) ≥ r · 2¹⁶

A random generator gives the n-th caller the n-th number, so a mask depends on who computed what before: on another
number of ranks, another micro-batch or another order it is another mask, and no two layouts train alike. Here every
number is a function of *what* is dropped: the sample by its place in the global batch, the token by its place in the
whole sequence, the feature by its place in the whole width. Any rank computes the part of the mask it needs, alike in
forward, in a layer made again, and in backward, which computes it again: kept are eight bytes a token, where other
stacks keep a mask of one byte an element (`Model.dropout` counts those).

**Why one seed for all tensor-parallel ranks is right, and wrong.** Between the products all of them hold the same
tensor: seeded apart they would drop different elements of it, and their copies would drift away from each other. Inside
a region, or with sequence parallelism between regions too, each holds a *part*: seeded alike they drop the same places
of different parts, every head or every share of the sequence with one and the same mask, and what looks like
independent noise is correlated. Stacks that draw keep two generators, one seeded alike and one by rank, and must choose
rightly at each site. A hash of global places has nothing to choose.

The hash is SplitMix64's mixing of a counter (Steele, Lea & Flood 2014), for the token and then for four features at a
time, 16 bits each: the rate is a whole number of 65,536ths. Dropped are the embedding's output and what attention and
the feed-forward network add to the residual stream.

Attention's probabilities have a rate of their own, `attention_dropout`, as GPT-2 and GPT-3 had: there the places are
sample, head, query and key (`Probabilities`). They never exist as a tensor in fused kernels, which draw numbers that
depend on how they cut the work; so where probabilities are dropped, attention runs in torch's own operations, tile by
tile, on a GPU as on a CPU: several times slower there than a fused kernel. Recent models do without.

Legend: B batch, S sequence, H hidden, N heads, R queries, C keys.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.errors import MeshwrightError

EACH, LEAST = 4, -(2**15)  # features that share a number; the least of its 16-bit parts
GOLDEN, FIRST, SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Moment:
    """Where a training is: the step, and which samples of its global batch the micro-batch holds."""

    seed: int
    step: int
    samples: Sequence[int]


_now: ContextVar[Moment | None] = ContextVar("moment", default=None)


@contextlib.contextmanager
def drawing(moment: Moment) -> Iterator[None]:
    """Within it, forward drops what is to be dropped at this moment."""
    token = _now.set(moment)
    try:
        yield
    finally:
        _now.reset(token)


class Places(Protocol):
    """Where this rank's tokens stand in the sequence; None: 0, 1, 2, …"""

    position_ids: torch.Tensor | None


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Every bit of each number spread over all 64, in place. Products wrap; `>>` brings copies of the sign bit down,
    which are cut off."""
    x ^= (x >> 30).bitwise_and_(2**34 - 1)
    x *= FIRST
    x ^= (x >> 27).bitwise_and_(2**37 - 1)
    x *= SECOND
    x ^= (x >> 31).bitwise_and_(2**33 - 1)
    return x


def parts_of(rate: float) -> int:
    """Of 65,536: how many are dropped."""
    return min(round(rate * 2**16), 2**16 - 1)


def samples(moment: Moment, site: str, device: torch.device) -> torch.Tensor:
    """[B]: a number for each sample, of which those of its tokens are made."""
    digest = hashlib.blake2b(f"{moment.seed}:{moment.step}:{site}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    s = moment.samples
    if isinstance(s, range):  # as most are: made on the device, without waiting for the host
        samples_B = torch.arange(s.start, s.stop, s.step, device=device)
    else:
        samples_B = torch.tensor(list(s), device=device)
    return mixed(samples_B * GOLDEN + key)


def tokens(moment: Moment, site: str, position_S: torch.Tensor) -> torch.Tensor:
    """[B, S]: a number for each token, of which those of its features are made."""
    return mixed(samples(moment, site, position_S.device)[:, None] + position_S * GOLDEN)


def kept(token_BS: torch.Tensor, rate: float, width: int) -> torch.Tensor:
    """[B, S, H]: which elements stay."""
    group_G = torch.arange(-(-width // EACH), device=token_BS.device)
    number_BSG = mixed(token_BS[..., None] + group_G * GOLDEN)
    return number_BSG.view(torch.int16)[..., :width] >= LEAST + parts_of(rate)


def drop(x: torch.Tensor, token_BS: torch.Tensor, rate: float) -> torch.Tensor:
    """x without what is dropped, the rest scaled to make up for it."""
    scale = 1 / (1 - parts_of(rate) / 2**16)
    if x.is_cuda and kernel() is not None and x.dtype in kernel().DTYPES:
        return kernel().drop(x, token_BS, parts_of(rate), scale)
    return (x * scale).masked_fill_(~kept(token_BS, rate, x.shape[-1]).reshape(x.shape), 0.0)


@cache
def kernel() -> Any:
    """All of it in one pass, where Triton is: it comes with torch for GPUs."""
    try:
        from meshwright.models import dropout_kernel
    except ImportError:
        return None
    return dropout_kernel


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token_BS: torch.Tensor, rate: float) -> torch.Tensor:
        ctx.token_BS, ctx.rate = token_BS, rate
        return drop(x, token_BS, rate)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return drop(gradient, ctx.token_BS, ctx.rate), None, None


def moment_of(x: torch.Tensor, site: str) -> Moment:
    moment = _now.get()
    if moment is None or len(moment.samples) != len(x):
        raise MeshwrightError(
            "MW-BUILD-004",
            f"dropout at {site} of {len(x)} samples, at {moment}",
            why="What is dropped depends on the step and the samples",
            fix="with drawing(Moment(seed, step, samples)): model(x)",
        )
    return moment


class Dropout(nn.Module):
    """Drops a share `rate` of [B, S, H], or of [B, H], when training. `site` names it in the whole model; `share` says
    which of how many equal parts of the sequence this rank has."""

    def __init__(self, rate: float, site: str, geometry: Places | None = None) -> None:
        super().__init__()
        self.rate, self.site, self.geometry = rate, site, geometry
        self.share = (0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.rate:
            return x
        return _Drop.apply(x, tokens(moment_of(x, self.site), self.site, self.position_ids(x)), self.rate)

    def position_ids(self, x: torch.Tensor) -> torch.Tensor:
        """Positions of this rank's tokens in the whole sequence; of a row without one, 0."""
        length, (index, parts) = x.shape[1] if x.ndim > 2 else 1, self.share
        known = self.geometry.position_ids if self.geometry is not None else None
        whole = torch.arange(length * parts, device=x.device) if known is None else known
        return whole[index * length : (index + 1) * length].to(x.device)


def make_dropout(rate: float, site: str, geometry: Places | None = None) -> nn.Module:
    return Dropout(rate, site, geometry) if rate else nn.Identity()


@dataclass(frozen=True)
class Dropped:
    """Which of attention's probabilities are dropped: of these samples and heads, by the places of query and key."""

    sample_B: torch.Tensor
    heads: range
    rate: float

    def part(self, index: int, parts: int) -> Dropped:
        """Of one of several equal runs of the heads."""
        each = len(self.heads) // parts
        return replace(self, heads=self.heads[index * each : (index + 1) * each])

    def factor(self, queries_R: torch.Tensor, keys_C: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[B, N, R, C]: 0 where dropped, else what makes up for it. Places of keys in order."""
        device, drops = self.sample_B.device, parts_of(self.rate)
        heads_N = torch.arange(self.heads.start, self.heads.stop, device=device)
        number_BN = mixed(self.sample_B[:, None] + heads_N * GOLDEN)
        number_BNR = mixed(number_BN[..., None] + queries_R.to(device) * GOLDEN)
        stays = [self._of_run(number_BNR, run) >= LEAST + drops for run in runs_in(keys_C)]
        return torch.cat(stays, dim=-1).to(dtype).div_(1 - drops / 2**16)

    def _of_run(self, number_BNR: torch.Tensor, keys: range) -> torch.Tensor:
        first = keys.start // EACH
        group_G = torch.arange(first, -(-keys.stop // EACH), device=number_BNR.device)
        number_BNRG = mixed(number_BNR[..., None] + group_G * GOLDEN)
        return number_BNRG.view(torch.int16)[..., keys.start - first * EACH : keys.stop - first * EACH]


def runs_in(places: torch.Tensor) -> list[range]:
    """Places in order, as runs of neighbours."""
    ends = ((places[1:] - places[:-1]) != 1).nonzero().flatten().tolist()
    starts = [0, *(end + 1 for end in ends)]
    return [range(int(places[a]), int(places[b]) + 1) for a, b in zip(starts, [*ends, len(places) - 1], strict=True)]


class Probabilities(nn.Module):
    """Says which probabilities of attention are dropped when training; None: none. `share` says which of how many equal
    runs of the heads this rank has."""

    def __init__(self, rate: float, site: str) -> None:
        super().__init__()
        self.rate, self.site = rate, site
        self.share = (0, 1)

    def forward(self, q_BNSD: torch.Tensor) -> Dropped | None:
        if not self.training or not self.rate:
            return None
        count, (index, _) = q_BNSD.shape[1], self.share
        sample_B = samples(moment_of(q_BNSD, self.site), self.site, q_BNSD.device)
        return Dropped(sample_B, range(index * count, (index + 1) * count), self.rate)
