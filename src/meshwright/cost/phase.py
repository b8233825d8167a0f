"""The time of one micro-batch on one rank: compute, communication and the host, by block and phase.

For one micro-batch, one rank and one direction, the device is busy for

    gpu = compute + exposed communication + slowdown · hidden communication

where only the axes that overlap hide communication behind compute. Where tensor parallelism does not, some stacks run a collective of a linear layer
behind one product of the same layer (`behind_products`). Hidden communication slows compute, because it uses some of the device's units and memory
bandwidth. The host must issue every launch and collective. If only one side ever waited, a direction would take max(gpu, host). But some
kernels are short and some are long, so each side waits part of the time if the two are close:

    direction = (gpu³ + host³)^⅓        26% more than either if they are equal, 4% more than the larger if one is twice the other

The time that the host adds is reported as `host`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.cost import compute
from meshwright.cost.collective import CollectiveTimes
from meshwright.describe.cluster import Cluster
from meshwright.describe.stack import Stack
from meshwright.lower.program import DATA_PARALLEL, Array, Batch, Op, StageBlocks, StepProgram

AXIS_OF = {  # group of an operation → axis under which its time is reported
    **dict.fromkeys(("tp", "expert_tp", "kv_copies"), "tp"),
    **dict.fromkeys(("shard_cp", "dp_cp", "replicate", "world"), "dp"),
    **dict.fromkeys(("expert_shard", "expert_dp", "expert_replicate"), "dp"),
    **dict.fromkeys(("ep", "stage"), "ep"),
    **dict.fromkeys(("pp", "ends"), "pp"),
    "cp": "cp",
}
TIMED_AS = {"F": "F", "I": "I", "S": "I", "G": "I", "W": "W", "R": "R"}  # phases that are timed together
SPLIT_ONLY = ("S", "G")  # phases of a split backward
GRAPH_HOST = 0.05  # host time of launches replayed from a graph, as a share


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


def phase_times(program: StepProgram, cluster: Cluster, network: CollectiveTimes) -> dict[tuple[str, str], PhaseTime]:
    """The time of each phase of each block, for one micro-batch."""
    times: dict[tuple[str, str], PhaseTime] = {}
    latest: dict[str, str] = {}  # for each block, the phase whose remaining compute can hide communication
    for (block, phase), ops in program.blocks.items():
        main = times[block, latest[block]] if phase in SPLIT_ONLY else None
        times[block, phase] = phase_time(program, cluster, network, ops, phase, main)
        times[block, phase].host = times[block, phase].host + unit_hooks(program.batch, phase)
        if TIMED_AS[phase] == "I":
            latest[block] = phase
    return times


def phase_time(
    program: StepProgram,
    cluster: Cluster,
    network: CollectiveTimes,
    ops: list[Op],
    phase: str,
    main: PhaseTime | None = None,
) -> PhaseTime:
    """Time the operations of one block and phase, and hide overlapped communication behind its compute. A phase of a split backward hides
    behind the remaining compute of its `main` phase instead."""
    b, device, stack = program.batch, cluster.accelerator, program.batch.stack
    t = PhaseTime()
    core: Array = 0.0
    work: Array = 0.0
    products: dict[str, Array] = {}  # seconds of those that may hide a collective of their layer
    for op in ops:
        if op.axis:
            axis = AXIS_OF[op.axis]
            add(t.comm, axis, op.count * network.time(op))
            t.host = t.host + op.count * collective_launch(stack, op)
            if op.own_shard and stack.async_linears == "own-shard":
                t.host = t.host + op.count * split_launches(b) * (stack.product_launch or stack.launch)
            continue
        if op.kind == "host":
            copied = op.count * compute.host_copy_time(device, op)
            add(t.comm, "host", copied)
            t.host = t.host + op.count * op.launches * stack.launch
            continue
        times = op.count * compute.pace(stack, op)  # mostly numbers: one array operation less
        seconds = times * compute.device_time(device, b.workload.precision, stack.attention, op)
        add(t.parts, op.part, seconds)
        t.host = t.host + op.count * op.launches * launch_time(stack, op)
        t.flops = t.flops + op.count * op.flops
        work = work + seconds
        if b.async_linears and op.kind == "gemm":
            products[op.name] = seconds
        if op.kind in ("attention", "tile"):
            core = core + seconds
    t.busy = work
    t.left = left = stack.hides * work if main is None else main.left  # compute hides one stream at a time
    for axis in b.overlap:  # in a fixed order, independent of the other plans of the batch
        if axis not in t.comm:
            continue
        seconds = t.comm[axis]
        hidden = np.minimum(seconds, left)
        if main is None and axis in ("tp", "cp"):  # attention hides the messages of cp, all other compute those of tp
            hidden = np.minimum(hidden, stack.hides * (core if axis == "cp" else work - core))
        overlaps = axis_overlap(b, axis, cluster)
        hidden = hidden * overlaps
        if axis == "tp" and products:
            hidden = hidden + (1 - overlaps) * np.minimum(behind_products(b, network, ops, products), left)
        if axis == "dp":
            hidden = hidden * (b.prefetch if phase == "F" else b.prefetches_backward) * unit_overlap(stack)
        t.left = left = left - hidden
        slowed = stack.compute_slowdown * hidden
        t.parts[axis] = seconds - hidden
        add(t.parts, "interference", slowed)
        t.busy = t.busy + seconds - hidden + slowed
    if "host" in t.comm:  # copies down overlap with forward; those up with the backward of the layer that ran before
        hidden = np.minimum(t.comm["host"], left)
        t.left = left - hidden
        t.parts["offload"] = t.comm["host"] - hidden
        t.busy = t.busy + t.parts["offload"]
    if stack.graphs:
        t.host = t.host * GRAPH_HOST
    return t


def axis_overlap(b: Batch, axis: str, cluster: Cluster) -> Array:
    """1 where the communication of an axis overlaps with compute (`PlanFields.overlapped`)."""
    if axis != "tp" or not b.stack.overlap_in_pieces:
        return b.overlap[axis]
    return np.where(b.stack_overlap & (b.tp > cluster.node_size), 0.0, b.overlap[axis])


def behind_products(b: Batch, network: CollectiveTimes, ops: list[Op], products: dict[str, Array]) -> Array:
    """Seconds of the collectives of linear layers that run behind one product of their layer (`Stack.async_linears`), each at most as long as
    it. Backward of a column layer has two products of equal size and up to two collectives, the gather of the input and the reduction of its
    gradient: each runs behind the other one's product, and counts here with the product of its phase."""
    hidden: Array = 0.0
    for op in ops:
        if op.product not in products or (op.own_shard and b.stack.async_linears != "own-shard"):
            continue
        longest = products[op.product] / (b.tp if op.own_shard else 1.0)
        hidden = hidden + np.minimum(op.count * network.time(op), longest)
    return hidden


