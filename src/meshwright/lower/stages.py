"""Which blocks each pipeline rank holds, for a batch of plans.

Stage s of pp·virtual stages holds a run of layers; looped placement puts stages r, r+pp, r+2pp, … on rank r, V-shaped
placement puts s and 2pp−1−s together. The first stage has the embedding, the last the head. `StageBlocks` counts the blocks of
one rank of every plan. A batch of plans is evaluated on the few ranks that can be the slowest or the fullest (the first, the second, the
first with a long stage, the last), a single plan on all ranks.

Where backward is split into I and W, a stage gathers its saved inputs for both; not the first stage, which has no input gradient to
send and does everything in W. The zero-bubble schedules split every backward. DualPipeV splits those of its drain: on rank r, P − ⌈r/2⌉
micro-batches of the stage on the way down and P − ⌈(r+1)/2⌉ of the stage on the way up.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from meshwright.describe import schedules
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.schedules import SCHEDULES
from meshwright.lower.batch import Batch
from meshwright.lower.frozen import first_trained, first_trained_layer
from meshwright.lower.program import Array, Column, StageBlocks, present
from meshwright.programs.pipelines import build, formulas
from meshwright.programs.pipelines.walk import held_memory

MOST_ROUNDS = 4  # micro-batches per stage after which a split schedule repeats itself
MOST_RANKS = 16  # of a pipeline of a hybrid model that are all evaluated


def bounding_ranks(batch: Batch, every_rank: bool = False) -> list[StageBlocks]:
    """The ranks that can be the slowest or the fullest of each plan, from the first to the last one; `every_rank`: all of them,
    the last one repeated in plans that have fewer than others."""
    most, last = int(batch.pp.max()), batch.pp - 1
    if every_rank or (batch.model.pattern and most <= MOST_RANKS):  # any rank of a hybrid can be the slowest
        return [rank_blocks(batch, np.minimum(float(r), last)) for r in range(most)]
    if not present(last):
        return [rank_blocks(batch, np.zeros(batch.n))]
    # The first of the longer stages is the slowest, and of the longer ones it has most micro-batches in flight.
    stages = batch.pp * batch.virtual
    longest = np.mod(np.minimum(schedules.longer_stages(batch.model.layers, stages)[1], stages - 1), batch.pp)
    picks = [np.zeros(batch.n), np.minimum(1.0, last), longest, last]
    if (
        batch.model.dense_layers and batch.model.experts
    ):  # the first longer stage with nothing but experts is fuller still
        least, first, _ = schedules.longer_stages(batch.model.layers, stages)
        skipped = np.ceil(np.maximum(batch.model.dense_layers - first * least, 0.0) / (least + 1))
        picks.insert(-1, np.mod(np.minimum(first + skipped, stages - 1), batch.pp))
    return [rank_blocks(batch, rank) for rank in picks]


def has_unlike_ranks(model: Model, plans: Iterable[Plan]) -> bool:
    """Whether any rank can be the slowest or the fullest: of equal layers that are divided evenly, `bounding_ranks` are known."""
    return len(model.kinds) > 1 or any(plan.layers_per_stage for plan in plans)


def block_counts(model: Model, first: Array, layers: Mapping[str, Array], last: Array) -> dict[str, Array]:
    """Blocks of each kind: `layers` by kind, the embedding with the `first` layer, head and multi-token prediction with the `last`."""
    return {
        "embedding": first,
        **{kind: layers.get(kind, 0.0) for kind in model.kinds},
        "head": last,
        **dict.fromkeys(model.mtp_kinds, model.mtp_layers * last),
    }


def one_block(model: Model, block: str, n: int) -> dict[str, Array]:
    """The counts of a single block, for n plans."""
    kinds = ("embedding", *model.kinds, "head", *model.mtp_kinds)
    return {kind: np.full(n, float(kind == block)) for kind in kinds}


def rank_blocks(batch: Batch, rank: Array) -> StageBlocks:
    """The blocks of all stages of one pipeline rank."""
    v_shaped = SCHEDULES.column("is_v_shaped")[batch.schedule]
    if _layers_alike(batch):
        blocks = _blocks_of_one_kind(batch, rank, v_shaped & (batch.virtual > 1))
    else:
        stage = _stages_of(batch, rank)
        parts = stage_counts(batch, stage)
        blocks = StageBlocks(
            rank, {kind: np.broadcast_to(count, stage.shape).sum(axis=0) for kind, count in parts.items()}
        )
    if batch.splits_twice:
        down = stage_counts(batch, rank)
        first = split_share(batch, rank)
        second_share = split_share(batch, np.where(v_shaped, 2 * batch.pp - 1 - rank, rank + batch.pp))
        blocks.split = {kind: first * down[kind] + second_share * (n - down[kind]) for kind, n in blocks.counts.items()}
    _add_end_of_backward(batch, blocks, (rank == 0) * 1.0)
    return _with_recompute(batch, blocks, lambda: _stages_of(batch, rank))


def _layers_alike(batch: Batch) -> bool:
    """Whether all layers are of one kind and distributed as evenly as possible."""
    return batch.model.kind != "counts" and len(batch.model.kinds) == 1 and not batch.uneven


def _stages_of(batch: Batch, rank: Array) -> Column:
    """All virtual stages of a rank at once: (virtual, plans); negative where a plan has fewer."""
    v = np.arange(int(batch.virtual.max()))[:, None]
    folded = SCHEDULES.column("is_v_shaped")[batch.schedule] & (v == 1)
    stage = np.where(folded, batch.pp * batch.virtual - 1 - rank, rank + v * batch.pp)
    return np.where(batch.virtual > v, stage, -1.0)


def blocks_by_stage(batch: Batch, of_rank: StageBlocks) -> list[tuple[Array, dict[str, Array]]]:
    """(count, blocks) of the stages of a rank, equal stages together. If all layers are of one kind there are five sorts at most: the only
    stage of a rank, a shorter one, a longer one, the first and the last of the model."""
    several = (batch.virtual > 1) & (batch.pp > 1)
    if not several.any():
        return [(1.0, of_rank.counts)]
    if not _layers_alike(batch):
        stage = _stages_of(batch, of_rank.rank)
        stage_blocks_by_kind = {
            kind: np.broadcast_to(count, stage.shape) for kind, count in stage_counts(batch, stage).items()
        }
        rows = [
            ((stage[v] >= 0) * several, {kind: x[v] for kind, x in stage_blocks_by_kind.items()})
            for v in range(len(stage))
        ]
        return [(~several * 1.0, of_rank.counts), *rows]
    model, stages = batch.model, batch.pp * batch.virtual
    kind = model.kinds[0]
    least, start, end = schedules.longer_stages(batch.model.layers, stages)
    first, last = of_rank.counts["embedding"], of_rank.counts["head"]
    firsts, lasts = ((start <= s) & (s < end) for s in (0, stages - 1))  # whether the ends are longer stages
    ends = [first * ~firsts + last * ~lasts, first * firsts + last * lasts]
    longer = of_rank.counts[kind] - batch.virtual * least
    sorts = [
        (~several * 1.0, of_rank.counts),
        (several * (batch.virtual - longer - ends[0]), block_counts(model, 0.0, {kind: least}, 0.0)),
        (several * (longer - ends[1]), block_counts(model, 0.0, {kind: least + 1}, 0.0)),
        (several * first, block_counts(model, 1.0, {kind: least + firsts}, 0.0)),
        (several * last, block_counts(model, 0.0, {kind: least + lasts}, 1.0)),
    ]
    return [(often, blocks) for often, blocks in sorts if often.any()]


def split_share(batch: Batch, stage: Array, at: Any = slice(None)) -> Array:
    """The share of a stage's micro-batches whose backward is split, in the plans `at` some indices."""
    splits, dualpipev = batch.splits[at], SCHEDULES.column("splits_in_pairs")[batch.schedule[at]]
    if not present(dualpipev):
        return splits * (stage > 0) * 1.0
    pp = batch.pp[at]
    down = stage < pp
    rank = np.where(down, stage, 2 * pp - 1 - stage)
    paired = (pp - np.ceil((rank + ~down) / 2)) / batch.rounds[at]
    return np.where(dualpipev, paired, 1.0) * splits * (stage > 0)


