"""Memory: the ZeRO table of a 7B model, activations in flight, and monotonicity."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lower.cases import ALL, COUNTS, GPT, GQA, MODELS, MOE, STORED, WORK, flops, lowered, one, plans, traffic
from meshwright.cost import memory as room
from meshwright.cost.memory import (
    PARTS,
    largest_model,
    memory,
    minimum_gpus,
    state_memory,
    zero_state_bytes,
)
from meshwright.cost.step import step_cost
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program
from meshwright.predict.prediction import predict
from meshwright.programs.pipelines import build, walk

SEVEN = COUNTS.but(name="7b", given_parameters=7e9)
TABLE = [(0, 112, 14, 14, 84), (1, 38.5, 14, 14, 10.5), (2, 26.25, 14, 1.75, 10.5), (3, 14, 1.75, 1.75, 10.5)]
DGX = catalog.load("clusters", "dgx-h100")


def of(program, rank=0):
    """Memory by part of one pipeline rank."""
    parts = memory(program, program.ranks[rank])
    return {part: one(size) for part, size in parts.items()}


@pytest.mark.parametrize(("stage", "total", "parameters", "gradients", "optimizer"), TABLE)
def test_zero_table_of_seven_billion_on_eight(stage, total, parameters, gradients, optimizer):
    """112, 38.5, 26.25 and 14 GB, by the textbook formula and by lowering."""
    assert zero_state_bytes(7e9, 8, stage) == total * 1e9
    plan = {"zero": stage, "shard": 8} if stage else {"replicate": 8}
    program = lowered(SEVEN, Workload(batch=8, seq=1), grad_dtype="bf16", **plan)
    states = state_memory(program, program.ranks[0])
    found = {part: one(size) / 1e9 for part, size in states.items()}
    assert found == pytest.approx({"parameters": parameters, "gradients": gradients, "optimizer": optimizer})
    assert sum(found.values()) == pytest.approx(total)


def test_flat_copies_of_gradients_take_memory_beside_the_activations():
    """DeepSpeed: all gradients in the 16 bits of their all-reduce where they are summed up in fp32; else the shard, and that in fp32. A bucket
    more."""
    for dtype, copied in (("fp32", 2.0), ("fp16", (4.0 + 2.0) / 8)):
        plan = {"shard": 8, "zero": 1, "grad_dtype": dtype, "comm_dtype": "bf16", "bucket": 1e9}
        stacks = [Stack(flat_shards=True, flat_copies=on, allocator_slack=0) for on in (False, True)]
        without, copies = (of(lowered(SEVEN, Workload(batch=8, seq=1), stack, **plan))["slack"] for stack in stacks)
        assert without == 0
        assert copies == pytest.approx(copied * 7e9 + 1e9)


def test_states_follow_dtypes_and_optimizer():
    def bytes_per_parameter(workload=None, **plan):
        program = lowered(SEVEN, workload or Workload(batch=8, seq=1), **plan)
        return sum(map(one, state_memory(program, program.ranks[0]).values())) / 7e9

    assert bytes_per_parameter() == 18  # fp32 gradients: 2 + 4 + 12
    assert bytes_per_parameter(grad_dtype="bf16") == 16
    assert bytes_per_parameter(param_dtype="fp32") == 16  # no second fp32 copy: 4 + 4 + 8
    assert bytes_per_parameter(master=False, grad_dtype="bf16", state_dtype="bf16") == 8
    assert bytes_per_parameter(Workload(batch=8, seq=1, optimizer="sgd"), grad_dtype="bf16") == 8
    assert bytes_per_parameter(offload="states") == 6  # moments and master live on the host


@pytest.mark.parametrize(
    ("zero", "reduce", "shards"),
    [
        (2, "auto", True),
        (3, "auto", True),
        (2, "step", False),
        (3, "step", False),
        (3, "microbatch", True),
        (1, "microbatch", False),
    ],
)
def test_gradients_are_sharded_only_if_every_micro_batch_reduces(zero, reduce, shards):
    """Accumulation without reduction needs unsharded gradients; sharded gradients are reduced M times. No plan has both savings."""
    model, m = SEVEN, 4
    program = lowered(model, Workload(batch=8 * m, seq=1), zero=zero, shard=8, reduce=reduce, grad_dtype="bf16")
    kept = one(state_memory(program, program.ranks[0])["gradients"])
    assert kept == pytest.approx(14e9 / (8 if shards else 1))
    reduced = sum(r.bytes for r in traffic(program) if r.collective == "reduce_scatter")
    assert reduced == pytest.approx(14e9 * (m if shards or reduce == "microbatch" else 1))


def test_minimum_gpus_and_largest_model():
    """A table of models on 80 GB devices, and the largest model of plain data parallelism."""
    needed = {7e9: 2, 13e9: 3, 65e9: 13, 175e9: 35, 540e9: 108}
    assert {n: minimum_gpus(n, 80e9) for n in needed} == needed
    assert minimum_gpus(1, 80e9) == 1
    assert (largest_model(40e9), largest_model(80e9)) == (2.5e9, 5e9)
    assert minimum_gpus(largest_model(80e9), 80e9) == 1


def test_parts_have_known_names_and_sum_to_the_peak():
    parts = of(lowered(GQA, tp=2, zero=3, shard=2, pp=2))
    assert set(parts) == set(PARTS)
    assert all(size >= 0 for size in parts.values())
    assert parts["context"] == pytest.approx(Stack().context - Stack().workspace + 3 * Stack().communicator)
    live = parts["activations"] + parts["gathered"] + parts["working"]
    assert parts["slack"] == pytest.approx(Stack().allocator_slack * live)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "naive"])
def test_activations_in_flight_match_the_walked_schedule(schedule):
    program = lowered(GPT, Workload(batch=16, seq=512), pp=4, schedule=schedule)
    peaks = walk(build(schedule, 4, 16)).peak_in_flight
    for rank in (1, 2):  # no embedding, no head
        saved = 2 * sum(map(one, program.saved["dense"].values()))  # two layers per stage
        assert of(program, rank)["activations"] == pytest.approx(peaks[rank] * saved)


def test_virtual_stages_are_counted_by_their_size():
    program = lowered(GPT, Workload(batch=16, seq=512), pp=4, virtual=2, schedule="interleaved")
    peaks = walk(build("interleaved", 4, 16, 2)).peak_in_flight
    layer = sum(map(one, program.saved["dense"].values()))  # one layer per stage, two stages per rank
    assert of(program, 1)["activations"] == pytest.approx(peaks[1] * layer)


def test_full_recompute_keeps_inputs_and_one_layer():
    """32 layers of hidden size 4096, 8 × 2048 tokens: 73 GB becomes 4.3 + 2.3 GB, 91% less."""
    model = Model(
        name="m",
        hidden=4096,
        layers=32,
        heads=32,
        ffn=16384,
        activation="gelu",
        norm="layernorm",
        vocab=64,
        positions="none",
        dropout=True,
    )
    work = Workload(batch=8, seq=2048)

    def layers(recompute):
        program = lowered(model, work, microbatch=8, recompute=recompute)
        embedding = one(sum(program.saved["embedding"].values()))
        return (one(memory(program, program.ranks[0])["activations"]) - embedding) / 1e9

    assert layers("none") == pytest.approx(73.0, abs=0.1)
    assert layers("full") == pytest.approx(4.29 + 2.28, abs=0.02)
    assert 1 - layers("full") / layers("none") == pytest.approx(0.91, abs=0.001)


def test_logits_live_for_one_micro_batch_on_the_last_stage_only():
    work = Workload(batch=16, seq=512)
    small, large = GPT, GPT.but(vocab=100_000)
    first, last = (
        of(lowered(large, work, pp=4), r)["activations"] - of(lowered(small, work, pp=4), r)["activations"]
        for r in (0, 3)
    )
    assert first == 0
    assert last == pytest.approx(512 * 99_000 * 4)


def test_the_loss_and_a_recomputed_layer_do_not_meet():
    """Megatron's loss works in place: 2 + 4 bytes per logit. The logits are freed before a layer is recomputed, so the larger of both counts."""
    work, stack = Workload(batch=1, seq=512), Stack(loss_bytes=6, workspace=0)
    large, small = (
        lowered(GPT.but(vocab=vocab), work, stack, recompute=mode) for vocab, mode in ((100_000, "full"), (64, "full"))
    )
    of_loss, of_layer = (of(program) for program in (large, small))
    logits = 512 * large.batch.model.padded_vocab
    inputs = 8 * one(sum(large.saved["dense"].values())) + one(sum(large.saved["embedding"].values()))
    norm = one(sum(large.saved["head"].values())) - 4 * logits
    assert of_loss["activations"] + of_loss["working"] == pytest.approx(inputs + 6 * logits + norm)
    assert of_layer["activations"] == pytest.approx(inputs + one(small.transient))
    eager = of(lowered(GPT.but(vocab=100_000), work, Stack(workspace=0), recompute="full"))
    assert eager["working"] - of_loss["working"] == pytest.approx((14 - 6) * logits)


