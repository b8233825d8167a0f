"""V-shaped schedules: rank r holds stage r (chunk 0, ranks ascending) and stage 2P−1−r (chunk 1, ranks descending).

The last stage is on rank 0, like the first, so the first backward starts on the rank of the first forward. Every rank
receives work from both neighbours: warm-up and drain are half as long as with two looped stages, and all ranks hold
equally many activations. Each schedule is a sequence of **phases**. The number before a phase is its repeat count. Each
`F0`, `I1`, … processes the next micro-batch of that chunk. `F0+B1` is a forward and a backward that may overlap (the
compute of one hides the communication of the other). `W` without a chunk is the oldest pending W.

ZBV (Qi et al. 2024), n = max(M, 2P−1); if F, I and W take equally long, no rank is idle between its first and last
action:

    2(P−r)−1 × F0  |  r × F1 F0  |  P−r × F1 I1 W1  |  n−2P+1+r × F0 I0 W0 F1 I1 W1  |  P−1−r × I0 W0 F1 I1 W1
    r × I0 I1  |  P−r × I0 W0  |  r × W1  |  r × W0

DualPipeV (half of DeepSeek's DualPipe), M ≥ 2P; the steady state consists of overlapped pairs:

    2(P−1−r) × F0  |  r+1 × F0 F1  |  P−1−r × I1 W F1  |  M−2P+1+r × F0+B1 F1+B0  |  P−1−r × B1 F1+B0
    r+1 × B1 B0, the later half of these r+1 pairs split (I1 I0)  |  P−1−r × W I0  |  r+1 × W
"""

import numpy as np

from meshwright.programs.pipelines.formulas import in_flight
from meshwright.programs.pipelines.program import KINDS, B, F, I, PipelineProgram, W, v_shaped
from meshwright.programs.pipelines.rules import require

Phases = list[tuple[int, str]]
ANY = 2  # chunk of a W without a chunk number


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
    pairs, odd = divmod(r + 1, 2)
    # The last rank's first pair does not overlap: its B1 needs the F0 of the same pair.
    separate = 1 if to_last == 0 and steady > 0 else 0
    return [
        (2 * to_last, "F0"),
        (r + 1, "F0 F1"),
        (to_last, "I1 W F1"),
        (separate, "F0 B1 F1+B0"),
        (steady - separate, "F0+B1 F1+B0"),
        (to_last, "B1 F1+B0"),
        (pairs, "B1 B0"),
        (odd, "B1 I0"),
        (pairs, "I1 I0"),
        (to_last, "W I0"),
        (r + 1, "W"),
    ]


def _program(schedule: str, ranks: int, microbatches: int, phases: list[Phases]) -> PipelineProgram:
    parts = [_expand(p) for p in phases]
    kinds, chunks, batches, joins = [], [], [], []
    for kind, chunk, joined in parts:
        batch = _microbatch(kind, chunk)
        chunk = _owner(kind, chunk)
        exists = batch < microbatches
        kinds.append(kind[exists])
        chunks.append(chunk[exists])
        batches.append(batch[exists])
        joins.append(joined[exists])
    stage = [np.where(chunk == 0, r, 2 * ranks - 1 - r) for r, chunk in enumerate(chunks)]
    first = np.concatenate([[0], np.cumsum([len(kind) for kind in kinds])])
    kind, stages, batch, joined = map(np.concatenate, (kinds, stage, batches, joins))
    most = in_flight(schedule, ranks, microbatches, 2, np.arange(ranks))
    return PipelineProgram(schedule, microbatches, v_shaped(ranks), kind, stages, batch, first, joined, most)


def _expand(phases: Phases) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the kind, chunk and joined flag of every action of the phases."""
    parts = []
    for count, text in phases:
        words = text.replace("+", "+ ").split()
        row = [(KINDS.index(w[0]), int(w[1]) if w[1:2].isdigit() else ANY, w.endswith("+")) for w in words]
        parts.append(np.tile(np.array(row, np.int64), (count, 1)))
    columns = np.concatenate(parts)
    return columns[:, 0].astype(np.int8), columns[:, 1], columns[:, 2].astype(bool)


def _microbatch(kind: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """Return the micro-batch of each action: a running count of each chunk's F, and of its B or I; a W has that of its I."""
    batch = np.zeros(len(kind), np.int64)
    for c in (0, 1):
        for members in ((kind == F), (kind == B) | (kind == I)):
            selected = members & (chunk == c)
            batch[selected] = np.arange(selected.sum())
    for c in (0, 1, ANY):
        inputs = (kind == I) & ((chunk == c) | (c == ANY))
        weights = (kind == W) & (chunk == c)
        batch[weights] = batch[inputs][: weights.sum()]
    return batch


def _owner(kind: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """Return the chunks, with those of each W without a chunk number set to that of its I, oldest first."""
    bare = (kind == W) & (chunk == ANY)
    if not bare.any():
        return chunk
    owner = chunk.copy()
    owner[bare] = chunk[kind == I]
    return owner