def stages_of_rank(plan: Plan, rank: int) -> list[int]:
    """The stages one pipeline rank of a plan holds."""
    return schedules.stages_of_rank(plan.schedule, plan.pp, plan.virtual, rank)


def stage_ranges(batch: Batch, rank: Array, i: int) -> list[range]:
    """The layers of each stage that this rank of plan i holds."""
    if batch.pp[i] == 1:
        return [range(batch.model.layers)]
    stage = _stages_of(batch, rank)
    start, end = bounds(batch, np.maximum(stage, 0).astype(int), batch.pp * batch.virtual)
    return [range(start[v, i], end[v, i]) for v in range(len(stage)) if stage[v, i] >= 0]


def _with_recompute(batch: Batch, blocks: StageBlocks, stages: Callable[[], Column]) -> StageBlocks:
    """Count the recomputed layers in some stages of each plan, (stages, plans) with −1 for none, for the few plans that recompute some of their
    layers. A recomputed layer gathers its inputs once, for the recomputation, and keeps them: a split backward does not gather them twice."""
    if blocks.split is not None:
        saves = batch.recompute != 2
        blocks.regathered = {
            kind: np.asarray(n * saves if kind in batch.model.kinds else n) for kind, n in blocks.split.items()
        }
    if not batch.some_recomputed:
        return blocks
    blocks.recomputed = {kind: np.array(batch.full(count), dtype=float) for kind, count in blocks.counts.items()}
    partly = batch.partly_recomputed
    at = partly.plans
    stage = stages()
    stage = np.broadcast_to(stage, (len(stage), batch.n))[:, at].astype(int)
    stage = np.where((stage >= 0) & (stage < (batch.pp * batch.virtual)[at]), stage, -1)
    for kind in batch.model.kinds:
        blocks.recomputed[kind][at] = partly.recomputed[kind][partly.row, stage].sum(axis=0)
        if blocks.regathered is not None:
            gathered = split_share(batch, stage, at) * partly.kept[kind][partly.row, stage]
            blocks.regathered[kind][at] = gathered.sum(axis=0)
    return blocks


