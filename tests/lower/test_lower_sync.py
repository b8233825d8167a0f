"""Operations that run once per step: volumes of DDP, ZeRO and hybrid sharding, buckets, compression, the optimizer."""

import numpy as np
import pytest

from lower.cases import COUNTS, GPT, MOE, WORK, bytes_sent, lowered, one
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower import sync
from meshwright.lower.builder import MIXED_DTYPES
from meshwright.lower.gradients import GradientMessage, Load, cut, data_parallel_ops

P = 8
TWICE = Workload(batch=2 * P, seq=512)
ONCE = Workload(batch=P, seq=512)  # one micro-batch per rank, so that "per step" and "per micro-batch" agree


def data_parallel(program, rank=0):
    """All data-parallel operations of a rank with their number per step: once per step, or per block under ZeRO-3."""
    b = program.batch
    holding = program.ranks[rank]
    names = ("reduce-gradients", "reduce-shards", "gather-parameters")
    out = [(1.0, op) for op in sync.step_ops(program, holding) if op.name in names]
    for block, times in holding.counts.items():
        if block in program.parameters:
            found = [op for _, op in program.ops(block) if op.axis in ("shard_cp", "expert_shard", "replicate")]
            out += [(one(times) * one(b.microbatches), op) for op in found]
    return [(times, op) for times, op in out if op.collective and one(op.count)]


def buckets(program, elements):
    """Message sizes of a flat buffer with this many gradients."""
    count, _ = cut(program.batch, np.array([elements]))
    return GradientMessage(count, Load(sent=elements / count, first=elements / count))


def volume(program, rank=0):
    """Elements of data-parallel traffic that one rank sends in one step, per parameter of the rank."""
    b = program.batch
    total = 0.0
    for times, op in data_parallel(program, rank):
        width = one(b.param_bytes if op.name in ("gather-weights", "gather-parameters") else b.comm_bytes)
        total += times * bytes_sent(program, [op]) / width
    return total / one(sum(program.ranks[rank].elements.values()))


@pytest.mark.parametrize(
    ("plan", "times"),
    [
        ({"replicate": P}, 2),
        ({"zero": 1, "shard": P}, 2),
        ({"zero": 2, "shard": P}, 2),
        ({"zero": 3, "shard": P}, 3),
        ({"zero": 3, "shard": P, "reshard": False}, 2),
    ],
)
@pytest.mark.parametrize("model", [GPT, COUNTS], ids=["gpt", "counts"])
def test_data_parallel_volume(plan, times, model):
    """2N elements for DDP, ZeRO-1 and 2; 3N for ZeRO-3, which gathers a second time in backward; all × (P−1)/P."""
    assert volume(lowered(model, ONCE, **plan)) == pytest.approx(times * (P - 1) / P)


def test_hybrid_sharding_reduces_shards_between_replicas():
    """Inside the group of 4: two gathers and a scatter; between 2 replicas: an all-reduce of a quarter."""
    program = lowered(GPT, ONCE, zero=3, shard=4, replicate=2)
    assert volume(program) == pytest.approx(3 * 3 / 4 + 2 * (1 / 2) / 4)
    assert {(op.name, op.collective, op.axis) for _, op in data_parallel(program)} == {
        ("gather-weights", "all_gather", "shard_cp"),
        ("reduce-gradients", "reduce_scatter", "shard_cp"),
        ("reduce-shards", "all_reduce", "replicate"),
    }


def test_hybrid_sharding_of_optimizer_states_only():
    """ZeRO-1 in groups of 4: scatter and gather inside, an all-reduce of a quarter between the 2 groups."""
    program = lowered(GPT, ONCE, zero=1, shard=4, replicate=2)
    assert volume(program) == pytest.approx(2 * 3 / 4 + 2 * (1 / 2) / 4)


