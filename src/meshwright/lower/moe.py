"""The experts of a layer: route, dispatch, compute, combine.

Each token goes to k of E experts. With ep ranks that hold E/ep experts each, dispatch is an all-to-all: a rank sends k copies of its
tokens, t·k·h bytes in total, of which (ep−1)/ep leave it. Combine sends the results back, and backward repeats both: four all-to-alls per
layer and micro-batch. (4·B·S·H·(E−1)/E, an often quoted formula, omits k and has E in the place of the degree of expert parallelism.)

Experts re-factorise the ranks of a stage: expert_tp · ep · expert_dp = tp · cp · dp. A rank dispatches 1/tp of its tensor-parallel
group's tokens, and an all-gather over expert_tp completes the input of a split expert (a reduce-scatter its output). The busiest rank
receives `Batch.busiest` times the mean (its capacity at most), and all wait for it: its products and its messages are those of the step. A
capacity below 1 drops copies before they are sent. Where experts compare
tokens, the scores of all tokens are gathered. A router's product is priced at the rate of 16-bit operands, as published stacks and
our trainer on GPUs run it (`models.wide_products`: float32 results of bf16 operands). Latent experts (`expert_hidden`) work in a narrower
width than the model: one product before dispatch and one after combine project each token down and up, and what is sent shrinks with the
width.
"""

import numpy as np

from meshwright.lower.builder import QUANTISED_IN
from meshwright.lower.layer import LayerLowering
from meshwright.lower.program import Array

COUNT_BYTES = 8.0
ROUTE_LAUNCHES, PERMUTE_LAUNCHES = 20.0, 8.0
NARROW = ("fp8", "mxfp8", "fp4")
LOOP_OPERATORS = 2.0  # of one expert in one phase of a product that does not quantise (`_experts`)


def experts(low: LayerLowering) -> None:
    """Add the operations of a layer's experts."""
    b, m, e = low.b, low.m, low.element
    low.norm("norm-2")
    # Tokens this rank routes: its part of the sequence under sequence parallelism, else its slice of the tp group's tokens.
    own = b.tokens / b.tp
    low.gemm("router", "router", own, m.experts, m.hidden, dtype=low.wide)
    launches = ROUTE_LAUNCHES * b.stack.bare_operator
    low.memory("F", "route", "router", own * m.experts * 4, 4, launches)
    low.memory("I", "route-grad", "router", own * m.experts * 4, 4, launches)
    wide = max(4.0, e)
    if m.router.aux or m.router.z:  # loads and token counts, of all tokens in flight or of each sequence
        on = (b.size("stage") > 1) * 1.0
        parts = b.dp * b.microbatch if m.router.aux_scope == "sequence" else 1.0
        low.collective("F", "sum-balance", "router", "all_reduce", "stage", parts * (m.experts + 1) * wide, on)
    if m.router.compares:  # every rank sees the scores of all tokens in flight, to decide as one device would
        stage = b.size("stage")
        low.collective("F", "gather-scores", "router", "all_gather", "stage", own * stage * m.experts * wide, stage > 1)
    if m.expert_hidden:
        low.gemm("latent-down", "latent", own, m.expert_hidden, m.hidden)
    sent_copies = m.top_k * m.router.travelling
    copies = own * sent_copies * m.routed_width * e
    _permute(low, copies)
    received = own * m.top_k * np.maximum(b.busiest, m.router.travelling) * m.routed_width * e
    with_ep = (b.ep > 1) * 1.0
    with_etp = (b.etp > 1) * 1.0
    for phase in ("F", "I"):
        name = "dispatch" if phase == "F" else "combine-grad"
        low.collective(phase, name, "experts", "all_to_all", "ep", received, with_ep, copies=sent_copies)
        low.collective(phase, "expert-gather", "experts", "all_gather", "expert_tp", received * b.etp, with_etp)
    # The numbers of copies are exchanged first.
    low.collective("F", "counts", "experts", "all_to_all", "ep", COUNT_BYTES * m.experts, with_ep)
    low.collective("F", "counts", "experts", "all_gather", "expert_tp", COUNT_BYTES * m.experts * b.etp, with_etp)
    _experts(low, own * m.top_k * b.etp * b.busiest)
    for phase in ("F", "I"):
        low.collective(phase, "expert-scatter", "experts", "reduce_scatter", "expert_tp", received * b.etp, with_etp)
        name = "combine" if phase == "F" else "dispatch-grad"
        low.collective(phase, name, "experts", "all_to_all", "ep", received, with_ep, copies=sent_copies)
    _permute(low, copies)
    if m.expert_hidden:
        low.gemm("latent-up", "latent", own, m.hidden, m.expert_hidden)
    if m.shared_experts:
        low.feed_forward("shared", m.shared_width)
    # Without sp the layer's output must be whole again on every tp rank.
    n = b.tokens * m.hidden * e
    split_without_sp = low.with_tp * ~b.sp
    low.collective("F", "experts-out", "experts", "all_gather", "tp", n, split_without_sp)
    low.collective("I", "experts-out-grad", "experts", "all_gather", "tp", n, split_without_sp)
    low.residual("ffn-residual")


