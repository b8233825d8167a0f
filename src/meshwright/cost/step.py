"""The time of a training step: streams, host, pipeline, and what happens once a step.

For one micro-batch on one rank and one direction the device is busy for

    gpu = compute + exposed communication + slowdown · hidden communication

where communication is hidden behind compute only on the axes that overlap, and while it runs takes a share of the device's units and
memory from it. The host must issue every launch and collective. If one always waited for the other, a direction took max(gpu, host); but some
kernels are short and some long, so both wait in turn where the two are close:

    direction = (gpu³ + host³)^⅓        a quarter more than either where they are equal, 4% where one is twice the other

What the host adds is told as such. Micro-batches then run through the pipeline (`cost.pipeline`); gradients are reduced behind the last
backward where the stack overlaps them; the optimizer and the stack's own step overhead close the step.

`exposed` splits the step of the slowest rank into parts that sum exactly: compute by part, communication by axis, host, bubble,
optimizer, overhead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from meshwright.cost import compute
from meshwright.cost.collective import Network
from meshwright.cost.memory import memory
from meshwright.cost.pipeline import ramp
from meshwright.describe.cluster import Cluster
from meshwright.lower import sync
from meshwright.lower.batch import Batch
from meshwright.lower.footprint import padded_elements
from meshwright.lower.op import Array, Op, StepProgram, present, sent
from meshwright.lower.stages import StageBlocks, average_blocks, bounding_ranks, rank_blocks
from meshwright.lower.traffic import boundary_messages, boundary_ops

AXIS_OF = {"tp": "tp", "expert_tp": "tp", "cp": "cp", "ep": "ep", "shard_cp": "dp", "expert_shard": "dp", "dp_cp": "dp",
           "expert_dp": "dp", "replicate": "dp", "expert_replicate": "dp", "stage": "ep", "world": "dp", "pp": "pp",
           "ends": "pp", "kv_copies": "tp"}  # fmt: skip
TOLD_AS = {"stage": "dp"}  # bytes between the ranks of a stage; their time is the experts' own
RUNS = {"F": "F", "I": "I", "S": "I", "G": "I", "W": "W", "R": "R"}  # phases that run as one
SPLIT_ONLY = ("S", "G")  # phases of a split backward
LAYERS = ("dense", "moe")  # blocks whose weights can be gathered behind the block before
HIDEABLE = 0.85  # share of compute that communication can really run behind
GRAPH_HOST = 0.05  # what remains of launches when a graph replays them
HOST_RATE = 25e9  # bytes/s of an optimizer that runs on the host


@dataclass
class PhaseTime:
    """One block and phase: seconds by part (compute, and communication as far as it is exposed), their sum, and the host's."""

    parts: dict[str, Array] = field(default_factory=dict)
    comm: dict[str, Array] = field(default_factory=dict)  # by axis, hidden or not
    busy: Array = 0.0
    host: Array = 0.0
    flops: Array = 0.0
    left: Array = 0.0  # seconds of compute that nothing hides behind yet


