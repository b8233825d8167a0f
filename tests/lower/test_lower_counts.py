"""Lowering preserves FLOPs, parameters and saved bytes of the model, split by the plan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lower.cases import ALL, COUNTS, GPT, GQA, MLA, MOE, STORED, WORK, flops, lowered, one, plans
from meshwright.describe import catalog
from meshwright.describe.adapter import Adapter
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program

NAMES = sorted(ALL)
CATALOG = [
    "gpt3-175b",
    "llama2-70b",
    "mixtral-8x7b",
    "deepseek-v3",
    "gpt-oss-20b",
    "gemma2-9b",
    "palm-8b",
    "bert-large",
]


def total_flops(program, phases, kind="gemm"):
    return sum(
        one(h.counts[block]) * flops(program, block, phases, kind) for h in program.ranks for block in program.kinds()
    )


def products(model, seq):
    return sum(n for part, n in model.flops(seq).items() if part not in ("attention-core", "linear-core"))


@pytest.mark.parametrize("model", [*ALL.values(), *(catalog.load("models", n) for n in CATALOG)], ids=lambda m: m.name)
def test_forward_and_backward_products_are_three_times_the_forward_flops(model):
    program = lowered(model, Workload(batch=4, seq=512), microbatch=2)
    tokens = 2 * (512 if model.kind == "transformer" else 1)
    for phase in "FIW":
        assert total_flops(program, phase) == pytest.approx(tokens * products(model, 512), rel=1e-12)
    assert total_flops(program, "R") == 0


def test_counts_only_model_has_its_given_flops():
    program = lowered(COUNTS, Workload(batch=8, seq=1), microbatch=4)
    assert total_flops(program, "FIW") == pytest.approx(3 * 4 * COUNTS.flops(1)["all"])


@pytest.mark.parametrize("model", [GPT, GQA, MOE, MLA], ids=lambda m: m.name)
def test_attention_core_has_two_products_forward_and_five_backward(model):
    program = lowered(model)
    core = model.flops(WORK.seq)["attention-core"] * WORK.seq
    assert total_flops(program, "F", "attention") == pytest.approx(core)
    assert total_flops(program, "I", "attention") == pytest.approx(2.5 * core)
    stored = lowered(model, stack=STORED)
    whole = model.flops(WORK.seq, halve_causal=False)["attention-core"] * WORK.seq
    assert total_flops(stored, "F") - total_flops(program, "F") == pytest.approx(whole)
    assert total_flops(stored, "I") - total_flops(program, "I") == pytest.approx(2 * whole)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(NAMES))
def test_splitting_preserves_the_total_flops(data, name):
    """The tp · cp · dp shares of a micro-batch sum to its total, except operations that every tp rank repeats (latents)."""
    model = ALL[name]
    plan = data.draw(plans(model))
    program = step_program(model, plan, WORK, every_rank=True)
    tokens = plan.microbatch * (WORK.seq if model.kind == "transformer" else 1)
    whole = total_flops(program, "FIW") * plan.tp * plan.cp
    expected = 3 * tokens * products(model, WORK.seq)
    assert whole >= expected * (1 - 1e-9)
    if model.attention == "gqa" or plan.tp == 1 or plan.sp:
        assert whole == pytest.approx(expected)


@pytest.mark.parametrize("model", ALL.values(), ids=lambda m: m.name)
@pytest.mark.parametrize("attention", ["flash", "stored"])
def test_saved_bytes_of_one_rank_equal_those_of_the_model(model, attention):
    program = lowered(model, stack=Stack(attention=attention))
    seq = WORK.seq if model.kind == "transformer" else 1
    saved: dict[str, float] = {}
    for block, parts in program.saved.items():
        for part, size in parts.items():
            saved[part] = saved.get(part, 0) + one(program.ranks[0].counts[block]) * one(size)
    assert {p: n for p, n in saved.items() if n} == pytest.approx(model.activations(seq, flash=attention == "flash"))


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_formulas_of_korthikanti_et_al(t):
    """sbh(10 + 24/t + 5as/(ht)) with tensor parallelism, sbh/t·(34 + 5as/h) with sequence parallelism."""
    s, b, h, a = WORK.seq, 2, GPT.hidden, GPT.heads
    tensor = sum(map(one, lowered(tp=t, microbatch=b, stack=STORED).saved["dense"].values()))
    assert tensor == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))
    sequence = sum(map(one, lowered(tp=t, sp=True, microbatch=b, stack=STORED).saved["dense"].values()))
    assert sequence == pytest.approx(s * b * h / t * (34 + 5 * a * s / h))
    selective = sum(
        map(one, lowered(tp=t, sp=True, microbatch=b, recompute="selective", stack=STORED).saved["dense"].values())
    )
    assert selective == pytest.approx(34 * s * b * h / t)
    full = sum(map(one, lowered(tp=t, sp=True, microbatch=b, recompute="full", stack=STORED).saved["dense"].values()))
    assert full == pytest.approx(2 * s * b * h / t)


def test_all_gather_form_saves_gathered_inputs_in_full():
    """The inputs of the output projection and of the second FFN product are gathered, so every rank saves them in full."""
    megatron, lecture = lowered(tp=4), lowered(tp=4, tp_form="all-gather")
    inputs = WORK.seq * 2 * (GPT.hidden + GPT.ffn)
    more = sum(map(one, lecture.saved["dense"].values())) - sum(map(one, megatron.saved["dense"].values()))
    assert more == pytest.approx(inputs * 3 / 4)


def test_one_sample_of_gpt3_saves_275_gigabytes():
    gpt3 = catalog.load("models", "gpt3-175b")
    program = lowered(gpt3, Workload(batch=1, seq=2048), stack=STORED)
    assert 96 * sum(map(one, program.saved["dense"].values())) / 1e9 == pytest.approx(275.4, abs=0.05)


def test_kv_heads_are_copied_not_cut():
    """tp larger than the number of KV heads: every rank has one full KV head, in weights and in saved tensors."""
    few = GQA.but(kv_heads=2)
    core = few.blocks["dense"].attention
    at = {tp: lowered(few, tp=tp) for tp in (2, 8)}
    weights = {tp: one(p.parameters["dense"]["dense"]) for tp, p in at.items()}
    kv_weights = 2 * few.hidden * core.qk
    assert weights[8] - kv_weights - 2 * few.hidden == pytest.approx((weights[2] - kv_weights - 2 * few.hidden) / 4)
    saved = {tp: one(p.saved["dense"]["attention"]) for tp, p in at.items()}
    kv_saved = WORK.seq * (core.qk + core.v) * 2
    inputs = WORK.seq * few.hidden * 2  # of q, k and v: whole without sequence parallelism
    assert saved[8] - kv_saved - inputs == pytest.approx((saved[2] - kv_saved - inputs) / 4)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(NAMES))
def test_parameters_of_all_ranks_sum_to_the_model_plus_copies(data, name):
    model = ALL[name]
    plan = data.draw(plans(model))
    program = step_program(model, plan, WORK, every_rank=True)
    dense = sum(one(h.elements["dense"]) for h in program.ranks) * plan.tp
    experts = sum(one(h.elements["expert"]) for h in program.ranks) * plan.etp * plan.ep
    parts = model.parameters()
    assert experts == pytest.approx(parts.get("experts", 0))
    whole_dense = model.total - parts.get("experts", 0)
    extra = dense - whole_dense
    # Repeated on every tp rank: norms, MLA's latents, routers, biases of row-split products; the embedding on the last stage too.
    tied = (model.tied or model.mtp_layers) and model.kind == "transformer" and plan.pp > 1
    copy = model.padded_vocab * model.hidden if tied else 0
    assert -1e-6 <= extra - copy <= (plan.tp - 1) * 0.25 * whole_dense
    if plan.tp == 1:
        assert extra == pytest.approx(copy)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(NAMES))
def test_stages_hold_every_layer_once(data, name):
    model = ALL[name]
    plan = data.draw(plans(model))
    program = step_program(model, plan, WORK, every_rank=True)
    ranks = program.ranks
    for kind in model.kinds:
        assert sum(one(h.counts[kind]) for h in ranks) == model.layer_count(kind)
    assert sum(one(h.counts["embedding"]) for h in ranks) == sum(one(h.counts["head"]) for h in ranks) == 1
    for kind in model.mtp_kinds:
        assert all(one(h.counts[kind]) == model.mtp_layers * one(h.counts["head"]) for h in ranks)
    by_stage = plan.stage_layers(model.layers)
    first = by_stage[0] + (by_stage[-1] if plan.schedule in ("zbv", "dualpipev") and plan.pp > 1 else 0)
    if plan.virtual == 1:
        assert one(sum(ranks[0].counts[kind] for kind in model.kinds)) == by_stage[0]
    elif plan.schedule in ("zbv", "dualpipev") and plan.pp > 1:
        assert one(sum(ranks[0].counts[kind] for kind in model.kinds)) == first


def test_explicit_layers_per_stage():
    program = lowered(pp=4, layers_per_stage=(1, 3, 3, 1))
    assert [one(h.counts["dense"]) for h in program.ranks] == [1, 3, 3, 1]


def moved(program, *names):
    """Bytes that operations of these names move through memory, over all phases of a layer of experts."""
    ops = (op for (block, _), ops in program.blocks.items() if block == "moe" for op in ops)
    return sum(one(op.count * op.bytes) for op in ops if op.name.startswith(names))


def test_a_plain_dispatch_sorts_tokens_twice():
    """By rank before the all-to-all and by expert after it; one that removes duplicates sorts them once."""
    plain, once = (
        lowered(MOE, stack=Stack(dispatch=kind), replicate=4, ep=4) for kind in ("all-to-all", "deduplicated")
    )
    assert moved(plain, "permute") == pytest.approx(2 * moved(once, "permute"))


@pytest.mark.parametrize(("precision", "size"), [("bf16", 0.0), ("mxfp8", 4.0), ("fp4", 5.0)])
def test_block_formats_quantise_inputs_and_gradients_of_outputs(precision, size):
    """The rows of a product times its inner dimension: the input in forward, the gradient of the output in backward."""
    program = lowered(GQA, WORK.but(precision=precision), microbatch=2)
    ops = [op for phase in "FI" for op in program.blocks["dense", phase]]
    operands = sum(one(op.shape[1] * op.shape[3]) for op in ops if op.kind == "gemm" and not op.dtype)
    assert sum(one(op.bytes) for op in ops if op.name.endswith("quantise")) == pytest.approx(size * operands)


@pytest.mark.parametrize(("precision", "size"), [("mxfp8", 3.0), ("fp4", 4.5)])
def test_block_formats_write_one_copy_beside_a_frozen_weight(precision, size):
    """The second copy is read by the gradient of the weight."""
    frozen = GQA.but(adapter=Adapter(rank=4, targets=("q_proj",)))
    program = lowered(frozen, WORK.but(precision=precision), microbatch=2)
    ops = [op for phase in "FI" for op in program.blocks["dense", phase]]
    operands = sum(one(op.shape[1] * op.shape[3]) for op in ops if op.kind == "gemm" and not op.dtype)
    assert sum(one(op.bytes) for op in ops if op.name.endswith("quantise")) == pytest.approx(size * operands)


def test_fused_experts_activate_and_quantise_in_the_kernels_of_their_products():
    """Left are the input of the first product and the gradient of the output of the second."""
    fused, plain = (
        lowered(MOE, WORK.but(precision="mxfp8"), stack=Stack(fused=names))
        for names in (("activation", "experts"), ("activation",))
    )
    assert moved(fused, "experts-activation") == 0 < moved(plain, "experts-activation")
    rows = {
        op.name: one(op.shape[0] * op.shape[1] * op.shape[3]) for op in fused.blocks["moe", "F"] if op.kind == "gemm"
    }
    grads = {
        op.name: one(op.shape[0] * op.shape[1] * op.shape[3]) for op in fused.blocks["moe", "I"] if op.kind == "gemm"
    }
    assert moved(fused, "experts-up-quantise") == pytest.approx(4 * rows["experts-up"])
    assert moved(fused, "experts-down-quantise") == pytest.approx(4 * grads["experts-down-dgrad"])


def test_biases_of_experts_are_scaled_row_by_row_where_routing_weights_multiply_before():
    """Megatron adds them in float32: 28 bytes of an element forward and 40 backward; a plain bias is one pass and a sum."""
    model = MOE.but(ffn_bias=True)
    elements = (
        moved(lowered(MOE), "permute") / 32
    )  # there and back, forward and backward, two sorts of a read and a write of 16 bits
    scaled, plain = (lowered(model, stack=Stack(weighs_activations=on)) for on in (True, False))
    assert moved(scaled, "experts-bias") == pytest.approx((28 + 40) * elements)
    assert moved(scaled, "experts-bias-grad") == pytest.approx(40 * elements)
    assert moved(plain, "experts-bias") == pytest.approx((4 + 2) * elements)
    assert moved(lowered(MOE), "experts-bias") == 0


def test_gradients_of_routing_weights_take_a_second_kernel_over_the_activations_of_experts():
    plain, weighted = (lowered(MOE, stack=Stack(weighs_activations=on)) for on in (False, True))
    assert moved(weighted, "experts-activation-grad") == pytest.approx(2 * moved(plain, "experts-activation-grad"))


def operators(program, *names):
    """Host operators of one micro-batch of a layer with experts, in units of `Stack.launch`, of these operations with their gradients."""
    ops = [op for (block, _), some in program.blocks.items() for op in some if block == "moe" and not op.axis]
    named = [op for op in ops if any(op.name == name or op.name.startswith(f"{name}-") for name in names)]
    return sum(one(op.count * op.launches) for op in named)


@pytest.mark.parametrize(("precision", "each"), [("bf16", 2.0), ("mxfp8", 3.0)])
def test_a_loop_over_experts_costs_the_host_operators_for_each_expert_of_a_rank(precision, each):
    """A product, its quantisation and the bookkeeping, in three phases of two products; a fused kernel has all experts."""
    work, names = WORK.but(precision=precision), ("experts-up", "experts-down")

    def added(ep, **changes):
        stacks = (Stack(loops_experts=on, bare_operator=0.125, **changes) for on in (True, False))
        looped, plain = (operators(lowered(MOE, work, stack=stack, replicate=4, ep=ep), *names) for stack in stacks)
        return looped - plain

    assert added(1) == pytest.approx(each * 2 * 3 * MOE.experts / 8)
    assert added(4) == pytest.approx(added(1) / 4)
    assert added(1, fused=("experts",)) == 0


def test_routing_and_sorting_of_tokens_are_operators_without_a_module():
    whole, bare = (
        operators(lowered(MOE, stack=Stack(bare_operator=share)), "route", "permute") for share in (1.0, 0.125)
    )
    sorts = 2 * 2  # by rank and by expert, before the experts and after
    assert whole == pytest.approx(2 * (20 + sorts * 8))  # forward and backward
    assert bare == pytest.approx(whole / 8)


def test_a_rotation_with_a_factor_may_not_be_fused():
    """YaRN multiplies cosine and sine; Megatron's fused kernel takes no factor."""

    def size(**rope):
        """Bytes of the rotations of a stack whose kernel takes a factor, and of one whose does not."""
        model = MOE.but(rope={"kind": "yarn", "factor": 32.0, "original_positions": 64, **rope})
        return [moved(lowered(model, stack=Stack(unfused=cases)), "rope") for cases in ((), ("scaled-rope",))]

    takes, lacks = size()
    assert lacks == pytest.approx(3 * takes)
    assert size(attention_factor=1.0) == [takes, takes]
    assert takes > 0


