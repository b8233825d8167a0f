"""The numbers and switches of a stack change the cost as their physics says; bands and ties follow from what is uncertain."""

import math

import numpy as np
import pytest

from meshwright import planner
from meshwright.calibrate.runs.validate import memory_quantity, memory_stage
from meshwright.cost.band import band, difference_doubt, indistinguishable, width
from meshwright.cost.collective import CollectiveTimes
from meshwright.cost.compute import device_time
from meshwright.cost.memory import memory
from meshwright.cost.step import messages, step_cost
from meshwright.describe import catalog
from meshwright.describe.accelerator import Efficiency
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program
from meshwright.predict.prediction import predict

DENSE, MOE = catalog.load("models", "llama3-8b"), catalog.load("models", "qwen3-30b-a3b")
DGX = catalog.load("clusters", "dgx-h100").with_gpus(16)
WORK = Workload(batch=32, seq=4096)
IDLE = {"launch": 1e-9, "collective_launch": 1e-9, "step_overhead": 0.0}


def cost(plan, model=DENSE, **fields):
    return step_cost(step_program(model, plan, WORK, Stack(**{**IDLE, **fields})), DGX)


def one(values):
    return float(np.broadcast_to(values, 1)[0])


@pytest.mark.parametrize(
    ("field", "kind"), [("products", "gemm"), ("attention_rate", "attention"), ("elementwise", "memory")]
)
def test_a_rate_scales_the_time_of_its_operations(field, kind):
    """At half of the rate (or twice the time) a micro-batch takes as much longer as its operations of that kind take."""
    plan = Plan(replicate=16)
    slow = {field: 2.0 if field == "elementwise" else 0.5}
    base, changed = (step_cost(step_program(DENSE, plan, WORK, Stack(**IDLE, **f)), DGX) for f in ({}, slow))
    ops = [op for ops in base.program.blocks.values() for op in ops if not op.axis and op.kind == kind]
    assert ops
    assert one(changed.time) > one(base.time)
    for key in base.times:
        mine = [op for op in base.program.blocks[key] if not op.axis and op.kind == kind]
        if not mine:
            assert one(changed.times[key].busy) == pytest.approx(one(base.times[key].busy))


