"""Collectives: closed formulas against walked programs, and the library's curve against its own bounds."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lower.cases import GPT, WORK, lowered, one
from meshwright.cost import link
from meshwright.cost.collective import ALGORITHMS, Network, best_algorithm, formula, hierarchical_all_reduce
from meshwright.describe import catalog
from meshwright.describe.cluster import Accelerator, Cluster, Level, Link, uniform
from meshwright.lower.op import Op, sent
from meshwright.programs.collectives import build, walk

ALPHA, RATE, MEMORY = 5e-6, 50e9, 3e12
NAMES = {("all_gather", "recursive"): "recursive-doubling", ("reduce_scatter", "recursive"): "recursive-halving"}
OPERATIONS = {"send": "point-to-point"}
POWER_OF_TWO = {"recursive", "bruck"}  # elsewhere the formulas are those of a fuller power of two


def walked(operation, algorithm, n, ranks):
    name = NAMES.get((operation, algorithm), algorithm)
    program = build(OPERATIONS.get(operation, operation.replace("_", "-")), name, ranks, n // 4)
    return walk(program, uniform(ranks, ALPHA, RATE, MEMORY)).makespan


CASES = [
    (operation, algorithm, ranks)
    for operation, names in ALGORITHMS.items()
    for algorithm in names
    for ranks in (2, 3, 6, 8)
    if algorithm not in POWER_OF_TWO or ranks in (2, 8)
]


@pytest.mark.parametrize(("operation", "algorithm", "ranks"), CASES)
def test_formula_is_the_walk(operation, algorithm, ranks):
    """n divides evenly into the chunks of every rank number tried, so the two agree to rounding."""
    n = 4 * 36 * 64 * 1000
    ours = float(formula(operation, algorithm, n, ranks, ALPHA, 1 / RATE, 3 / MEMORY))
    assert ours == pytest.approx(walked(operation, algorithm, n, ranks), rel=1e-9)


def test_one_rank_costs_nothing():
    assert all(float(formula(o, a, 1e6, 1, ALPHA, 1 / RATE)) == 0 for o, names in ALGORITHMS.items() for a in names)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ALGORITHMS)), st.floats(1, 1e10), st.integers(2, 64))
def test_best_algorithm_is_the_fastest(operation, n, ranks):
    name, seconds = best_algorithm(operation, n, ranks, ALPHA, 1 / RATE)
    times = {a: float(formula(operation, a, n, ranks, ALPHA, 1 / RATE)) for a in ALGORITHMS[operation]}
    assert seconds == times[name] == min(times.values())


def test_which_algorithm_wins():
    """Few bytes: few messages. Many bytes: each byte once; off a power of two that is the ring."""
    assert best_algorithm("all_reduce", 8, 8, ALPHA, 1 / RATE)[0] == "halving-doubling"
    assert best_algorithm("all_reduce", 1e9, 6, ALPHA, 1 / RATE)[0] == "ring"
    assert best_algorithm("broadcast", 1e9, 8, ALPHA, 1 / RATE)[0] == "binomial"
    assert best_algorithm("all_to_all", 8, 16, ALPHA, 1 / RATE)[0] == "bruck"
    assert best_algorithm("all_to_all", 1e9, 16, ALPHA, 1 / RATE)[0] == "pairwise"


def two_level(nodes=4, per_node=4, fast=(1e-6, 400e9), slow=(5e-6, 25e9)):
    device = Accelerator(name="device", memory=80e9, memory_bandwidth=1e30, peak={"bf16": 1e15})
    levels = (
        Level(name="node", size=per_node, link=Link(name="fast", alpha=fast[0], bandwidth=fast[1])),
        Level(name="rail", size=nodes, link=Link(name="slow", alpha=slow[0], bandwidth=slow[1])),
    )
    return Cluster(name="two-level", accelerator=device, levels=levels, gpus=nodes * per_node)


def test_hierarchical_formula_is_the_two_level_walk():
    cluster, n = two_level(), 4 * 16 * 100_000
    groups = [list(range(4 * k, 4 * k + 4)) for k in range(4)]
    program = build("all-reduce", "two-level", 16, n // 4, groups=groups)
    ours = hierarchical_all_reduce(n, 4, 4, (1e-6, 1 / 400e9), (5e-6, 1 / 25e9))
    assert ours == pytest.approx(walk(program, cluster).makespan, rel=1e-9)


# One message


def test_message_time_and_crossover():
    assert link.message_time(1e6, 1e-6, 1e-9) == pytest.approx(1e-6 + 1e-3)
    assert link.message_time(1e6, 1e-6, 1e-9, 1e-9) == pytest.approx(1e-6 + 2e-3)
    n = link.crossover(1e-6, 1 / 450e9)
    assert n == pytest.approx(450e3)  # 450 kB, 439.5 KiB
    assert link.message_time(n, 1e-6, 1 / 450e9) == pytest.approx(2e-6)


def test_regime_names_the_term_that_rules():
    nvlink = Link(name="x", alpha=1e-6, bandwidth=450e9)
    below, how = link.regime(449e3, nvlink)
    assert below.startswith("latency")
    assert how == link.LATENCY_ADVICE
    above, how = link.regime(451e3, nvlink)
    assert above.startswith("bandwidth")
    assert how == link.BANDWIDTH_ADVICE


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
def test_fit_recovers_alpha_and_beta(alpha, bandwidth):
    sizes = [1024.0 * 2**i for i in range(0, 20, 2)]
    fitted = link.fit_alpha_beta(sizes, [alpha + n / bandwidth for n in sizes])
    assert fitted == pytest.approx((alpha, 1 / bandwidth), rel=1e-4)


# The library's curve

DGX = catalog.load("clusters", "dgx-h100")
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
SPANS = [
    {"tp": 2},
    {"tp": 8},
    {"pp": 8},
    {"replicate": 64},
    {"tp": 8, "replicate": 8},
    {"replicate": 4, "pp": 2, "tp": 4},
]


def op(kind, axis, n):
    return Op("x", "x", "collective", collective=kind, axis=axis, message_bytes=np.array([float(n)]))


def network(cluster=DGX, **plan):
    program = lowered(GPT, WORK, **plan)
    return Network(cluster.with_gpus(int(program.batch.world[0])), program.batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", SPANS, ids=str)
def test_library_grows_with_size_and_never_beats_the_wire(kind, plan):
    net = network(**plan)
    for axis in [a for a in ("tp", "pp", "dp") if one(net.batch.size(a)) > 1]:
        times = [one(net.time(op(kind, axis, n))) for n in np.geomspace(1, 1e10, 23)]
        assert all(b > a > 0 for a, b in pairwise(times))
        moved = one(sent(kind, np.array([1e10]), net.batch.size(axis)))
        assert times[-1] >= moved / (8 * 450e9)  # no group has more than its node's links


@pytest.mark.parametrize("kind", KINDS)
def test_library_is_free_for_one_rank(kind):
    assert one(network(tp=2).time(op(kind, "dp", 1e9))) == 0


def plain(cluster):
    """The cluster with switches that only pass on."""
    return cluster.but(levels=tuple(level.but(reduces=False) for level in cluster.levels))


def test_library_reaches_the_links_share_inside_a_node():
    """Large messages on eight ranks run at the link's reached rate, by bus bandwidth; a reducing switch beats it."""
    n, rate = 1e10, DGX.device_bandwidth(0)

    def bus(cluster, kind):
        return one(sent(kind, np.array([n]), 8)) / one(network(cluster, tp=8).time(op(kind, "tp", n)))

    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert bus(plain(DGX), kind) == pytest.approx(rate, rel=0.05)
    reducing = DGX.but(levels=(DGX.levels[0].but(reduces=True), *DGX.levels[1:]))
    assert rate < bus(reducing, "all_reduce") < 2 * rate


