"""Muon in the step program: bytes and FLOPs of its exchanges, the batch against the assignment of each rank, moments and cost."""

import numpy as np
import pytest

from lower.cases import GQA, MLA, MOE, WORK, lowered, one
from meshwright.cost.collective import CollectiveTimes
from meshwright.cost.memory import state_memory
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.layout import Layout
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import boxes, degrees_of, matrices
from meshwright.describe.stack import Stack
from meshwright.lower import muon, sync
from meshwright.lower.rank import OURS, traffic_of_rank
from meshwright.lower.step import step_program
from meshwright.predict.estimate import estimate

MUON = WORK.but(optimizer="muon")
WIRE = 2  # bf16


def step_ops(model, **plan):
    program = lowered(model, MUON, **plan)
    held = program.ranks[0]
    return program, {
        (op.name, op.axis): op for op in sync.step_ops(program, held) if op.name in (muon.EXCHANGE, "orthogonalise")
    }


def matrix_elements(model):
    return sum(
        count * linear.d_in * linear.d_out * linear.copies
        for kind in ("dense", "moe")
        for count in [model.layer_count(kind) if kind in model.blocks else 0]
        for linear in (model.blocks[kind].linears if count else ())
        if linear.name not in ("router", "shared-scale")
    )


def flops(op):
    return one(op.count) * one(op.flops)


def test_without_a_cut_nothing_is_sent():
    _, ops = step_ops(GQA, replicate=4)
    assert set(ops) == {("orthogonalise", "")}
    _, ops = step_ops(MOE, replicate=4, ep=4)
    assert set(ops) == {("orthogonalise", "")}


def test_an_exchange_moves_each_matrix_once_there_and_once_back():
    """ZeRO over 4 ranks: each sends its quarter and returns what it owns; all together send every element twice."""
    program, ops = step_ops(GQA, shard=4, zero=1)
    exchange = ops[muon.EXCHANGE, "shard_cp"]
    quarter = matrix_elements(GQA) / 4 * WIRE
    assert (one(exchange.count), one(exchange.message_bytes)) == (2.0, pytest.approx(quarter))
    assert exchange.collective == "all_to_all"
    plan = Plan(shard=4, zero=1)
    exact = step_program(GQA, plan, MUON, OURS)
    found = [r for rank in range(4) for r in traffic_of_rank(exact, plan, rank) if r.collective == "all_to_all"]
    assert sum(r.bytes for r in found) == pytest.approx(2 * 4 * quarter)
    assert {r.count for r in found} == {2.0}
    assert one(program.batch.size("shard_cp")) == 4


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (GQA, {"tp": 2}),
        (GQA, {"shard": 4, "zero": 3, "tp": 2}),
        (MLA, {"shard": 2, "zero": 2, "tp": 2, "sp": True}),
        (MOE, {"shard": 8, "zero": 1, "tp": 2}),
        (MOE, {"shard": 2, "zero": 1, "ep": 2, "tp": 2}),
    ],
)
def test_the_batch_is_a_lower_bound_of_the_busiest_rank(model, plan):
    """max(total / ranks, largest) bounds every division from below; the real one is at most twice as uneven."""
    _, ops = step_ops(model, **plan)
    made = Plan(**plan)
    exact = step_program(model, made, MUON, OURS)
    for (name, axis), op in ops.items():
        if name != muon.EXCHANGE:
            continue
        mine = [
            r.bytes
            for rank in range(made.world)
            for r in traffic_of_rank(exact, made, rank)
            if (r.axis, r.collective) == (axis, "all_to_all") and muon.EXCHANGE in r.names
        ]
        assert len(mine) == made.world
        expected = one(op.count * op.message_bytes)
        assert np.mean(mine) <= expected * (1 + 1e-9)
        assert expected <= max(mine) * (1 + 1e-9) <= 2 * expected * (1 + 1e-9)