def split_launches(b: Batch) -> Array:
    """Launches that a product takes more where the rank's own shard is multiplied first: the shards before it, and those after it."""
    return np.minimum(b.tp, 3.0) - 1.0


def add(table: dict[str, Array], key: str, value: Array) -> None:
    """Add a value to an entry of the table. The first one is stored as it is: adding it to zero would be an operation on arrays."""
    table[key] = table[key] + value if key in table else value


def rank_time(
    program: StepProgram, times: dict[tuple[str, str], PhaseTime], blocks: StageBlocks, boundary: Array
) -> RankTime:
    """Seconds of one micro-batch on one rank: each phase combines the device and the host time."""
    b = program.batch
    busy, host = ({phase: np.zeros(b.n) for phase in TIMED_AS.values()} for _ in range(2))
    for (block, phase), t in times.items():
        runs = blocks.times(block, phase)
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


def together(stack: Stack, device: Array, host: Array) -> Array:
    """Seconds that device and host take: their sum where the host computes, else the longer of the two and a little more."""
    if not stack.asynchronous:
        return device + host
    return np.cbrt(device * device * device + host * host * host)


def unit_overlap(stack: Stack) -> float:
    """Whether ZeRO units communicate behind compute. `fully_shard` overlaps by the streams of a device: where the host computes (CPU) there are
    none, and each of its collectives blocks. So do those of a stack that gathers each parameter only when its module runs."""
    return 1.0 if stack.asynchronous and stack.gathers == "layer" else 0.0


def launch_time(stack: Stack, op: Op) -> float:
    """Host seconds of one launch of an operation."""
    if op.elementwise:
        return stack.launch * stack.elementwise_launch.get(op.elementwise, 1.0)
    of_kind = {"gemm": stack.product_launch, "attention": stack.attention_launch, "tile": stack.tile_launch}
    return of_kind.get(op.kind, 0.0) or stack.launch


def in_units(b: Batch, group: str) -> Array:
    """Mark the plans of the batch that shard the parameters of a group in units (`fully_shard`)."""
    return b.sharded(group) & b.units


def unit_hooks(b: Batch, phase: str) -> Array:
    """Host seconds of the hooks around a block's forward or backward, which run also where nothing is gathered or reduced."""
    if not b.stack.unit_hooks or phase not in ("F", "I"):
        return 0.0
    return np.where(in_units(b, "dense"), b.stack.unit_hooks / 2 / b.wrap, 0.0)


def collective_launch(stack: Stack, op: Op) -> float:
    """Host seconds of issuing one collective; those of a ZeRO-3 unit run through hooks and views of its parameters."""
    return (stack.unit_launch if op.part in DATA_PARALLEL else 0.0) or stack.collective_launch
