"""The walk: equal to the textbook fractions and to a plain, slow simulation of the same rules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines import SCHEDULES, Durations, build, program_of, walk, walked_makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (4, 8), (4, 2), (5, 5), (8, 32)])
def test_textbook_bubble_fraction_and_overhead(name, ranks, microbatches):
    walked = walk(build(name, ranks, microbatches), Durations.of(ranks, 1.0, 1.5, 0.5))
    assert walked.bubble_fraction == pytest.approx((ranks - 1) / (microbatches + ranks - 1), rel=1e-12)
    assert walked.bubble_overhead == pytest.approx((ranks - 1) / microbatches, rel=1e-12)
    assert walked.bubble_fraction_by_rank == pytest.approx([walked.bubble_fraction] * ranks)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "virtual"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (4, 10, 3), (8, 64, 2)]
)
def test_interleaved_bubble_fraction(ranks, microbatches, virtual):
    walked = walk(build("interleaved", ranks, microbatches, virtual))
    assert walked.bubble_fraction == pytest.approx((ranks - 1) / (microbatches * virtual + ranks - 1), rel=1e-12)


def test_a_naive_pipeline_is_busy_for_one_pth_of_the_time():
    walked = walk(build("naive", 4, 6))
    assert walked.bubble_fraction == pytest.approx(3 / 4)
    assert walked.peak_in_flight.tolist() == [1, 1, 1, 1]


def test_micro_batches_in_flight():
    assert walk(build("gpipe", 4, 8)).peak_in_flight.tolist() == [8, 8, 8, 8]
    assert walk(build("1f1b", 4, 8)).peak_in_flight.tolist() == [4, 3, 2, 1]
    assert walk(build("1f1b", 4, 2)).peak_in_flight.tolist() == [2, 2, 2, 1]
    assert walk(build("zbv", 4, 8)).peak_memory.tolist() == [4.0, 4.0, 4.0, 4.0]
    assert walk(build("interleaved", 16, 48, 3)).peak_memory[0] == 21.0  # no rounding in thirds


def test_zero_bubble_needs_no_barrier_between_steps():
    """ZB-H2 and ZBV have no idle time inside the span of a rank, but the same makespan as ZB-H1."""
    h1, h2, v = (walk(build(name, 4, 12)) for name in ("zb-h1", "zb-h2", "zbv"))
    assert h1.makespan == h2.makespan == 3 * 12 + 3
    assert h2.longest_span == 3 * 12
    assert (v.longest_span, v.makespan) == (6 * 12, 6 * 12 + 3)
    assert h1.longest_span == h1.makespan


def reference(program, durations, p2p, overlap):
    """Start times by repeated application of the rules until nothing changes, independent of the walk."""
    table = {k: getattr(durations, n) for k, n in zip("FBIW", ("forward", "backward", "input", "weight"), strict=True)}
    lists = [program.actions(r) for r in range(program.ranks)]
    home, last = program.rank_of.tolist(), program.stages - 1
    start: dict = {}

    def end(stage, kinds, batch):
        for kind in kinds:
            if (stage, kind, batch) in start:
                return start[stage, kind, batch] + table[kind][stage]
        return None

    def hop(a, b):
        return p2p[min(a, b)] if min(a, b) >= 0 and max(a, b) <= last and home[a] != home[b] else 0.0

    changed = True
    while changed:
        changed = False
        for rank in range(program.ranks):
            free, sending = 0.0, 0.0
            for action in lists[rank]:
                stage, kind, batch = action
                if kind == "F":
                    made, lag = (end(stage - 1, "F", batch), hop(stage - 1, stage)) if stage else (0.0, 0.0)
                elif kind == "W":
                    made, lag = end(stage, "I", batch), 0.0
                else:
                    after = stage < last
                    made = end(stage + 1, "BI", batch) if after else end(stage, "F", batch)
                    lag = hop(stage, stage + 1) if after else 0.0
                if made is None:
                    break
                begin = max(free, made + lag) if overlap else max(free + sending, max(free, made) + lag)
                changed |= start.get((stage, kind, batch)) != begin
                start[stage, kind, batch] = begin
                free = begin + table[kind][stage]
                sending = {"F": hop(stage, stage + 1), "W": 0.0}.get(kind, hop(stage - 1, stage))
    return start


@st.composite
def walks(draw):
    name = draw(st.sampled_from(SCHEDULES.having("paths")))
    ranks = draw(st.integers(1, 4))
    microbatches = draw(st.integers(2 * ranks, 2 * ranks + 4)) if name == "dualpipev" else draw(st.integers(1, 7))
    program = build(name, ranks, microbatches)
    numbers = st.lists(st.integers(0, 9), min_size=program.stages, max_size=program.stages)
    times = [np.array(draw(numbers), float) for _ in range(4)]
    return program, Durations.of(program.stages, *times), np.array(draw(numbers)[1:], float), draw(st.booleans())


@given(walks())
@settings(max_examples=30, deadline=None)
def test_walk_equals_a_plain_simulation(case):
    program, durations, p2p, overlap = case
    walked = walk(program, durations, p2p=p2p, overlap=overlap)
    expected = reference(program, durations, p2p, overlap)
    found = {program.action(i): walked.start[i] for i in range(len(program))}
    assert found == expected
    assert walked_makespan(program, durations, p2p=p2p, overlap=overlap) == walked.makespan


def test_blocking_transfers_stop_compute_and_run_in_both_directions_together():
    """Two ranks, two micro-batches, every action 1 s, transfers 1 s: by hand."""
    program = build("1f1b", 2, 2)
    walked = walk(program, Durations.of(2, 1, 0.5, 0.5), p2p=1.0, overlap=False)
    by_rank = {str(program.action(i)): walked.start[i] for i in range(len(program))}
    assert by_rank == {"0F0": 0, "0F1": 2, "0B0": 5, "0B1": 8, "1F0": 2, "1B0": 3, "1F1": 5, "1B1": 6}
    assert walk(program, Durations.of(2, 1, 0.5, 0.5), p2p=1.0).makespan < walked.makespan


def test_stages_on_one_rank_send_no_messages():
    assert walk(build("interleaved", 1, 3, 2), p2p=100.0).makespan == walk(build("interleaved", 1, 3, 2)).makespan
    v, loop = build("zbv", 2, 4), build("interleaved-zb", 2, 4)
    assert walk(v, p2p=[0.0, 50.0, 0.0]).makespan == walk(v).makespan  # stages 1 and 2 share rank 1
    assert walk(loop, p2p=[0.0, 50.0, 0.0]).makespan > walk(loop).makespan


def test_joined_pairs_overlap_by_the_hidden_share():
    program = build("dualpipev", 2, 8)
    separate, none, half, full = (walk(program, hidden=h) for h in (None, 0.0, 0.5, 1.0))
    assert separate.makespan <= none.makespan
    assert none.makespan > half.makespan > full.makespan
    pairs = np.flatnonzero(program.joined)
    assert (full.start[pairs] == full.start[pairs + 1]).all()
    assert (full.end[pairs] - full.start[pairs] == 2.0).all()  # B is 2, F is 1 and disappears
    assert full.busy.tolist() == (separate.busy - np.add.reduceat(program.joined, program.first[:-1])).tolist()


def test_pairs_that_cannot_be_joined_are_refused():
    """On the last stage a backward needs the forward with which it is joined."""
    naive = build("naive", 2, 2)
    program = program_of("joined", [naive.actions(r) for r in range(2)], naive.rank_of, 2, joined=[[], [0]])
    assert walk(program).makespan == walk(naive).makespan
    with pytest.raises(MeshwrightError) as caught:
        walk(program, hidden=0.5)
    assert caught.value.code == "MW-PIPE-013"


def test_weighed_memory_and_the_share_released_at_input():
    program = build("zb-h1", 3, 6)
    kept = walk(program, activation=[1.0, 2.0, 4.0]).peak_memory
    assert kept.tolist() == [3.0, 6.0, 12.0]
    released = walk(program, activation=[1.0, 2.0, 4.0], released_at_input=1.0).peak_memory
    assert released.tolist() == [3.0, 4.0, 4.0]  # 1F1B's: P−r micro-batches
    half = walk(program, activation=[1.0, 2.0, 4.0], released_at_input=0.5).peak_memory
    assert (released <= half).all()
    assert (half <= kept).all()


def test_uneven_stages_by_hand():
    walked = walk(build("1f1b", 2, 2), Durations.of(2, [1, 3], [2, 1], [0, 1], backward=[2, 1]))
    assert walked.start.tolist() == [0, 1, 5, 9, 1, 4, 5, 8]
    assert walked.makespan == 11
    assert walked.busy.tolist() == [6, 8]
    assert walked.idle.tolist() == [5, 3]
    assert walked.bubble_overhead == pytest.approx(8 / 14)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"durations": Durations.of(3)}, "MW-PIPE-020"),
        ({"p2p": [1.0, 2.0, 3.0]}, "MW-PIPE-020"),
        ({"p2p": -1.0}, "MW-PIPE-021"),
        ({"activation": [[1.0]]}, "MW-PIPE-020"),
        ({"released_at_input": float("nan")}, "MW-PIPE-021"),
    ],
)
def test_bad_numbers_are_refused(arguments, code):
    with pytest.raises(MeshwrightError) as caught:
        walk(build("gpipe", 2, 2), **arguments)
    assert caught.value.code == code
    with pytest.raises(MeshwrightError):
        Durations.of(2, forward=[1.0, 2.0, 3.0])
