"""The operations of one layer under each strategy, counted by hand."""

import numpy as np
import pytest

from lower.cases import GPT, GQA, MLA, MLP, MOE, STORED, WORK, block_bytes, calls, flops, lowered, one
from meshwright.describe import catalog
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.program import sent
from meshwright.lower.traffic import boundary_calls

TOKENS = WORK.seq  # of one micro-batch of one sequence
ACTIVATION = TOKENS * GPT.hidden * 2  # bytes of T·h in 16 bits


def test_one_rank_has_no_communication():
    for model in (GPT, GQA, MOE, MLA):
        program = lowered(model)
        assert not any(calls(program, block) for block in program.kinds())


def test_a_stack_that_keeps_gathered_inputs_gathers_them_again_only_in_recompute():
    """DTensor: inputs of queries and of the FFN, T·h each, whole on each rank. Selective recompute by operators runs the gathers again."""
    gathers = ("W", "all_gather", "tp")
    for mode, again in (("none", 0), ("selective", 2), ("full", 2)):
        stack = Stack(keeps_gathered=True, selective="operators")
        program = lowered(stack=stack, tp=4, sp=True, recompute=mode)
        assert calls(program).get(gathers, 0) == again
        assert calls(program)["F", "all_gather", "tp"] == 2
        assert not calls(program, "head").get(gathers, 0)
    kept, gathered = (
        one(sum(lowered(stack=Stack(keeps_gathered=keeps), tp=4, sp=True).saved["dense"].values()))
        for keeps in (False, True)
    )
    assert gathered - kept == pytest.approx(2 * ACTIVATION * 3 / 4)
    fp8 = Workload(batch=WORK.batch, seq=WORK.seq, precision="fp8")
    compiled = (
        one(sum(lowered(GPT, fp8, Stack(keeps_gathered=keeps, fp8_passes=5), tp=4, sp=True).saved["dense"].values()))
        for keeps in (False, True)
    )
    without, kept_in_fp8 = compiled
    assert kept_in_fp8 - without == pytest.approx(2 * ACTIVATION / 2)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_has_four_all_reduces_per_layer(tp):
    program = lowered(tp=tp)
    assert calls(program) == {("F", "all_reduce", "tp"): 2, ("I", "all_reduce", "tp"): 2}
    assert block_bytes(program, "tp") == pytest.approx(4 * 2 * (tp - 1) / tp * ACTIVATION)


def test_sequence_parallelism_replaces_each_all_reduce_and_adds_a_gather_in_backward():
    program = lowered(tp=4, sp=True)
    assert calls(program) == {
        ("F", "all_gather", "tp"): 2,
        ("F", "reduce_scatter", "tp"): 2,
        ("I", "all_gather", "tp"): 2,
        ("I", "reduce_scatter", "tp"): 2,
        ("W", "all_gather", "tp"): 2,  # the saved inputs were sharded: gathered again for the weights' gradients
    }
    again = block_bytes(program, "tp", phases="W")
    assert again == pytest.approx(2 * 3 / 4 * ACTIVATION)
    assert block_bytes(program, "tp") - again == pytest.approx(block_bytes(lowered(tp=4), "tp"))


def test_all_gather_form_gathers_every_output():
    program = lowered(tp=4, tp_form="all-gather")
    assert calls(program) == {
        ("F", "all_gather", "tp"): 4,
        ("I", "reduce_scatter", "tp"): 2,
        ("I", "all_reduce", "tp"): 2,
    }
    assert block_bytes(program, "tp") > block_bytes(lowered(tp=4), "tp")


def test_column_split_mlp_gathers_once_per_layer():
    """Batch 128 of width 1024 on 4 ranks, 256 columns each."""
    work = Workload(batch=128, seq=1, precision="fp32")
    program = lowered(MLP, work, tp=4, microbatch=128)
    assert calls(program) == {("F", "all_gather", "tp"): 1, ("I", "reduce_scatter", "tp"): 1}
    product = next(op for _, op in program.ops("dense") if op.kind == "gemm")
    assert [one(x) for x in product.shape] == [1, 128, 256, 1024]
    assert block_bytes(program, "tp", phases="F") == pytest.approx(3 / 4 * 128 * 1024 * 4)


