"""Lower bounds of step time and memory for all plans below a row of the space, so that most plans need not be costed.

A step takes T = M·t_slowest + ramp(schedule) + closing(sharding). Each bound uses the fields that the row has, and the best value of each field
that belongs to a lower layer of `space`:

**Shape**. Let F, I, W be the seconds of all blocks of the model for one micro-batch. The slowest of P pipeline ranks takes at least the mean
over the ranks, for any division into stages: each phase takes at least the time of the device and of the host, and a sum of maxima is at least
the maximum of the sums. ZeRO-3 only adds gathers, and `closing` is not negative:

    T ≥ min over schedules of makespan(P, M, F/P, I/P, W/P) + the stack's step overhead

Memory is at least the mean over ranks, with states sharded by the highest allowed ZeRO stage and one micro-batch in flight. Without an order,
every axis counts as innermost: no order puts more members of a group into a node.

**Frame**. Seconds per token fall as the micro-batch grows, because fixed costs are shared and no cost grows faster than the micro-batch. So the
largest micro-batch without a bubble gives the bound of time. Memory grows with the micro-batch, so the smallest one gives the bound of memory.

**Sharded shape**. Closing, gathers and states are exact; only the schedule is undecided: T ≥ M·mean + ramp + closing. Gradient reduction is hidden
behind backward, so a slower rank has a shorter closing; but it gains less there than it loses, because at most 85% of backward can hide
communication. If each virtual stage cuts its gradients into buckets separately, there are more and smaller messages: their total time is longer,
but the last message, which nothing hides, may be shorter.

F, I and W depend only on the fields that change the work inside a layer, not on the batch, and on pp and dp only in whether gradients are kept whole.
So a few **kernels** (distinct combinations of these) are costed for all frames.
"""

from collections.abc import Callable
from functools import partial, reduce

import numpy as np

from meshwright.cost.closing import host_update_time
from meshwright.cost.collective import CollectiveTimes
from meshwright.cost.phase import phase_times, rank_time
from meshwright.cost.step import StepCost, step_cost
from meshwright.describe.plan_fields import PlanArrays
from meshwright.describe.schedules import SCHEDULES
from meshwright.lower import sync
from meshwright.lower.batch import BYTES, distinct_codes
from meshwright.lower.program import AFTER_LAYERS, DATA_PARALLEL
from meshwright.lower.step import lower, lower_blocks
from meshwright.planner.search import intervals
from meshwright.planner.search.choices import DTYPES
from meshwright.planner.search.space import Space, codes, grouped, join
from meshwright.programs.pipelines import formulas

Virtuals = tuple[np.ndarray, ...]  # numbers of virtual stages per rank: one number, or the smallest and the largest
CHUNK = 4096  # rows costed at once: their arrays stay in cache
KERNEL = ("tp", "sp", "cp", "cp_kind", "expert_tp", "ep", "microbatch", "recompute", *DTYPES, "overlap")
SAMPLED = 5  # most pipeline ranks that a batch evaluates
RANKS = ("sampled_rank", "rank_bytes", "microbatch_bytes")  # one column for each sampled rank, (plans, SAMPLED)
# Columns that the bounds of a schedule need.
SCHEDULED = (
    "pp",
    "dp",
    "microbatch",
    "f",
    "i",
    "w",
    "closing",
    "pace",
    "message",
    "folded",
    "saved",
    "ends",
    "longest",
    "tail",
    "parts",
    "twice",
    *RANKS,
)


