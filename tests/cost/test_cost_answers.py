"""Roofline by level, critical batch and bubble fraction have the same value in every command."""

import json

import numpy as np
import pytest

from meshwright import api
from meshwright.cost.step import step_cost
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.result import COMMUNICATION
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program
from meshwright.planner.advice.explain import grouped
from meshwright.predict.estimate import Simulation, critical_batch, estimate, level_bytes
from meshwright.view.estimate import page
from meshwright.view.explain import explain_bubble
from meshwright.view.tables import console

STACK = catalog.load("stacks", "default")


def estimated(model, gpus, batch, seq=1024, cluster="dgx-h100", **plan):
    parts = catalog.load("models", model), catalog.load("clusters", cluster).with_gpus(gpus)
    return estimate(Config(*parts, Plan(**plan), Workload(batch=batch, seq=seq), STACK))


def printed(e):
    out = console()
    with out.capture() as capture:
        out.print(page(e))
    return " ".join(capture.get().split())


def test_roofline_time_of_a_level_equals_the_collective_time():
    """gpt2-xl with DDP on 64 H100: the cards of a node share the all-reduce. An earlier roofline gave eight times the time of the cost model."""
    e = estimated("gpt2-xl", 64, 512, replicate=64, microbatch=8, bucket=1e12)
    busy = {c.level: c.seconds for c in e.roofline.ceilings}
    assert busy["rail"] == pytest.approx(float(e.cost.reduce[0]) * e.stack.network, rel=0.05)
    assert busy["spine"] == 0
    assert e.roofline.level == "rail"


def test_traffic_inside_nodes_does_not_count_for_the_network():
    e = estimated("llama3-8b", 16, 64, 8192, tp=8, sp=True, replicate=2, microbatch=1)
    inside, rail, spine = level_bytes(e)
    assert inside > 5 * rail > 0 == spine
    alone = estimated("llama3-8b", 8, 32, 8192, tp=8, sp=True, microbatch=1)
    assert level_bytes(alone)[1:] == [0, 0]


@pytest.mark.parametrize("model", ["gpt2-xl", "llama3-8b"])
@pytest.mark.parametrize(
    "plan",
    [{"replicate": 64}, {"shard": 64, "zero": 3}, {"tp": 8, "replicate": 8}, {"tp": 16, "replicate": 4}],
    ids=str,
)
@pytest.mark.parametrize("batch", [64, 1024])
def test_bound_by_and_roofline_regime_agree(model, plan, batch):
    tp = plan.get("tp", 1)
    if model == "gpt2-xl" and tp > 1:
        pytest.skip("25 heads")
    e = estimated(model, 64, batch, 1024, microbatch=1, **plan)
    bound = e.prediction.bound_by in COMMUNICATION.values()
    assert bound == ("communication-bound" in e.roofline.regime)
    text = printed(e)
    assert not ("bound by compute" in text and "communication-bound" in text)


# Critical batch


def hidden(model, cluster, plan, workload):
    cost = step_cost(step_program(model, plan, workload, STACK, every_rank=True), cluster)
    return float(np.broadcast_to(cost.unhidden, 1)[0]) <= 1e-9 * float(cost.time[0])


@pytest.mark.parametrize("plan", [{"replicate": 64}, {"shard": 64, "zero": 1}, {"shard": 64, "zero": 3}], ids=str)
def test_critical_batch_is_the_smallest_batch_that_hides_communication(plan):
    model, cluster = catalog.load("models", "gpt2-xl"), catalog.load("clusters", "dgx-h100").with_gpus(64)
    plan, workload = Plan(**plan), Workload(batch=64, seq=1024)
    found = critical_batch(Config(model, cluster, plan, workload, STACK))
    assert found.sequences is not None
    micro = found.sequences // 64
    assert hidden(model, cluster, plan.but(microbatch=micro), workload.but(batch=found.sequences))
    if micro > 1:
        assert not hidden(model, cluster, plan.but(microbatch=micro - 1), workload.but(batch=found.sequences - 64))
    else:
        assert "already hidden at the smallest batch" in found.reason


