"""Gradient compression: fewer bytes on the wire for memory passes (γ) on the device, and for some of the gradient.

    fp16, bf16    a cast; summed on the wire as it is                      2× of fp32
    int8, int4    x ≈ q·s, s = max|x| / 127 or 7; and fp8 (E4M3)           4×, 8×, 4×
    top-k         the k largest values and their indices                   1% with 4-byte indices: 50×, with 8-byte: 33×
    random-k      k values at places all ranks draw alike: no indices      1%: 100×
    threshold     the values above τ times the root mean square            as many as there are
    powersgd      two factors of rank r a matrix (`powersgd`)              m·n / r(m + n)

The ratio is not the gain. A ring all-reduce sends 2(P−1)/P·n a rank. What can be summed on the wire (casts, random-k,
PowerSGD's factors) keeps that form. Sparse values cannot: every rank must hear every other's, (P−1)·k, so top-1%'s 33×
is 8.3× at P = 8 and a loss from P = 67 on. Integers would overflow: they go in two rounds, each rank summing its 1/P of
all ranks' numbers (all-to-all) and telling the rounded sum (all-gather), which together send what a ring does.

Error feedback: what a rank did not send it adds to its next gradient, so nothing is lost, only late:

    x ← g + e      sent = decode(encode(x))      e ← x − sent      Σ_ranks x = result + Σ_ranks e, always

Compressing pays below the bandwidth at which the bytes saved take as long as γ does
(`cost.advice.compression_break_even`); `benchmarks/compress.py` measures both, and what it does to convergence.

A compressor is written as a generator that *yields* the exchanges it wants. One driver runs them over a process group
(`Running`), another over the gradients of many ranks on one device (`emulate`): the proof of a lossy feature is that
the two agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from meshwright.errors import MeshwrightError
from meshwright.parallel import exchange

Layout = list[tuple[int, torch.Size]]  # where each parameter of a message starts, and its shape
SCALE_BYTES = INDEX_BYTES = 4
LEVELS = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}  # the largest number each holds


@dataclass
class Exchange:
    """One collective asked for: `out` is filled from all ranks' `given` (an all-reduce's are the same tensor)."""

    operation: str  # all_reduce | all_gather | all_to_all
    out: torch.Tensor
    given: torch.Tensor


class Compressor(Protocol):
    """Sums a message over ranks, lossily. One object a rank: it keeps the rank's errors, by message."""

    aligned: bool  # whether a message must hold whole parameters

    def reduce(
        self, index: int, message: torch.Tensor, layout: Layout, rank: int, ranks: int
    ) -> Iterator[Exchange]: ...

    def traffic(self, elements: int, size: int, layout: Layout, ranks: int) -> list[tuple[str, int]]:
        """(operation, bytes of n) of each exchange of a message of `elements` numbers of `size` bytes."""
        ...