def _add_end_of_backward(batch: Batch, blocks: StageBlocks, on: Array) -> None:
    """Count the blocks that backward does not run through, and those in which it ends, where some blocks include the first stage (`on`). Later
    stages compute the gradient of their input whatever is trained. ZeRO-3 gathers the embedding all the same if it is a unit with the head, or if
    the layer after it asks for it ahead."""
    model = batch.model
    if not model.adapter.on or first_trained(model, "embedding") is not None:
        return
    none, layer = np.zeros(batch.n), first_trained_layer(model)
    stop = bounds(batch, none.astype(int), batch.pp * batch.virtual)[1]
    kinds = [model.layer_kinds[layer]] if layer < model.layers else []
    before = {kind: on * model.layers_before(kind)[np.minimum(layer, stop)] for kind in model.kinds}
    gathered = (batch.zero == 3) & ((model.tied & (batch.pp == 1)) | (batch.prefetches_backward & (layer == 0)))
    blocks.unreached = block_counts(model, on * ~gathered, before, none)
    ends = dict.fromkeys(kinds, on * (layer < stop))
    blocks.ending = block_counts(model, none, ends, on * (batch.pp == 1) * (not kinds))
    blocks.ending |= dict.fromkeys(model.mtp_kinds, none)


def _blocks_of_one_kind(batch: Batch, rank: Array, v_shaped: Array) -> StageBlocks:
    """`rank_blocks` in closed form, if all layers are of one kind: a rank has V times the length of the short stages, and one layer more
    for each of its stages in the range [start, end) of long ones. Of these, ⌊(end−1−r)/P⌋ − ⌊(start−1−r)/P⌋ are r modulo P."""
    model, pp, stages = batch.model, batch.pp, batch.pp * batch.virtual
    least, start, end = schedules.longer_stages(batch.model.layers, stages)
    looped = np.floor((end - 1 - rank) / pp) - np.floor((start - 1 - rank) / pp)
    back = stages - 1 - rank
    folded = ((start <= rank) & (rank < end)) * 1.0 + ((start <= back) & (back < end))
    layers = batch.virtual * least + np.where(v_shaped, folded, looped)
    last = np.where(v_shaped, rank == 0, rank == pp - 1) * 1.0
    return StageBlocks(rank, block_counts(model, (rank == 0) * 1.0, {model.kinds[0]: layers}, last))


def average_blocks(batch: Batch) -> StageBlocks:
    """The mean of all ranks of a pipeline: fractions of blocks."""
    model, zero = batch.model, np.zeros(batch.n)
    if model.kind == "counts":
        return StageBlocks(zero, block_counts(model, zero, {"dense": zero + 1}, zero))
    layers = {kind: model.layer_count(kind) / batch.pp for kind in model.kinds}
    blocks = StageBlocks(zero, block_counts(model, 1 / batch.pp, layers, 1 / batch.pp))
    if batch.splits_twice:
        blocks.split = _mean_split(batch, blocks)
    _add_end_of_backward(batch, blocks, 1 / batch.pp)
    blocks = _with_recompute(batch, blocks, lambda: np.arange(int((batch.pp * batch.virtual).max()))[:, None])
    if blocks.recomputed is not None:
        here = batch.partly_recomputed.plans
        for kind in layers:
            blocks.recomputed[kind][here] /= batch.pp[here]
            if blocks.regathered is not None:
                blocks.regathered[kind][here] /= batch.pp[here]
    return blocks


