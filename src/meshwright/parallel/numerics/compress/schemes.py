"""The schemes of gradient compression: some of the values with their indices (sparse), or all of them in fewer bits (dense).

**Sparse**

    top-k       the k = r·n largest values and their indices     every rank receives every other's: (P−1)·k pairs
    random-k    k = r·n at indices drawn from (seed, step)       the same indices on all ranks: summed like any tensor
    threshold   all values above τ·√(mean x²)                    a varying number: counts are exchanged first

Under ZeRO (`scatter`) each rank sends P short lists of equal length, one to each owner: k = r·n/P values of what that
owner keeps, or, with a threshold, as many as the longest list of any rank has.

**Dense**

    fp16, bf16    a cast; the collective sums 16-bit numbers as they are
    int8, int4    x ≈ q·s, s = max|x| / 127 or 7; fp8 (E4M3) likewise, s = max|x| / 448

A sum of integers would overflow, so quantised values are reduced in two rounds: an all-to-all, after which each rank
sums its 1/P of all ranks' values in full precision, and an all-gather of the sums, quantised again. Together they send
what a ring all-reduce does.
"""

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from meshwright.parallel.numerics.compress.base import Exchange, Feedback, Layout, generator

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


class TopK:
    """The largest values, a share `ratio` of all, with 4-byte indices; every rank receives them."""

    aligned = False

    def __init__(self, ratio: float, feedback: bool = True) -> None:
        self.ratio, self.feedback = ratio, Feedback(feedback)

    def reduce(self, index: int, message: Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        payload, length = self._largest(index, message)
        yield from send_to_all(message, payload, length, ranks)

    def scatter(self, index: int, rows: Tensor, layout: Layout, rank: int, out: Tensor) -> Iterator[Exchange]:
        payload, length = self._largest(index, rows)
        yield from send_to_owners(out, payload, length, rows.dtype)

    def _largest(self, index: int, message: Tensor) -> tuple[Tensor, int]:
        """The pairs of a message, or of each of its rows, and their number."""
        x = self.feedback.corrected(index, message)
        rows = x.view(-1, x.shape[-1])
        indices = rows.abs().topk(count_kept(rows.shape[1], self.ratio), dim=1, sorted=False).indices
        payload = take_pairs(rows, list(indices), indices.shape[1])
        self.feedback.keep(index, x)
        return payload, indices.shape[1]


class Threshold:
    """Values above `factor` times the message's root mean square, or above `factor` itself (`absolute`): a varying number, so counts are
    exchanged first. An absolute threshold is compared with a rank's part of the averaged gradient, error included."""

    aligned = False

    def __init__(self, factor: float, feedback: bool = True, absolute: bool = False) -> None:
        self.factor, self.absolute, self.feedback = factor, absolute, Feedback(feedback)
        self.sent_counts: dict[int, list[int]] = {}  # by message: how many values were sent, in each reduction

    def reduce(self, index: int, message: Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message)
        chosen = [self._above(x).nonzero()[:, 0]]
        most = yield from self._longest(index, torch.tensor([len(chosen[0])], device=x.device), ranks)
        payload = take_pairs(x[None], chosen, most)
        self.feedback.keep(index, x)
        del x, chosen
        yield from send_to_all(message, payload, most, ranks)

    def scatter(self, index: int, rows: Tensor, layout: Layout, rank: int, out: Tensor) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, rows)
        above = self._above(x)
        most = yield from self._longest(index, above.sum(1).max()[None], len(rows))
        payload = take_pairs(x, [row.nonzero()[:, 0] for row in above], most)
        self.feedback.keep(index, x)
        del x, above
        yield from send_to_owners(out, payload, most, rows.dtype)

    def _above(self, x: Tensor) -> Tensor:
        """Mark values that are not below the threshold: NaN is not below, so it is sent."""
        smallest = self.factor if self.absolute else self.factor * x.square().mean().sqrt()
        return ~(x.abs() < smallest)

    def _longest(self, index: int, count: Tensor, ranks: int) -> Generator[Exchange, None, int]:
        """The length of the longest list of any rank, at least 1; it is recorded for the traffic check."""
        counts = count.new_empty(ranks)
        yield Exchange("all_gather", counts, count)
        most = max(1, int(counts.max()))
        self.sent_counts[index] = [*self.sent_counts.get(index, [])[-99:], most]
        return most


