"""Collectives: closed formulas against walked programs, and the library's curve against its own bounds."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lower.cases import GPT, WORK, lowered, one
from meshwright.cost import link
from meshwright.cost.collective import Network, best_algorithm
from meshwright.describe import catalog
from meshwright.describe.cluster import Accelerator, Cluster, Level, Link, uniform
from meshwright.errors import MeshwrightError
from meshwright.lower.op import Op, sent
from meshwright.programs.collectives.formulas import FORMULAS, terms

ALPHA, RATE, MEMORY = 5e-6, 50e9, 3e12


def best(operation, n, ranks, cluster=None):
    return best_algorithm(operation, n, ranks, cluster or uniform(ranks, ALPHA, RATE, MEMORY))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted({o for o, _ in FORMULAS})), st.floats(1, 1e10), st.integers(2, 64))
def test_best_algorithm_is_the_fastest(operation, n, ranks):
    name, seconds = best(operation, n, ranks)
    link_ = Link(name="link", alpha=ALPHA, bandwidth=RATE)
    times = {a: terms(operation, a, ranks).time(n, link_, 3 / MEMORY) for o, a in FORMULAS if o == operation}
    assert seconds == pytest.approx(times[name])
    assert seconds <= min(times.values()) * (1 + 1e-12)


def test_which_algorithm_wins():
    """Few bytes: few messages. Many bytes: each byte once."""
    assert best("all-reduce", 8, 8)[0] == "halving-doubling"
    assert best("all-reduce", 1e9, 6)[0] in ("ring", "two-level")
    assert best("broadcast", 8, 8)[0] == "binomial"
    assert best("broadcast", 1e9, 64)[0] != "binomial"
    assert best("all-to-all", 1e9, 16)[0] != "bruck"


def test_topology_decides_for_large_messages():
    """Across nodes of four, the two-level form sends a quarter of the buffer through each slow link."""
    name, seconds = best("all-reduce", 1e9, 16, two_level())
    assert name == "two-level"
    assert seconds < best("all-reduce", 1e9, 16, uniform(16, 5e-6, 25e9))[1]


def test_an_unknown_collective_names_the_known_ones():
    with pytest.raises(MeshwrightError) as error:
        best("all-redoose", 1e6, 8)
    assert "all-reduce" in error.value.fix


def two_level(nodes=4, per_node=4, fast=(1e-6, 400e9), slow=(5e-6, 25e9)):
    device = Accelerator(name="device", memory=80e9, memory_bandwidth=1e30, peak={"bf16": 1e15})
    levels = (
        Level(name="node", size=per_node, link=Link(name="fast", alpha=fast[0], bandwidth=fast[1])),
        Level(name="rail", size=nodes, link=Link(name="slow", alpha=slow[0], bandwidth=slow[1])),
    )
    return Cluster(name="two-level", accelerator=device, levels=levels, gpus=nodes * per_node)


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
