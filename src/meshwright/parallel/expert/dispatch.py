"""Expert parallelism: each of ep ranks holds E/ep experts, and tokens travel to them.

    route    every rank of a stage routes tokens of its own: under tensor parallelism its share of the sequence, or
             without sequence parallelism its slice of what all tp ranks hold alike
    dispatch all-to-all over ep: t·k·h values leave each rank's memory, (ep−1)/ep of them leave the rank
    gather   where experts are split over expert_tp, all-gather: its ranks must see each other's copies
    compute  the experts held here, on the rows that came, sorted by expert
    return   reduce-scatter over expert_tp, all-to-all back: the same journey the other way

Four all-to-alls a layer and micro-batch: dispatch and combine, and in backward the gradient of each, which is an
all-to-all with the two sides exchanged. Each moves k copies of a token, so top-2 of h = 4096 in 16 bits is
4 · 2 · 8 KiB = 64 KiB a token and layer, whatever the number of experts. How many rows come is not known before, so
counts travel first, E numbers; splits are uneven and may be zero, and a rank whose experts got nothing still takes part
with no rows.

**Gradients.** An expert's rank sees the copies of all the ranks of its ep × expert_tp block, so its gradient is
already a sum over those; what is missing is the sum over expert_dp, the blocks that hold the same expert. Summed over
dp instead, gradients of different experts would be added up; averaged, they would be off by ep (PyTorch #160285).

**Statistics.** Load, capacity and expert choice are of all tokens in flight (`router`), that is of the ranks of the
stage: counts are summed; where experts compare tokens, scores are gathered, t·E numbers against the t·k·h of dispatch,
and put in the order of one device's batch, so that every rank decides alike and as one device would.

**Overlap.** Sending is two steps, depart and land. The shared experts run between them, and in backward their gradient
runs between the two steps the other way, since autograd runs the youngest node first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.models.moe import Experts, GroupedLinear, MixtureOfExperts
from meshwright.models.router import load_metrics
from meshwright.parallel import exchange, recompute
from meshwright.parallel.context.token_order import token_order
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.tensor.cuts import Cut, boundaries

if TYPE_CHECKING:
    from meshwright.parallel.pieces import Piece


class Flight:
    """One all-to-all, under way: rows out and in by rank."""

    def __init__(self, group: ProcessGroup, outgoing: list[int], incoming: list[int]) -> None:
        self.group, self.outgoing, self.incoming = group, outgoing, incoming
        self.work: Any = None
        self.buffer: torch.Tensor | None = None
        self.leaving: torch.Tensor | None = None

    def start(self, rows: torch.Tensor, back: bool) -> torch.Tensor:
        out, into = (self.incoming, self.outgoing) if back else (self.outgoing, self.incoming)
        rows = rows.contiguous()
        buffer = rows.new_empty((sum(into), *rows.shape[1:]))
        self.work = distributed.all_to_all_single(buffer, rows, into, out, group=self.group, async_op=True)
        self.buffer, self.leaving = buffer, rows  # both must live until they have arrived
        return buffer

    def wait(self) -> torch.Tensor:
        self.work.wait()
        buffer, self.work, self.buffer, self.leaving = self.buffer, None, None, None
        assert buffer is not None
        return buffer


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, flight: Flight) -> torch.Tensor:
        ctx.flight = flight
        return flight.start(rows, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.flight.wait(), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: torch.Tensor, flight: Flight) -> torch.Tensor:
        ctx.flight = flight
        flight.wait()
        return buffer.view_as(buffer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Autograd wants a gradient of the shape that landed; the rows that fly back are handed over by `_Depart`.
        ctx.flight.start(gradient, back=True)
        return gradient, None


def all_to_all(rows: torch.Tensor, group: ProcessGroup, outgoing: list[int], incoming: list[int]) -> torch.Tensor:
    """Rows to and from each rank, differentiable; for a user's own experts."""
    flight = Flight(group, outgoing, incoming)
    return _Land.apply(_Depart.apply(rows, flight), flight)


