"""Muon: momentum SGD whose update of a matrix is made orthogonal (Jordan et al. 2024), for the matrices of the layers.

    m ← μ·m + (1 − μ)·g                 momentum, element by element, sharded as the parameters are
    u = (1 − μ)·g + μ·m                 Nesterov's look ahead
    O = U·Vᵀ of u = U·Σ·Vᵀ              all directions get equal length: rare ones learn as fast as frequent ones
    w ← w·(1 − η·λ) − η · 0.2·√max(rows, columns) · O

O is found without a decomposition, by five steps of a Newton-Schulz iteration on X = u / ‖u‖ (singular values between 0 and 1):

    A = X·Xᵀ      X ← a·X + (b·A + c·A²)·X        a, b, c = 3.4445, −4.7750, 2.0315

which moves every singular value towards 1 (to between 0.7 and 1.2; more exactly is not needed). The factor 0.2·√max(rows, columns) gives the
update the size of an AdamW update, so that a learning rate and weight decay tuned for AdamW can be kept (Liu et al. 2025).

Embeddings, the head, routers, norm weights and biases are updated by AdamW with the same learning rate: their rows or entries are not the
directions of one linear map.

Under tensor parallelism and ZeRO a rank holds a box of each matrix. u is computed on the boxes, brought together on one rank for each
matrix, and the boxes of O are returned, while other matrices are orthogonalised (`whole_matrices`). AdamW's updates run while the first messages
travel. In 16-bit runs u and O are sent in bf16 and the iteration runs in bf16 on GPUs,
in fp32 on CPUs; in other runs everything has the dtype of the parameters.
"""

from math import sqrt

import torch
from torch import Tensor

from meshwright.describe.sharding.boxes import NEWTON_SCHULZ_STEPS, matrices
from meshwright.parallel.numerics.precision import at_least_single, narrow
from meshwright.parallel.pieces import Piece
from meshwright.parallel.sharded import Sharded
from meshwright.training.optimizer.whole_matrices import WholeMatrices
from meshwright.units import Json

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7  # a matrix whose momentum is zero has no update
MATCH_ADAMW = 0.2  # the typical size of an AdamW update, in learning rates


def orthogonalise(u: Tensor) -> Tensor:
    """The matrix, or each of a stack of matrices, with all its singular values moved to about 1."""
    tall = u.shape[-2] > u.shape[-1]
    x = (u.mT if tall else u).reshape(-1, min(u.shape[-2:]), max(u.shape[-2:]))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).reshape(u.shape)


class Muon(torch.optim.Optimizer):
    """Muon for the groups marked `orthogonal`, AdamW for the other groups."""

    def __init__(
        self,
        groups: list[Json],
        pieces: list[Piece],
        parallel: Sharded,
        momentum: float,
        adamw: torch.optim.AdamW | None,
    ) -> None:
        self.adamw = adamw
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum})
        self.pieces = [p for p in pieces if p.box.parameter.role == "matrix"]
        found = matrices([p.box for p in self.pieces], parallel.degrees)
        sixteen = narrow(parallel.dtype)
        self.dtype = torch.bfloat16 if sixteen else parallel.dtype
        on_gpu = torch.device(parallel.mesh.device).type == "cuda"
        self.compute = self.dtype if on_gpu else at_least_single(self.dtype)
        self.device = parallel.mesh.device
        overlap = parallel.plan.overlap is None or "dp" in parallel.plan.overlap
        self.whole = WholeMatrices(found, parallel.mesh, self.dtype, overlap)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters; a collective of the ranks that hold parts of the same matrices."""
        group_of = {p: group for group in self.param_groups for p in group["params"]}

        def momentum(i: int) -> Tensor:
            return self._momentum(self.pieces[i], group_of[self.pieces[i].parameter])

        def update(i: int, orthogonal: Tensor) -> None:
            piece = self.pieces[i]
            group, local = group_of[piece.parameter], piece.local
            size = group["lr"] * MATCH_ADAMW * sqrt(max(piece.full_shape[-2:]))
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(orthogonal.to(local), alpha=-size)

        if self.pieces:
            self.whole.apply(momentum, self._orthogonal, update, meanwhile=self._step_adamw)
        else:
            self._step_adamw()

    def _step_adamw(self) -> None:
        """Update the parameters that are not matrices."""
        if self.adamw is None:
            return
        # Its groups and states are those of this optimizer, which hooks, schedules and checkpoints see.
        self.adamw.param_groups = [group for group in self.param_groups if not group["orthogonal"]]
        self.adamw.state = self.state
        self.adamw.step()

    def _momentum(self, piece: Piece, group: Json) -> Tensor:
        """Add the gradient of a piece to its momentum; returns u in the dtype in which it is sent."""
        gradient, state = piece.gradient, self.state[piece.parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(piece.local)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]).to(self.device, self.dtype)

    def _orthogonal(self, whole: Tensor) -> Tensor:
        return orthogonalise(whole.to(self.compute))
