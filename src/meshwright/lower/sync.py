"""What happens once a step: gradients are reduced, clipped, the optimizer steps, sharded parameters are gathered.

    zero 0   all-reduce of the gradients over dp·cp, in buckets of each stage
    zero 1   reduce-scatter, the optimizer on one shard, all-gather of the parameters: the same bytes as an all-reduce, but for
             rows padded to the ranks; unit by unit, or in buckets where a stack shards flat buffers (`flat_shards`)
    zero 2   the same; gradients are kept only as shards, so each micro-batch reduces (unless the plan accumulates them whole)
    zero 3   parameters live as shards: each layer gathers them forward and (if freed) backward, 1.5× the bytes of zero 0
    hybrid   shard inside a group, then all-reduce the shard over the replicas
    local    replicas train alone; every n-th step they all-reduce their parameters: 1/n of the bytes

Weights of experts are replicated on fewer ranks (expert_dp) and reduce there; where no two ranks of a shard group share one,
whole and once a step. Context-parallel ranks hold the same weights, so they reduce with dp. Then follow sums that only few
elements need: over tp of whole vectors that saw a share of the heads or tokens and of copied KV heads, over a pipeline's ends
of a tied embedding, over a stage of the routers' load; and three numbers: valid tokens, squares of the gradients, the loss.

Compression trades bytes for γ: fp16/bf16 halve fp32 gradients; int8, fp8 and int4 send one or half a byte and a scale, in
an all-to-all and an all-gather (sums would overflow on the wire), together what an all-reduce sends; top-k sends a share r
of the values with 4-byte indices by all-gather (so it grows with P: 100 × smaller at 1% never happens), threshold as many
as a normal distribution has above τ; random-k sends a share r and no indices; PowerSGD sends two factors of rank r.
Buckets are cut before they are compressed, and what is partial over tp or alike on its ranks goes as it is. Under ZeRO each
rank wants its shard of the sum: what can be summed on the wire is reduce-scattered, PowerSGD's factors are all-reduced just the
same, the rest goes to its owner in one all-to-all, and hybrid sharding then sums shards as they are.
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.describe.sharding import DATA_AXES
from meshwright.lower.batch import COMPRESSIONS, Batch
from meshwright.lower.op import Array, Op, present


def sharded(batch: Batch, kind: str) -> Array:
    """Where ZeRO shards parameters of a kind: experts only where a shard group has several copies of one."""
    return (batch.zero >= 1) & (batch.size(DATA_AXES[kind].shard) > 1)


def trained(counts: dict[str, Array], kind: str) -> Array:
    """Elements that have a gradient, as they are sent."""
    still = counts.get("untrained", 0.0) + counts.get("untrained_padding", 0.0) if kind == "dense" else 0.0
    return padded(counts, kind) - still


def padded(counts: dict[str, Array], kind: str) -> Array:
    """Elements of all ranks' shards together."""
    return counts[kind] + counts.get(f"{kind}_padding", 0.0)


def cut(batch: Batch, elements: Array) -> Array:
    """Messages of one flat buffer of so many gradients: ⌈bytes/bucket⌉, each of as many whole elements."""
    width = batch.grad_bytes
    count = np.ceil(elements * width / np.maximum(np.floor(batch.bucket), width))
    each = np.ceil(elements / np.maximum(count, 1.0))
    return np.ceil(elements / np.maximum(each, 1.0))


def compressed_bytes(
    batch: Batch, elements: Array, messages: Array, ranks: Array, scattered: Array, factors: Array
) -> tuple[Array, Array]:
    """Bytes of the full buffers in which so many messages say `elements` gradients to `ranks`, `scattered` to the owners of shards or
    told to all, and the extra memory passes it costs (γ). PowerSGD's `factors` have so many elements."""
    plain = np.where(scattered, batch.comm_bytes, np.minimum(batch.comm_bytes, batch.grad_bytes))
    if not batch.compresses:
        return elements * plain, 0.0
    passes = {
        "none": 0.0,
        "fp16": 1.5,
        "bf16": 1.5,
        "int8": 3.0,
        "int4": 3.0,
        "top-k": 8.0,
        "powersgd": 4.0,
        "fp8": 3.0,
        "random-k": 4.0,
        "threshold": 5.0,
    }
    width = batch.grad_bytes
    each = elements / np.where(messages > 0, messages, 1.0)  # of a message
    whole = 2 * np.ceil(each / (2 * ranks))  # values a rank's part is rounded up to
    part = np.where(scattered, each / ranks, each)
    listeners = np.where(scattered, ranks, 1.0)
    said = {
        "none": elements * plain,
        "fp16": elements * 2.0,
        "bf16": elements * 2.0,
        "int8": messages * ranks * (SCALE_BYTES + whole),
        "fp8": messages * ranks * (SCALE_BYTES + whole),
        "int4": messages * ranks * (SCALE_BYTES + whole / 2),
        "top-k": messages * ranks * _kept(part, batch.compression_ratio) * (width + INDEX_BYTES),
        "random-k": messages * listeners * _kept(part, batch.compression_ratio) * width,
        "threshold": messages * ranks * np.maximum(1.0, np.round(part * above(batch.compression_threshold)))
        * (width + INDEX_BYTES),
        "powersgd": factors * width,
    }  # fmt: skip
    size, extra = np.zeros(batch.n), np.zeros(batch.n)
    for code, name in enumerate(COMPRESSIONS):
        chosen = batch.compression == code
        if chosen.any():
            size = np.where(chosen, said[name], size)
            extra = np.where(chosen, passes[name] * elements * batch.comm_bytes, extra)
    return size, extra