@dataclass
class RankTime:
    """Seconds one micro-batch takes a rank: forward, gradient of inputs (with recompute, and what only a split backward does),
    gradient of weights."""

    f: Array
    i: Array
    w: Array
    waits: Array  # of these, waiting for the host

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
    after: Array  # seconds of sums that follow the gradients' own, over tp, a pipeline's ends and a stage
    reduce: Array  # seconds of gradient reduction and parameter gathering, hidden or not
    tail: Array  # seconds by which the last message of gradients is longer than what else of them is not hidden
    unhidden: (
        Array  # seconds of data-parallel communication that may overlap but finds too little compute to hide behind
    )
    program: StepProgram
    syncs: list[Op]

    @cached_property
    def memory(self) -> list[dict[str, Array]]:
        """Peak bytes by part, for each rank looked at."""
        return [memory(self.program, h) for h in self.stage_blocks]

    @cached_property
    def peak_memory(self) -> Array:
        """Bytes of the fullest rank."""
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
    latest: dict[str, str] = {}  # of each block, the phase whose compute is left to hide behind
    for (block, phase), ops in program.blocks.items():
        beside = times[block, latest[block]] if phase in SPLIT_ONLY else None
        times[block, phase] = phase_time(program, cluster, network, ops, beside)
        if RUNS[phase] == "I":
            latest[block] = phase
    boundary_op = program.sync.get("boundary-F", [None])[0]
    boundary = network.time(boundary_op) if boundary_op is not None else np.zeros(b.n)
    held = bounding_ranks(b, every_rank)
    ranks = [rank_time(program, times, h, boundary) for h in held]
    m = np.maximum(b.microbatches, 1.0)

    slowest = np.stack([np.broadcast_to(r.total, b.n) for r in ranks]).argmax(axis=0)
    place = slowest * b.n + np.arange(b.n)  # of the slowest rank, where the values of all ranks follow each other

    def of_slowest(values: list[Array]) -> Array:
        if len(values) == 1:
            return np.broadcast_to(values[0], b.n)
        return np.concatenate([np.broadcast_to(v, b.n) for v in values])[place]

    counts = {block: m * of_slowest([h.counts[block] for h in held]) for block in program.kinds()}
    others = {
        "R": b.some_recomputed,
        **dict.fromkeys(SPLIT_ONLY, b.splits_twice),
    }  # phases that not all of a rank's blocks have
    some = {
        phase: {block: m * of_slowest([h.times(block, phase) for h in held]) for block in counts}
        for phase, on in others.items()
        if on
    }
    exposed: dict[str, Array] = {}
    busy: dict[str, Array] = {}
    flops: Array = 0.0
    for (block, phase), t in times.items():
        often = some.get(phase, counts)[block]
        for part, seconds in t.parts.items():
            name = "recompute" if phase == "R" and part not in b.overlap else part
            exposed[name] = exposed.get(name, 0.0) + often * seconds
        for axis, seconds in t.comm.items():
            busy[f"comm:{axis}"] = busy.get(f"comm:{axis}", 0.0) + often * seconds
        flops = flops + often * t.flops
    busy["compute"] = sum((s for part, s in exposed.items() if part not in b.overlap), np.zeros(b.n))
    exposed["host"] = m * of_slowest([r.waits for r in ranks])
    if b.stack.blocking_p2p:
        exposed["pp"] = np.where(b.pp > 1, 2 * m * b.virtual * boundary, 0.0)
    f, i, w = _mean(program, times, held, ranks, boundary, every_rank)
    exposed["bubble"] = ramp(b, f, i, w, np.where((b.pp > 1) & (not b.stack.blocking_p2p), boundary, 0.0))

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
    )


def phase_time(
    program: StepProgram, cluster: Cluster, network: Network, ops: list[Op], beside: PhaseTime | None = None
) -> PhaseTime:
    """Time the operations of one block and phase, and hide what overlaps behind its compute; or behind what another that it is
    part of has left."""
    b, device, stack = program.batch, cluster.accelerator, program.batch.stack
    t = PhaseTime()
    core: Array = 0.0
    work: Array = 0.0
    for op in ops:
        if op.axis:
            axis = AXIS_OF[op.axis]
            t.comm[axis] = t.comm.get(axis, 0.0) + op.count * network.time(op)
            t.host = t.host + op.count * stack.collective_launch
            continue
        seconds = op.count * compute.op_time(device, b.workload.precision, stack.attention, op)
        t.parts[op.part] = t.parts.get(op.part, 0.0) + seconds
        t.host = t.host + op.count * op.launches * stack.launch
        t.flops = t.flops + op.count * op.flops
        work = work + seconds
        if op.kind == "attention":
            core = core + seconds
    t.busy = work
    t.left = left = HIDEABLE * work if beside is None else beside.left  # compute hides one stream at a time
    room = {"tp": HIDEABLE * (work - core), "cp": HIDEABLE * core, "ep": left, "dp": left}
    if beside is not None:
        room = dict.fromkeys(room, left)
    for axis in (axis for axis in b.overlap if axis in t.comm):  # in one order, whatever else is in the batch
        seconds = t.comm[axis]
        can = b.overlap[axis] * (b.prefetch if axis == "dp" else 1.0)
        behind = np.minimum(np.minimum(seconds, room[axis]), left) * can
        t.left = left = left - behind
        slowed = stack.compute_slowdown * behind
        t.parts[axis] = seconds - behind
        t.parts["interference"] = t.parts.get("interference", 0.0) + slowed
        t.busy = t.busy + seconds - behind + slowed
    if stack.graphs:
        t.host = t.host * GRAPH_HOST
    return t


