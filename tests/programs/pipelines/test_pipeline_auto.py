"""`auto` with memory limits: never slower than a handmade schedule that fits, correct, within memory, and deterministic."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines import SCHEDULES, Durations, auto, build, check, program_of, refusal, search, walk
from meshwright.programs.pipelines.improve import longest_path


@st.composite
def problems(draw):
    ranks, microbatches, virtual = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    stages = ranks * virtual
    times = [draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages)) for _ in range(3)]
    options = {
        "durations": Durations.of(stages, *times),
        "p2p": draw(st.sampled_from([0.0, 0.5])),
        "overlap": draw(st.booleans()),
        "limit": draw(st.sampled_from([None, 1.0, 2.0, float(ranks)])),
        "released_at_input": draw(st.sampled_from([0.0, 0.5])),
        "effort": 8000,
    }
    return ranks, microbatches, virtual, options


@given(problems())
@settings(max_examples=20, deadline=None)
def test_at_least_as_good_as_every_handmade_schedule_under_the_same_limit(problem):
    ranks, microbatches, virtual, options = problem
    found = search(ranks, microbatches, virtual, **options)
    check(found.program)
    limit = options.pop("limit")
    options.pop("effort")
    mine = walk(found.program, **options)
    assert limit is None or (mine.peak_memory <= limit + 1e-9).all()
    assert mine.makespan >= found.bound - 1e-9
    for name in SCHEDULES.having("paths"):
        builder = SCHEDULES[name].build
        if refusal(name, ranks, microbatches, virtual) is None:
            other = walk(builder(ranks, microbatches, virtual), **options)
            if limit is None or (other.peak_memory <= limit + 1e-9).all():
                assert mine.makespan <= other.makespan + 1e-9, name


def test_same_request_same_schedule():
    durations = Durations.of(4, [1, 2, 1, 3], [2, 1, 1, 2], [1, 1, 2, 1])
    assert auto(4, 6, durations=durations, limit=3.0) == auto(4, 6, durations=durations, limit=3.0)


def test_it_finds_the_optimum_of_a_small_case():
    """Two ranks, two micro-batches: all orders of both ranks, walked."""
    durations = Durations.of(2, [1.0, 2.0], [3.0, 1.0], [2.0, 2.0])
    pieces = [[(rank, kind, batch) for batch in range(2) for kind in "FIW"] for rank in range(2)]
    legal = [[order for order in itertools.permutations(rank) if _in_order(order)] for rank in pieces]
    best = np.inf
    for lists in itertools.product(*legal):
        try:
            best = min(best, walk(program_of("tried", lists, np.array([0, 1]), 2), durations).makespan)
        except MeshwrightError:  # a deadlock
            continue
    assert search(2, 2, durations=durations).walked.makespan == pytest.approx(best)


def _in_order(order):
    where = {(kind, batch): i for i, (_, kind, batch) in enumerate(order)}
    ordered = all(where["F", m] < where["I", m] < where["W", m] for m in range(2))
    return ordered and where["F", 0] < where["F", 1] and where["I", 0] < where["I", 1]


def test_memory_below_every_handmade_schedule():
    """Half of the activations of 1F1B: of the handmade schedules only the naive one fits, and auto is much faster."""
    found = search(8, 16, limit=4.0)
    assert {name for name, value in found.handmade.items() if value is not None} == {"naive"}
    assert found.walked.peak_memory.max() <= 4.0
    assert found.walked.makespan < found.handmade["naive"] / 3


def test_an_uneven_last_stage_is_compensated():
    times = [1.0] * 7 + [1.6]
    found = search(4, 8, 2, durations=Durations.of(8, times, times, [1.0] * 8), limit=4.0)
    assert found.walked.makespan < min(value for value in found.handmade.values() if value is not None)
    assert found.walked.makespan == pytest.approx(found.bound)


def test_span_objective_and_limits_of_one_and_two_pipelines():
    """The settings of Qi et al.: with memory for 2P micro-batches and no barrier there is no bubble."""
    one, two = (search(4, 12, limit=k * 4.0, objective="span").walked for k in (1, 2))
    assert two.longest_span == 36.0
    assert one.longest_span > two.longest_span


def test_an_impossible_memory_limit_is_refused():
    with pytest.raises(MeshwrightError) as caught:
        search(4, 8, limit=[2.0, 2.0, 0.5, 2.0])
    assert (caught.value.code, caught.value.exit_code) == ("MW-PIPE-030", 3)
    assert "rank 2" in str(caught.value)
    with pytest.raises(MeshwrightError) as caught:
        search(4, 8, objective="speed")
    assert caught.value.code == "MW-PIPE-031"


def test_longest_path_is_tight():
    """Lengths of the path's actions and transfers add up to the makespan."""
    for name in ("1f1b", "zb-h1", "interleaved"):
        program = build(name, 3, 5)
        walked = walk(program, p2p=0.25)
        path = longest_path(walked)[::-1]
        assert walked.start[path[0]] == 0
        assert walked.end[path[-1]] == walked.makespan
        gaps = walked.start[path[1:]] - walked.end[path[:-1]]
        assert set(np.round(gaps, 9).tolist()) <= {0.0, 0.25}