def kernel(space: Space, rows: PlanArrays) -> PlanArrays:
    """Cost rows without sharding or pipeline. The columns are f, i, w of the whole model; dense and expert elements of a tensor-parallel rank, and
    bytes of its frozen ones; bytes saved for backward by the model (`saved`) and by its largest layer (`layer`); the sum over layers of how much less
    than the largest they save (`lighter`); bytes that recomputing one layer needs (`recompute_bytes`)."""
    program = lower_blocks(space.batch(rows))
    b = program.batch
    times = phase_times(program, space.cluster, CollectiveTimes(space.cluster, b))
    mean, counts = rank_time(program, times, program.mean, np.zeros(b.n)), program.mean.counts
    slack = 1 + b.stack.allocator_slack
    dense, expert = (
        sum(counts[block] * groups[g] for block, groups in program.parameters.items()) * b.pp
        for g in ("dense", "expert")
    )
    frozen = {
        f"frozen_{g}": b.full(sum(counts[block] * groups[g] for block, groups in program.frozen.items()) * b.pp)
        for g in (DATA_PARALLEL if program.frozen else ())
    }
    saved = sum(
        counts[block] * sum(parts.values()) for block, parts in program.saved.items() if block not in AFTER_LAYERS
    )
    kinds = b.model.kinds
    layers = [b.full(sum(program.saved[kind].values())) for kind in kinds]
    layer = np.maximum.reduce(layers)
    lighter = sum(counts[kind] * b.pp * (layer - size) for kind, size in zip(kinds, layers, strict=True))
    recompute_bytes = np.where(b.reruns_layers, program.transient, 0.0)
    device_slack = slack * ~b.offload_activations
    return PlanArrays(
        f=mean.f * b.pp,
        i=mean.i * b.pp,
        w=mean.w * b.pp,
        dense=dense,
        expert=expert,
        saved=device_slack * saved * b.pp,
        layer=device_slack * layer,
        lighter=device_slack * lighter,
        recompute_bytes=b.full(slack * recompute_bytes),
        **frozen,
    )


def kernels(space: Space, rows: PlanArrays) -> PlanArrays:
    """Rows with the costs of their kernel; each distinct kernel is costed once."""
    columns = [*(rows.columns[name] for name in KERNEL), space.sums_whole(rows)]
    if "order" in rows:
        columns += [rows.order, rows.pp, rows.dp]
    _, first, which = np.unique(codes(columns), return_index=True, return_inverse=True)
    computed = join([kernel(space, part) for part in rows.take(first).chunks(CHUNK)])
    return rows.but(**computed.take(which).columns)


def of_frames(space: Space, rows: PlanArrays) -> PlanArrays:
    """Frames with lower bounds of time (from the largest micro-batch) and memory (from the smallest)."""
    return frame_bounds(space, kernels(space, rows))


def reused(space: Space, rows: PlanArrays, enough: float = np.inf) -> PlanArrays:
    """Frames that `of_frames` bounded in the same space with another base plan, with bounds that hold in this one: copies and compression only add
    time; saved activations may take no memory if they are offloaded. Frames slower than `enough` seconds are left out."""
    rows = rows.take(rows.time <= enough)
    if space.base.offloads_activations:
        rows = rows.but(**dict.fromkeys(("saved", "layer", "lighter"), np.zeros(len(rows))))
    return frame_bounds(space, rows)


def frame_bounds(space: Space, rows: PlanArrays) -> PlanArrays:
    """Frames that have the columns of their kernel, with their bounds."""
    smallest = np.ones(len(rows))
    for (dp, pp), at in grouped((rows.dp, rows.pp)):
        smallest[at] = space.sizes(dp, pp).microbatch[0]
    time = space.microbatches(rows) * (rows.f + rows.i + rows.w) / rows.pp + space.stack.step_overhead
    time = time + host_update(space, rows)
    return rows.but(time=time, memory=least_memory(space, rows, smallest / rows.microbatch))


def of_shapes(space: Space, rows: PlanArrays, limit: float = np.inf) -> PlanArrays:
    """Shapes, with or without an order, with lower bounds of time and memory of their plans within a memory limit."""
    return of_kernels(space, kernels(space, rows), limit)