def test_embedding_and_head_are_split_over_the_vocabulary():
    plain, sequence = lowered(tp=4), lowered(tp=4, sp=True)
    assert calls(plain, "embedding") == {("F", "all_reduce", "tp"): 1}
    assert calls(sequence, "embedding") == {("F", "reduce_scatter", "tp"): 1, ("W", "all_gather", "tp"): 1}
    head = calls(plain, "head")
    assert head[("I", "all_reduce", "tp")] == 1
    assert block_bytes(plain, "tp", "head", "F") < 0.1 * ACTIVATION  # the loss needs maxima and sums, not the logits


def kv_bytes(model, cp, tp=1):
    """K and V of one rank's tokens."""
    core = model.blocks["dense"].attention
    return TOKENS / cp * max(core.kv_heads / tp, 1) * (core.qk + core.v) * 2


@pytest.mark.parametrize("model", [GPT, GQA], ids=["mha", "gqa"])
def test_ring_attention_sends_keys_and_values_around_the_ring(model):
    program = lowered(model, cp=4)
    assert calls(program, axis="cp") == {("F", "send", "cp"): 3, ("I", "send", "cp"): 6}
    assert block_bytes(program, "cp", phases="F") == pytest.approx(3 * kv_bytes(model, 4))
    assert block_bytes(program, "cp", phases="I") == pytest.approx(2 * 3 * kv_bytes(model, 4))


@pytest.mark.parametrize("model", [GPT, GQA], ids=["mha", "gqa"])
def test_all_gather_attention_sends_the_bytes_of_a_ring_in_one_call(model):
    gather, ring = lowered(model, cp=4, cp_kind="all-gather"), lowered(model, cp=4)
    assert calls(gather, axis="cp") == {
        ("F", "all_gather", "cp"): 1,
        ("I", "all_gather", "cp"): 1,
        ("I", "reduce_scatter", "cp"): 1,
    }
    assert block_bytes(gather, "cp") == pytest.approx(block_bytes(ring, "cp"))


def test_ulysses_exchanges_sequence_shards_for_heads():
    """Q, K and V one way and the output back, each with 1/cp of the tokens: (cp−1)/cp of 4·T/cp·h is sent; the same in backward."""
    program = lowered(cp=4, cp_kind="ulysses")
    assert calls(program, axis="cp") == {("F", "all_to_all", "cp"): 2, ("I", "all_to_all", "cp"): 2}
    assert block_bytes(program, "cp", phases="F") == pytest.approx(3 / 4 * 4 * TOKENS / 4 * GPT.hidden * 2)
    assert block_bytes(program, "cp", phases="I") == block_bytes(program, "cp", phases="F")


def test_ulysses_repeats_too_few_kv_heads():
    few = GQA.but(kv_heads=2)
    core = few.blocks["dense"].attention
    program = lowered(few, cp=8, cp_kind="ulysses")
    width = core.heads * (core.qk + core.v) + 8 * (core.qk + core.v)  # 8 KV heads, not 2: one a rank
    assert block_bytes(program, "cp", phases="F") == pytest.approx(7 / 8 * TOKENS / 8 * width * 2)


@pytest.mark.parametrize(("ep", "top_k"), [(2, 1), (4, 2), (8, 2), (8, 3)])
def test_experts_dispatch_every_token_k_times(ep, top_k):
    model = MOE.but(top_k=top_k)
    program = lowered(model, replicate=8, ep=ep)
    assert calls(program, "moe", axis="ep") == {("F", "all_to_all", "ep"): 3, ("I", "all_to_all", "ep"): 2}
    token_bytes = TOKENS * model.hidden * 2
    counts = model.experts * 8  # the counts are exchanged first
    assert block_bytes(program, "ep", "moe") == pytest.approx((4 * top_k * token_bytes + counts) * (ep - 1) / ep)


def test_tensor_parallel_ranks_divide_the_tokens_for_experts():
    """With expert_tp = 1 each tp rank dispatches a slice of the tokens; with expert_tp = tp the slices are gathered inside the experts."""
    whole_experts = lowered(MOE, tp=4, sp=True, ep=4, expert_tp=1)
    split = lowered(MOE, tp=4, sp=True, replicate=4, ep=4)
    share = TOKENS * MOE.hidden * 2 / 4 * MOE.top_k
    counts = MOE.experts * 8
    assert block_bytes(whole_experts, "ep", "moe") == pytest.approx(3 / 4 * (4 * share + counts))
    assert block_bytes(whole_experts, "expert_tp", "moe") == 0
    assert calls(split, "moe", axis="expert_tp") == {
        ("F", "all_gather", "expert_tp"): 2,
        ("F", "reduce_scatter", "expert_tp"): 1,
        ("I", "all_gather", "expert_tp"): 1,
        ("I", "reduce_scatter", "expert_tp"): 1,
    }
    assert block_bytes(split, "expert_tp", "moe") == pytest.approx(3 / 4 * (4 * share * 4 + counts * 4))