def test_context_parallel_ranks_reduce_and_shard_too():
    assert volume(lowered(GPT, Workload(batch=4, seq=512), replicate=4, cp=2)) == pytest.approx(2 * 7 / 8)
    assert volume(lowered(GPT, Workload(batch=4, seq=512), zero=1, shard=4, cp=2)) == pytest.approx(2 * 7 / 8)


def test_experts_reduce_over_their_replicas():
    program = lowered(MOE, replicate=8, ep=4)
    ops = data_parallel_ops(program.batch, "expert", [buckets(program, 1e6)])
    assert [(op.axis, one(program.batch.size(op.axis))) for op in ops if one(op.count)] == [("expert_dp", 2)]
    alone = lowered(MOE, replicate=8, ep=8)
    assert not data_parallel_ops(alone.batch, "expert", [buckets(alone, 1e6)])


@pytest.mark.parametrize(
    ("plan", "rounds"),
    [
        ({"replicate": P}, 1),
        ({"replicate": P, "reduce": "microbatch"}, 8),
        ({"zero": 1, "shard": P}, 1),
        ({"zero": 2, "shard": P}, 8),
        ({"zero": 3, "shard": P, "reduce": "microbatch"}, 8),
    ],
)
def test_how_often_gradients_are_reduced(plan, rounds):
    """ZeRO-2 keeps only shards, so each of 8 micro-batches reduces; otherwise accumulation needs one reduction."""
    program = lowered(GPT, Workload(batch=8 * P, seq=512), bucket=1e12, **plan)
    bytes_ = sum(
        times * one(op.count * op.message_bytes)
        for times, op in data_parallel(program)
        if op.name == "reduce-gradients"
    )
    held = one(sum(program.ranks[0].elements.values())) * one(program.batch.comm_bytes)
    assert bytes_ / held == pytest.approx(rounds)


def test_weights_without_resharding_are_gathered_once_per_step():
    work = Workload(batch=8 * P, seq=512)
    freed, kept = (lowered(GPT, work, zero=3, shard=P, reshard=r) for r in (True, False))
    n = one(sum(freed.parameters["dense"].values())) * 2 * (P - 1) / P
    for program, gathers in ((freed, 8 * 2), (kept, 1)):
        ops = [op for _, op in program.ops("dense") if op.name == "gather-weights"]
        assert 8 * bytes_sent(program, ops) == pytest.approx(gathers * n)


def test_buckets_change_the_number_of_calls_not_the_bytes():
    for bucket, calls in ((25e6, 16), (100e6, 4), (1e9, 1)):
        program = lowered(replicate=2, bucket=bucket)
        (op,) = data_parallel_ops(program.batch, "dense", [buckets(program, 100e6)])
        assert one(op.count) == calls
        assert one(op.count * op.message_bytes) == 400e6


def reduced_bytes(ranks, **plan):
    program = lowered(GPT, Workload(batch=ranks, seq=512), replicate=ranks, **plan)
    return bytes_sent(program, data_parallel_ops(program.batch, "dense", [buckets(program, 1e8)]))


@pytest.mark.parametrize(("compression", "times"), [("fp16", 2), ("bf16", 2), ("int8", 4), ("int4", 8)])
def test_quantised_gradients_are_smaller_by_their_width(compression, times):
    assert reduced_bytes(8) / reduced_bytes(8, compression=compression) == pytest.approx(
        times, rel=1e-4
    )  # and its scales


def test_top_k_gain_falls_with_the_ranks_because_it_gathers():
    """1% of fp32 values with 4-byte indices is 50× in bytes kept, 12.5× of a ring's at P = 8, 1.6× at 64."""
    for ranks in (2, 8, 64):
        gain = reduced_bytes(ranks) / reduced_bytes(ranks, compression="top-k", compression_ratio=0.01)
        assert gain == pytest.approx(2 * 50 / ranks)


