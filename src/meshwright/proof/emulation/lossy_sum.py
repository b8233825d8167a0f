"""One device in the place of many: the proof of a lossy sum is that ranks and their emulation agree.

Every rank loses other parts of its gradient, so one device must have each rank's gradient by itself (`apart`), cut it as
that rank cuts it, and lose the same. The ranks tell who sums what with whom (`told`), as names, boxes and whose tokens
each has the gradient of; what they leave out of that is summed exactly. The steps of one device are then

    one backward of all ranks' tokens       a gradient for each rank's
    for each group that sums lossily        the boxes its ranks hold, put together as they do
        compress, exchange, decompress      one compressor for each rank, as there
    put the boxes back

Ranks that sum 16-bit numbers on the wire round after every addition, in an order that is the library's: of two it does not
matter, of more one device shows by summing `backwards` how much it does.

So a rank of dp or cp compresses the gradient of its own tokens; a rank that holds experts that of its block's; and each
of two stages that share an embedding that of its own use of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from meshwright.describe.layout import Layout as RankLayout
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import shape_in_transit, shard_dim
from meshwright.parallel.apply import Parallel, program_of
from meshwright.parallel.data.buckets import Buckets
from meshwright.parallel.data.reduction import reductions_in
from meshwright.parallel.data.zero import ShardedGradients
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.compress.base import Compressor, Exchange, Layout
from meshwright.parallel.numerics.compress.compressors import compressor_of
from meshwright.parallel.numerics.compress.scatter import columns_of
from meshwright.proof.emulation.per_rank import Apart, Source, source

Gradients = dict[Source, dict[str, torch.Tensor]]  # of whose tokens, by use


@dataclass(frozen=True)
class Portion:
    """A box of a whole parameter, as a rank holds it before ZeRO cuts it; `uses` are where its gradient comes from."""

    uses: tuple[str, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))]


@dataclass(frozen=True)
class Summed:
    """What the ranks of one group sum lossily, in their order: cut into messages at `edges`, or into the rows of their
    owners. `members` are the ranks whose tokens each of them has the gradient of; `rounds` the micro-batches, in their
    order, that are summed each by itself: none, if all are summed once."""

    portions: tuple[Portion, ...]
    members: tuple[tuple[Source, ...], ...]
    rounds: tuple[int, ...]
    edges: tuple[int, ...] = ()

    def layouts(self) -> list[Layout]:
        out: list[Layout] = [[] for _ in self.edges[1:]]
        at = 0
        for portion in self.portions:
            shape = torch.Size(portion.shape)
            i = max(k for k, edge in enumerate(self.edges[:-1]) if edge <= at)
            out[i].append((at - self.edges[i], shape))
            at += shape.numel()
        return out


def told(parallel: Parallel) -> list[Summed]:
    """What this rank sums lossily with others, of whom it is the first."""
    plan, mesh = parallel.plan, parallel.mesh
    by_parameter = {p.parameter: Portion(p.uses, p.start, tuple(p.parameter.shape)) for p in parallel.pieces}
    experts = {p.parameter for p in parallel.pieces if p.box.expert}
    out = []
    for stage, part in [
        (s, p) for s, r in zip(parallel.stages, parallel.reductions, strict=True) for p in reductions_in([r])
    ]:
        if isinstance(part, Buckets) and part.compressor is not None and part.group is not None:
            axis = "expert_dp" if experts.issuperset(part.parameters) else "dp_cp"
            portions, rounds = (
                tuple(by_parameter[p] for p in part.parameters),
                rounds_of(parallel, stage, part.per_microbatch),
            )
            out.append((axis, Summed(portions, members(mesh, axis), rounds, tuple(part.edges))))
        for scatter in part.scatters if isinstance(part, ShardedGradients) else ():
            portions = tuple(by_parameter[p] for p in scatter.lossy)
            rounds = rounds_of(parallel, stage, plan.reduces_each and plan.pp == 1)
            out.append((scatter.axis, Summed(portions, members(mesh, scatter.axis), rounds)))
    return [summed for axis, summed in out if summed.portions and mesh.index(axis) == 0]


def rounds_of(parallel: Parallel, stage: int, each: bool) -> tuple[int, ...]:
    """The micro-batches in the order in which a stage has their gradients; a schedule may begin with the last."""
    program = program_of(parallel.plan, parallel.workload) if each else None
    if program is None:
        return tuple(range(parallel.plan.microbatches(parallel.workload))) if each else ()
    actions = program.actions(parallel.mesh.index("pp"))
    return tuple(a.microbatch for a in actions if a.stage == stage and a.kind in ("B", "W"))


def members(mesh: Mesh, axis: str) -> tuple[tuple[Source, ...], ...]:
    """Of each rank of this rank's group those whose tokens it has the gradient of: its own tp group's, and of experts
    those of its ep × expert_tp block."""
    layout, group = mesh.layout, mesh.layout.group_of(axis, mesh.rank)
    if axis in ("dp_cp", "shard_cp"):
        return tuple((source(layout, rank, tp=False),) for rank in group)
    blocks = [
        [r for other in layout.group_of("ep", rank) for r in layout.group_of("expert_tp", other)] for rank in group
    ]
    return tuple(tuple(source(layout, r, tp=True) for r in block) for block in blocks)


class Emulated:
    """A `Reduction` of one device that stands for the ranks of a plan, which told what they sum lossily."""

    def __init__(self, parallel: Parallel, layout: RankLayout, summed: list[Summed], backwards: bool = False) -> None:
        (module,) = parallel.stages.values()
        self.parameters = {name: p for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
        work = parallel.workload
        self.apart = Apart(module, layout, parallel.model, work.seq, parallel.mesh.device, work.precision == "fp8")
        self.summed, self.backwards = summed, backwards
        self.compressors = [[one_of(layout.plan) for _ in s.members] for s in summed]
        self.taken: list[Gradients] = []  # of every micro-batch
        self.begun = False

    def begin(self, last: bool) -> None:
        if self.begun:
            self.taken.append(self.apart.taken())
        self.begun = True

    def start(self) -> None:
        """Nothing is sent."""

    @torch.no_grad()
    def finish(self) -> None:
        self.taken.append(self.apart.taken())
        whole = added(self.taken)
        total = {name: sum_of([mine[name] for mine in whole.values() if name in mine]) for name in self.parameters}
        for summed in self.summed:
            for portion in summed.portions:
                for use in portion.uses:
                    portion.of(total[use]).zero_()
        for summed, compressors in zip(self.summed, self.compressors, strict=True):
            for gradients in [self.taken[i] for i in summed.rounds] or [whole]:
                for portion, values in emulate_sum(summed, compressors, gradients, self.backwards):
                    portion.of(total[portion.uses[0]]).add_(values)
        for p in self.parameters.values():
            p.grad = None
        for name, p in self.parameters.items():  # a tied weight has two names
            p.grad = total[name] if p.grad is None else p.grad + total[name]
        self.taken, self.begun = [], False

    def zero(self) -> None:
        for p in self.parameters.values():
            p.grad = None


def sum_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def added(several: list[Gradients]) -> Gradients:
    """The sum of several micro-batches."""
    return {s: {name: sum_of([one[s][name] for one in several]) for name in mine} for s, mine in several[0].items()}


def one_of(plan: Plan) -> Compressor:
    made = compressor_of(plan)
    assert made is not None
    return made


def emulate_sum(
    summed: Summed, compressors: list[Compressor], gradients: Gradients, backwards: bool
) -> Iterator[tuple[Portion, torch.Tensor]]:
    """What each portion becomes in the sum of all members."""

    def portion_of(portion: Portion, sources: tuple[Source, ...]) -> torch.Tensor:
        return sum_of([portion.of(gradients[s][use]) for s in sources for use in portion.uses])

    parts = [[portion_of(portion, sources) for portion in summed.portions] for sources in summed.members]
    lossy = emulate_messages if summed.edges else emulate_owners
    yield from zip(summed.portions, lossy(summed, compressors, parts, backwards), strict=True)


def emulate_messages(
    summed: Summed, compressors: list[Compressor], parts: list[list[torch.Tensor]], backwards: bool
) -> Iterator[torch.Tensor]:
    flats = [torch.cat([g.flatten() for g in mine]) for mine in parts]
    cut = [
        emulate(compressors, i, [flat[a:b] for flat in flats], layout, backwards)[0]
        for i, ((a, b), layout) in enumerate(zip(pairwise(summed.edges), summed.layouts(), strict=True))
    ]
    sizes = [g.numel() for g in parts[0]]
    for portion, values in zip(summed.portions, torch.cat(cut).split(sizes), strict=True):
        yield values.view(portion.shape)


def emulate_owners(
    summed: Summed, compressors: list[Compressor], parts: list[list[torch.Tensor]], backwards: bool
) -> Iterator[torch.Tensor]:
    size = len(parts)
    rows = [torch.cat([to_rows(g, size) for g in mine], 1) for mine in parts]
    out = torch.stack([row[0] for row in rows])
    layout = columns_of([portion.shape for portion in summed.portions], size)
    run_together([c.scatter(0, rows[r], layout, r, out[r]) for r, c in enumerate(compressors)], backwards)
    widths = [to_rows(g, size).shape[1] for g in parts[0]]
    for portion, columns in zip(summed.portions, out.split(widths, 1), strict=True):
        yield from_rows(columns, portion.shape)


def to_rows(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """[rows, …] → [ranks, ⌈rows/ranks⌉ · …], padded with zeros: what each rank owns under ZeRO."""
    if shard_dim(whole.shape, ranks):
        whole = torch.cat(whole.chunk(ranks, 1))
    each = -(-whole.shape[0] // ranks)
    padded = whole.new_zeros(each * ranks, *whole.shape[1:])
    padded[: whole.shape[0]] = whole
    return padded.reshape(ranks, -1)


def from_rows(rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of this shape that `to_rows` cut."""
    whole = rows.flatten()[: math.prod(shape)].view(shape_in_transit(shape, len(rows)))
    return torch.cat(whole.chunk(len(rows)), 1) if shard_dim(shape, len(rows)) else whole


