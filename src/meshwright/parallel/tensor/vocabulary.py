"""The two ends of a model split over the vocabulary: the embedding, and a loss that never gathers the logits.

    embedding   a rank looks up the tokens whose rows it has, and zero for the others: the sum over ranks is complete
    loss        −log softmax(z)_t = log Σ_v exp(z_v − m) − (z_t − m),  m = max_v z_v

Each rank has the logits of its part of the vocabulary. The maximum takes one all-reduce, the sum of exponentials and the
target's logit another, of one and of two numbers per token: 3·T values instead of the T·V of gathered logits. The
gradient, softmax(z) − onehot(t), needs no communication: each rank computes its own columns. Backward computes the softmax again from the logits,
which are in 16 bits, and one number per token. What it computes from them depends on the incoming gradient, by a zero: without it torch's compiler
computes the softmax in forward and keeps T·V numbers in float32 for backward.

A token outside the vocabulary is on no rank: the embedding would silently be zero. On a CPU it is checked, as
`F.embedding` does on one device; on a GPU the check would make the host wait for the device, so there it is not made.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.errors import MeshwrightError
from meshwright.models.loss import IGNORED
from meshwright.models.parts import at_least_single
from meshwright.parallel import exchange


def check_ids(ids: Tensor, vocabulary: int, what: str) -> None:
    """Raise for ids outside the vocabulary, on a CPU."""
    if ids.device.type != "cpu" or not ids.numel():
        return
    least, most = (int(end) for end in ids.aminmax())
    if least < 0 or most >= vocabulary:
        raise MeshwrightError(
            "MW-TP-010",
            f"{what} {least if least < 0 else most} is not in the vocabulary of {vocabulary}",
            why="No tensor-parallel rank has a row for it",
            valid=[f"0 to {vocabulary - 1}"],
        )


def embed(ids: Tensor, weight: Tensor, start: int, vocabulary: int, padding: int | None = None) -> Tensor:
    """Rows of this rank's part of a table of `vocabulary` rows, which begins at `start`; zero where another rank has the
    row. A `padding` row of this part is looked up and not trained."""
    check_ids(ids, vocabulary, "token")
    local = ids - start
    absent = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(absent, 0), weight, padding)
    return rows.masked_fill(absent.unsqueeze(-1), 0.0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, target_T: Tensor, start: int, group: ProcessGroup) -> Tensor:
        valid_T = target_T != IGNORED
        local_T = target_T - start
        mine_T = valid_T & (local_T >= 0) & (local_T < logits_TV.shape[1])
        local_T = local_T.masked_fill(~mine_T, 0)
        wide = at_least_single(logits_TV.dtype)
        largest_T = exchange.all_reduce(logits_TV.amax(1).to(wide), group, "max")
        shifted_TV = logits_TV.to(wide) - largest_T[:, None]
        picked_T = shifted_TV.gather(1, local_T[:, None])[:, 0].masked_fill(~mine_T, 0.0)
        total_T, picked_T = exchange.all_reduce(torch.stack((shifted_TV.exp_().sum(1), picked_T)), group)
        column_T = torch.where(mine_T, local_T, -1)
        ctx.save_for_backward(logits_TV, largest_T + total_T.log(), column_T, valid_T)
        return ((total_T.log() - picked_T) * valid_T).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, normaliser_T, column_T, valid_T = ctx.saved_tensors
        scale_T = (valid_T * gradient)[:, None]
        columns_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
        softmax_TV = (logits_TV - (normaliser_T + 0 * gradient)[:, None]).exp()
        gradient_TV = torch.where(columns_V == column_T[:, None], softmax_TV * scale_T - scale_T, softmax_TV * scale_T)
        return gradient_TV.to(logits_TV.dtype), None, None, None


def cross_entropy(logits_BSV: Tensor, target_BS: Tensor, start: int, vocabulary: int, group: ProcessGroup) -> Tensor:
    """Summed over valid tokens; `logits` are this rank's columns of a `vocabulary`, which begin at `start`."""
    check_targets(target_BS, vocabulary)
    return sum_of_losses(logits_BSV, target_BS, start, group)


def check_targets(target_BS: Tensor, vocabulary: int) -> None:
    """Raise for targets outside the vocabulary, on a CPU."""
    check_ids(target_BS[target_BS != IGNORED], vocabulary, "target")


def sum_of_losses(logits_BSV: Tensor, target_BS: Tensor, start: int, group: ProcessGroup) -> Tensor:
    """The loss without the check of its targets, which a compiled graph cannot contain."""
    return _CrossEntropy.apply(logits_BSV.flatten(0, 1), target_BS.flatten(), start, group)