def rank_time(
    program: StepProgram, times: dict[tuple[str, str], PhaseTime], holding: StageBlocks, boundary: Array
) -> RankTime:
    """One micro-batch on one rank: each phase takes what device and host need together."""
    b = program.batch
    busy, host = ({phase: np.zeros(b.n) for phase in RUNS.values()} for _ in range(2))
    for (block, phase), t in times.items():
        often = holding.times(block, phase)
        busy[RUNS[phase]] = busy[RUNS[phase]] + often * t.busy
        host[RUNS[phase]] = host[RUNS[phase]] + often * t.host
    total = {
        phase: np.cbrt(x * x * x + y * y * y) for phase, x, y in zip(busy, busy.values(), host.values(), strict=True)
    }
    waits = sum(total.values()) - sum(busy.values())
    # A blocking stack waits for its message on each side of every stage, both ways.
    message = np.where(b.pp > 1, b.virtual * boundary, 0.0) if b.stack.blocking_p2p else 0.0
    return RankTime(total["F"] + message, total["I"] + total["R"] + message, total["W"], waits)


def _mean(
    program: StepProgram,
    times: dict[tuple[str, str], PhaseTime],
    held: list[StageBlocks],
    ranks: list[RankTime],
    boundary: Array,
    every_rank: bool,
) -> list[Array]:
    """Mean f, i, w over the ranks; a batch, which looks at few of them, takes a rank that holds the mean of all blocks."""
    b = program.batch
    if not every_rank:
        mean = rank_time(program, times, average_blocks(b), boundary) if len(ranks) > 1 else ranks[0]
        return [mean.f, mean.i, mean.w]
    weights = [(h.rank < b.pp) * 1.0 for h in held]
    return [sum(w * getattr(r, name) for w, r in zip(weights, ranks, strict=True)) / b.pp for name in ("f", "i", "w")]


def _fullest(program: StepProgram, held: list[StageBlocks]) -> StageBlocks:
    """The rank of each plan that has most to reduce and update: it finishes last."""
    if len(held) == 1:
        return held[0]
    b = program.batch
    sizes = [np.broadcast_to(sum(padded_elements(program, h).values()), b.n) for h in held]
    ranks = np.stack([np.broadcast_to(h.rank, b.n) for h in held])
    return rank_blocks(b, np.take_along_axis(ranks, np.stack(sizes).argmax(axis=0)[None, :], 0)[0])


def _largest_sums(program: StepProgram, held: list[StageBlocks]) -> dict[str, Array]:
    """What is summed after the gradients, on the rank that has most of it: the norm of the gradients, and with it the update of every
    rank, waits for all of them."""
    sums, n = [sync.summed(program, h) for h in held], program.batch.n
    return {axis: np.maximum.reduce([np.broadcast_to(found[axis], n) for found in sums]) for axis in sums[0]}


def _closing(
    program: StepProgram, cluster: Cluster, network: Network, ops: list[Op], slow: RankTime
) -> dict[str, Array]:
    """Gradient reduction behind the last backward, clipping, the update, and the gather of sharded parameters."""
    b, device = program.batch, cluster.accelerator
    reduce, gather, compress, update, last = (np.zeros(b.n) for _ in range(5))
    after: dict[str, Array] = {"tp": 0.0, "pp": 0.0, "ep": 0.0}  # sums that wait for the others
    for op in ops:
        seconds = network.time(op) if op.axis else compute.memory_time(device, op)
        if op.part == "optimizer":
            update = update + op.count * _updated(b, op, seconds)
        elif op.name in ("compress", "average-parameters"):  # nothing to hide behind
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


def _updated(b: Batch, op: Op, seconds: Array) -> Array:
    """The optimizer's own operations: launched one by one, or by the host over its memory where the states are offloaded."""
    launched = seconds if op.axis else np.maximum(seconds, op.launches * b.stack.launch)
    return np.where(b.offload_states & (op.name == "update"), op.bytes / HOST_RATE, launched)


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
                row = by_block.setdefault(TOLD_AS.get(op.axis, AXIS_OF[op.axis]), {})
                row[key] = row.get(key, 0.0) + m * bytes_of(op)
    out = {
        axis: np.maximum.reduce([np.broadcast_to(sum(h.times(*key) * x for key, x in row.items()), b.n) for h in held])
        for axis, row in by_block.items()
    }
    for op in syncs:
        if op.axis not in ("", "ends") and op.part != "optimizer":
            axis = TOLD_AS.get(op.axis, AXIS_OF[op.axis])
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
