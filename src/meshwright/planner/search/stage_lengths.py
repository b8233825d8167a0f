"""Stages with unequal numbers of layers: fewer layers where the embedding or the head adds work.

The search gives all stages the same number of layers, or numbers that differ by one. But the first stage also has the embedding and the last
one the head, and a pipeline runs at the pace of its slowest rank. A head over a vocabulary V costs as much as 2·H·V FLOPs per token:

    llama3-70b, 128,000 words    1.2 layers           gemma-2b, 256,000 words    5 layers

With 80 layers in 4 stages 20 + 1.2 layers pace the pipeline; 20, 20, 21, 19 do better. Here each leader with a pipeline gets another division.

**One stage per rank**: the division with the shortest longest stage, and of those the most even one, by dynamic programming over layers and stages:

    longest(s, b) = min over a < b of max( longest(s − 1, a), seconds of the layers a … b in stage s )

**Several stages per rank** (looped or V-shaped): the rank that does the least gets the next layer, and inside it the stage that does the least.
For layers of one kind no division has a shorter slowest rank.

These divisions balance the work of a micro-batch. A step also has its first and last micro-batches, in which ranks wait for each other, and gathers
that hide behind more compute or less: there a neighbour, with one layer moved, may be faster. So the neighbours are simulated too, and the
fastest that fits becomes a candidate if it is faster than the original.

**Memory.** The first ranks of a 1F1B pipeline keep the activations of more micro-batches, and the ends of the model have its largest parameters. So a
plan with equal stages may not fit although one with fewer layers on its fullest rank does: `lightened` takes the best division in which no stage has
more layers than its rank can hold. `solve` looks for such plans among those that need a little more memory than there is.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from meshwright.cost.memory import rank_peaks
from meshwright.cost.phase import rank_time
from meshwright.cost.step import StepCost, step_cost
from meshwright.cost.walked import stage_times
from meshwright.describe.plan import Plan
from meshwright.describe.schedules import stages_of_rank
from meshwright.lower.program import StageBlocks
from meshwright.lower.stages import one_block
from meshwright.lower.step import step_program
from meshwright.planner.search.pipeline_walk import fullest, walked_time
from meshwright.planner.search.space import Space
from meshwright.planner.search.strategies import Candidate

WORTH = 0.001  # share of the step that another division must save
NEAR = 0.02  # a candidate is divided otherwise if that can bring it this close to the fastest
PART = 100.0  # of `strategies.complexity`: one more part to set up
Seconds = tuple[float, ...]


def divided(space: Space, candidates: Sequence[Candidate], limit: float) -> list[Candidate]:
    """Variants of candidates with other stage lengths, each faster than its original and within the memory limit."""
    piped = [c for c in candidates if c.plan.pp > 1 and not c.plan.layers_per_stage]
    if not piped or not space.divides:
        return []
    enough = min(c.time for c in candidates) * (1 + NEAR)
    variants: dict[int, list[tuple[Candidate, Plan]]] = {}
    for c, seconds in zip(piped, block_seconds(space, [c.plan for c in piped]), strict=True):
        balance = other_division(c.plan, seconds)
        shorter = slowest_rank(c.plan.but(layers_per_stage=balance), seconds) / slowest_rank(c.plan, seconds)
        if shorter < 1 - WORTH and c.time * shorter <= enough:
            plans = [c.plan.but(layers_per_stage=lengths) for lengths in (balance, *neighbours(balance))]
            variants.setdefault(c.plan.pp, []).extend((c, plan) for plan in plans)
    return [variant for some in variants.values() for variant in simulated(space, some, limit)]


def simulated(space: Space, variants: Sequence[tuple[Candidate, Plan]], limit: float) -> list[Candidate]:
    """Simulate the variants of each candidate; keep the fastest that fits, if it is faster. All have the same number of ranks."""
    plans = [plan for _, plan in variants]
    program = step_program(space.model, plans, space.workload, space.stack, every_rank=True, stages=True)
    cost = step_cost(program, space.cluster)
    stages, peaks = stage_times(cost), fullest(program)
    best: dict[int, Candidate] = {}
    for at, (c, plan) in enumerate(variants):
        time = walked_time(cost, plan, at, stages) if peaks[at] <= limit else np.inf
        if time < best.get(id(c), c).time * (1 - WORTH):
            closed, memory = float(cost.time[at]), float(peaks[at])
            parts = c.complexity + PART
            best[id(c)] = replace(c, plan=plan, time=time, closed=closed, memory=memory, complexity=parts)
    return list(best.values())


def lightened(space: Space, candidates: Sequence[Candidate], limit: float) -> list[Candidate]:
    """Move layers off the fullest ranks of candidates that do not fit; return variants that fit and are faster. One stage per rank."""
    by_ranks: dict[int, list[Candidate]] = {}
    for c in candidates if space.divides else ():
        if c.plan.pp > 1 and c.plan.virtual == 1 and not c.plan.layers_per_stage:
            by_ranks.setdefault(c.plan.pp, []).append(c)
    out = []
    for some in by_ranks.values():
        plans = [c.plan for c in some]
        most = most_layers(space, plans, limit)
        divisions = [balanced(t, p.pp, m) for p, t, m in zip(plans, block_seconds(space, plans), most, strict=True)]
        variants = [
            (c, c.plan.but(layers_per_stage=lengths))
            for c, division in zip(some, divisions, strict=True)
            for lengths in ([division, *neighbours(division)] if division else [])
        ]
        out += simulated(space, variants, limit) if variants else []
    return out


def most_layers(space: Space, plans: Sequence[Plan], limit: float) -> list[tuple[int, ...]]:
    """The layers that fit on each rank of plans with one number of ranks. A rank's bytes are nearly linear in its layers: they are computed for
    equal stages and with one layer moved from every second rank to the next."""
    ranks = plans[0].pp
    even = plans[0].stage_layers(space.model.layers)
    lengths = [even, *(moved(even, range(first, ranks - 1, 2)) for first in (0, 1))]
    divided = ([p.but(layers_per_stage=division) for p in plans] for division in lengths)
    peaks = [
        rank_peaks(step_program(space.model, some, space.workload, space.stack, every_rank=True)) for some in divided
    ]
    changes = [np.array(division) - np.array(even) for division in lengths[1:]]
    slopes = np.max(
        [(other - peaks[0]) * np.sign(change)[:, None] for other, change in zip(peaks[1:], changes, strict=True)],
        axis=0,
    )
    free = np.floor((limit - peaks[0]) / np.maximum(slopes, 1.0)) + np.array(even)[:, None]
    return [tuple(int(n) for n in np.clip(free[:, k], 0, space.model.layers)) for k in range(len(plans))]


def moved(lengths: Sequence[int], sources: Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage with one moved from each of some stages to the next; a stage keeps one at least."""
    out = list(lengths)
    for k in sources:
        if out[k] > 1:
            out[k], out[k + 1] = out[k] - 1, out[k + 1] + 1
    return tuple(out)


