"""The time of a training step: streams, host, pipeline, and what happens once a step.

For one micro-batch on one rank and one direction the device is busy for

    gpu = compute + exposed communication + slowdown · hidden communication

where communication is hidden behind compute only on the axes that overlap, and while it runs takes a share of the device's units and
memory from it. The host must issue every launch and collective: a direction takes max(gpu, host), and what the host adds is told as
such. Micro-batches then run through the pipeline (`cost.pipeline`); gradients are reduced behind the last backward where the stack
overlaps them; the optimizer and the stack's own step overhead close the step.

`exposed` splits the step of the slowest rank into parts that sum exactly: compute by part, communication by axis, host, bubble,
optimizer, overhead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.cost import compute
from meshwright.cost.collective import Network
from meshwright.cost.memory import elements, memory
from meshwright.cost.pipeline import ramp
from meshwright.describe.cluster import Cluster
from meshwright.lower import sync
from meshwright.lower.op import PHASES, Array, Op, StepProgram, sent
from meshwright.lower.stages import Holding, holdings

AXIS_OF = {"tp": "tp", "expert_tp": "tp", "cp": "cp", "ep": "ep", "shard_cp": "dp", "expert_shard": "dp", "dp_cp": "dp",
           "expert_dp": "dp", "replicate": "dp", "world": "dp", "pp": "pp"}  # fmt: skip
HIDEABLE = 0.85  # share of compute that communication can really run behind


@dataclass
class PhaseTime:
    """One block and phase: compute seconds by part, communication seconds by axis, host seconds, attention seconds."""

    compute: dict[str, Array] = field(default_factory=dict)
    comm: dict[str, Array] = field(default_factory=dict)
    host: Array = 0.0
    core: Array = 0.0
    flops: Array = 0.0


@dataclass
class RankTime:
    """One micro-batch on one rank: seconds by (phase, part), and the totals of f, i, w."""

    parts: dict[str, Array]
    f: Array
    i: Array
    w: Array
    hidden: dict[str, Array]
    comm: dict[str, Array]

    @property
    def total(self) -> Array:
        return self.f + self.i + self.w


@dataclass
class StepCost:
    """Costs of a batch of plans: arrays over the batch."""

    time: Array
    exposed: dict[str, Array]
    busy: dict[str, Array]
    traffic: dict[str, Array]
    memory: list[dict[str, Array]]  # per rank looked at
    peak_memory: Array
    flops: Array  # of the hardware, per device and step
    slowest: Array
    ranks: list[RankTime]
    holdings: list[Holding]
    boundary: Array  # seconds of one pipeline message
    reduce: Array
    window: Array

    def fits(self, cluster: Cluster) -> Array:
        return self.peak_memory <= cluster.accelerator.memory


def phase_times(program: StepProgram, cluster: Cluster, network: Network) -> dict[tuple[str, str], PhaseTime]:
    """Time every operation of every block once."""
    b, device = program.batch, cluster.accelerator
    stack = b.stack
    out = {}
    for key, ops in program.blocks.items():
        t = out[key] = PhaseTime()
        for op in ops:
            if op.kind in ("collective", "p2p"):
                axis = AXIS_OF[op.axis]
                t.comm[axis] = t.comm.get(axis, 0.0) + op.count * network.time(op)
                t.host = t.host + op.count * stack.collective_launch
            else:
                seconds = op.count * compute.op_time(device, b.workload.precision, stack.attention, op)
                t.compute[op.part] = t.compute.get(op.part, 0.0) + seconds
                t.host = t.host + op.count * op.launches * stack.launch
                t.flops = t.flops + op.count * op.flops
                if op.kind == "attention":
                    t.core = t.core + seconds
        if stack.graphs:
            t.host = t.host * 0.05
    return out


def rank_time(program: StepProgram, times: dict[tuple[str, str], PhaseTime], holding: Holding, boundary: Array) -> RankTime:
    """One micro-batch on one rank, phase by phase: hide what overlaps, then let the host hold it up."""
    b = program.batch
    parts: dict[str, Array] = {}
    hidden: dict[str, Array] = {}
    comm: dict[str, Array] = {}
    phase_total: dict[str, Array] = {}

    def add(part: str, seconds: Array) -> None:
        parts[part] = parts.get(part, 0.0) + seconds

    for phase in PHASES:
        busy, host, slow = np.zeros(b.n), np.zeros(b.n), np.zeros(b.n)
        for block in program.kinds():
            t = times.get((block, phase))
            if t is None:
                continue
            count = holding.counts[block]
            work = sum(t.compute.values()) if t.compute else 0.0
            for part, seconds in t.compute.items():
                add("recompute" if phase == "R" else part, count * seconds)
            busy = busy + count * work
            host = host + count * t.host
            room = {"tp": work - t.core, "cp": t.core, "ep": work, "dp": work}
            for axis, seconds in t.comm.items():
                can = b.overlap[axis] * (b.prefetch if axis == "dp" else 1.0)
                behind = np.minimum(seconds, HIDEABLE * room[axis]) * can
                comm[axis] = comm.get(axis, 0.0) + count * seconds
                hidden[axis] = hidden.get(axis, 0.0) + count * behind
                add(axis, count * (seconds - behind))
                busy = busy + count * (seconds - behind)
                slow = slow + count * behind
        slow = b.stack.compute_slowdown * slow
        add("interference", slow)
        busy = busy + slow
        waits = np.maximum(host - busy, 0.0)
        add("host", waits)
        phase_total[phase] = busy + waits
    if b.stack.blocking_p2p:
        # Every micro-batch waits for its message on each side of every stage, both ways.
        waits = np.where(b.pp > 1, b.virtual * boundary, 0.0)
        add("pp", 2 * waits)
        phase_total["F"] = phase_total["F"] + waits
        phase_total["I"] = phase_total["I"] + waits
    return RankTime(parts, phase_total["F"], phase_total["I"] + phase_total["R"], phase_total["W"], hidden, comm)


def step_cost(program: StepProgram, cluster: Cluster, every_rank: bool = False) -> StepCost:
    """Time, memory and traffic of every plan of the batch."""
    b = program.batch
    network = Network(cluster, b)
    times = phase_times(program, cluster, network)
    boundary_op = program.sync.get("boundary-F", [None])[0]
    boundary = network.time(boundary_op) if boundary_op is not None else np.zeros(b.n)
    held = holdings(b, every_rank)
    ranks = [rank_time(program, times, h, boundary) for h in held]
    m = np.maximum(b.microbatches, 1.0)

    totals = np.stack([np.broadcast_to(r.total, b.n) for r in ranks])
    slowest = totals.argmax(axis=0)
    mean = _mean(b, held, ranks, every_rank)
    idle = ramp(b, *mean, np.where(b.pp > 1, 0.0 if b.stack.blocking_p2p else boundary, 0.0), blocking=False)

    def of_slowest(values: list[Array]) -> Array:
        return np.take_along_axis(np.stack([np.broadcast_to(v, b.n) for v in values]), slowest[None, :], 0)[0]

    exposed: dict[str, Array] = {}
    for part in dict.fromkeys(p for r in ranks for p in r.parts):
        exposed[part] = m * of_slowest([r.parts.get(part, 0.0) for r in ranks])
    exposed["bubble"] = idle

    counts = [elements(program, h) for h in held]
    closing = [_closing(program, cluster, network, c, r, h) for c, r, h in zip(counts, ranks, held, strict=True)]
    # The fullest rank is the last to finish its reduction and its optimizer.
    for name in ("dp", "optimizer"):
        exposed[name] = exposed.get(name, 0.0) + np.maximum.reduce([np.broadcast_to(c[name], b.n) for c in closing])
    exposed["overhead"] = np.full(b.n, b.stack.step_overhead)
    total = sum(exposed.values())

    by_rank = [memory(program, h) for h in held]
    peak = np.maximum.reduce([sum(parts.values()) for parts in by_rank])
    busy = _busy(ranks, slowest, m, of_slowest)
    flops = m * of_slowest([_rank_flops(program, times, h) for h in held])
    traffic = _traffic(program, held, counts)
    return StepCost(total, exposed, busy, traffic, by_rank, peak, flops, slowest, ranks, held, boundary,
                    np.maximum.reduce([np.broadcast_to(c["reduce"], b.n) for c in closing]),
                    np.maximum.reduce([np.broadcast_to(c["window"], b.n) for c in closing]))  # fmt: skip


def _mean(b, held, ranks, every_rank):  # type: ignore[no-untyped-def]
    """Mean f, i, w over the ranks; a batch looks at first, second, middle and last, and counts the middle for the rest."""
    out = []
    for name in ("f", "i", "w"):
        values = [np.broadcast_to(getattr(r, name), b.n) for r in ranks]
        if every_rank:
            weights = [(h.rank < b.pp) * 1.0 for h in held]
            out.append(sum(w * v for w, v in zip(weights, values, strict=True)) / b.pp)
        elif len(values) == 1:
            out.append(values[0])
        else:
            first, _, middle, last = values
            out.append(np.where(b.pp > 1, (first + last + (b.pp - 2) * middle) / b.pp, first))
    return out


def _closing(program: StepProgram, cluster: Cluster, network: Network, counts: dict, rank: RankTime, holding: Holding) -> dict[str, Array]:
    """Gradient reduction behind the last backward, clipping, the update, and the gather of sharded parameters."""
    b, device = program.batch, cluster.accelerator
    reduce, gather, host = np.zeros(b.n), np.zeros(b.n), np.zeros(b.n)
    compress = np.zeros(b.n)
    last = np.zeros(b.n)
    for group, count in counts.items():
        for op in sync.gradient_reduction(b, count, group):
            if op.kind == "memory":
                compress = compress + op.count * compute.memory_time(device, op)
                continue
            seconds = network.time(op)
            reduce = reduce + op.count * seconds
            last = np.maximum(last, np.where(op.count > 0, seconds, 0.0))
            host = host + op.count * b.stack.collective_launch
        for op in sync.parameter_gather(b, count, group):
            gather = gather + op.count * network.time(op)
            host = host + op.count * b.stack.collective_launch
    rounds = np.where(b.reduce_each | (b.zero == 2), np.maximum(b.microbatches, 1.0), 1.0)
    window = HIDEABLE * (rank.i + rank.w) * b.overlap["dp"] * rounds
    hidden = np.minimum(reduce, window)
    exposed = np.maximum(reduce - hidden, np.where(reduce > 0, last, 0.0)) + b.stack.compute_slowdown * hidden
    forward = HIDEABLE * rank.f * b.overlap["dp"]
    exposed = exposed + gather - np.minimum(gather, forward) + compress

    shard = {"dense": b.size("shard_cp"), "expert": b.size("expert_shard")}
    owned = sum(count / np.where(b.zero >= 1, shard[group], 1.0) for group, count in counts.items())
    tensors = sum(holding.counts[k] * (len(blk.linears) + len(blk.vectors)) for k, blk in b.model.blocks.items()) if (
        b.model.kind != "counts"
    ) else 160.0
    update = np.zeros(b.n)
    for op in sync.optimizer(b, owned, tensors):
        if op.kind == "collective":
            update = update + op.count * network.time(op)
        else:
            seconds = np.maximum(compute.memory_time(device, op), op.launches * b.stack.launch)
            # Offloaded states are updated by the host, over its own memory and the device's PCIe link.
            update = update + np.where(b.offload_states & (op.name == "update"), op.bytes / 25e9, seconds)
    return {"dp": exposed, "optimizer": update, "reduce": reduce + gather, "window": window}


def _rank_flops(program: StepProgram, times: dict, holding: Holding) -> Array:
    return sum(holding.counts[block] * t.flops for (block, _), t in times.items())


def _busy(ranks, slowest, m, of_slowest):  # type: ignore[no-untyped-def]
    axes = dict.fromkeys(a for r in ranks for a in r.comm)
    busy = {f"comm:{a}": m * of_slowest([r.comm.get(a, 0.0) for r in ranks]) for a in axes}
    compute_parts = [sum((v for k, v in r.parts.items() if k not in (*axes, "host", "pp")), 0.0) for r in ranks]
    busy["compute"] = m * of_slowest(compute_parts)
    return busy


def _traffic(program: StepProgram, held: list[Holding], counts: list[dict[str, Array]]) -> dict[str, Array]:
    """Bytes sent per device and step, by axis, on the busiest rank of each axis."""
    b = program.batch
    m = np.maximum(b.microbatches, 1.0)
    out: dict[str, Array] = {}

    def grow(axis: str, per_rank: list[Array]) -> None:
        out[axis] = out.get(axis, 0.0) + np.maximum.reduce([np.broadcast_to(x, b.n) for x in per_rank])

    def bytes_of(op: Op) -> Array:
        return op.count * sent(op.collective, op.message_bytes, b.size(op.axis))

    by_axis: dict[str, list[Array]] = {}
    for (block, _), ops in program.blocks.items():
        for op in ops:
            if op.kind in ("collective", "p2p"):
                axis = AXIS_OF[op.axis]
                row = by_axis.setdefault(axis, [np.zeros(b.n) for _ in held])
                size = m * bytes_of(op)
                for i, h in enumerate(held):
                    row[i] = row[i] + h.counts[block] * size
    for axis, rows in by_axis.items():
        grow(axis, rows)
    reductions = []
    for c in counts:
        total = np.zeros(b.n)
        for group, count in c.items():
            for op in [*sync.gradient_reduction(b, count, group), *sync.parameter_gather(b, count, group)]:
                if op.kind == "collective":
                    total = total + bytes_of(op)
        reductions.append(total)
    grow("dp", reductions)
    for name in ("boundary-F", "boundary-I"):
        for op in program.sync.get(name, []):
            grow("pp", [m * b.virtual * op.count * op.message_bytes])
    return out
