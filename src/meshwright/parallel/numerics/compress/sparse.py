"""Sparse gradients: some of the values, with their indices.

    top-k       the k = r·n largest values and their indices     every rank receives every other's: (P−1)·k pairs
    random-k    k = r·n at indices drawn from (seed, step)       the same indices on all ranks: summed like any tensor
    threshold   all values above τ·√(mean x²)                    a varying number: counts are exchanged first

Under ZeRO (`scatter`) each rank sends P short lists of equal length, one to each owner: k = r·n/P values of what that
owner keeps, or, with a threshold, as many as the longest list of any rank has.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.parallel.numerics.compress.base import Exchange, Feedback, Layout, generator


class TopK:
    """The largest values, a share `ratio` of all, with 4-byte indices; every rank receives them."""

    aligned = False

    def __init__(self, ratio: float, feedback: bool = True) -> None:
        self.ratio, self.feedback = ratio, Feedback(feedback)

    def reduce(self, index: int, message: Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message)
        indices = x.abs().topk(count_kept(x.numel(), self.ratio), sorted=False).indices
        length = indices.numel()
        payload = take_pairs(x[None], [indices], length)
        self.feedback.keep(index, x)
        del x, indices
        yield from send_to_all(message, payload, length, ranks)

    def scatter(self, index: int, rows: Tensor, layout: Layout, rank: int, out: Tensor) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, rows)
        indices = x.abs().topk(count_kept(x.shape[1], self.ratio), dim=1, sorted=False).indices
        length = indices.shape[1]
        payload = take_pairs(x, list(indices), length)
        self.feedback.keep(index, x)
        del x, indices
        yield from send_to_owners(out, payload, length, rows.dtype)


class Threshold:
    """Values above `factor` times the message's root mean square: a varying number, so counts are exchanged first."""

    aligned = False

    def __init__(self, factor: float, feedback: bool = True) -> None:
        self.factor, self.feedback = factor, Feedback(feedback)
        self.sent_counts: dict[int, list[int]] = {}  # by message: how many values were sent, in each reduction

    def reduce(self, index: int, message: Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message)
        indices = self.above(x).nonzero()[:, 0]
        count = torch.tensor([indices.numel()], dtype=torch.int64, device=x.device)
        counts = count.new_empty(ranks)
        yield Exchange("all_gather", counts, count)
        most = self._longest(index, counts)
        payload = take_pairs(x[None], [indices], most)
        self.feedback.keep(index, x)
        del x, indices
        yield from send_to_all(message, payload, most, ranks)

    def scatter(self, index: int, rows: Tensor, layout: Layout, rank: int, out: Tensor) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, rows)
        above = self.above(x)
        count = above.sum(1).max()[None]
        counts = count.new_empty(len(rows))
        yield Exchange("all_gather", counts, count)
        most = self._longest(index, counts)
        payload = take_pairs(x, [row.nonzero()[:, 0] for row in above], most)
        self.feedback.keep(index, x)
        del x, above
        yield from send_to_owners(out, payload, most, rows.dtype)

    def above(self, x: Tensor) -> Tensor:
        """Mark values that are not below the threshold: NaN is not below, so it is sent."""
        smallest = self.factor * x.square().mean().sqrt()
        return ~(x.abs() < smallest)

    def _longest(self, index: int, counts: Tensor) -> int:
        """The length of the longest list of any rank, at least 1; it is recorded for the traffic check."""
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
        x = self.feedback.corrected(index, message)
        indices = self.indices(index, x.numel(), x.device)
        payload = x[indices] + overflow(x)
        self.feedback.keep(index, x.index_fill_(0, indices, 0.0))
        del x
        yield Exchange("all_reduce", payload, payload)
        message.zero_().index_copy_(0, indices, payload)

    def scatter(self, index: int, rows: Tensor, layout: Layout, rank: int, out: Tensor) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, rows)
        indices = self.indices(index, x.shape[1], x.device)
        payload = x[:, indices].contiguous() + overflow(x)
        self.feedback.keep(index, x.index_fill_(1, indices, 0.0))
        del x
        mine = payload.new_empty(len(indices))
        yield Exchange("reduce_scatter", mine, payload)
        out.zero_().index_copy_(0, indices, mine.to(out.dtype))

    def indices(self, index: int, length: int, device: torch.device) -> Tensor:
        step = self.steps[index] = self.steps.get(index, -1) + 1
        random = generator(device, self.seed, index, step)
        order = torch.randperm(length, generator=random, device=device)
        return order[: count_kept(length, self.ratio)].clone()  # a view would keep all 8·length bytes


def overflow(x: Tensor) -> Tensor:
    """Zero, or NaN if any value is not finite: added to the values that are sent, it makes an overflow visible to all ranks."""
    return torch.linalg.vector_norm(x, torch.inf) * 0.0


def count_kept(elements: int, ratio: float) -> int:
    """⌈elements · ratio⌉, at least 1."""
    return max(1, min(elements, -(-int(elements * ratio * 1e6) // 1_000_000)))
