"""Where each local parameter stands in the whole model: a *piece* is a box of the full tensor, and who else holds it.

Tensor parallelism cuts one dimension; `fully_shard` then cuts the first dimension of what is left, chunk by chunk of
⌈n/P⌉ rows, or the second. Both are ranges, so a piece is (name, full shape, start) and its own shape. Three things are read off
pieces: initial weights (draw the full tensor, keep the box), the global norm (each element of the model counts once,
whoever has a copy), and the proof of parity (compare the box with one device's).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.describe.model import Model
from meshwright.describe.sharding import shard_dim
from meshwright.models import initial_value
from meshwright.parallel.expert.dispatch import Parted
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.tensor.split import Split

TIED_COPY = "head.project.weight"
TIED_SOURCE = "embedding.tokens.weight"


@dataclass(frozen=True)
class Piece:
    name: str  # in the whole model
    parameter: nn.Parameter
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    counted: bool  # whether this rank's copy is the one that counts for the global norm
    partial: str = ""  # the axis, tp, kv_copies or expert_tp, over which the gradient is a partial sum until summed
    tied: bool = False  # one of the two copies of a tied embedding that live on different stages
    tied_copy: bool = False  # the second of them, the head's
    uses: tuple[str, ...] = ()  # under which names of the whole model it is used here; a tied embedding may have two

    @property
    def local(self) -> torch.Tensor:
        return local_tensor(self.parameter)

    @property
    def gradient(self) -> torch.Tensor:
        gradient = self.parameter.grad
        return torch.zeros_like(self.local) if gradient is None else local_tensor(gradient)

    def box(self, full: torch.Tensor) -> torch.Tensor:
        """This piece of a full tensor."""
        for dim, (start, length) in enumerate(zip(self.start, self.local.shape, strict=True)):
            full = full.narrow(dim, start, length)
        return full


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pieces_of(
    module: nn.Module, mesh: Mesh, split: Split | None, model: Model, experts: Parted | None = None
) -> Iterator[Piece]:
    """The pieces of one stage on this rank."""
    apart = model.tied and not _has_both_ends(module)
    for name, parameter in module.named_parameters():
        shape, start = list(parameter.shape), [0] * parameter.ndim  # of a DTensor the shape before sharding
        axes_of_copies, first = {"tp", "cp", "replicate", "shard"}, True
        if mesh.layout.plan.average_every:  # each replica has a norm of its own
            axes_of_copies.remove("replicate")
        if split is not None and name in split.cuts:
            cut = split.cuts[name]
            shape[cut.dim], start[cut.dim] = cut.full, cut.start
            axes_of_copies.remove("tp")
            first = mesh.index("tp") % cut.copies == 0
        if experts is not None and name in experts.cuts:
            yield _expert_piece(name, parameter, mesh, experts)
            continue
        if isinstance(parameter, DTensor):
            _move_to_shard(start, parameter, mesh, "shard_cp")
            axes_of_copies -= {"shard", "cp"}
        tied_copy = model.tied and name == TIED_COPY
        yield Piece(
            TIED_SOURCE if tied_copy else name,
            parameter,
            tuple(shape),
            tuple(start),
            counted=not tied_copy and first and all(mesh.index(axis) == 0 for axis in axes_of_copies),
            partial=_partial_over(name, split) if parameter.requires_grad else "",
            tied=apart and (tied_copy or name == TIED_SOURCE),
            tied_copy=tied_copy,
            uses=(name, TIED_COPY) if model.tied and not apart and name == TIED_SOURCE else (name,),
        )


def _partial_over(name: str, split: Split | None) -> str:
    if split is None:
        return ""
    return "tp" if name in split.partial else "kv_copies" if name in split.copied else ""


def _move_to_shard(start: list[int], parameter: DTensor, mesh: Mesh, axis: str) -> None:
    """To where this rank's shard begins in what was cut."""
    dim = shard_dim(parameter.shape, mesh.size(axis))
    length = parameter.shape[dim]
    start[dim] += min(mesh.index(axis) * -(-length // mesh.size(axis)), length)


def _expert_piece(name: str, parameter: nn.Parameter, mesh: Mesh, experts: Parted) -> Piece:
    """Experts have groups of their own: which experts over ep, which columns over expert_tp, copies over expert_dp."""
    shape, start = list(parameter.shape), [0] * parameter.ndim
    for cut in experts.cuts[name]:
        shape[cut.dim], start[cut.dim] = cut.full, cut.start
    axes_of_copies = {"expert_dp"} if len(experts.cuts[name]) > 1 else {"expert_dp", "expert_tp"}
    if isinstance(parameter, DTensor):
        _move_to_shard(start, parameter, mesh, "expert_shard")
        axes_of_copies = axes_of_copies - {"expert_dp"} | {"expert_replicate"}
    return Piece(
        name,
        parameter,
        tuple(shape),
        tuple(start),
        counted=all(mesh.index(axis) == 0 for axis in axes_of_copies),
        partial="expert_tp" if name in experts.partial else "",
        uses=(name,),
    )


def _has_both_ends(module: nn.Module) -> bool:
    return getattr(module, "embedding", None) is not None and getattr(module, "head", None) is not None


def materialise(module: nn.Module, device: str) -> None:
    """Give a meta module memory. Unlike `to_empty`, a weight shared by two modules stays shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            owner.register_parameter(name, made[parameter])


@torch.no_grad()
def initialise(pieces: list[Piece], model: Model, seed: int, scatter: bool = False) -> None:
    for piece in pieces:
        full = initial_value(model, piece.name, torch.Size(piece.full_shape), seed, scatter)
        piece.local.copy_(piece.box(full))
