"""Ulysses: exchange sequence shards for heads, attend to whole sequences, exchange back (Jacobs et al. 2023).

    q, k, v  [B, N, S/P, D]  → all-to-all →  [B, N/P, S, D]     attention of N/P heads, whole and unchanged
    output   [B, N/P, S, D]  → all-to-all →  [B, N, S/P, D]

Two all-to-alls forward (q, k and v in one message) and two backward, each sending (P−1)/P of the data of this rank: less
than a ring for large P, and any attention kernel, mask or window works unchanged. But P may not exceed the number of
heads, the messages are not hidden, and attention saves q, k and v of whole sequences for backward. These are the same bytes
as before the exchange (s·N/P = s/P·N), unless there are fewer KV heads than ranks. Then KV heads are repeated until each
rank has one, and the backward of the repeat sums the gradients of the copies.

Legend: B batch, N heads, K KV heads, S sequence, D head dim, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from meshwright.errors import MeshwrightError
from meshwright.parallel import operators

Heads = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _AllToAll(torch.autograd.Function):
    """Send row p to rank p and receive row p from rank p; backward exchanges the gradients in the same way."""

    @staticmethod
    def forward(ctx: Any, rows_PX: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_to_all(rows_PX, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output_PX: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_to_all(grad_output_PX, ctx.group), None


def all_to_all(rows_PX: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    rows_PX = rows_PX.contiguous()
    if torch.compiler.is_compiling():
        return operators.all_to_all(rows_PX, group.group_name)
    out = torch.empty_like(rows_PX)
    distributed.all_to_all_single(out, rows_PX, group=group)
    return out


def attend_by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ProcessGroup, attend: Heads
) -> torch.Tensor:
    """Attend to whole sequences with this rank's share of the heads. q, k and v have all heads of this rank's run of the sequence."""
    ranks, length = group.size(), q.shape[2]
    _check(q, k, ranks)
    k, v = (x.repeat_interleave(max(1, ranks // k.shape[1]), dim=1) for x in (k, v))

    by_heads = [x.unflatten(1, (ranks, -1)).movedim(1, 0) for x in (q, k, v)]  # [P, B, N/P, S/P, D]
    exchanged = _AllToAll.apply(torch.cat([x.flatten(1) for x in by_heads], dim=1), group)
    sizes = [x[0].numel() for x in by_heads]
    parts = [y.view(x.shape) for y, x in zip(exchanged.split(sizes, dim=1), by_heads, strict=True)]
    mixed = attend(*(p.permute(1, 2, 0, 3, 4).flatten(2, 3) for p in parts))

    by_sequence = mixed.unflatten(2, (ranks, length)).permute(2, 0, 1, 3, 4)  # [P, B, N/P, S/P, D]
    back = _AllToAll.apply(by_sequence.flatten(1), group).view(by_sequence.shape)
    return back.movedim(0, 1).flatten(1, 2)


def _check(q: torch.Tensor, k: torch.Tensor, ranks: int) -> None:
    heads, keys = q.shape[1], k.shape[1]
    if heads % ranks or (keys % ranks and ranks % keys):
        raise MeshwrightError(
            "MW-CP-002",
            f"{heads} heads and {keys} KV heads do not divide over {ranks} ranks",
            why="Ulysses gives each rank whole heads; if there are fewer KV heads than ranks, their number must divide the ranks",
            valid=["cp_kind=ring", "cp_kind=all-gather"],
        )
