"""Walked times: equal to the closed formulas if no link is shared, and correct for mixed, shared or oversubscribed links."""

import itertools

import numpy as np
import pytest
from collective_cases import EVERY, drawn, groups
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.describe.accelerator import Accelerator
from meshwright.describe.cluster import Cluster, Level, Link, uniform
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import ALGORITHMS, accepts, build, walk
from meshwright.programs.collectives.comparison import compare
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.formulas import FORMULAS, Steps, best_segments, terms
from meshwright.programs.collectives.network import max_min_rates
from meshwright.programs.collectives.program import moves, rows

NV = Link(name="inside", alpha=2e-6, bandwidth=400e9)
IB = Link(name="between", alpha=5e-6, bandwidth=50e9)
DEVICE = Accelerator(name="device", memory=80e9, memory_bandwidth=3e12, peak={"bf16": 1e15})


def two_levels(nodes: int, per_node: int, **between) -> Cluster:
    levels = (Level(name="node", size=per_node, link=NV), Level(name="net", size=nodes, link=IB, **between))
    return Cluster(name="two levels", accelerator=DEVICE, levels=levels, gpus=nodes * per_node)


def even(ranks: int, nodes: int) -> list[range]:
    return [range(k * ranks // nodes, (k + 1) * ranks // nodes) for k in range(nodes)]


@pytest.mark.parametrize(("operation", "algorithm"), list(FORMULAS))
def test_the_walk_equals_the_closed_formula_if_no_link_is_shared(operation, algorithm):
    for ranks in (1, 2, 3, 4, 5, 7, 8, 12, 16, 23, 32, 33):
        for nodes in [n for n in (1, 2, 4) if ranks % n == 0 and (n == 1 or "groups" in accepts(operation, algorithm))]:
            options = {"groups": even(ranks, nodes)} if "groups" in accepts(operation, algorithm) else {}
            elements = ranks * 32 * 9
            size = 0 if operation == "barrier" else 4 * elements
            program = build(operation, algorithm, ranks, elements, **options)
            one = terms(operation, algorithm, ranks, nodes=nodes)
            overlaps = isinstance(one, Steps) or one.together  # links of both levels at once; the formula leaves γ out
            flat = uniform(ranks, 3e-6, 2e9, memory_bandwidth=1e30 if overlaps else 9e9)
            expected = one.time(size, flat.levels[0].link, flat.accelerator.gamma)
            if overlaps and nodes > 1:  # on one switch both would share a port
                cluster = two_levels(nodes, ranks // nodes)
                cluster = cluster.but(accelerator=DEVICE.but(memory_bandwidth=1e30))
                expected = one.time(size, NV, 0.0, IB)
                assert walk(program, cluster).makespan == pytest.approx(expected, rel=1e-9, abs=0)
                continue
            walked = walk(program, flat).makespan
            if algorithm == "double-tree":  # its formula has all ranks in step; here some run ahead
                assert expected * 0.95 <= walked <= expected * (1 + 1e-9)
                continue
            assert walked == pytest.approx(expected, rel=1e-9, abs=0)
            if nodes > 1:
                cluster = two_levels(nodes, ranks // nodes)
                expected = one.time(size, NV, DEVICE.gamma, IB)
                assert walk(program, cluster).makespan == pytest.approx(expected, rel=1e-9, abs=0)


def test_every_algorithm_has_a_formula():
    assert set(FORMULAS) == set(EVERY)


def test_formulas_of_the_textbooks():
    """Some formulas by hand for n bytes of full buffer: binomial broadcast has a logarithm, all-gather a factor (P−1)/P."""
    link = Link(name="l", alpha=1.0, bandwidth=1.0)
    assert terms("broadcast", "binomial", 8).time(100, link) == 3 * (1 + 100)
    assert terms("broadcast", "binomial", 9).time(100, link) == 4 * (1 + 100)
    assert terms("all-gather", "ring", 4).time(100, link) == 3 * (1 + 25)
    assert terms("all-reduce", "ring", 4).time(100, link, gamma=2.0) == 6 * (1 + 25) + 3 * 25 * 2
    assert terms("all-reduce", "naive", 4).time(100, link) == 6 * (1 + 100)
    assert terms("all-reduce", "halving-doubling", 8).time(80, link) == 6 + 2 * 70
    assert terms("all-to-all", "bruck", 8).time(80, link) == 3 + 3 * 40
    with pytest.raises(MeshwrightError, match="Fix: ring"):
        terms("all-reduce", "rings", 4)


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
def test_both_engines_give_the_same_times(operation, algorithm):
    @given(st.data())
    @settings(max_examples=5, deadline=None)
    def run(data):
        program, _ = data.draw(drawn(operation, algorithm, most=12))
        cluster = data.draw(st.sampled_from([uniform(12, 1e-6, 1e9, 5e9), two_levels(3, 4)]))
        one, other = (walk(program, cluster, engine=engine) for engine in ("auto", "events"))
        assert other.makespan == pytest.approx(one.makespan, rel=1e-11, abs=0)
        for name in ("start", "end", "step_end"):
            np.testing.assert_allclose(getattr(other, name), getattr(one, name), rtol=1e-9, atol=0)

    run()


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_bytes_are_conserved(data):
    """The bytes sent by ranks equal the bytes through ports, on any cluster and placement; no port exceeds its bandwidth."""
    operation, algorithm = data.draw(st.sampled_from(EVERY))
    program, _ = data.draw(drawn(operation, algorithm, most=12))
    shared = data.draw(st.sampled_from([{}, {"ports": 1}, {"ports": 2}, {"oversubscription": 3.0}]))
    cluster = two_levels(3, 4, **shared)
    placement = data.draw(st.permutations(range(12)))[: program.ranks]
    result = walk(program, cluster, placement, element_bytes=2)
    away = (program.moves.source != program.moves.target) & (program.moves.source < program.ranks)
    assert result.sent.sum() == pytest.approx(2 * program.moved[away].sum())
    out = sum(size for port, size in result.bytes_by_port.items() if port[0] in ("out", "nic-out"))
    assert out == pytest.approx(result.sent.sum())
    for port, size in result.bytes_by_port.items():
        assert size <= cluster.capacity(port) * result.makespan * (1 + 1e-9)
    assert (result.end >= result.start).all()
    assert result.makespan == result.step_end.max(initial=0.0)


def test_flows_through_one_port_share_it():
    """Two ranks of a node send through its one card: half the rate each; a third flow inside the node is not slowed."""
    cluster = two_levels(2, 4, ports=1)
    table = moves(0, [0, 1, 2], [4, 5, 3], [0, 1, 2])
    program = collective("all-reduce", 8, 3000, table, chunks=3)  # a pattern to time, not a right all-reduce
    result = walk(program, cluster, element_bytes=1)
    assert result.end[:2] == pytest.approx([IB.alpha + 2000 * IB.beta] * 2, rel=1e-12)
    assert result.end[2] == pytest.approx(NV.time(1000), rel=1e-12)
    assert result.bytes_by_port["nic-out", 1, 0, 0] == 2000


def test_a_flow_speeds_up_when_the_other_flow_ends():
    """1 kB and 3 kB share a port: the longer flow runs at half rate for the time of 2 kB, then at full rate for its last 2 kB."""
    cluster = two_levels(2, 4, ports=1)
    program = collective("all-reduce", 8, 4000, rows([(0, 0, 4, 0, 1), (0, 1, 5, 1, 3)]), chunks=4)
    result = walk(program, cluster, element_bytes=1)
    assert result.end == pytest.approx([IB.alpha + 2000 * IB.beta, IB.alpha + 4000 * IB.beta], rel=1e-12)


def test_an_oversubscribed_uplink_slows_an_all_to_all():
    """Four nodes of four, uplinks at a third of the rate: the exchange takes little more than the uplink's bytes over its rate."""
    fair, crowded = two_levels(4, 4), two_levels(4, 4, oversubscription=3.0)
    program = build("all-to-all", "direct", 16, 16 * 10**6)
    fast, slow = walk(program, fair), walk(program, crowded)
    up = slow.bytes_by_port["up", 1, 0]
    assert up == 4 * 12 * 4e6
    bound = up / crowded.capacity(("up", 1, 0))
    assert slow.makespan == pytest.approx(IB.alpha + bound, rel=1e-6)
    assert slow.makespan - IB.alpha == pytest.approx(3 * (fast.makespan - IB.alpha), rel=1e-9)


def test_a_mixed_ring_waits_for_its_slowest_hop():
    """Large chunks: the slow hop determines all steps but the first, which the uniform formula does not model."""
    cluster, ranks, elements = two_levels(2, 4), 8, 8 * 10**6
    walked = walk(build("all-gather", "ring", ranks, elements), cluster).makespan
    shard = 4 * elements / ranks
    all_slow, all_fast = ((ranks - 1) * link.time(shard) for link in (IB, NV))
    assert all_fast < walked <= all_slow * (1 + 1e-12)
    assert walked > 0.99 * all_slow


def test_node_aware_algorithms_are_faster_across_nodes():
    """A large all-reduce over four nodes: two-level is faster than hierarchical and ring, whose busiest card sends the same bytes."""
    cluster, elements = two_levels(4, 8), 32 * 10**6
    nodes = even(32, 4)
    times, busiest = {}, {}
    for name in ("ring", "hierarchical", "two-level"):
        options = {"groups": nodes} if name != "ring" else {}
        result = walk(build("all-reduce", name, 32, elements, **options), cluster)
        times[name] = result.makespan
        busiest[name] = max(size for port, size in result.bytes_by_port.items() if port[0] == "nic-out")
    assert times["two-level"] < 0.3 * times["ring"]
    assert times["two-level"] < 0.3 * times["hierarchical"]
    assert busiest["two-level"] == pytest.approx(2 * 3 / 32 * 4 * elements)
    assert busiest["hierarchical"] == pytest.approx(2 * 3 / 4 * 4 * elements)
    assert busiest["ring"] == pytest.approx(2 * 31 / 32 * 4 * elements)


def test_additions_queue_on_a_rank():
    """Two messages arrive together and each takes γ·n to add: the second waits for the first."""
    cluster = uniform(3, 1e-6, 1e9, memory_bandwidth=3e9)
    program = collective("reduce", 3, 2000, rows([(0, 1, 0, 0, 1), (0, 2, 0, 1, 1)], reduce=True), chunks=2)
    result = walk(program, cluster, element_bytes=1)
    assert result.makespan == pytest.approx(1e-6 + 2000e-9 + 2000e-9, rel=1e-12)
    with pytest.raises(MeshwrightError, match="engine='events'"):
        walk(program, cluster, engine="rounds")


@given(st.integers(1, 6), st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None)
def test_rates_are_max_min_fair(seed, paths):
    """Every flow passes a full port on which no flow is faster: the definition of max-min fairness."""
    capacity = np.append(np.random.default_rng(seed).integers(1, 9, size=5).astype(float), np.inf)
    ports = np.array([sorted(path) + [5] * (3 - len(path)) for path in paths])
    rates = max_min_rates(ports, capacity)
    load = np.zeros(6)
    np.add.at(load, ports, rates[:, None])
    assert (load[:5] <= capacity[:5] * (1 + 1e-9)).all()
    for flow, path in enumerate(paths):
        assert any(
            load[p] >= capacity[p] * (1 - 1e-9)
            and rates[flow] >= max(rates[k] for k, q in enumerate(paths) if p in q) - 1e-9
            for p in path
        )


@given(st.data(), st.integers(2, 12))
@settings(max_examples=20, deadline=None)
def test_uneven_nodes_and_odd_placements_walk(data, ranks):
    nodes = data.draw(groups(ranks))
    placement = data.draw(st.permutations(range(12)))[:ranks]
    for name in ("hierarchical", "two-level"):
        program = build("all-reduce", name, ranks, 1000, groups=nodes)
        for extra in ({}, {"ports": 1}, {"oversubscription": 2.0}):
            assert 0 < walk(program, two_levels(3, 4, **extra), placement).makespan < 1


def test_a_cluster_too_small_is_refused():
    with pytest.raises(MeshwrightError, match="5 ranks do not fit on"):
        walk(build("all-reduce", "ring", 5, 10), uniform(4, 1e-6, 1e9))
    with pytest.raises(MeshwrightError, match="separate device"):
        walk(build("all-reduce", "ring", 2, 10), uniform(4, 1e-6, 1e9), placement=[1, 1])


def test_the_comparison_finds_the_closed_crossover():
    """Tree against ring on 8 ranks: 6α + 6nβ = 14α + 14/8·nβ at n = 8/4.25·α/β."""
    cluster = uniform(8, 1e-6, 1e9)
    sizes = [4.0**k * 32 for k in range(8)]
    found = compare("all-reduce", cluster, 8, sizes, algorithms=["tree", "ring"])
    assert found.best[0] == "tree"
    assert found.best[-1] == "ring"
    assert [(c.before, c.after) for c in found.crossovers] == [("tree", "ring")]
    assert found.crossovers[0].size == pytest.approx(8 / 4.25 * 1e-6 * 1e9, rel=1e-9)
    assert set(compare("all-gather", cluster, 8, [1024.0]).times) == set(ALGORITHMS["all-gather"])
    with pytest.raises(MeshwrightError, match="Fix: all-reduce"):
        compare("all-reduc", cluster, 8)


def test_the_best_number_of_segments_is_best():
    cluster = uniform(9, 1e-6, 1e9)
    link = cluster.levels[0].link
    for operation, name, size in itertools.product(["broadcast", "all-reduce"], ["chain", "double-tree"], [1e4, 1e6]):
        if name not in ALGORITHMS[operation]:
            continue
        k = best_segments(name, 9, size, link)
        time = {s: terms(operation, name, 9, segments=s).time(size, link) for s in (max(1, k - 2), k, k + 2)}
        assert time[k] == min(time.values())