def test_clamps_of_experts_gated_by_quick_gelu_may_not_be_fused():
    """Four reads and four writes of a half forward, six and four backward; the clamp of SwiGLU is in its kernel."""
    stack = Stack(weighs_activations=True, unfused=("clamped-gelu",))
    quick = MOE.but(swiglu_limit=7.0, swiglu_alpha=1.702, swiglu_shift=1.0)
    half = moved(lowered(quick, stack=stack), "experts-activation-grad") / 10
    assert moved(lowered(quick, stack=stack), "experts-clamp") == pytest.approx(18 * half)
    assert moved(lowered(quick, stack=stack), "experts-clamp-grad") == pytest.approx(10 * half)
    assert moved(lowered(quick, stack=Stack(weighs_activations=True)), "experts-clamp") == 0
    assert moved(lowered(MOE.but(swiglu_limit=7.0), stack=stack), "experts-clamp") == 0


@pytest.mark.parametrize(("scaling", "size"), [("current", 6.0), ("delayed", 0.0)])
def test_current_scaling_reads_a_tensor_twice_and_writes_two_copies(scaling, size):
    program = lowered(GQA, WORK.but(precision="fp8"), stack=Stack(keeps_quantised=True, fp8_scaling=scaling))
    ops = [op for phase in "FI" for op in program.blocks["dense", phase]]
    operands = sum(one(op.shape[1] * op.shape[3]) for op in ops if op.kind == "gemm" and not op.dtype)
    assert sum(one(op.bytes) for op in ops if op.name.endswith("quantise")) == pytest.approx(size * operands)


