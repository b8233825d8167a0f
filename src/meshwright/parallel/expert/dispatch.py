"""Expert parallelism: each of ep ranks holds E/ep experts, and copies of tokens are sent to them.

    route    every rank of a stage routes its own tokens: under tensor parallelism its share of the sequence, or without
             sequence parallelism its slice of the tokens that all tp ranks hold
    dispatch all-to-all over ep: t·k·h values leave each rank's memory, (ep−1)/ep of them leave the rank
    gather   where experts are split over expert_tp, all-gather: its ranks need each other's copies
    compute  this rank's experts on the rows it received, sorted by expert
    combine  reduce-scatter over expert_tp, all-to-all back

Four all-to-alls a layer and micro-batch: dispatch and combine, and in backward the gradient of each, which is an
all-to-all with the two sides exchanged. Each moves k copies of a token, so top-2 of h = 4096 in 16 bits is
4 · 2 · 8 KiB = 64 KiB per token and layer, whatever the number of experts. The number of rows is data-dependent, so
counts are exchanged first, E numbers; splits are uneven and may be zero, and a rank whose experts get no rows still
takes part.

**Gradients.** An expert's rank sees the copies of all ranks of its ep × expert_tp block, so its gradient is already
a sum over those; what is missing is the sum over expert_dp, the blocks that hold the same expert. Summed over
dp instead, gradients of different experts would be added up; averaged, they would be off by ep (PyTorch #160285).

**Statistics.** Load, capacity and expert choice refer to all tokens of the micro-batch (`router`), that is of all ranks
of the stage: counts are summed; where experts compare tokens, scores are gathered, t·E numbers against the t·k·h of
dispatch, and put in the order of one device's batch, so that every rank decides as one device would.

**Overlap.** Sending is two steps, start and wait. The shared experts run between them, and in backward their gradient
is computed between the same two steps, since autograd runs the node that was created last first.

Experts of another library, spread over the ranks of expert parallelism.

The module holds its experts stacked, [E, …] in every parameter, and is called as Hugging Face's are:

    forward(hidden [T, H], expert of each copy [T, K], weight of each copy [T, K]) → [T, H]

Each of ep ranks keeps E/ep experts. A token is sent to the ranks of its K experts and back (`dispatch.all_to_all`); the module's own `forward`
computes the experts held here, each row for one expert with weight 1, and the weights are applied where the tokens come back.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.lower.rank import Routed
from meshwright.models.moe import Dispatch, LocalDispatch, MixtureOfExperts, routed_experts
from meshwright.models.step_context import current
from meshwright.parallel import exchange
from meshwright.parallel.context.sequence import token_order
from meshwright.parallel.mesh import Mesh

COUNT = "num_experts"  # the attribute by which such modules count their experts


def spread_stacked(name: str, part: Any, group: ProcessGroup) -> list[str]:
    """Keep this rank's experts of a module, and send tokens to the others. Returns the names of the parameters cut."""
    held = dict(part.named_parameters(recurse=False))
    counts = {p.shape[0] for p in held.values() if p.ndim}
    experts, ranks = next(iter(counts), 0), group.size()
    if len(counts) != 1 or (any(part.children()) and any(p.numel() for c in part.children() for p in c.parameters())):
        raise MeshwrightError(
            "MW-EP-002",
            f"'{name}', a {type(part).__name__}, does not hold its experts stacked",
            why="Dimension 0 of each of its parameters must count the experts: spread over ep, a rank keeps some of them",
            fix="set plan.ep=1 (the experts are still split over tp), or stack the weights: [experts, out, in]",
        )
    if experts % ranks:
        raise MeshwrightError(
            "MW-EP-002",
            f"{experts} experts of '{name}' do not divide over ep={ranks}",
            why="Each rank holds whole experts",
            valid=[d for d in range(1, experts + 1) if experts % d == 0],
        )
    for field_name, parameter in held.items():
        kept = parameter.detach().chunk(ranks)[group.rank()].clone()
        setattr(part, field_name, nn.Parameter(kept, requires_grad=parameter.requires_grad))
    if hasattr(part, COUNT):
        setattr(part, COUNT, experts // ranks)
    part.forward = partial(_dispatched, part.forward, group, experts)
    return [f"{name}.{field_name}" for field_name in held]


def _dispatched(
    own: Any, group: ProcessGroup, experts: int, hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    ranks, here = group.size(), experts // group.size()
    chosen = index_TK.flatten()
    order = chosen.argsort(stable=True)
    tokens = order // index_TK.shape[1]
    leaving = chosen.bincount(minlength=experts).view(ranks, here)
    arriving = torch.empty_like(leaving)
    distributed.all_to_all_single(arriving, leaving.contiguous(), group=group)
    out, into = leaving.sum(1).tolist(), arriving.sum(1).tolist()
    rows = all_to_all(hidden_TH[tokens], group, out, into)
    expert = torch.arange(here, device=rows.device).repeat(ranks).repeat_interleave(arriving.flatten())
    made = own(rows, expert[:, None], torch.ones_like(rows[:, :1]))
    if not made.requires_grad:  # no row came: backward must still take part in the exchange
        made = made + rows * 0
    weighted = all_to_all(made, group, into, out) * weights_TK.flatten()[order, None]
    return torch.zeros_like(hidden_TH).index_add(0, tokens, weighted.to(hidden_TH.dtype))


class Transfer:
    """One asynchronous all-to-all of rows; `outgoing` and `incoming` are row counts by rank."""

    def __init__(self, group: ProcessGroup, outgoing: list[int], incoming: list[int]) -> None:
        self.group, self.outgoing, self.incoming = group, outgoing, incoming
        self.running: Any = None  # torch's handle, and the tensors received and sent: both must live until `wait`

    def start(self, rows: Tensor, backward: bool) -> Tensor:
        out, into = (self.incoming, self.outgoing) if backward else (self.outgoing, self.incoming)
        rows = rows.contiguous()
        received = rows.new_empty((sum(into), *rows.shape[1:]))
        work = distributed.all_to_all_single(received, rows, into, out, group=self.group, async_op=True)
        self.running = work, received, rows
        return received

    def wait(self) -> Tensor:
        work, received, _ = self.running
        work.wait()
        self.running = None
        return received


class _Start(torch.autograd.Function):
    """Forward starts the transfer; backward waits for the gradient's transfer, which `_Wait` started."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.start(rows, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.wait(), None


class _Wait(torch.autograd.Function):
    """Forward waits for the transfer; backward starts the gradient's."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return received.view_as(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Autograd requires a gradient of the received shape; the rows that are sent back are returned by `_Start`.
        ctx.transfer.start(gradient, backward=True)
        return gradient, None


def all_to_all(rows: Tensor, group: ProcessGroup, outgoing: list[int], incoming: list[int]) -> Tensor:
    """Send rows to and receive rows from each rank, differentiable; for experts of your own."""
    transfer = Transfer(group, outgoing, incoming)
    return _Wait.apply(_Start.apply(rows, transfer), transfer)


class _Permute(torch.autograd.Function):
    """rows[order], where `inverse` undoes the order: both directions look rows up. The backward of an index would sort the indices and add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


class ExpertDispatch:
    """Copies of one layer's tokens, sorted by expert, sent to the ranks of their experts and back. The host reads all numbers of rows at once."""

    def __init__(self, copies_RH: Tensor, counts_E: Tensor, placement: ParallelPlacement) -> None:
        self.placement = placement
        outgoing = counts_E.view(placement.ep_size, -1)
        self.incoming = placement.exchange_counts(outgoing)  # [expert_tp, ep, local experts] of every expert_tp rank
        sent, *arriving = self._rows_by_rank(outgoing)
        out, into = sent, arriving[placement.etp_index]
        own = placement.mesh.index("ep")
        self.arriving = [sum(share) for share in arriving]  # rows of every expert_tp rank
        rows = Routed(sum(out), sum(into), sum(self.arriving), max(self.arriving))
        placement.count(rows, (rows.sent - out[own] + rows.received - into[own]) / 2)
        self.rows = copies_RH
        self.transfers = None
        if placement.ep is not None:
            self.transfers = Transfer(placement.ep, out, into), Transfer(placement.ep, into, out)
            self.rows = _Start.apply(copies_RH, self.transfers[0])
            if not placement.overlap:
                self.rows = _Wait.apply(self.rows, self.transfers[0])

    def _rows_by_rank(self, outgoing: Tensor) -> list[list[int]]:
        """The rows that go to each rank, and those that come from each, to every rank of expert_tp."""
        numbers: list[list[int]] = torch.cat((outgoing[None], self.incoming)).sum(2).tolist()
        return numbers

    def receive(self) -> tuple[Tensor, Tensor]:
        rows, placement = self.rows, self.placement
        if self.transfers is not None and placement.overlap:
            rows = _Wait.apply(rows, self.transfers[0])
        self.received = len(rows)
        if placement.etp is not None:  # an all-gather needs equal shares: padded to the fullest rank's
            rows = torch.cat((rows, rows.new_zeros(max(self.arriving) - len(rows), rows.shape[1])))
            rows = exchange.gather_in(rows, placement.etp, 0)
        self.total = len(rows)
        self.order = self._by_expert(rows.device)
        if placement.etp is not None:
            return rows[self.order], self.incoming.sum((0, 1))
        self.place = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(self.total, device=rows.device))
        return _Permute.apply(rows, self.order, self.place), self.incoming.sum((0, 1))

    def _by_expert(self, device: torch.device) -> Tensor:
        """The indices of the first expert's rows, then of the second's, …: rows arrive by rank, then by expert."""
        ranks, sources, experts = self.incoming.shape
        expert = torch.arange(experts, dtype=torch.int16, device=device).repeat(sources)
        share = self.total // ranks
        indices, kinds = [], []
        for i, (counts, rows) in enumerate(zip(self.incoming, self.arriving, strict=True)):
            kinds.append(expert.repeat_interleave(counts.flatten().to(device), output_size=rows))
            indices.append(torch.arange(rows, device=device) + i * share)
        return torch.cat(indices)[torch.cat(kinds).argsort(stable=True)]

    def combine(self, outputs: Tensor) -> Tensor:
        if self.placement.etp is None:
            rows = _Permute.apply(outputs, self.place, self.order)
        else:
            # Its backward needs the order only; that of `index_copy` would keep the outputs too.
            rows = outputs.new_zeros(self.total, outputs.shape[1]).index_put((self.order,), outputs)
            rows = exchange.scatter_out(rows, self.placement.etp, 0)[: self.received]
        if self.transfers is not None:
            rows = _Wait.apply(_Start.apply(rows, self.transfers[1]), self.transfers[1])
        return rows


class Dispatched(NamedTuple):
    """One dispatch of a step. `crossing` rows go to another rank or come from one, mean of both: an exchange sends the former and its way back
    the latter."""

    rows: Routed
    crossing: float
    recomputed: bool  # by a recomputed forward


class ParallelPlacement:
    """The `ExpertPlacement` of the layers of one stage: tokens and experts are on many ranks."""

    def __init__(self, mesh: Mesh, plan: Plan, share: float, model: Model) -> None:
        self.mesh, self.plan, self.model = mesh, plan, model
        self.share: float | Tensor = share
        self.microbatch_share = share  # of one micro-batch in the step's loss
        self.tp = None if plan.sp else mesh.group("tp")
        self.ep, self.etp, self.stage = mesh.add("ep"), mesh.add("expert_tp"), mesh.add("stage")
        self.ep_size, self.etp_index = mesh.size("ep"), mesh.index("expert_tp")
        self.overlap = "ep" in (plan.overlap or ())
        self.dispatches: list[Dispatched] = []  # of this step
        self.last_dispatches: list[Dispatched] = []  # of the step before
        self._shape, self._device = (0, 0), torch.device("cpu")
        self._orders: dict[tuple[int, int], Tensor] = {}

    def local_tokens(self, x_BSH: Tensor) -> Tensor:
        self._shape, self._device = (x_BSH.shape[0], x_BSH.shape[1]), x_BSH.device
        x_TH = x_BSH.flatten(0, 1)
        if self.tp is None:
            return x_TH
        if len(x_TH) % self.tp.size():
            raise MeshwrightError(
                "MW-EP-001",
                f"{len(x_TH)} tokens of a micro-batch do not divide over tp={self.tp.size()}",
                why="Without sequence parallelism each tp rank routes an equal slice of the tokens",
                fix=f"--set plan.microbatch={self.tp.size()}",
            )
        return exchange.divide(x_TH, self.tp, 0)

    def restore(self, y_TH: Tensor, like_BSH: Tensor) -> Tensor:
        return (y_TH if self.tp is None else exchange.join(y_TH, self.tp, 0)).view_as(like_BSH)

    def dispatch(self, copies_RH: Tensor, counts_E: Tensor) -> Dispatch:
        if self.ep is None and self.etp is None:  # the counts stay on the device
            self.count(Routed(*[len(copies_RH)] * 4), 0.0)
            return LocalDispatch(copies_RH, counts_E)
        return ExpertDispatch(copies_RH, counts_E, self)

    def exchange_counts(self, outgoing: Tensor) -> Tensor:
        """[ep, experts each] of this rank → [expert_tp, ep, local experts] of every rank of its expert_tp group."""
        incoming = outgoing
        if self.ep is not None:
            incoming = torch.empty_like(outgoing)
            distributed.all_to_all_single(incoming, outgoing.contiguous(), group=self.ep)
        incoming = incoming[None]
        return incoming if self.etp is None else exchange.all_gather(incoming, self.etp, 0)

    def count(self, rows: Routed, crossing: float) -> None:
        self.dispatches.append(Dispatched(rows, crossing, current().recomputing))

    def end_step(self) -> None:
        if self.dispatches:
            self.last_dispatches, self.dispatches = self.dispatches, []

    def sequences(self) -> tuple[Tensor, int]:
        order = self._order(self._device)
        own = order[self.mesh.index("stage")] if self.stage is not None else order[0]
        rows, length = self._shape
        seq = length * self.plan.cp * (self.plan.tp if self.plan.sp else 1)
        return own // seq, rows * self.plan.dp

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return values if self.stage is None else exchange.all_reduce(values.clone(), self.stage)

    def gather_tokens(self, rows: Tensor) -> Tensor:
        """The rows of all tokens of the stage, in the order of one device's batch."""
        if self.stage is None:
            return rows
        gathered = exchange.all_gather(rows, self.stage, 0)
        return torch.empty_like(gathered).index_copy_(0, self._order(rows.device).flatten(), gathered)

    def local_rows(self, rows: Tensor) -> Tensor:
        """This rank's rows of what `gather_tokens` returned."""
        return rows if self.stage is None else rows[self._order(rows.device)[self.mesh.index("stage")]]

    def _order(self, device: torch.device) -> Tensor:
        mesh = self.mesh
        if self._shape not in self._orders:
            self._orders[self._shape] = token_order(mesh.layout, mesh.rank, self.model, *self._shape).to(device)
        return self._orders[self._shape]


def place_experts(module: nn.Module, mesh: Mesh, plan: Plan, model: Model, microbatches: int) -> None:
    """Give all mixtures of experts of a stage their placement."""
    mesh.add("expert_dp")
    placement = ParallelPlacement(mesh, plan, 1.0 / microbatches, model)
    for part in module.modules():
        if isinstance(part, MixtureOfExperts):
            part.placement = placement
    if mesh.size("expert_tp") > 1:
        for experts in routed_experts(module):
            # The sum over expert_tp would add the bias once per rank: one of them adds it.
            experts.down.bias_share = 1.0 if mesh.index("expert_tp") == 0 else 0.0
