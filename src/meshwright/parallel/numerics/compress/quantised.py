"""Dense compression: a cast to 16 bits, or integers and fp8 with a scale, of every value.

    fp16, bf16    a cast; the collective sums 16-bit numbers as they are
    int8, int4    x ≈ q·s, s = max|x| / 127 or 7; fp8 (E4M3) likewise, s = max|x| / 448

A sum of integers would overflow, so quantised values are reduced in two rounds: an all-to-all, after which each rank
sums its 1/P of all ranks' values in full precision, and an all-gather of the sums, quantised again. Together they send
what a ring all-reduce does.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.parallel.numerics.compress.base import Exchange, Feedback, Layout

SCALE_BYTES = 4
LEVELS = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}  # the largest number each format holds


class Cast:
    """fp16 or bf16 numbers are sent and summed: over P ranks, log₂P more rounded additions."""

    aligned = False

    def __init__(self, dtype: torch.dtype, feedback: bool = False) -> None:
        self.dtype, self.feedback = dtype, Feedback(feedback)

    def reduce(self, index: int, message: Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        payload = self._cast(index, message)
        yield Exchange("all_reduce", payload, payload)
        message.copy_(payload)

    def scatter(self, index: int, rows: Tensor, layout: Layout, rank: int, out: Tensor) -> Iterator[Exchange]:
        payload = self._cast(index, rows)
        mine = payload.new_empty(out.shape)
        yield Exchange("reduce_scatter", mine, payload)
        out.copy_(mine)

    def _cast(self, index: int, message: Tensor) -> Tensor:
        x = self.feedback.corrected(index, message) if self.feedback.on else message
        payload = x.to(self.dtype)
        if self.feedback.on:
            self.feedback.keep(index, x - payload.to(x.dtype))
        return payload


class Quantised:
    """int8, int4 or fp8 with one scale for each rank's share of a message, in two rounds."""

    aligned = False

    def __init__(self, kind: str, feedback: bool = True) -> None:
        self.kind, self.feedback = kind, Feedback(feedback)

    def reduce(self, index: int, message: Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        length, dtype, width = message.numel(), message.dtype, self.width(message.numel(), ranks)
        rows = padded(self.feedback.corrected(index, message), width * ranks - length).view(ranks, width)
        payload = quantise(rows, self.kind)
        error = rows.sub_(dequantise(payload, self.kind, dtype))
        self.feedback.keep(index, error.view(-1)[:length])
        del rows

        arrived = torch.empty_like(payload)
        yield Exchange("all_to_all", arrived, payload)
        del payload
        total = dequantise(arrived, self.kind, dtype).sum(0, keepdim=True)
        mine = quantise(total, self.kind)
        # The rank that quantised the sum keeps its error.
        error[rank] += (total - dequantise(mine, self.kind, dtype))[0]
        self.feedback.keep(index, error.view(-1)[:length])
        del error, total

        whole = torch.empty_like(arrived)
        del arrived
        yield Exchange("all_gather", whole, mine)
        message.copy_(dequantise(whole, self.kind, dtype).flatten()[:length])

    def scatter(self, index: int, rows: Tensor, layout: Layout, rank: int, out: Tensor) -> Iterator[Exchange]:
        length, dtype = rows.shape[1], rows.dtype
        x = padded(self.feedback.corrected(index, rows), length % 2)
        payload = quantise(x, self.kind)
        self.feedback.keep(index, x.sub_(dequantise(payload, self.kind, dtype))[:, :length])
        del x
        arrived = torch.empty_like(payload)
        yield Exchange("all_to_all", arrived, payload)
        del payload
        out.copy_(dequantise(arrived, self.kind, dtype).sum(0)[:length])

    def width(self, elements: int, ranks: int) -> int:
        """Values in a rank's share: an even number, since int4 packs two into a byte."""
        return -(-elements // (2 * ranks)) * 2


def padded(x: Tensor, zeros: int) -> Tensor:
    """`x` with zeros after its last dimension; `x` itself if there are none to add."""
    return torch.nn.functional.pad(x, (0, zeros)) if zeros else x


def quantise(rows: Tensor, kind: str) -> Tensor:
    """[R, C] → [R, bytes] of uint8: a float32 scale, then the numbers."""
    scale = (rows.abs().amax(1, keepdim=True) / LEVELS[kind]).to(torch.float32)
    scale = torch.where(scale == 0, 1.0, scale)  # a scale that is not finite is kept, and so are the values it scales
    level = rows / scale
    if kind == "fp8":
        body = level.clamp_(-LEVELS[kind], LEVELS[kind]).to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        whole = level.round_().clamp_(-LEVELS[kind], LEVELS[kind])
        body = whole.to(torch.int8).view(torch.uint8) if kind == "int8" else _nibbles(whole)
    return torch.cat((scale.view(torch.uint8), body), 1)


def dequantise(payload: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    scale = payload[:, :SCALE_BYTES].flatten().clone().view(torch.float32).to(dtype)[:, None]
    body = payload[:, SCALE_BYTES:].contiguous()
    if kind == "fp8":
        return body.view(torch.float8_e4m3fn).to(torch.float32).to(dtype).mul_(scale)
    if kind == "int8":
        return body.view(torch.int8).to(dtype).mul_(scale)
    return torch.stack((body & 15, body >> 4), 2).flatten(1).to(dtype).sub_(8).mul_(scale)


def _nibbles(whole: Tensor) -> Tensor:
    shifted = whole.add_(8).to(torch.uint8)
    return shifted[:, ::2] | (shifted[:, 1::2] << 4)
