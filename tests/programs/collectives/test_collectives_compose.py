"""The relations between operations: composition and duality."""

import numpy as np
import pytest
from collective_cases import EVERY, drawn, expected, groups, inputs_of
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.describe.accelerator import Accelerator
from meshwright.describe.cluster import Cluster, Level, Link
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import ALGORITHMS, build, check, groups_of, in_sequence, reverse
from meshwright.programs.collectives.arrays import run_on_arrays
from meshwright.programs.collectives.compose import grid
from meshwright.programs.collectives.contract import DUAL
from meshwright.programs.collectives.double_tree import first_use
from meshwright.programs.collectives.program import split
from meshwright.programs.collectives.trees import rounds

SUMS = [  # whole = first + second, and the options with which both use the same chunks
    ("all-reduce", "reduce-scatter", "all-gather", {}, {}),
    ("all-reduce", "reduce", "broadcast", {"chunks": 3}, {"chunks": 3}),
    ("all-gather", "gather", "broadcast", {}, {"chunks": "ranks"}),
    ("reduce-scatter", "reduce", "scatter", {"chunks": "ranks"}, {}),
]


@pytest.mark.parametrize(("whole", "first", "second", "one", "two"), SUMS)
def test_operations_are_compositions_of_others(whole, first, second, one, two):
    """For all pairs of algorithms that use the same chunks."""
    tried = 0
    for ranks in (1, 2, 5, 8):
        for a in ALGORITHMS[first]:
            for b in ALGORITHMS[second]:
                if "chain" in (a, b) or "double-tree" in (a, b) or (a == "multi-ring") != (b == "multi-ring"):
                    continue
                options = [{k: ranks if v == "ranks" else v for k, v in given.items()} for given in (one, two)]
                program = in_sequence(
                    whole, build(first, a, ranks, 11, **options[0]), build(second, b, ranks, 11, **options[1])
                )
                check(program)
                inputs = inputs_of(whole, ranks, 11, seed=ranks)
                for got, want in zip(run_on_arrays(program, inputs), expected(whole, inputs, ranks, 11), strict=True):
                    np.testing.assert_array_equal(got, want)
                tried += 1
    assert tried >= 16


@pytest.mark.parametrize(("operation", "algorithm"), [pair for pair in EVERY if pair[0] in DUAL and pair[1] != "tree"])
def test_the_dual_is_a_correct_program_of_the_dual_operation(operation, algorithm):
    @given(st.data())
    @settings(max_examples=10, deadline=None)
    def run(data):
        program, _ = data.draw(drawn(operation, algorithm, most=17))
        dual = reverse(program)
        assert dual.operation == DUAL[operation]
        check(dual)
        assert reverse(dual) == program

    run()


def test_operations_without_a_dual_raise():
    with pytest.raises(MeshwrightError, match="all-reduce has no dual"):
        reverse(build("all-reduce", "ring", 4, 8))


def test_programs_on_different_chunks_do_not_compose():
    with pytest.raises(MeshwrightError, match="cannot be combined"):
        in_sequence("all-reduce", build("reduce", "binomial", 4, 8), build("broadcast", "chain", 4, 8))


def test_a_ring_matches_the_textbook():
    """Four ranks: the sum of chunk 0 starts at rank 1 and is complete at rank 0."""
    program = build("reduce-scatter", "ring", 4, 4)
    rows = zip(*(column.tolist() for column in program.moves), strict=True)
    assert [(s, a, b) for s, a, b, c, *_ in rows if c == 0] == [(0, 1, 2), (1, 2, 3), (2, 3, 0)]


def test_an_all_reduce_by_hand():
    for name in ALGORITHMS["all-reduce"]:
        outputs = run_on_arrays(build("all-reduce", name, 4, 4), [np.arange(4.0) + rank for rank in range(4)])
        assert all(out.tolist() == [6.0, 10.0, 14.0, 18.0] for out in outputs), name


@given(st.integers(0, 500), st.sets(st.integers(1, 12), min_size=1))
@settings(max_examples=25, deadline=None)
def test_a_grid_works_for_every_split(elements, parts):
    sizes, edges = grid(elements, parts)
    for p in parts:
        merged = [int(sizes[a:b].sum()) for a, b in zip(edges[p], edges[p][1:], strict=False)]
        assert merged == split(elements, p).tolist()


@given(st.data(), st.integers(1, 20))
@settings(max_examples=25, deadline=None)
def test_two_level_sends_the_minimum_between_nodes(data, ranks):
    """Each element of the buffer enters and leaves a node at most 2(N−1)/N times on average."""
    nodes = data.draw(groups(ranks))
    program = build("all-reduce", "two-level", ranks, 40 * ranks, groups=nodes)
    node = {rank: k for k, group in enumerate(nodes) for rank in group}
    crossing = sum(
        size
        for a, b, size in zip(program.moves.source, program.moves.target, program.moved, strict=True)
        if node[a] != node[b]
    )
    assert crossing == 2 * (len(nodes) - 1) * program.elements


def test_groups_come_from_the_cluster_and_the_placement():
    device = Accelerator(name="a", memory=1e9, memory_bandwidth=1e12, peak={"bf16": 1e12})
    link = Link(name="l", alpha=1e-6, bandwidth=1e9)
    levels = (Level(name="node", size=4, link=link), Level(name="net", size=3, link=link))
    cluster = Cluster(name="c", accelerator=device, levels=levels, gpus=10)
    assert groups_of(cluster, 10) == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9))
    assert groups_of(cluster, 5, [9, 0, 8, 4, 1]) == ((0, 2), (1, 4), (3,))
    with pytest.raises(MeshwrightError, match="10 devices"):
        groups_of(cluster, 11)
    with pytest.raises(MeshwrightError, match="do not partition the ranks"):
        build("all-reduce", "two-level", 4, 8, groups=[[0, 1], [1, 2, 3]])


def test_a_double_tree_fills_in_2_log_p_steps_without_congestion():
    for ranks in range(2, 130):
        assert 1 + max(first_use(ranks).values()) <= 2 * rounds(ranks)
        if ranks <= 33:
            table = build("broadcast", "double-tree", ranks, 64, segments=3).moves
            for end in (table.source, table.target):
                assert len({*zip(table.step.tolist(), end.tolist(), strict=True)}) == len(table.step)
