"""Attention with dropout on its probabilities, as the runtime computes it: tile by tile, in torch operations and in float32.

Fused kernels draw random numbers that depend on how they cut the work, so that two plans never have the same mask. The runtime
computes the mask on every rank instead (`models.dropout`), which no fused kernel accepts. A tile has at most 2²⁴ scores. For each
score, forward reads or writes four bytes

    mask 2 · log-sum-exp 6 · exp(s − ℓ) 4 · the hash, 26 accesses of two bytes, and what it keeps 17.5 · p ∘ m 3        32.5 times

and backward, which recomputes the probabilities, 36.5 times: 6 for them, 17.5, and 13 for p ∘ m, m ∘ do vᵀ and ds. The products are
those of flash attention, two forward and five backward. Saved for backward are q, k, v, the output and ℓ, as by a fused kernel: dropout
costs time, not memory, except for the tile at work (five tensors) and for gradients that are accumulated in float32. Stacks that store
their softmax also save masks and dropped probabilities (`describe.mixers`); a vendor's fused kernel draws its own numbers and
costs as much as without dropout.

Dropout between the products is a separate pass, one read and one write, forward and backward: the mask is hashed in registers, and
eight bytes per token are kept to compute it again. Stacks that store masks have `Model.dropout`, a byte per element.
"""

import numpy as np

from meshwright.describe.tensors import AttentionCore
from meshwright.lower.attention_tiles import PRODUCTS, TILE, WIDE
from meshwright.lower.batch import Batch
from meshwright.lower.program import NARROW, Array, Op

ACCESSES = {"F": 32.5, "I": 36.5}  # reads and writes of a score
LAUNCHES = {"F": 45.0, "I": 60.0}  # kernels for each tile
LIVE = 5.0  # tensors of a tile at once: probabilities, their mask, the product of both, ds and what it is made of
TOKEN_BYTES = 8.0  # saved per token to recompute the mask between the products


def is_tiled(b: Batch) -> bool:
    """Whether attention runs tile by tile because its probabilities are dropped."""
    return bool(b.model.attention_dropout) and b.model.kind == "transformer" and b.stack.attention == "flash"


def computes_masks(b: Batch) -> bool:
    """Whether masks between the products are computed instead of stored."""
    return bool(b.model.dropout_rate) and not b.model.dropout


def computed_masks(b: Batch, kind: str) -> int:
    """The number of computed masks of a block: two of a layer, one of the embedding."""
    if kind == "embedding":
        return int(bool(b.model.embedding_rate) and not b.model.dropout)
    return 2 if computes_masks(b) and kind != "head" else 0


def core_ops(b: Batch, core: AttentionCore, heads: Array, positions: Array) -> dict[str, list[Op]]:
    """softmax(QKᵀ)V with some of its probabilities dropped, forward and backward."""
    flops = b.tokens * heads * (core.qk + core.v) * positions  # of each of the two products
    scores = b.tokens * heads * positions * WIDE
    operands = b.tokens * heads * (core.qk + core.v) * WIDE
    shape = (b.microbatch * heads, b.seq / b.cp, positions, float(core.qk))
    dtype = "fp32" if b.workload.precision in ("bf16", "fp16", *NARROW) else ""
    tiles = np.ceil(scores / WIDE / TILE)
    out = {}
    for phase, suffix in (("F", ""), ("I", "-grad")):
        times, moved, launches = PRODUCTS[phase], scores * ACCESSES[phase], LAUNCHES[phase] * tiles
        out[phase] = [
            Op(f"scores{suffix}", "attention", "gemm", times, flops, operands + scores, shape, dtype, launches=tiles),
            Op(f"softmax{suffix}", "attention", "memory", bytes=moved, launches=launches),
        ]
    return out


def working_bytes(b: Batch) -> Array:
    """Bytes of the running tile, of the gradients of q, k and v accumulated in float32, and of k and v."""
    core = b.model.blocks[b.model.layer_kinds[0]].attention
    if core is None or not is_tiled(b):
        return 0.0
    heads, kv = core.heads / b.tp, np.maximum(core.kv_heads / b.tp, 1.0)
    scores = b.tokens * heads * b.seq
    widened = b.tokens * (heads * core.qk + 2 * kv * (core.qk + core.v))
    return WIDE * (LIVE * np.minimum(scores, TILE) + widened)
