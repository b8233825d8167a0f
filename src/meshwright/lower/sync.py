"""What happens once a step: gradients are reduced, clipped, the optimizer steps, sharded parameters are gathered.

    zero 0   all-reduce of the gradients over dp·cp, in buckets
    zero 1   reduce-scatter, the optimizer on one shard, all-gather of the parameters: the same bytes as an all-reduce
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
Buckets are cut before they are compressed. Under ZeRO each rank wants its shard of the sum: what can be summed on the wire
is reduce-scattered, PowerSGD's factors are all-reduced just the same, the rest goes to its owner in one all-to-all, and
hybrid sharding then sums shards as they are.
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.lower.batch import COMPRESSIONS, Batch
from meshwright.lower.op import Array, Op, present


def compressed_bytes(batch: Batch, elements: Array, matrices: Array = 1.0, kind: str = "dense") -> tuple[Array, Array]:
    """Bytes each rank contributes per reduction of `elements` gradients, and the extra memory passes it costs (γ)."""
    if not batch.compresses:
        return elements * batch.comm_bytes, 0.0
    wire = {"none": batch.comm_bytes, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5, "fp8": 1.0}
    passes = {"none": 0.0, "fp16": 1.5, "bf16": 1.5, "int8": 3.0, "int4": 3.0, "top-k": 8.0, "powersgd": 4.0,
              "fp8": 3.0, "random-k": 4.0, "threshold": 5.0}  # fmt: skip
    size = np.zeros(batch.n)
    extra = np.zeros(batch.n)
    for code, name in enumerate(COMPRESSIONS):
        chosen = batch.compression == code
        if not chosen.any():
            continue
        if name == "top-k":
            value = elements * batch.compression_ratio * (batch.comm_bytes + 4)
        elif name == "random-k":
            value = elements * batch.compression_ratio * batch.comm_bytes
        elif name == "threshold":
            value = elements * above(batch.compression_threshold) * (batch.comm_bytes + 4)
        elif name == "powersgd":
            value = np.minimum(factors(batch, elements, matrices, kind), elements) * batch.comm_bytes
        else:
            value = elements * wire[name]
        size = np.where(chosen, value, size)
        extra = np.where(chosen, passes[name] * elements * batch.comm_bytes, extra)
    return size, extra


def factors(batch: Batch, elements: Array, matrices: Array, kind: str) -> Array:
    """Elements of PowerSGD's factors. A square matrix of n has two of √n × rank, k equal ones of n in all 2·√(n·k)·rank; real
    layers are near enough to square. A tensor of E experts is a matrix of E rows."""
    n, rank = np.maximum(elements, 0), batch.compression_rank
    if kind == "dense":
        return 2 * np.sqrt(n * matrices) * rank
    experts = np.maximum(batch.model.experts / batch.ep, 1.0)
    return np.minimum(rank, experts) * (matrices * experts + n / experts)


def above(threshold: Array) -> Array:
    """The share of normally distributed values beyond so many standard deviations."""
    return np.vectorize(math.erfc)(np.asarray(threshold) / math.sqrt(2.0))


def sent_as(batch: Batch, *names: str) -> Array:
    """Where gradients are sent in one of these ways."""
    return np.isin(batch.compression, [COMPRESSIONS.index(n) for n in names]) if batch.compresses else np.False_


# What cannot be summed on the wire: every rank hears of all, or under ZeRO the owner of a shard.
QUANTISED, SPARSE = ("int8", "int4", "fp8"), ("top-k", "threshold")


def gradient_reduction(batch: Batch, elements: Array, kind: str, matrices: Array = 1.0) -> list[Op]:
    """Reduce `elements` gradients of this rank, of so many matrices; kind 'dense' over dp·cp, 'expert' over expert_dp."""
    whole, shard = ("dp_cp", "shard_cp") if kind == "dense" else ("expert_dp", "expert_shard")
    n, extra = compressed_bytes(batch, elements, matrices, kind)
    on = (batch.size(whole) > 1) * 1.0 * (np.asarray(elements) > 0)
    sharded = (batch.zero >= 1) & (batch.size(shard) > 1)
    on = on * ~(sharded & (batch.zero == 3))  # ZeRO-3 reduces block by block
    if np.any(batch.average_every):
        on = on * (batch.average_every == 0)
    sparse, quantised = sent_as(batch, *SPARSE), sent_as(batch, *QUANTISED)
    owners = sparse | quantised
    thin = sent_as(batch, "powersgd")
    twice = np.where(thin, 2.0, 1.0)
    replicas = "replicate" if kind == "dense" else "expert_replicate"
    hybrid = sharded & (batch.size(replicas) > 1)
    times = np.where(np.where(sharded, batch.reduce_each, batch.reduce_whole), np.maximum(batch.microbatches, 1), 1.0)
    cut = np.where(extra > 0, elements * batch.grad_bytes, n) if batch.compresses else n
    buckets = np.maximum(1.0, np.ceil(cut / batch.bucket))
    ops = []

    def reduce(name: str, collective: str, axis: str, total: Array, count: Array) -> None:
        ops.append(Op(name, kind, "collective", on * count * buckets, collective=collective, axis=axis,
                      message_bytes=total / buckets, stream="comm:dp", launches=1.0))  # fmt: skip

    reduce("reduce-gradients", "all_reduce", whole, n / twice, (~sharded & ~owners) * times * twice)
    reduce("reduce-gradients", "reduce_scatter", shard, n, (sharded & ~owners & ~thin) * times)
    reduce("reduce-shards", "all_reduce", replicas, elements * batch.comm_bytes / batch.size(shard), hybrid * times)
    if batch.compresses:
        reduce("exchange-compressed", "all_to_all", whole, n, (~sharded & quantised) * times)
        reduce("gather-compressed", "all_gather", whole, n, (~sharded & quantised) * times)
        reduce("gather-compressed", "all_gather", whole, n * batch.size(whole), (~sharded & sparse) * times)
        reduce("exchange-compressed", "all_to_all", shard, n, (sharded & owners) * times)
        reduce("reduce-factors", "all_reduce", shard, n / twice, (sharded & thin) * times * twice)
        ops.append(Op("compress", kind, "memory", on * times * (extra > 0), bytes=extra, launches=4.0))
    return ops


def parameter_gather(batch: Batch, elements: Array, kind: str) -> list[Op]:
    """ZeRO-1 and 2: updated parameters come back whole after the optimizer."""
    shard = "shard_cp" if kind == "dense" else "expert_shard"
    n = elements * batch.param_bytes
    on = ((batch.zero == 1) | (batch.zero == 2)) & (batch.size(shard) > 1) & (np.asarray(elements) > 0)
    buckets = np.maximum(1.0, np.ceil(n / batch.bucket))
    return [Op("gather-parameters", kind, "collective", on * buckets, collective="all_gather", axis=shard,
               message_bytes=n / buckets, stream="comm:dp")]  # fmt: skip


def parameter_average(batch: Batch, elements: Array, kind: str) -> list[Op]:
    """Local SGD: every n-th step replicas average their parameters, masters where there are any."""
    if not np.any(batch.average_every):
        return []
    # Each replica's parameters, and by how many tokens they count.
    n = (elements + 1) * batch.kept_bytes
    count = (batch.average_every > 0) / np.maximum(batch.average_every, 1.0)
    return [Op("average-parameters", kind, "collective", count, collective="all_reduce", axis="replicate",
               message_bytes=n, stream="comm:dp")]  # fmt: skip


def sharded_weights(
    batch: Batch, elements: Array, kind: str, untrained: Array = 0.0, together: Array = 1.0, matrices: Array = 1.0
) -> dict[str, list[Op]]:
    """ZeRO-3 of one block: gather its weights forward and backward, scatter its gradients, in every micro-batch; as
    one message with `together` others' like it."""
    shard, replicas = ("shard_cp", "replicate") if kind == "dense" else ("expert_shard", "expert_replicate")
    on = (batch.zero == 3) & (batch.size(shard) > 1) & (np.asarray(elements) > 0)
    whole = elements * batch.param_bytes
    gradient, extra = compressed_bytes(batch, elements - untrained, matrices, kind)
    once = 1.0 / np.maximum(batch.microbatches, 1)

    def op(name: str, collective: str, axis: str, n: Array, count: Array) -> Op:
        if batch.wraps:
            n, count = n * together, count / together
        return Op(name, kind, "collective", count, collective=collective, axis=axis, message_bytes=n, stream="comm:dp")

    # Kept whole after forward, the weights are gathered once a step, not once a micro-batch.
    often = np.where(batch.reshard, 1.0, once)
    reduces = on * np.where(batch.reduce_each, 1.0, once)
    owners, thin = sent_as(batch, *SPARSE, *QUANTISED), sent_as(batch, "powersgd")
    sums = (elements - untrained) * batch.comm_bytes / batch.size(shard)
    scatter = [
        op("scatter-gradients", "reduce_scatter", shard, gradient, reduces * (~owners & ~thin)),
        op("reduce-shards", "all_reduce", replicas, sums, reduces * (batch.size(replicas) > 1)),
    ]
    if batch.compresses:
        scatter.append(op("scatter-gradients", "all_to_all", shard, gradient, reduces * owners))
        scatter.append(op("reduce-factors", "all_reduce", shard, gradient / 2, 2.0 * reduces * thin))
        scatter.append(Op("compress", "optimizer", "memory", reduces * (extra > 0), bytes=extra, launches=4.0))
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
            ops.append(Op(name, part, "collective", on * 1.0, collective="all_reduce", axis=axis, message_bytes=n,
                          stream="comm:dp"))  # fmt: skip

    # A shard's gradient is as wide as the shard, which is its own master.
    wide = np.where(sharded > 1, batch.kept_bytes, batch.grad_bytes) / sharded
    reduce("sum-partial", "tp", counts.get("partial", 0.0) * wide)
    reduce("sum-copies", "kv_copies", counts.get("kv_copies", 0.0) * wide)
    if "expert_partial" in counts:
        wide_experts = np.where(of_experts > 1, batch.kept_bytes, batch.grad_bytes) / of_experts
        reduce("sum-partial", "expert_tp", counts["expert_partial"] * wide_experts)
    reduce("sum-tied", "ends", counts.get("tied", 0.0) * wide)
    reduce("sum-loads", "stage", counts.get("loads", 0.0) * 8.0)
    reduce("worst-load", "pp", 32.0 * bool(batch.model.experts), "optimizer")
    together = np.equal(batch.average_every, 0)
    reduce("count-tokens", "dp_cp", 8.0, "optimizer", together)
    reduce("norm-and-loss", "world", 16.0, "optimizer", together)
    for axis in () if together.all() else ("tp", "pp"):  # a replica that trains alone has a norm of its own
        reduce("norm-and-loss", axis, 16.0, "optimizer", ~together)
    return ops


