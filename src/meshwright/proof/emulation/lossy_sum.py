"""Lossy sums of many ranks, emulated on one device: the proof of a lossy sum is that ranks and emulation agree.

Every rank loses different parts of its gradient, so one device needs the gradient of each rank separately (`per_rank`), cut as that rank cuts
it, and then loses the same parts (`compressors`, which shares no code with the ranks). The ranks report their lossy sums
(`lossy_sums`): names, boxes, and the ranks whose tokens each gradient contains. All other sums are exact. One device then runs

    one backward of the tokens of all ranks   gives a gradient per rank
    for each group with a lossy sum           the boxes of its ranks, in their memory layout
        the compressed sum of all ranks       errors are kept for the next step
    write the boxes back

Ranks that sum in 16 bits round after every addition, in an order that the library chooses. With two ranks the order does not matter;
with more, one device also sums `backwards` to measure its effect.

A rank of dp or cp compresses the gradient of its tokens; a rank with experts, that of the tokens of its block; each of two
stages that share an embedding, that of its use of it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from meshwright.describe.layout import Layout as RankLayout
from meshwright.describe.sharding import shape_in_transit, shard_dim
from meshwright.parallel.apply import Parallel
from meshwright.parallel.data.buckets import Buckets
from meshwright.parallel.data.reduction import reductions_in
from meshwright.parallel.data.zero import ShardedGradients
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.stages import program_of
from meshwright.proof.emulation.compressors import CompressedSum, PowerSum, Shapes, compressed_sum, sum_of
from meshwright.proof.emulation.per_rank import PerRankGradients, Source, source
from meshwright.proof.parts import box_at

Gradients = dict[Source, dict[str, torch.Tensor]]  # of whose tokens, by use


@dataclass(frozen=True)
class Portion:
    """A box of a full parameter, as a rank holds it before ZeRO shards it; `uses` are the modules from which its gradient comes."""

    uses: tuple[str, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[box_at(self.start, self.shape)]


@dataclass(frozen=True)
class Summed:
    """A lossy sum of the ranks of one group, in their order: cut into messages at `edges`, or into the rows of their
    owners. `members` are the ranks whose tokens are in the gradient of each of them; `rounds` the micro-batches, in their
    order, that are reduced separately: none, if there is one reduction per step."""

    portions: tuple[Portion, ...]
    members: tuple[tuple[Source, ...], ...]
    rounds: tuple[int, ...]
    edges: tuple[int, ...] = ()

    def shapes(self) -> list[Shapes]:
        """For each message: the starts of its parameters, and their shapes."""
        out: list[Shapes] = [[] for _ in self.edges[1:]]
        at = 0
        for portion in self.portions:
            i = max(k for k, edge in enumerate(self.edges[:-1]) if edge <= at)
            out[i].append((at - self.edges[i], portion.shape))
            at += math.prod(portion.shape)
        return out


def lossy_sums(parallel: Parallel) -> list[Summed]:
    """The lossy sums of the groups whose first rank is this one."""
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
    """The micro-batches in the order in which a stage computes their gradients; some schedules start with the last."""
    program = program_of(parallel.plan, parallel.workload) if each else None
    if program is None:
        return tuple(range(parallel.plan.microbatches(parallel.workload))) if each else ()
    actions = program.actions(parallel.mesh.index("pp"))
    return tuple(a.microbatch for a in actions if a.stage == stage and a.kind in ("B", "W"))


def members(mesh: Mesh, axis: str) -> tuple[tuple[Source, ...], ...]:
    """For each rank of this group, the ranks whose tokens are in its gradient: those of its tp group, or for experts those of its
    ep × expert_tp block."""
    layout, group = mesh.layout, mesh.layout.group_of(axis, mesh.rank)
    if axis in ("dp_cp", "shard_cp"):
        return tuple((source(layout, rank, tp=False),) for rank in group)
    blocks = [
        [r for other in layout.group_of("ep", rank) for r in layout.group_of("expert_tp", other)] for rank in group
    ]
    return tuple(tuple(source(layout, r, tp=True) for r in block) for block in blocks)


class Emulated:
    """A `Reduction` on one device that emulates the ranks of a plan, given their lossy sums."""

    def __init__(self, parallel: Parallel, layout: RankLayout, summed: list[Summed], backwards: bool = False) -> None:
        (module,) = parallel.stages.values()
        if (
            parallel.fuses_loss
        ):  # the gradients of each rank are taken at the head's product, which a fused loss does not call
            parallel.fuses_loss = module.head.fuses_loss = False  # type: ignore[union-attr]
        self.parameters = {name: p for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
        work = parallel.workload
        self.per_rank = PerRankGradients(
            module, layout, parallel.model, work.seq, parallel.mesh.device, work.precision == "fp8"
        )
        self.summed = summed
        self.sums = [compressed_sum(layout.plan, backwards) for _ in summed]
        self.taken: list[Gradients] = []  # of every micro-batch
        self.started = False
        self.steps = 0
        self.tied: int | None = None  # the first step in which rounding decided what was sent

    def begin(self, last: bool) -> None:
        if self.started:
            self.taken.append(self.per_rank.take_gradients())
        self.started = True

    def start(self) -> None:
        """Nothing is sent."""

    @torch.no_grad()
    def finish(self) -> None:
        self.taken.append(self.per_rank.take_gradients())
        whole = added(self.taken)
        total = {
            name: sum_of([gradients[name] for gradients in whole.values() if name in gradients])
            for name in self.parameters
        }
        for summed in self.summed:
            for portion in summed.portions:
                for use in portion.uses:
                    portion.of(total[use]).zero_()
        for summed, sum_up in zip(self.summed, self.sums, strict=True):
            for gradients in [self.taken[i] for i in summed.rounds] or [whole]:
                for portion, values in emulate_sum(summed, sum_up, gradients):
                    portion.of(total[portion.uses[0]]).add_(values)
        for p in self.parameters.values():
            p.grad = None
        for name, p in self.parameters.items():  # a tied weight has two names
            p.grad = total[name] if p.grad is None else p.grad + total[name]
        self.taken, self.started = [], False
        if self.tied is None and any(sum_up.tied for sum_up in self.sums):
            self.tied = self.steps
        self.steps += 1

    def zero(self) -> None:
        for p in self.parameters.values():
            p.grad = None


def added(several: list[Gradients]) -> Gradients:
    """The sum of several micro-batches."""
    return {
        s: {name: sum_of([one[s][name] for one in several]) for name in gradients}
        for s, gradients in several[0].items()
    }


def emulate_sum(summed: Summed, sum_up: CompressedSum, gradients: Gradients) -> Iterator[tuple[Portion, torch.Tensor]]:
    """The value of each portion after the lossy sum over all members."""

    def portion_of(portion: Portion, sources: tuple[Source, ...]) -> torch.Tensor:
        return sum_of([portion.of(gradients[s][use]) for s in sources for use in portion.uses])

    parts = [[portion_of(portion, sources) for portion in summed.portions] for sources in summed.members]
    lossy = sum_messages if summed.edges else sum_owners
    yield from zip(summed.portions, lossy(summed, sum_up, parts), strict=True)


def sum_messages(summed: Summed, sum_up: CompressedSum, parts: list[list[torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Concatenate all parameters of a group and cut them into messages."""
    flats = [torch.cat([g.flatten() for g in gradients]) for gradients in parts]
    totals = [
        sum_up(i, [flat[a:b] for flat in flats], shapes)
        for i, ((a, b), shapes) in enumerate(zip(pairwise(summed.edges), summed.shapes(), strict=True))
    ]
    sizes = [g.numel() for g in parts[0]]
    for portion, values in zip(summed.portions, torch.cat(totals).split(sizes), strict=True):
        yield values.view(portion.shape)


