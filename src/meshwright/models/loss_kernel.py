"""`loss_and_gradient` on a GPU: one program per token reads its logits, and writes their gradient over them.

The first loop finds the maximum and the sum of exponentials together: when a later block has a larger maximum, the sum so far is
rescaled. The second loop reads the row again, mostly from the L2 cache, and writes factor · (softmax − onehot).

Legend: T tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits that a program handles at a time
WARPS = 16


@triton.jit
def loss_kernel(logits_TV, target_T, loss_T, factor, width, size: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits_TV + row * width
    target = tl.load(target_T + row)
    valid = target >= 0
    column = tl.arange(0, size)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for first in range(0, width, size):
        z = tl.load(start + first + column, mask=first + column < width, other=float("-inf")).to(tl.float32)
        most = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - most) + tl.sum(tl.exp(z - most), 0)
        largest = most
    log_total = largest + tl.log(total)
    picked = tl.load(start + tl.where(valid, target, 0)).to(tl.float32)
    tl.store(loss_T + row, tl.where(valid, log_total - picked, 0.0))
    tl.debug_barrier()  # every thread has read the target's logit before it is overwritten
    scale = tl.where(valid, tl.load(factor).to(tl.float32), 0.0)
    for first in range(0, width, size):
        inside = first + column < width
        z = tl.load(start + first + column, mask=inside).to(tl.float32)
        gradient = tl.exp(z - log_total) - (first + column == target).to(tl.float32)
        tl.store(start + first + column, gradient * scale, mask=inside)


def loss_and_gradient(logits_TV: Tensor, target_T: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each token in float32, and `factor` times its gradient in the memory of the logits. A target below 0 is padding."""
    assert logits_TV.is_contiguous()
    tokens, width = logits_TV.shape
    loss_T = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    if tokens:
        loss_kernel[(tokens,)](logits_TV, target_T.contiguous(), loss_T, factor, width, BLOCK, num_warps=WARPS)
    return loss_T, logits_TV
