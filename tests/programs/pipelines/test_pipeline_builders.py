"""Every builder, for all sizes it allows: correct, within its stated memory, with its stated placement."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines import SCHEDULES, build, check, in_flight, refusal, walk
from meshwright.programs.pipelines.looped_schedules import rounds
from meshwright.programs.pipelines.rules import name_of


@st.composite
def requests(draw):
    """A handmade schedule with a legal number of ranks, micro-batches and stages per rank."""
    name = draw(st.sampled_from(SCHEDULES.having("paths")))
    ranks, microbatches = draw(st.integers(1, 9)), draw(st.integers(1, 26))
    virtual = draw(st.integers(2, 4)) if SCHEDULES[name].most_virtual > 2 else SCHEDULES[name].virtual
    microbatches = max(microbatches, SCHEDULES[name].least_microbatches_per_rank * ranks)
    return name, ranks, microbatches, virtual


@given(requests())
@settings(max_examples=37, deadline=None)
def test_every_builder_is_correct_and_within_its_memory(request):
    name, ranks, microbatches, virtual = request
    program = check(build(name, ranks, microbatches, virtual))
    assert (program.ranks, program.stages, program.microbatches) == (ranks, ranks * virtual, microbatches)
    assert program.splits_backward == SCHEDULES[name].splits
    peak = walk(program).peak_in_flight
    assert (peak == program.promised).all()
    assert (peak == in_flight(name, ranks, microbatches, virtual, np.arange(ranks))).all()


def test_placements():
    assert build("interleaved", 3, 3, 2).rank_of.tolist() == [0, 1, 2, 0, 1, 2]
    for name in ("zbv", "dualpipev"):
        assert build(name, 3, 6).rank_of.tolist() == [0, 1, 2, 2, 1, 0]
    assert build("zbv", 3, 6).chunk_of.tolist() == [0, 0, 0, 1, 1, 1]


def test_action_lists_as_the_papers_draw_them():
    assert build("1f1b", 3, 4).lines() == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert build("zb-h1", 3, 4).lines() == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]
    assert build("interleaved", 2, 2, 2).lines() == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert build("dualpipev", 2, 4).lines()[1] == (
        "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3"
    )


def test_zb_h1_is_interleaved_zero_bubble_with_one_stage_per_rank():
    for ranks, microbatches in ((1, 1), (4, 2), (4, 9)):
        assert build("zb-h1", ranks, microbatches) == build("interleaved-zb", ranks, microbatches, 1)


def test_rounds_cover_all_micro_batches_and_are_never_narrower_than_the_pipeline():
    for ranks in range(1, 9):
        for microbatches in range(1, 40):
            sizes = rounds(ranks, microbatches)
            assert sizes.sum() == microbatches
            assert sizes.min() >= min(ranks, microbatches)


def test_names_and_aliases():
    aliases = [alias for schedule in SCHEDULES.values() for alias in schedule.aliases]
    assert len({*aliases, *SCHEDULES}) == len(aliases) + len(SCHEDULES)
    assert name_of("ZB_1P") == "zb-h1"
    with pytest.raises(MeshwrightError) as caught:
        build("gpip", 2, 2)
    assert caught.value.code == "MW-PIPE-002"
    assert "Fix: gpipe" in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "virtual", "code", "says"),
    [
        ("1f1b", 4, 8, 2, "MW-PIPE-004", "does not take 2 stages per rank"),
        ("interleaved", 4, 8, 1, "MW-PIPE-004", "Fix: 1f1b"),
        ("zbv", 4, 8, 3, "MW-PIPE-004", "Valid: 2"),
        ("dualpipev", 4, 7, 2, "MW-PIPE-005", "needs 8 micro-batches, not 7"),
        ("gpipe", 0, 8, 1, "MW-PIPE-003", "ranks = 0"),
        ("gpipe", 4, 2.5, 1, "MW-PIPE-003", "microbatches = 2.5"),
        ("gpipe", 10**6, 10**6, 1, "MW-PIPE-006", "too large"),
    ],
)
def test_illegal_arguments_are_refused_with_the_reason(schedule, ranks, microbatches, virtual, code, says):
    with pytest.raises(MeshwrightError) as caught:
        build(schedule, ranks, microbatches, virtual)
    assert caught.value.code == code
    assert says in str(caught.value)
    assert refusal(schedule, ranks, microbatches, virtual) is not None


def test_numpy_integers_are_accepted():
    assert len(build("gpipe", np.int64(2), np.int64(3), np.int64(1))) == 12
