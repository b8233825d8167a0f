"""Sparse gradients: the values that matter, or some of them, with where they stand.

    top-k       k = r·n of largest size, and their places        every rank hears every other's: (P−1)·k pairs
    random-k    k = r·n at places drawn from (seed, step)        the same places everywhere: summed like any other
    threshold   all above τ·√(mean x²)                           as many as there are: counts are told first

To owners (`scatter`) each rank sends P short lists, one to each owner, of the same length: k = r·n/P values of what that
owner keeps, or as many as the longest list of any rank has.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.parallel.numerics.compress.compressors import Exchange, Feedback, Layout, generator


class TopK:
    """The `ratio` of largest values, with 4-byte indices, told to every rank."""

    aligned = False

    def __init__(self, ratio: float, feedback: bool = True) -> None:
        self.ratio, self.feedback = ratio, Feedback(feedback)

    def reduce(self, index: int, message: torch.Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message)
        places = x.abs().topk(kept(x.numel(), self.ratio), sorted=False).indices
        yield from tell_sparse(self.feedback, index, message, x, places, ranks)

    def scatter(
        self, index: int, rows: torch.Tensor, layout: Layout, rank: int, out: torch.Tensor
    ) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, rows)
        places = x.abs().topk(kept(x.shape[1], self.ratio), dim=1, sorted=False).indices
        yield from tell_owners(self.feedback, index, out, x, list(places))


class Threshold:
    """Values above `factor` times the message's root mean square: as many as there are, so counts are told first."""

    aligned = False

    def __init__(self, factor: float, feedback: bool = True) -> None:
        self.factor, self.feedback = factor, Feedback(feedback)
        self.told: dict[int, list[int]] = {}  # by message: how many values were told, time by time

    def reduce(self, index: int, message: torch.Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message)
        places = self.above(x).nonzero()[:, 0]
        count = torch.tensor([places.numel()], dtype=torch.int64, device=x.device)
        counts = count.new_empty(ranks)
        yield Exchange("all_gather", counts, count)
        most = self._told(index, counts)
        # A rank with fewer pads with its own first place and value 0: nothing is added there.
        yield from tell_sparse(self.feedback, index, message, x, places, ranks, most)

    def scatter(
        self, index: int, rows: torch.Tensor, layout: Layout, rank: int, out: torch.Tensor
    ) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, rows)
        above = self.above(x)
        count = above.sum(1).max()[None]
        counts = count.new_empty(len(rows))
        yield Exchange("all_gather", counts, count)
        most = self._told(index, counts)
        yield from tell_owners(self.feedback, index, out, x, [row.nonzero()[:, 0] for row in above], most)

    def above(self, x: torch.Tensor) -> torch.Tensor:
        """What is not below: a number that is undefined is not, and is told."""
        return ~(x.abs() < self.factor * x.square().mean().sqrt())

    def _told(self, index: int, counts: torch.Tensor) -> int:
        most = max(1, int(counts.max()))
        self.told[index] = [*self.told.get(index, [])[-99:], most]
        return most


def tell_sparse(
    feedback: Feedback,
    index: int,
    message: torch.Tensor,
    x: torch.Tensor,
    places: torch.Tensor,
    ranks: int,
    length: int | None = None,
) -> Iterator[Exchange]:
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


def tell_owners(
    feedback: Feedback,
    index: int,
    out: torch.Tensor,
    x: torch.Tensor,
    places: list[torch.Tensor],
    length: int | None = None,
) -> Iterator[Exchange]:
    """Each owner hears all ranks' (value, place) pairs of what it owns, and adds them up in the order of ranks."""
    length = len(places[0]) if length is None else length
    values = x.new_zeros(len(x), length)
    at = torch.zeros(len(x), length, dtype=torch.int32, device=x.device)
    kept_back = x.clone()
    for row, here in enumerate(places):
        values[row, : len(here)], at[row, : len(here)] = x[row, here], here.to(torch.int32)
        kept_back[row, here] = 0.0
    feedback.keep(index, kept_back)
    given = torch.cat((values.view(torch.uint8), at.view(torch.uint8)), 1)
    arrived = torch.empty_like(given)
    yield Exchange("all_to_all", arrived, given)
    out.zero_()
    cut = length * x.element_size()
    for row in arrived:
        out.index_add_(0, row[cut:].clone().view(torch.int32), row[:cut].clone().view(x.dtype).to(out.dtype))


class RandomK:
    """Values at places drawn from (seed, message, step), the same on all ranks, so that they can be summed."""

    aligned = False

    def __init__(self, ratio: float, seed: int = 0, feedback: bool = True) -> None:
        self.ratio, self.seed, self.feedback = ratio, seed, Feedback(feedback)
        self.steps: dict[int, int] = {}

    def reduce(self, index: int, message: torch.Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, message)
        places = self.places(index, x.numel(), x.device)
        payload = x[places] + overflow(x)
        self.feedback.keep(index, x.index_fill(0, places, 0.0))
        yield Exchange("all_reduce", payload, payload)
        message.zero_().index_copy_(0, places, payload)

    def scatter(
        self, index: int, rows: torch.Tensor, layout: Layout, rank: int, out: torch.Tensor
    ) -> Iterator[Exchange]:
        x = self.feedback.corrected(index, rows)
        places = self.places(index, x.shape[1], x.device)
        payload = x[:, places].contiguous() + overflow(x)
        self.feedback.keep(index, x.index_fill(1, places, 0.0))
        mine = payload.new_empty(len(places))
        yield Exchange("reduce_scatter", mine, payload)
        out.zero_().index_copy_(0, places, mine.to(out.dtype))

    def places(self, index: int, length: int, device: torch.device) -> torch.Tensor:
        step = self.steps[index] = self.steps.get(index, -1) + 1
        random = generator(device, self.seed, index, step)
        return torch.randperm(length, generator=random, device=device)[: kept(length, self.ratio)]


def overflow(x: torch.Tensor) -> torch.Tensor:
    """Zero, or undefined if any number is not finite: one that is not drawn spoils those that are."""
    return torch.linalg.vector_norm(x, torch.inf) * 0.0


def kept(elements: int, ratio: float) -> int:
    return max(1, min(elements, -(-int(elements * ratio * 1e6) // 1_000_000)))
