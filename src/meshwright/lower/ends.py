"""The two ends of the model: the embedding, and the head with its loss; and multi-token prediction, which follows the last layer.

Both are split over the vocabulary. The embedding looks up the rows that this rank holds, and an all-reduce (a reduce-scatter with
sequence parallelism) adds the ranks' results up. The head computes the logits of its part of the vocabulary, and the loss needs only
their maximum and sum over the ranks. The logits are the largest tensor of many models: T·V/tp, kept in fp32.
"""

from meshwright.lower.layer import LayerLowering
from meshwright.lower.layer_kinds import parts
from meshwright.lower.program import Op

# More launches where ranks hold parts of the vocabulary: masks, the maximum, the target's logit
SPLIT_LOSS_LAUNCHES = 25.0


def embedding(low: LayerLowering) -> dict[str, list[Op]]:
    """The operations of the embedding, by phase."""
    b, m = low.b, low.m
    if not m.vocab or m.kind != "transformer":
        return low.phases
    n = low.message(m.token_width)
    low.memory("F", "lookup", "embedding", n, 2, 3)
    low.collective("F", "embedding-out", "embedding", "all_reduce", "tp", n, low.with_tp * ~b.sp)
    low.collective("F", "embedding-out", "embedding", "reduce_scatter", "tp", n, low.with_sp)
    if any(vector.name == "tokens" and vector.learns for vector in low.block.vectors):
        low.collective("W", "embedding-grad", "embedding", "all_gather", "tp", n, low.with_sp)
        low.memory("W", "scatter-add", "embedding", n, 3, 3)
        gradient_of_rows(low, "embedding", m.token_width)
    low.drop("embedding", "embedding", n / b.seq_split, "W")
    low.extra_products()
    return low.phases


def gradient_of_rows(low: LayerLowering, name: str, width: int) -> None:
    """The gradient of the embedding has all rows of the vocabulary, also those that no token looked up: it is zeroed, and added as a whole."""
    weights = low.m.padded_vocab * width / low.b.tp
    low.memory("W", f"{name}-zero", "embedding", weights, low.element, 1)
    low.accumulate(name, "embedding", weights, 1)


def head(low: LayerLowering) -> dict[str, list[Op]]:
    """The operations of the head and the loss, by phase."""
    b, m = low.b, low.m
    if m.kind == "mlp":
        size = b.microbatch * m.hidden * low.element
        low.memory("F", "loss", "head", size, 1, 3)
        low.memory("I", "loss-grad", "head", size, 2, 2)
        # Every rank computes the same loss, so that the last layer's gradient needs no reduce-scatter: one less.
        low.collective("I", "whole-already", "head", "reduce_scatter", "tp", size, -low.with_tp)
        return low.phases
    if not m.vocab:
        return low.phases
    if m.streams > 1:
        low.gemm("streams-out", "norm", low.row_tokens, m.streams, m.residual_width)
        low.memory("F", "join-streams", "norm", low.row_tokens * m.residual_width * low.element, 1 + 1 / m.streams, 2)
        low.memory("I", "join-streams-grad", "norm", low.row_tokens * m.residual_width * low.element, 2, 2)
    low.norm("final-norm")
    low.extra_products()
    low.enter_columns("head", m.token_width, "logits")
    low.gemm("logits", "head", b.tokens, m.padded_vocab / b.tp, m.token_width, dtype=low.wide)
    logits = b.tokens * m.padded_vocab / b.tp
    fused = "loss" in low.fused
    launches = 2 if fused else 8 + SPLIT_LOSS_LAUNCHES * low.with_tp * (not b.stack.asynchronous)
    passes = (low.element, 2 * low.element) if fused else (low.element + 18, 2 * low.element + 10)
    low.memory("F", "loss", "head", logits, passes[0], launches, exponentials=logits, elementwise="loss")
    low.memory("I", "loss-grad", "head", logits, passes[1], 1 if fused else 5, exponentials=logits, elementwise="loss")
    wide = b.tokens * max(4.0, low.element)
    low.collective("F", "loss-maximum", "head", "all_reduce", "tp", wide, low.with_tp)
    # Of exponentials, and the target's logit
    low.collective("F", "loss-sums", "head", "all_reduce", "tp", 2 * wide, low.with_tp)
    return low.phases


def multi_token_prediction(low: LayerLowering) -> dict[str, list[Op]]:
    """The operations of one module of multi-token prediction: it joins its input with the embedding of the next token, runs a layer and computes
    the logits and the loss of one token more. Its backward directly follows its forward, so that recompute leaves it alone."""
    b, m = low.b, low.m
    low.norm("mtp-norm-1")
    low.norm("mtp-norm-2")
    low.memory("F", "mtp-lookup", "embedding", low.message(m.hidden), 2, 3)
    low.memory("W", "mtp-scatter-add", "embedding", low.message(m.hidden), 3, 3)
    gradient_of_rows(low, "mtp-embedding", m.hidden)
    low.enter_columns("mtp", 2 * m.hidden, "mtp-join")
    low.gemm("mtp-join", "mtp", b.tokens, m.hidden / b.tp, 2 * m.hidden)
    low.collective("F", "mtp-out", "mtp", "all_gather", "tp", low.message(m.hidden), low.with_tp * ~b.sp)
    low.collective("F", "mtp-out", "mtp", "all_to_all", "tp", low.message(m.hidden), low.with_sp)
    parts(low)
    low.shared_scales()
    head(low)
    low.phases["R"] = []
    return low.phases
