"""The step: sums of its parts, bounds of overlap and host time, pipelines compared with walked schedules, traffic, and monotonicity."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lower.cases import ALL, COUNTS, GPT, GQA, MLP, MODELS, MOE, WORK, lowered, one, plans, stack, traffic
from meshwright.cost.band import band
from meshwright.cost.collective import choose
from meshwright.cost.phase import AXIS_OF
from meshwright.cost.step import ramp, step_cost
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.batch import Batch
from meshwright.lower.step import step_program
from meshwright.predict.estimate import estimate
from meshwright.predict.prediction import bound_by, cost_of, predict
from meshwright.programs.pipelines import Durations, bubble_fraction, build, walk

DGX = catalog.load("clusters", "dgx-h100")
IDLE_HOST = {"launch": 0.0, "collective_launch": 0.0, "step_overhead": 0.0}
RAMP = 2e-3  # the slowest rank's pace and the mean rank's ramp are two terms: the ramp may grow while the pace stands still
CASE = (st.data(), st.sampled_from(sorted(MODELS)), st.sampled_from(["default", "plain", "graphs"]))


def cost(model=GPT, workload=WORK, cluster=DGX, stack=None, **plan):
    checked_plan = Plan(**plan).check(model, workload)
    return cost_of(Config(model, cluster.with_gpus(checked_plan.world), checked_plan, workload, stack or Stack()))


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(sorted(ALL)), CASE[2])
def test_parts_sum_exactly_and_none_is_negative(data, name, which):
    model = ALL[name]
    plan = data.draw(plans(model))
    result = predict(Config(model, DGX.with_gpus(plan.world), plan, WORK, stack(which)))
    assert sum(result.exposed_s.values()) == pytest.approx(result.step_time_s, rel=1e-12)
    assert all(seconds >= 0 for seconds in result.exposed_s.values())
    assert result.step_time_low_s < result.step_time_s < result.step_time_high_s
    assert all(sum(parts.values()) <= result.memory_gib * (1 + 1e-12) for parts in result.memory_by_stage)
    assert max(sum(parts.values()) for parts in result.memory_by_stage) == pytest.approx(result.memory_gib)
    assert 0 < result.mfu < 1
    assert 0 < result.hfu < 1
    if plan.pp == 1:
        assert result.hfu >= result.mfu * (1 - 1e-12)  # the device does all the model asks for, and what the plan adds


@settings(max_examples=30, deadline=None)
@given(*CASE)
def test_overlap_never_hides_more_than_the_compute(data, name, which):
    """No step is shorter than its compute, its host, or any one stream of communication."""
    model = MODELS[name]
    plan = data.draw(plans(model))
    result = cost_of(Config(model, DGX.with_gpus(plan.world), plan, WORK, stack(which)))
    for stream, seconds in result.busy.items():
        assert one(result.time) >= one(seconds) * (1 - 1e-12), stream
    quiet = stack(which).but(compute_slowdown=0, launch=0.0)  # overlapping the messages of experts costs launches
    none = cost_of(Config(model, DGX.with_gpus(plan.world), plan.but(overlap=()), WORK, quiet))
    some = cost_of(Config(model, DGX.with_gpus(plan.world), plan, WORK, quiet))
    assert one(some.time) <= one(none.time) * (1 + RAMP)
    everything = sum(map(one, none.busy.values())) + one(none.reduce)
    rest = sum(one(none.exposed.get(p, 0)) for p in ("host", "bubble", "optimizer", "overhead", "pp", "dp"))
    rest += one(none.after)
    assert one(none.time) <= (everything + rest) * (1 + 1e-12)


def test_compute_hides_one_stream_at_a_time():
    """With slow links and all axes overlapping, the total hidden time is at most a share of the compute that hides it."""
    slow = changed(changed(DGX, 0, 0.02), 1, 0.02)
    fields = {"tp": 2, "cp": 2, "zero": 3, "shard": 2, "overlap": ("dp", "tp", "cp", "ep")}
    axes = ("dp", "tp", "cp", "ep")
    times = cost(MOE, cluster=slow, **fields).times.values()
    assert sum(len(t.comm) > 1 for t in times) >= 2
    for t in times:
        hidden = sum(one(t.comm[axis] - t.parts[axis]) for axis in t.comm)
        work = sum(one(seconds) for part, seconds in t.parts.items() if part not in (*axes, "interference"))
        assert hidden <= Stack().hides * work * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(sorted(MODELS)), st.sampled_from(["default", "plain", "graphs"]))
def test_a_batch_costs_the_same_as_separate_plans(data, name, which):
    model = MODELS[name]
    several = data.draw(st.lists(plans(model), min_size=2, max_size=4))
    cluster = DGX.with_gpus(4096)
    together = step_cost(step_program(model, several, WORK, stack(which)), cluster)
    for i, plan in enumerate(several):
        alone = step_cost(step_program(model, plan, WORK, stack(which)), cluster)

        def at(value, i=i):
            return float(np.broadcast_to(value, len(several))[i])

        assert at(together.time) == pytest.approx(one(alone.time), rel=1e-12)
        assert at(together.peak_memory) == pytest.approx(one(alone.peak_memory), rel=1e-12)
        for what in ("exposed", "traffic", "busy"):
            ours, theirs = getattr(together, what), getattr(alone, what)
            assert {k: at(v) for k, v in ours.items() if at(v)} == pytest.approx(
                {k: one(v) for k, v in theirs.items() if one(v)}
            )


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(sorted(MODELS)))
def test_sampled_ranks_bound_all_ranks(data, name):
    """A search evaluates four ranks of a pipeline, an estimate all ranks: the slowest and the fullest are among the four."""
    model = MODELS[name]
    plan = data.draw(plans(model))
    cluster = DGX.with_gpus(plan.world)
    few, every = (step_cost(step_program(model, plan, WORK, every_rank=e), cluster) for e in (False, True))
    assert one(few.time) == pytest.approx(one(every.time), rel=0.02)
    assert one(few.peak_memory) == pytest.approx(one(every.peak_memory), rel=0.02)


def changed(cluster, level=None, times=1.0, **device):
    """The cluster with a faster device or a faster level."""
    chip = cluster.accelerator
    if device:
        peak = {dtype: rate * device.get("peak", 1) for dtype, rate in chip.peak.items()}
        chip = chip.but(peak=peak, memory_bandwidth=chip.memory_bandwidth * device.get("memory", 1))
    levels = [
        entry.but(link=entry.link.but(bandwidth=entry.link.bandwidth * times)) if k == level else entry
        for k, entry in enumerate(cluster.levels)
    ]
    return cluster.but(accelerator=chip, levels=tuple(levels))


@settings(max_examples=20, deadline=None)
@given(*CASE, st.integers(0, 2), st.floats(1, 16))
def test_faster_links_and_devices_are_never_slower(data, name, which, level, times):
    model = MODELS[name]
    plan = data.draw(plans(model))
    cluster = DGX.with_gpus(plan.world)
    unslowed = stack(which).but(compute_slowdown=0)  # else a device slowed by what it hides is a fair price to pay
    before = one(cost_of(Config(model, cluster, plan, WORK, unslowed)).time)
    for other in (changed(cluster, level, times), changed(cluster, peak=times), changed(cluster, memory=times)):
        assert one(cost_of(Config(model, other, plan, WORK, unslowed)).time) <= before * (1 + RAMP)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(sorted(MODELS)))
def test_more_layers_and_longer_batches_take_longer(data, name):
    model = MODELS[name]
    plan = data.draw(plans(model))
    cluster = DGX.with_gpus(plan.world)
    base = one(cost_of(Config(model, cluster, plan, WORK, Stack())).time)
    assert one(cost_of(Config(model.but(layers=2 * model.layers), cluster, plan, WORK, Stack())).time) > base
    assert one(cost_of(Config(model, cluster, plan, WORK.but(batch=2 * WORK.batch), Stack())).time) > base


# The host


def test_host_time_bounds_small_layers():
    """Launches × seconds per launch, for any device: a layer of the tiny model cannot be faster than its host."""
    slow = Stack(**{**IDLE_HOST, "launch": 1e-3}, overlap=())
    result = cost(GQA, stack=slow)
    program = lowered(GQA, stack=slow)
    launches = {"F": 0.0, "I": 0.0, "W": 0.0}
    for (block, phase), ops in program.blocks.items():
        times = GQA.layers if block == "dense" else 1
        for op in ops:
            launches[phase] += times * one(op.count * op.launches)
    floor = one(program.batch.microbatches) * sum(launches.values()) * 1e-3
    assert one(result.time - result.exposed["optimizer"]) == pytest.approx(floor)
    assert one(result.exposed["host"]) > 0.9 * floor
    replayed = cost(GQA, stack=slow.but(graphs=("step",)))
    assert one(replayed.exposed["host"]) < 0.1 * floor
    attention = cost(GQA, stack=slow.but(graphs=("attention",)))  # its launches, and those of norms
    assert 0.1 * floor < one(attention.exposed["host"]) < 0.8 * floor
    assert one(cost(GQA, stack=slow.but(graphs=("router",))).exposed["host"]) > one(attention.exposed["host"])


def test_overlapped_experts_cost_host_time_and_hide_behind_weight_gradients():
    """Messages of experts hide behind another micro-batch: behind all compute of a layer, weight gradients too. Its nodes cost launches."""
    degrees = {"shard": 16, "zero": 1, "ep": 16, "expert_tp": 1}
    model = MOE.but(hidden=2048, expert_ffn=4096, experts=16, layers=16)
    stacks = [
        Stack(**{**IDLE_HOST, "launch": launch}, overlap=axes) for launch in (0.0, 1e-3) for axes in ((), ("ep",))
    ]
    plain, overlapped, slow, slow_overlapped = (cost(model, WORK.but(batch=512), stack=s, **degrees) for s in stacks)
    work = one(plain.time - plain.exposed["ep"])
    hidden = one(plain.exposed["ep"] - overlapped.exposed["ep"])
    assert 0.8 * Stack().hides * work < hidden < work  # forward and input gradients alone are two thirds
    assert one(slow_overlapped.time) > one(slow.time)
    graphed = cost(model, WORK.but(batch=512), stack=stacks[3].but(graphs=("step",)), **degrees)
    assert one(graphed.exposed["host"]) < 0.1 * one(slow_overlapped.exposed["host"])


def test_a_fast_host_adds_no_time():
    assert one(cost(GQA, stack=Stack(**IDLE_HOST)).exposed["host"]) == 0
    assert one(cost(stack=Stack(step_overhead=0.25)).exposed["overhead"]) == 0.25


# Pipelines

EVEN = MLP.but(layers=16)  # no embedding, a head of next to nothing: equal stages


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "looped-bfs", "interleaved-zb", "zbv"]
)
@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 4), (4, 16)])
def test_bubble_equals_the_walk_on_equal_stages(schedule, pp, m):
    virtual = 2 if schedule in ("interleaved", "looped-bfs", "interleaved-zb", "zbv") else 1
    work = Workload(batch=m, seq=1)
    batch = Batch.of([Plan(pp=pp, virtual=virtual, schedule=schedule)], EVEN, work, Stack())
    f, i, w = 3.0, 4.0, 2.0
    idle = one(ramp(batch, np.array([f]), np.array([i]), np.array([w]), np.array([0.0])))
    walked = walk(build(schedule, pp, m, virtual), Durations.of(pp * virtual, f / virtual, i / virtual, w / virtual))
    assert idle == pytest.approx(walked.makespan - m * (f + i + w))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.sampled_from([1, 2, 4, 8, 16]), st.floats(0.1, 10), st.floats(0.1, 10))
def test_gpipe_and_1f1b_idle_p_minus_one_micro_batches(pp, m, forward, backward):
    """Overhead (P−1)/M, fraction (P−1)/(M+P−1), for any times."""
    for schedule in ("gpipe", "1f1b"):
        batch = Batch.of([Plan(pp=pp, schedule=schedule)], EVEN, Workload(batch=m, seq=1), Stack())
        times = (np.array([x]) for x in (forward, backward / 2, backward / 2, 0.0))
        assert one(ramp(batch, *times)) == pytest.approx((pp - 1) * (forward + backward))


def test_bubble_of_a_full_step_equals_the_formula():
    """Equal stages, no host time, negligible messages: the bubble is (P−1)/(M+P−1) of the pipelined time."""
    work, quick = Workload(batch=8 * 4096, seq=1), changed(DGX, 0, 1e4)
    result = cost(EVEN.but(hidden=8192), work, quick, Stack(**IDLE_HOST), pp=4, microbatch=4096)
    piped = one(result.time - result.exposed["optimizer"] - result.exposed["dp"])
    assert one(result.exposed["bubble"]) / piped == pytest.approx(float(bubble_fraction("1f1b", 4, 8)), rel=0.02)


def test_blocking_messages_wait_on_every_stage():
    quiet = Stack(**IDLE_HOST, blocking_p2p=True)
    result = cost(EVEN, Workload(batch=8 * 512, seq=1), stack=quiet, pp=4, microbatch=512)
    assert one(result.exposed["pp"]) == pytest.approx(8 * 2 * one(result.boundary))
    assert (
        one(
            cost(EVEN, Workload(batch=8 * 512, seq=1), stack=Stack(**IDLE_HOST), pp=4, microbatch=512).exposed.get(
                "pp", 0
            )
        )
        == 0
    )


def test_the_slowest_rank_sets_the_pace():
    """A heavy head on the last stage: giving that stage fewer layers shortens the step."""
    heavy = GPT.but(vocab=200_000)
    even, eased = (cost(heavy, pp=4, layers_per_stage=split) for split in ((2, 2, 2, 2), (3, 2, 2, 1)))
    assert one(even.slowest) == 3
    assert one(eased.time) < one(even.time)


# Traffic


def test_traffic_by_axis():
    """By hand: 8 micro-batches, 8 layers; the embedding and the head add to tp."""
    activation = 512 * GPT.hidden * 2
    m, ring = 8, 2 * 3 / 4
    result = cost(tp=4, replicate=8)
    tp = m * (8 * 4 + 2) * ring * activation + m * 3 * ring * 512 * 4
    assert one(result.traffic["tp"]) == pytest.approx(tp)
    held = sum(
        one(n)
        for h in result.program.ranks
        for n in [sum(lowered(tp=4, replicate=8).parameters["dense"].values()) * h.counts["dense"]]
    )
    dp = one(result.traffic["dp"]) / (2 * 7 / 8 * 4)
    assert held < dp < 1.2 * GPT.total / 4 + held  # gradients in fp32: a quarter of the matrices, all of the vectors
    assert set(AXIS_OF.values()) >= set(result.traffic)


def test_pipeline_traffic_of_a_middle_rank():
    """One activation forward and one gradient backward per stage and micro-batch."""
    activation = 512 * GPT.hidden * 2
    assert one(cost(pp=4).traffic["pp"]) == pytest.approx(2 * 64 * activation)
    assert one(cost(pp=4, virtual=2, schedule="interleaved").traffic["pp"]) == pytest.approx(2 * 2 * 64 * activation)
    assert one(cost().traffic.get("pp", 0)) == 0


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_pipeline_messages_are_those_of_the_program(schedule, pp):
    """A rank sends only if the next stage is on another rank; with two ranks, and at the turn of a V, some messages are local."""
    virtual, m = (1 if schedule == "1f1b" else 2), 12
    model, activation = GPT.but(layers=12), 512 * GPT.hidden * 2
    plan = Plan(pp=pp, virtual=virtual, schedule=schedule)
    rank_of = build(schedule, pp, m, virtual).rank_of
    crosses = rank_of[:-1] != rank_of[1:]
    sends = np.bincount(rank_of[:-1][crosses], minlength=pp) + np.bincount(rank_of[1:][crosses], minlength=pp)
    work = Workload(batch=m, seq=512)
    program = step_program(model, plan.check(model, work), work)
    for rank in range(pp):
        found = sum(r.bytes for r in traffic(program, rank) if r.axis == "pp")
        assert found == pytest.approx(m * sends[rank] * activation)
    for every_rank in (True, False):
        program = step_program(model, plan, work, every_rank=every_rank)
        busiest = step_cost(program, DGX.with_gpus(pp)).traffic["pp"]
        assert one(busiest) == pytest.approx(m * sends.max() * activation)


def test_zero_three_sends_1_5_times_the_bytes_of_ddp():
    ddp, fsdp = (
        cost(GPT, Workload(batch=8, seq=512), grad_dtype="bf16", **p)
        for p in ({"replicate": 8}, {"zero": 3, "shard": 8})
    )
    assert one(fsdp.traffic["dp"]) / one(ddp.traffic["dp"]) == pytest.approx(1.5)


# The prediction


def test_prediction_states_its_denominators():
    model = catalog.load("models", "llama3-8b")
    work, plan = Workload(batch=64, seq=8192), Plan(shard=8, zero=3, recompute="full")
    result = predict(Config(model, DGX.with_gpus(8), plan, work, Stack(), assumed=("nothing",)))
    assert result.mfu == pytest.approx(model.model_flops(8192) * 64 * 8192 / (result.step_time_s * 8 * 989.4e12))
    assert result.hfu > 1.25 * result.mfu  # the forward is paid twice
    assert result.tokens_per_s == pytest.approx(64 * 8192 / result.step_time_s)
    assert "989" in result.mfu_denominator
    assert result.assumed == ["nothing"]
    assert (result.step_time_low_s, result.step_time_high_s) == pytest.approx(
        [result.step_time_s * b for b in band(Stack(), result.exposed_s, result.hidden_s, plan, DGX.with_gpus(8))]
    )
    assert 0.25 < result.mfu < 0.65


def test_a_network_that_nobody_measured_at_this_size_has_a_band_of_twice_its_time():
    model, work = catalog.load("models", "llama3-8b"), Workload(batch=64, seq=8192)
    plan = Plan(shard=64, zero=3, recompute="full")

    def predicted(published):
        cluster = DGX.with_gpus(64).but(published=published)
        return predict(Config(model, cluster, plan, work, Stack(evidence="published")))

    known, unknown = predicted(64), predicted(32)
    between = unknown.exposed_s["dp"] + unknown.hidden_s["dp"]
    assert unknown.step_time_s == known.step_time_s
    assert unknown.step_time_high_s >= 0.97 * (unknown.step_time_s + between) > known.step_time_high_s
    assert not [text for text in known.assumed if "network" in text]
    assert [text for text in unknown.assumed if "more than 32 GPUs" in text]


def test_bound_by_names_the_largest_group():
    assert bound_by({"attention": 1.0, "ffn": 1.0, "tp": 1.5}) == "compute"
    assert bound_by({"attention": 1.0, "tp": 1.5}) == "tensor-parallel communication"
    assert bound_by({"attention": 1.0, "bubble": 2.0}) == "the pipeline bubble"
    assert bound_by({"host": 2.0, "ffn": 1.0}) == "the host's launches"


def test_estimate_compares_with_the_targets():
    model = catalog.load("models", "llama3-8b")
    work = Workload(batch=64, seq=8192)
    result = estimate(Config(model, DGX.with_gpus(8), Plan(shard=8, zero=3, recompute="full"), work, Stack()))
    names = {v.name: v for v in result.verdicts}
    assert names["MFU"].good == (result.prediction.mfu > 0.40)
    assert names["memory"].good == (result.prediction.memory_gib < 0.95 * result.prediction.memory_limit_gib)
    assert "bubble fraction" not in names
    piped = estimate(Config(model, DGX.with_gpus(8), Plan(pp=8, recompute="full"), work, Stack()))
    bubble = next(v for v in piped.verdicts if v.name == "bubble fraction")
    assert bubble.value == piped.bubble_fraction == piped.walked.walk.bubble_fraction > 0
    assert result.as_dict()["step_time_s"] == result.prediction.step_time_s


def test_count_only_models_and_experts_have_costs():
    assert one(cost(COUNTS, Workload(batch=512, seq=1), replicate=8, microbatch=64).time) > 0
    spread = cost(MOE, replicate=8, ep=8)
    counts = 8 * 8 * MOE.experts * 8  # counted in each layer
    assert one(spread.traffic["ep"]) == pytest.approx(7 / 8 * (8 * 8 * 4 * 2 * 512 * MOE.hidden * 2 + counts))
    skewed = cost(MOE, WORK.but(imbalance=2.0), replicate=8, ep=8, stack=Stack(**IDLE_HOST))
    assert one(skewed.time) > one(cost(MOE, replicate=8, ep=8, stack=Stack(**IDLE_HOST)).time)


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2", "llama3-70b"])
@pytest.mark.parametrize(
    ("pp", "virtual", "schedule"), [(32, 1, "1f1b"), (7, 1, "zb-h1"), (16, 2, "interleaved"), (25, 2, "zbv")]
)
def test_a_batch_finds_the_fullest_rank_of_uneven_stages(model, pp, virtual, schedule):
    """The search evaluates few ranks, but it must find the rank that does not fit."""
    shape = catalog.load("models", model)
    plan = Plan(pp=pp, virtual=virtual, schedule=schedule)
    programs = (step_program(shape, plan, Workload(batch=8 * pp, seq=4096), every_rank=e) for e in (False, True))
    few, every = (step_cost(program, DGX.with_gpus(pp)) for program in programs)
    assert one(few.peak_memory) == pytest.approx(one(every.peak_memory), rel=0.01)


@pytest.mark.parametrize("kernel", ["flash", "stored"])
@pytest.mark.parametrize("model", [GPT, MOE], ids=["dense", "moe"])
def test_operations_outside_fp8_take_as_long_as_in_16_bits(model, kernel):
    """The products of a layer are faster; head, router and the core of attention, stored or not, are not."""
    by = {p: cost(model, WORK.but(precision=p), stack=Stack(attention=kernel)) for p in ("bf16", "fp8")}
    spent = {p: {part: one(s) for part, s in c.exposed.items()} for p, c in by.items()}
    for part in ("head", "router") if model.experts else ("head",):
        assert spent["fp8"][part] == spent["bf16"][part]
    assert spent["fp8"]["experts" if model.experts else "ffn"] < spent["bf16"]["experts" if model.experts else "ffn"]
    names = {op.name for ops in by["fp8"].program.blocks.values() for op in ops if op.dtype == "bf16"}
    core = {"core", "core-grad"} if kernel == "flash" else {"scores", "values", "scores-grad", "values-grad"}
    head = {"logits", "logits-dgrad", "logits-wgrad"}
    assert names == core | head | ({"router", "router-dgrad", "router-wgrad"} if model.experts else set())


def test_a_split_backward_pays_for_the_gathers_of_its_inputs_on_all_stages_but_the_first():
    """I needs the gathers of W: the same gathers a second time, in the closed form, in the walk and in the hidden time."""
    plan = {"tp": 4, "sp": True, "pp": 4, "microbatch": 2}
    plain, split = (cost(GQA, schedule=s, stack=Stack(**IDLE_HOST), **plan) for s in ("1f1b", "zb-h1"))
    again = [one(plain.times[block, "W"].comm["tp"]) for block in ("dense", "head")]
    for rank, (a, b) in enumerate(zip(plain.ranks, split.ranks, strict=True)):
        more = 2 * again[0] * (rank > 0) + again[1] * (rank == 3)
        assert one(b.i - a.i) == pytest.approx(more, abs=1e-12)
        assert one(b.f) == one(a.f)
        assert one(b.w) == one(a.w)
    made = [
        cost(GQA, schedule=s, recompute="full", stack=Stack(**IDLE_HOST), **plan).ranks[1].i for s in ("1f1b", "zb-h1")
    ]
    assert one(made[0]) == one(made[1])  # a recomputed layer keeps what it gathered
    overlapped = cost(GQA, schedule="zb-h1", stack=Stack(overlap=("tp",), **IDLE_HOST), **plan)
    assert one(overlapped.times["dense", "G"].busy) < one(split.times["dense", "G"].busy)


def test_a_gather_after_the_update_costs_its_whole_time():
    """ZeRO-1 of flat buffers: forward hides the gather of the updated parameters, or the step is longer by all of it."""
    behind, after = (
        cost(stack=Stack(flat_shards=True, gathers_ahead=ahead, **IDLE_HOST), shard=8, zero=1, bucket=1e12)
        for ahead in (True, False)
    )
    gather = choose(DGX.with_gpus(8), "all-gather", 2.0 * GPT.total, 8)
    assert one(after.time - behind.time) == pytest.approx(gather.seconds)