class Journey:
    """Copies of one layer's tokens, sorted by expert, to the ranks of their experts and back."""

    def __init__(self, copies_RH: torch.Tensor, counts_E: torch.Tensor, place: Spread) -> None:
        self.place = place
        outgoing = counts_E.view(place.ep_size, -1)
        incoming = place.exchanged(outgoing)  # [expert_tp, ep, experts here]: what each rank of the block receives
        self.incoming = incoming
        out, into = outgoing.sum(1).tolist(), incoming[place.etp_index].sum(1).tolist()
        place.count(sum(out), sum(into), int(incoming.sum()), int(incoming.sum((1, 2)).max()))
        self.rows = copies_RH
        self.flights = None
        if place.ep is not None:
            self.flights = Flight(place.ep, out, into), Flight(place.ep, into, out)
            self.rows = _Depart.apply(copies_RH, self.flights[0])
            if not place.overlap:
                self.rows = _Land.apply(self.rows, self.flights[0])

    def arrived(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, place = self.rows, self.place
        if self.flights is not None and place.overlap:
            rows = _Land.apply(rows, self.flights[0])
        self.here = len(rows)
        if place.etp is not None:  # equal shares only: padded to the fullest
            most = int(self.incoming.sum((1, 2)).max())
            rows = torch.cat((rows, rows.new_zeros(most - len(rows), rows.shape[1])))
            rows = exchange.gather_in(rows, place.etp, 0)
        self.total = len(rows)
        self.order = self._by_expert(rows.device)
        return rows[self.order], self.incoming.sum((0, 1))

    def _by_expert(self, device: torch.device) -> torch.Tensor:
        """Where the rows of the first expert lie, then those of the second, …: they came by rank, then by expert."""
        ranks, sources, experts = self.incoming.shape
        expert = torch.arange(experts, device=device).repeat(sources)
        share = self.total // ranks
        places, kinds = [], []
        for i, counts in enumerate(self.incoming):
            kinds.append(expert.repeat_interleave(counts.flatten().to(device)))
            places.append(torch.arange(len(kinds[-1]), device=device) + i * share)
        return torch.cat(places)[torch.cat(kinds).argsort(stable=True)]

    def back(self, answers: torch.Tensor) -> torch.Tensor:
        rows = answers.new_zeros(self.total, answers.shape[1]).index_copy(0, self.order, answers)
        if self.place.etp is not None:
            rows = exchange.scatter_out(rows, self.place.etp, 0)[: self.here]
        if self.flights is not None:
            rows = _Land.apply(_Depart.apply(rows, self.flights[1]), self.flights[1])
        return rows


class Spread:
    """The `Place` of a layer's tokens and experts on the ranks of a stage."""

    def __init__(self, mesh: Mesh, plan: Plan, share: float, model: Model) -> None:
        self.mesh, self.plan, self.model = mesh, plan, model
        self.share: float | torch.Tensor = share
        self.microbatch_share = share  # of one micro-batch in the step's loss
        self.tp = None if plan.sp else mesh.group("tp")
        self.ep, self.etp, self.stage = mesh.add("ep"), mesh.add("expert_tp"), mesh.add("stage")
        self.ep_size, self.etp_index = mesh.size("ep"), mesh.index("expert_tp")
        self.overlap = "ep" in (plan.overlap or ())
        # Of this step: rows sent, received, at the experts here, of the fullest expert_tp rank, and whether a layer made
        # again sent them.
        self.journeys: list[tuple[int, int, int, int, bool]] = []
        self.made: list[tuple[int, int, int, int, bool]] = []  # of the step before
        self._shape, self._device = (0, 0), torch.device("cpu")
        self._orders: dict[tuple[int, int], torch.Tensor] = {}

    def own(self, x_BSH: torch.Tensor) -> torch.Tensor:
        self._shape, self._device = (x_BSH.shape[0], x_BSH.shape[1]), x_BSH.device
        x_TH = x_BSH.flatten(0, 1)
        if self.tp is None:
            return x_TH
        if len(x_TH) % self.tp.size():
            raise MeshwrightError(
                "MW-EP-001",
                f"{len(x_TH)} tokens of a micro-batch over tp={self.tp.size()}",
                why="Without sequence parallelism each rank routes an equal slice of them",
                fix=f"--set plan.microbatch={self.tp.size()}",
            )
        return exchange.divide(x_TH, self.tp, 0)

    def whole(self, y_TH: torch.Tensor, like_BSH: torch.Tensor) -> torch.Tensor:
        return (y_TH if self.tp is None else exchange.join(y_TH, self.tp, 0)).view_as(like_BSH)

    def send(self, copies_RH: torch.Tensor, counts_E: torch.Tensor) -> Journey:
        return Journey(copies_RH, counts_E, self)

    def exchanged(self, outgoing: torch.Tensor) -> torch.Tensor:
        """[ep, experts each] of this rank → [expert_tp, ep, experts here] of every rank of its expert_tp group."""
        incoming = outgoing
        if self.ep is not None:
            incoming = torch.empty_like(outgoing)
            distributed.all_to_all_single(incoming, outgoing.contiguous(), group=self.ep)
        incoming = incoming[None]
        return incoming if self.etp is None else exchange.all_gather(incoming, self.etp, 0)

    def count(self, sent: int, received: int, rows: int, fullest: int) -> None:
        self.journeys.append((sent, received, rows, fullest, recompute.under_way()))

    def end_step(self) -> None:
        if self.journeys:
            self.made, self.journeys = self.journeys, []

    def sequences(self) -> tuple[torch.Tensor, int]:
        order = self._order(self._device)
        mine = order[self.mesh.index("stage")] if self.stage is not None else order[0]
        rows, length = self._shape
        seq = length * self.plan.cp * (self.plan.tp if self.plan.sp else 1)
        return mine // seq, rows * self.plan.dp

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.stage is None else exchange.all_reduce(values.clone(), self.stage)

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        if self.stage is None:
            return rows
        everyone = exchange.all_gather(rows, self.stage, 0)
        return torch.empty_like(everyone).index_copy_(0, self._order(rows.device).flatten(), everyone)

    def mine(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.stage is None else rows[self._order(rows.device)[self.mesh.index("stage")]]

    def _order(self, device: torch.device) -> torch.Tensor:
        mesh = self.mesh
        if self._shape not in self._orders:
            self._orders[self._shape] = token_order(mesh.layout, mesh.rank, self.model, *self._shape).to(device)
        return self._orders[self._shape]


@dataclass
class Parted:
    """What `spread` did to the experts' parameters: their ranges by name, and which gradients are partial over
    expert_tp."""

    cuts: dict[str, tuple[Cut, ...]] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)


def spread(module: nn.Module, mesh: Mesh, plan: Plan, model: Model, microbatches: int) -> Parted:
    """Give each mixture of experts of a module on the meta device its place, and keep the experts of this rank."""
    done = Parted()
    mesh.add("expert_dp")
    place = Spread(mesh, plan, 1.0 / microbatches, model)
    for name, part in module.named_modules():
        if isinstance(part, MixtureOfExperts):
            part.place = place
            for kind, linear in part.experts.named_children():
                if isinstance(linear, GroupedLinear):
                    _part(done, linear, f"{name}.experts.{kind}", mesh, columns=kind != "down")
    return done


def _part(done: Parted, linear: GroupedLinear, name: str, mesh: Mesh, columns: bool) -> None:
    """Cut the experts of this rank out, and of each its columns, or of `down` its rows."""
    axes: dict[str, tuple[tuple[int, str], ...]] = {"weight": ((0, "ep"), (1 if columns else 2, "expert_tp"))}
    if linear.bias is not None:
        axes["bias"] = ((0, "ep"), (1, "expert_tp")) if columns else ((0, "ep"),)
    for field_name, cuts in axes.items():
        parameter = whole = getattr(linear, field_name)
        made = []
        for dim, axis in cuts:
            full, parts = parameter.shape[dim], mesh.size(axis)
            if full % parts:
                raise MeshwrightError(
                    "MW-TP-002",
                    f"dimension {dim} of '{name}.{field_name}', {full}, does not divide over {axis}={parts}",
                    why="Each rank holds whole experts or columns",
                )
            start, stop = boundaries(full, parts, mesh.index(axis))
            parameter = parameter.narrow(dim, start, stop - start)
            made.append(Cut(dim, start, stop - start, full))
        setattr(linear, field_name, nn.Parameter(torch.empty_like(parameter), requires_grad=whole.requires_grad))
        done.cuts[f"{name}.{field_name}"] = tuple(made)
    if linear.bias is not None and not columns and mesh.size("expert_tp") > 1:
        if linear.bias.requires_grad:
            done.partial.add(f"{name}.bias")
        # The sum over expert_tp would count the bias once a rank: one of them adds it.
        linear.bias_share = 1.0 if mesh.index("expert_tp") == 0 else 0.0


@torch.no_grad()
def balance(
    modules: Iterable[nn.Module], pieces: list[Piece], mesh: Mesh, masters: Sequence[Piece] = ()
) -> dict[str, float]:
    """Once a step: the load of every layer over all tokens, in one small sum, moves the balancing biases, first of all
    their wide `masters` where there are any. Returns the metrics of the worst layer of all stages."""
    layers = {
        f"{name}.router": part
        for module in modules
        for name, part in module.named_modules()
        if isinstance(part, MixtureOfExperts) and part.router.load is not None
    }
    if not layers:
        return worst([], mesh)
    loads = torch.stack([part.router.load for part in layers.values() if part.router.load is not None])
    group = mesh.group("stage")
    if group is not None:
        distributed.all_reduce(loads, group=group)
    by_name = {piece.name: piece for piece in pieces}
    wide = {piece.name: piece for piece in masters}
    metrics = []
    for (name, part), load_2E in zip(layers.items(), loads, strict=True):
        bias = by_name.get(f"{name}.balance_bias")
        if bias is not None:
            true = wide.get(bias.name, bias)
            true.local.add_(bias.box(part.router.balance(load_2E[0])).to(true.local.device))
            bias.local.copy_(true.local)
        metrics.append(load_metrics(load_2E))
        part.router.load = None
        if isinstance(part.place, Spread):
            part.place.end_step()
    return worst(metrics, mesh)


def worst(metrics: list[dict[str, float]], mesh: Mesh) -> dict[str, float]:
    """Of all layers, those of other stages too: the least entropy, and the most of all else."""
    rows = [[-m["entropy"], m["peak"], m["idle"], m["dropped"]] for m in metrics]
    most = torch.tensor(rows or [[-1.0, 0.0, 0.0, 0.0]], dtype=torch.float64, device=mesh.device).amax(0)
    group = mesh.group("pp")
    if group is not None:
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group)
    entropy, *others = most.tolist()
    return dict(zip(("entropy", "peak", "idle", "dropped"), (-entropy, *others), strict=True))


def forget(modules: Iterable[nn.Module]) -> None:
    """The load of a step that did not come to its end."""
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, MixtureOfExperts):
            part.router.load = None
            if isinstance(part.place, Spread):
                part.place.journeys.clear()


def scale_losses(modules: Iterable[nn.Module], scale: float) -> None:
    """Losses the routers add are scaled like the step's own."""
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, MixtureOfExperts) and isinstance(part.place, Spread):
            part.place.share = scale * part.place.microbatch_share


def experts_of(module: nn.Module) -> list[Experts]:
    return [part for part in module.modules() if isinstance(part, Experts)]
