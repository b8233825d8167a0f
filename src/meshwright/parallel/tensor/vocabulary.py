"""The two ends of the model split over the vocabulary: the embedding looks up rows, the loss never sees whole logits.

    embedding   a rank looks up the tokens whose rows it has, and zero for the others: the sum over ranks is whole
    loss        −log softmax(z)_t = log Σ_v exp(z_v − m) − (z_t − m),  m = max_v z_v

Each rank has the logits of its own vocabulary. The maximum takes one all-reduce, the sum of exponentials and the
target's logit another, of one and of two numbers a token: 3·T values in all instead of the T·V of gathered logits.
The gradient, softmax(z) − onehot(t), needs nothing more: each rank computes its own columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.models.transformer import IGNORED


def embed(ids: torch.Tensor, weight: torch.Tensor, start: int, padding: int | None = None) -> torch.Tensor:
    """Rows of this rank's part of the table, which begins at `start`; zero where another rank has the row. A `padding`
    row of this part is looked up and not trained."""
    local = ids - start
    absent = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(absent, 0), weight, padding)
    return rows.masked_fill(absent.unsqueeze(-1), 0.0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, target_T: torch.Tensor, start: int, group: ProcessGroup
    ) -> torch.Tensor:
        valid_T = target_T != IGNORED
        local_T = target_T - start
        mine_T = valid_T & (local_T >= 0) & (local_T < logits_TV.shape[1])
        local_T = local_T.masked_fill(~mine_T, 0)
        largest_T = logits_TV.amax(1)
        distributed.all_reduce(largest_T, distributed.ReduceOp.MAX, group=group)
        shifted_TV = logits_TV - largest_T[:, None]
        picked_T = shifted_TV.gather(1, local_T[:, None])[:, 0].masked_fill(~mine_T, 0.0)
        exponential_TV = shifted_TV.exp_()
        sums = torch.stack((exponential_TV.sum(1), picked_T))
        distributed.all_reduce(sums, group=group)
        total_T, picked_T = sums
        probability_TV = exponential_TV.div_(total_T[:, None])
        ctx.save_for_backward(probability_TV, local_T, mine_T, valid_T)
        return ((total_T.log() - picked_T) * valid_T).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probability_TV, local_T, mine_T, valid_T = ctx.saved_tensors
        slope_TV = probability_TV.scatter_add(1, local_T[:, None], -mine_T[:, None].to(probability_TV.dtype))
        return slope_TV.mul_((valid_T * gradient)[:, None]), None, None, None


def cross_entropy(logits_BSV: torch.Tensor, target_BS: torch.Tensor, start: int, group: ProcessGroup) -> torch.Tensor:
    """Summed over valid tokens; `logits` are this rank's columns, which begin at `start`."""
    wide = logits_BSV.flatten(0, 1).to(torch.promote_types(logits_BSV.dtype, torch.float32))
    return _CrossEntropy.apply(wide, target_BS.flatten(), start, group)
