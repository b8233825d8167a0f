"""The time of a training step: compute and communication streams, host, pipeline, and the work done once per step.

`cost.phase` times one micro-batch on one rank. Micro-batches run through the pipeline (`ramp`). Gradients are reduced behind the
last backward if the stack overlaps them; the optimizer and the step overhead of the stack end the step (`cost.closing`).

`exposed` splits the step of the slowest rank into parts that sum exactly: compute by part, communication by axis, host, bubble,
optimizer, overhead.

**The pipeline.** The closed forms of `programs.pipelines.formulas` are exact for equal stages. Real stages are not equal: the first has the
embedding, the last has the head, and the layers may not divide evenly. The slowest rank sets
the pace, and filling and draining pass through all ranks, so

    T = M · t_slowest + ( makespan of M micro-batches on stages of the mean − M · t_mean )

The second term is the ramp: (P−1)·t for 1F1B, (P−1)·t/V interleaved, less for the zero-bubble schedules.

`messages` lists the collectives of one plan one by one: size, the program that the library runs, the level it crosses, time and rate. `lower.traffic`
lists the same operations by number and bytes alone, without a cluster.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.cost.closing import closing_time
from meshwright.cost.collective import OPERATIONS, CollectiveTimes
from meshwright.cost.memory import memory
from meshwright.cost.phase import AXIS_OF, SPLIT_ONLY, PhaseTime, RankTime, phase_times, rank_time
from meshwright.describe.cluster import Cluster
from meshwright.lower.program import EXCHANGE, Array, Batch, Column, Op, StepProgram, present, scalar, sent
from meshwright.programs.pipelines import formulas

TRAFFIC_AXIS = {"stage": "dp"}  # bytes between all ranks of a stage count as dp traffic; their time counts as ep


@dataclass
class StepCost:
    """Costs of a batch of plans: arrays over the batch."""

    time: Column
    exposed: dict[str, Array]
    busy: dict[str, Array]
    flops: Array  # of the hardware, per device and step
    slowest: Column  # index into `ranks`, which are those of the program
    ranks: list[RankTime]
    times: dict[tuple[str, str], PhaseTime]  # by block and phase
    boundary: Column  # seconds of one pipeline message, with the gather of its parts
    after: Array  # seconds of reductions that follow the data-parallel ones: over tp, tied embeddings, and a stage
    reduce: Array  # seconds of gradient reduction and parameter gathering, hidden or not
    tail: Array  # seconds by which the last gradient message exceeds the other exposed gradient reduction
    unhidden: Array  # seconds of data-parallel communication that may overlap, but not enough compute hides it
    program: StepProgram
    network: CollectiveTimes
    sharing: float = 1.0  # processes per core (`Cluster.sharing`)

    @cached_property
    def memory(self) -> list[dict[str, Array]]:
        """Peak bytes by part, for each evaluated rank."""
        return [memory(self.program, rank) for rank in self.program.ranks]

    @cached_property
    def peak_memory(self) -> Column:
        """Peak bytes on the fullest rank."""
        return np.maximum.reduce([self.program.batch.full(sum(parts.values())) for parts in self.memory])

    @cached_property
    def traffic_by_group(self) -> dict[tuple[str, str], Array]:
        """Bytes sent per device and step, by axis and group of ranks, on the busiest rank of each axis."""
        return _traffic(self.program)

    @cached_property
    def traffic(self) -> dict[str, Array]:
        """Bytes sent per device and step, by axis, on the busiest rank of each axis."""
        out: dict[str, Array] = {}
        for (axis, _), size in self.traffic_by_group.items():
            out[axis] = out.get(axis, 0.0) + size
        return out

    def fits(self, cluster: Cluster) -> Array:
        return self.peak_memory <= cluster.accelerator.memory


def step_cost(program: StepProgram, cluster: Cluster) -> StepCost:
    """Time, memory and traffic of every plan of the batch."""
    b = program.batch
    network = CollectiveTimes(cluster, b)
    times = phase_times(program, cluster, network)
    message_ops = program.sync.get("boundary-F", []) + program.sync.get("boundary-gather", [])
    boundary = b.full(sum((op.count * network.time(op) for op in message_ops), np.zeros(b.n)))
    rank_programs = program.ranks
    ranks = [rank_time(program, times, h, boundary) for h in rank_programs]
    m = np.maximum(b.microbatches, 1.0)

    slowest, of_slowest = _slowest_rank(b, ranks, cluster.sharing if program.every_rank else 1.0)
    counts = {block: m * of_slowest([h.counts[block] for h in rank_programs]) for block in program.kinds()}
    # phases that only some blocks of a rank run
    partial_phases = {"R": b.some_recomputed, **dict.fromkeys(SPLIT_ONLY, b.splits_twice)}
    partial_phases |= dict.fromkeys("IEWR", True) if b.model.adapter.on else {}
    some = {
        phase: {block: m * of_slowest([h.times(block, phase) for h in rank_programs]) for block in counts}
        for phase, on in partial_phases.items()
        if on
    }
    exposed, busy, flops = _by_part(b, times, lambda block, phase: some.get(phase, counts)[block])
    copies = (*b.overlap, "offload")
    busy["compute"] = sum((s for part, s in exposed.items() if part not in copies), np.zeros(b.n))
    exposed["host"] = m * of_slowest([r.waits for r in ranks])
    if b.stack.blocking_p2p:
        exposed["pp"] = np.where(b.pp > 1, 2 * m * b.virtual * boundary, 0.0)
    f, i, w = _mean(program, times, ranks, boundary)
    message = np.where((b.pp > 1) & (not b.stack.blocking_p2p), boundary, 0.0)
    exposed["bubble"] = ramp(b, f, i, w, message, cluster.sharing)

    slow = RankTime(*(of_slowest([getattr(r, name) for r in ranks]) for name in ("f", "i", "w", "waits")))
    closing = closing_time(program, cluster, network, slow)
    last = sum(some.get(phase, counts)[block] * t.last for (block, phase), t in times.items() if present(t.last))
    closing |= {kind: closing[kind] + last for kind in ("dp", "reduce", "unhidden")}
    gathers = sum(
        (
            some.get(phase, counts)[block] * t.parts["dp"]
            for (block, phase), t in times.items()
            if block in b.model.kinds and "dp" in t.parts  # a layer's weights can be gathered behind the previous block
        ),
        np.zeros(b.n),
    )
    _add_closing(exposed, closing)
    exposed["overhead"] = np.full(b.n, b.stack.step_overhead)

    time, unhidden = b.full(sum(exposed.values())), closing["unhidden"] + gathers
    late = closing["after"], closing["reduce"], closing["tail"], unhidden
    return StepCost(
        time, exposed, busy, flops, slowest, ranks, times, boundary, *late, program, network, cluster.sharing
    )


def _add_closing(exposed: dict[str, Array], closing: dict[str, Array]) -> None:
    """Add the work once per step (reductions, gathers, optimizer) to the exposed seconds by part."""
    exposed["dp"] = exposed.get("dp", 0.0) + closing["dp"]
    exposed["optimizer"] = closing["optimizer"]
    for axis in ("tp", "pp", "ep"):
        if present(closing[axis]):
            exposed[axis] = exposed.get(axis, 0.0) + closing[axis]


def ramp(batch: Batch, f: Array, i: Array, w: Array, p2p: Array, sharing: float = 1.0) -> Array:
    """Idle time beyond M micro-batches of work; f, i, w are one rank's times per micro-batch, averaged over ranks, while all of them
    compute. Where `sharing` ranks share a core, an idle rank gives it to the others: a schedule with cores of its own runs that many times
    faster, and only what it takes beyond M micro-batches at the shared speed is idle."""
    out = np.zeros(batch.n)
    f, i, w, p2p = (batch.full(x) for x in (f, i, w, p2p))
    for schedule, at, p, m, v in batch.schedules:
        f_, i_, w_ = (x[at] / v for x in (f, i, w))
        span = formulas.makespan(schedule, p, m, v, f_ / sharing, i_ / sharing, w_ / sharing, p2p[at])
        out[at] = np.maximum(span - m * v * (f_ + i_ + w_), 0.0)
    return out


def _by_part(
    b: Batch, times: dict[tuple[str, str], PhaseTime], runs_of: Callable[[str, str], Array]
) -> tuple[dict[str, Array], dict[str, Array], Array]:
    """Seconds by part, busy seconds by communication stream, and FLOPs of all micro-batches; `runs_of` a block and phase per step."""
    exposed: dict[str, Array] = {}
    busy: dict[str, Array] = {}
    flops: Array = 0.0
    for (block, phase), t in times.items():
        runs = runs_of(block, phase)
        for part, seconds in t.parts.items():
            name = "recompute" if phase == "R" and part not in b.overlap else part
            exposed[name] = exposed.get(name, 0.0) + runs * seconds
        for axis, seconds in t.comm.items():
            busy[f"comm:{axis}"] = busy.get(f"comm:{axis}", 0.0) + runs * seconds
        flops = flops + runs * t.flops
    return exposed, busy, flops


def _slowest_rank(b: Batch, ranks: list[RankTime], sharing: float) -> tuple[Column, Callable[[list[Array]], Array]]:
    """Return the index of the slowest rank of each plan, and a function that picks its value out of those of all ranks."""
    slowest = np.stack([b.full(r.total) for r in ranks]).argmax(axis=0)
    flat_index = slowest * b.n + np.arange(b.n)  # of the slowest rank in the concatenated values of all ranks

    def at_slowest(values: list[Array]) -> Array:
        if len(values) == 1:
            return b.full(values[0])
        return np.concatenate([b.full(v) for v in values])[flat_index]

    if sharing > 1 and len(ranks) > 1:
        return slowest, _shared_pace(b, sharing, ranks, at_slowest)
    return slowest, at_slowest


def _shared_pace(
    b: Batch, sharing: float, ranks: list[RankTime], at_slowest: Callable[[list[Array]], Array]
) -> Callable[[list[Array]], Array]:
    """The rank that sets the pace where ranks share cores. A rank that waits gives its core to the others, so the step takes what all
    ranks need together (their mean), or what the slowest needs with a core to itself: the longer of the two.

    Returned is a function of the values of all ranks, like `at_slowest`: λ · slowest + (1 − λ) · mean.
    """
    totals = [r.total for r in ranks]
    slowest, average = at_slowest(totals), mean_of_ranks(b, totals)
    gap = np.maximum(slowest - average, 1e-30)
    share = np.clip((slowest / sharing - average) / gap, 0.0, 1.0)
    return lambda values: share * at_slowest(values) + (1 - share) * mean_of_ranks(b, values)


def _mean(
    program: StepProgram, times: dict[tuple[str, str], PhaseTime], ranks: list[RankTime], boundary: Array
) -> list[Array]:
    """Mean f, i, w over the ranks. A batch evaluates only a few ranks, so it uses a rank that holds the mean of all blocks."""
    if program.averaged:
        ranks = [rank_time(program, times, blocks, boundary) for blocks in program.averaged]
    if program.every_rank or program.averaged:
        return [mean_of_ranks(program.batch, [getattr(rank, name) for rank in ranks]) for name in ("f", "i", "w")]
    mean = rank_time(program, times, program.mean, boundary) if len(ranks) > 1 else ranks[0]
    return [mean.f, mean.i, mean.w]


def mean_of_ranks(b: Batch, values: list[Array]) -> Array:
    """The mean of a value over all ranks of each plan; the values of a plan with fewer ranks than others end with repeated ones."""
    return sum((at < b.pp) * b.full(value) for at, value in enumerate(values)) / b.pp


def _traffic(program: StepProgram) -> dict[tuple[str, str], Array]:
    """Bytes sent per device and step by (axis, group of ranks), of the rank that sends the most over the axis."""
    b = program.batch
    m = np.maximum(b.microbatches, 1.0)
    by_rank: list[dict[tuple[str, str], Array]] = [{} for _ in program.ranks]

    def add(rank: int, op: Op, times: Array) -> None:
        key = TRAFFIC_AXIS.get(op.axis, AXIS_OF[op.axis]), op.axis
        size = times * op.count * sent(op.collective, op.message_bytes, b.size(op.axis))
        by_rank[rank][key] = by_rank[rank].get(key, 0.0) + size

    for rank, h in enumerate(program.ranks):
        for key, ops in program.blocks.items():
            for op in ops:
                if op.axis:
                    add(rank, op, m * h.times(*key))
        for op, times in h.sends:
            add(rank, op, m * times)
        for op in program.closing:
            if op.axis == "ends":
                add(rank, op, np.abs(h.counts["embedding"] - h.counts["head"]))
            elif op.axis and (op.part != "optimizer" or op.name == EXCHANGE):
                add(rank, op, 1.0)
    out: dict[tuple[str, str], Array] = {}
    for axis in dict.fromkeys(axis for axis, _ in by_rank[0]):
        groups = [key for key in by_rank[0] if key[0] == axis]
        sizes = {key: np.stack([b.full(of_rank[key]) for of_rank in by_rank]) for key in groups}
        busiest = np.sum(list(sizes.values()), axis=0).argmax(axis=0)
        out |= {key: np.take_along_axis(size, busiest[None], axis=0)[0] for key, size in sizes.items()}
    return out


@dataclass(frozen=True)
class Message:
    """One kind of collective of the slowest rank: how often a step calls it, and what one call moves and takes."""

    name: str
    axis: str  # under which its time is reported: tp, cp, ep, pp, dp
    operation: str
    algorithm: str
    ranks: int
    level: int  # the highest level that its groups use
    count: float  # calls per step
    size: float  # bytes of the full buffer
    sent: float  # bytes that one device sends through that level
    seconds: float  # of one call

    @property
    def rate(self) -> float:
        """Bytes per second that a device sends through the level during the call."""
        return self.sent / self.seconds


def step_calls(cost: StepCost) -> Iterator[tuple[Op, float]]:
    """Every collective of the slowest rank with the number of calls in a step; sends between stages are not among them."""
    program = cost.program
    rank = program.ranks[int(cost.slowest[0])]
    rounds = max(1.0, float(program.batch.microbatches[0]))
    for key, ops in program.blocks.items():
        for op in ops:
            if op.axis:
                yield op, rounds * scalar(op.count) * scalar(rank.times(*key))
    for op in program.closing:
        if op.axis and op.axis != "ends":
            yield op, scalar(op.count)


def messages(cost: StepCost) -> list[Message]:
    """All collectives and sends of one plan's step, those that take longest first. Equal calls of several blocks are one entry."""
    program, network = cost.program, cost.network
    rounds = max(1.0, float(program.batch.microbatches[0]))
    sends = program.ranks[int(cost.slowest[0])].sends
    calls = [*step_calls(cost), *((op, rounds * scalar(op.count) * scalar(times)) for op, times in sends)]
    by_call: dict[tuple[str, str, str, float], Message] = {}
    for op, times in calls:
        size = scalar(op.message_bytes)
        ranks = int(scalar(program.batch.size(op.axis)))
        if times <= 0 or ranks < 2 or size <= 0:
            continue
        key = (op.name, op.axis, op.collective, size)
        before = by_call[key].count if key in by_call else 0.0
        by_call[key] = _message(network, op, ranks, before + times, size)
    return sorted(by_call.values(), key=lambda m: -m.count * m.seconds)


def _message(network: CollectiveTimes, op: Op, ranks: int, count: float, size: float) -> Message:
    level = network.level(op.axis)
    if op.collective == "send":
        sent, algorithm = size, "direct"
    else:
        sent, algorithm = network.bytes_by_level(op).get(level, 0.0), network.algorithm(op)
    name, axis = OPERATIONS[op.collective], AXIS_OF[op.axis]
    return Message(op.name, axis, name, algorithm, ranks, level, count, size, sent, scalar(network.time(op)))
