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
backward, so a slower rank closes sooner, but by less than it is slower: hiding reaches at most 85% of backward.

F, I and W depend on what happens inside a layer, not on pp, dp or the batch: few **kernels** are costed for all frames.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.step import rank_time, step_cost
from meshwright.describe.cluster import DTYPE_BYTES
from meshwright.lower.batch import SCHEDULES
from meshwright.lower.stages import mean_holding
from meshwright.lower.step import lower
from meshwright.planner.space import Space
from meshwright.planner.table import Table, codes, join
from meshwright.programs.pipelines import formulas
from meshwright.programs.pipelines.rules import RULES

CHUNK = 4096  # rows costed at once: their arrays stay in cache
KERNEL = ("tp", "sp", "cp", "cp_kind", "etp", "ep", "microbatch", "recompute", "dtype", "lap")


SCHEDULED = ("pp", "dp", "microbatch", "f", "i", "w", "closing", "looped", "first", "one")  # what tells schedules apart


def kernel(space: Space, rows: Table) -> Table:
    """Cost rows without sharding or pipeline: f, i, w of the whole model, elements of a tensor-parallel rank, bytes kept for backward,
    bytes alive while a layer is recomputed."""
    program = lower(space.batch(rows))
    cost = step_cost(program, space.cluster)
    b, counts = program.batch, mean_holding(program.batch).counts
    mean = rank_time(program, cost.times, mean_holding(b), np.zeros(b.n))
    slack = 1 + b.stack.allocator_slack
    elements = sum(counts[block] * sum(groups.values()) for block, groups in program.parameters.items())
    saved = sum(counts[block] * sum(parts.values()) for block, parts in program.saved.items() if block != "head")
    again = np.where(b.recompute == 2, program.transient, 0.0)
    return Table(f=mean.f * b.pp, i=mean.i * b.pp, w=mean.w * b.pp, elements=elements * b.pp,
                 saved=slack * saved * b.pp * ~b.offload_activations, again=np.broadcast_to(slack * again, b.n))  # fmt: skip


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
    distinct, which = np.unique(rows.dp, return_inverse=True)
    smallest = np.array([space.sizes(int(dp)).microbatch.min() for dp in distinct])[which]
    time = space.microbatches(rows) * (rows.f + rows.i + rows.w) / rows.pp + space.stack.step_overhead
    return rows.but(time=time, memory=least_memory(space, rows, smallest / rows.microbatch))


def of_shapes(space: Space, rows: Table) -> Table:
    """Shapes, placed or not, with the least seconds and bytes of their plans."""
    rows = kernels(space, rows)
    mean = {name: rows.columns[name] / rows.pp for name in "fiw"}
    time = least_span(space, rows.pp, space.microbatches(rows), **mean) + space.stack.step_overhead
    return rows.but(time=time, memory=least_memory(space, rows))


def least_memory(space: Space, rows: Table, share: np.ndarray | float = 1.0) -> np.ndarray:
    """Bytes of the mean rank with one micro-batch in flight (a `share` of the kernel's); sharded as told, or as far as may be."""
    n, base, work = len(rows), space.base, space.workload
    sizes = np.array([[DTYPE_BYTES[d] for d in (p, g, s)] for p, g, s, _ in space.dtypes])[rows.dtype].T  # type: ignore[index]
    param, grad, state = sizes
    moments = (np.where(base.master & (param < 4), 4.0, 0.0) + work.state_copies * state) * (
        base.offload not in ("states", "both")
    )
    most = max(space.choices.numbers("zero", space.choices.words["zero"]), default=0)
    zero = rows.columns.get("zero", np.full(n, most))
    each = rows.columns.get("reduce_each", np.full(n, most >= 2))
    shard = rows.columns.get("shard", rows.dp) * rows.cp * np.maximum(1.0, rows.tp / (rows.etp * rows.ep))
    cut = (
        param / np.where(zero >= 3, shard, 1.0)
        + grad / np.where((zero >= 2) & each, shard, 1.0)
        + moments / np.where(zero >= 1, shard, 1.0)
    )
    return rows.elements / rows.pp * cut + (rows.saved / rows.pp + rows.again) * share + space.stack.context