def emulate(
    compressors: list[Compressor], index: int, messages: list[torch.Tensor], layout: Layout, backwards: bool = False
) -> list[torch.Tensor]:
    """What each rank would hold, computed on one device: `messages` and `compressors` are all ranks', in order."""
    ranks = len(messages)
    messages = [m.clone() for m in messages]
    run_together(
        [c.reduce(index, m, layout, r, ranks) for r, (c, m) in enumerate(zip(compressors, messages, strict=True))],
        backwards,
    )
    return messages


def run_together(steps: list[Iterator[Exchange]], backwards: bool = False) -> None:
    """All ranks' reductions side by side, to their ends."""
    while requests := [asked for step in steps if (asked := next(step, None)) is not None]:
        perform(requests, backwards)


def perform(asked: list[Exchange], backwards: bool = False) -> None:
    """One exchange of all ranks, in this process's memory; sums begin with the first rank, or with the last."""
    given = [a.given.clone() for a in asked]
    first, *others = given[::-1] if backwards else given
    for rank, a in enumerate(asked):
        if a.operation == "all_reduce":
            total = first.clone()
            for other in others:
                total += other
            a.out.copy_(total)
        elif a.operation == "reduce_scatter":
            total = first[rank].clone()
            for other in others:
                total += other[rank]
            a.out.copy_(total)
        elif a.operation == "all_gather":
            a.out.view(-1).copy_(torch.cat([g.flatten() for g in given]))
        else:
            a.out.copy_(torch.cat([g.chunk(len(asked))[rank] for g in given]))
