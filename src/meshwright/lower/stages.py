"""Which blocks each pipeline rank holds, for a batch of plans.

Stage s of pp·virtual stages holds a run of layers; looped placement puts stages r, r+pp, r+2pp, … on rank r, V-shaped
placement puts s and 2pp−1−s together. The first stage has the embedding, the last the head. `Holding` counts the blocks of
one rank of every plan; the batch looks at the few ranks that can be the slowest or the fullest (first, second, a middle one,
last), an estimate of one plan at all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.lower.batch import SCHEDULES, Batch
from meshwright.lower.op import Array

V_SHAPED = tuple(SCHEDULES.index(s) for s in ("zbv", "dualpipev"))


@dataclass
class Holding:
    """Blocks on one rank: counts by kind, and the rank's index."""

    rank: Array
    counts: dict[str, Array]
    tied_copy: Array  # 1 where the head's weights are a copy of the embedding's on another rank


def holdings(batch: Batch, every_rank: bool = False) -> list[Holding]:
    """The ranks to look at: all of them for one plan, the telling ones for a batch."""
    if every_rank:
        return [holding(batch, np.full(batch.n, float(r))) for r in range(int(batch.pp.max()))]
    last = batch.pp - 1
    if not np.any(last):
        return [holding(batch, np.zeros(batch.n))]
    picks = [np.zeros(batch.n), np.minimum(1.0, last), np.floor(batch.pp / 2), last]
    return [holding(batch, rank) for rank in picks]


def holding(batch: Batch, rank: Array) -> Holding:
    model = batch.model
    if model.kind == "counts":
        zero = np.zeros(batch.n)
        return Holding(rank, {"embedding": zero, "dense": zero + 1, "moe": zero, "head": zero}, zero)
    prefix = {kind: np.concatenate([[0], np.cumsum([k == kind for k in model.layer_kinds])]) for kind in ("dense", "moe")}
    counts = {"dense": np.zeros(batch.n), "moe": np.zeros(batch.n)}
    stages = batch.pp * batch.virtual
    v_shaped = np.isin(batch.schedule, V_SHAPED)
    for v in range(int(batch.virtual.max())):
        on = batch.virtual > v
        stage = np.where(v_shaped & (v == 1), stages - 1 - rank, rank + v * batch.pp)
        stage = np.where(on, stage, 0).astype(int)
        start, end = bounds(batch, stage, stages)
        for kind, sums in prefix.items():
            counts[kind] += np.where(on, sums[end] - sums[start], 0)
    first = (rank == 0) * 1.0
    holds_last = np.where(v_shaped & (batch.pp > 1), rank == 0, rank == batch.pp - 1) * 1.0
    tied = holds_last * (1 - first) if model.tied else np.zeros(batch.n)
    return Holding(rank, {"embedding": first, **counts, "head": holds_last}, tied)


def bounds(batch: Batch, stage: np.ndarray, stages: Array) -> tuple[np.ndarray, np.ndarray]:
    """First and last+1 layer of a stage: as even as can be, the short stages at both ends (as `Plan.stage_layers`)."""
    layers = batch.model.layers
    base = np.floor(layers / stages)
    extra = layers - base * stages
    first = np.floor((stages - extra) / 2)
    start = stage * base + np.clip(stage - first, 0, extra)
    end = (stage + 1) * base + np.clip(stage + 1 - first, 0, extra)
    for i, said in enumerate(batch.layers_per_stage):
        if said:
            edges = np.concatenate([[0], np.cumsum(said)])
            start[i], end[i] = edges[stage[i]], edges[stage[i] + 1]
    return start.astype(int), end.astype(int)