def owned(batch: Batch, counts: dict[str, Array]) -> Array:
    """Elements whose optimizer state this rank holds."""
    shard = {"dense": batch.size("shard_cp"), "expert": batch.size("expert_shard")}
    return sum(count / np.where(batch.zero >= 1, shard[group], 1.0) for group, count in counts.items())


def tensors(batch: Batch) -> Array:
    """Parameter tensors on a rank: what an unfused optimizer launches kernels for."""
    model = batch.model
    if model.kind == "counts":
        return 160.0
    per_layer = len(model.blocks["dense"].linears) + len(model.blocks["dense"].vectors)
    return model.layers * per_layer / batch.pp + 4


def step_ops(batch: Batch, counts: dict[str, Array]) -> list[Op]:
    """Everything a rank that holds `counts` elements does once a step, in order: reduce, clip, update, gather."""
    groups = {g: counts[g] for g in ("dense", "expert") if g == "dense" or batch.model.experts}
    trained = {g: c - counts.get("untrained", 0.0) if g == "dense" else c for g, c in groups.items()}
    reductions = [op for group, count in trained.items()
                  for op in gradient_reduction(batch, count, group, counts.get(f"{group}_matrices", 1.0))]  # fmt: skip
    updates = optimizer(batch, owned(batch, groups), tensors(batch))
    gathers = [op for group, count in groups.items() for op in parameter_gather(batch, count, group)]
    gathers += parameter_average(batch, counts["dense"], "dense")
    return [op for op in (*reductions, *small_sums(batch, counts), *updates, *gathers) if present(op.count)]
