"""The time of a training step: compute and communication streams, host, pipeline, and the work done once per step.

For one micro-batch, one rank and one direction, the device is busy for

    gpu = compute + exposed communication + slowdown · hidden communication

where only the axes that overlap hide communication behind compute. Hidden communication slows compute, because it uses some of the device's units
and memory bandwidth. The host must issue every launch and collective. If only one side ever waited, a direction would take max(gpu, host). But some
kernels are short and some are long, so each side waits part of the time if the two are close:

    direction = (gpu³ + host³)^⅓        26% more than either if they are equal, 4% more than the larger if one is twice the other

The time that the host adds is reported as `host`. Micro-batches then run through the pipeline (`cost.pipeline`). Gradients are reduced behind the
last backward if the stack overlaps them. The optimizer and the step overhead of the stack end the step.

`exposed` splits the step of the slowest rank into parts that sum exactly: compute by part, communication by axis, host, bubble,
optimizer, overhead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from meshwright.cost import compute
from meshwright.cost.collective import Network
from meshwright.cost.memory import memory
from meshwright.cost.pipeline import ramp
from meshwright.describe.cluster import Accelerator, Cluster
from meshwright.describe.stack import Stack
from meshwright.lower import sync
from meshwright.lower.batch import Batch
from meshwright.lower.footprint import padded_elements
from meshwright.lower.offload import TO_HOST
from meshwright.lower.op import Array, Op, StepProgram, present, sent
from meshwright.lower.stages import StageBlocks, average_blocks, bounding_ranks, rank_blocks
from meshwright.lower.traffic import DATA_PARALLEL, boundary_messages, boundary_ops

AXIS_OF = {  # group of an operation → axis under which its time is reported
    **dict.fromkeys(("tp", "expert_tp", "kv_copies"), "tp"),
    **dict.fromkeys(("shard_cp", "dp_cp", "replicate", "world"), "dp"),
    **dict.fromkeys(("expert_shard", "expert_dp", "expert_replicate"), "dp"),
    **dict.fromkeys(("ep", "stage"), "ep"),
    **dict.fromkeys(("pp", "ends"), "pp"),
    "cp": "cp",
}
TRAFFIC_AXIS = {"stage": "dp"}  # bytes between all ranks of a stage count as dp traffic; their time counts as ep
TIMED_AS = {"F": "F", "I": "I", "S": "I", "G": "I", "W": "W", "R": "R"}  # phases that are timed together
SPLIT_ONLY = ("S", "G")  # phases of a split backward
LAYERS = ("dense", "moe")  # blocks whose weights can be gathered behind the previous block
HIDEABLE = 0.85  # share of compute that can hide communication
GRAPH_HOST = 0.05  # host time of launches replayed from a graph, as a share
HOST_RATE = 25e9  # bytes/s of an optimizer that runs on the host


@dataclass
class PhaseTime:
    """Times of one block and phase: seconds by part (compute and exposed communication), their sum, and host seconds."""

    parts: dict[str, Array] = field(default_factory=dict)
    comm: dict[str, Array] = field(default_factory=dict)  # by axis, hidden or not
    busy: Array = 0.0
    host: Array = 0.0
    flops: Array = 0.0
    left: Array = 0.0  # seconds of compute that can still hide communication


@dataclass
class RankTime:
    """Seconds of one micro-batch on a rank: forward, input gradients (with recompute and the extra work of a split backward), and
    weight gradients."""

    f: Array
    i: Array
    w: Array
    waits: Array  # the part of the total that waits for the host

    @property
    def total(self) -> Array:
        return self.f + self.i + self.w


@dataclass
class StepCost:
    """Costs of a batch of plans: arrays over the batch."""

    time: Array
    exposed: dict[str, Array]
    busy: dict[str, Array]
    flops: Array  # of the hardware, per device and step
    slowest: Array  # index into `ranks`
    ranks: list[RankTime]
    stage_blocks: list[StageBlocks]
    times: dict[tuple[str, str], PhaseTime]  # by block and phase
    boundary: Array  # seconds of one pipeline message
    after: Array  # seconds of reductions that follow the data-parallel ones: over tp, tied embeddings, and a stage
    reduce: Array  # seconds of gradient reduction and parameter gathering, hidden or not
    tail: Array  # seconds by which the last gradient message exceeds the other exposed gradient reduction
    unhidden: Array  # seconds of data-parallel communication that may overlap, but not enough compute hides it
    program: StepProgram
    syncs: list[Op]
    sharing: float = 1.0  # processes per core (`Cluster.sharing`)

    @cached_property
    def memory(self) -> list[dict[str, Array]]:
        """Peak bytes by part, for each evaluated rank."""
        return [memory(self.program, h) for h in self.stage_blocks]

    @cached_property
    def peak_memory(self) -> Array:
        """Peak bytes on the fullest rank."""
        totals = [np.broadcast_to(sum(parts.values()), self.program.batch.n) for parts in self.memory]
        return np.maximum.reduce(totals)

    @cached_property
    def traffic(self) -> dict[str, Array]:
        """Bytes sent per device and step, by axis, on the busiest rank of each axis."""
        return _traffic(self.program, self.stage_blocks, self.syncs)

    def fits(self, cluster: Cluster) -> Array:
        return self.peak_memory <= cluster.accelerator.memory


def step_cost(program: StepProgram, cluster: Cluster, every_rank: bool = False) -> StepCost:
    """Time, memory and traffic of every plan of the batch."""
    b = program.batch
    network = Network(cluster, b)
    times: dict[tuple[str, str], PhaseTime] = {}
    latest: dict[str, str] = {}  # for each block, the phase whose remaining compute can hide communication
    for (block, phase), ops in program.blocks.items():
        main = times[block, latest[block]] if phase in SPLIT_ONLY else None
        times[block, phase] = phase_time(program, cluster, network, ops, main)
        if TIMED_AS[phase] == "I":
            latest[block] = phase
    boundary_op = program.sync.get("boundary-F", [None])[0]
    boundary = network.time(boundary_op) if boundary_op is not None else np.zeros(b.n)
    held = bounding_ranks(b, every_rank)
    ranks = [rank_time(program, times, h, boundary) for h in held]
    m = np.maximum(b.microbatches, 1.0)

    slowest = np.stack([np.broadcast_to(r.total, b.n) for r in ranks]).argmax(axis=0)
    flat_index = slowest * b.n + np.arange(b.n)  # of the slowest rank in the concatenated values of all ranks

    def at_slowest(values: list[Array]) -> Array:
        if len(values) == 1:
            return np.broadcast_to(values[0], b.n)
        return np.concatenate([np.broadcast_to(v, b.n) for v in values])[flat_index]

    of_slowest: Callable[[list[Array]], Array] = at_slowest
    if cluster.sharing > 1 and every_rank and len(ranks) > 1:
        of_slowest = _shared_pace(b, cluster.sharing, held, ranks, at_slowest)

    counts = {block: m * of_slowest([h.counts[block] for h in held]) for block in program.kinds()}
    # phases that only some blocks of a rank run
    partial_phases = {"R": b.some_recomputed, **dict.fromkeys(SPLIT_ONLY, b.splits_twice)}
    some = {
        phase: {block: m * of_slowest([h.times(block, phase) for h in held]) for block in counts}
        for phase, on in partial_phases.items()
        if on
    }
    exposed: dict[str, Array] = {}
    busy: dict[str, Array] = {}
    flops: Array = 0.0
    for (block, phase), t in times.items():
        runs = some.get(phase, counts)[block]
        for part, seconds in t.parts.items():
            name = "recompute" if phase == "R" and part not in b.overlap else part
            exposed[name] = exposed.get(name, 0.0) + runs * seconds
        for axis, seconds in t.comm.items():
            busy[f"comm:{axis}"] = busy.get(f"comm:{axis}", 0.0) + runs * seconds
        flops = flops + runs * t.flops
    copies = (*b.overlap, "offload")
    busy["compute"] = sum((s for part, s in exposed.items() if part not in copies), np.zeros(b.n))
    exposed["host"] = m * of_slowest([r.waits for r in ranks])
    if b.stack.blocking_p2p:
        exposed["pp"] = np.where(b.pp > 1, 2 * m * b.virtual * boundary, 0.0)
    f, i, w = _mean(program, times, held, ranks, boundary, every_rank)
    message = np.where((b.pp > 1) & (not b.stack.blocking_p2p), boundary, 0.0)
    exposed["bubble"] = ramp(b, f, i, w, message, cluster.sharing)

    fullest = _fullest(program, held)
    syncs = sync.step_ops(program, fullest, sums=_largest_sums(program, held))
    slow = RankTime(*(of_slowest([getattr(r, name) for r in ranks]) for name in ("f", "i", "w", "waits")))
    closing = _closing(program, cluster, network, syncs, slow)
    gathers = sum(
        (
            some.get(phase, counts)[block] * t.parts["dp"]
            for (block, phase), t in times.items()
            if block in LAYERS and "dp" in t.parts
        ),
        np.zeros(b.n),
    )
    exposed["dp"] = exposed.get("dp", 0.0) + closing["dp"]
    exposed["optimizer"] = closing["optimizer"]
    for axis in ("tp", "pp", "ep"):
        if present(closing[axis]):
            exposed[axis] = exposed.get(axis, 0.0) + closing[axis]
    exposed["overhead"] = np.full(b.n, b.stack.step_overhead)

    return StepCost(
        sum(exposed.values()),
        exposed,
        busy,
        flops,
        slowest,
        ranks,
        held,
        times,
        boundary,
        closing["after"],
        closing["reduce"],
        closing["tail"],
        closing["unhidden"] + gathers,
        program,
        syncs,
        cluster.sharing,
    )


def phase_time(
    program: StepProgram, cluster: Cluster, network: Network, ops: list[Op], main: PhaseTime | None = None
) -> PhaseTime:
    """Time the operations of one block and phase, and hide overlapped communication behind its compute. A phase of a split backward hides
    behind the remaining compute of its `main` phase instead."""
    b, device, stack = program.batch, cluster.accelerator, program.batch.stack
    t = PhaseTime()
    core: Array = 0.0
    work: Array = 0.0
    to_host: Array = 0.0
    for op in ops:
        if op.axis:
            axis = AXIS_OF[op.axis]
            t.comm[axis] = t.comm.get(axis, 0.0) + op.count * network.time(op)
            t.host = t.host + op.count * collective_launch(stack, op)
            continue
        if op.kind == "host":
            copied = op.count * compute.host_copy_time(device, op)
            t.comm["host"] = t.comm.get("host", 0.0) + copied
            to_host = to_host + (copied if op.name == TO_HOST else 0.0)
            t.host = t.host + op.count * op.launches * stack.launch
            continue
        seconds = op.count * compute.op_time(device, b.workload.precision, stack.attention, op)
        t.parts[op.part] = t.parts.get(op.part, 0.0) + seconds
        t.host = t.host + op.count * op.launches * launch_time(stack, op.kind)
        t.flops = t.flops + op.count * op.flops
        work = work + seconds
        if op.kind == "attention":
            core = core + seconds
    t.busy = work
    t.left = left = HIDEABLE * work if main is None else main.left  # compute hides one stream at a time
    room = {"tp": HIDEABLE * (work - core), "cp": HIDEABLE * core, "ep": left, "dp": left}
    if main is not None:
        room = dict.fromkeys(room, left)
    for axis in b.overlap:  # in a fixed order, independent of the other plans of the batch
        if axis not in t.comm:
            continue
        seconds = t.comm[axis]
        allowed = b.overlap[axis] * (b.prefetch if axis == "dp" else 1.0)
        hidden = np.minimum(np.minimum(seconds, room[axis]), left) * allowed
        t.left = left = left - hidden
        slowed = stack.compute_slowdown * hidden
        t.parts[axis] = seconds - hidden
        t.parts["interference"] = t.parts.get("interference", 0.0) + slowed
        t.busy = t.busy + seconds - hidden + slowed
    if "host" in t.comm:  # copies to the host overlap with compute; backward waits for each copy up
        hidden = np.minimum(to_host, left)
        t.left = left - hidden
        t.parts["offload"] = t.comm["host"] - hidden
        t.busy = t.busy + t.parts["offload"]
    if stack.graphs:
        t.host = t.host * GRAPH_HOST
    return t


def rank_time(
    program: StepProgram, times: dict[tuple[str, str], PhaseTime], held: StageBlocks, boundary: Array
) -> RankTime:
    """Seconds of one micro-batch on one rank: each phase combines the device and the host time."""
    b = program.batch
    busy, host = ({phase: np.zeros(b.n) for phase in TIMED_AS.values()} for _ in range(2))
    for (block, phase), t in times.items():
        runs = held.times(block, phase)
        busy[TIMED_AS[phase]] = busy[TIMED_AS[phase]] + runs * t.busy
        host[TIMED_AS[phase]] = host[TIMED_AS[phase]] + runs * t.host
    total = {phase: together(b.stack, x, host[phase]) for phase, x in busy.items()}
    if b.stack.action:
        for phase in ("F", "I"):
            total[phase] = total[phase] + np.where(b.pp > 1, b.virtual * b.stack.action, 0.0)
    waits = sum(total.values()) - sum(busy.values())
    # A blocking stack waits for a message before and after every stage, in forward and in backward.
    message = np.where(b.pp > 1, b.virtual * boundary, 0.0) if b.stack.blocking_p2p else 0.0
    return RankTime(total["F"] + message, total["I"] + total["R"] + message, total["W"], waits)


def _shared_pace(
    b: Batch, sharing: float, held: list[StageBlocks], ranks: list[RankTime], at_slowest: Callable[[list[Array]], Array]
) -> Callable[[list[Array]], Array]:
    """The rank that sets the pace where ranks share cores. A rank that waits gives its core to the others, so the step takes what all
    ranks need together (their mean), or what the slowest needs with a core to itself: the longer of the two.

    Returned is a function of the values of all ranks, like `at_slowest`: λ · slowest + (1 − λ) · mean.
    """
    exists = [(h.rank < b.pp) * 1.0 for h in held]

    def mean(values: list[Array]) -> Array:
        return sum(w * np.broadcast_to(v, b.n) for w, v in zip(exists, values, strict=True)) / b.pp

    totals = [r.total for r in ranks]
    slowest, average = at_slowest(totals), mean(totals)
    gap = np.maximum(slowest - average, 1e-30)
    share = np.clip((slowest / sharing - average) / gap, 0.0, 1.0)
    return lambda values: share * at_slowest(values) + (1 - share) * mean(values)


def together(stack: Stack, device: Array, host: Array) -> Array:
    """Seconds that device and host take: their sum where the host computes, else the longer of the two and a little more."""
    if not stack.asynchronous:
        return device + host
    return np.cbrt(device * device * device + host * host * host)


def launch_time(stack: Stack, kind: str) -> float:
    """Host seconds of one launch of a kind of operation."""
    of_kind = {"gemm": stack.product_launch, "attention": stack.attention_launch}.get(kind, 0.0)
    return of_kind or stack.launch


def collective_launch(stack: Stack, op: Op) -> float:
    """Host seconds of issuing one collective; those of a ZeRO-3 unit run through hooks and views of its parameters."""
    return (stack.unit_launch if op.part in DATA_PARALLEL else 0.0) or stack.collective_launch


def _mean(
    program: StepProgram,
    times: dict[tuple[str, str], PhaseTime],
    held: list[StageBlocks],
    ranks: list[RankTime],
    boundary: Array,
    every_rank: bool,
) -> list[Array]:
    """Mean f, i, w over the ranks. A batch evaluates only a few ranks, so it uses a rank that holds the mean of all blocks."""
    b = program.batch
    if not every_rank:
        mean = rank_time(program, times, average_blocks(b), boundary) if len(ranks) > 1 else ranks[0]
        return [mean.f, mean.i, mean.w]
    weights = [(h.rank < b.pp) * 1.0 for h in held]
    return [sum(w * getattr(r, name) for w, r in zip(weights, ranks, strict=True)) / b.pp for name in ("f", "i", "w")]


def _fullest(program: StepProgram, held: list[StageBlocks]) -> StageBlocks:
    """The rank of each plan with the most elements to reduce and update: it finishes last."""
    if len(held) == 1:
        return held[0]
    b = program.batch
    sizes = [np.broadcast_to(sum(padded_elements(program, h).values()), b.n) for h in held]
    ranks = np.stack([np.broadcast_to(h.rank, b.n) for h in held])
    return rank_blocks(b, np.take_along_axis(ranks, np.stack(sizes).argmax(axis=0)[None, :], 0)[0])


def _largest_sums(program: StepProgram, held: list[StageBlocks]) -> dict[str, Array]:
    """Elements reduced after the data-parallel reduction, on the rank that has the most. The gradient norm, and so the update of every
    rank, waits for all of these reductions."""
    sums, n = [sync.summed(program, h) for h in held], program.batch.n
    return {axis: np.maximum.reduce([np.broadcast_to(found[axis], n) for found in sums]) for axis in sums[0]}


def _closing(
    program: StepProgram, cluster: Cluster, network: Network, ops: list[Op], slow: RankTime
) -> dict[str, Array]:
    """Seconds of the gradient reduction behind the last backward, clipping, the update, and the gather of sharded parameters."""
    b, device = program.batch, cluster.accelerator
    reduce, gather, compress, update, last = (np.zeros(b.n) for _ in range(5))
    after: dict[str, Array] = {"tp": 0.0, "pp": 0.0, "ep": 0.0}  # reductions that wait for the data-parallel ones
    for op in ops:
        seconds = network.time(op) if op.axis else compute.memory_time(device, op)
        if op.kind == "host":
            update = update + op.count * compute.host_copy_time(device, op)
        elif op.part == "optimizer":
            update = update + op.count * _update_time(b, op, seconds)
        elif op.name in ("compress", "average-parameters"):  # never overlaps
            compress = compress + op.count * seconds
        elif op.part == "closing":
            after[AXIS_OF[op.axis]] = after[AXIS_OF[op.axis]] + op.count * seconds
        elif op.name == "gather-parameters":
            gather = gather + op.count * seconds
        else:
            reduce = reduce + op.count * seconds
            last = np.maximum(last, np.where(op.count > 0, seconds, 0.0))
    rounds = np.where(b.reduce_each, np.maximum(b.microbatches, 1.0), 1.0)
    window = HIDEABLE * (slow.i + slow.w) * b.overlap["dp"] * rounds
    hidden = np.minimum(reduce, window)
    tail = np.maximum(last - (reduce - hidden), 0.0)
    exposed = reduce - hidden + tail + b.stack.compute_slowdown * hidden
    late = gather - np.minimum(gather, HIDEABLE * slow.f * b.overlap["dp"])
    exposed = exposed + late + compress
    return {
        **after,
        "after": sum(after.values()),
        "dp": exposed,
        "optimizer": update,
        "reduce": reduce + gather,
        "tail": tail,
        "unhidden": reduce - hidden + late,
    }


def _update_time(b: Batch, op: Op, seconds: Array) -> Array:
    """Seconds of an optimizer operation: launched on the device, or run by the host if the states are offloaded."""
    stack = b.stack
    plain = stack.update_launch or stack.launch
    host = op.launches * np.where(b.zero == 3, stack.sharded_launch or plain, plain)
    launched = seconds if op.axis else np.maximum(seconds, host) if stack.asynchronous else seconds + host
    return np.where(b.offload_states & (op.name == "update"), op.bytes / HOST_RATE, launched)


def host_update_time(b: Batch, device: Accelerator, elements: Array) -> Array:
    """Seconds in which the host updates `elements`, with the copies of their gradients and parameters."""
    copied = sum(op.bytes for op in sync.state_copies(b, elements))
    return sync.update_bytes(b, elements) / HOST_RATE + copied / device.host_bandwidth


def _traffic(program: StepProgram, held: list[StageBlocks], syncs: list[Op]) -> dict[str, Array]:
    """Bytes sent per device and step, by axis, on the busiest rank of each axis."""
    b = program.batch
    m = np.maximum(b.microbatches, 1.0)

    def bytes_of(op: Op) -> Array:
        return op.count * sent(op.collective, op.message_bytes, b.size(op.axis))

    by_block: dict[str, dict[tuple[str, str], Array]] = {}
    for key, ops in program.blocks.items():
        for op in ops:
            if op.axis:
                row = by_block.setdefault(TRAFFIC_AXIS.get(op.axis, AXIS_OF[op.axis]), {})
                row[key] = row.get(key, 0.0) + m * bytes_of(op)
    out = {
        axis: np.maximum.reduce([np.broadcast_to(sum(h.times(*key) * x for key, x in row.items()), b.n) for h in held])
        for axis, row in by_block.items()
    }
    for op in syncs:
        if op.axis not in ("", "ends") and op.part != "optimizer":
            axis = TRAFFIC_AXIS.get(op.axis, AXIS_OF[op.axis])
            out[axis] = out.get(axis, 0.0) + bytes_of(op)
    if np.any(b.pp > 1):
        message = m * bytes_of(boundary_ops(program)[0][1])  # gradients are as large as activations
        tied = sum((bytes_of(op) for op in syncs if op.axis == "ends"), np.zeros(b.n))
        out["pp"] = np.maximum.reduce(
            [
                sum(boundary_messages(b, h.rank)) * message + tied * np.abs(h.counts["embedding"] - h.counts["head"])
                for h in held
            ]
        )
    return out