@pytest.mark.parametrize(
    "plan", [{"shard": 8, "zero": 1}, {"shard": 4, "zero": 3, "tp": 2}, {"tp": 8}, {"shard": 64, "zero": 1}]
)
def test_the_batch_has_the_rounds_of_the_assignment(plan):
    """A matrix of 2²⁴ elements or more is one round; smaller matrices share a round. The assignment may have a few more rounds, because
    matrices do not fill a round exactly."""
    model, made = catalog.load("models", "llama3-8b"), Plan(**plan)
    _, ops = step_ops(model, **plan)
    found = matrices(boxes(model, made, Layout(made), 0, range(model.layers)), degrees_of(model, made))
    real, batch = len({m.round for m in found}), one(ops["orthogonalise", ""].count)
    assert batch <= real <= 1.25 * batch + 1
    for (name, axis), op in ops.items():
        if name == muon.EXCHANGE:
            assert one(op.count) == 2 * batch, axis


def test_messages_behind_the_products_of_other_rounds_cost_no_time():
    """ZeRO over 8 GPUs of a node: the products take longer than the messages, of which 1/R remains. Over 512 ranks there is one round, and
    nothing to hide behind."""
    model, cluster = catalog.load("models", "llama3-8b"), catalog.load("clusters", "dgx-h100")
    workload = WORK.but(batch=512, seq=4096, optimizer="muon")
    exposed = {}
    for ranks in (8, 512):
        for overlap in ((), ("dp",)):
            plan = Plan(shard=ranks, zero=1, overlap=overlap)
            found = estimate(
                Config(model, cluster.with_gpus(ranks), plan, workload, Stack(hides=1.0, compute_slowdown=0.0))
            )
            exposed[ranks, bool(overlap)] = found.prediction.exposed_s["optimizer"]
    assert exposed[512, True] == exposed[512, False]
    _, ops = step_ops(model, shard=8, zero=1)
    rounds = one(ops[muon.EXCHANGE, "shard_cp"].count) / 2
    network = CollectiveTimes(cluster.with_gpus(8), lowered(model, workload, shard=8, zero=1).batch)
    messages = one(network.time(ops[muon.EXCHANGE, "shard_cp"])) * 2 * rounds
    assert exposed[8, False] - exposed[8, True] == pytest.approx(messages * (1 - 1 / rounds), rel=1e-6)


def test_ranks_that_hold_one_matrix_divide_the_products():
    _, alone = step_ops(GQA, replicate=4)
    _, over_four = step_ops(GQA, shard=4, zero=1)
    ratio = flops(alone["orthogonalise", ""]) / flops(over_four["orthogonalise", ""])
    assert ratio == pytest.approx(4.0)


def test_matrices_have_one_moment_and_the_average_is_one_more():
    plan = {"shard": 4, "zero": 1}
    sizes = {}
    for name, workload in {
        "adamw": WORK,
        "muon": MUON,
        "average": MUON.but(ema=True),
    }.items():
        program = lowered(GQA, workload, **plan)
        sizes[name] = one(state_memory(program, program.ranks[0])["optimizer"])
    fp32 = 4
    assert sizes["adamw"] - sizes["muon"] == pytest.approx(matrix_elements(GQA) / 4 * fp32)
    whole = sum(one(n) for n in muon_free_elements())
    assert sizes["average"] - sizes["muon"] == pytest.approx(whole / 4 * fp32)


def muon_free_elements():
    return lowered(GQA, MUON, shard=4, zero=1).ranks[0].padded.values()


def test_muon_costs_more_without_zero_than_with_it():
    """Replicas compute the same update each; ranks of ZeRO divide it."""
    model, cluster = catalog.load("models", "llama3-8b"), catalog.load("clusters", "dgx-h100")
    times = {}
    for optimizer in ("adamw", "muon"):
        workload = WORK.but(batch=512, seq=4096, optimizer=optimizer)
        for zero in (0, 1):
            plan = Plan(shard=8, zero=1, tp=8) if zero else Plan(replicate=8, tp=8)
            found = estimate(Config(model, cluster.with_gpus(64), plan, workload, Stack()))
            times[optimizer, zero] = found.prediction.exposed_s["optimizer"]
    assert times["muon", 0] - times["adamw", 0] > 4 * (times["muon", 1] - times["adamw", 1]) > 0