def test_powersgd_sends_two_factors():
    """m × n at rank 4: 4·(m + n) elements; vectors are sent in full."""
    program = lowered(replicate=8, compression="powersgd", compression_rank=4)
    h, wide = GPT.hidden, GPT.ffn
    load = program.loads["dense"]["dense"]
    assert one(load.first + load.second) == 4 * (4 * 2 * h + 2 * (h + wide)) + 4 * h
    load = lowered(MOE, replicate=8, ep=2, compression="powersgd", compression_rank=4).loads["moe"]["expert"]
    experts = load.first + load.second
    rows, each = MOE.experts // 2, MOE.hidden * MOE.expert_width
    assert one(experts) == 3 * min(4, rows) * (rows + each) if 4 * (rows + each) < rows * each else 3 * rows * each


def test_messages_are_zero_units_or_buckets_of_each_stage():
    """Eight layers, an embedding and a head; with two stages per rank each stage has separate messages."""

    def messages(rank=0, stack=None, model=GPT, **plan):
        program = lowered(model, stack=stack, **plan)
        ops = [op for times, op in data_parallel(program, rank) if op.name == "reduce-gradients"]
        return one(sum(op.count for op in ops))

    assert messages(shard=2, zero=1) == 8 + 2
    assert messages(shard=2, zero=2, pp=2, rank=1) == 4 + 1
    assert messages(shard=2, zero=1, wrap=3) == 3 + 2
    assert messages(shard=2, zero=1, wrap=0) == 1
    assert messages(shard=2, zero=1, model=GPT.but(tied=True)) == 8 + 1
    layer = one(lowered().parameters["dense"]["dense"])
    assert messages(replicate=2, pp=2, bucket=4 * layer, rank=0) == 4 + 1  # and a part of one
    assert messages(replicate=2, pp=2, virtual=2, schedule="interleaved", bucket=16 * layer, rank=1) == 1 + 1
    assert messages(shard=2, zero=1, bucket=4 * layer, stack=Stack(flat_shards=True)) == 8 + 1


def test_parameters_that_no_forward_hides_are_gathered_in_one_call():
    """ZeRO-1 of flat buffers: buckets only where the gather runs behind the next forward. The bytes are the same."""

    def gather(stack, **plan):
        program = lowered(GPT, stack=stack, shard=2, zero=1, **plan)
        op = next(op for _, op in data_parallel(program) if op.name == "gather-parameters")
        return one(op.count), one(op.count * op.message_bytes)

    ahead, after = Stack(flat_shards=True), Stack(flat_shards=True, gathers_ahead=False)
    bucket = 2 * one(lowered().parameters["dense"]["dense"])  # bytes of a layer in 16 bits
    (many, sent), (once, whole) = gather(ahead, bucket=bucket), gather(after, bucket=bucket)
    assert many > once == 1
    assert sent == pytest.approx(whole)
    assert gather(ahead, bucket=bucket, overlap=())[0] == 1


@pytest.mark.parametrize(("model", "more"), [(MOE, 1), (MOE.but(hidden=516, heads=4, expert_ffn=516), 2)])
def test_few_experts_over_many_ranks_are_cut_in_their_width_or_padded(model, more):
    """Four of eight experts over eight ranks: their width is cut if it divides by eight; else four ranks have empty rows, which
    are sent."""
    flat, rows = (lowered(model, shard=16, ep=2, zero=1, stack=Stack(flat_shards=f)) for f in (True, False))
    ops = [
        next(op for _, op in data_parallel(p) if op.name == "gather-parameters" and op.axis == "expert_shard")
        for p in (flat, rows)
    ]
    sent = [one(op.count * op.message_bytes) for op in ops]
    assert sent[1] == more * sent[0]


def test_compression_costs_memory_passes():
    plain = lowered(replicate=8)
    assert all(op.kind != "memory" for op in data_parallel_ops(plain.batch, "dense", [buckets(plain, 1e8)]))
    for name in ("fp16", "int8", "int4", "top-k", "powersgd"):
        program = lowered(replicate=8, compression=name)
        ops = data_parallel_ops(program.batch, "dense", [buckets(program, 1e8)])
        (extra,) = [op for op in ops if op.kind == "memory"]
        assert one(extra.bytes) >= 1e8 * 4