def block_seconds(space: Space, plans: Sequence[Plan]) -> list[Seconds]:
    """For each plan, the seconds of a micro-batch in the embedding, in each layer and in the head (with multi-token prediction)."""
    cost = step_cost(step_program(space.model, plans, space.workload, space.stack), space.cluster)
    model = space.model
    kinds = ("embedding", *model.kinds, "head", *model.mtp_kinds)
    each = {kind: seconds_of(cost, plans, kind) for kind in kinds}
    for kind in model.mtp_kinds:
        each["head"] = each["head"] + model.mtp_layers * each[kind]
    order = ("embedding", *model.layer_kinds, "head")
    return [tuple(float(each[kind][k]) for kind in order) for k in range(len(plans))]


def seconds_of(cost: StepCost, plans: Sequence[Plan], block: str) -> np.ndarray:
    """Seconds of a micro-batch in one block; of a layer that only some stages recompute, the mean."""
    b = cost.program.batch
    n, layers, counts = b.n, b.model.layers, one_block(b.model, block, b.n)
    share = np.array([min(1.0, p.recompute_layers * p.stages / layers) if p.recompute_layers else 1.0 for p in plans])
    recomputed = {kind: count * share for kind, count in counts.items()}
    blocks = StageBlocks(np.zeros(n), counts, recomputed)
    return np.broadcast_to(rank_time(cost.program, cost.times, blocks, np.zeros(n)).total, n)