def test_a_loss_over_parts_of_the_vocabulary_may_hold_more_of_each_logit():
    work = Workload(batch=1, seq=512)
    for tp, more in ((1, 0), (4, 2)):
        whole, split = (
            lowered(GPT.but(vocab=100_000), work, Stack(split_loss_bytes=size, workspace=0), tp=tp) for size in (0, 16)
        )
        logits = 512 * whole.batch.model.padded_vocab / tp
        assert of(split)["working"] - of(whole)["working"] == pytest.approx(more * logits)


def test_buckets_of_a_flat_gradient_buffer_take_no_memory():
    flat, separate = (
        of(lowered(GPT, stack=Stack(flat_shards=flat, workspace=0), replicate=8))["working"] for flat in (True, False)
    )
    program = lowered(GPT, replicate=8)
    buckets = one(room.bucket_memory(program, program.ranks[0]))
    assert separate - flat == pytest.approx(buckets)
    assert buckets > 0


def test_gathered_weights_of_zero_three():
    """With resharding: the weights of two layers. Without, or in a pipeline: all weights of the rank."""
    work = Workload(batch=16, seq=512)
    freed, kept = (lowered(GPT, work, zero=3, shard=8, reshard=r) for r in (True, False))
    layer, embedding, head = (one(sum(freed.parameters[kind].values())) for kind in ("dense", "embedding", "head"))
    assert of(freed, 0)["gathered"] == pytest.approx(2 * 2 * layer)
    assert of(kept, 0)["gathered"] == pytest.approx(2 * (8 * layer + embedding + head))
    piped = lowered(GPT, work, zero=3, shard=8, pp=2)
    assert of(piped, 0)["gathered"] == pytest.approx(2 * (4 * layer + embedding))
    assert of(lowered(zero=2, shard=8))["gathered"] == 0


