"""Local SGD: replicas train alone for k steps and then average their parameters, for links too slow to sum gradients.

    every step      w_r ← w_r − η·∇ mean_r           each replica by its own tokens, nothing sent
    every k steps   w ← Σ_r T_r·w_r / Σ_r T_r        weighted by the tokens each has seen since the last average

Traffic falls k times: one all-reduce of the parameters in place of k of the gradients. With k = 1 and plain SGD the
weighted average *is* the data-parallel step,

    Σ_r (T_r/T)(w − η·∇ mean_r) = w − η·(Σ_r ∇ sum_r) / T

and that is the proof. The price of k > 1: replicas drift apart by about η·k times the spread of their gradients, so
the average lags a true large-batch step (k = 4 to 16 costs little with a decayed rate, hundreds need an outer
optimizer, as DiLoCo has); Adam's moments and clipping stay each replica's own, so under AdamW even k = 1 is another
training, close to the exact one but not equal. The loss told is the replica's own.

Inside a replica tensor and pipeline parallelism work as ever; only the replicate axis is quiet between averages.

On a module of your own, whose replicas start alike:

    average = Average(list(module.parameters()), group, every=8)
    optimizer.step(); average.after_update(tokens)                       # the tokens of this replica's step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from meshwright.errors import MeshwrightError
from meshwright.parallel.data.zero import buckets_of
from meshwright.parallel.numerics.precision import at_least_single

if TYPE_CHECKING:
    from meshwright.parallel.apply import Parallel

LEAST = 1e-12  # tokens: of replicas that have all seen none, a plain average


class Average:
    """Tensors of replicas, weighted by the tokens each has seen, averaged every so many steps. None: no other replica."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: ProcessGroup | None, every: int) -> None:
        if every < 1 or not tensors:
            raise MeshwrightError(
                "MW-PAR-007",
                f"an average of {len(tensors)} tensors every {every} steps",
                why="Both are counted from 1 up",
            )
        self.tensors, self.group, self.every = tensors, group, every
        self.since, self.tokens = 0, torch.zeros((), dtype=torch.float64, device=tensors[0].device)

    @torch.no_grad()
    def after_update(self, tokens: torch.Tensor | float) -> bool:
        """Count the step; average if it is the k-th. True where it averaged."""
        self.since += 1
        self.tokens += tokens
        if self.since < self.every:
            return False
        wide = at_least_single(self.tensors[0].dtype)
        weight = self.tokens.to(wide).clamp(min=LEAST)
        flat = torch.cat([*(t.flatten().to(wide) * weight for t in self.tensors), weight[None]])
        if self.group is not None:
            distributed.all_reduce(flat, group=self.group)
        flat.div_(flat[-1].clone())
        for tensor, mean in zip(self.tensors, flat[:-1].split([t.numel() for t in self.tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))
        self.since = 0
        self.tokens.zero_()
        return True


class LocalSgd(Average):
    """Put on a `Parallel` whose plan says `average_every`, before its training starts."""

    def __init__(self, parallel: Parallel) -> None:
        self.parallel, masters = parallel, parallel.masters
        pieces = masters.pieces if masters is not None else parallel.pieces
        super().__init__([p.local for p in pieces], parallel.mesh.group("replicate"), parallel.plan.average_every)
        for bucket in buckets_of(parallel.reductions):
            bucket.group = None
        parallel.local = self

    def groups(self, axis: str) -> list[ProcessGroup]:
        """In the place of the mesh's: the data axes are quiet, the world is this replica's stages and their shards."""
        axes = {"world": ("tp", "pp"), "dp": (), "dp_cp": (), "replicate": ()}.get(axis, (axis,))
        return [group for group in map(self.parallel.mesh.group, axes) if group is not None]

    def after_update(self, tokens: torch.Tensor | float) -> bool:
        averaged = super().after_update(tokens)
        if averaged and self.parallel.masters is not None:
            self.parallel.masters.give_parameters()
        return averaged