def slowest_rank(plan: Plan, seconds: Seconds) -> float:
    """Seconds of a micro-batch on the slowest rank of a plan."""
    edges = np.cumsum([0, *plan.stage_layers(len(seconds) - 2)])
    sums = np.cumsum([0.0, *seconds[1:-1]])[edges]
    stages = np.diff(sums)
    stages[0] += seconds[0]
    stages[-1] += seconds[-1]
    ranks = (stages_of_rank(plan.schedule, plan.pp, plan.virtual, rank) for rank in range(plan.pp))
    return max(float(stages[rank_stages].sum()) for rank_stages in ranks)


def other_division(plan: Plan, seconds: Seconds) -> tuple[int, ...]:
    """Divide the layers of a plan over its stages, with fewer for stages that have the embedding or the head."""
    return balanced(seconds, plan.pp) if plan.virtual == 1 else filled(plan, seconds)


def neighbours(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Yield divisions with one layer moved between the first or last stage and another one: the other end, the longest or the shortest."""
    first, last = 0, len(lengths) - 1
    inner = range(1, last)
    others = {first, last, *(choose(inner, key=lengths.__getitem__, default=0) for choose in (max, min))}
    moves = {(a, b) for end in (first, last) for k in others if k != end for a, b in ((end, k), (k, end))}
    out = []
    for source, target in sorted(moves):
        if lengths[source] > 1:
            moved = list(lengths)
            moved[source] -= 1
            moved[target] += 1
            out.append(tuple(moved))
    return out


def filled(plan: Plan, seconds: Seconds) -> tuple[int, ...]:
    """Divide layers greedily: each goes to the rank with the least work, and there to the stage with the least. No stage is empty."""
    layer, work = sum(seconds[1:-1]) / (len(seconds) - 2), np.zeros(plan.stages)
    work[0], work[-1] = seconds[0], seconds[-1]
    ranks = np.array([stages_of_rank(plan.schedule, plan.pp, plan.virtual, rank) for rank in range(plan.pp)])
    lengths = np.ones(plan.stages, int)
    for _ in range(len(seconds) - 2 - plan.stages):
        by_rank = (work + layer * lengths)[ranks]
        least = by_rank.sum(axis=1).argmin()
        lengths[ranks[least, by_rank[least].argmin()]] += 1
    return tuple(lengths.tolist())


@lru_cache(maxsize=256)
def balanced(seconds: Seconds, stages: int, most: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Layers of each stage with the shortest longest stage; of those the most even, by the sum of squares. `seconds` are those of the embedding,
    each layer and the head. Every stage has a layer, and no more than `most` of it; empty if the layers do not fit so."""
    first, *layers, last = seconds
    sums = np.cumsum([0.0, *layers])
    count = np.arange(len(sums)) - np.arange(len(sums))[:, None]
    inside = np.where(count > 0, sums - sums[:, None], np.inf)
    ends = [first] + [0.0] * (stages - 2) + [last] if stages > 1 else [first + last]
    each = [inside + end for end in ends]
    if most:
        each = [np.where(count <= n, stage, np.inf) for stage, n in zip(each, most, strict=True)]
    longest = each[0][0]
    for stage in each[1:]:
        longest = np.maximum(longest[:, None], stage).min(axis=0)
    if not np.isfinite(longest[-1]):
        return ()
    limit = longest[-1] * (1 + 1e-9)
    squares, chosen = np.where(each[0][0] <= limit, each[0][0] ** 2, np.inf), []
    for stage in each[1:]:
        total = squares[:, None] + np.where(stage <= limit, stage, np.inf) ** 2
        chosen.append(total.argmin(axis=0))
        squares = total.min(axis=0)
    edges = [len(layers)]
    for starts in reversed(chosen):
        edges.append(int(starts[edges[-1]]))
    return tuple(int(n) for n in np.diff([0, *reversed(edges)]))
