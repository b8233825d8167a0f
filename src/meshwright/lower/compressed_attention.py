"""Compressed attention (`describe.mixer_options`) under tensor, sequence and context parallelism, for one micro-batch.

Projections into latents, the compressor and the indexer are whole on every tensor-parallel rank and run on its own tokens under sequence
parallelism. What enters the tensor-parallel region is the latent of the queries and the shared KV vector. The groups of the output projection
are cut over tp with their heads. Context parallelism gathers the compressed KV vectors of all ranks, and each rank sends its last `window`
positions to the next one: much less than the keys and values of other attention.
"""

import numpy as np

from meshwright.lower import sparse_attention
from meshwright.lower.layer import LayerLowering


def compressed_attention(low: LayerLowering) -> None:
    """Add the operations of one layer's compressed attention."""
    b, m, t, e = low.b, low.m, low.b.tokens, low.element
    linears, core, o = low.linears, low.block.attention, m.compressed
    assert core is not None
    low.norm("norm-1")
    for name in ("q_a", "kv", "compress_kv", "compress_gate"):
        if name in linears:
            low.gemm(name, "attention", low.row_tokens, linears[name].d_out, linears[name].d_in)
    width = m.q_rank + core.qk
    low.memory("F", "latent-norm", "norm", low.row_tokens * width * e, 2, 2)
    low.memory("I", "latent-norm-grad", "norm", low.row_tokens * width * e, 4, 4)
    if core.ratio:
        pooled = low.row_tokens * 2 * linears["compress_kv"].d_out * e
        low.memory("F", "compress", "attention", pooled, 1 + 1 / core.ratio, 2)
        low.memory("I", "compress-grad", "attention", pooled, 2 + 1 / core.ratio, 3)
    low.enter_columns("attention", width, "q_b")
    heads = core.heads / b.tp
    low.gemm("q_b", "attention", t, low.columns(linears["q_b"]), m.q_rank)
    low.rotate(t * (heads + 1) * core.qk * e)
    _context(low, core.qk, core.window, core.ratio)
    if core.index:
        sparse_attention.select_positions(low, core)
    low.core(heads)
    inner = linears["o"].d_in
    groups = np.maximum(o.out_groups / b.tp, 1.0)
    low.gemm("o_a", "attention", t, o.out_rank * o.out_groups / b.tp / groups, linears["o_a"].d_in, products=groups)
    low.gemm("o", "attention", t, m.hidden, inner / b.tp)
    low.leave_rows("attention", m.hidden, inner, "o")
    low.residual("attention-residual")


def _context(low: LayerLowering, width: int, window: int, ratio: int) -> None:
    """Compressed positions of all ranks, and the window at the border to the rank before."""
    b, on = low.b, (low.b.cp > 1) * 1.0
    border = b.microbatch * window * width * low.element
    low.collective("F", "border-kv", "attention", "send", "cp", border, on)
    low.collective("I", "border-kv-grad", "attention", "send", "cp", border, on)
    if ratio:
        kv = b.tokens * b.cp / ratio * width * low.element
        low.collective("F", "gather-kv", "attention", "all_gather", "cp", kv, on)
        low.collective("I", "scatter-kv-grad", "attention", "reduce_scatter", "cp", kv, on)