def _kept(elements: Array, ratio: Array) -> Array:
    """Values that a share of so many comes to: at least one."""
    return np.maximum(1.0, np.minimum(elements, np.ceil(elements * ratio - 1e-6)))


def above(threshold: Array) -> Array:
    """The share of normally distributed values beyond so many standard deviations."""
    return np.vectorize(math.erfc)(np.asarray(threshold) / math.sqrt(2.0))


def sent_as(batch: Batch, *names: str) -> Array:
    """Where gradients are sent in one of these ways."""
    return np.isin(batch.compression, [COMPRESSIONS.index(n) for n in names]) if batch.compresses else np.False_


# What cannot be summed on the wire: every rank hears of all, or under ZeRO the owner of a shard.
QUANTISED, SPARSE = ("int8", "int4", "fp8"), ("top-k", "threshold")
SCALE_BYTES = INDEX_BYTES = 4
COUNT_BYTES = 8


def gradient_reduction(batch: Batch, counts: dict[str, Array], kind: str) -> list[Op]:
    """Reduce this rank's gradients of a kind, 'dense' over dp·cp or 'expert' over expert_dp, in as many messages as `counts` has
    (unsaid: one stage's)."""
    whole, shard, replicas = DATA_AXES[kind]
    elements = trained(counts, kind)
    apart = counts.get(f"{kind}_exact", 0.0) * batch.lossy
    key = f"{kind}_messages"
    messages: Array = counts[key] if key in counts else cut(batch, elements - apart)
    scattered = sharded(batch, kind)
    ranks = np.where(scattered, batch.size(shard), batch.size(whole))
    n, extra = compressed_bytes(
        batch, elements - apart, messages, ranks, scattered, counts.get(f"{kind}_factors", elements)
    )
    on = (batch.size(whole) > 1) * 1.0 * ~(scattered & (batch.zero == 3))  # ZeRO-3 reduces block by block
    if np.any(batch.average_every):
        on = on * (batch.average_every == 0)
    sparse, quantised = sent_as(batch, *SPARSE), sent_as(batch, *QUANTISED)
    owners = sparse | quantised
    thin = sent_as(batch, "powersgd")
    twice = np.where(thin, 2.0, 1.0)
    hybrid = scattered & (batch.size(replicas) > 1)
    times = np.where(np.where(scattered, batch.reduce_each, batch.reduce_whole), np.maximum(batch.microbatches, 1), 1.0)
    ops = []

    def reduce(name: str, collective: str, axis: str, total: Array, count: Array, many: Array = messages) -> None:
        ops.append(
            Op(
                name,
                kind,
                "collective",
                on * count * many,
                collective=collective,
                axis=axis,
                message_bytes=total / np.where(many > 0, many, 1.0),
                stream="comm:dp",
                launches=1.0,
            )
        )

    reduce("reduce-gradients", "all_reduce", whole, n / twice, (~scattered & ~owners) * times * twice)
    reduce("reduce-gradients", "reduce_scatter", shard, n, (scattered & ~owners & ~thin) * times)
    reduce("reduce-shards", "all_reduce", replicas, elements * batch.summed_bytes / batch.size(shard), hybrid * times)
    if batch.compresses:
        key = f"{kind}_exact_messages"
        exactly = (counts[key] if key in counts else cut(batch, apart)) * batch.lossy
        reduce("reduce-gradients", "all_reduce", whole, apart * batch.grad_bytes, ~scattered * times, exactly)
        reduce("reduce-gradients", "reduce_scatter", shard, apart * batch.grad_bytes, scattered * times, exactly)
        reduce("exchange-compressed", "all_to_all", whole, n, (~scattered & quantised) * times)
        reduce("gather-compressed", "all_gather", whole, n, (~scattered & owners) * times)
        reduce("exchange-compressed", "all_to_all", shard, n, (scattered & owners) * times)
        reduce("reduce-factors", "all_reduce", shard, n / twice, (scattered & thin) * times * twice)
        for axis, here in ((whole, ~scattered), (shard, scattered)):
            told = here * sent_as(batch, "threshold") * times
            reduce("count-compressed", "all_gather", axis, messages * batch.size(axis) * COUNT_BYTES, told)
        ops.append(Op("compress", kind, "memory", on * times * (extra > 0), bytes=extra, launches=4.0))
    return ops


