"""Every builder passes the check at any size, its results agree with numpy, and a program with one broken step is refused."""

import numpy as np
import pytest
from collective_cases import EVERY, drawn, expected, inputs_of
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import build, check
from meshwright.programs.collectives.arrays import run_on_arrays
from meshwright.programs.collectives.contract import collective
from meshwright.programs.collectives.program import joined, moves, rows, split, take

# these hand ranks what their last broadcast hands them again, so a move more or less may do no harm
WASTEFUL = {("all-reduce", "hierarchical"), ("all-gather", "tree"), ("all-reduce", "nvls"), ("all-reduce", "sharp")}


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
def test_every_algorithm_is_checked_and_agrees_with_numpy(operation, algorithm):
    @given(st.data(), st.integers(0, 2**32 - 1))
    @settings(max_examples=6, deadline=None)
    def run(data, seed):
        program, options = data.draw(drawn(operation, algorithm))
        check(program)
        agrees_with_numpy(program, options, seed)

    run()


def agrees_with_numpy(program, options, seed):
    inputs = inputs_of(program.operation, program.ranks, program.elements, seed)
    root = options.get("root", 0)
    target = options.get("target", (root + 1) % program.ranks)
    wanted = expected(program.operation, inputs, program.ranks, program.elements, root, target)
    for got, want in zip(run_on_arrays(program, inputs), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def passes_check(program):
    try:
        return check(program) is program
    except MeshwrightError:
        return False


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
def test_every_number_of_ranks(operation, algorithm):
    for ranks in range(1, 34):
        check(build(operation, algorithm, ranks, 2 * ranks + 1))


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
def test_a_broken_table_is_refused(operation, algorithm):
    """Drop, repeat or change one move, on both its ranks. If the result still passes (a redirected move may give another correct
    program), it must agree with numpy."""

    @given(st.data())
    @settings(max_examples=6, deadline=None)
    def run(data):
        program, options = data.draw(drawn(operation, algorithm, most=9, fewest=2))
        table = program.moves
        if len(table.step) == 0:
            return
        k = data.draw(st.integers(0, len(table.step) - 1))
        index = np.arange(len(table.step))
        how = data.draw(st.sampled_from(["drop", "repeat", "later", "redirect", "flip"]))
        if how == "drop":
            broken = take(table, index[index != k])
        elif how == "repeat":
            broken = take(table, np.sort(np.append(index, k)))
        elif how == "later":
            again = take(table, np.array([k]))
            broken = joined([table, again._replace(step=np.array([program.steps], dtype=np.int32))])
        elif how == "redirect":
            target = table.target.copy()
            others = [r for r in range(program.ranks) if r not in (table.source[k], target[k])]
            if not others:
                return
            target[k] = data.draw(st.sampled_from(others))
            broken = joined([table._replace(target=target)])
        else:
            broken = table._replace(reduce=np.where(index == k, ~table.reduce, table.reduce))
        if (how == "redirect" or (operation, algorithm) in WASTEFUL) and passes_check(program.but(moves=broken)):
            agrees_with_numpy(program.but(moves=broken), options, seed=1)
            return
        with pytest.raises(MeshwrightError) as refused:
            check(program.but(moves=broken))
        assert all(word in str(refused.value) for word in ("rank", "step", "chunk"))

    run()


def test_sending_a_chunk_before_it_is_written_is_refused():
    with pytest.raises(MeshwrightError, match="rank 1, step 0: sends chunk 0 to rank 2 before it was written"):
        check(collective("broadcast", 3, 4, rows([(0, 1, 2, 0, 1), (1, 0, 1, 0, 1)])))


def test_a_contribution_must_not_count_twice():
    table = joined([rows([(0, 1, 0, 0, 1), (1, 0, 1, 0, 1), (2, 1, 0, 0, 1)], reduce=True)])
    with pytest.raises(
        MeshwrightError, match="rank 1, step 1: adds chunk 0 from rank 0, though it already holds the contribution of"
    ):
        check(collective("reduce", 2, 1, table))


def test_a_missing_contribution_is_named():
    table = rows([(0, 1, 0, 0, 1)], reduce=True)
    with pytest.raises(MeshwrightError, match=r"rank 0, after step 0: chunk 0 .* lacks the contribution of rank 2"):
        check(collective("reduce", 3, 1, table))


def test_races_are_refused():
    twice = rows([(0, 0, 2, 0, 1), (0, 1, 2, 0, 1)], reduce=True)
    with pytest.raises(MeshwrightError, match="rank 2, step 0: has chunk 0 written twice"):
        check(collective("reduce", 3, 1, twice, root=2))
    swap = rows([(0, 0, 1, 0, 1), (0, 1, 0, 0, 1)])
    with pytest.raises(MeshwrightError, match="step 0: has chunk 0 overwritten in the step that sends it"):
        check(collective("all-reduce", 2, 1, swap))


def test_partners_that_add_the_same_pair_are_checked_by_sets():
    """Recursive doubling on full buffers: each value is an operand twice, so counting is not sufficient."""
    table = moves([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3] * 2, [1, 0, 3, 2, 2, 3, 0, 1], 0, reduce=True)
    check(collective("all-reduce", 4, 5, table))
    wrong = moves([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3] * 2, [1, 0, 3, 2, 1, 0, 3, 2], 0, reduce=True)
    with pytest.raises(MeshwrightError, match=r"step 1: adds chunk 0 .* already"):
        check(collective("all-reduce", 4, 5, wrong))


def test_a_program_must_implement_its_operation():
    program = build("all-gather", "ring", 4, 8)
    with pytest.raises(MeshwrightError, match="does not start and end as all-reduce does"):
        check(program.but(operation="all-reduce"))
    with pytest.raises(MeshwrightError, match="does not start and end"):
        check(build("all-reduce", "ring", 4, 8).but(sizes=np.array([2, 2, 2, 1])))


def test_the_check_does_not_depend_on_the_number_of_slots(monkeypatch):
    programs = [build("all-to-all", "bruck", 7, 20), build("all-reduce", "ring", 5, 9)]
    monkeypatch.setattr("meshwright.programs.collectives.checker.DENSE_SLOTS", 1)
    for program in programs:
        check(program)
        with pytest.raises(MeshwrightError):
            check(program.but(moves=take(program.moves, np.arange(1, len(program.moves.step)))))


@given(st.integers(0, 10**15), st.integers(1, 5000))
@settings(max_examples=25, deadline=None)
def test_chunks_are_whole_elements(elements, parts):
    sizes = split(elements, parts)
    assert sizes.sum() == elements
    assert sizes.max() - sizes.min() <= 1
    c = parts // 2
    assert sizes[:c].sum() == c * elements // parts
