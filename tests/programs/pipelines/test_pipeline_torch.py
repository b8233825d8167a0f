"""torch's action lists compared with ours: equal action for action, differences explained."""

import pytest

from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines import build

visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_lines(schedule, ranks, microbatches, virtual):
    """torch's lists in our notation. Dropped: None (a drawn pause) and REDUCE_GRAD (the data-parallel reduction,
    which is no action of the pipeline). torch's OVERLAP_F_B is our joined pair."""
    lists = visualizer.get_schedule_ops(TORCH_NAMES[schedule], ranks, microbatches, num_stages_per_rank=virtual)

    def word(action):
        if action.sub_actions:
            return "(" + ";".join(word(part) for part in action.sub_actions) + ")"
        return f"{action.stage_index}{LETTERS[action.computation_type.name]}{action.microbatch_index}"

    return [
        " ".join(word(a) for a in rank if a is not None and a.computation_type.name != "REDUCE_GRAD") for rank in lists
    ]


CASES = [(1, 2), (2, 4), (2, 8), (3, 6), (3, 9), (4, 8), (4, 10), (4, 16), (5, 12)]


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "looped-bfs", "interleaved-zb", "zbv", "dualpipev"])
def test_equal_action_for_action(schedule):
    looped = schedule in ("interleaved", "looped-bfs", "interleaved-zb")
    for virtual in (2, 3) if looped else (None,):
        for ranks, microbatches in CASES:
            expected = torch_lines(schedule, ranks, microbatches, virtual)
            assert build(schedule, ranks, microbatches, virtual).lines() == expected, (ranks, microbatches, virtual)


def test_few_micro_batches_are_equal_too():
    for schedule in ("gpipe", "interleaved", "looped-bfs", "interleaved-zb", "zbv"):
        virtual = None if schedule in ("gpipe", "zbv") else 2
        for ranks, microbatches in ((4, 1), (4, 3), (5, 2)):
            assert build(schedule, ranks, microbatches, virtual).lines() == torch_lines(
                schedule, ranks, microbatches, virtual
            )


def test_1f1b_is_equal_except_for_the_numbering_on_torchs_last_rank():
    """torch's list numbers the forwards of the last rank from 1 (its runtime numbers them from 0, as we do)."""
    for ranks, microbatches in [case for case in CASES if case[1] >= case[0]]:
        ours, theirs = build("1f1b", ranks, microbatches).lines(), torch_lines("1f1b", ranks, microbatches, None)
        assert ours[:-1] == theirs[:-1]
        shifted = " ".join(
            f"{ranks - 1}F{int(word.split('F')[1]) - 1}" if "F" in word else word for word in theirs[-1].split()
        )
        assert ours[-1] in (theirs[-1], shifted)


def test_schedules_that_torch_refuses_and_we_accept():
    """1F1B with fewer micro-batches than ranks, and rounds of unequal size: correct here, refused by torch."""
    for schedule, ranks, microbatches, virtual in (
        ("1f1b", 4, 2, None),
        ("interleaved", 4, 13, 2),
        ("interleaved-zb", 2, 5, 2),
    ):
        build(schedule, ranks, microbatches, virtual)
        with pytest.raises(ValueError):
            torch_lines(schedule, ranks, microbatches, virtual)


def test_dualpipev_refuses_the_same_as_torch():
    with pytest.raises(ValueError):
        torch_lines("dualpipev", 4, 7, None)
    with pytest.raises(MeshwrightError):
        build("dualpipev", 4, 7)
