"""Attention whose probabilities are dropped, as the runtime computes it: tile by tile, in torch's own operations and in float32.

Fused kernels draw numbers that depend on how they cut the work, so no mask is the same under two plans; here every rank computes
the mask it needs (`models.dropout`), and no kernel takes it. A tile has at most 2²⁴ scores. For each of them forward reads or writes
four bytes

    mask 2 · log-sum-exp 6 · exp(s − ℓ) 4 · the hash, 26 touches of two bytes, and what it keeps 17.5 · p ∘ m 3        32.5 times

and backward, which makes the probabilities again, 36.5 times: 6 for them, 17.5, and 13 for p ∘ m, m ∘ do vᵀ and ds. Products are
flash attention's, two forward and five backward. Kept are q, k, v, the output and ℓ, as by a fused kernel: dropping costs time, not
memory, but for the tile at work (five tensors) and gradients that are summed wide. Of stacks that keep their softmax, masks
and dropped probabilities are kept beside it (`describe.anatomy`); a vendor's kernel (`fused`) draws its own numbers and costs
what it costs without.

Dropping between the products is a pass of its own, one read and one write forward and backward: hashed in registers, and of the
mask eight bytes a token are kept. Stacks that keep masks have `Model.dropout`, a byte an element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.lower.batch import Batch
from meshwright.lower.op import NARROW, Array, Op

if TYPE_CHECKING:
    from meshwright.lower.layer import LayerLowering

TILE = 2.0**24  # scores at once
FORWARD, BACKWARD = 32.5, 36.5  # reads and writes of a score
LIVE = 5.0  # tensors of a tile at once: probabilities, their mask, both multiplied, ds and what it is made of
WIDE = 4.0  # bytes of all this
TOKEN_BYTES = 8.0  # of a mask between the products, for each token


def in_tiles(b: Batch) -> bool:
    return bool(b.model.attention_dropout) and b.model.kind == "transformer" and b.stack.attention == "flash"


def hashes(b: Batch) -> bool:
    """Whether masks between the products are computed, not kept."""
    return bool(b.model.dropout_rate) and not b.model.dropout


def core(low: LayerLowering, heads: Array, positions: float) -> None:
    """softmax(QKᵀ)V with some of its probabilities dropped."""
    b, attention = low.b, low.block.attention
    assert attention is not None
    seq = float(b.workload.seq)
    flops = b.tokens * heads * (attention.qk + attention.v) * positions  # of each of the two products
    scores = b.tokens * heads * positions * WIDE
    operands = b.tokens * heads * (attention.qk + attention.v) * WIDE
    shape = (b.microbatch * heads, seq / b.cp, positions, float(attention.qk))
    dtype = "fp32" if b.workload.precision in ("bf16", "fp16", *NARROW) else ""
    count = np.ceil(scores / WIDE / TILE)
    for phase, products, passes, launches in (("F", 2.0, FORWARD, 45.0), ("I", 5.0, BACKWARD, 60.0)):
        name = "" if phase == "F" else "-grad"
        product = Op(
            f"scores{name}", "attention", "gemm", products, flops, operands + scores, shape, dtype, launches=count
        )
        low.phases[phase].append(product)
        low.memory(phase, f"softmax{name}", "attention", scores, passes, launches * count)


def working(b: Batch) -> Array:
    """Bytes of the tile at work, and of gradients of q, k and v that are summed wide, with k and v beside them."""
    block = b.model.blocks[b.model.layer_kinds[0]].attention
    if block is None or not in_tiles(b):
        return 0.0
    heads, kv = block.heads / b.tp, np.maximum(block.kv_heads / b.tp, 1.0)
    scores = b.tokens * heads * b.workload.seq
    widened = b.tokens * (heads * block.qk + 2 * kv * (block.qk + block.v))
    return WIDE * (LIVE * np.minimum(scores, TILE) + widened)