def parameter_gather(batch: Batch, counts: dict[str, Array], kind: str) -> list[Op]:
    """ZeRO-1 and 2: updated parameters come back whole after the optimizer, unit by unit or in buckets."""
    on = (batch.zero < 3) & sharded(batch, kind)
    n = padded(counts, kind) * batch.param_bytes
    units = np.ceil(n / batch.bucket) if not batch.units else counts.get(f"{kind}_messages", np.ones(batch.n))
    return [
        Op(
            "gather-parameters",
            kind,
            "collective",
            on * units,
            collective="all_gather",
            axis=DATA_AXES[kind].shard,
            message_bytes=n / np.where(units > 0, units, 1.0),
            stream="comm:dp",
        )
    ]


def parameter_average(batch: Batch, elements: Array, kind: str) -> list[Op]:
    """Local SGD: every n-th step replicas average their parameters, masters where there are any."""
    if not np.any(batch.average_every):
        return []
    # Each replica's parameters, and by how many tokens they count.
    n = (elements + 1) * batch.kept_bytes
    count = (batch.average_every > 0) / np.maximum(batch.average_every, 1.0)
    return [
        Op(
            "average-parameters",
            kind,
            "collective",
            count,
            collective="all_reduce",
            axis="replicate",
            message_bytes=n,
            stream="comm:dp",
        )
    ]


def sharded_weights(batch: Batch, counts: dict[str, Array], kind: str, unit: Array) -> dict[str, list[Op]]:
    """ZeRO-3 of one block: gather its weights forward and backward, scatter its gradients, in every micro-batch; in messages of
    units of `unit` elements, a share of the block's or several blocks like it."""
    _, shard, replicas = DATA_AXES[kind]
    elements, learns = padded(counts, kind), trained(counts, kind)
    on = (batch.zero == 3) & (batch.size(shard) > 1) & (np.asarray(elements) > 0)
    apart = counts.get(f"{kind}_exact", 0.0) * batch.lossy
    share = elements / np.maximum(unit, 1.0)  # of a unit's messages, this block's
    once = 1.0 / np.maximum(batch.microbatches, 1)
    said, extra = compressed_bytes(
        batch, learns - apart, share, batch.size(shard), np.True_, counts.get(f"{kind}_factors", learns)
    )

    def op(name: str, collective: str, axis: str, n: Array, count: Array) -> Op:
        if unit is not counts[kind]:
            n, count = n / np.where(share > 0, share, 1.0), count * share
        return Op(name, kind, "collective", count, collective=collective, axis=axis, message_bytes=n, stream="comm:dp")

    # Kept whole after forward, the weights are gathered once a step, not once a micro-batch.
    often = np.where(batch.reshard, 1.0, once)
    reduces = on * np.where(batch.reduce_each, 1.0, once)
    owners, thin = sent_as(batch, *SPARSE, *QUANTISED), sent_as(batch, "powersgd")
    scatter = [
        op("scatter-gradients", "reduce_scatter", shard, said, reduces * (~owners & ~thin)),
        op("reduce-shards", "all_reduce", replicas, learns * batch.summed_bytes / batch.size(shard),
           reduces * (batch.size(replicas) > 1)),
    ]  # fmt: skip
    if batch.compresses:
        exactly = reduces * (apart > 0)
        scatter.append(op("scatter-gradients", "reduce_scatter", shard, apart * batch.grad_bytes, exactly))
        scatter.append(op("scatter-gradients", "all_to_all", shard, said, reduces * owners))
        told = share * batch.size(shard) * COUNT_BYTES
        scatter.append(op("scatter-gradients", "all_gather", shard, told, reduces * sent_as(batch, "threshold")))
        scatter.append(op("reduce-factors", "all_reduce", shard, said / 2, 2.0 * reduces * thin))
        scatter.append(Op("compress", "optimizer", "memory", reduces * (extra > 0), bytes=extra, launches=4.0))
    whole = elements * batch.param_bytes
    return {
        "F": [op("gather-weights", "all_gather", shard, whole, on * often)],
        "I": [op("gather-weights", "all_gather", shard, whole, on * batch.reshard * 1.0)],
        "W": scatter,
    }