def sum_owners(summed: Summed, sum_up: CompressedSum, parts: list[list[torch.Tensor]]) -> Iterator[torch.Tensor]:
    """One row per owner, with its part of every parameter; PowerSGD has no such form and sums full matrices."""
    ranks = len(parts)
    shapes = [shape_in_transit(portion.shape, ranks) for portion in summed.portions]
    if isinstance(sum_up, PowerSum):
        sizes = [math.prod(shape) for shape in shapes]
        flats = [
            torch.cat([to_rows(g, ranks).flatten()[:n] for g, n in zip(gradients, sizes, strict=True)])
            for gradients in parts
        ]
        total = sum_up(0, flats, list(zip(accumulate(sizes, initial=0), shapes, strict=False)))
        rows_of_sum = [to_rows(part.view(shape), ranks) for part, shape in zip(total.split(sizes), shapes, strict=True)]
    else:
        rows = [torch.cat([to_rows(g, ranks) for g in gradients], 1) for gradients in parts]
        rows_of_sum = list(sum_up(0, rows, []).split([to_rows(g, ranks).shape[1] for g in parts[0]], 1))
    for portion, columns in zip(summed.portions, rows_of_sum, strict=True):
        yield from_rows(columns, portion.shape)


def to_rows(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """[rows, …] → [ranks, ⌈rows/ranks⌉ · …], padded with zeros: the shard of each rank under ZeRO."""
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