def of_kernels(space: Space, rows: PlanArrays, limit: float = np.inf) -> PlanArrays:
    """Rows that have the columns of their kernel, with the bounds of `of_shapes`. `alone` is the bytes with one micro-batch in flight. Sharded rows
    get this bound before they are costed: for most of them only the naive schedule fits."""
    m, alone = space.microbatches(rows), least_memory(space, rows)

    def memory(name: str, some: PlanArrays, virtuals: Virtuals, fewest: np.ndarray) -> np.ndarray:
        """Bytes of the mean rank: the bytes that its layers save, times the micro-batches in flight. In flight means, for the `fewest` layers that
        every rank has, the mean of the first and the last rank, because the number falls from one to the other (or rises, then stays constant);
        for the remaining layers, the smaller of the two numbers; for the correction by lighter layers, the larger."""
        ends = [least_in_flight(name, some, virtuals, rank) for rank in (np.zeros_like(some.pp), some.pp - 1)]
        remaining = space.model.layers / some.pp - fewest
        saved = some.layer * (fewest * (ends[0] + ends[1]) / 2 + remaining * np.minimum(*ends))
        return some.alone + np.maximum(0.0, saved - (some.lighter * np.maximum(*ends) + some.saved) / some.pp)

    over = space.stack.step_overhead + host_update(space, rows)
    work = rows.select("pp", "layer", "lighter", "saved").but(
        m=m, alone=alone, **{k: rows.columns[k] / rows.pp for k in "fiw"}
    )
    time, least = best_schedule(space, work.but(looped=over, folded=over), memory, limit)
    piped = rows.pp > 1
    single = m * (rows.f + rows.i + rows.w) + over
    return rows.but(time=np.where(piped, time, single), memory=np.where(piped, least, alone), alone=alone)


def least_memory(space: Space, rows: PlanArrays, share: np.ndarray | float = 1.0) -> np.ndarray:
    """Bytes of the mean rank with one micro-batch in flight (`share` scales the kernel's micro-batch). The states are sharded by the row's ZeRO stage
    if it has one, else by the highest allowed stage."""
    n, base, work = len(rows), space.base, space.workload
    param, grad, state = (BYTES[rows.columns[name]] for name in DTYPES[:3])
    moments = (np.where(base.master & (param < 4), 4.0, 0.0) + work.state_copies * state) * (
        base.offload not in ("states", "both")
    )
    zero = zero_stage(space, rows)
    shards = np.where(base.master & (param < 4), 0.0, param) if space.stack.fp32_shards else param
    each = rows.reduces_each if "reduce" in rows else zero >= 2
    states, gradients = np.zeros(n), np.zeros(n)
    for group, (elements, ranks) in zip(DATA_PARALLEL, sharded_elements(rows), strict=True):
        frozen = rows.columns.get(f"frozen_{group}", 0.0)
        states += frozen / rows.pp / np.where(zero >= 3, ranks, 1.0)
        cut = np.where(zero >= 3, shards / ranks, param) + moments / np.where(zero >= 1, ranks, 1.0)
        states += elements / rows.pp * cut
        gradients += elements / rows.pp * grad / np.where((zero >= 2) & each, ranks, 1.0)
    activations = (rows.saved / rows.pp + rows.recompute_bytes) * share
    lazy = space.stack.lazy_gradients & (space.microbatches(rows) == 1)  # activations shrink as gradients grow
    return states + np.where(lazy, np.maximum(gradients, activations), gradients + activations) + space.stack.context


def zero_stage(space: Space, rows: PlanArrays) -> np.ndarray:
    """The ZeRO stage of each row; where it is not decided, the highest that is allowed."""
    most = max(space.choices.numbers("zero", space.choices.words["zero"]), default=0)
    return rows.columns.get("zero", np.full(len(rows), most))


def sharded_elements(rows: PlanArrays) -> list[tuple[np.ndarray, np.ndarray]]:
    """Dense and expert elements of all pipeline ranks together, and the ranks that each are sharded over at most."""
    shard = rows.columns.get("shard", rows.dp) * rows.cp * 1.0
    spread = rows.tp / (rows.etp * rows.ep)  # data-parallel ranks of experts over those of dense weights
    experts = np.minimum(rows.cp * rows.dp * spread, np.maximum(1.0, shard * spread))
    return [(rows.dense, shard), (rows.expert, experts)]


