"""The interval in which the simulation of a step will end, and an estimate inside it: the closed form, and its error where stages are unequal.

The closed form takes T = pace + ramp + closing: M micro-batches of the slowest rank, the ramp of a pipeline of mean ranks, and the costs paid
once per step. Ramp and pace add up only if the slowest rank is also the one that waits, so

    low   = max(pace, M · mean + ramp) + closing

With V looped stages per rank, a longer stage delays the other stages of its turn, and turns do not even out as whole ranks do. If in every
turn all ranks waited for the longest stage,

    high  = pace + ramp + closing + delay,      delay = M · Σ over turns of the longest stage − pace

and twice the delay where stages have different numbers of layers, since neighbouring turns then meet.

Where in the interval a simulation ends depends on the rounds K = M/P of the pipeline (medians of 9,600 random plans). Ranks that are not looped
reach the closed form except for 1/2K of the way from low. Of the turns, one round of K is delayed, in breadth-first schedules nearly all; with
unequal numbers of layers half of the plans are not delayed at all. A V-shaped schedule whose slowest rank is the first, with embedding and head,
hides its ramp while K is small. This is the **estimate**, by which plans are ranked until they are simulated.

**Other divisions.** The leaders may get stages of other lengths (`stage_lengths`), and no division has a slowest rank below the mean. So

    time      = M · mean + ramp + closing                       no division of the layers into stages takes less
    balanced  = estimate − (pace − M · mean)                    the estimate if every rank took the mean

The search keeps a plan while its `time` may win, and excludes others by its `high`. Where stages cannot be divided otherwise, time is low. Unequal
stages can end a little below low: the ramp is that of equal ones (a V with both ends of the model on its first rank and few rounds: 1–2%).
"""

import numpy as np

from meshwright.cost.phase import rank_time
from meshwright.cost.step import StepCost
from meshwright.describe.plan_fields import PlanArrays
from meshwright.describe.schedules import SCHEDULES
from meshwright.lower.program import Column, StageBlocks
from meshwright.planner.search.space import Space

NAIVE, GPIPE = (
    SCHEDULES.names.index(name) for name in ("naive", "gpipe")
)  # whose share of the closed form was fitted apart


def of(space: Space, cost: StepCost) -> PlanArrays:
    """The interval of a costed batch: time, low, closed, high, estimate and balanced."""
    b = cost.program.batch
    slowest = np.choose(cost.slowest, [b.full(r.total) for r in cost.ranks])
    bubble, pace = cost.exposed["bubble"], np.maximum(b.microbatches, 1.0) * slowest
    mean = rank_time(cost.program, cost.times, cost.program.mean, cost.boundary).total
    rows = PlanArrays(pp=b.pp, virtual=b.virtual, schedule=b.schedule, m=np.maximum(b.microbatches, 1.0), **ends(cost))
    closing, leads = cost.time - bubble - pace, cost.slowest == 0
    return interval(space, rows.but(pace=pace, ramp=bubble, closing=closing, mean=b.full(mean), leads=leads))


def interval(space: Space, rows: PlanArrays) -> PlanArrays:
    """time, low, closed, high, estimate and balanced of rows with their pp, virtual, schedule, m; pace, ramp, closing, mean; `ends` and `longest`
    layer; and whether their slowest rank is the first (`leads`)."""
    closed = rows.pace + rows.ramp + rows.closing
    piped = rows.pp > 1
    looped = piped & (rows.virtual > 1) & (SCHEDULES.column("placement")[rows.schedule] == "looped")
    even = rows.m * rows.mean
    low = np.where(piped, np.maximum(rows.pace, even + rows.ramp) + rows.closing, closed)
    delay = np.where(looped, np.maximum(0.0, rows.m * turns(space, rows) - rows.pace), 0.0)
    uneven = space.uneven(rows)
    high = closed + np.where(uneven, 2.0, 1.0) * delay
    estimate = np.where(
        looped, closed + delayed_share(rows) * ~uneven * delay, low + closed_form_share(rows) * (closed - low)
    )
    divisible = piped & space.divides
    time = np.where(divisible, even + rows.ramp + rows.closing, low)
    balanced = np.where(divisible, np.maximum(time, estimate - np.maximum(0.0, rows.pace - even)), estimate)
    return PlanArrays(time=time, low=low, closed=closed, high=high, estimate=estimate, balanced=balanced)


def delayed_share(rows: PlanArrays) -> np.ndarray:
    """The share of turns in which looped ranks wait for the longest stage."""
    rounds = rows.m / rows.pp
    all_turns = SCHEDULES.column("delays_all_turns")[rows.schedule]
    return np.where(all_turns, 0.9 * (rounds >= 1), np.minimum(1.0, 0.7 / rounds))


def closed_form_share(rows: PlanArrays) -> np.ndarray:
    """Return where the step of a schedule that is not looped lies between `low` (0) and the closed form (1)."""
    rounds = rows.m / rows.pp
    hidden = SCHEDULES.column("is_v_shaped")[rows.schedule] & rows.leads
    return np.select(
        [rows.schedule == NAIVE, rows.schedule == GPIPE, hidden],
        [0.0, 1 - 1 / rows.m, np.maximum(0.0, 0.5 - 2 / rounds)],
        1 - 0.5 / np.maximum(rounds, 0.8),
    )


def turns(space: Space, rows: PlanArrays) -> np.ndarray:
    """Seconds of a micro-batch if all ranks waited for the longest stage in each of V turns: its layers, and both ends of the model."""
    layers, stages = space.model.layers, rows.pp * rows.virtual
    least = layers // stages
    extra = layers - least * stages
    first = (stages - extra) // 2
    longer = np.where(extra > 0, (first + extra - 1) // rows.pp - first // rows.pp + 1, 0)  # turns with a longer stage
    return (rows.virtual * least + longer) * rows.longest + rows.ends


def ends(cost: StepCost) -> dict[str, Column]:
    """Seconds of a micro-batch in embedding and head together, and in the longest kind of layer."""
    b, zero = cost.program.batch, np.zeros(cost.program.batch.n)

    def seconds(block: str) -> Column:
        times = {key: t for key, t in cost.times.items() if key[0] == block}
        return b.full(rank_time(cost.program, times, StageBlocks(zero, {block: np.ones(b.n)}), zero).total)

    last = seconds("head") + sum((b.model.mtp_layers * seconds(kind) for kind in b.model.mtp_kinds), zero)
    return {"ends": seconds("embedding") + last, "longest": np.maximum.reduce([seconds(k) for k in b.model.kinds])}