def test_optimizer_reads_and_writes_its_states():
    """AdamW: read gradient; read and write two moments, the master copy and the weight."""
    program = lowered()
    update, norm = sync.optimizer(program.batch, np.array([1e6]), 10)
    assert one(update.bytes) == 1e6 * (4 + 2 * (4 + 4) + 8 + 4)
    assert norm.name == "norm"
    plain = lowered(GPT, WORK.but(optimizer="sgd", clip=False), master=False)
    (update,) = sync.optimizer(plain.batch, np.array([1e6]), 10)
    assert one(update.bytes) == 1e6 * (4 + 4)


def test_zero_3_without_a_shard_group_still_reduces():
    """With only replicate, zero=3 shards nothing: gradients are all-reduced."""
    assert volume(lowered(GPT, ONCE, zero=3, shard=1, replicate=P)) == pytest.approx(2 * (P - 1) / P)


def small(model=GPT, work=ONCE, rank=0, **plan):
    """Small reductions once per step besides the gradients: (name, axis) → bytes."""
    program = lowered(model, work, **plan)
    held = program.ranks[rank]
    ops = sync.small_sums(program.batch, sync.summed(program, held))
    return {(op.name, op.axis): one(op.message_bytes) for op in ops if one(op.count)}


NUMBERS = {("count-tokens", "dp_cp"): 8.0, ("norm-and-loss", "world"): 16.0}


def test_three_scalars_are_all_reduced_over_all_ranks():
    assert small() == {}  # one rank needs no message
    assert small(replicate=P) == NUMBERS


def test_replicated_vectors_have_partial_gradients_under_sequence_parallelism():
    """Norms and biases after row-split products see a share of the tokens; a router and a norm of heads always do."""
    gpt = GPT.but(norm="rmsnorm", ffn_bias=True, out_bias=True, positions="rope", embedding_norm=False)
    vectors = gpt.layers * (2 * gpt.hidden + 2 * gpt.hidden) + gpt.hidden
    assert small(gpt, tp=2, sp=True)["sum-partial", "tp"] == 4 * vectors
    assert ("sum-partial", "tp") not in small(gpt, tp=2)
    heads = gpt.but(qk_norm=True)
    assert small(heads, tp=2)["sum-partial", "tp"] == 4 * gpt.layers * 2 * gpt.head_width
    sharded = small(gpt, zero=3, shard=2, tp=2, sp=True)
    assert sharded["sum-partial", "tp"] == 4 * vectors / 2


def test_a_tied_embedding_is_summed_over_the_two_ends_of_a_pipeline():
    tied = GPT.but(tied=True)
    n = 4 * tied.padded_vocab * tied.hidden
    assert small(tied, pp=4, rank=0)["sum-tied", "ends"] == small(tied, pp=4, rank=3)["sum-tied", "ends"] == n
    assert ("sum-tied", "ends") not in small(tied, pp=4, rank=1)
    assert ("sum-tied", "ends") not in small(tied, pp=4, virtual=2, schedule="zbv", rank=0)  # a V has both on one rank
    assert ("sum-tied", "ends") not in small(GPT.but(tied=False), pp=4)


def test_a_pipeline_gathers_and_reduces_once_per_step():
    """Its stages keep their weights gathered from their first action to their last."""
    work = Workload(batch=8 * 2, seq=512)
    alone, piped = lowered(GPT, work, zero=3, shard=2), lowered(GPT, work, zero=3, shard=2, pp=2)
    assert volume(alone) == pytest.approx(8 * 3 / 2)
    assert volume(piped) == pytest.approx(2 / 2)


