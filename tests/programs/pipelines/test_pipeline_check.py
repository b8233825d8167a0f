"""A broken program is refused, and the error names the place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines import build, check, looped, program_of


def lists(name, ranks, microbatches, virtual=None):
    program = build(name, ranks, microbatches, virtual)
    return program, [program.actions(r) for r in range(ranks)]


def error(program, changed, promised=None):
    with pytest.raises(MeshwrightError) as caught:
        check(program_of("broken", changed, program.rank_of, program.microbatches, promised))
    return caught.value


def test_a_missing_action():
    program, ranks = lists("1f1b", 2, 3)
    del ranks[1][2]  # 1F1
    found = error(program, ranks)
    assert found.code == "MW-PIPE-011"
    assert "rank 1 never runs 1F1, the forward of stage 1, micro-batch 1" in str(found)


def test_a_missing_weight_half_and_a_missing_input_half():
    for position, says in ((4, "never runs 0W0"), (3, "never runs 0B0")):
        program, ranks = lists("zb-h1", 3, 3)
        del ranks[0][position]
        assert says in str(error(program, ranks))
    program, ranks = lists("zb-h1", 3, 3)
    ranks[0][3] = (0, "B", 0)
    assert "rank 0 never runs 0I0" in str(error(program, ranks))
    ranks[0].insert(3, (0, "I", 0))
    found = error(program, ranks)
    assert "rank 0, position 3 (0I0, backward of inputs of stage 0, micro-batch 0) repeats" in str(found)


def test_an_action_twice():
    program, ranks = lists("gpipe", 2, 2)
    ranks[0].append((0, "F", 1))
    found = error(program, ranks)
    assert found.code == "MW-PIPE-011"
    assert "rank 0, position 1 (0F1" in str(found)
    assert "rank 0, position 4 (0F1" in str(found)


def test_an_action_on_the_wrong_rank_or_of_a_missing_stage():
    program, ranks = lists("gpipe", 2, 2)
    ranks[0][0] = (1, "F", 0)
    assert "rank 0, position 0 (1F0" in str(error(program, ranks))
    for stage, batch in ((5, 0), (-1, 0), (0, 2), (0, -1)):
        program, ranks = lists("gpipe", 2, 2)
        ranks[0][0] = (stage, "F", batch)
        found = error(program, ranks)
        assert found.code == "MW-PIPE-010"
        assert "does not exist" in str(found)
    with pytest.raises(MeshwrightError) as caught:
        program_of("broken", [[(0, "X", 0)]], looped(1, 1), 1)
    assert caught.value.code == "MW-PIPE-001"


def test_a_backward_before_its_forward_and_weights_before_inputs():
    program, ranks = lists("1f1b", 2, 2)
    ranks[1][0], ranks[1][1] = ranks[1][1], ranks[1][0]
    found = error(program, ranks)
    assert found.code == "MW-PIPE-012"
    assert "rank 1, position 0 (1B0" in str(found)
    assert "is before its forward" in str(found)
    program, ranks = lists("zb-h1", 2, 2)
    ranks[0][2], ranks[0][3] = ranks[0][3], ranks[0][2]
    found = error(program, ranks)
    assert found.code == "MW-PIPE-012"
    assert "0W0" in str(found)


def test_a_deadlock_names_the_circle():
    program, ranks = lists("1f1b", 2, 2)
    ranks[0] = [(0, "F", 0), (0, "B", 0), (0, "F", 1), (0, "B", 1)]
    ranks[1] = [(1, "F", 0), (1, "F", 1), (1, "B", 0), (1, "B", 1)]
    found = error(program, ranks)
    assert found.code == "MW-PIPE-013"
    assert "rank 0, position 1 (0B0" in str(found)
    assert "waits for 1B0" in str(found)
    assert "rank 1, position 1 (1F1" in str(found)
    assert "waits for 0F1" in str(found)


def test_memory_above_the_stated_limit():
    program, ranks = lists("gpipe", 2, 4)
    found = error(program, ranks, promised=np.array([4, 2]))
    assert found.code == "MW-PIPE-014"
    assert "rank 1, position 2 (1F2" in str(found)
    assert "allows at most 2" in str(found)


def test_a_joined_pair_is_a_forward_followed_by_a_backward():
    program, ranks = lists("1f1b", 2, 2)
    fine = program_of("joined", ranks, program.rank_of, 2, joined=[[], [0]])
    assert check(fine).lines()[1] == "(1F0;1B0) 1F1 1B1"
    with pytest.raises(MeshwrightError) as caught:
        check(program_of("broken", ranks, program.rank_of, 2, joined=[[0], []]))
    assert "rank 0, position 0 (0F0" in str(caught.value)


def test_stages_must_cover_the_ranks():
    _, ranks = lists("gpipe", 2, 2)
    with pytest.raises(MeshwrightError) as caught:
        check(program_of("broken", [ranks[0], []], np.array([0]), 2))
    assert caught.value.code == "MW-PIPE-010"


@given(st.sampled_from(["1f1b", "zb-h1", "interleaved", "zbv"]), st.data())
@settings(max_examples=40, deadline=None)
def test_dropping_doubling_or_moving_any_action_never_passes(name, data):
    program, ranks = lists(name, 3, 4)
    rank = data.draw(st.integers(0, 2))
    at = data.draw(st.integers(0, len(ranks[rank]) - 1))
    match data.draw(st.sampled_from(["drop", "double", "elsewhere"])):
        case "drop":
            del ranks[rank][at]
        case "double":
            ranks[rank].insert(data.draw(st.integers(0, len(ranks[rank]))), ranks[rank][at])
        case "elsewhere":
            ranks[(rank + 1) % 3].append(ranks[rank].pop(at))
    assert error(program, ranks).code in ("MW-PIPE-010", "MW-PIPE-011")
