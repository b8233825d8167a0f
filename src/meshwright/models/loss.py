"""The loss of a language model: cross-entropy over the vocabulary, computed with its projection, chunk by chunk.

    z = x Wᵀ        [T, V], the largest tensor of many models: 16,384 tokens × 128,256 entries are 4 GiB in bf16 and 8 in fp32
    loss = Σ_t (log Σ_v exp(z_tv) − z_t,target)
    dz   = softmax(z) − onehot(target)        dx = dz W        dW = dzᵀ x

The loss of a token needs only its own row of z, and the gradient of the loss is known as soon as the loss is. So `linear_cross_entropy`
takes some rows at a time: it computes their logits, replaces them by their gradient in place, multiplies that with W and x, and
drops it. Forward does the whole work of backward; no more than one chunk of logits exists at any time.

dW is summed over chunks in float32, and returned so: whoever accumulates gradients in float32 adds it as it is. The factor by which
the loss is scaled is multiplied into dz before it is rounded, so that the loss scale of fp16 protects small gradients.

The head must know the targets to compute the loss: it finds them in the `step_context`, and without them it returns logits.
Where ranks split the vocabulary, the head returns logits too (`parallel.tensor.vocabulary`).

Private names of torch: `_foreach_mul_`, the product of tensors with one number on the device in one pass.

Legend: B batch, S sequence, T tokens, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.models.parts import at_least_single, soft_cap
from meshwright.models.step_context import Targets
from meshwright.models.wide_products import add_product

IGNORED = -100  # a target that is padding
CHUNK_BYTES = 2**29  # of logits


def cross_entropy(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
    """The cross-entropy, summed over valid tokens, in float32 or wider."""
    wide = logits_BSV.flatten(0, 1).to(at_least_single(logits_BSV.dtype))
    return F.cross_entropy(wide, target_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def linear_cross_entropy(x_BSH: Tensor, weight_VH: Tensor, targets: Targets, softcap: float = 0.0) -> Tensor:
    """The cross-entropy of the logits x Wᵀ, soft-capped if `softcap` is above 0, summed over valid tokens, times the factor."""
    flat_TH = x_BSH.flatten(0, -2)
    return _LinearCrossEntropy.apply(flat_TH, weight_VH, targets.target_BS.flatten(), targets.factor, softcap)


def rows_per_chunk(tokens: int, vocabulary: int, itemsize: int, limit: int = CHUNK_BYTES) -> int:
    """Equal chunks of tokens whose logits take at most `limit` bytes."""
    chunks = -(-tokens * vocabulary * itemsize // limit)
    return -(-tokens // max(1, chunks))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_VH: Tensor, target_T: Tensor, factor: Tensor, softcap: float) -> Tensor:
        trains_x, trains_weight = ctx.needs_input_grad[:2]
        size = rows_per_chunk(len(x_TH), len(weight_VH), x_TH.element_size())
        total = torch.zeros((), dtype=at_least_single(x_TH.dtype), device=x_TH.device)
        dx_TH = torch.empty_like(x_TH) if trains_x else None
        dw_VH: Tensor | None = None
        for start in range(0, len(x_TH), size):
            rows = slice(start, start + size)
            logits = x_TH[rows] @ weight_VH.t()
            logits = soft_cap(logits, softcap) if softcap else logits
            if not (trains_x or trains_weight):
                total += cross_entropy(logits[None], target_T[None, rows])
                continue
            slope = 1 - (logits / softcap).square_() if softcap else None  # of the soft cap, from its result
            loss_T, dz = loss_and_gradient(logits, target_T[rows], factor)
            dz = dz if slope is None else dz.mul_(slope)
            total += loss_T.sum()
            del logits
            if dx_TH is not None:
                torch.mm(dz, weight_VH, out=dx_TH[rows])
            if trains_weight:
                dw_VH = add_product(dw_VH, dz.t(), x_TH[rows])
            del dz  # before the next chunk is allocated
        ctx.save_for_backward(dx_TH, dw_VH)
        return total * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dx_TH, dw_VH = ctx.saved_tensors
        if dx_TH is not None:
            dx_TH = dx_TH.mul_(gradient)
        if (
            dw_VH is not None
        ):  # `foreach`, because torch's other product with one number on the device takes three times as long
            torch._foreach_mul_([dw_VH], gradient.to(dw_VH.dtype))
        return dx_TH, dw_VH, None, None, None


def loss_and_gradient(logits_TV: Tensor, target_T: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each token, and `factor` times its gradient in the memory of the logits. On a GPU one kernel reads them twice
    and writes them once."""
    if logits_TV.is_cuda and logits_TV.dtype != torch.float64:
        from meshwright.models import loss_kernel

        return loss_kernel.loss_and_gradient(logits_TV, target_T, factor)
    valid_T = target_T != IGNORED
    column_T1 = target_T.masked_fill(~valid_T, 0)[:, None]
    wide_TV = logits_TV.to(at_least_single(logits_TV.dtype))
    total_T = wide_TV.logsumexp(1)
    loss_T = (total_T - wide_TV.gather(1, column_T1)[:, 0]) * valid_T
    gradient_TV = (wide_TV - total_T[:, None]).exp_()
    gradient_TV.scatter_add_(1, column_T1, -torch.ones_like(column_T1, dtype=wide_TV.dtype))
    return loss_T, logits_TV.copy_(gradient_TV.mul_((valid_T * factor)[:, None]))