def least_span(space: Space, pp: np.ndarray, m: np.ndarray, f: np.ndarray, i: np.ndarray, w: np.ndarray,
               placements: tuple[str, ...] = ("looped", "v")) -> np.ndarray:  # fmt: skip
    """Seconds of M micro-batches under the best schedule there could be, with as many virtual stages as layers allow; ∞: there is none."""
    out = m * (f + i + w)
    piped = np.flatnonzero(pp > 1)
    if not len(piped) or "auto" in space.choices.words["schedule"]:
        return out
    pp, m, f, i, w = (x[piped] for x in (pp, m, f, i, w))
    best = np.full(len(piped), np.inf)
    deepest = np.maximum(2, np.minimum(space.choices.most["virtual"], space.model.layers // pp))
    for name in space.choices.words["schedule"]:
        if RULES[name].placement in placements:
            virtual = deepest if RULES[name].most_virtual > 2 else np.full_like(pp, RULES[name].virtual)
            best = np.minimum(best, span(name, pp, m, virtual, f, i, w))
    out[piped] = best
    return out


def span(
    schedule: str, pp: np.ndarray, m: np.ndarray, virtual: np.ndarray, f: np.ndarray, i: np.ndarray, w: np.ndarray
) -> np.ndarray:
    """Seconds of M micro-batches on equal ranks whose f, i, w are a rank's, messages free."""
    total = formulas.makespan(schedule, pp, m, virtual, f / virtual, i / virtual, w / virtual)
    return np.maximum(total, m * (f + i + w))


def of_sharded(space: Space, rows: Table) -> Table:
    """Sharded rows, whose `memory` is their `least_memory`, with the least seconds and bytes of their plans.

    They are costed under the naive schedule. Without a pipeline that is exact. Otherwise it adds f, i, w of the mean rank; `closing`, what is
    neither micro-batches nor bubble; `looped`, the bytes of the fullest rank with one micro-batch in flight; `first`, those of the first rank,
    and `one`, what one more micro-batch adds there. Looped schedules cost at least that: however many stages a rank has, no fewer layers
    meet the embedding or the head. V-shaped ones deal out layers otherwise; for them only the mean is a bound.
    """
    program = lower(space.batch(rows))
    cost = step_cost(program, space.cluster)
    b, n = program.batch, len(rows)
    slowest = np.choose(cost.slowest, [np.broadcast_to(r.total, n) for r in cost.ranks])
    closing = cost.time - cost.exposed["bubble"] - np.maximum(b.microbatches, 1.0) * slowest
    rank = rank_time(program, cost.times, mean_holding(b), np.zeros(n))
    work = (rows.pp, space.microbatches(rows), rank.f, rank.i, rank.w)
    looped = least_span(space, *work, placements=("looped", "either")) + closing
    shaped = least_span(space, *work, placements=("v",)) + space.stack.step_overhead
    held = cost.holdings[0].counts
    saved = sum(held[block] * sum(parts.values()) for block, parts in program.saved.items() if block != "head")
    one = (1 + b.stack.allocator_slack) * saved * ~b.offload_activations
    alone = rows.pp == 1
    return rows.but(
        time=np.where(alone, cost.time, np.minimum(looped, shaped)),
        memory=np.where(alone | ~np.isfinite(shaped), cost.peak_memory, np.minimum(rows.memory, cost.peak_memory)),
        f=rank.f, i=rank.i, w=rank.w, closing=closing, looped=cost.peak_memory, one=np.broadcast_to(one, n),
        first=np.add.reduce([np.broadcast_to(x, n) for x in cost.memory[0].values()]),
    )  # fmt: skip


def of_schedules(space: Space, plans: Table) -> Table:
    """Plans with their least seconds and bytes, from their sharded rows and the closed forms of their schedules."""
    m = space.microbatches(plans)
    time, memory = plans.time.copy(), plans.memory.copy()
    for code in np.unique(plans.schedule[plans.pp > 1]):
        at = (plans.schedule == code) & (plans.pp > 1)
        rows, name = plans.take(at), SCHEDULES[code]
        if name == "auto":
            continue
        time[at] = span(name, rows.pp, m[at], rows.virtual, rows.f, rows.i, rows.w)
        if RULES[name].placement == "looped":
            flying = formulas.in_flight(name, rows.pp, m[at], rows.virtual, 0) / rows.virtual
            time[at] += rows.closing
            memory[at] = np.maximum(rows.looped, rows.first + (flying - 1) * rows.one)
        else:
            time[at] += space.stack.step_overhead
    return plans.but(time=time, memory=memory)
