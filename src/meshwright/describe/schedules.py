"""The pipeline schedules: their names, and what each one accepts.

`SCHEDULES` is the only table of schedules. `describe.legality` reads it to decide whether a plan is legal; `programs.pipelines` provides the
builders and closed forms; `lower`, `cost` and `planner` ask it for what they need.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from meshwright.describe.variants import NameIn, Registry

MOST_ACTIONS = 20_000_000  # a program with more actions is a typing mistake, not a pipeline
ACTIONS_PER_MICROBATCH = 3  # forward, input gradient, weight gradient: for each stage
UNUSUAL = 3  # schedules from here on are a thing to explain to a colleague


@dataclass(frozen=True)
class Schedule:
    """One schedule: what it accepts, and its parts (`programs.pipelines.registry` says what each part is)."""

    name: str
    about: str
    virtual: int = 1  # stages per rank by default
    least_virtual: int = 1
    most_virtual: int = 1
    placement: str = "looped"
    least_microbatches_per_rank: int = 0
    splits: bool = False  # the backward pass is split into I (input gradients) and W (weight gradients)
    in_rounds: bool = False  # takes micro-batches in rounds of pp, as Megatron's interleaved 1F1B
    splits_in_pairs: bool = False  # splits only the backwards that are not paired with a forward, as DualPipeV
    uneven_ranks: bool = False  # ranks hold different numbers of activations
    # `paths` counts transfers that block both ranks; else each action takes a transfer longer
    counts_blocking: bool = False
    delays_all_turns: bool = False  # looped ranks wait for the longest stage in nearly all turns, not in one round
    unusualness: int = 11  # smaller: more usual, preferred among plans that are equally fast
    costed_as: str = ""  # the schedule whose closed forms stand for this one
    aliases: tuple[str, ...] = ()
    build: Callable[..., Any] | None = None
    paths: Callable[..., Any] | None = None
    in_flight: Callable[..., Any] | None = None

    @property
    def is_v_shaped(self) -> bool:
        return self.placement == "v"

    @property
    def takes_any_virtual(self) -> bool:
        return self.most_virtual > 2


SCHEDULES: Registry[Schedule] = Registry(
    "pipeline schedule",
    Schedule("naive", "one micro-batch at a time through all stages and back", counts_blocking=True, unusualness=3),
    Schedule("gpipe", "all forwards, then all backwards", counts_blocking=True, unusualness=1),
    Schedule(
        "1f1b",
        "one forward, one backward in turn: GPipe's bubble, P micro-batches in flight instead of M",
        uneven_ranks=True,
        counts_blocking=True,
        unusualness=0,
    ),
    Schedule(
        "interleaved",
        "1F1B with V stages per rank: a V times shorter bubble, V times the messages",
        *(2, 2, 1024),
        in_rounds=True,
        uneven_ranks=True,
        unusualness=2,
        aliases=("1f1b-i", "interleaved-1f1b"),
    ),
    Schedule(
        "looped-bfs",
        "V stages per rank, all micro-batches through one stage before the next",
        *(2, 1, 1024),
        delays_all_turns=True,
        unusualness=4,
        aliases=("bfs", "breadth-first"),
    ),
    Schedule(
        "zb-h1",
        "backward split in two; the weight gradients fill the drain: a third of 1F1B's bubble",
        splits=True,
        unusualness=5,
        aliases=("zb-1p", "zb1p", "zbh1", "zero-bubble"),
    ),
    Schedule(
        "zb-h2",
        "more forwards first: no bubble when steps overlap, twice 1F1B's memory",
        splits=True,
        unusualness=8,
        aliases=("zb-2p", "zbh2"),
    ),
    Schedule(
        "interleaved-zb",
        "interleaved with split backwards",
        *(2, 1, 1024),
        splits=True,
        in_rounds=True,
        unusualness=6,
        aliases=("interleaved-zero-bubble",),
    ),
    Schedule(
        "zbv",
        "two stages per rank on a V: no bubble when steps overlap, 1F1B's memory",
        *(2, 2, 2, "v"),
        splits=True,
        uneven_ranks=True,
        unusualness=7,
        aliases=("zb-v",),
    ),
    Schedule(
        "dualpipev",
        "two stages per rank on a V, forwards and backwards in pairs",
        *(2, 2, 2, "v", 2),
        splits=True,
        splits_in_pairs=True,
        unusualness=9,
        aliases=("dualpipe-v",),
    ),
    Schedule(
        "auto",
        "found by search for the given stage times and memory limit",
        *(1, 1, 1024, "either"),
        splits=True,
        unusualness=10,
        costed_as="zb-h2",  # it does at least as well as the best builder under its memory limit
    ),
)
ScheduleName = Annotated[str, NameIn(SCHEDULES)]


def virtual_schedules() -> tuple[str, ...]:
    """The schedules that take several stages per rank."""
    return tuple(name for name, schedule in SCHEDULES.items() if schedule.most_virtual > 1)


def action_count(
    ranks: int | np.ndarray, microbatches: int | np.ndarray, virtual: int | np.ndarray
) -> int | np.ndarray:
    """Most actions of a pipeline program."""
    return ACTIONS_PER_MICROBATCH * ranks * microbatches * virtual


# --- The layers of each pipeline stage and the stages of each rank, for one plan (integers) and for a batch (arrays).
#
# L layers over S stages are as even as possible. L mod S stages have one more layer; they are in the middle, so that the short
# stages are at both ends, where the embedding and the head add work:
#
#     layers of every stage ≥ ⌊L/S⌋        stages with one more: from ⌊(S − L mod S)/2⌋ on, L mod S of them
#
# Placement: *looped* puts stages r, r+P, r+2P, … on rank r; *V-shaped* puts stages r and 2P−1−r on rank r.

Number = Any  # an int, or an array of numbers


def longer_stages(layers: int, stages: Number) -> tuple[Number, Number, Number]:
    """Return the layers that every stage has at least, and the range of stages that have one more."""
    least = np.floor(layers / stages)  # exact below 2⁵³, and much faster than // on float arrays
    extra = layers - least * stages
    first = np.floor((stages - extra) / 2)
    return least, first, first + extra


def layers_of_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Number of layers of each stage, in model order."""
    least, first, end = longer_stages(layers, stages)
    return tuple(int(least) + bool(first <= stage < end) for stage in range(stages))


def stage_bounds(layers: int, stages: Number, stage: Number) -> tuple[Number, Number]:
    """First and last+1 layer of a stage."""
    least, first, end = longer_stages(layers, stages)
    start = stage * least + np.clip(stage - first, 0, end - first)
    stop = (stage + 1) * least + np.clip(stage + 1 - first, 0, end - first)
    return start, stop


def stages_of_rank(schedule: str, pp: int, virtual: int, rank: int) -> list[int]:
    """The stages one pipeline rank holds."""
    if SCHEDULES[schedule].is_v_shaped and virtual > 1:
        return [rank, pp * virtual - 1 - rank]
    return [rank + v * pp for v in range(virtual)]
