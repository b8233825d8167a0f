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
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from meshwright.parallel.zero import buckets_of

if TYPE_CHECKING:
    from meshwright.parallel.apply import Parallel


class LocalSgd:
    """Put on a `Parallel` whose plan says `average_every`, before its training starts."""

    def __init__(self, parallel: Parallel) -> None:
        mesh = parallel.mesh
        self.every, self.parallel = parallel.plan.average_every, parallel
        self.group = mesh.group("replicate")
        self.since, self.tokens = 0, torch.zeros((), dtype=torch.float64, device=mesh.device)
        for bucket in buckets_of(parallel.reductions):
            bucket.group = None
        parallel.local = self

    def groups(self, axis: str) -> list[ProcessGroup]:
        """In the place of the mesh's: the data axes are quiet, the world is this replica's stages and their shards."""
        axes = {"world": ("tp", "pp"), "dp": (), "dp_cp": (), "replicate": ()}.get(axis, (axis,))
        return [group for group in map(self.parallel.mesh.group, axes) if group is not None]

    @torch.no_grad()
    def after_update(self, tokens: torch.Tensor) -> bool:
        """Count the step; average if it is the k-th. True where it averaged."""
        self.since += 1
        self.tokens += tokens
        if self.since < self.every:
            return False
        masters = self.parallel.masters
        pieces = masters.pieces if masters is not None else self.parallel.pieces
        weight = self.tokens.to(pieces[0].local.dtype)
        flat = torch.cat([*(p.local.flatten() * weight for p in pieces), weight[None]])
        if self.group is not None:
            distributed.all_reduce(flat, group=self.group)
        flat.div_(flat[-1].clone())
        for piece, mean in zip(pieces, flat[:-1].split([p.local.numel() for p in pieces]), strict=True):
            piece.local.copy_(mean.view_as(piece.local))
        if masters is not None:
            masters.give_parameters()
        self.since = 0
        self.tokens.zero_()
        return True