def test_units_are_copied_from_gathers_and_to_reductions():
    """fully_shard gathers rank by rank and reduces rank by rank: a rank's wide shards are rounded and copied to one buffer, gathered weights are
    read and written once more, both forward and backward; gradients are read in 16 bits and written in those of the reduction. Flat shards
    are gathered in place, and a single rank gathers nothing."""

    def copies(**changes):
        program = lowered(GPT.but(tied=False), ONCE, Stack(**changes.pop("stack", {})), zero=3, **changes)
        ops = [op for _, op in program.ops(GPT.kinds[0]) if op.part == "copies"]
        return {op.name + str(k): one(op.count) * one(op.bytes) for k, op in enumerate(ops) if one(op.count)}

    weights = sum(
        np.prod(linear.d_out * linear.d_in) for linear in GPT.blocks[GPT.kinds[0]].linears
    )  # without the vectors, of which there are few
    shards, gathered = (4 + 2 + 2 + 2) * weights / P, 4 * weights
    assert copies(shard=P) == pytest.approx(
        {
            "shard-copy-in0": shards,
            "unit-copy-out1": gathered,
            "shard-copy-in2": shards,
            "unit-copy-out3": gathered,
            "unit-copy-in4": 6 * weights,
        },
        rel=0.02,
    )
    assert [*copies(shard=P, reshard=False)] == ["shard-copy-in0", "unit-copy-out1", "unit-copy-in2"]
    assert copies(shard=P, stack={"flat_shards": True}) == copies(shard=1) == {}


def test_gradients_are_added_up_whole_only_where_micro_batches_keep_them():
    """A micro-batch that reduces its gradients to shards adds nothing to a whole sum: `fully_shard` copies the gradients of a unit once
    (`unit-copy-in`) and frees them. A flat reduction reads them in 16 bits and writes its buffer. Bytes of an element of a weight:"""
    sums = MIXED_DTYPES * (2 + 4 + 4)

    def moved(stack=None, work=TWICE, **changes):
        program = lowered(GPT.but(tied=False), work, Stack(fused=(), **(stack or {})), microbatch=1, **changes)
        ops = [op for phase, op in program.ops("dense") if phase == "W" and op.name == "qkv-accumulate"]
        return sum(one(op.bytes) for op in ops) / (3 * GPT.hidden**2)

    flat = {"flat_shards": True}
    assert moved() == moved(replicate=P) == moved(zero=1, shard=P) == pytest.approx(sums)
    assert moved(zero=3, shard=P, reduce="step") == moved(zero=3, shard=1) == pytest.approx(sums)
    assert moved(zero=3, shard=P, pp=2) == pytest.approx(sums)  # stages reduce after their last backward
    assert moved(zero=3, shard=P) == 0
    assert moved(zero=2, shard=P) == moved(flat, zero=3, shard=P) == pytest.approx(2 + 4)
    assert moved(flat, zero=3, shard=P, comm_dtype="bf16") == pytest.approx(2 + 2)
    assert moved(grad_dtype="bf16") == pytest.approx(3 * 2)


def test_the_gradient_of_an_embedding_has_all_rows_of_the_vocabulary():
    """Zeroed in 16 bits and added as a whole. That of a head whose loss is computed in chunks is summed and scaled in 32 bits."""

    def moved(block, name, **fields):
        program = lowered(GPT.but(tied=False), TWICE, Stack(**fields), microbatch=1)
        weights = program.batch.model.padded_vocab * GPT.hidden
        return sum(one(op.bytes) for _, op in program.ops(block) if op.name == name) / weights

    assert moved("embedding", "embedding-zero") == pytest.approx(2)
    assert moved("embedding", "embedding-accumulate") == pytest.approx(MIXED_DTYPES * 10)
    assert moved("head", "logits-accumulate", fused=()) == pytest.approx(MIXED_DTYPES * 10)
    assert moved("head", "logits-scale", fused=()) == 0
    chunked = {"fused": (), "logits_chunk": 2.0**29}
    assert moved("head", "logits-scale", **chunked) == pytest.approx(4 + 4)
    assert moved("head", "logits-accumulate", **chunked) == pytest.approx(4 + 4 + 4)