def take_pairs(x: Tensor, indices: Sequence[Tensor], length: int) -> Tensor:
    """The bytes of `length` (value, index) pairs of each row of `x`. The values are then set to zero: `x` becomes the error.

    A row that has fewer values pads with value 0 at index 0, which adds nothing.
    """
    values = x.new_zeros(len(x), length)
    positions = torch.zeros(len(x), length, dtype=torch.int32, device=x.device)
    for row, chosen in enumerate(indices):
        values[row, : len(chosen)], positions[row, : len(chosen)] = x[row, chosen], chosen.to(torch.int32)
        x[row, chosen] = 0.0
    return torch.cat((values.view(torch.uint8), positions.view(torch.uint8)), 1)


def send_to_all(message: Tensor, payload: Tensor, length: int, ranks: int) -> Iterator[Exchange]:
    """All ranks receive all ranks' (value, index) pairs; each adds them up in the order of ranks."""
    whole = payload.new_empty(ranks, payload.numel())
    yield Exchange("all_gather", whole, payload)
    del payload
    add_pairs(message, whole, length, message.dtype)


def send_to_owners(out: Tensor, payload: Tensor, length: int, dtype: torch.dtype) -> Iterator[Exchange]:
    """Each owner receives the (value, index) pairs of its rows from all ranks, and adds them in the order of ranks."""
    arrived = torch.empty_like(payload)
    yield Exchange("all_to_all", arrived, payload)
    del payload
    add_pairs(out, arrived, length, dtype)


def add_pairs(out: Tensor, received: Tensor, length: int, dtype: torch.dtype) -> None:
    """Set `out` to the sum of the `length` pairs of each rank, whose values have this dtype."""
    out.zero_()
    values_bytes = length * dtype.itemsize
    for row in received:
        out.index_add_(
            0, row[values_bytes:].clone().view(torch.int32), row[:values_bytes].clone().view(dtype).to(out.dtype)
        )


class RandomK:
    """Values at indices drawn from (seed, message, step), the same on all ranks, so that they can be summed."""

    aligned = False

    def __init__(self, ratio: float, seed: int = 0, feedback: bool = True) -> None:
        self.ratio, self.seed, self.feedback = ratio, seed, Feedback(feedback)
        self.steps: dict[int, int] = {}

    def reduce(self, index: int, message: Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        indices, payload = self._drawn(index, message)
        yield Exchange("all_reduce", payload, payload)
        message.zero_().index_copy_(0, indices, payload)

    def scatter(self, index: int, rows: Tensor, layout: Layout, rank: int, out: Tensor) -> Iterator[Exchange]:
        indices, payload = self._drawn(index, rows)
        mine = payload.new_empty(len(indices))
        yield Exchange("reduce_scatter", mine, payload)
        out.zero_().index_copy_(0, indices, mine.to(out.dtype))

    def _drawn(self, index: int, message: Tensor) -> tuple[Tensor, Tensor]:
        """The indices, and the values there. A value that is not finite makes all of them NaN: every rank then sees an overflow."""
        x = self.feedback.corrected(index, message)
        indices = self.indices(index, x.shape[-1], x.device)
        payload = x[..., indices].contiguous() + torch.linalg.vector_norm(x, torch.inf) * 0.0
        self.feedback.keep(index, x.index_fill_(-1, indices, 0.0))
        return indices, payload

    def indices(self, index: int, length: int, device: torch.device) -> Tensor:
        step = self.steps[index] = self.steps.get(index, -1) + 1
        random = generator(device, self.seed, index, step)
        order = torch.randperm(length, generator=random, device=device)
        return order[: count_kept(length, self.ratio)].clone()  # a view would keep all 8·length bytes


def count_kept(elements: int, ratio: float) -> int:
    """⌈elements · ratio⌉, at least 1."""
    return max(1, min(elements, -(-int(elements * ratio * 1e6) // 1_000_000)))