def test_crossing_nodes_costs_more_unless_every_card_works():
    inside, across = network(tp=8), network(tp=1, pp=8, replicate=8)
    assert one(across.time(op("all_reduce", "dp", 1e9))) > 3 * one(inside.time(op("all_reduce", "tp", 1e9)))
    whole_nodes = network(replicate=16)  # eight cards a node carry it
    one_a_node = network(pp=8, replicate=2)
    assert one(whole_nodes.time(op("all_reduce", "dp", 1e9))) < one(one_a_node.time(op("all_reduce", "dp", 1e9)))


def faster(cluster, level, times):
    """The cluster with one level's bandwidth multiplied."""
    levels = list(cluster.levels)
    entry = levels[level]
    levels[level] = entry.but(link=entry.link.but(bandwidth=entry.link.bandwidth * times))
    return cluster.but(levels=tuple(levels))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from(SPANS), st.floats(1, 1e10), st.integers(0, 2), st.floats(1, 8))
def test_more_bandwidth_is_never_slower(kind, plan, n, level, times):
    before, after = network(**plan), network(faster(DGX, level, times), **plan)
    for axis in ("tp", "pp", "dp"):
        assert one(after.time(op(kind, axis, n))) <= one(before.time(op(kind, axis, n))) * (1 + 1e-12)