def test_imbalance_lengthens_the_experts_of_the_busiest_rank():
    even, skewed = lowered(MOE, ep=8, replicate=8), lowered(MOE, WORK.but(imbalance=1.5), ep=8, replicate=8)

    def experts(program):
        return sum(one(op.flops) for _, op in program.ops("moe") if op.kind == "gemm" and op.part == "experts")

    assert experts(skewed) == pytest.approx(1.5 * experts(even))


def test_measured_loads_give_the_busiest_rank_of_each_plan():
    """16 experts of which the first gets half of all tokens: alone on its rank, or beside others; a capacity cuts what it takes."""
    loads = (15.0, *[1.0] * 15)
    work = WORK.but(loads=loads)
    for ep, busiest in ((1, 1.0), (2, 22 / 15), (4, 18 / 7.5), (16, 8.0)):
        even, skewed = (lowered(MOE.but(experts=16), w, ep=ep, replicate=16) for w in (WORK, work))
        for name in ("experts-up", "dispatch", "combine"):
            key = "flops" if name == "experts-up" else "message_bytes"
            a, b = (
                next((one(getattr(op, key)) for _, op in p.ops("moe") if op.name == name), 0.0) for p in (even, skewed)
            )
            assert b == pytest.approx(busiest * a), (ep, name)
        kept = sum(sum(even.saved["moe"].values())), sum(sum(skewed.saved["moe"].values()))
        assert (kept[1] > kept[0]) == (busiest > 1)
    router = MOE.router.but(capacity=2.0)
    assert router.busiest(1.0, loads, 16.0) == pytest.approx(2.0)
    assert router.dropped(loads) == pytest.approx(6 / 16)


@pytest.mark.parametrize(
    ("model", "block"), [(GPT, "dense"), (GQA, "dense"), (MOE, "moe"), (MLA, "moe"), (MLP, "dense")]
)
def test_full_recompute_runs_forward_a_second_time(model, block):
    """The products of forward a second time: 33% more than forward and backward."""
    program = lowered(model, tp=2, recompute="full", stack=Stack(early_stop=False))
    assert flops(program, block, "R") == pytest.approx(flops(program, block, "F"))
    assert flops(program, block, "R") / flops(program, block, "FIW") == pytest.approx(1 / 3)
    assert flops(lowered(model, tp=2), block, "R") == 0


def test_a_recompute_that_stops_early_leaves_the_last_product_out():
    """Backward needs its input only. A dropout, a norm or an activation after it needs its result, and so do the weights of routed experts."""

    def spared(model, block):
        program = lowered(model, tp=2, recompute="full")
        return flops(program, block, "F") - flops(program, block, "R")

    assert spared(GQA, "dense") == pytest.approx(2 * TOKENS * GQA.hidden * GQA.ffn / 2)
    cases = ((GPT, "dense"), (GQA.but(norms_per_layer=4), "dense"), (MLP, "dense"), (MOE, "moe"), (MLA, "moe"))
    for model, block in cases:
        assert spared(model, block) == 0


def test_a_reentrant_checkpoint_runs_a_layer_to_its_end():
    """LLaMA-Factory sets use_reentrant, which Transformers does not since January 2026."""

    def spared(name):
        program = lowered(GQA, recompute="full", stack=catalog.load("stacks", name))
        return flops(program, "dense", "F") - flops(program, "dense", "R")

    assert spared("llama-factory") == 0
    assert spared("trl") == pytest.approx(2 * TOKENS * GQA.hidden * GQA.ffn)


@pytest.mark.parametrize(
    ("model", "block", "kind"),
    [
        (GPT, "dense", "all_reduce"),
        (MOE, "moe", "all_gather"),
        (MLP, "dense", "all_gather"),
    ],
)
def test_full_recompute_repeats_all_collectives_except_the_last(model, block, kind):
    """The recomputed forward stops when backward has its inputs: nothing needs the collective after the last product."""
    program = lowered(model, tp=2, recompute="full")
    first, again = ({key[1:]: n for key, n in calls(program, block, phase).items()} for phase in "FR")
    assert {key: n for key, n in first.items() if n != again.get(key)} == {(kind, "tp"): first[kind, "tp"]}
    assert first[kind, "tp"] - again.get((kind, "tp"), 0) == 1