def test_no_data_parallelism_has_no_critical_batch():
    e = estimated("gpt2-xl", 1, 8)
    assert e.critical_batch.sequences is None
    assert e.critical_batch.reason.startswith("none")


def test_plan_and_estimate_print_the_same_critical_batch_and_bubble():
    result = api.plan("gpt2-xl", "dgx-h100", gpus=16, batch=128, seq=1024)
    data = result.as_dict()["explanation"]
    x = result.estimate
    again = estimate(x.config)
    assert data["critical_batch"] == again.as_dict()["critical_batch"]
    assert data["critical_batch"] is None or (isinstance(data["critical_batch"], int) and data["critical_batch"] >= 1)
    assert data["bubble_fraction"] == again.bubble_fraction


# Bubble


def test_bubble_fraction_equals_that_of_the_walked_schedule():
    e = estimated("gpt2-xl", 8, 64, pp=4, replicate=2, microbatch=1)
    simulated = Simulation(e, e.walked).as_dict()["bubble_fraction"]
    verdict = next(v for v in e.verdicts if v.name == "bubble fraction")
    assert verdict.value == e.as_dict()["bubble_fraction"] == simulated > 0
    assert f"{100 * simulated:.1f}%" in printed(e)


def test_the_bubble_of_the_busiest_rank_is_named_so_wherever_its_seconds_are_shown():
    """Its share of the step is not the bubble fraction, which is over all ranks: one word would be two numbers."""
    e = estimated("gpt2-xl", 8, 64, pp=4, replicate=2, microbatch=1)
    own = e.prediction.exposed_s["bubble"] / e.prediction.step_time_s
    assert own != pytest.approx(e.bubble_fraction, rel=0.02)
    assert "bubble of the busiest rank" in printed(e)
    assert "pipeline bubble of the busiest rank" in grouped(e.prediction)
    with (out := console()).capture() as text:
        out.print(explain_bubble(e))
    assert "bubble of the busiest rank: " in text.get()
    assert "bubble fraction, over all ranks: " in text.get()


def test_no_pipeline_has_no_bubble():
    e = estimated("gpt2-xl", 8, 64, replicate=8, microbatch=1)
    assert e.bubble_fraction == 0
    assert "bubble" not in e.prediction.exposed_s
    result = api.plan("gpt2-small", "dgx-h100", gpus=8, batch=64, seq=1024)
    if result.estimate.plan.pp == 1:
        assert "bubble" not in result.estimate.prediction.exposed_s
    assert json.loads(json.dumps(e.as_dict(), allow_nan=False))


# Ring attention and the optimizer


def step_of(plan, seq=131072, batch=8, gpus=16, model="llama3-8b", precision="bf16"):
    parts = catalog.load("models", model), Plan(**plan), Workload(batch=batch, seq=seq, precision=precision), STACK
    return step_cost(step_program(*parts, every_rank=True), catalog.load("clusters", "dgx-h100").with_gpus(gpus))


def test_only_ring_attention_overlaps_by_default():
    """8B at 128K tokens, cp 2: attention hides the sends of the ring; an all-gather before attention cannot be hidden."""
    plan = {"cp": 2, "shard": 8, "zero": 3, "recompute": "full"}
    ring, gather = (step_of({**plan, "cp_kind": kind}) for kind in ("ring", "all-gather"))
    assert float(ring.busy["comm:cp"][0]) > 0
    assert float(ring.exposed["cp"][0]) == pytest.approx(0, abs=1e-9)
    assert float(gather.exposed["cp"][0]) == pytest.approx(float(gather.busy["comm:cp"][0]))


def test_an_fp32_optimizer_has_no_master_to_read_and_write():
    narrow, wide = (
        next(
            op
            for op in step_of({"replicate": 8, "param_dtype": dtype}, 1024, 64, 8, "gpt2-xl").program.closing
            if op.name == "update"
        )
        for dtype in ("bf16", "fp32")
    )
    # bf16: gradient 4, two states of 4 read and written, master 8, parameter 2 + 2; fp32: the parameter is its own master
    assert float(np.broadcast_to(narrow.bytes, 1)[0]) / float(np.broadcast_to(wide.bytes, 1)[0]) == pytest.approx(
        32 / 28
    )
