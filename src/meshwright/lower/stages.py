"""Which blocks each pipeline rank holds, for a batch of plans.

Stage s of pp·virtual stages holds a run of layers; looped placement puts stages r, r+pp, r+2pp, … on rank r, V-shaped
placement puts s and 2pp−1−s together. The first stage has the embedding, the last the head. `Holding` counts the blocks of
one rank of every plan; the batch looks at the few ranks that can be the slowest or the fullest (first, second, the first
longer one, last), an estimate of one plan at all of them.
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
    # The first of the longer stages is the slowest and, of those, keeps most micro-batches in flight; it is the middle where all are even.
    stages = batch.pp * batch.virtual
    longest = np.mod(np.minimum(_longer(batch, stages)[1], stages - 1), batch.pp)
    picks = [np.zeros(batch.n), np.minimum(1.0, last), longest, last]
    if (
        batch.model.dense_layers and batch.model.experts
    ):  # the first longer stage with nothing but experts is fuller still
        least, first, _ = _longer(batch, stages)
        skipped = np.ceil(np.maximum(batch.model.dense_layers - first * least, 0.0) / (least + 1))
        picks.append(np.mod(np.minimum(first + skipped, stages - 1), batch.pp))
    return [holding(batch, rank) for rank in picks]


def holding(batch: Batch, rank: Array) -> Holding:
    """All stages of one rank together."""
    model, stages = batch.model, batch.pp * batch.virtual
    v_shaped = np.isin(batch.schedule, V_SHAPED)
    if model.kind != "counts" and len(set(model.layer_kinds)) == 1 and not batch.uneven:
        return _of_one_kind(batch, rank, v_shaped & (batch.virtual > 1))
    v = np.arange(int(batch.virtual.max()))[:, None]  # all virtual stages at once: (virtual, plans)
    stage = np.where(v_shaped & (v == 1), stages - 1 - rank, rank + v * batch.pp)
    parts = stage_holding(batch, np.where(batch.virtual > v, stage, -1.0), rank)
    counts = {kind: np.broadcast_to(count, stage.shape).sum(axis=0) for kind, count in parts.counts.items()}
    # A V-shaped rank holds both ends: its head reads the embedding it already has.
    tied = np.broadcast_to(parts.tied_copy, stage.shape).max(axis=0) * (counts["embedding"] == 0)
    return Holding(rank, counts, tied)


def _of_one_kind(batch: Batch, rank: Array, v_shaped: Array) -> Holding:
    """Layers that are all alike need not be followed stage by stage: a rank has V times the least, and one more for each of its stages
    among the longer ones, which stand in a row. Of a row of numbers, ⌊(end−1−r)/P⌋ − ⌊(start−1−r)/P⌋ leave the rest r modulo P."""
    model, pp, stages = batch.model, batch.pp, batch.pp * batch.virtual
    least, start, end = _longer(batch, stages)
    looped = np.floor((end - 1 - rank) / pp) - np.floor((start - 1 - rank) / pp)
    back = stages - 1 - rank
    folded = ((start <= rank) & (rank < end)) * 1.0 + ((start <= back) & (back < end))
    layers = batch.virtual * least + np.where(v_shaped, folded, looped)
    first, zero = (rank == 0) * 1.0, np.zeros(batch.n)
    last = np.where(v_shaped, rank == 0, rank == pp - 1) * 1.0
    tied = last * (stages > 1) * (1 - first) if model.tied else zero
    kind = model.layer_kinds[0]
    return Holding(rank, {"embedding": first, "dense": zero, "moe": zero, kind: layers, "head": last}, tied)


def mean_holding(batch: Batch) -> Holding:
    """What a rank holds on the average of its pipeline: fractions of blocks."""
    model, zero = batch.model, np.zeros(batch.n)
    if model.kind == "counts":
        return Holding(zero, {"embedding": zero, "dense": zero + 1, "moe": zero, "head": zero}, zero)
    layers = {kind: model.layer_count(kind) / batch.pp for kind in ("dense", "moe")}
    return Holding(zero, {"embedding": 1 / batch.pp, **layers, "head": 1 / batch.pp}, zero)


def stage_holding(batch: Batch, stage: Array, rank: Array) -> Holding:
    """The blocks of one stage of each plan (or of several: one row each); a negative stage has none."""
    model = batch.model
    zero = np.zeros(batch.n)
    exists = (stage >= 0) * 1.0
    if model.kind == "counts":
        return Holding(rank, {"embedding": zero, "dense": exists, "moe": zero, "head": zero}, zero)
    stages = batch.pp * batch.virtual
    start, end = bounds(batch, np.maximum(stage, 0).astype(int), stages)
    if model.experts:
        sums = np.concatenate([[0], np.cumsum([kind == "moe" for kind in model.layer_kinds])])
        moe = exists * (sums[end] - sums[start])
    else:
        moe = zero
    counts = {"dense": exists * (end - start) - moe, "moe": moe}
    first, last = (stage == 0) * 1.0, (stage == stages - 1) * 1.0
    tied = last * (stages > 1) if model.tied else zero
    return Holding(rank, {"embedding": first, **counts, "head": last}, tied)


def bounds(batch: Batch, stage: np.ndarray, stages: Array) -> tuple[np.ndarray, np.ndarray]:
    """First and last+1 layer of a stage: as even as can be, the short stages at both ends (as `Plan.stage_layers`)."""
    least, first, beyond = _longer(batch, stages)
    start = stage * least + np.clip(stage - first, 0, beyond - first)
    end = (stage + 1) * least + np.clip(stage + 1 - first, 0, beyond - first)
    for i in batch.uneven:
        edges = np.concatenate([[0], np.cumsum(batch.layers_per_stage[i])])
        start[..., i], end[..., i] = edges[stage[..., i]], edges[stage[..., i] + 1]
    return start.astype(int), end.astype(int)


def _longer(batch: Batch, stages: Array) -> tuple[Array, Array, Array]:
    """Layers every stage has at least, and the row of stages, first and last+1, that have one more."""
    least = np.floor(batch.model.layers / stages)
    extra = batch.model.layers - least * stages
    first = np.floor((stages - extra) / 2)
    return least, first, first + extra