def optimizer(batch: Batch, elements: Array, tensors: Array) -> list[Op]:
    """The update: memory-bound over the states this rank owns. Unfused, each of `tensors` launches a dozen kernels."""
    copies = batch.workload.state_copies
    state = batch.state_bytes
    touched = batch.grad_bytes + 2 * copies * state + np.where(batch.master, 8.0, 0.0) + 2 * batch.param_bytes
    fused = "optimizer" in batch.stack.fused
    launches = np.ceil(tensors / 100) + 1 if fused else 12 * tensors
    ops = [
        Op("update", "optimizer", "memory", 1.0, bytes=elements * touched * (1 if fused else 2.5), launches=launches)
    ]
    if batch.workload.clip:
        ops.append(
            Op(
                "norm",
                "optimizer",
                "memory",
                1.0,
                bytes=elements * batch.grad_bytes * 2,
                launches=np.ceil(tensors / 50) + 4,
            )
        )
    return ops


def small_sums(batch: Batch, counts: dict[str, Array]) -> list[Op]:
    """Once a step and after the gradients: what is partial over tp, what two stages share, loads, and three numbers."""
    sharded = np.where(batch.zero >= 1, batch.size("shard_cp"), 1.0)
    of_experts = np.where(batch.zero >= 1, batch.size("expert_shard"), 1.0)
    ops = []

    def reduce(name: str, axis: str, n: Array, part: str = "closing", where: Array = True) -> None:
        on = (batch.size(axis) > 1) & (np.asarray(n) > 0) & where
        if present(on):
            ops.append(
                Op(
                    name,
                    part,
                    "collective",
                    on * 1.0,
                    collective="all_reduce",
                    axis=axis,
                    message_bytes=n,
                    stream="comm:dp",
                )
            )

    # A shard's gradient is as wide as the shard, which is its own master.
    wide = np.where(sharded > 1, batch.kept_bytes, batch.grad_bytes) / sharded
    reduce("sum-partial", "tp", counts.get("partial_tp", 0.0) * wide)
    reduce("sum-copies", "kv_copies", counts.get("partial_kv_copies", 0.0) * wide)
    if "partial_expert_tp" in counts:
        wide_experts = np.where(of_experts > 1, batch.kept_bytes, batch.grad_bytes) / of_experts
        reduce("sum-partial", "expert_tp", counts["partial_expert_tp"] * wide_experts)
    reduce("sum-tied", "ends", counts.get("tied", 0.0) * wide)
    reduce("sum-loads", "stage", counts.get("loads", 0.0) * 8.0)
    reduce("worst-load", "pp", 32.0 * bool(batch.model.experts), "optimizer")
    together = np.equal(batch.average_every, 0)
    reduce("count-tokens", "dp_cp", 8.0, "optimizer", together)
    reduce("norm-and-loss", "world", 16.0, "optimizer", together)
    for axis in () if together.all() else ("tp", "pp"):  # a replica that trains alone has a norm of its own
        reduce("norm-and-loss", axis, 16.0, "optimizer", ~together)
    return ops


def owned(batch: Batch, counts: dict[str, Array], groups: list[str]) -> Array:
    """Elements whose optimizer state this rank footprint."""
    return sum(
        padded(counts, group) / np.where(batch.zero >= 1, batch.size(DATA_AXES[group].shard), 1.0) for group in groups
    )


def tensors(batch: Batch) -> Array:
    """Parameter tensors on a rank: what an unfused optimizer launches kernels for."""
    model = batch.model
    if model.kind == "counts":
        return 160.0
    per_layer = len(model.blocks["dense"].linears) + len(model.blocks["dense"].vectors)
    return model.layers * per_layer / batch.pp + 4


def step_ops(batch: Batch, counts: dict[str, Array]) -> list[Op]:
    """Everything a rank that holds `counts` elements does once a step, in order: reduce, clip, update, gather."""
    groups = ["dense", "expert"] if batch.model.experts else ["dense"]
    reductions = [op for group in groups for op in gradient_reduction(batch, counts, group)]
    updates = optimizer(batch, owned(batch, counts, groups), tensors(batch))
    gathers = [op for group in groups for op in parameter_gather(batch, counts, group)]
    gathers += parameter_average(batch, counts["dense"], "dense")
    return [op for op in (*reductions, *small_sums(batch, counts), *updates, *gathers) if present(op.count)]
