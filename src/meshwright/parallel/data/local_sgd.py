"""Local SGD: replicas train independently for k steps and then average their parameters, for links too slow for gradients.

    every step      w_r ← w_r − η·∇ mean_r           each replica on its own tokens, nothing is sent
    every k steps   w ← Σ_r T_r·w_r / Σ_r T_r        weighted by the tokens each has seen since the last average

Traffic is divided by k: one all-reduce of the parameters instead of k of the gradients. With k = 1 and plain SGD the
weighted average *is* the data-parallel step,

    Σ_r (T_r/T)(w − η·∇ mean_r) = w − η·(Σ_r ∇ sum_r) / T

which is what the proof checks. The price of k > 1: replicas diverge by about η·k times the spread of their gradients, so
the average lags a true large-batch step (k = 4 to 16 costs little with a decayed rate, hundreds need an outer
optimizer, as DiLoCo has); Adam's moments and clipping are per replica, so under AdamW even k = 1 is close to
data-parallel training but not equal to it. The reported loss is the replica's.

Inside a replica tensor and pipeline parallelism work as always; only over the replicate axis nothing is sent between
averages.

On your own module, whose replicas start with equal parameters:

    average = Average(list(module.parameters()), group, every=8)
    optimizer.step(); average.after_update(tokens)                       # the tokens of this replica's step
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from meshwright.errors import MeshwrightError
from meshwright.parallel.data.reduction import Reduction, buckets_in
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.precision import Masters, at_least_single
from meshwright.parallel.pieces import Piece

LEAST = 1e-12  # tokens: replicas that have all seen none are averaged with equal weights


class Average:
    """Averages tensors over replicas every k steps, weighted by the tokens each has seen. No group: a single replica."""

    def __init__(self, tensors: Sequence[Tensor], group: ProcessGroup | None, every: int) -> None:
        if every < 1 or not tensors:
            raise MeshwrightError(
                "MW-PAR-007",
                f"an average of {len(tensors)} tensors every {every} steps",
                why="Both numbers must be at least 1",
            )
        self.tensors, self.group, self.every = tensors, group, every
        self.since, self.tokens = 0, torch.zeros((), dtype=torch.float64, device=tensors[0].device)

    @torch.no_grad()
    def after_update(self, tokens: Tensor | float) -> bool:
        """Count the step; average if it is the k-th. Returns whether it averaged."""
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
    """Local SGD over the replicas of a mesh: averages `pieces`, which are masters where there are some."""

    def __init__(
        self, mesh: Mesh, every: int, pieces: Sequence[Piece], masters: Masters | None, reductions: list[Reduction]
    ) -> None:
        self.mesh, self.masters = mesh, masters
        super().__init__([p.local for p in pieces], mesh.group("replicate"), every)
        for bucket in buckets_in(reductions):
            bucket.group = None  # gradients stay with their replica

    def groups(self, axis: str) -> list[ProcessGroup]:
        """The groups over which a replica sums in place of the mesh's axis: nothing is summed over the data axes, and the
        world is this replica's tp and pp ranks."""
        axes = {"world": ("tp", "pp"), "dp": (), "dp_cp": (), "replicate": ()}.get(axis, (axis,))
        return [group for group in map(self.mesh.group, axes) if group is not None]

    def after_update(self, tokens: Tensor | float) -> bool:
        averaged = super().after_update(tokens)
        if averaged and self.masters is not None:
            self.masters.give_parameters()
        return averaged
