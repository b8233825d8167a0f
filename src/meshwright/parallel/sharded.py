"""`Sharded`: a network cut by a plan on this rank, one of our models (`apply.Parallel`) or a user's module (`training.user_module.ParallelModule`).

The design, in which one set of code cuts, reduces, clips, updates and saves both:

    table       every parameter has a `Piece`: its tensor here, and one `Box` for each range of the full tensor in it. Our models get their
                boxes from the model's shape (`describe.sharding.boxes`), a user's module from what its table of name patterns cut
                (`user_module.boxes`). A fused weight (q, k and v in one) has several boxes; all other parameters have one
    reductions  `data.reduction.make_reduction`: buckets or ZeRO's shards, compressed or not, as the boxes say
    completion  `finish_gradients`: sums over tp, over copies of a KV head, over the pipeline stages that hold the same weight
    norm, clip  `training.optimizer.norm`, which counts each box on one of the ranks that hold it
    update      `updating`: masters (on the device or offloaded to the host) or plain local shards, and the optimizers of `training.optimizer`
    checkpoint  `training.checkpoint` writes boxes, and reads them on another plan

What the two do differently is how a micro-batch runs: our models know documents, dropout per sample, context parallelism and fp8; a user's
module runs its own `forward`, traced once on an example if a pipeline divides it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from meshwright.describe.plan import Plan
from meshwright.describe.sharding import KV_COPIES, Degrees
from meshwright.describe.workload import Workload
from meshwright.parallel import exchange
from meshwright.parallel.data.local_sgd import LocalSgd
from meshwright.parallel.data.reduction import Reduction, compressors_in
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.precision import Masters
from meshwright.parallel.pieces import Piece, PlainPieces


@dataclass(kw_only=True)
class Sharded:
    plan: Plan
    workload: Workload
    mesh: Mesh
    stages: dict[int, nn.Module] = field(default_factory=dict)  # of the pipeline, on this rank
    pieces: list[Piece] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    dtype: torch.dtype = torch.float32  # of forward and backward
    seed: int = 0
    width: int = 0  # to which learning rates may be scaled; 0: not known
    degrees: Degrees = field(default_factory=Degrees)
    masters: Masters | None = None  # what the optimizer updates instead of the pieces
    local: LocalSgd | None = None  # replicas that train without communication between averages
    tied: list[tuple[str, ProcessGroup | None]] = field(default_factory=list)  # weights that several stages hold
    base: dict[str, Any] = field(default_factory=dict)  # what identifies the frozen base of adapters
    applied_scale: float = 1.0  # the loss scale of the gradients: every loss is multiplied by it

    # What a checkpoint has to know

    @property
    def whole_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and full shape of every tensor of the network's state."""
        raise NotImplementedError

    @property
    def description(self) -> dict[str, Any]:
        """The network, ready for JSON."""
        raise NotImplementedError

    def buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Tensors of the state that are not parameters, and whether this rank is the first that holds them."""
        yield from ()

    # The gradients

    def groups(self, axis: str) -> list[ProcessGroup]:
        """The groups over which to sum, one after the other, a number that all ranks of an axis need."""
        if self.local is not None:
            return self.local.groups(axis)
        group = self.mesh.group(axis)
        return [] if group is None else [group]

    def all_reduce(self, values: Tensor, axis: str) -> Tensor:
        """Sum `values` in place over the ranks of an axis."""
        for group in self.groups(axis):
            distributed.all_reduce(values, group=group)
        return values

    def set_scale(self, scale: float) -> None:
        """Set the loss scale; what compression has not sent yet is scaled with it."""
        if scale != self.applied_scale:
            for compressor in compressors_in(self.reductions):
                compressor.feedback.rescale(scale / self.applied_scale)
            self.applied_scale = scale

    def finish_gradients(self) -> None:
        """Wait for the sums over dp·cp, then complete partial sums, then sum the copies of a weight on several stages."""
        for gradients in self.reductions:
            gradients.finish()
        for axis in ("tp", KV_COPIES, "expert_tp"):
            self._sum_partial(axis)
        for name, group in self.tied:
            self._sum_tied([p for p in self.pieces if p.name == name and p.parameter.requires_grad], group)

    def _sum_partial(self, axis: str) -> None:
        group = self.mesh.group(axis)
        gradients = [
            view
            for p in self.pieces
            if p.parameter.requires_grad and any(box.partial == axis for box in p.boxes)
            for box, view in p.views(p.gradient)
            if box.partial == axis and view.numel()
        ]
        if group is not None and gradients:
            exchange.sum_together(gradients, group)

    def _sum_tied(self, copies: list[Piece], group: ProcessGroup | None) -> None:
        for piece in copies:
            if piece.parameter.grad is None:  # used on other stages only
                piece.parameter.grad = torch.zeros_like(piece.parameter)
        gradients = [p.gradient for p in copies]
        for other in gradients[1:]:  # a rank may have several of the stages, as in a V-shaped pipeline
            gradients[0].add_(other)
        if gradients and group is not None:
            distributed.all_reduce(gradients[0], group=group)
        for other in gradients[1:]:
            other.copy_(gradients[0])

    def zero_gradients(self) -> None:
        for gradients in self.reductions:
            gradients.zero()

    # The update

    @cached_property
    def _to_update(self) -> Masters | PlainPieces:
        return PlainPieces(self.pieces) if self.masters is None else self.masters

    @property
    def updated(self) -> list[Piece]:
        """What the optimizer updates: the masters, or the pieces as plain tensors where there are none."""
        return self._to_update.pieces

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around a step of the optimizer: what it updates gets the gradients, and then the model gets what it updated."""
        self._to_update.take_gradients()
        yield
        self._to_update.finish_update()