def host_update(space: Space, rows: PlanArrays) -> np.ndarray:
    """Seconds that the mean rank's update takes on the host, with the states sharded as in `least_memory`; 0 without offloaded states."""
    if space.base.offload not in ("states", "both"):
        return np.zeros(len(rows))
    sharded = zero_stage(space, rows) >= 1
    owned = sum(elements / np.where(sharded, ranks, 1.0) for elements, ranks in sharded_elements(rows)) / rows.pp
    batch = space.batch(rows)
    return batch.full(host_update_time(space.cluster.accelerator, sync.optimizer(batch, owned, 0.0)))


def best_schedule(
    space: Space, work: PlanArrays, memory: Callable[[str, PlanArrays, Virtuals, np.ndarray], np.ndarray], limit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Lower bounds of time and memory of rows over all schedules within a memory limit. The largest number of virtual stages has the smallest bubble.
    The micro-batches in flight rise or fall monotonically with that number, so either the smallest or the largest number has the fewest. `work` has
    pp, m and f, i, w of a mean rank. `looped` and `folded` are the closing seconds to add for schedules that keep the layers of a rank, and for
    schedules that regroup them (`regroups`)."""
    time, least = np.full(len(work), np.inf), np.full(len(work), np.inf)
    piped = np.flatnonzero(work.pp > 1)
    some, layers = work.take(piped), space.model.layers
    distinct, which = np.unique(some.pp, return_inverse=True)
    legal = [space.virtuals(int(p)) or [layers + 1] for p in distinct]
    fewest = [min(v * (layers // (int(p) * v)) for v in vs) for p, vs in zip(distinct, legal, strict=True)]
    looped = [np.array(x, np.int64)[which] for x in ([min(vs) for vs in legal], [max(vs) for vs in legal], fewest)]
    for name in space.choices.words["schedule"] if len(piped) else ():
        rule = SCHEDULES[name]
        v = np.full_like(some.pp, rule.virtual)
        *virtuals, fewest_layers = looped if rule.most_virtual > 2 else (v, space.fewest_layers(some.pp, v))
        if name == "auto":  # a searched schedule may have no bubble and one micro-batch in flight
            size = some.alone
        else:
            size = np.where(some.pp * virtuals[0] <= layers, memory(name, some, tuple(virtuals), fewest_layers), np.inf)
        least[piped] = np.minimum(least[piped], size)
        fits = np.flatnonzero(size <= limit)
        f, i, w, closing = (
            x[fits] for x in (some.f, some.i, some.w, some.folded if regroups(space, name) else some.looped)
        )
        pp, m = some.pp[fits], some.m[fits]
        seconds = m * (f + i + w) if name == "auto" else span(name, pp, m, virtuals[-1][fits], f, i, w)
        time[piped[fits]] = np.minimum(time[piped[fits]], seconds + closing)
    return time, least


def least_in_flight(schedule: str, rows: PlanArrays, virtuals: Virtuals, rank: np.ndarray) -> np.ndarray:
    """Micro-batches in flight on a rank, in units of all stages of the rank, for the number of virtual stages that has fewer."""
    return reduce(np.minimum, (formulas.in_flight(schedule, rows.pp, rows.m, v, rank) / v for v in virtuals))


def span(
    schedule: str, pp: np.ndarray, m: np.ndarray, virtual: np.ndarray, f: np.ndarray, i: np.ndarray, w: np.ndarray
) -> np.ndarray:
    """Makespan of M micro-batches on equal ranks with times f, i, w per rank and no message time."""
    total = formulas.makespan(schedule, pp, m, virtual, f / virtual, i / virtual, w / virtual)
    return np.maximum(total, m * (f + i + w))


def of_sharded(space: Space, rows: PlanArrays, limit: float = np.inf) -> PlanArrays:
    """Sharded rows, already bounded by `of_kernels`, with lower bounds of time and memory of their plans within a memory limit.

    The rows are costed under the naive schedule. Without a pipeline this is exact. With a pipeline, it gives the columns that do not depend on the
    schedule: f, i, w of the mean rank; `pace`, the seconds of all micro-batches on the slowest rank; `closing`, the step without micro-batches and
    bubble; `message`, the seconds of a message; for the sampled ranks (first, last, those with most layers) the bytes with one micro-batch in flight
    and the bytes of one more; `parts`, whether each stage has separate gradient buckets; `twice`, whether a split backward gathers or scales its
    inputs twice. Looped schedules cost at least this, because the rank with the embedding or the head never has fewer layers. V-shaped
    schedules, and looped schedules of models with two kinds of layers, divide the layers differently; for them only the mean is a bound.
    """
    program = lower(space.batch(rows))
    cost, b, n = step_cost(program, space.cluster), program.batch, len(rows)
    slowest = np.choose(cost.slowest, [np.broadcast_to(r.total, n) for r in cost.ranks])
    pace = np.maximum(b.microbatches, 1.0) * slowest
    closing = cost.time - cost.exposed["bubble"] - pace
    rank = rank_time(program, cost.times, program.mean, np.zeros(n))
    folded = rows.alone + overhead_bytes(cost)
    parts = (rows.dp * rows.cp > 1) & ((rows.zero == 0) | space.stack.flat_shards | bool(space.model.experts))
    twice = (rows.sp & (rows.tp > 1)) | (space.workload.precision == "fp8" and space.stack.shared_scales)
    tail = np.where(parts, cost.tail, 0.0)
    message, sampled = np.broadcast_to(cost.boundary, n), sampled_ranks(cost) | intervals.ends(cost)
    rows = rows.but(f=rank.f, i=rank.i, w=rank.w, closing=closing, pace=pace, message=message, folded=folded)
    rows = rows.but(tail=tail, parts=parts, twice=twice, **sampled)
    work = rows.select(*SCHEDULED).but(m=space.microbatches(rows), alone=folded, looped=closing - tail, bytes=folded)
    work = work.but(folded=np.full(n, space.stack.step_overhead))
    time, least = best_schedule(space, work, partial(in_flight_bytes, space), limit)
    alone = rows.pp == 1
    return rows.but(time=np.where(alone, cost.time, time), memory=np.where(alone, cost.peak_memory, least))


def regroups(space: Space, schedule: str) -> bool:
    """Whether the ranks hold other layers than with one stage per rank: V-shaped schedules, and looped ones if layers are of several kinds."""
    rule = SCHEDULES[schedule]
    return rule.placement == "v" or (space.mixed and rule.most_virtual > 2)


def in_flight_bytes(
    space: Space, schedule: str, rows: PlanArrays, virtuals: Virtuals, fewest: np.ndarray | None = None
) -> np.ndarray:
    """Lower bound of the bytes of the fullest rank under a schedule: from the sampled ranks, or from the mean rank."""
    if not regroups(space, schedule):
        return looped_bytes(rows, schedule, virtuals)
    ends = [least_in_flight(schedule, rows, virtuals, rank) for rank in (np.zeros_like(rows.pp), rows.pp - 1)]
    return rows.bytes + (np.minimum(*ends) - 1) * rows.saved / rows.pp


def sampled_ranks(cost: StepCost) -> dict[str, np.ndarray]:
    """`RANKS` of the sampled ranks: their numbers, their bytes, and the bytes of one more micro-batch in flight."""
    program, numbers, totals, more = cost.program, [], [], []
    b = program.batch
    for k in range(SAMPLED):
        at = min(k, len(program.ranks) - 1)
        counts = program.ranks[at].counts
        saved = sum(
            counts[block] * sum(parts.values()) for block, parts in program.saved.items() if block not in AFTER_LAYERS
        )
        numbers.append(b.full(program.ranks[at].rank).astype(np.int64))
        totals.append(np.add.reduce([b.full(x) for x in cost.memory[at].values()]))
        more.append(b.full((1 + b.stack.allocator_slack) * saved * ~b.offload_activations))
    return {name: np.stack(columns, axis=1) for name, columns in zip(RANKS, (numbers, totals, more), strict=True)}


def overhead_bytes(cost: StepCost) -> np.ndarray:
    """Bytes of gathered weights, working memory and communicators: the minimum over the sampled ranks. With two ranks each holds the embedding or
    the head, so the bound is 0."""
    b = cost.program.batch
    parts = [
        (1 + b.stack.allocator_slack) * (m["gathered"] + m["working"]) + m["context"] - b.stack.context
        for m in cost.memory
    ]
    return np.where(b.pp > 2, np.minimum.reduce([b.full(p) for p in parts]), 0.0)


def of_schedules(space: Space, plans: PlanArrays) -> PlanArrays:
    """Plans with lower bounds of time and memory, from their sharded rows and the closed forms of their schedules.

    `exact` marks plans whose intervals (`planner.search.intervals`) and bytes equal those of costing the plan: looped schedules whose ranks hold the
    same layers as with one stage per rank. For these, `time` is the low end of the interval.
    """
    plans = plans.but(m=space.microbatches(plans), bytes=plans.folded)
    time, memory, exact = plans.time.copy(), plans.memory.copy(), np.zeros(len(plans), bool)
    ramp = np.zeros(len(plans))
    for code in distinct_codes(plans.schedule[plans.pp > 1]):
        at = np.flatnonzero((plans.schedule == code) & (plans.pp > 1))
        rows, name = plans.take(at), SCHEDULES.names[code]
        if name == "auto":
            continue
        looped, v = SCHEDULES[name].placement == "looped", rows.virtual
        memory[at] = in_flight_bytes(space, name, rows, (v,))
        cut = rows.parts & (v > 1)
        closing = space.stack.step_overhead if regroups(space, name) else rows.closing - cut * rows.tail
        time[at] = span(name, rows.pp, rows.m, v, rows.f, rows.i, rows.w) + closing
        if (
            looped and not space.stack.blocking_p2p
        ):  # blocking messages are part of every stage's time, so more stages cost more
            same = (v == 1) | ~(space.uneven(rows) | space.mixed | cut)
            if space.model.pattern:  # of a hybrid all ranks are costed, and only some are sampled here
                same &= rows.pp <= SAMPLED
            if SCHEDULES[name].splits:
                same &= ~rows.twice
            total = formulas.makespan(name, rows.pp, rows.m, v, rows.f / v, rows.i / v, rows.w / v, rows.message)
            ramp[at] = np.maximum(total - rows.m * (rows.f + rows.i + rows.w), 0.0)
            exact[at] = same
    bound = intervals.interval(
        space, plans.but(ramp=ramp, mean=plans.f + plans.i + plans.w, leads=np.zeros(len(plans), bool))
    )
    return plans.but(memory=memory, exact=exact, **bound.columns).but(time=np.where(exact, bound.time, time))


def looped_bytes(rows: PlanArrays, schedule: str, virtuals: Virtuals) -> np.ndarray:
    """Bytes of the fullest sampled rank, with the micro-batches in flight under a looped schedule."""
    by_rank, in_flight = [], least_in_flight(schedule, rows, virtuals, rows.sampled_rank[:, 0])
    for k in range(SAMPLED):
        if k and SCHEDULES[schedule].uneven_ranks:
            in_flight = least_in_flight(schedule, rows, virtuals, rows.sampled_rank[:, k])
        by_rank.append(rows.rank_bytes[:, k] + (in_flight - 1) * rows.microbatch_bytes[:, k])
    return np.maximum.reduce(by_rank)
