"""Programs as lists by rank, and back; deadlocks."""

from __future__ import annotations

import pytest
from collective_cases import EVERY, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.describe.cluster import uniform
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import ALGORITHMS, accepts, build, check, walk
from meshwright.programs.collectives.lists import Instruction, assemble, instructions, rank_lists


def test_a_rank_reads_its_list():
    lines = [str(i) for i in instructions(build("all-reduce", "ring", 2, 4), rank=0)]
    assert lines == [
        "step 0: send chunk 1 to rank 1",
        "step 0: reduce chunk 0 from rank 1",
        "step 1: send chunk 0 to rank 1",
        "step 1: receive chunk 1 from rank 1",
    ]
    assert str(instructions(build("scatter", "binomial", 4, 8), rank=0)[0]) == "step 0: send chunks 2 to 3 to rank 2"


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
def test_lists_reproduce_the_program(operation, algorithm):
    @given(st.data())
    @settings(max_examples=5, deadline=None)
    def run(data):
        program, _ = data.draw(drawn(operation, algorithm, most=9))
        target = int(program.ends[0]) // program.chunks if operation == "point-to-point" else 0
        again = assemble(
            operation,
            rank_lists(program),
            program.elements,
            sizes=program.sizes,
            root=program.root,
            target=target,
            switches=program.switches,
        )
        assert again == program

    run()


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_steps_with_different_numbers_are_aligned(data):
    """Each rank may number its steps freely, as long as the numbers increase."""
    program, _ = data.draw(
        drawn("all-reduce", data.draw(st.sampled_from(sorted(ALGORITHMS["all-reduce"]))), most=8, fewest=2)
    )
    lists = []
    for own in rank_lists(program):
        steps = sorted({i.step for i in own})
        gaps = data.draw(st.lists(st.integers(1, 5), min_size=len(steps), max_size=len(steps)))
        renamed = {step: sum(gaps[: k + 1]) for k, step in enumerate(steps)}
        lists.append([i._replace(step=renamed[i.step]) for i in own])
    again = assemble("all-reduce", lists, program.elements, sizes=program.sizes, switches=program.switches)
    check(again)
    cluster = uniform(program.ranks, 1e-6, 1e9)
    assert walk(again, cluster).makespan == walk(program, cluster).makespan


def test_ranks_that_all_send_first_deadlock():
    lists = [
        [Instruction(0, "send", 1 - rank, rank), Instruction(1, "receive", 1 - rank, 1 - rank)] for rank in range(2)
    ]
    with pytest.raises(MeshwrightError, match="rank 0, step 0: send chunk 0 to rank 1: waits forever") as refused:
        assemble("all-gather", lists, 2)
    assert refused.value.code == "MW-PROG-019"
    together = [[i._replace(step=0) for i in own] for own in lists]
    check(assemble("all-gather", together, 2))
    in_turn = [lists[0], [i._replace(step=1 - i.step) for i in lists[1]]]
    check(assemble("all-gather", in_turn, 2))


def test_a_send_without_a_receive_is_named():
    with pytest.raises(MeshwrightError, match="rank 1, step 4: send chunk 0 to rank 0: waits forever"):
        assemble("reduce", [[], [Instruction(4, "send", 0, 0)]], 2)
    with pytest.raises(MeshwrightError, match="rank 0, step 2: reduce chunk 0 from rank 1: waits forever"):
        assemble("reduce", [[Instruction(2, "reduce", 1, 0)], []], 2)
    with pytest.raises(MeshwrightError, match="there is no rank 7"):
        assemble("reduce", [[Instruction(2, "reduce", 7, 0)], []], 2)
    with pytest.raises(MeshwrightError, match=r"instruction 'recieve' is not known.*Fix: receive"):
        assemble("reduce", [[Instruction(2, "recieve", 1, 0)], []], 2)


def test_bad_arguments_give_clear_errors():
    for arguments, words in [
        (("all-reduce", "rings", 4, 8), "Fix: ring"),
        (("allreduce", "ring", 4, 8), "Fix: all-reduce"),
        (("all-reduce", "ring", 0, 8), "ranks = 0"),
        (("all-reduce", "ring", 10**9, 8), "ranks = 1000000000"),
        (("all-reduce", "ring", 4, -1), "elements = -1"),
        (("all-reduce", "ring", 4, 2.5), "elements = 2.5"),
    ]:
        with pytest.raises(MeshwrightError, match=words):
            build(*arguments)
    with pytest.raises(MeshwrightError, match="option of ring all-reduce 'root'"):
        build("all-reduce", "ring", 4, 8, root=1)
    with pytest.raises(MeshwrightError, match="root = 4"):
        build("broadcast", "naive", 4, 8, root=4)
    assert accepts("broadcast", "chain") == ["root", "segments"]
