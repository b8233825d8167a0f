"""What no plan of a frame or shape can beat: lower bounds of time and memory, so that most of the space need not be costed.

A step takes T = M·t_slowest + ramp(schedule) + closing(sharding). Going down the layers of `space`, each bound keeps what is decided
and takes the best of what is open:

**Shape**. Let F, I, W be the seconds of all blocks of the model for one micro-batch. The slowest of P pipeline ranks takes at least their
mean, whatever stages it was given; each phase takes what the device or the host needs, and the sum of maxima is at least the maximum
of sums. ZeRO-3 adds gathers to this and takes nothing away, and `closing` is not negative:

    T ≥ min over schedules of makespan(P, M, F/P, I/P, W/P) + the stack's step overhead

Memory is at least the mean over ranks: all states sharded as far as ZeRO goes, one micro-batch in flight. Without an order every axis
counts as innermost: no order puts more members of a group into a node.

**Frame**. Seconds a token fall as the micro-batch grows (fixed costs are shared, nothing grows faster than it), so the largest
micro-batch without a bubble bounds all; memory falls with it, so the smallest one does.

**Sharded shape**. Closing, gathers and states are exact, the schedule is open: T ≥ M·mean + ramp + closing. Reducing gradients hides behind
backward, so a slower rank closes sooner, but by less than it is slower: hiding reaches at most 85% of backward. Where each of several stages
cuts its gradients into buckets by itself there are more and smaller messages: longer in all, but the last, which nothing hides, may be shorter.

F, I and W depend on what happens inside a layer, not on pp, dp or the batch: few **kernels** are costed for all frames.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import numpy as np

from meshwright.cost.step import StepCost, rank_time, step_cost
from meshwright.describe.cluster import DTYPE_BYTES
from meshwright.describe.schedules import RULES
from meshwright.lower.batch import SCHEDULES
from meshwright.lower.op import StepProgram
from meshwright.lower.stages import average_blocks
from meshwright.lower.step import lower
from meshwright.planner.search import intervals
from meshwright.planner.search.space import Space
from meshwright.planner.search.table import Table, codes, grouped, join
from meshwright.programs.pipelines import formulas

Virtuals = tuple[np.ndarray, ...]  # numbers of virtual stages a rank may have: one, or the fewest and the most
CHUNK = 4096  # rows costed at once: their arrays stay in cache
KERNEL = ("tp", "sp", "cp", "cp_kind", "etp", "ep", "microbatch", "recompute", "dtype", "lap")
SAMPLED = 5  # ranks of a pipeline that a batch looks at, at most
RANKS = tuple(
    f"{x}{k}" for x in "rbo" for k in range(SAMPLED)
)  # their numbers, bytes, and bytes of one more micro-batch in flight
# Columns that the bounds of a schedule read.
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


def kernel(space: Space, rows: Table) -> Table:
    """Cost rows without sharding or pipeline: f, i, w of the whole model, dense and expert elements of a tensor-parallel rank, bytes kept for
    backward by the model and by its largest layer, how much less all others keep, bytes alive while a layer is recomputed."""
    program = lower(space.batch(rows))
    cost = step_cost(program, space.cluster)
    b, counts = program.batch, average_blocks(program.batch).counts
    mean = rank_time(program, cost.times, average_blocks(b), np.zeros(b.n))
    slack = 1 + b.stack.allocator_slack
    dense, expert = (
        sum(counts[block] * groups[g] for block, groups in program.parameters.items()) * b.pp
        for g in ("dense", "expert")
    )
    saved = sum(counts[block] * sum(parts.values()) for block, parts in program.saved.items() if block != "head")
    kinds = [kind for kind in ("dense", "moe") if kind in program.saved and np.any(counts[kind])]
    layers = [np.broadcast_to(sum(program.saved[kind].values()), b.n) for kind in kinds]
    layer = np.maximum.reduce(layers)
    lighter = sum(counts[kind] * b.pp * (layer - size) for kind, size in zip(kinds, layers, strict=True))
    again = np.where(b.recompute == 2, program.transient, 0.0)
    kept = slack * ~b.offload_activations
    return Table(
        f=mean.f * b.pp,
        i=mean.i * b.pp,
        w=mean.w * b.pp,
        dense=dense,
        expert=expert,
        saved=kept * saved * b.pp,
        layer=kept * layer,
        lighter=kept * lighter,
        again=np.broadcast_to(slack * again, b.n),
    )


def kernels(space: Space, rows: Table) -> Table:
    """Rows with what their kernel costs, each distinct kernel costed once."""
    columns = [rows.columns[name] for name in KERNEL]
    if "order" in rows:
        columns += [rows.order, rows.pp, rows.dp]
    _, first, which = np.unique(codes(columns), return_index=True, return_inverse=True)
    found = join([kernel(space, part) for part in rows.take(first).chunks(CHUNK)])
    return rows.but(**found.take(which).columns)


def of_frames(space: Space, rows: Table) -> Table:
    """Frames with the least seconds and bytes of their plans: the largest micro-batch has the best rate, the smallest saves least."""
    rows = kernels(space, rows)
    smallest = np.ones(len(rows))
    for (dp, pp), at in grouped((rows.dp, rows.pp)):
        smallest[at] = space.sizes(dp, pp).microbatch[0]
    time = space.microbatches(rows) * (rows.f + rows.i + rows.w) / rows.pp + space.stack.step_overhead
    return rows.but(time=time, memory=least_memory(space, rows, smallest / rows.microbatch))


def of_shapes(space: Space, rows: Table, limit: float = np.inf) -> Table:
    """Shapes, placed or not, with the least seconds and bytes of their plans that keep to a memory limit."""
    return of_kernels(space, kernels(space, rows), limit)


def of_kernels(space: Space, rows: Table, limit: float = np.inf) -> Table:
    """Rows that know their kernel, sharded or not, with the same; `alone` are the bytes of one micro-batch in flight. Sharded rows are bounded so
    before they are costed: of most only the naive schedule fits."""
    m, alone = space.microbatches(rows), least_memory(space, rows)

    def memory(name: str, some: Table, virtuals: Virtuals, fewest: np.ndarray) -> np.ndarray:
        """The mean rank keeps what its layers save, times the micro-batches in flight: of the fewest layers that a rank has those of the first and
        last rank halved, since they fall (or rise, and then stop) from one to the other; of the rest, and of smaller layers, the least and most."""
        ends = [least_in_flight(name, some, virtuals, rank) for rank in (0, some.pp - 1)]
        rest = space.model.layers / some.pp - fewest
        kept = some.layer * (fewest * (ends[0] + ends[1]) / 2 + rest * np.minimum(*ends))
        return some.alone + np.maximum(0.0, kept - (some.lighter * np.maximum(*ends) + some.saved) / some.pp)

    over = np.full(len(rows), space.stack.step_overhead)
    work = rows.only("pp", "layer", "lighter", "saved").but(
        m=m, alone=alone, **{k: rows.columns[k] / rows.pp for k in "fiw"}
    )
    time, least = best_schedule(space, work.but(looped=over, folded=over), memory, limit)
    piped = rows.pp > 1
    single = m * (rows.f + rows.i + rows.w) + over
    return rows.but(time=np.where(piped, time, single), memory=np.where(piped, least, alone), alone=alone)


def least_memory(space: Space, rows: Table, share: np.ndarray | float = 1.0) -> np.ndarray:
    """Bytes of the mean rank with one micro-batch in flight (a `share` of the kernel's); sharded as the row says, or as far as possible."""
    n, base, work = len(rows), space.base, space.workload
    sizes = np.array([[DTYPE_BYTES[d] for d in (p, g, s)] for p, g, s, _ in space.dtypes])[rows.dtype].T  # type: ignore[index]
    param, grad, state = sizes
    moments = (np.where(base.master & (param < 4), 4.0, 0.0) + work.state_copies * state) * (
        base.offload not in ("states", "both")
    )
    most = max(space.choices.numbers("zero", space.choices.words["zero"]), default=0)
    zero = rows.columns.get("zero", np.full(n, most))
    each = rows.columns.get("reduce_each", np.full(n, most >= 2))
    shard = rows.columns.get("shard", rows.dp) * rows.cp * 1.0
    spread = rows.tp / (rows.etp * rows.ep)  # experts are repeated on this many times fewer ranks than dense weights
    states = np.zeros(n)
    for elements, ranks in (
        (rows.dense, shard),
        (rows.expert, np.minimum(rows.cp * rows.dp * spread, np.maximum(1.0, shard * spread))),
    ):
        cut = (
            param / np.where(zero >= 3, ranks, 1.0)
            + grad / np.where((zero >= 2) & each, ranks, 1.0)
            + moments / np.where(zero >= 1, ranks, 1.0)
        )
        states += elements / rows.pp * cut
    return states + (rows.saved / rows.pp + rows.again) * share + space.stack.context


def best_schedule(
    space: Space, work: Table, memory: Callable[[str, Table, Virtuals, np.ndarray], np.ndarray], limit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Least seconds and bytes of rows under the schedules that keep to a memory limit. Most virtual stages have the least bubble; what is in
    flight rises or falls with them, so that the fewest or the most have the least. `work` has pp, m and f, i, w of a mean rank; `looped` and
    `folded` are the seconds to add for ranks that keep their layers together, and for others."""
    time, least = np.full(len(work), np.inf), np.full(len(work), np.inf)
    piped = np.flatnonzero(work.pp > 1)
    some, layers = work.take(piped), space.model.layers
    distinct, which = np.unique(some.pp, return_inverse=True)
    legal = [space.virtuals(int(p)) or [layers + 1] for p in distinct]
    fewest = [min(v * (layers // (int(p) * v)) for v in vs) for p, vs in zip(distinct, legal, strict=True)]
    looped = [np.array(x, np.int64)[which] for x in ([min(vs) for vs in legal], [max(vs) for vs in legal], fewest)]
    for name in space.choices.words["schedule"] if len(piped) else ():
        rule = RULES[name]
        if name == "auto":  # found by search: it may have no bubble, and one micro-batch in flight
            seconds, size = some.m * (some.f + some.i + some.w), some.alone
        else:
            v = np.full_like(some.pp, rule.virtual)
            *virtuals, kept = looped if rule.most_virtual > 2 else (v, v * (layers // (some.pp * v)))
            seconds = span(name, some.pp, some.m, virtuals[-1], some.f, some.i, some.w)
            size = np.where(some.pp * virtuals[0] <= layers, memory(name, some, tuple(virtuals), kept), np.inf)
        seconds = seconds + (some.folded if regroups(space, name) else some.looped)
        time[piped] = np.minimum(time[piped], np.where(size <= limit, seconds, np.inf))
        least[piped] = np.minimum(least[piped], size)
    return time, least


def least_in_flight(schedule: str, rows: Table, virtuals: Virtuals, rank: np.ndarray | int) -> np.ndarray:
    """Micro-batches in flight on a rank, counted in the rank's own, with whichever number of virtual stages has fewer."""
    return reduce(np.minimum, (formulas.in_flight(schedule, rows.pp, rows.m, v, rank) / v for v in virtuals))


def span(
    schedule: str, pp: np.ndarray, m: np.ndarray, virtual: np.ndarray, f: np.ndarray, i: np.ndarray, w: np.ndarray
) -> np.ndarray:
    """Seconds of M micro-batches on equal ranks whose f, i, w are a rank's, messages free."""
    total = formulas.makespan(schedule, pp, m, virtual, f / virtual, i / virtual, w / virtual)
    return np.maximum(total, m * (f + i + w))


def of_sharded(space: Space, rows: Table, limit: float = np.inf) -> Table:
    """Sharded rows, bounded by `of_kernels`, with the least seconds and bytes of their plans that keep to a memory limit.

    They are costed under the naive schedule. Without a pipeline that is exact. Otherwise it adds what any schedule keeps: f, i, w of the mean
    rank; `closing`, what is neither micro-batches nor bubble, and `pace`, the micro-batches of the slowest rank; the seconds of a message; and of
    the sampled ranks (first, last, the longest) the bytes with one micro-batch in flight and what one more adds; whether gradients go in
    buckets of each stage (`parts`), and whether a split backward asks for its inputs `twice`. Looped schedules
    cost at least that: however many stages a rank has, no fewer layers meet the embedding or the head. V-shaped ones, and looped ones of layers of
    two kinds, deal out layers otherwise; for them only the mean is a bound.
    """
    program = lower(space.batch(rows))
    cost = step_cost(program, space.cluster)
    b, n = program.batch, len(rows)
    slowest = np.choose(cost.slowest, [np.broadcast_to(r.total, n) for r in cost.ranks])
    pace = np.maximum(b.microbatches, 1.0) * slowest
    closing = cost.time - cost.exposed["bubble"] - pace
    rank = rank_time(program, cost.times, average_blocks(b), np.zeros(n))
    folded = rows.alone + besides(program, cost)
    parts = (rows.dp * rows.cp > 1) & ((rows.zero == 0) | space.stack.flat_shards | bool(space.model.experts))
    twice = (rows.sp & (rows.tp > 1)) | (space.workload.precision == "fp8" and space.stack.shared_scales)
    tail = np.where(parts, cost.tail, 0.0)
    rows = rows.but(
        f=rank.f,
        i=rank.i,
        w=rank.w,
        closing=closing,
        pace=pace,
        message=np.broadcast_to(cost.boundary, n),
        folded=folded,
        tail=tail,
        parts=parts,
        twice=twice,
        **sampled_ranks(program, cost),
        **intervals.ends(program, cost),
    )
    work = rows.only(*SCHEDULED).but(m=space.microbatches(rows), alone=folded, looped=closing - tail, bytes=folded)
    work = work.but(folded=np.full(n, space.stack.step_overhead))
    time, least = best_schedule(space, work, partial(in_flight_bytes, space), limit)
    alone = rows.pp == 1
    return rows.but(time=np.where(alone, cost.time, time), memory=np.where(alone, cost.peak_memory, least))


def regroups(space: Space, schedule: str) -> bool:
    """Whether a schedule puts other layers together than one stage a rank does: V-shaped ones, and looped ones of layers of two kinds."""
    rule = RULES[schedule]
    return rule.placement == "v" or (space.mixed and rule.most_virtual > 2)


def in_flight_bytes(
    space: Space, schedule: str, rows: Table, virtuals: Virtuals, fewest: np.ndarray | None = None
) -> np.ndarray:
    """Lower bound of the bytes of the fullest rank under a schedule: from the sampled ranks, or from the mean rank."""
    if not regroups(space, schedule):
        return looped_bytes(rows, schedule, virtuals)
    ends = [least_in_flight(schedule, rows, virtuals, rank) for rank in (0, rows.pp - 1)]
    return rows.bytes + (np.minimum(*ends) - 1) * rows.saved / rows.pp


def sampled_ranks(program: StepProgram, cost: StepCost) -> dict[str, np.ndarray]:
    """Of the sampled ranks: their numbers (r0, r1, …), their bytes (b0, …), and the bytes of one more micro-batch in flight (o0, …)."""
    b, out = program.batch, {}
    for k in range(SAMPLED):
        at = min(k, len(cost.stage_blocks) - 1)
        held = cost.stage_blocks[at].counts
        saved = sum(held[block] * sum(parts.values()) for block, parts in program.saved.items() if block != "head")
        out[f"r{k}"] = np.broadcast_to(cost.stage_blocks[at].rank, b.n).astype(np.int64)
        out[f"b{k}"] = np.add.reduce([np.broadcast_to(x, b.n) for x in cost.memory[at].values()])
        out[f"o{k}"] = np.broadcast_to((1 + b.stack.allocator_slack) * saved * ~b.offload_activations, b.n)
    return out


def besides(program: StepProgram, cost: StepCost) -> np.ndarray:
    """Bytes that any rank has besides states and activations: gathered weights, working memory, communicators. The least of the sampled
    ranks. With two ranks both hold an end of the model, so the bound is 0."""
    b = program.batch
    parts = [
        (1 + b.stack.allocator_slack) * (m["gathered"] + m["working"]) + m["context"] - b.stack.context
        for m in cost.memory
    ]
    return np.where(b.pp > 2, np.minimum.reduce([np.broadcast_to(p, b.n) for p in parts]), 0.0)


def of_schedules(space: Space, plans: Table) -> Table:
    """Plans with their least seconds and bytes, from their sharded rows and the closed forms of their schedules.

    `exact` marks rows whose intervals (`planner.search.intervals`) and bytes equal those of costing the plan: looped schedules whose ranks hold what
    they hold with one stage each. There `time` is the low end of the interval.
    """
    plans = plans.but(m=space.microbatches(plans), bytes=plans.folded)
    time, memory, exact = plans.time.copy(), plans.memory.copy(), np.zeros(len(plans), bool)
    ramp = np.zeros(len(plans))
    for code in np.unique(plans.schedule[plans.pp > 1]):
        at = np.flatnonzero((plans.schedule == code) & (plans.pp > 1))
        rows, name = plans.take(at), SCHEDULES[code]
        if name == "auto":
            continue
        looped, v = RULES[name].placement == "looped", rows.virtual
        memory[at] = in_flight_bytes(space, name, rows, (v,))
        cut = rows.parts & (v > 1)
        closing = space.stack.step_overhead if regroups(space, name) else rows.closing - cut * rows.tail
        time[at] = span(name, rows.pp, rows.m, v, rows.f, rows.i, rows.w) + closing
        if (
            looped and not space.stack.blocking_p2p
        ):  # blocking messages are part of every stage's time, more of them with more stages
            same = (v == 1) | ~(space.uneven(rows) | space.mixed | cut)
            if RULES[name].splits:
                same &= ~rows.twice
            total = formulas.makespan(name, rows.pp, rows.m, v, rows.f / v, rows.i / v, rows.w / v, rows.message)
            ramp[at] = np.maximum(total - rows.m * (rows.f + rows.i + rows.w), 0.0)
            exact[at] = same
    found = intervals.interval(
        space, plans.but(ramp=ramp, mean=plans.f + plans.i + plans.w, leads=np.zeros(len(plans), bool))
    )
    return plans.but(time=np.where(exact, found.low, time), memory=memory, exact=exact, **found.columns)


def looped_bytes(rows: Table, schedule: str, virtuals: Virtuals) -> np.ndarray:
    """Bytes of the fullest sampled rank, with the micro-batches in flight that a looped schedule has there."""
    by_rank = []
    for k in range(SAMPLED):
        flying = least_in_flight(schedule, rows, virtuals, rows.columns[f"r{k}"])
        by_rank.append(rows.columns[f"b{k}"] + (flying - 1) * rows.columns[f"o{k}"])
    return np.maximum.reduce(by_rank)
