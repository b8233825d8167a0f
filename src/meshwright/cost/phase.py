"""The time of one micro-batch on one rank: compute, communication and the host, by block and phase.

For one micro-batch, one rank and one direction, the device is busy for

    gpu = compute + exposed communication + slowdown · hidden communication

where only the axes that overlap hide communication behind compute: tensor parallelism piece by piece beside the product of its layer, or behind one
product where it does not overlap (`cost.pieces`). Hidden communication slows compute, because it uses some of the device's units and memory
bandwidth. The host must issue every launch and collective. If only one side ever waited, a direction would take max(gpu, host). But some
kernels are short and some are long, so each side waits part of the time if the two are close:

    direction = (gpu³ + host³)^⅓        26% more than either if they are equal, 4% more than the larger if one is twice the other

The time that the host adds is reported as `host`. An operator of a compiled graph costs it less than one that autograd calls by itself, as
those of the experts of a compiled layer are (`Stack.expert_launch`); replayed from a CUDA graph, neither costs it much (`Stack.graphs`).

The end of a step is in `cost.closing`.
"""

from dataclasses import dataclass, field

import numpy as np

from meshwright.cost import compute
from meshwright.cost.collective import CollectiveTimes
from meshwright.cost.pieces import (
    axis_overlap,
    behind_products,
    in_pieces,
    reads_own_shard,
    split_launches,
    sums_products,
)
from meshwright.describe.cluster import Cluster
from meshwright.describe.stack import Stack
from meshwright.lower.program import (
    DATA_PARALLEL,
    Array,
    Batch,
    Op,
    StageBlocks,
    StepProgram,
    present,
)

AXIS_OF = {  # group of an operation → axis under which its time is reported
    **dict.fromkeys(("tp", "expert_tp", "kv_copies"), "tp"),
    **dict.fromkeys(("shard_cp", "dp_cp", "replicate", "world"), "dp"),
    **dict.fromkeys(("expert_shard", "expert_dp", "expert_replicate"), "dp"),
    **dict.fromkeys(("ep", "stage"), "ep"),
    **dict.fromkeys(("pp", "ends"), "pp"),
    "cp": "cp",
}
TIMED_AS = {"F": "F", "I": "I", "E": "I", "S": "I", "G": "I", "W": "W", "R": "R"}  # phases that are timed together
SPLIT_ONLY = ("S", "G")  # phases of a split backward
GRAPH_HOST = 0.05  # host time of launches replayed from a graph, as a share
EAGER_PARTS = ("experts",)  # of a compiled layer: their sizes depend on the routing (`Stack.expert_launch`)
EXPERT_GRAPHS = 4.0  # compiled graphs of a layer with routed experts (`Stack.graph_call`)
# Parts of a layer whose expert messages overlap (attention, router, dispatch, experts, combine), and operators around one.
NODES, NODE_OPERATORS = 5.0, 8.0
# Launches of one graph of a part of a layer: the copy of its input, the replay, autograd's function, hooks.
REPLAY_LAUNCHES = 4.0
GRAPHED_PARTS = {  # of `Stack.graphs`
    "attention": ("attention", "linear", "norm"),
    "router": ("router", "shared", "norm"),
    "ffn": ("ffn", "norm"),
}


@dataclass
class PhaseTime:
    """Times of one block and phase: seconds by part (compute and exposed communication), their sum, and host seconds."""

    parts: dict[str, Array] = field(default_factory=dict)
    comm: dict[str, Array] = field(default_factory=dict)  # by axis, hidden or not
    busy: Array = 0.0
    host: Array = 0.0
    flops: Array = 0.0
    left: Array = 0.0  # seconds of compute that can still hide communication
    last: Array = 0.0  # a micro-batch's share of the reductions that follow all micro-batches (`Stack.reduces_last`)


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
        times[block, phase].host = (
            times[block, phase].host
            + unit_hooks(program.batch, phase)
            + replays(program.batch, ops, phase)
            + graph_calls(program.batch, block, ops, phase)
        )
        if TIMED_AS[phase] == "I":
            latest[block] = phase
    if present(program.batch.overlap["ep"] * (program.batch.ep > 1)):
        for block in {block for block, _ in times}:
            overlap_experts(program.batch, [times[block, phase] for phase in "FIW" if (block, phase) in times])
    return times