def test_gathers_in_fp8_halve_weights_but_not_gradients():
    work = Workload(batch=16, seq=512, precision="fp8")
    for model in (GPT, MOE):
        same, fp8 = (lowered(model, work, zero=3, shard=8, gather_dtype=dtype) for dtype in ("same", "fp8"))
        block = fp8.loads["moe" if model is MOE else "dense"].values()
        held, narrow = sum(one(load.held) for load in block), sum(one(load.fp8) for load in block)
        assert narrow > 0.9 * held
        assert of(same, 0)["gathered"] == pytest.approx(2 * 2 * held)
        assert of(same, 0)["gathered"] - of(fp8, 0)["gathered"] == pytest.approx(2 * narrow)
        kept = [lowered(model, work, zero=3, shard=8, gather_dtype=d, reshard=False) for d in ("same", "fp8")]
        of_all = sum(
            one(load.fp8) * model.layer_count(kind) for kind in model.kinds for load in fp8.loads[kind].values()
        )
        assert of(kept[0], 0)["gathered"] - of(kept[1], 0)["gathered"] == pytest.approx(of_all)


def test_experts_of_which_a_rank_has_the_only_copy_are_not_gathered():
    work = Workload(batch=16, seq=512)
    spread, sharded = (lowered(MOE.but(tied=False, vocab=64), work, zero=3, shard=8, ep=ep) for ep in (8, 4))
    largest = max(one(groups["dense"].held) for groups in spread.loads.values())
    assert of(spread, 0)["gathered"] == pytest.approx(2 * 2 * largest)
    layer = sum(one(load.held) for load in sharded.loads["moe"].values())
    assert of(sharded, 0)["gathered"] == pytest.approx(2 * 2 * layer)


def test_offloaded_activations_leave_the_device():
    here, there = (of(lowered(GPT, offload=offload))["activations"] for offload in ("none", "activations"))
    assert there < here / 2


def test_a_tied_head_keeps_its_copy_on_the_last_stage():
    tied, untied = (of(lowered(GQA.but(tied=tied), pp=2), 1) for tied in (True, False))
    assert tied["parameters"] == pytest.approx(untied["parameters"])


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(sorted(MODELS)))
def test_a_larger_model_never_needs_less_memory(data, name):
    model = MODELS[name]
    plan = data.draw(plans(model))
    fields = ["layers", "hidden"] if model.kind == "mlp" else ["layers", "hidden", "vocab"]
    field = data.draw(st.sampled_from(fields))
    grown = model.but(
        **{field: 2 * getattr(model, field), **({"head_dim": model.head_width} if field == "hidden" else {})}
    )
    small, large = (step_cost(step_program(m, plan, WORK, every_rank=True), DGX).peak_memory for m in (model, grown))
    assert one(large) >= one(small)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(sorted(ALL)))
