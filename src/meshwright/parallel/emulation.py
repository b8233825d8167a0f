"""One device in the place of many: the proof of a lossy sum is that ranks and their emulation agree.

Every rank loses other parts of its gradient, so one device must make each data-parallel rank's gradient by itself, cut
it as the ranks of each tensor and pipeline place cut theirs, and lose the same. The ranks tell how they cut (`told`),
as names and boxes; what they leave out of that is summed exactly. The steps of one device are then

    gradient of rank 1, of rank 2, …        micro-batches come rank by rank
    for each tensor and pipeline place      the boxes that place holds, put together as it does
        compress, exchange, decompress      one compressor for each rank, as there
    put the boxes back

It cannot stand for context-parallel ranks: each has a gradient of its own that no part of the loss belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from meshwright.describe.plan import Plan
from meshwright.parallel.compress import Compressor, Exchange, Layout, compressor_of
from meshwright.parallel.pieces import Piece
from meshwright.parallel.scatter import chunked, put_together
from meshwright.parallel.zero import Buckets, Reduction, Shards, parts_of


@dataclass(frozen=True)
class Portion:
    """A box of a whole parameter, as a rank holds it before ZeRO cuts it."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))]


@dataclass(frozen=True)
class Summed:
    """What the data-parallel ranks of one place sum lossily, in their order: cut into messages at `edges`, or into the
    rows of `owners`."""

    portions: tuple[Portion, ...]
    edges: tuple[int, ...] = ()
    owners: int = 0

    def layouts(self) -> list[Layout]:
        out: list[Layout] = [[] for _ in self.edges[1:]]
        at = 0
        for portion in self.portions:
            shape = torch.Size(portion.shape)
            i = max(k for k, edge in enumerate(self.edges[:-1]) if edge <= at)
            out[i].append((at - self.edges[i], shape))
            at += shape.numel()
        return out


def told(reductions: list[Reduction], pieces: list[Piece]) -> list[Summed]:
    """What this rank sums lossily; of a rank that is the first of its data-parallel group."""
    by_parameter = {piece.parameter: Portion(piece.name, piece.start, tuple(piece.parameter.shape)) for piece in pieces}
    out = []
    for part in parts_of(reductions):
        if isinstance(part, Buckets) and part.compressor is not None and part.group is not None:
            out.append(Summed(tuple(by_parameter[p] for p in part.parameters), tuple(part.edges)))
        for scatter in part.scatters if isinstance(part, Shards) else ():
            out.append(Summed(tuple(by_parameter[p] for p in scatter.lossy), owners=scatter.ranks))
    return out


class Emulated:
    """A `Reduction` of one device that stands for the ranks of a plan. `places` is what each place told."""

    def __init__(self, module: nn.Module, plan: Plan, share: int, places: list[list[Summed]]) -> None:
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.summed = [summed for place in places for summed in place]
        self.compressors = [[one_of(plan) for _ in range(plan.dp)] for _ in self.summed]
        self.rounds = share if plan.reduces_each and plan.pp == 1 else 1
        self.each, self.begun = share // self.rounds, 0
        self.gradients: list[dict[str, torch.Tensor]] = []

    def begin(self, last: bool) -> None:
        if self.begun and self.begun % self.each == 0:
            self._take()
        self.begun += 1

    def _take(self) -> None:
        self.gradients.append({name: p.grad for name, p in self.parameters.items() if p.grad is not None})
        self.zero()

    def start(self) -> None:
        """Nothing is sent."""

    @torch.no_grad()
    def finish(self) -> None:
        self._take()
        total = {name: torch.stack([g[name] for g in self.gradients]).sum(0) for name in self.gradients[0]}
        for summed, compressors in zip(self.summed, self.compressors, strict=True):
            for portion in summed.portions:
                portion.of(total[portion.name]).zero_()
            for round_ in range(self.rounds):
                lossy = emulate_owners if summed.owners else emulate_messages
                for portion, values in lossy(summed, compressors, self.gradients[round_ :: self.rounds]):
                    portion.of(total[portion.name]).add_(values)
        for name, gradient in total.items():
            self.parameters[name].grad = gradient
        self.gradients, self.begun = [], 0

    def zero(self) -> None:
        for p in self.parameters.values():
            p.grad = None


def one_of(plan: Plan) -> Compressor:
    made = compressor_of(plan)
    assert made is not None
    return made


def emulate_messages(
    summed: Summed, compressors: list[Compressor], gradients: list[dict[str, torch.Tensor]]
) -> Iterator[tuple[Portion, torch.Tensor]]:
    flats = [torch.cat([p.of(g[p.name]).flatten() for p in summed.portions]) for g in gradients]
    cut = [
        emulate(compressors, i, [flat[a:b] for flat in flats], layout)[0]
        for i, ((a, b), layout) in enumerate(zip(pairwise(summed.edges), summed.layouts(), strict=True))
    ]
    sizes = [torch.Size(p.shape).numel() for p in summed.portions]
    for portion, values in zip(summed.portions, torch.cat(cut).split(sizes), strict=True):
        yield portion, values.view(portion.shape)


def emulate_owners(
    summed: Summed, compressors: list[Compressor], gradients: list[dict[str, torch.Tensor]]
) -> Iterator[tuple[Portion, torch.Tensor]]:
    """Each run of `owners` ranks sums by itself; what several such groups have is then summed exactly."""
    size = summed.owners
    for first in range(0, len(gradients), size):
        members = gradients[first : first + size]
        rows = [torch.cat([chunked(p.of(g[p.name]), size) for p in summed.portions], 1) for g in members]
        out = torch.stack([row[0] for row in rows])
        run_together([c.scatter(0, rows[r], out[r], r) for r, c in enumerate(compressors[first : first + size])])
        widths = [chunked(torch.empty(p.shape, device="meta"), size).shape[1] for p in summed.portions]
        for portion, columns in zip(summed.portions, out.split(widths, 1), strict=True):
            yield portion, put_together(columns, portion.shape)


def emulate(
    compressors: list[Compressor], index: int, messages: list[torch.Tensor], layout: Layout
) -> list[torch.Tensor]:
    """What each rank would hold, computed on one device: `messages` and `compressors` are all ranks', in order."""
    ranks = len(messages)
    messages = [m.clone() for m in messages]
    run_together([c.reduce(index, m, layout, r, ranks)
                  for r, (c, m) in enumerate(zip(compressors, messages, strict=True))])  # fmt: skip
    return messages


def run_together(steps: list[Iterator[Exchange]]) -> None:
    """All ranks' reductions side by side, to their ends."""
    while requests := [asked for step in steps if (asked := next(step, None)) is not None]:
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
        elif a.operation == "reduce_scatter":
            total = given[0][rank].clone()
            for other in given[1:]:
                total += other[rank]
            a.out.copy_(total)
        elif a.operation == "all_gather":
            a.out.view(-1).copy_(torch.cat([g.flatten() for g in given]))
        else:
            a.out.copy_(torch.cat([g.chunk(len(asked))[rank] for g in given]))
