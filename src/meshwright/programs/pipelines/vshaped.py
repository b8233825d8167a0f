"""Two stages a rank, folded like a V: rank r holds stage r (chunk 0, going) and stage 2P−1−r (chunk 1, coming back).

The last stage sits on rank 0 beside the first, so the first backward starts where the first forward did, and every
rank sees work come from both sides: warm-up and drain are half as long as with two looped stages, and all ranks hold
equally many activations. Both schedules are a table of **phases**, read down; a phase is repeated as often as its
count says, and each `F0`, `I1`, … takes that chunk's next micro-batch. `F0+B1` is a forward and a backward that may
run at the same time (one's communication hides under the other's compute); a bare `W` is the oldest weights' half
still owed.

ZBV (Qi et al. 2024), n = max(M, 2P−1); with F, I and W equally long no rank ever waits between its first and last
action:

    2(P−r)−1 × F0  |  r × F1 F0  |  P−r × F1 I1 W1  |  n−2P+1+r × F0 I0 W0 F1 I1 W1  |  P−1−r × I0 W0 F1 I1 W1
    r × I0 I1  |  P−r × I0 W0  |  r × W1  |  r × W0

DualPipeV (DeepSeek's DualPipe, cut in half), M ≥ 2P; the steady state is made of overlapped pairs:

    2(P−1−r) × F0  |  r+1 × F0 F1  |  P−1−r × I1 W F1  |  M−2P+1+r × F0+B1 F1+B0  |  P−1−r × B1 F1+B0
    r+1 × B1 B0, the later half of these r+1 pairs split (I1 I0)  |  P−1−r × W I0  |  r+1 × W
"""

from __future__ import annotations

import numpy as np

from meshwright.programs.pipelines.formulas import in_flight
from meshwright.programs.pipelines.program import KINDS, B, F, I, PipelineProgram, W, v_shaped
from meshwright.programs.pipelines.rules import require

Phases = list[tuple[int, str]]
ANY = 2  # chunk of a bare W


def zbv(ranks: int, microbatches: int, virtual: int = 2) -> PipelineProgram:
    """Zero bubble on a V (Qi et al. 2024): 1F1B's memory, no bubble between a rank's first and last action."""
    require("zbv", ranks, microbatches, virtual)
    n = max(microbatches, 2 * ranks - 1)
    return _program("zbv", ranks, microbatches, [_zbv_phases(ranks, n, r) for r in range(ranks)])


def dualpipev(ranks: int, microbatches: int, virtual: int = 2) -> PipelineProgram:
    """DualPipe on a V: forwards and backwards in overlapped pairs."""
    require("dualpipev", ranks, microbatches, virtual)
    return _program("dualpipev", ranks, microbatches, [_dualpipev_phases(ranks, microbatches, r) for r in range(ranks)])


def _zbv_phases(ranks: int, n: int, r: int) -> Phases:
    return [
        (2 * (ranks - r) - 1, "F0"),
        (r, "F1 F0"),
        (ranks - r, "F1 I1 W1"),
        (n - 2 * ranks + 1 + r, "F0 I0 W0 F1 I1 W1"),
        (ranks - 1 - r, "I0 W0 F1 I1 W1"),
        (r, "I0 I1"),
        (ranks - r, "I0 W0"),
        (r, "W1"),
        (r, "W0"),
    ]


def _dualpipev_phases(ranks: int, n: int, r: int) -> Phases:
    to_last = ranks - 1 - r
    steady = n - 2 * ranks + 1 + r
    whole, odd = divmod(r + 1, 2)
    # The last rank's first pair is not overlapped: its B1 would only wait for the F0 beside it.
    apart = 1 if to_last == 0 and steady > 0 else 0
    return [
        (2 * to_last, "F0"),
        (r + 1, "F0 F1"),
        (to_last, "I1 W F1"),
        (apart, "F0 B1 F1+B0"),
        (steady - apart, "F0+B1 F1+B0"),
        (to_last, "B1 F1+B0"),
        (whole, "B1 B0"),
        (odd, "B1 I0"),
        (whole, "I1 I0"),
        (to_last, "W I0"),
        (r + 1, "W"),
    ]


def _program(schedule: str, ranks: int, microbatches: int, phases: list[Phases]) -> PipelineProgram:
    parts = [_expand(p) for p in phases]
    kinds, chunks, batches, joins = [], [], [], []
    for kind, chunk, joined in parts:
        batch = _microbatch(kind, chunk)
        chunk = _owner(kind, chunk)
        kept = batch < microbatches
        kinds.append(kind[kept])
        chunks.append(chunk[kept])
        batches.append(batch[kept])
        joins.append(joined[kept])
    stage = [np.where(chunk == 0, r, 2 * ranks - 1 - r) for r, chunk in enumerate(chunks)]
    first = np.concatenate([[0], np.cumsum([len(kind) for kind in kinds])])
    return PipelineProgram(
        schedule,
        microbatches,
        v_shaped(ranks),
        np.concatenate(kinds),
        np.concatenate(stage),
        np.concatenate(batches),
        first,
        np.concatenate(joins),
        in_flight(schedule, ranks, microbatches, 2, np.arange(ranks)),
    )


def _expand(phases: Phases) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kind, chunk and the joined mark of every action that the phases spell out."""
    parts = []
    for count, text in phases:
        words = text.replace("+", "+ ").split()
        row = [(KINDS.index(w[0]), int(w[1]) if w[1:2].isdigit() else ANY, w.endswith("+")) for w in words]
        parts.append(np.tile(np.array(row, np.int64), (count, 1)))
    columns = np.concatenate(parts)
    return columns[:, 0].astype(np.int8), columns[:, 1], columns[:, 2].astype(bool)


def _microbatch(kind: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """Count up each chunk's forwards, and its backwards, whole or of inputs; a W takes the micro-batch of its I."""
    batch = np.zeros(len(kind), np.int64)
    for c in (0, 1):
        for members in ((kind == F), (kind == B) | (kind == I)):
            mine = members & (chunk == c)
            batch[mine] = np.arange(mine.sum())
    for c in (0, 1, ANY):
        owed = (kind == I) & ((chunk == c) | (c == ANY))
        paid = (kind == W) & (chunk == c)
        batch[paid] = batch[owed][: paid.sum()]
    return batch


def _owner(kind: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """The chunk that each bare W belongs to: that of the I it pays for, oldest first."""
    bare = (kind == W) & (chunk == ANY)
    if not bare.any():
        return chunk
    owner = chunk.copy()
    owner[bare] = chunk[kind == I]
    return owner