def test_full_recompute_waits_for_a_norm_behind_the_last_product():
    program = lowered(GPT.but(norms_per_layer=4), tp=2, recompute="full")
    assert (
        calls(program, "dense", "R")["R", "all_reduce", "tp"] == calls(program, "dense", "F")["F", "all_reduce", "tp"]
    )


def test_full_recompute_gathers_a_sequence_once_for_the_rerun_and_the_weights():
    program = lowered(tp=4, sp=True, recompute="full")
    assert calls(program, phases="RW") == {("R", "reduce_scatter", "tp"): 1, ("W", "all_gather", "tp"): 2}


def test_selective_recompute_repeats_only_the_attention_core():
    program = lowered(recompute="selective", stack=STORED)
    assert {op.name for phase, op in program.ops("dense") if phase == "R"} == {
        "scores-again",
        "softmax-again",
        "values-again",
    }
    flash = lowered(recompute="selective")
    assert {op.name for phase, op in flash.ops("dense") if phase == "R"} == {"core-again"}


def test_pipeline_sends_one_message_per_boundary_and_direction():
    for virtual, schedule in ((1, "1f1b"), (2, "interleaved")):
        program = lowered(pp=4, virtual=virtual, schedule=schedule)
        for way in "FI":
            (op,) = program.sync[f"boundary-{way}"]
            assert (op.collective, op.axis, one(op.count)) == ("send", "pp", 1)
            assert one(op.message_bytes) == ACTIVATION  # interleaving sends more often, never less at a time
    (op,) = lowered(pp=4, tp=4, sp=True).sync["boundary-F"]
    assert one(op.message_bytes) == ACTIVATION / 4  # sequence parallelism sends its own tokens only
    assert one(lowered().sync["boundary-F"][0].count) == 0


def test_ranks_that_send_parts_gather_what_they_receive():
    """Of four tensor-parallel ranks each sends a quarter to the next stage; with sequence parallelism it has only a quarter."""
    parts = Stack(name="parts", sends_parts=True)
    program = lowered(stack=parts, pp=4, tp=4)
    (send,), (gather,) = program.sync["boundary-I"], program.sync["boundary-gather"]
    assert one(send.message_bytes) == ACTIVATION / 4
    assert (gather.collective, gather.axis, one(gather.count)) == ("all_gather", "tp", 1)
    assert one(gather.message_bytes) == ACTIVATION
    for plan in ({"pp": 4, "tp": 4, "sp": True}, {"pp": 4}, {"tp": 4}):
        assert one(lowered(stack=parts, **plan).sync["boundary-gather"][0].count) == 0, plan
    sequence = lowered(stack=parts, pp=4, tp=4, sp=True)
    assert one(sequence.sync["boundary-F"][0].message_bytes) == ACTIVATION / 4


def test_a_rank_gathers_activations_and_gradients_that_it_receives():
    """The first of two stages receives gradients, the last one activations, one in the middle both."""
    program = lowered(stack=Stack(name="parts", sends_parts=True), pp=4, tp=4)
    for rank, received in ((0, 1), (1, 2), (3, 1)):
        calls_of = {op.name: one(times) for op, times in boundary_calls(program, np.array([float(rank)]))}
        assert calls_of["parts"] == received, rank


def test_tensor_parallel_traffic_of_gpt3():
    """GPT-3, one sequence of 2048, tp 8: 352 MB per layer, 33.8 GB in total (published: 175 MB and 16.8 GB)."""
    gpt3 = catalog.load("models", "gpt3-175b")
    program = lowered(gpt3, Workload(batch=1, seq=2048), tp=8)
    assert block_bytes(program, "tp") / 1e6 == pytest.approx(352.3, abs=0.1)
    assert 96 * block_bytes(program, "tp") / 1e9 == pytest.approx(33.8, abs=0.05)


def test_bytes_sent_by_each_collective():
    assert sent("all_reduce", 800.0, 8) == 1400
    assert sent("all_gather", 800.0, 8) == sent("reduce_scatter", 800.0, 8) == sent("all_to_all", 800.0, 8) == 700
    assert sent("send", 800.0, 8) == 800
    assert all(sent(c, 800.0, 1) == 0 for c in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"))
