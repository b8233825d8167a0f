"""The layers of each pipeline stage and the stages of each rank, for one plan (integers) and for a batch (arrays).

L layers over S stages are as even as possible. L mod S stages have one more layer; they are in the middle, so that the short
stages are at both ends, where the embedding and the head add work:

    layers of every stage ≥ ⌊L/S⌋        stages with one more: from ⌊(S − L mod S)/2⌋ on, L mod S of them

Placement: *looped* puts stages r, r+P, r+2P, … on rank r; *V-shaped* puts stages r and 2P−1−r on rank r.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.describe.schedules import SCHEDULES

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