def _mean_split(batch: Batch, blocks: StageBlocks) -> dict[str, Array]:
    """The split part of the mean rank's blocks: all stages but the first, or in DualPipeV the mean of `split_share` over equal stages:
    Σ⌈r/2⌉ = ⌊P²/4⌋ over the ranks, and Σ⌈(r+1)/2⌉ = ⌊(P+1)²/4⌋."""
    pp = batch.pp
    paired = 2 * pp**2 - pp - np.floor(pp**2 / 4) - np.floor((pp + 1) ** 2 / 4)
    in_pairs = SCHEDULES.column("splits_in_pairs")[batch.schedule]
    share = np.where(in_pairs, paired / (2 * pp * batch.rounds), 1.0)
    first = stage_counts(batch, np.zeros(batch.n))
    whole = {kind: count - np.where(in_pairs, 0.0, first[kind] / pp) for kind, count in blocks.counts.items()}
    return {kind: batch.splits * share * count for kind, count in whole.items()}


def stage_blocks(batch: Batch, stage: Column, rank: Array) -> StageBlocks:
    """The blocks of one stage of each plan; a negative stage has none."""
    blocks = StageBlocks(rank, stage_counts(batch, stage))
    if batch.splits_twice:
        share = split_share(batch, stage)
        blocks.split = {kind: share * count for kind, count in blocks.counts.items()}
    _add_end_of_backward(batch, blocks, (stage == 0) * 1.0)
    return _with_recompute(batch, blocks, lambda: stage[None, :])


def stage_counts(batch: Batch, stage: Array) -> dict[str, Array]:
    """Number of blocks of each kind that one stage of each plan has (or several stages: one row each)."""
    model = batch.model
    exists = (stage >= 0) * 1.0
    if model.kind == "counts":
        zero = np.zeros(batch.n)
        return block_counts(model, zero, {"dense": exists}, zero)
    stages = batch.pp * batch.virtual
    start, end = bounds(batch, np.maximum(stage, 0).astype(int), stages)
    if len(model.kinds) == 1:
        counts = {model.kinds[0]: exists * (end - start)}
    else:
        counts = {}
        for kind in model.kinds:
            sums = model.layers_before(kind)
            counts[kind] = exists * (sums[end] - sums[start])
    return block_counts(model, (stage == 0) * 1.0, counts, (stage == stages - 1) * 1.0)


def bounds(batch: Batch, stage: np.ndarray, stages: Array) -> tuple[np.ndarray, np.ndarray]:
    """First and last+1 layer of a stage: as the plan states them, else as even as possible (`describe.schedules`)."""
    start, end = schedules.stage_bounds(batch.model.layers, stages, stage)
    for lengths, at in batch.uneven.items():
        edges = np.concatenate([[0], np.cumsum(lengths)])
        start[..., at], end[..., at] = edges[stage[..., at]], edges[stage[..., at] + 1]
    return start.astype(int), end.astype(int)


def in_flight(batch: Batch, rank: Array, gradients: Array = 0.0) -> Array:
    """Micro-batches whose activations a rank holds at its peak, in units of all its stages together. A split backward that adds `gradients` bytes
    per byte of activations between its halves counts them too."""
    out = np.ones(batch.n)
    rank, gradients = batch.full(rank), batch.full(gradients)
    for schedule, at, p, m, v in batch.schedules:
        r = np.minimum(rank[at].astype(int), p - 1)
        out[at] = formulas.in_flight(schedule, p, m, v, r) / v
        for k, i in enumerate(at):
            if gradients[i] and batch.splits[i]:
                most = min(m[k], MOST_ROUNDS * p[k])
                share = float(np.round(gradients[i], 2))
                out[i] = split_peaks(schedule, int(p[k]), int(most), int(v[k]), share)[r[k]] / v[k]
    return out


@cache
def split_peaks(schedule: str, ranks: int, microbatches: int, virtual: int, gradients: float) -> np.ndarray:
    """Peak of each rank in activations of one (stage, micro-batch), if those between I and W have `gradients` more each. The first stage of the model
    has no input gradient to send: it runs its whole backward as W."""
    program = build(schedule, ranks, microbatches, virtual)
    one = np.ones(program.stages)
    memory = held_memory(program, one, np.where(np.arange(program.stages) > 0, -gradients, 0.0))
    return np.maximum.reduceat(memory, program.first[:-1])
