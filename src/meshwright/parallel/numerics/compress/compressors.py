"""Gradient compression: fewer bytes on the wire for memory passes (γ) on the device, and for some of the gradient.

    fp16, bf16    a cast; summed on the wire as it is                      2× of fp32
    int8, int4    x ≈ q·s, s = max|x| / 127 or 7; and fp8 (E4M3)           4×, 8×, 4×
    top-k         the k largest values and their indices                   1% with 4-byte indices: 50×, with 8-byte: 33×
    random-k      k values at places all ranks draw alike: no indices      1%: 100×
    threshold     the values above τ times the root mean square            τ = 2 of normal ones: 4.6%, 11×
    powersgd      two factors of rank r a matrix (`powersgd`)              m·n / r(m + n)

The ratio is not the gain. A ring all-reduce sends 2(P−1)/P·n a rank. What can be summed on the wire (casts, random-k,
PowerSGD's factors) keeps that form. Sparse values cannot: every rank must hear every other's, (P−1)·k, so top-1%'s 33×
is 8.3× at P = 8 and a loss from P = 67 on. Integers would overflow: they go in two rounds, each rank summing its 1/P of
all ranks' numbers (all-to-all) and telling the rounded sum (all-gather), which together send what a ring does.

Under ZeRO a rank wants its own 1/P of the sum only, so nothing is told to all: casts and random-k are reduce-scattered,
quantised and sparse values go to their owner in one all-to-all (`scatter`), whose sum is wide and exact. The other way,
an all-reduce of which each rank takes its shard, would send twice as much, and round the sum once more. PowerSGD has no
such form: its factors are of whole matrices, so all ranks hear them, and each makes its own rows of their product.

Error feedback: what a rank did not send it adds to its next gradient, so nothing is lost, only late:

    x ← g + e      sent = decode(encode(x))      e ← x − sent      Σ_ranks x = result + Σ_ranks e, always

A number that is not finite is heard at once: it spoils the sum on every rank, so that all of them skip the step, and is not kept,
else it would spoil every step after. And errors are of scaled gradients where the loss is scaled: they follow its scale (`rescale`).

Compressing pays below the bandwidth at which the bytes saved take as long as γ does
(`cost.advice.compression_break_even`); `benchmarks/compress.py` measures both, and what it does to convergence.

A compressor is written as a generator that *yields* the exchanges it wants. One driver runs them over a process group
(`Running`), another over the gradients of many ranks on one device (`emulate`): the proof of a lossy feature is that
the two agree. In torch's own DDP they run as a communication hook (`comm_hook`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.parallel import exchange

Layout = list[tuple[int, torch.Size]]  # where each parameter of a message starts, and its shape
SCALE_BYTES = 4
LEVELS = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}  # the largest number each holds


@dataclass
class Exchange:
    """One collective asked for: `out` is filled from all ranks' `given` (an all-reduce's are the same tensor)."""

    operation: str  # all_reduce | all_gather | all_to_all | reduce_scatter
    out: torch.Tensor
    given: torch.Tensor


class Feedback:
    """What each message has not sent yet."""

    def __init__(self, on: bool) -> None:
        self.on, self.claimed = on, False
        self.errors: dict[int, torch.Tensor] = {}

    def claim(self) -> None:
        """By a buffer, whose messages are counted from 0: those of a second one would be taken for them."""
        if self.claimed:
            raise MeshwrightError(
                "MW-COMP-003",
                "one compressor for two buffers of gradients",
                why="What it kept back of one would be added to the other",
                fix="make another",
            )
        self.claimed = True

    def corrected(self, index: int, message: torch.Tensor) -> torch.Tensor:
        return message + self.errors[index] if index in self.errors else message.clone()

    def keep(self, index: int, error: torch.Tensor) -> None:
        if self.on:
            self.errors[index] = error.nan_to_num_(0.0, 0.0, 0.0)

    def rescale(self, factor: float) -> None:
        """The loss is scaled so many times what it was."""
        for error in self.errors.values():
            error.mul_(factor)


class Compressor(Protocol):
    """Sums a message over ranks, lossily. One object a rank and buffer: it keeps the rank's errors, by message."""

    aligned: bool  # whether a message must hold whole parameters
    feedback: Feedback

    def reduce(
        self, index: int, message: torch.Tensor, layout: Layout, rank: int, ranks: int
    ) -> Iterator[Exchange]: ...

    def scatter(
        self, index: int, rows: torch.Tensor, layout: Layout, rank: int, out: torch.Tensor
    ) -> Iterator[Exchange]:
        """Rows [ranks, C]: `out` becomes the sum of all ranks' row `rank`. The layout is of columns: where each
        parameter's part of a row starts, and its shape before it was cut."""
        ...