def overlap_experts(b: Batch, phases: list[PhaseTime]) -> None:
    """Hide the exposed messages of experts behind the compute that is left in all phases of a layer, and add the host time of doing so.

    Schedules that overlap these messages run forward of one micro-batch beside backward of another, weight gradients included. Each of the `NODES`
    of a layer then runs by itself on its stream, in forward and in backward (Megatron's `ScheduleNode`, core 0.16, pipeline_parallel/utils.py): it
    enters the stream, waits for an event, records one, and detaches its inputs or starts autograd, marks and frees them: `NODE_OPERATORS` without a
    framework's module."""
    exposed = sum(t.parts.get("ep", 0.0) for t in phases)
    hidden = np.minimum(exposed, sum(t.left for t in phases)) * b.overlap["ep"]
    for t in phases:
        if "ep" not in t.parts:
            continue
        share = hidden * t.parts["ep"] / np.maximum(exposed, 1e-30)
        t.parts["ep"] = t.parts["ep"] - share
        add(t.parts, "interference", b.stack.compute_slowdown * share)
        t.busy = t.busy - (1 - b.stack.compute_slowdown) * share
        graphed = GRAPH_HOST if "step" in b.stack.graphs else 1.0
        seconds = NODES * NODE_OPERATORS * b.stack.bare_operator * b.stack.launch * graphed
        t.host = t.host + (b.ep > 1) * b.overlap["ep"] * seconds


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
    summed: Array = 0.0  # seconds of reductions of sums that do not overlap
    gathered: Array = 0.0  # seconds of all-gathers of keys and values
    products: dict[str, Array] = {}  # seconds of each, behind which a collective of its layer may run
    for op in ops:
        t.host = t.host + host_time(b, op)
        if op.axis:
            message = op.count * network.time(op)
            add(t.comm, AXIS_OF[op.axis], message)
            if sums_products(op) and not stack.overlap_sums:
                summed = summed + message
            if op.axis == "cp" and op.collective == "all_gather":
                gathered = gathered + message
            if present(op.bytes):
                copied = op.count * stack.elementwise * compute.memory_time(device, op)
                add(t.parts, "copies", copied)
                work = work + copied
            continue
        if op.kind == "host":
            add(t.comm, "host", op.count * compute.host_copy_time(device, op))
            continue
        times = op.count * compute.pace(stack, op)  # mostly numbers: one array operation less
        seconds = times * compute.device_time(device, b.workload.precision, stack.attention, op)
        add(t.parts, op.part, seconds)
        t.flops = t.flops + op.count * op.flops
        work = work + seconds
        if op.kind == "gemm":
            products[op.name] = seconds
        if op.kind in ("attention", "tile"):
            core = core + seconds
    t.busy = work
    t.left = left = stack.hides * work if main is None else main.left  # compute hides one stream at a time
    for axis in b.overlap:  # in a fixed order, independent of the other plans of the batch
        if axis not in t.comm:
            continue
        seconds = t.comm[axis]
        if axis == "dp" and phase == "W":
            t.last = reduced_last(b, seconds)
            seconds = seconds - t.last
        hidden = np.minimum(seconds if axis != "tp" else seconds - summed, left)
        if main is None and axis == "tp":  # all compute but attention hides the messages of tp, attention those of cp
            hidden = np.minimum(hidden, stack.hides * (work - core))
        if main is None and axis == "cp":
            hidden = np.minimum(hidden, behind_attention(b, seconds, gathered, core))
        if axis == "tp" and main is None and stack.overlap_in_pieces and present(b.overlap["tp"]):
            hidden = np.minimum(hidden, in_pieces(b, network, ops, products))
        overlaps = axis_overlap(b, axis, cluster)
        hidden = hidden * overlaps
        if axis == "tp" and b.async_linears:
            hidden = hidden + (1 - overlaps) * np.minimum(behind_products(b, network, ops, products), left)
        if axis == "dp":
            hidden = hidden * (b.prefetch if phase == "F" else b.prefetches_backward) * unit_overlap(stack)
        t.left = left = left - hidden
        slowed = stack.compute_slowdown * hidden
        t.parts[axis] = seconds - hidden
        add(t.parts, "interference", slowed)
        t.busy = t.busy + seconds - hidden + slowed
    hide_offload(t)
    return t