def _permute(low: LayerLowering, size: Array) -> None:
    """Sort token copies by expert, or back: a read and a write. A plain all-to-all needs them sorted by rank before it and by expert after it;
    a dispatcher that removes duplicates reads tokens where they are, so they are sorted once."""
    sorts = 2 if low.b.stack.dispatch == "all-to-all" else 1
    launches = PERMUTE_LAUNCHES * low.b.stack.bare_operator * sorts
    for phase, name in (("F", "permute"), ("I", "permute-grad")):
        low.memory(phase, name, "experts", size, 2 * sorts, launches)


def _experts(low: LayerLowering, tokens: Array) -> None:
    """Grouped products: E/ep experts, each on its share of the tokens.

    With `experts` in `Stack.fused` the first product activates and quantises its output, and backward of the second does so with the gradient
    (Transformer Engine's ops/fused/grouped_mlp.py): no other kernel reads what lies between the two. The routing weights multiply there too, and
    the bias of the second product, which such a stack has scaled by them, is part of its kernel.

    Transformer Engine's GroupedLinear issues one expert after another (`Stack.loops_experts`; release 2.9, module/grouped_linear.py,
    csrc/extensions/cast.cpp: split_quantize, common/gemm/cublaslt_gemm.cu: multi_stream_cublas_gemm): each has a product and a kernel that quantises
    its rows, and costs as much again in Python: the quantised copy of its weight is looked up and saved, autograd accumulates its gradient and calls
    the hook of data parallelism. So the host's time grows with the experts of a rank."""
    b, m = low.b, low.m
    local = m.experts / b.ep
    each = np.maximum(tokens / local, 1.0)
    width, columns = m.expert_width / b.etp, 2 if m.gated else 1
    fused = "experts" in low.fused
    up, down = (("F",), ("I",)) if fused else (QUANTISED_IN, QUANTISED_IN)
    launches: Array = 2.0
    if b.stack.loops_experts and not fused:
        each_loop = LOOP_OPERATORS + (b.workload.precision in NARROW)
        launches = launches + each_loop * local * b.stack.bare_operator
    low.gemm("experts-up", "experts", each, width * columns, m.routed_width, local, launches, quantised=up)
    if not fused:
        low.activation("experts", tokens * width * low.element, weighted=b.stack.weighs_activations)
    low.gemm("experts-down", "experts", each, m.routed_width, width, local, launches, quantised=down)
    if m.ffn_bias and not fused:
        _add_bias(low, tokens * m.routed_width, local)


def _add_bias(low: LayerLowering, elements: Array, experts: Array) -> None:
    """Add each expert's bias to its outputs; backward sums its gradient. A stack that scales the bias by the routing weights of its rows, which are
    float32, does so for one expert at a time and in float32 (Megatron's transformer/moe/experts.py, `_apply_bias`). In bytes of an element:

        forward   bias · weights 4; sum 2 + 4 + 4; joining the experts 4 + 4; to 16 bits 4 + 2                                       28
        backward  to float32 2 + 4; to 16 bits 4 + 2; joining the experts 2 + 2; the two gradients of the product, each with its sum 12      40"""
    if not low.b.stack.weighs_activations:
        low.memory("F", "experts-bias", "experts", elements, 2 * low.element, 1)
        low.memory("W", "experts-bias-grad", "experts", elements, low.element, 1)
        return
    low.memory("F", "experts-bias", "experts", elements, 28, 2 + 2 * experts * low.b.stack.bare_operator)
    low.memory("I", "experts-bias-grad", "experts", elements, 40, 2 + 6 * experts * low.b.stack.bare_operator)
