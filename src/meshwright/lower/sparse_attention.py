"""Sparse attention with an indexer (DeepSeek-V3.2): a cheap score of all positions selects those that each query attends to.

    forward    scores of all candidates 2·I·s FLOPs per token (I: width of all indexer heads), then a top-k that reads them
    backward   the indexer learns to rank positions as attention weighs them: two products of the same size (a kernel that computes them for
               selected positions only does less)

The indexer is whole on every tensor-parallel rank, because all ranks must select the same positions. Its keys are one head wide; context parallelism
gathers them. Scores are computed in fp8 where the device has it; we price them in the workload's 16 bits, since recipes differ.
"""

from meshwright.describe.tensors import AttentionCore
from meshwright.lower.builder import BlockBuilder
from meshwright.lower.program import Op

SCORE_BYTES = 4.0


def select_positions(low: BlockBuilder, core: AttentionCore) -> None:
    """Add the projections of the indexer, its scores and the selection, and their backward."""
    b, m = low.b, low.m
    for linear in low.block.linears:
        if linear.name.startswith("index_"):
            low.gemm(linear.name, "attention", low.row_tokens, linear.d_out, linear.d_in)
    keys = b.tokens * b.cp * m.index_dim * low.element / max(core.ratio, 1)
    low.collective("F", "gather-index-keys", "attention", "all_gather", "cp", keys, (b.cp > 1) * 1.0)
    low.collective("I", "scatter-index-grad", "attention", "reduce_scatter", "cp", keys, (b.cp > 1) * 1.0)
    # Each tensor-parallel rank scores a share of the queries and gathers the positions that the others selected.
    seq, own = b.by_length(lambda length: length), b.tokens / b.tp
    candidates = b.by_length(lambda length: m.positions_of(core, length)[1])
    scores = own * candidates * SCORE_BYTES
    shape = (b.microbatch * m.index_heads, seq / b.cp / b.tp, seq / max(core.ratio, 1), float(m.index_dim))
    flops = 2.0 * own * core.index * candidates
    low.phases["F"].append(Op("index-scores", "attention", "attention", 1.0, flops, scores, shape, low.wide))
    low.phases["F"].append(Op("index-select", "attention", "memory", 1.0, bytes=3 * scores, launches=2.0))
    selected = b.tokens * m.index_top_k * SCORE_BYTES
    low.collective("F", "gather-selected", "attention", "all_gather", "tp", selected, low.with_tp)
    low.phases["I"].append(
        Op("index-scores-grad", "attention", "attention", 1.0, 2.0 * flops, 2 * scores, shape, low.wide)
    )