def test_more_sharding_or_recompute_never_needs_more_memory(data, name):
    model = ALL[name]
    plan = data.draw(plans(model))
    by_stage = []
    for zero in range(1 if plan.shard > 1 else 0, 4):
        program = step_program(model, plan.but(zero=zero), WORK)
        by_stage.append(sum(map(one, state_memory(program, program.ranks[0]).values())))
    assert by_stage == sorted(by_stage, reverse=True)
    kept = []
    for recompute in ("none", "selective", "full"):
        program = step_program(model, plan.but(recompute=recompute), WORK)
        kept.append(sum(map(one, program.saved[model.kinds[-1]].values())))
    assert kept == sorted(kept, reverse=True)


def test_fits_compares_peak_memory_with_the_device():
    small, large = (catalog.load("models", n) for n in ("llama2-7b", "llama2-70b"))
    work, plan = Workload(batch=8, seq=2048), Plan(replicate=8, recompute="full")
    one_node = DGX.with_gpus(8)
    too_large = predict(Config(large, one_node, plan, work, Stack()))
    assert not too_large.fits
    assert too_large.memory_gib > too_large.memory_limit_gib
    sharded = predict(Config(small, one_node, Plan(shard=8, zero=3, recompute="full"), work, Stack()))
    assert sharded.fits
    assert sharded.memory_gib <= sharded.memory_limit_gib == pytest.approx(one_node.accelerator.memory / 2**30)
    batch = [Plan(replicate=8, recompute="full"), Plan(shard=8, zero=3, recompute="full")]
    assert step_cost(step_program(small, batch, work), one_node).fits(one_node).tolist() == [False, True]


def test_expert_states_are_divided_over_expert_parallel_ranks():
    spread, here = (of(lowered(MOE, replicate=8, ep=ep)) for ep in (8, 1))
    experts = MOE.parameters()["experts"]
    assert here["parameters"] - spread["parameters"] == pytest.approx(experts * 2 * 7 / 8)


def test_stored_softmax_costs_its_scores():
    flash, stored = (of(lowered(GPT, stack=s))["activations"] for s in (Stack(), STORED))
    scores = 8 * GPT.heads * WORK.seq * WORK.seq * 5  # softmax and its dropped copy in 2 bytes, the mask in 1
    lse = 8 * GPT.heads * WORK.seq * 4
    assert stored - flash == pytest.approx(scores - lse)


def test_attention_dropout_costs_time_and_a_tile_but_saves_no_probabilities():
    """Tiled attention saves nothing more for backward; stored softmax also saves its mask and the dropped probabilities."""
    plain = GPT.but(dropout=False, causal=True)
    drops = plain.but(attention_dropout=0.1)
    (before, after), (stored, masked) = (
        [lowered(m, stack=Stack(attention=kernel)) for m in (plain, drops)] for kernel in ("flash", "stored")
    )
    kept = [sum(one(x) for x in p.saved["dense"].values()) for p in (before, after, stored, masked)]
    assert kept[0] == kept[1]
    assert kept[3] - kept[2] == WORK.seq * GPT.heads * WORK.seq * (1 + 2)
    tile = 5 * 4 * GPT.heads * WORK.seq**2
    inner = [lowered(m, pp=4) for m in (plain, drops)]  # a stage without logits, which are larger than the tile
    middle = [of(p, 1)["working"] for p in inner]
    assert middle[1] - middle[0] == one(after.tile)
    assert one(after.tile) == tile + 4 * WORK.seq * GPT.hidden * (1 + 2 * 2)
    assert not one(before.tile)
    whole = flops(before, "dense", "FI", "attention")
    assert flops(after, "dense", "FI") - flops(before, "dense", "FI") == pytest.approx(
        whole
    )  # the same products, not fused
    assert {op.dtype for _, op in after.ops("dense") if op.name.startswith("scores")} == {"fp32"}


def test_computed_dropout_masks_save_eight_bytes_per_token():
    plain, hashed = (lowered(GPT.but(dropout=False, dropout_rate=rate), tp=2, sp=True) for rate in (0.0, 0.1))
    for block, sites in (("embedding", 1), ("dense", 2)):
        more = [sum(one(x) for x in p.saved[block].values()) for p in (plain, hashed)]
        assert more[1] - more[0] == 8 * sites * WORK.seq / 2
    assert {op.name for _, op in hashed.ops("dense")} - {op.name for _, op in plain.ops("dense")} == {
        f"{part}-residual-drop{way}" for part in ("attention", "ffn") for way in ("", "-grad")
    }