def behind_attention(b: Batch, messages: Array, gathered: Array, core: Array) -> Array:
    """Seconds of the messages of context parallelism that attention can hide. Attention in blocks hides a gather behind the rank's own block only."""
    behind = b.stack.hides * core
    return (
        np.minimum(behind, messages - gathered + np.minimum(gathered, behind / b.cp))
        if b.stack.context_in_blocks
        else behind
    )


def hide_offload(t: PhaseTime) -> None:
    """Hide copies to and from the host: those down overlap with forward, those up with the backward of the layer that ran before."""
    if "host" in t.comm:
        hidden = np.minimum(t.comm["host"], t.left)
        t.left = t.left - hidden
        t.parts["offload"] = t.comm["host"] - hidden
        t.busy = t.busy + t.parts["offload"]


def reduced_last(b: Batch, seconds: Array) -> Array:
    """The part of the seconds of reductions that comes after all micro-batches (`Stack.reduces_last`)."""
    return seconds * (b.stack.reduces_last & (b.pp > 1) & (b.zero == 3))


def host_time(b: Batch, op: Op) -> Array:
    """Host seconds in which an operation is issued."""
    stack = b.stack
    if not op.axis:
        seconds = op.count * op.launches * (stack.launch if op.kind == "host" else launch_time(stack, op))
    else:
        seconds = op.count * collective_launch(stack, op)
        if reads_own_shard(stack, op):
            seconds = seconds + op.count * split_launches(b) * (stack.product_launch or stack.launch)
    graphed = any(scope == "step" or op.part in GRAPHED_PARTS[scope] for scope in stack.graphs)
    return seconds * GRAPH_HOST if graphed else seconds


def replays(b: Batch, ops: list[Op], phase: str) -> Array:
    """Host seconds in which the graphs of parts of a layer are replayed: inputs are copied to where the graph reads them, autograd and hooks run
    around it. Weight gradients are in the graph of backward."""
    if phase not in ("F", "I", "E", "R"):
        return 0.0
    parts = {op.part for op in ops}
    graphs = sum(scope != "step" and not parts.isdisjoint(GRAPHED_PARTS[scope][:-1]) for scope in b.stack.graphs)
    repeated = (b.recompute == 2) * 1.0 if phase == "R" else 1.0
    return graphs * REPLAY_LAUNCHES * b.stack.launch * repeated


def graph_calls(b: Batch, block: str, ops: list[Op], phase: str) -> Array:
    """Host seconds in which the compiled graphs of a layer are called. Weight gradients are in the graph of backward; `replays` has what CUDA graphs
    replay."""
    if not b.stack.graph_call or b.stack.graphs or block not in b.model.kinds or phase not in ("F", "I", "R"):
        return 0.0
    graphs = EXPERT_GRAPHS if any(op.part in EAGER_PARTS for op in ops) else 1.0
    repeated = (b.recompute == 2) * 1.0 if phase == "R" else 1.0
    return graphs * b.stack.graph_call * repeated


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
    eager = stack.expert_launch if op.part in EAGER_PARTS else 1.0
    if op.elementwise:
        return eager * stack.launch * stack.elementwise_launch.get(op.elementwise, 1.0)
    of_kind = {"gemm": stack.product_launch, "attention": stack.attention_launch, "tile": stack.tile_launch}
    return (
        max(eager * stack.launch, of_kind.get(op.kind, 0.0)) if eager > 1 else of_kind.get(op.kind, 0.0) or stack.launch
    )


def in_units(b: Batch, group: str) -> Array:
    """Mark the plans of the batch that shard the parameters of a group in units (`fully_shard`)."""
    return b.sharded(group) & b.units


def unit_hooks(b: Batch, phase: str) -> Array:
    """Host seconds of the hooks around a block's forward or backward, which run also where nothing is gathered or reduced."""
    if not b.stack.unit_hooks or phase not in ("F", "I", "E"):
        return 0.0
    return np.where(in_units(b, "dense"), b.stack.unit_hooks / 2 / b.wrap, 0.0)


def collective_launch(stack: Stack, op: Op) -> float:
    """Host seconds of issuing one collective; those of a ZeRO-3 unit run through hooks and views of its parameters."""
    return (stack.unit_launch if op.part in DATA_PARALLEL else 0.0) or stack.collective_launch
