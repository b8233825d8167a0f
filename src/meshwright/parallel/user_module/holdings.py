"""The part of each parameter of a user's module on this rank: its box, the ranks with copies, and how to gather and cut the full tensor.

A parameter is cut at most three times, in this order: experts over ep (dimension 0), columns or rows over tp (`Split`), and rows or columns
over the shard axis (`fully_shard`, a DTensor). A full tensor is gathered the other way round.

    norm        each element of the model counts once, even if several ranks hold copies
    partial     gradients that are sums over this rank's heads, columns or tokens only are summed over tp, or over the copies of a head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.describe.sharding import DATA_AXES, DataAxes, shard_range
from meshwright.parallel import exchange
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.precision import at_least_single
from meshwright.parallel.pieces import local_tensor
from meshwright.parallel.tensor.cuts import Split, cut_out


@dataclass(frozen=True)
class LocalParameter:
    """One parameter on this rank."""

    name: str
    parameter: nn.Parameter
    mesh: Mesh
    split: Split | None = None
    expert: bool = False  # spread over ep
    first_stage: bool = True  # of the pipeline stages that hold it, this one counts for the norm

    @property
    def local(self) -> torch.Tensor:
        return local_tensor(self.parameter)

    @property
    def gradient(self) -> torch.Tensor:
        gradient = self.parameter.grad
        return torch.zeros_like(self.local) if gradient is None else local_tensor(gradient)

    @property
    def partial(self) -> bool:
        return self.split is not None and self.name in self.split.partial

    def parts(self, local: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """Views of the local part, each with the number of tp ranks that hold the same elements."""
        tp = self.mesh.size("tp")
        cuts = self.split.cuts_of(self.name) if self.split is not None else ()
        if not cuts:
            return [(local, tp)]
        dim = cuts[0].dim
        offset = (
            shard_start(self.parameter, dim, self.mesh.index(self.data_axes.shard))
            if isinstance(self.parameter, DTensor)
            else 0
        )
        out, begin = [], 0
        for cut in cuts:
            start, stop = max(begin - offset, 0), min(begin + cut.length - offset, local.shape[dim])
            out.append((local.narrow(dim, min(start, local.shape[dim]), max(stop - start, 0)), cut.copies))
            begin += cut.length
        return out

    @property
    def data_axes(self) -> DataAxes:
        return DATA_AXES["expert" if self.expert else "dense"]

    @property
    def counted(self) -> bool:
        """Whether this rank is the first of the data-parallel ranks and stages that hold the same elements."""
        axis = self.data_axes.replicas if isinstance(self.parameter, DTensor) else self.data_axes.whole
        return self.first_stage and self.mesh.index(axis) == 0

    def squares(self) -> torch.Tensor:
        """Σ g² of the elements this rank counts."""
        total = torch.zeros((), dtype=torch.float64, device=self.local.device)
        if self.counted and self.parameter.requires_grad:
            for part, copies in self.parts(self.gradient):
                if self.mesh.index("tp") % copies == 0:
                    total += part.to(at_least_single(part.dtype)).square().sum(dtype=torch.float64)
        return total

    @torch.no_grad()
    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The full tensor of which `tensor` (the parameter, its gradient or a moment) is this rank's part; on all ranks that hold it."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        whole = tensor.detach().clone() if self.split is None else self.split.whole(self.name, tensor.detach())
        group = self.mesh.group("ep") if self.expert else None
        return whole if group is None else exchange.all_gather(whole, group, 0)

    @torch.no_grad()
    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a full tensor."""
        full = full.to(device=self.local.device)
        if self.expert and self.mesh.size("ep") > 1:
            full = full.chunk(self.mesh.size("ep"))[self.mesh.index("ep")]
        cuts = self.split.cuts_of(self.name) if self.split is not None else ()
        part = cut_out(cuts, full) if cuts else full
        if isinstance(self.parameter, DTensor):
            placed = distribute_tensor(
                part.contiguous(), self.parameter.device_mesh, self.parameter.placements, src_data_rank=None
            )
            part = placed.to_local()
        return part


def shard_start(parameter: DTensor, dim: int, index: int) -> int:
    """Start of this rank's ZeRO shard along a dimension; 0 where another dimension is sharded."""
    ranks = parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
    sharded, start, _ = shard_range(parameter.shape, ranks, index)
    return start if sharded == dim else 0


def sum_partial(holdings: list[LocalParameter]) -> None:
    """Complete the gradients that are partial sums over tp, and over the ranks that hold a copy of a head."""
    over_tp = [h.gradient for h in holdings if h.partial and h.parameter.requires_grad]
    copied: dict[ProcessGroup, list[torch.Tensor]] = {}
    for h in holdings:
        if (
            h.split is not None
            and h.name in h.split.copied
            and h.parameter.requires_grad
            and h.split.copies is not None
        ):
            parts = [part for part, copies in h.parts(h.gradient) if copies > 1 and part.numel()]
            copied.setdefault(h.split.copies, []).extend(parts)
    group = next((h.split.group for h in holdings if h.split is not None), None)
    if over_tp and group is not None:
        exchange.sum_together(over_tp, group)
    for over, gradients in copied.items():
        if gradients:
            exchange.sum_together(gradients, over)