@pytest.mark.parametrize(
    ("module", "model", "names"),
    [
        ("mla_up_proj", MLA, {"q_b", "kv_b", "rope"}),
        ("moe_act", MOE, {"experts-activation"}),
        ("core_attn", GQA, {"core"}),
        ("layernorm", GQA, {"norm-1", "norm-2"}),
        ("mlp", GQA, {"ffn-up", "ffn-activation", "ffn-down"}),
    ],
)
def test_modules_that_are_recomputed_run_their_forward_again_in_backward(module, model, names):
    program, plain = (lowered(model, stack=Stack(reruns=modules)) for modules in ((module,), ()))
    kind = max(program.kinds(), key=lambda block: len(program.blocks[block, "I"]))
    again = {op.name: one(op.count) for op in program.blocks[kind, "I"]} | {}
    extra = set(again) - {op.name for op in plain.blocks[kind, "I"]}
    assert extra == {f"{name}-again" for name in names}
    full = lowered(model, stack=Stack(reruns=(module,)), recompute="full")
    assert all(one(op.count) == 0 for op in full.blocks[kind, "I"] if op.name in extra)


@pytest.mark.parametrize("fields", [{"recompute": "full"}, {"recompute": "selective"}])
def test_layers_in_16_bits_recompute_the_same_products(fields):
    narrow, mixed = (
        lowered(GQA, WORK.but(precision="mxfp8"), stack=Stack(wide_layers=count, selective="operators"), **fields)
        for count in (0, GQA.layers // 2)
    )
    assert flops(mixed, "dense", "R") == pytest.approx(flops(narrow, "dense", "R"))


def test_what_selective_recompute_runs_again_is_not_run_a_third_time():
    def again(*modules):
        program = lowered(GQA, stack=Stack(reruns=modules), recompute="selective")
        return [op.name for _, op in program.ops("dense") if op.name.endswith("-again") and one(op.count)]

    assert again("core_attn") == again() == ["core-again"]


@pytest.mark.parametrize("precision", ["mxfp8", "fp4"])
def test_layers_in_16_bits_multiply_their_share_of_the_products_and_quantise_nothing(precision):
    narrow, mixed = (
        lowered(GQA, WORK.but(precision=precision), stack=Stack(wide_layers=count)) for count in (0, GQA.layers // 2)
    )
    share = (GQA.layers // 2) / GQA.layers
    products = [op for phase in "FIW" for op in mixed.blocks["dense", phase] if op.kind == "gemm"]
    assert sum(one(op.count * op.flops) for op in products if op.dtype == "bf16") == pytest.approx(
        share * sum(one(op.count * op.flops) for op in products)
    )
    assert total_flops(mixed, "FIW") == pytest.approx(total_flops(narrow, "FIW"))
    quantised = [
        sum(one(op.bytes) for phase in "FI" for op in program.blocks["dense", phase] if op.name.endswith("quantise"))
        for program in (narrow, mixed)
    ]
    assert quantised[1] == pytest.approx((1 - share) * quantised[0])
