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
matrix, and the boxes of O are returned, while other matrices are orthogonalised (`WholeMatrices`). AdamW's updates run while the first messages
travel. In 16-bit runs u and O are sent in bf16 and the iteration runs in bf16 on GPUs,
in fp32 on CPUs; in other runs everything has the dtype of the parameters.

Bring the boxes of a matrix together on the rank that computes its update, and return the boxes of the update.

`describe.sharding.boxes` says how each matrix is cut, who owns it, and in which round it is computed. Here the same table moves tensors: in
each round one all-to-all over each axis that cuts a matrix of the round, and the same in reverse. The messages of a round travel while other
rounds are computed. With one axis, and time running down:

    round 0          round 1          round 2
    there ───►
                     there ───►
    wait, compute
    back ───►
                                      there ───►
                     wait, compute
                     back ───►
    wait, use
                                      wait, compute

A round is a generator that yields while its messages are under way. In each turn one more round starts, and every started round continues,
the newest first: so all messages of a turn are issued before its products, and waited for in the next turn. The order of the messages is the
same on all ranks, because a round has the same axes on all of them, even where a rank has nothing to send.
"""

from collections.abc import Callable, Generator, Sequence
from math import prod, sqrt

import torch
from torch import Tensor, distributed

from meshwright.describe.sharding import DATA_AXES, Cut, Matrix
from meshwright.describe.sharding.boxes import NEWTON_SCHULZ_STEPS, axes_of, matrices
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.precision import at_least_single, narrow
from meshwright.parallel.pieces import Piece
from meshwright.parallel.sharded import Sharded
from meshwright.units import Json

AXES = tuple(axis for group in DATA_AXES for axis in axes_of(group))
Shape = Sequence[int]
Boxes = dict[int, Tensor]  # by the index of the matrix
Turns = Generator[None, None, None]


class WholeMatrices:
    """Applies a function of whole matrices, or of stacks of them, to matrices of which each rank holds a box; boxes are sent in `dtype`.
    Without `overlap` each message is waited for at once."""

    def __init__(self, matrices: Sequence[Matrix], mesh: Mesh, dtype: torch.dtype, overlap: bool = True) -> None:
        self.matrices, self.mesh, self.dtype, self.overlap = matrices, mesh, dtype, overlap
        numbers = sorted({m.round for m in matrices})
        self.rounds = [[i for i, m in enumerate(matrices) if m.round == number] for number in numbers]

    def apply(
        self,
        box: Callable[[int], Tensor],
        function: Callable[[Tensor], Tensor],
        use: Callable[[int, Tensor], None],
        meanwhile: Callable[[], None],
    ) -> None:
        """Compute function(matrix) for all matrices, in rounds: `box` makes this rank's box of a matrix, `use` gets this rank's box of the
        result. `meanwhile` runs once, behind the first messages."""
        waiting = [self._round(members, box, function, use) for members in self.rounds]
        started = [one for one in waiting[:1] if takes_turn(one)]
        meanwhile()
        for newest in waiting[1:]:
            started = [one for one in (newest, *started) if takes_turn(one)]
        while started:
            started = [one for one in started if takes_turn(one)]

    def _round(
        self,
        members: list[int],
        box: Callable[[int], Tensor],
        function: Callable[[Tensor], Tensor],
        use: Callable[[int, Tensor], None],
    ) -> Turns:
        """One round; it yields while messages are under way."""
        here, ways = {i: box(i) for i in members}, list[tuple[str, dict[int, Shape]]]()
        axes = [axis for axis in AXES if any(self.matrices[i].cut_over(axis) for i in members)]
        if not axes:
            yield
        for axis in axes:
            moving = {i: here.pop(i) for i in list(here) if self.matrices[i].cut_over(axis)}
            ways.append((axis, {i: part.shape for i, part in moving.items()}))
            here |= yield from self._to_owners(axis, moving)
        for same in equal_shapes(here):
            results = function(torch.stack([here[i] for i in same])) if len(same) > 1 else [function(here[same[0]])]
            here |= {i: result.to(self.dtype) for i, result in zip(same, results, strict=True)}
        for axis, shapes in reversed(ways):
            here |= yield from self._to_holders(axis, {i: here.pop(i) for i in shapes if i in here}, shapes)
        for i in members:
            use(i, here.pop(i))

    def _to_owners(self, axis: str, boxes: Boxes) -> Generator[None, None, Boxes]:
        """Send each box to the owner of its matrix on this axis; returns the matrices that this rank owns, whole along the axis."""
        ranks, own = range(self.mesh.size(axis)), self.mesh.index(axis)
        owner = {i: self.matrices[i].owner_on(axis) for i in boxes}
        mine = {i: self._cut(i, axis) for i in boxes if owner[i] == own}
        arrived = yield from self._exchange(
            axis,
            [[boxes[i] for i in boxes if owner[i] == rank] for rank in ranks],
            [[resized(boxes[i].shape, cut.dim, length(cut, rank)) for i, cut in mine.items()] for rank in ranks],
        )
        out = {i: boxes[i].new_empty(resized(boxes[i].shape, cut.dim, cut.length)) for i, cut in mine.items()}
        for rank in ranks:
            for box, (i, cut) in zip(arrived[rank], mine.items(), strict=True):
                box_of(out[i], cut, rank).copy_(box)
        return out

    def _to_holders(self, axis: str, wholes: Boxes, shapes: dict[int, Shape]) -> Generator[None, None, Boxes]:
        """Send to each rank its box of the matrices that this rank owns; returns this rank's boxes of all of them, which have `shapes`."""
        ranks = range(self.mesh.size(axis))
        of_owner = [[i for i in shapes if self.matrices[i].owner_on(axis) == rank] for rank in ranks]
        arrived = yield from self._exchange(
            axis,
            [[box_of(whole, self._cut(i, axis), rank) for i, whole in wholes.items()] for rank in ranks],
            [[shapes[i] for i in owned] for owned in of_owner],
        )
        return {
            i: box for owned, boxes in zip(of_owner, arrived, strict=True) for i, box in zip(owned, boxes, strict=True)
        }

    def _exchange(
        self, axis: str, leaving: list[list[Tensor]], shapes: list[list[Shape]]
    ) -> Generator[None, None, list[list[Tensor]]]:
        """One all-to-all of the tensors for each rank; returns those of each rank, of which `shapes` are known. Yields while it is under
        way."""
        flat = [box.to(self.mesh.device, self.dtype).flatten() for boxes in leaving for box in boxes]
        sent = torch.cat(flat) if flat else torch.empty(0, dtype=self.dtype, device=self.mesh.device)
        sizes = [[prod(shape) for shape in of_rank] for of_rank in shapes]
        received = sent.new_empty(sum(map(sum, sizes)))
        out, into = [sum(box.numel() for box in boxes) for boxes in leaving], [sum(of_rank) for of_rank in sizes]
        work = distributed.all_to_all_single(received, sent, into, out, self.mesh.group(axis), self.overlap)
        yield
        if work is not None:
            work.wait()
        parts = iter(received.split([size for of_rank in sizes for size in of_rank]))
        return [[next(parts).view(tuple(shape)) for shape in of_rank] for of_rank in shapes]

    def _cut(self, i: int, axis: str) -> Cut:
        cut = self.matrices[i].cut_over(axis)
        assert cut is not None
        return cut


def takes_turn(one: Turns) -> bool:
    """Let a round run until its next messages are under way; False if it has ended."""
    return next(one, True) is None


def equal_shapes(matrices: Boxes) -> list[list[int]]:
    """The matrices of a round in stacks of equal shape: a few batched products instead of many small ones."""
    stacks: dict[Shape, list[int]] = {}
    for i, matrix in matrices.items():
        stacks.setdefault(tuple(matrix.shape), []).append(i)
    return list(stacks.values())


def length(cut: Cut, rank: int) -> int:
    start, stop = cut.ranges[rank]
    return stop - start


def resized(shape: Shape, dim: int, size: int) -> tuple[int, ...]:
    """The shape with another length of one dimension."""
    return *shape[:dim], size, *shape[dim + 1 :]


def box_of(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    """The part of a tensor, whole along the cut, that a rank of the axis holds."""
    start, stop = cut.ranges[rank]
    return whole.narrow(cut.dim, start, stop - start)


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