class Cast:
    """fp16 or bf16 on the wire, summed there: of P ranks, log₂P more rounded additions."""

    aligned = False

    def __init__(self, dtype: torch.dtype, feedback: bool = False) -> None:
        self.dtype, self.feedback = dtype, Feedback(feedback)

    def reduce(self, index: int, message: torch.Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message) if self.feedback.on else message
        payload = x.to(self.dtype)
        if self.feedback.on:
            self.feedback.keep(index, x - payload.to(x.dtype))
        yield Exchange("all_reduce", payload, payload)
        message.copy_(payload)

    def scatter(
        self, index: int, rows: torch.Tensor, layout: Layout, rank: int, out: torch.Tensor
    ) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, rows) if self.feedback.on else rows
        payload = x.to(self.dtype)
        if self.feedback.on:
            self.feedback.keep(index, x - payload.to(x.dtype))
        mine = payload.new_empty(out.shape)
        yield Exchange("reduce_scatter", mine, payload)
        out.copy_(mine)


class Quantised:
    """int8, int4 or fp8 with one scale for each rank's share of a message, in two rounds."""

    aligned = False

    def __init__(self, kind: str, feedback: bool = True) -> None:
        self.kind, self.feedback = kind, Feedback(feedback)

    def reduce(self, index: int, message: torch.Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message)
        width = self.width(x.numel(), ranks)
        rows = torch.nn.functional.pad(x, (0, width * ranks - x.numel())).view(ranks, width)
        payload = quantise(rows, self.kind)
        error = rows - dequantise(payload, self.kind, x.dtype)

        arrived = torch.empty_like(payload)
        yield Exchange("all_to_all", arrived, payload)
        total = dequantise(arrived, self.kind, x.dtype).sum(0, keepdim=True)
        mine = quantise(total, self.kind)
        error[rank] += (total - dequantise(mine, self.kind, x.dtype))[0]  # the sum's own error stays with its maker
        self.feedback.keep(index, error.flatten()[: x.numel()])

        whole = torch.empty_like(payload)
        yield Exchange("all_gather", whole, mine)
        message.copy_(dequantise(whole, self.kind, x.dtype).flatten()[: x.numel()])

    def scatter(
        self, index: int, rows: torch.Tensor, layout: Layout, rank: int, out: torch.Tensor
    ) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, rows)
        length = x.shape[1]
        payload = quantise(torch.nn.functional.pad(x, (0, length % 2)), self.kind)
        self.feedback.keep(index, x - dequantise(payload, self.kind, x.dtype)[:, :length])
        arrived = torch.empty_like(payload)
        yield Exchange("all_to_all", arrived, payload)
        out.copy_(dequantise(arrived, self.kind, x.dtype).sum(0)[:length])

    def width(self, elements: int, ranks: int) -> int:
        """Numbers of a rank's share: even, since int4 packs two a byte."""
        return -(-elements // (2 * ranks)) * 2


def quantise(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """[R, C] → [R, bytes] of uint8: a float32 scale, then the numbers."""
    scale = (rows.abs().amax(1, keepdim=True) / LEVELS[kind]).to(torch.float32)
    scale = torch.where(scale == 0, 1.0, scale)  # one that is not finite stays, and so does what it scales
    level = rows / scale
    if kind == "fp8":
        body = level.clamp(-LEVELS[kind], LEVELS[kind]).to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        whole = level.round().clamp(-LEVELS[kind], LEVELS[kind])
        body = whole.to(torch.int8).view(torch.uint8) if kind == "int8" else _nibbles(whole)
    return torch.cat((scale.view(torch.uint8), body), 1)


def dequantise(payload: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    scale = payload[:, :SCALE_BYTES].flatten().clone().view(torch.float32).to(dtype)[:, None]
    body = payload[:, SCALE_BYTES:].contiguous()
    if kind == "fp8":
        return body.view(torch.float8_e4m3fn).to(torch.float32).to(dtype) * scale
    if kind == "int8":
        return body.view(torch.int8).to(dtype) * scale
    return (torch.stack((body & 15, body >> 4), 2).flatten(1).to(dtype) - 8) * scale


def _nibbles(whole: torch.Tensor) -> torch.Tensor:
    shifted = (whole + 8).to(torch.uint8)
    return shifted[:, ::2] | (shifted[:, 1::2] << 4)


def generator(device: torch.device, *key: int) -> torch.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


# Drivers


class Running:
    """A reduction under way over a process group: started at once, each `wait` finishes one exchange."""

    def __init__(self, steps: Iterator[Exchange], group: ProcessGroup) -> None:
        self.steps, self.group = steps, group
        self.work: Any = None
        self._next()

    def _next(self) -> bool:
        asked = next(self.steps, None)
        self.work = None if asked is None else issue(asked, self.group)
        return asked is not None

    def wait(self) -> bool:
        """True while there is more to wait for."""
        if self.work is None:
            return False
        self.work.wait()
        return self._next()


def issue(asked: Exchange, group: ProcessGroup) -> Any:
    if asked.operation == "all_reduce":
        return distributed.all_reduce(asked.given, group=group, async_op=True)
    if asked.operation == "all_to_all":
        return distributed.all_to_all_single(asked.out, asked.given, group=group, async_op=True)
    if asked.operation == "reduce_scatter":
        return exchange._reduce_scatter(asked.out, asked.given.view(-1), group=group, async_op=True)
    return exchange._all_gather(asked.out.view(-1), asked.given.view(-1), group=group, async_op=True)


def compressor_of(plan: Plan) -> Compressor | None:
    return make(
        plan.wire, ratio=plan.compression_ratio, rank=plan.compression_rank, threshold=plan.compression_threshold
    )


def make(name: str, *, ratio: float = 0.01, rank: int = 4, threshold: float = 2.0, seed: int = 0) -> Compressor | None:
    """A compressor by name; None for `none`."""
    from meshwright.parallel.numerics.compress.powersgd import PowerSGD
    from meshwright.parallel.numerics.compress.sparse import RandomK, Threshold, TopK

    makers: dict[str, Any] = {
        "none": lambda: None, "fp16": lambda: Cast(torch.float16), "bf16": lambda: Cast(torch.bfloat16),
        "int8": lambda: Quantised("int8"), "int4": lambda: Quantised("int4"), "fp8": lambda: Quantised("fp8"),
        "top-k": lambda: TopK(ratio), "random-k": lambda: RandomK(ratio, seed),
        "threshold": lambda: Threshold(threshold), "powersgd": lambda: PowerSGD(rank, seed),
    }  # fmt: skip
    if name not in makers:
        raise MeshwrightError("MW-COMP-001", f"no compression is called '{name}'", valid=list(makers))
    if not (0 < ratio <= 1 and rank >= 1 and threshold > 0):
        raise MeshwrightError(
            "MW-COMP-002",
            f"ratio={ratio:g}, rank={rank}, threshold={threshold:g}",
            valid=["0 < ratio <= 1", "rank >= 1", "threshold > 0"],
        )
    return makers[name]()
