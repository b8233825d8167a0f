"""Ring and all-gather attention where no fused kernel returns the log-sum-exp: tile by tile, in torch operators and in float32.

Context parallelism merges the attention to blocks of keys from several ranks, for which it needs the log-sum-exp of each block. torch's fused
kernel for CPUs does not return it, so the runtime computes each block with torch operators (`Stack.tiled_context`). A rank with L = s/P
tokens computes one rectangle of scores for each of the P blocks. In a causal sequence cut zigzag these are L·L of its own block (the mask
hides half of them) and L·L/2 of each other block:

    scores = L²·(P + 1)/2 of each head          without zigzag, or not causal: L²·P

A tile has at most 2²⁴ scores, so a rectangle is one tile or more. For each score, forward reads or writes four bytes

    product 1 · log-sum-exp 6 · exp(s − ℓ) 4 · product 1                12 times, with 2 exponentials

and backward 15 times (probabilities 7, ds 8) with one exponential. Forward multiplies twice, backward five times. `OPERATORS` counts the torch
operators of one tile, views included, and of one layer; a test counts them in the runtime. They are most of the time on small sequences.
"""

from collections.abc import Mapping

import numpy as np

from meshwright.describe.plan_fields import CP_KINDS
from meshwright.describe.tensors import AttentionCore
from meshwright.lower.batch import Batch
from meshwright.lower.program import Array, Column, Op

TILE = 2.0**24  # scores of one tile
WIDE = 4.0  # bytes of a float32
PRODUCTS = {"F": 2.0, "I": 5.0}
ACCESSES = {"F": 12.0, "I": 15.0}  # reads and writes of a score
EXPONENTIALS = {"F": 2.0, "I": 1.0}
OPERATORS = {"F": (50.0, 19.0), "I": (83.0, 20.0)}  # torch operators of each tile, and of each layer
RING, GATHER = CP_KINDS.index("ring"), CP_KINDS.index("all-gather")


def in_tiles(b: Batch) -> Column:
    """Mark the plans of the batch that run attention in tiles because of context parallelism."""
    return b.stack.tiled_context & (b.cp > 1) & ((b.cp_kind == RING) | (b.cp_kind == GATHER))


def core_ops(b: Batch, core: AttentionCore, heads: Array, on: Array) -> dict[str, list[Op]]:
    """softmax(QKᵀ)V of one layer over all blocks of keys, forward and backward, for the plans where `on`."""
    seq, ranks = b.seq, b.cp
    zigzag = b.model.causal & ((b.cp_kind == RING) | (seq % (2 * ranks) == 0))
    rows = seq / ranks
    columns = rows * np.where(zigzag, (ranks + 1) / 2, ranks)
    products = b.microbatch * heads
    tiles = ranks * np.ceil(products * rows * columns / ranks / TILE)
    launches = {phase: each * tiles + once for phase, (each, once) in OPERATORS.items()}
    return tile_ops(products, rows, columns, float(core.qk), float(core.v), launches, on * 1.0)


def tile_ops(
    products: Array, rows: Array, columns: Array, qk: float, v: float, launches: Mapping[str, Array], count: Array = 1.0
) -> dict[str, list[Op]]:
    """The operations of tiles of `products` heads with rows × columns scores each."""
    scores = products * rows * columns
    flops = scores * (qk + v)  # of one product, the mean of both kinds
    moved = (products * (rows + columns) * (qk + v) / 2 + scores) * WIDE
    shape = (products, rows, columns, (qk + v) / 2)
    out = {}
    for phase, suffix in (("F", ""), ("I", "-grad")):
        passes, each = WIDE * ACCESSES[phase], scores * EXPONENTIALS[phase]
        times = count * PRODUCTS[phase]
        out[phase] = [
            Op(f"tiles{suffix}", "attention", "gemm", times, flops, moved, shape, "fp32", launches=0.0),
            Op(
                f"tile-softmax{suffix}",
                "attention",
                "tile",
                count,
                0.0,
                scores * passes,
                launches=launches[phase],
                exponentials=each,
            ),
        ]
    return out