def test_the_fullest_rank_holds_the_rows_that_zero_pads():
    """Four of eight experts over three ranks: one rank has two."""
    work = Workload(batch=6, seq=64)
    flat, rows = (lowered(MOE, work, shard=6, ep=2, zero=1, stack=Stack(flat_shards=f)) for f in (True, False))
    held = [one(state_memory(p, p.ranks[0])["optimizer"]) for p in (flat, rows)]
    experts = one(rows.parameters["moe"]["expert"]) * MOE.layers
    added = {block: one(rows.loads[block]["dense"].held) - one(rows.parameters[block]["dense"]) for block in rows.loads}
    dense = added["moe"] * MOE.layers + added["embedding"] + added["head"]
    assert held[1] - held[0] == pytest.approx(
        12 * (experts / 6 + dense / 6)
    )  # 2/4 − 1/3 of what an expert's ranks share


def own(model, workload=WORK, **plan):
    """Memory by part with the stack of our trainer on GPUs."""
    stack = Stack(**catalog.entry("stacks", "meshwright"))
    return of(lowered(model, workload, stack.but(workspace=0), **plan))


def layer_moment(program):
    return room.layer_moment(program, program.ranks[0])


def test_a_backward_that_reuses_saved_tensors_allocates_one_gradient_of_the_widest_product():
    work = Workload(batch=1, seq=512)
    plain, reusing = (
        one(layer_moment(lowered(GQA, work, Stack(reuses_saved=reuses))).working) for reuses in (False, True)
    )
    assert plain - reusing == pytest.approx(512 * 2 * 3 * GQA.ffn)  # of four: gate, up and the gradients of both
    assert reusing == pytest.approx(512 * 2 * (2 * GQA.hidden + GQA.ffn))
    again = layer_moment(lowered(GQA, work, Stack(reuses_saved=True), recompute="full"))
    assert one(again.working) == pytest.approx(reusing)
    offloaded = {"recompute": "full", "offload": "activations"}
    again = layer_moment(lowered(GQA, work, Stack(reuses_saved=True), **offloaded))
    assert one(again.working) == pytest.approx(512 * 2 * (2 * GQA.hidden + 3 * GQA.ffn))


def test_the_head_is_not_gathered_while_a_layer_computes():
    """The fullest moment of long sequences is the backward of a layer; with few tokens it is that of the head or of the embedding."""
    model = GQA.but(vocab=200_000)
    sharded = {"shard": 2, "zero": 3, "microbatch": 1, "recompute": "full"}
    few, many = (lowered(model, Workload(batch=2, seq=seq), **sharded) for seq in (128, 2**20))
    program = lowered(model, Workload(batch=2, seq=2**20), Stack(**catalog.entry("stacks", "meshwright")), **sharded)
    assert one(of(program)["gathered"]) == pytest.approx(2 * one(program.gathered["dense"]))
    for room_of in (few, many):
        assert one(room.loss_moment(room_of, room_of.ranks[0]).gathered) == 2 * one(room_of.gathered["head"])
    end = room.embedding_moment(few, few.ranks[0])
    assert one(end.working) == pytest.approx(one(few.unit_elements["embedding"]) * (2 + 4))


def test_gradients_that_are_allocated_lazily_meet_few_activations():
    """The fullest moment: with all activations the gradient of the head; with few activations those of most layers; with none all of them."""
    lazy = {"param_dtype": "bf16", "grad_dtype": "bf16", "microbatch": 4}
    long, short = Workload(batch=4, seq=4096), Workload(batch=4, seq=4)
    model = GQA.but(vocab=512)  # so that a layer needs more than the loss
    head = 512 * model.hidden * 2
    parts = own(model, long, **lazy)
    assert parts["gradients"] == pytest.approx(head, rel=0.01)
    everything = of(lowered(model, long, **lazy))["gradients"]
    offloaded = own(model, long, recompute="full", offload="activations", **lazy)
    assert head < offloaded["gradients"] < everything
    assert own(model, short, recompute="full", **lazy)["gradients"] == pytest.approx(everything)


def test_fsdp_keeps_no_16_bit_shard_and_reduces_one_unit_at_a_time():
    work = Workload(batch=16, seq=64)
    typical, fsdp = (
        lowered(GPT, work, stack=catalog.load("stacks", name), zero=3, shard=8) for name in ("default", "fsdp")
    )
    assert of(typical)["parameters"] > 0
    assert of(fsdp)["parameters"] == 0
    largest = max(one(size) for size in fsdp.unit_elements.values())
    assert of(fsdp)["working"] >= 4 * largest