def test_reductions_after_the_last_backward_of_a_pipeline_hide_behind_nothing():
    """Each micro-batch keeps its compute; the step adds the seconds of every reduction of the slowest stage once (what the compute of the last
    blocks did not hide was there before)."""
    for pp, zero in ((2, 3), (1, 3), (2, 1)):
        plan = Plan(shard=16 // pp, pp=pp, zero=zero, microbatch=1, overlap=("dp",))
        hidden, last = (cost(plan, reduces_last=late, hides=1.0, compute_slowdown=0.0) for late in (False, True))
        sent = sum(m.count * m.seconds for m in messages(last) if m.name == "reduce-gradients")
        assert sent > 0.01 * one(last.time)
        late = (pp, zero) == (2, 3)
        assert one(last.time) - one(hidden.time) == pytest.approx(sent if late else 0.0, rel=0.02, abs=1e-9)


def test_launches_of_experts_cost_more_where_compiled_layers_leave_them_out():
    """Host seconds of the operators of experts are a multiple; those of dense layers stay."""
    plan = Plan(replicate=16)
    for model in (DENSE, MOE):
        base, eager = (cost(plan, model, launch=1e-5, expert_launch=factor) for factor in (1.0, 3.0))
        for key, ops in base.program.blocks.items():
            left_out = [op for op in ops if op.part == "experts" and not op.axis]
            added = 2 * 1e-5 * sum(one(op.count * op.launches) for op in left_out)
            assert one(eager.times[key].host) == pytest.approx(one(base.times[key].host) + added)
            assert (added > 0) == (key[0] == "moe" and key[1] in "FIW")


def test_overlapped_messages_of_experts_cost_operators_without_a_module():
    """Around each of the five parts of a layer eight in forward and eight in backward (Megatron's ScheduleNode)."""
    plan = Plan(shard=16, zero=1, ep=16, expert_tp=1)
    fields = {"launch": 1e-5, "bare_operator": 0.125}
    apart, together = (cost(plan, MOE, overlap=axes, **fields) for axes in ((), ("ep",)))
    for phase, added in (("F", 40 * 0.125e-5), ("I", 40 * 0.125e-5), ("W", 0.0)):
        key = ("moe", phase)
        assert one(together.times[key].host) - one(apart.times[key].host) == pytest.approx(added, abs=1e-12)


def test_a_layer_calls_one_compiled_graph_and_one_with_experts_four():
    """Forward and backward; weight gradients are in the graph of backward, and CUDA graphs replace the calls."""
    plan = Plan(replicate=16)
    for model, layer, graphs in ((DENSE, "dense", 1), (MOE, "moe", 4)):
        base, called = (cost(plan, model, graph_call=seconds) for seconds in (0.0, 1e-3))
        for key in base.times:
            added = one(called.times[key].host) - one(base.times[key].host)
            expected = graphs * 1e-3 if key[0] == layer and key[1] in "FI" else 0.0
            assert added == pytest.approx(expected, abs=1e-9)
        replayed = (cost(plan, model, graph_call=seconds, graphs=("step",)) for seconds in (0.0, 1e-3))
        assert len({one(c.times[layer, "F"].host) for c in replayed}) == 1


def test_the_units_of_a_device_are_issued_beside_backward_and_not_after_it():
    plan = Plan(shard=16, zero=1)
    for asynchronous in (True, False):
        base, units = (cost(plan, unit_launch=s, asynchronous=asynchronous) for s in (0.0, 1e-2))
        after = one(units.exposed["dp"]) - one(base.exposed["dp"])
        assert (after > 1e-3) == (not asynchronous)


def test_attention_in_triton_is_slower_by_the_ratio_of_the_paper():
    """1.4 times forward and 2 times backward, which has 2.5 times the operations: 6.4 / 3.5 of the time of flash attention 2."""
    plan = Plan(replicate=16)
    flash, triton = (cost(plan, attention=kernel) for kernel in ("flash", "triton"))
    for key, ops in flash.program.blocks.items():
        busy = sum(one(device_time(DGX.accelerator, "bf16", "flash", op)) for op in ops if op.kind == "attention")
        longer = one(triton.times[key].busy) - one(flash.times[key].busy)
        moved = sum(op.bytes / DGX.accelerator.memory_bandwidth for op in ops if op.kind == "attention")
        floor = sum(DGX.accelerator.efficiency.floor for op in ops if op.kind == "attention")
        assert longer == pytest.approx((6.4 / 3.5 - 1) * one(busy - moved - floor), rel=1e-9)
    assert one(triton.peak_memory) == one(flash.peak_memory)


def test_a_message_in_parts_takes_a_shorter_send_and_a_gather():
    plan, cluster = Plan(tp=4, pp=4), DGX
    whole, parts = (cost(plan, sends_parts=yes) for yes in (False, True))
    (send,), (gather,) = parts.program.sync["boundary-F"], parts.program.sync["boundary-gather"]
    network = CollectiveTimes(cluster, parts.program.batch)
    assert one(parts.boundary) == pytest.approx(one(network.time(send)) + one(network.time(gather)))
    assert one(parts.traffic["pp"]) == pytest.approx(one(whole.traffic["pp"]) / 4)
    received = (
        32 * one(gather.message_bytes) * 3 / 4
    )  # by an end of the model, the busiest in tp: 32 micro-batches, one way
    assert one(parts.traffic["tp"]) == pytest.approx(one(whole.traffic["tp"]) + received)
    listed = {m.name: m.count for m in messages(parts)}
    assert listed["parts"] in (32, 64)


def test_collectives_between_nodes_take_the_share_of_the_network():
    plan = Plan(replicate=2, tp=8, sp=True)  # replicas on two nodes
    fast, slow = (cost(plan, network=share) for share in (1.0, 0.5))
    assert one(slow.reduce) == pytest.approx(2 * one(fast.reduce))
    assert one(slow.busy["comm:tp"]) == one(fast.busy["comm:tp"])


def test_zero_3_parameter_by_parameter_sends_more_messages_and_hides_none():
    """Each of a layer's parameters is gathered forward, for recompute and for backward; a unit only forward and backward."""
    plan = Plan(shard=16, zero=3, recompute="full")
    units, parameters = (cost(plan, gathers=word) for word in ("layer", "parameter"))

    def gathers(found, phase):
        (op,) = (op for op in found.program.blocks["dense", phase] if op.name == "gather-weights")
        return one(op.count), one(op.message_bytes)

    tensors = units.program.batch.layer_tensors
    assert tensors > 5
    for phase, times in (("F", 1), ("I", 2)):
        (count, size), (more, smaller) = gathers(units, phase), gathers(parameters, phase)
        assert more == pytest.approx(times * tensors * count)
        assert smaller == pytest.approx(size / tensors)
    assert one(parameters.exposed["dp"]) >= one(parameters.busy["comm:dp"]) * (1 - 1e-9)
    assert one(units.exposed["dp"]) < 0.5 * one(units.busy["comm:dp"])


def test_asynchronous_linear_layers_hide_a_collective_behind_one_product():
    """Backward of a column layer gathers its input and reduces its gradient behind a product each; a gather that a product waits for runs behind
    the product of the rank's own shard, 1/tp of it. The reduce-scatter after a row layer runs behind nothing."""
    plan = Plan(tp=16, sp=True)
    found = {kind: cost(plan, overlap=(), async_linears=kind) for kind in ("none", "backward", "own-shard")}
    program = found["none"].program
    network = CollectiveTimes(DGX, program.batch)

    def hidden(phase, *pairs):
        """Seconds of some collectives, each at most those of a share of its product."""
        ops = {op.name: op for op in program.blocks["dense", phase]}
        seconds = 0.0
        for collective, product, share in pairs:
            took = one(device_time(DGX.accelerator, "bf16", "flash", ops[product]))
            seconds += min(one(network.time(ops[collective])), share * took)
        return seconds

    columns = (("attention-in", "qkv"), ("ffn-in", "ffn-up"))
    expected = {
        ("backward", "F"): 0.0,
        ("backward", "I"): hidden("I", *((f"{name}-grad", f"{product}-dgrad", 1.0) for name, product in columns)),
        ("backward", "W"): hidden("W", *((f"{name}-again", f"{product}-wgrad", 1.0) for name, product in columns)),
        ("own-shard", "F"): hidden("F", *((name, product, 1 / 16) for name, product in columns)),
    }
    rows = (("attention-out-grad", "o-dgrad", 1 / 16), ("ffn-out-grad", "ffn-down-dgrad", 1 / 16))
    expected["own-shard", "I"] = expected["backward", "I"] + hidden("I", *rows)
    expected["own-shard", "W"] = expected["backward", "W"]
    for (kind, phase), seconds in expected.items():
        exposed = [one(found[k].times["dense", phase].parts["tp"]) for k in ("none", kind)]
        assert exposed[0] - exposed[1] == pytest.approx(seconds, rel=1e-9, abs=1e-12), (kind, phase)
    everywhere = [one(cost(plan.but(overlap=("tp",)), async_linears=k).time) for k in ("none", "own-shard")]
    assert everywhere[0] == pytest.approx(everywhere[1], rel=1e-9)  # where the messages of tp run piece by piece


@pytest.mark.parametrize(("tp", "more"), [(2, 1), (8, 2)])
def test_a_product_by_shards_has_more_launches(tp, more):
    """The rows before and after the rank's own are a product each: with two ranks, one of them is empty."""
    plan = Plan(replicate=16 // tp, tp=tp, sp=True)
    hosts = [
        one(cost(plan, overlap=(), async_linears=kind, launch=1.0).times["dense", "F"].host)
        for kind in ("backward", "own-shard")
    ]
    assert hosts[1] - hosts[0] == pytest.approx(2 * more)  # query, key and value; gate and up


def test_zero_1_with_one_all_reduce_after_backward_hides_nothing():
    """All gradients of a rank in one call, in the width of the gradients; then the gather, whose shards are copied parameter by parameter."""
    plan = Plan(shard=16, zero=1)
    fields = {"flat_shards": True, "gathers_ahead": False, "overlap": ("dp",)}
    buckets, whole, copied = (
        cost(plan, **fields, **more)
        for more in ({}, {"zero_reduction": "whole"}, {"zero_reduction": "whole", "shard_copy": 1e-3})
    )
    (op,) = (op for op in whole.program.closing if op.name == "reduce-gradients")
    assert op.collective == "all_reduce"
    assert one(op.count) == 1
    assert one(op.message_bytes) == pytest.approx(4.0 * DENSE.total)
    assert one(whole.exposed["dp"]) == pytest.approx(one(whole.reduce))
    assert one(buckets.exposed["dp"]) < one(buckets.reduce)
    tensors = 32 * (4 + 2) + 4  # fused matrices and norms of a layer; the ends of the model
    gather = next(op for op in whole.program.closing if op.name == "gather-parameters")
    device, host = one(CollectiveTimes(DGX, whole.program.batch).time(gather)), 1e-3 * 16 * tensors
    more = one(copied.exposed["dp"]) - one(whole.exposed["dp"])
    assert more == pytest.approx((device**3 + host**3) ** (1 / 3) - device)
    replicas = [one(cost(Plan(replicate=16), **fields, zero_reduction=z).time) for z in ("buckets", "whole")]
    assert replicas[0] == replicas[1]  # only ZeRO reduces so


def test_zero_1_that_all_reduces_in_buckets_hides_longer_messages_behind_backward():
    """InternEvo: an all-reduce of every bucket, of which each rank uses its shard."""
    plan, fields = Plan(shard=16, zero=1), {"flat_shards": True, "gathers_ahead": False, "overlap": ("dp",)}
    scattered, reduced = (cost(plan, **fields, zero_reduction=kind) for kind in ("buckets", "all-reduce"))
    ops = [next(op for op in c.program.closing if op.name == "reduce-gradients") for c in (scattered, reduced)]
    assert [op.collective for op in ops] == ["reduce_scatter", "all_reduce"]
    assert one(ops[0].count) == one(ops[1].count)
    assert one(ops[0].message_bytes) == one(ops[1].message_bytes)
    assert one(reduced.reduce) > one(scattered.reduce)
    assert one(reduced.exposed["dp"]) < one(reduced.reduce)


def test_tensors_of_a_layer():
    """GPT-2 has four matrices and two norms, all with biases; query, key and value are three matrices where projections are separate. Llama has no
    biases, and gate and up."""
    plan, gpt = Plan(replicate=16), catalog.load("models", "gpt2-small")
    for model, separate, tensors in ((gpt, False, 12), (gpt, True, 16), (DENSE, False, 6), (DENSE, True, 9)):
        program = step_program(model, plan, WORK, Stack(separate_projections=separate))
        assert program.batch.layer_tensors == tensors


@pytest.mark.parametrize(("precision", "read"), [("bf16", 2.0), ("fp8", 1.0)])
def test_separate_projections_read_their_input_again_and_add_up_its_gradients(precision, read):
    """Queries, keys and values: two more reads of the input, forward and for the weights; two more gradients of it, which a pass adds up."""
    plan, work = Plan(replicate=16), WORK.but(precision=precision)
    joined, separate = (
        {op.name: op for phase in "FIW" for op in step_program(DENSE, plan, work, Stack(separate_projections=on)).blocks["dense", phase]}
        for on in (False, True)
    )  # fmt: skip
    for product, several in (("qkv", 3), ("ffn-up", 2)):
        elements = WORK.seq * DENSE.hidden  # one sequence a micro-batch
        for suffix, bytes_each in (("", read), ("-dgrad", 2.0), ("-wgrad", read)):
            one_op, ops = joined[product + suffix], separate[product + suffix]
            assert one(ops.bytes - one_op.bytes) == pytest.approx((several - 1) * elements * bytes_each)
            assert ops.launches == several * one_op.launches
            assert one(ops.flops) == one(one_op.flops)
        assert f"{product}-dgrad-sum" not in joined
        assert one(separate[f"{product}-dgrad-sum"].bytes) == pytest.approx((several + 1) * elements * 2)


def test_compiled_blocks_of_torchtitan_wait_for_context_parallelism():
    """Functional collectives that torch traces are waited for where they are called."""
    stack = catalog.load("stacks", "torchtitan")
    plan = Plan(shard=4, cp=4, zero=3, cp_kind="all-gather")
    found = step_cost(step_program(DENSE, plan, WORK, stack), DGX)
    assert one(found.busy["comm:cp"]) > 0
    assert one(found.exposed["cp"]) == pytest.approx(one(found.busy["comm:cp"]))


def test_torch_takes_the_vendors_attention_where_flash_attention_has_no_kernels():
    """torch's scaled_dot_product_attention: cuDNN's on Blackwell, flash attention elsewhere."""
    for name, kernel in (("h100-sxm", "flash"), ("a100-80gb", "flash"), ("b200", "fused"), ("gb300", "fused")):
        device = catalog.load("accelerators", name).efficiency
        assert device.attention("sdpa") == device.attention(kernel)


def test_a_deduplicating_dispatch_sends_a_token_once_to_each_node():
    """k = 8 copies over two nodes reach 2(1 − 2⁻⁸) of them: a quarter of the copies."""
    plan = Plan(replicate=16, ep=16)
    program = step_program(MOE, plan, WORK, Stack(dispatch="deduplicated"))
    op = next(op for op in program.blocks["moe", "F"] if op.name == "dispatch")
    share = one(CollectiveTimes(DGX, program.batch).distinct_share(op))
    assert share == pytest.approx(2 * (1 - 0.5**8) / 8)
    plain, once = (cost(plan, MOE, dispatch=kind) for kind in ("all-to-all", "deduplicated"))
    assert one(once.busy["comm:ep"]) < 0.6 * one(plain.busy["comm:ep"])


def test_a_router_that_keeps_groups_of_experts_reaches_fewer_nodes():
    """DeepSeek-V3 keeps 4 of 8 groups. On 8 nodes these are 4 of them; on 4 nodes, each with two groups, 4(1 − C(6,4)/C(8,4)) = 22/7 in the mean."""
    model = catalog.load("models", "deepseek-v3")
    for ep, reached in ((64, 4.0), (32, 22 / 7)):
        program = step_program(
            model, Plan(replicate=ep, ep=ep, expert_tp=1), Workload(batch=ep, seq=512), Stack(dispatch="deduplicated")
        )
        op = next(op for op in program.blocks["moe", "F"] if op.name == "dispatch")
        share = one(CollectiveTimes(DGX.with_gpus(ep), program.batch).distinct_share(op))
        assert share == pytest.approx(reached * (1 - (1 - 1 / reached) ** 8) / 8)


def test_selective_recompute_by_operators_saves_less_and_recomputes_more():
    plan = Plan(shard=16, zero=3, recompute="selective")
    core, operators = (cost(plan, selective=kind) for kind in ("attention", "operators"))
    kept = [sum(one(x) for x in c.program.saved["dense"].values()) for c in (core, operators)]
    assert kept[1] < 0.7 * kept[0]
    again = [sum(op.kind == "gemm" for op in c.program.blocks["dense", "R"]) for c in (core, operators)]
    assert again == [0, 2]  # of qkv, o, up and down every second one
    none = cost(plan.but(recompute="none"))
    assert one(operators.time) > one(none.time)


def test_a_stack_that_saves_more_needs_more_memory():
    plan = Plan(replicate=16)
    parts = []
    for factor in (1.0, 1.5):
        program = step_program(DENSE, plan, WORK, Stack(saved=factor))
        parts.append(memory(program, program.ranks[0]))
    head = one(sum(step_program(DENSE, plan, WORK, Stack()).saved["head"].values()))
    layers = [one(p["activations"]) - head for p in parts]
    assert layers[1] == pytest.approx(1.5 * layers[0], rel=1e-6)


@pytest.mark.parametrize(
    ("notes", "quantity"),
    [("nvidia-smi snapshot", "used"), ("torch.cuda.max_memory_allocated", "allocated"), ("peak memory", "reserved")],
)
def test_memory_is_the_quantity_that_a_source_reports(notes, quantity):
    assert memory_quantity(notes) == quantity
    result = planner.plan("gpt2-xl", "dgx-h100", gpus=8, batch=64, seq=1024, common=True).prediction
    assert result.memory_as("allocated") < result.memory_as("reserved") < result.memory_as("used")
    assert result.memory_as("used") == pytest.approx(result.memory_gib)


def test_memory_is_that_of_the_stage_that_a_source_reports():
    """The first stage of 1F1B has most micro-batches in flight, the last one the logits."""
    assert [memory_stage(n) for n in ("last rank (last PP stage)", "first pipeline stage", "peak")] == [-1, 0, None]
    plan = Plan(pp=4, replicate=4)
    result = predict(Config(DENSE, DGX, plan, WORK, Stack()))
    sizes = [result.memory_as("allocated", stage) for stage in (0, -1)]
    assert sizes[0] != sizes[1]
    assert max(sizes) <= result.memory_as("allocated")


def test_a_band_is_wider_where_communication_or_the_host_dominate():
    compute, network, experts = {"ffn": 1.0}, {"ffn": 0.6, "tp": 0.4}, {"attention": 0.5, "experts": 0.5}
    assert width(compute, ()) == 1.0
    assert width(compute, (), "typical") == 2.0
    assert width(network, ()) == pytest.approx(math.sqrt(1 + 2.4**2))
    assert width(network, ("tp",)) == pytest.approx(math.sqrt(1 + 0.16))  # inside nodes
    assert width({"ffn": 0.6, "host": 0.4}, ()) == pytest.approx(math.sqrt(1 + 1.6**2))

    def of(exposed, plan=None, **fields):
        efficiency = Efficiency(**{"source": "measured", **fields})
        cluster = DGX.but(accelerator=DGX.accelerator.but(efficiency=efficiency))
        return band(Stack(), exposed, {}, plan or Plan(tp=16), cluster)

    assert of(network)[0] < of(compute)[0] < 1 < of(compute)[1] < of(network)[1]  # tp between two nodes
    assert of(network, Plan(tp=8, replicate=2))[1] < of(network)[1]
    for wider in (of(compute, source=Efficiency().source), of(compute, doubt=0.1), of(experts)):
        assert wider[1] > of(compute)[1]


def test_messages_in_pieces_run_beside_the_product_of_their_layer():
    """Of two pieces one runs beside the product, in the share of compute that hides. A compiler that divides single products leaves out the two
    reductions of input gradients: q, k and v are one sum, gate and up another."""
    plan, hides = Plan(tp=2, replicate=8, sp=True), 0.8
    alone, pieces, sums = (
        cost(plan, overlap=axes, overlap_sums=on, hides=hides)
        for axes, on in (((), True), (("tp",), True), (("tp",), False))
    )
    network = CollectiveTimes(DGX, pieces.program.batch)
    pairs = {
        "F": {"attention-in": "qkv", "attention-out": "o", "ffn-in": "ffn-up", "ffn-out": "ffn-down"},
        "I": {"attention-out-grad": "o-dgrad", "ffn-out-grad": "ffn-down-dgrad"},
    }
    summed = {"attention-in-grad": "qkv-dgrad", "ffn-in-grad": "ffn-up-dgrad"}

    def hidden(phase, products):
        ops = {op.name: op for op in pieces.program.blocks["dense", phase]}
        return sum(
            min(one(network.time(ops[m])), hides / 2 * one(device_time(DGX.accelerator, "bf16", "flash", ops[product])))
            for m, product in products.items()
        )

    for phase in pairs:
        exposed = [one(c.times["dense", phase].parts["tp"]) for c in (alone, pieces, sums)]
        assert exposed[0] - exposed[2] == pytest.approx(hidden(phase, pairs[phase]))
        assert exposed[2] - exposed[1] == pytest.approx(hidden(phase, summed if phase == "I" else {}), abs=1e-12)


def test_messages_cut_along_the_sequence_are_copied_in_order():
    """DTensor reads and writes the whole buffer around each message of several sequences; in pieces only the pieces of a sum, once."""
    plan = Plan(tp=2, replicate=8, sp=True)

    def copies(phase, overlap=(), **fields):
        plain, ordered = (
            cost(plan.but(**fields), overlap=overlap, overlap_sums=False, orders_messages=on) for on in (False, True)
        )
        sizes = {op.name: one(op.message_bytes) for op in ordered.program.blocks["dense", phase] if op.axis == "tp"}
        moved = {op.name: one(op.bytes) for op in ordered.program.blocks["dense", phase] if op.axis == "tp"}
        seconds = sum(size / DGX.accelerator.memory_bandwidth for size in moved.values())
        assert one(ordered.times["dense", phase].busy) - one(plain.times["dense", phase].busy) >= 0.9 * seconds
        return {name: moved[name] / size for name, size in sizes.items()}

    assert copies("F", microbatch=2) == dict.fromkeys(("attention-in", "attention-out", "ffn-in", "ffn-out"), 2.0)
    assert set(copies("F").values()) == {0.0}  # of one sequence, a view
    in_pieces = copies("F", overlap=("tp",), microbatch=2)
    assert in_pieces == {"attention-in": 0.0, "ffn-in": 0.0, "attention-out": 1.5, "ffn-out": 1.5}
    assert copies("I", overlap=("tp",), microbatch=2)["ffn-in-grad"] == 2.0  # a sum of products is not divided


def test_context_parallel_blocks_gather_repeated_heads_and_sum_gradients_in_fp32():
    """Llama 3 8B has 32 heads and 8 KV heads. torch gathers K and V of all 32, and sends the gradients of each block on in fp32."""
    plan = Plan(cp=4, replicate=4, cp_kind="all-gather")
    plain, blocks = (cost(plan, overlap=("cp",), context_in_blocks=on).program.blocks for on in (False, True))
    (whole,), (repeated,) = ([op for op in program["dense", "F"] if op.axis == "cp"] for program in (plain, blocks))
    assert one(repeated.message_bytes) == 4 * one(whole.message_bytes)
    (ring,) = [op for op in blocks["dense", "I"] if op.collective == "send"]
    assert one(ring.count) == 4  # once round, home again
    assert one(ring.message_bytes) == 2 * one(repeated.message_bytes) / 4
    merged = {
        op.name: one(op.count * op.bytes) for phase in "FI" for op in blocks["dense", phase] if "blocks" in op.name
    }
    queries = WORK.seq / 4 * DENSE.hidden
    assert merged == {"merge-blocks": 3 * 10 * queries, "sum-blocks": 3 * (10 + 2 * 18) * queries}


def test_plans_of_one_kind_are_ranked_more_finely_than_plans_of_two():
    a, close, other = {"ffn": 1.0, "tp": 0.2}, {"ffn": 1.11, "tp": 0.22}, {"ffn": 1.32}
    assert difference_doubt(a, close) < difference_doubt(a, other)
    assert not indistinguishable(a, close)  # 11% slower in all parts
    assert indistinguishable(a, other)  # 10% slower, but without communication
    # Half of the compute, and twice the communication: both changes have a doubt, in shares of the geometric mean of the two steps.
    fast = {"ffn": 0.5, "tp": 0.4}
    mean = math.sqrt(1.2 * 0.9)
    assert difference_doubt(a, fast) == pytest.approx(math.hypot(0.055, 0.10 * 0.5 / mean, 0.60 * 0.2 / mean))


def test_the_robust_plan_has_the_best_worst_case():
    fields = {"gpus": 16, "batch": 64, "seq": 4096, "without": ["cp", "reorder", "recompute"]}
    usual, robust = (planner.plan("llama3-8b", "dgx-h100", robust=flag, **fields) for flag in (False, True))
    worst = [p.step_time_high_s for _, p in usual.leaders]
    assert robust.prediction.step_time_high_s == pytest.approx(min(worst))
    assert robust.plan in {c.plan for c, _ in usual.leaders}
    assert usual.ties[0]
    assert usual.as_dict()["robust"]["step_time_high_s"] == pytest.approx(min(worst))