class Feedback:
    """What each message has not sent yet."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.errors: dict[int, torch.Tensor] = {}

    def corrected(self, index: int, message: torch.Tensor) -> torch.Tensor:
        return message + self.errors[index] if index in self.errors else message.clone()

    def keep(self, index: int, error: torch.Tensor) -> None:
        if self.on:
            self.errors[index] = error


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

    def traffic(self, elements: int, size: int, layout: Layout, ranks: int) -> list[tuple[str, int]]:
        return [("all_reduce", elements * self.dtype.itemsize)]


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

    def width(self, elements: int, ranks: int) -> int:
        """Numbers of a rank's share: even, since int4 packs two a byte."""
        return -(-elements // (2 * ranks)) * 2

    def traffic(self, elements: int, size: int, layout: Layout, ranks: int) -> list[tuple[str, int]]:
        width = self.width(elements, ranks)
        n = ranks * (SCALE_BYTES + (width // 2 if self.kind == "int4" else width))
        return [("all_to_all", n), ("all_gather", n)]


def quantise(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """[R, C] → [R, bytes] of uint8: a float32 scale, then the numbers."""
    scale = (rows.abs().amax(1, keepdim=True) / LEVELS[kind]).to(torch.float32)
    scale = torch.where(scale > 0, scale, 1.0)
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


class TopK:
    """The `ratio` of largest values, with 4-byte indices, told to every rank."""

    aligned = False

    def __init__(self, ratio: float, feedback: bool = True) -> None:
        self.ratio, self.feedback = ratio, Feedback(feedback)

    def reduce(self, index: int, message: torch.Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message)
        places = x.abs().topk(kept(x.numel(), self.ratio), sorted=False).indices
        yield from tell_sparse(self.feedback, index, message, x, places, ranks)

    def traffic(self, elements: int, size: int, layout: Layout, ranks: int) -> list[tuple[str, int]]:
        return [("all_gather", ranks * kept(elements, self.ratio) * (size + INDEX_BYTES))]


class Threshold:
    """Values above `factor` times the message's root mean square: as many as there are, so counts are told first."""

    aligned = False

    def __init__(self, factor: float, feedback: bool = True) -> None:
        self.factor, self.feedback = factor, Feedback(feedback)

    def reduce(self, index: int, message: torch.Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message)
        places = (x.abs() >= self.factor * x.square().mean().sqrt()).nonzero()[:, 0]
        count = torch.tensor([places.numel()], dtype=torch.int64, device=x.device)
        counts = count.new_empty(ranks)
        yield Exchange("all_gather", counts, count)
        most = max(1, int(counts.max()))
        # A rank with fewer pads with its own first place and value 0: nothing is added there.
        yield from tell_sparse(self.feedback, index, message, x, places, ranks, most)

    def traffic(self, elements: int, size: int, layout: Layout, ranks: int) -> list[tuple[str, int]]:
        """The counts only: how many values follow, the gradient decides."""
        return [("all_gather", ranks * 8)]


def tell_sparse(
    feedback: Feedback, index: int, message: torch.Tensor, x: torch.Tensor, places: torch.Tensor, ranks: int,
    length: int | None = None,
) -> Iterator[Exchange]:  # fmt: skip
    """All ranks hear all ranks' (value, place) pairs; each adds them up in the order of ranks."""
    length = places.numel() if length is None else length
    values, at = x.new_zeros(length), torch.zeros(length, dtype=torch.int32, device=x.device)
    values[: places.numel()], at[: places.numel()] = x[places], places.to(torch.int32)
    feedback.keep(index, x.index_fill(0, places, 0.0))
    mine = torch.cat((values.view(torch.uint8), at.view(torch.uint8)))
    whole = mine.new_empty(ranks, mine.numel())
    yield Exchange("all_gather", whole, mine)
    message.zero_()
    cut = length * x.element_size()
    for row in whole:
        message.index_add_(0, row[cut:].clone().view(torch.int32), row[:cut].clone().view(x.dtype))


class RandomK:
    """Values at places drawn from (seed, message, step), the same on all ranks, so that they can be summed."""

    aligned = False

    def __init__(self, ratio: float, seed: int = 0, feedback: bool = True) -> None:
        self.ratio, self.seed, self.feedback = ratio, seed, Feedback(feedback)
        self.steps: dict[int, int] = {}

    def reduce(self, index: int, message: torch.Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message)
        step = self.steps[index] = self.steps.get(index, -1) + 1
        random = generator(x.device, self.seed, index, step)
        places = torch.randperm(x.numel(), generator=random, device=x.device)[: kept(x.numel(), self.ratio)]
        payload = x[places]
        self.feedback.keep(index, x.index_fill(0, places, 0.0))
        yield Exchange("all_reduce", payload, payload)
        message.zero_().index_copy_(0, places, payload)

    def traffic(self, elements: int, size: int, layout: Layout, ranks: int) -> list[tuple[str, int]]:
        return [("all_reduce", kept(elements, self.ratio) * size)]


def kept(elements: int, ratio: float) -> int:
    return max(1, min(elements, -(-int(elements * ratio * 1e6) // 1_000_000)))


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
    return exchange._all_gather(asked.out.view(-1), asked.given.view(-1), group=group, async_op=True)


def emulate(
    compressors: list[Compressor], index: int, messages: list[torch.Tensor], layout: Layout
) -> list[torch.Tensor]:
    """What each rank would hold, computed on one device: `messages` and `compressors` are all ranks', in order."""
    ranks = len(messages)
    messages = [m.clone() for m in messages]
    steps = [c.reduce(index, m, layout, r, ranks) for r, (c, m) in enumerate(zip(compressors, messages, strict=True))]
    while True:
        asked = [next(step, None) for step in steps]
        requests = [a for a in asked if a is not None]
        if not requests:
            return messages
        perform(requests)


def perform(asked: list[Exchange]) -> None:
    """One exchange of all ranks, in this process's memory."""
    given = [a.given.clone() for a in asked]
    for rank, a in enumerate(asked):
        if a.operation == "all_reduce":
            total = given[0].clone()
            for other in given[1:]:
                total += other
            a.out.copy_(total)
        elif a.operation == "all_gather":
            a.out.view(-1).copy_(torch.cat([g.flatten() for g in given]))
        else:
            a.out.copy_(torch.cat([g.chunk(len(asked))[rank] for g in given]))


def make(name: str, *, ratio: float = 0.01, rank: int = 4, threshold: float = 2.0, seed: int = 0) -> Compressor | None:
    """A compressor by name; None for `none`."""
    from meshwright.parallel.powersgd import PowerSGD

    makers: dict[str, Any] = {
        "none": lambda: None, "fp16": lambda: Cast(torch.float16), "bf16": lambda: Cast(torch.bfloat16),
        "int8": lambda: Quantised("int8"), "int4": lambda: Quantised("int4"), "fp8": lambda: Quantised("fp8"),
        "top-k": lambda: TopK(ratio), "random-k": lambda: RandomK(ratio, seed),
        "threshold": lambda: Threshold(threshold), "powersgd": lambda: PowerSGD(rank, seed),
    }  # fmt: skip
    if name not in makers:
        raise MeshwrightError("MW-COMP-001", f"no compression is called '{name}'", valid=list(makers))
    return makers[name]()
