"""Closed forms compared with the walk, where they are exact and where they are approximations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.programs.pipelines import (
    SCHEDULES,
    Durations,
    bubble_fraction,
    bubble_overhead,
    build,
    in_flight,
    makespan,
    walk,
)

TIMES = st.floats(0.4, 1.6)


@st.composite
def settings_of(draw, names=()):
    name = draw(st.sampled_from(names or SCHEDULES.having("paths")))
    ranks, microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    virtual = draw(st.integers(2, 4)) if SCHEDULES[name].most_virtual > 2 else SCHEDULES[name].virtual
    return name, ranks, max(microbatches, SCHEDULES[name].least_microbatches_per_rank * ranks), virtual


def no_closed_form_beyond_equal_times(name, ranks, microbatches):
    """The two exceptions in the docstring of `formulas`."""
    return (name == "interleaved-zb" and microbatches < ranks) or (
        name == "zbv" and ranks < microbatches < 2 * ranks - 1
    )


def walked(name, ranks, microbatches, virtual, times, **transfers):
    return walk(build(name, ranks, microbatches, virtual), Durations.of(ranks * virtual, *times), **transfers)


@given(settings_of(), TIMES)
@settings(max_examples=30, deadline=None)
def test_exact_on_equal_times(setting, time):
    found = walked(*setting, (time, time, time))
    assert makespan(*setting, time, time, time) == pytest.approx(found.makespan, rel=1e-12)
    assert bubble_overhead(*setting, forward=time, input=time, weight=time) == pytest.approx(
        found.bubble_overhead, abs=1e-9
    )
    assert bubble_fraction(*setting) == pytest.approx(found.bubble_fraction, abs=1e-9)


@given(settings_of(), st.tuples(TIMES, TIMES, TIMES))
@settings(max_examples=50, deadline=None)
def test_exact_on_any_times_of_equal_stages(setting, times):
    name, ranks, microbatches, _ = setting
    close = 0.15 if no_closed_form_beyond_equal_times(name, ranks, microbatches) else 1e-12
    assert makespan(*setting, *times) == pytest.approx(walked(*setting, times).makespan, rel=close)


@given(settings_of(), st.tuples(TIMES, TIMES, TIMES), st.floats(0, 0.01))
@settings(max_examples=37, deadline=None)
def test_small_overlapped_transfers(setting, times, p2p):
    name, ranks, microbatches, _ = setting
    close = 0.15 if no_closed_form_beyond_equal_times(name, ranks, microbatches) else 2e-3
    found = walked(*setting, times, p2p=p2p)
    assert makespan(*setting, *times, p2p) == pytest.approx(found.makespan, rel=close)


@given(settings_of(("naive", "gpipe", "1f1b")), st.tuples(TIMES, TIMES, TIMES), st.floats(0, 1.0), st.booleans())
@settings(max_examples=50, deadline=None)
def test_transfers_of_any_length_are_exact_for_one_stage_per_rank(setting, times, p2p, overlap):
    found = walked(*setting, times, p2p=p2p, overlap=overlap)
    assert makespan(*setting, *times, p2p, overlap) == pytest.approx(found.makespan, rel=1e-12)


@pytest.mark.parametrize(("name", "virtual"), [("zb-h1", 1), ("interleaved-zb", 2)])
@pytest.mark.parametrize("p2p", [0.5, 1.0, 3.0])
def test_transfers_longer_than_w_bound_a_zero_bubble_schedule(name, virtual, p2p):
    times = (1.0, 1.0, 0.3)
    found = float(makespan(name, 4, 32, virtual, *times, p2p))
    assert found == pytest.approx(walked(name, 4, 32, virtual, times, p2p=p2p).makespan, rel=0.05)


@given(settings_of(), st.tuples(TIMES, TIMES, TIMES), st.floats(0, 0.1))
@settings(max_examples=30, deadline=None)
def test_blocking_transfers_are_estimated_from_above_and_closely(setting, times, p2p):
    name, ranks, microbatches, _ = setting
    if no_closed_form_beyond_equal_times(name, ranks, microbatches):
        return
    estimate = makespan(*setting, *times, p2p, False)
    found = walked(*setting, times, p2p=p2p, overlap=False).makespan
    assert found * (1 - 1e-9) <= estimate <= found * 1.15


def test_textbook_values():
    assert bubble_fraction("gpipe", 4, 8) == pytest.approx(3 / 11)
    assert bubble_overhead("1f1b", 4, 8) == pytest.approx(3 / 8)
    assert bubble_fraction("interleaved", 4, 8, 2) == pytest.approx(3 / 19)
    assert bubble_overhead("zb-h1", 4, 8) == pytest.approx(3 / 24)
    assert bubble_fraction("naive", 4, 5) == pytest.approx(3 / 4)
    # Qi et al. 2024, Table 1 with their T_B = input, T_W = weight, in the regime W < F and W < I
    assert makespan("zb-h1", 4, 8, 1, 1.0, 1.2, 0.8) == pytest.approx(8 * 3.0 + 3 * (1.0 + 1.2 - 0.8))
    assert makespan("zb-h2", 4, 8, 1, 1.0, 1.8, 0.4) == pytest.approx(8 * 3.2 + 3 * (1.0 + 1.8 - 2 * 0.4))


def test_arrays_over_plans():
    ranks, microbatches = np.array([1, 2, 4, 8])[:, None], np.array([8, 16, 64])[None, :]
    for name in SCHEDULES.having("paths"):
        virtual = np.full((4, 3), SCHEDULES[name].virtual)
        many = microbatches if name != "dualpipev" else microbatches * 2
        overhead = bubble_overhead(name, ranks, many, virtual, input=1.1, weight=0.9, p2p=np.zeros((4, 3)))
        peak = in_flight(name, ranks, many, virtual, ranks - 1)
        for i, j in np.ndindex(4, 3):
            one = name, int(ranks[i, 0]), int(np.broadcast_to(many, (4, 3))[i, j]), SCHEDULES[name].virtual
            assert overhead[i, j] == bubble_overhead(*one, input=1.1, weight=0.9)
            assert peak[i, j] == in_flight(*one, int(ranks[i, 0]) - 1)


def test_a_searched_schedule_is_costed_as_the_best_handmade_one():
    for formula in (makespan, in_flight):
        assert formula("auto", 4, 8) == formula("zb-h2", 4, 8)
