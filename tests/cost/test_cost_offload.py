"""Offload costs what it copies: bytes over the host's link, hidden where they can be."""

import numpy as np
import pytest

from meshwright.cost.closing import HOST_RATE
from meshwright.cost.step import step_cost
from meshwright.describe import catalog
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program

CLUSTER = catalog.load("clusters", "dgx-h100").with_gpus(8)
MODEL = catalog.load("models", "llama3-8b")
WORK = Workload(batch=8, seq=4096)


def costed(rate=25e9, **fields):
    plan = Plan(**{"tp": 8, "sp": True, **fields})
    cluster = CLUSTER.but(accelerator=CLUSTER.accelerator.but(host_bandwidth=rate))
    stack = catalog.load("stacks", "default").but(launch=1e-9, collective_launch=1e-9)
    program = step_program(MODEL, plan, WORK, stack, every_rank=True)
    return program, step_cost(program, cluster)


def saved_bytes(program) -> float:
    """Bytes that the layers save in a step."""
    return MODEL.layers * 8 * float(np.broadcast_to(sum(program.saved["dense"].values()), 1)[0])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_copies_are_hidden_behind_the_compute_of_their_phase(recompute):
    """A layer's tensors go down during forward, and return during the backward of the layer after it."""
    _, without = costed(recompute=recompute)
    program, slow = costed(1e8, offload="activations", recompute=recompute)
    one_way = saved_bytes(program) / 1e8
    hidden = 0.0
    for phase in ("F", "I"):
        timed = slow.times["dense", phase]
        work = sum(float(np.max(x)) for p, x in timed.parts.items() if p not in ("offload", "tp", "interference"))
        other = float(np.max(timed.comm["tp"] - timed.parts["tp"]))  # compute hides one stream at a time
        hidden += (program.batch.stack.hides * work - other) * MODEL.layers * 8
    assert 0 < hidden < one_way
    assert float(slow.exposed["offload"][0]) == pytest.approx(2 * one_way - hidden, rel=1e-9)
    _, fast = costed(1e12, offload="activations", recompute=recompute)
    assert float(fast.exposed["offload"][0]) == 0
    assert float(fast.time[0]) == pytest.approx(float(without.time[0]), rel=1e-3)
    assert float(slow.busy["compute"][0]) == pytest.approx(float(without.busy["compute"][0]), rel=1e-9)


def test_copies_of_some_layers_run_behind_the_compute_of_all():
    """16 of 32 layers: half the copies, against the same compute; the device keeps what the others save, of two layers at least."""
    _, without = costed()
    half, slow = costed(1e8, offload="activations", offload_layers=MODEL.layers // 2)
    whole, slower = costed(1e8, offload="activations")
    both_ways = 2 * saved_bytes(whole) / 1e8
    hidden = both_ways - float(slower.exposed["offload"][0])
    assert float(slow.exposed["offload"][0]) == pytest.approx(both_ways / 2 - hidden, rel=1e-9)
    kept = [float(program.ranks[0].kept[0]) for program in (costed()[0], half, whole)]
    assert kept[1] == pytest.approx(kept[0] / 2)
    assert kept[2] == pytest.approx(kept[0] * 2 / MODEL.layers, rel=0.07)
    fast = costed(1e12, offload="activations", offload_layers=MODEL.layers // 2)[1]
    assert float(fast.time[0]) == pytest.approx(float(without.time[0]), rel=1e-3)


@pytest.mark.parametrize("fields", [{"pp": 2, "tp": 4}, {"pp": 2, "tp": 4, "virtual": 2, "schedule": "interleaved"}])
def test_the_first_layers_of_each_stage_are_offloaded(fields):
    """3 layers of a stage leave; all micro-batches in flight keep those of the others."""
    kept = {
        n: float(costed(offload="activations" if n else "none", offload_layers=n, **fields)[0].ranks[0].kept[0])
        for n in (0, 3)
    }
    stages = 2 * fields.get("virtual", 1)
    assert kept[3] == pytest.approx(kept[0] * (1 - 3 * stages / MODEL.layers))


def test_partial_recompute_copies_more_than_inputs():
    sizes = [
        float(costed(1e8, offload="activations", recompute="full", recompute_layers=n)[1].busy["comm:host"][0])
        for n in (0, 24, 8)
    ]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] < float(costed(1e8, offload="activations")[1].busy["comm:host"][0])


def test_states_on_the_host_are_updated_there():
    _, here = costed()
    program, there = costed(offload="states")
    elements = sum(
        float(np.broadcast_to(sum(groups.values()), 1)[0]) * {"dense": MODEL.layers}.get(block, 1)
        for block, groups in program.parameters.items()
    )
    touched = (
        4 + 2 * 2 * 4 + 8 + 2 * 2
    )  # gradient, moments, master and parameter: read, and all but the gradient written
    host = elements * (touched / HOST_RATE + (4 + 2) / 25e9)
    norm = float(here.exposed["optimizer"][0]) - elements * touched / (0.85 * 3.35e12)
    assert float(there.exposed["optimizer"][0]) == pytest.approx(host + norm, rel=0.01)
