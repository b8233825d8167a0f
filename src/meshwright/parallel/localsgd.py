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

from meshwright.errors import MeshwrightError
from meshwright.parallel.zero import buckets_of

if TYPE_CHECKING:
    from meshwright.parallel.apply import Parallel


class LocalSgd:
    """Put on a `Parallel`, before its training starts."""

    def __init__(self, parallel: Parallel, every: int) -> None:
        plan, mesh = parallel.plan, parallel.mesh
        if every < 1 or plan.zero or plan.cp > 1 or plan.ep > 1:
            raise MeshwrightError("MW-PAR-004", f"local SGD every {every} steps on {plan.title()}",
                                  why="Replicas must be whole: with ZeRO, cp or ep they need each other in every step",
                                  valid=["replicate with tp and pp", "every ≥ 1"])  # fmt: skip
        self.every, self.parallel = every, parallel
        self.group = mesh.group("replicate")
        self.replica = self._replica_group()
        self.since, self.tokens = 0, torch.zeros((), dtype=torch.float64, device=mesh.device)
        for bucket in buckets_of(parallel.reductions):
            bucket.group = None
        parallel.local = self

    def _replica_group(self) -> ProcessGroup | None:
        """The ranks of one replica: over which norms and losses are summed."""
        mesh = self.parallel.mesh
        ranks = range(mesh.size("world"))
        places = [mesh.layout.coordinates(rank)["replicate"] for rank in ranks]
        groups = [[rank for rank in ranks if places[rank] == i] for i in range(mesh.size("replicate"))]
        return mesh._new_groups(groups) if len(groups[0]) > 1 else None

    def group_of(self, axis: str) -> ProcessGroup | None:
        """In the place of the mesh's: the data axes are quiet, the world is this replica."""
        if axis in ("dp", "dp_cp", "replicate"):
            return None
        return self.replica if axis == "world" else self.parallel.mesh.group(axis)

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
