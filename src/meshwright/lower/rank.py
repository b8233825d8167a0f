"""What one rank issues in one step, to the byte: the step program evaluated in integers.

The operations of each block, the collectives of each message and the sums of a step are those of the step program of this one plan.
Here they are followed on one rank: its stages as the pipeline's program places them, layer by layer, and its box of each parameter
(`describe.sharding`), from which its ZeRO units and buckets are listed one by one. To what a batch of plans knows this adds

    frozen parameters   no reduction of their gradients, and nothing of the part of backward that is not needed (`frozen`)
    other ranks         their rows of what does not divide evenly
    the step            replicas that train alone average in some steps only

What neither model, plan nor workload knows is `Given`: which parameters the user froze, the number of the step, how many copies of
tokens the routers sent, how many values a threshold let pass. Without it routing is even and values are normally distributed.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import or_
from typing import NamedTuple

from meshwright.describe.accelerator import DTYPE_BYTES
from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import Box, boxes, degrees_of
from meshwright.describe.stack import Stack
from meshwright.describe.variants import COMPRESSIONS
from meshwright.lower import muon, sync
from meshwright.lower.compressed import factor_size
from meshwright.lower.frozen import BackwardReach
from meshwright.lower.gradients import GradientMessage, data_parallel_ops, flat_messages
from meshwright.lower.program import DATA_PARALLEL, Load, Op, StepProgram, scalar
from meshwright.lower.recompute import resolve_recompute_budget
from meshwright.lower.traffic import Record, boundary_ops, records
from meshwright.programs.pipelines import build
from meshwright.programs.pipelines.program import PipelineProgram

OURS = Stack(shared_scales=True, fp8_activation_gathers=False)  # what `parallel` does
# Operations whose bytes routing decides, by the count of rows that they move.
ROUTED_ROWS = {
    "dispatch": "sent",
    "dispatch-grad": "received",
    "combine": "received",
    "combine-grad": "sent",
    "expert-gather": "fullest",
    "expert-scatter": "fullest",
}
ROW_SCALES = "fp8-expert-rows"  # scales of the rows that `down` reads


class Routed(NamedTuple):
    """Rows of one layer's tokens in one micro-batch: sent by this rank, received by it, those of its whole expert_tp group, and of
    the fullest rank of that group."""

    sent: int
    received: int
    rows: int
    fullest: int


@dataclass(frozen=True)
class Given:
    """Facts of one step that the plan does not fix: routing, thresholds, frozen parameters."""

    step: int = 0  # counted from 1; 0: one in which replicas average
    frozen: frozenset[str] = frozenset()
    routed: Mapping[int, Sequence[Routed]] | None = None  # by layer, one for each micro-batch
    passed: Sequence[Sequence[int]] | None = None  # by compressed message, values above the threshold in each reduction


@dataclass(frozen=True)
class RankStage:
    """One of a rank's stages, and in how many micro-batches its backward is split."""

    index: int
    layers: range
    split: int


class Sent(NamedTuple):
    """All messages of one operation in a step of a rank."""

    name: str
    axis: str
    collective: str
    times: float
    bytes: float  # of all of them
    phase: str = ""  # of a block; "": once per step


def traffic_of_rank(
    program: StepProgram,
    plan: Plan,
    rank: int,
    order: tuple[str, ...] = ("tp", "cp", "pp", "dp"),
    data: Given | None = None,
) -> list[Record]:
    """All messages of this rank in the step of a program of one plan, by axis and collective."""
    return records(row[:5] for row in messages_of_rank(program, plan, rank, order, data))


def messages_of_rank(
    program: StepProgram, plan: Plan, rank: int, order: tuple[str, ...], data: Given | None = None
) -> list[Sent]:
    """The same, operation by operation."""
    b = program.batch
    model, data, plan = b.model, data or Given(), resolve_recompute_budget(b.model, plan, b.workload, b.stack)
    layout, m = Layout(plan, order), plan.microbatches(b.workload)
    if model.resnet.stages:  # its parameters are known one by one here
        program = replace(program, batch=copy(b))
        program.batch.units = True
    pipeline = build(plan.schedule, plan.pp, m, plan.virtual) if plan.pp > 1 else None
    at = layout.coordinates(rank)["pp"]
    stages = stages_of(model, plan, pipeline, at)
    boxes_by_stage = [boxes(model, plan, layout, rank, stage.layers, data.frozen) for stage in stages]
    issued = list(boundaries(program, pipeline, at, m))
    for stage, stage_boxes in zip(stages, boxes_by_stage, strict=True):
        issued += in_blocks(program, plan, stage, stage_boxes, m, data)
    ops = [
        *reductions(program, plan, stages, boxes_by_stage, data),
        *other_sums(program, plan, [b for s in boxes_by_stage for b in s], data),
        *muon.exchanges_of_rank(
            program.batch, [b for s in boxes_by_stage for b in s], degrees_of(model, plan), places(layout, rank, model)
        ),
    ]
    issued += [
        Sent(op.name, op.axis, op.collective, scalar(op.count), scalar(op.count * op.message_bytes))
        for op in ops
        if op.axis
    ]
    sizes = {axis: scalar(program.batch.size(axis)) for axis in {row.axis for row in issued}}
    return [row for row in issued if row.times and sizes[row.axis] > 1]


def places(layout: Layout, rank: int, model: Model) -> dict[str, int]:
    """The place of the rank on the axes over which matrices are cut."""
    axes = ["shard_cp", "tp", *(["expert_shard", "expert_tp"] if model.experts else [])]
    return {axis: layout.group_of(axis, rank).index(rank) for axis in axes}


def stages_of(model: Model, plan: Plan, pipeline: PipelineProgram | None, at: int) -> list[RankStage]:
    """The stages of a pipeline rank."""
    if pipeline is None:
        return [RankStage(0, range(model.layers), 0)]
    out, start = [], 0
    split = [a.stage for a in pipeline.actions(at) if a.kind == "I"]
    for index, count in enumerate(plan.stage_layers(model.layers)):
        if pipeline.rank_of[index] == at:
            out.append(RankStage(index, range(start, start + count), split.count(index) if index else 0))
        start += count
    return out


# Blocks


def in_blocks(
    program: StepProgram, plan: Plan, stage: RankStage, stage_boxes: list[Box], m: int, data: Given
) -> Iterator[Sent]:
    """Yield the messages of every block of a stage, in each micro-batch."""
    model, recomputed = program.batch.model, set(plan.recomputed_layers(stage.layers))
    blocks = [("embedding", -1)] * (stage.layers.start == 0)
    blocks += [(model.layer_kinds[layer], layer) for layer in stage.layers]
    blocks += [("head", -1)] * (stage.layers.stop == model.layers)
    reach = BackwardReach.of(model, stage.layers, stage_boxes, later=stage.index > 0)
    for block, layer in blocks:
        reruns = layer in recomputed or (plan.recompute == "selective" and layer >= 0)
        for phase, op in program.ops(block):
            if not op.axis or op.part in DATA_PARALLEL or (phase == "R" and not reruns) or phase == "E":
                continue
            times = scalar(op.count) * rounds(op, phase, block, layer, stage, reach, layer in recomputed, m)
            n = times * scalar(op.message_bytes)
            if times and data.routed is not None and data_decides(op, model):
                n = routed_bytes(program, op, data.routed[layer])
            yield Sent(op.name, op.axis, op.collective, times, n, phase)


def rounds(
    op: Op, phase: str, block: str, layer: int, stage: RankStage, reach: BackwardReach, recomputed: bool, m: int
) -> float:
    """Number of times that an operation runs in all micro-batches."""
    if phase == "F":
        return m
    if phase == "R":
        return m * reach.reaches(layer, block)
    often = stage.split if phase in ("S", "G") else m
    if op.name == "fp8-gradients":
        return often * reach.products(layer)
    if op.name.endswith("-in-again"):
        if recomputed:  # gathered once for the recomputation, and kept
            return m * reach.reaches(layer, block) if phase == "W" else 0
        return often * reach.region(op.name.removesuffix("-in-again"), layer)
    return often * reach.happens(op.name, layer, block)


def data_decides(op: Op, model: Model) -> bool:
    """Whether routing decides the bytes of an operation. Where no copy is dropped, a rank sends t·k copies wherever they go."""
    name = op.name.removesuffix("-again")
    return name == ROW_SCALES or (name in ROUTED_ROWS and (ROUTED_ROWS[name] != "sent" or model.router.compares))


def routed_bytes(program: StepProgram, op: Op, journeys: Sequence[Routed]) -> float:
    """Bytes of routed messages of all micro-batches: an all-to-all of rows that leave, or a gather or scatter padded to the fullest rank."""
    batch, name = program.batch, op.name.removesuffix("-again")
    if name == ROW_SCALES:
        return 4.0 * sum(journey.rows + scalar(batch.experts_scaled_forward) for journey in journeys)
    kind = ROUTED_ROWS[name]
    ranks = scalar(batch.etp) if kind == "fullest" else 1.0
    return sum(getattr(journey, kind) for journey in journeys) * ranks * batch.model.hidden * program.element


def boundaries(program: StepProgram, pipeline: PipelineProgram | None, at: int, m: int) -> Iterator[Sent]:
    """Yield messages between stages on different ranks: activations forward, gradients backward."""
    if pipeline is None:
        return
    pairs = [(a, b) for a, b in pairwise(pipeline.rank_of.tolist()) if a != b]
    for (phase, op), senders in zip(boundary_ops(program), ([a for a, _ in pairs], [b for _, b in pairs]), strict=True):
        count = float(m * senders.count(at))
        yield Sent(op.name, op.axis, op.collective, count, count * scalar(op.message_bytes), phase)


# Once per step


def reductions(
    program: StepProgram, plan: Plan, stages: list[RankStage], boxes_by_stage: list[list[Box]], data: Given
) -> Iterator[Op]:
    """The messages of data parallelism, of all stages of the rank."""
    passed = iter(data.passed) if data.passed is not None else None
    messages: dict[str, list[GradientMessage]] = {"dense": [], "expert": []}
    for stage, stage_boxes in zip(stages, boxes_by_stage, strict=True):
        for group, message in stage_messages(program.batch.model, plan, stage.layers, stage_boxes, passed):
            messages[group].append(message)
    for group, group_messages in messages.items():
        yield from data_parallel_ops(program.batch, group, group_messages, zero_3=True)


def stage_messages(
    model: Model, plan: Plan, layers: range, stage_boxes: list[Box], passed: Iterator[Sequence[int]] | None
) -> Iterator[tuple[str, GradientMessage]]:
    """The units of ZeRO of one stage, then its buckets: dense parameters before experts, compressed gradients before exact ones."""
    lossy = plan.wire != "none"

    def measured(compressed: bool) -> float | None:
        """The mean over a message's reductions of the values that a threshold let pass."""
        if passed is None or not compressed or not COMPRESSIONS[plan.wire].counts_values:
            return None
        values = next(passed)
        return sum(values) / len(values)

    units = list(zero_units(model, plan, layers, [box for box in stage_boxes if box.zero]))
    for unit, regathered in zip(units, gathered_in_backward(units, plan.prefetch is True), strict=True):
        load = load_of(unit, plan, model)
        yield unit[0].group, GradientMessage(1.0, load, True, float(regathered), measured(bool(load.sent > 0)))
    for group in ("dense", "expert"):
        learns = [box for box in stage_boxes if box.group == group and box.learns and not box.zero][::-1]
        sent = [box for box in learns if not lossy or box.compressible]
        parts = [(box.size, *factor_size(box.shape, plan.compression_rank)) for box in sent]
        width = DTYPE_BYTES[plan.grad_dtype]
        for elements, first, second in flat_messages(parts, plan.bucket, width, COMPRESSIONS[plan.wire].by_matrix):
            yield group, GradientMessage(1.0, Load(sent=elements, first=first, second=second), passed=measured(lossy))
        exact = [(box.size, 0, 0) for box in learns if lossy and not box.compressible]
        for elements, *_ in flat_messages(exact, plan.bucket, width, False):
            yield group, GradientMessage(1.0, Load(exact=elements))


def load_of(unit: list[Box], plan: Plan, model: Model) -> Load:
    """Elements of a unit of ZeRO that data parallelism gathers and reduces."""
    learns = [box for box in unit if box.learns]
    sent = [box for box in learns if plan.wire == "none" or box.compressible]
    factors = [factor_size(box.shape_in_transit, plan.compression_rank) for box in sent]
    total = sum(box.padded_size for box in learns)
    compressed = sum(box.padded_size for box in sent)
    first, second = (float(sum(pair[k] for pair in factors)) for k in (0, 1))
    return Load(
        float(sum(box.padded_size for box in unit)),
        float(compressed),
        float(total - compressed),
        first,
        second,
        float(sum(box.padded_size for box in unit if box.parameter.multiplied_in_fp8 and not box.parameter.packed)),
        float(sum(box.padded_size for box in unit if box.parameter.frozen)),
        float(sum(box.padded_size for box in unit if box.parameter.packed)),
        float(sum(packed_bytes(box, model) for box in unit if box.parameter.packed)),
    )


def packed_bytes(box: Box, model: Model) -> float:
    """Bytes of a quantised weight, as ZeRO pads its rows."""
    columns = box.shape[-1]
    return float(box.padded_size // columns * model.adapter.row_bytes(columns, box.start[-1]))


def zero_units(model: Model, plan: Plan, layers: range, stage_boxes: list[Box]) -> Iterator[list[Box]]:
    """The units of one stage: what ZeRO gathers and reduces together."""
    dense = [box for box in stage_boxes if not box.expert]
    if not plan.wrap:
        groups = [dense]
    else:
        first = [box for box in dense if box.parameter.block == "embedding"]
        last = [box for box in dense if box.parameter.block == "head"]
        ends = [first + last, []] if model.tied and first and last else [first, last]
        runs: list[list[Box]] = [[] for _ in range(0, len(layers), plan.wrap)]
        for box in dense:
            if box.parameter.layer >= 0:
                runs[(box.parameter.layer - layers.start) // plan.wrap].append(box)
        groups = [ends[0], *runs, ends[1]]
    groups += [[box for box in stage_boxes if box.expert and box.parameter.layer == layer] for layer in layers]
    yield from (group for group in groups if group)


def gathered_in_backward(units: list[list[Box]], prefetch: bool) -> list[bool]:
    """The units that backward gathers: those that a gradient reaches, with something trained in them or before; and the one before
    these, where each unit prefetches the next. (A unit of experts always does.)"""
    order = sorted(range(len(units)), key=lambda i: forward_end(units[i]))
    reached = dict(zip(order, accumulate((any(box.learns for box in units[i]) for i in order), or_), strict=True))
    asks = {i: reached[i] and (prefetch or units[i][0].expert) for i in order}
    after = dict(pairwise(order))
    return [reached[i] or (i in after and asks[after[i]]) for i in range(len(units))]


def forward_end(unit: list[Box]) -> tuple[float, bool]:
    """Sort key of a unit: when forward is done with it. A layer's experts end before the layer; tied ends end with the later one."""
    last = max(float("inf") if box.parameter.block == "head" else float(box.parameter.layer) for box in unit)
    return last, not unit[0].expert


def other_sums(program: StepProgram, plan: Plan, stage_boxes: list[Box], data: Given) -> list[Op]:
    """Yield the reductions after those of gradients: partial sums, weights shared by stages, loads, three scalars, averages of replicas."""
    elements: dict[str, float] = {}
    for box in stage_boxes:
        if box.partial:
            elements[box.partial] = elements.get(box.partial, 0.0) + box.local_size
    tied = [box for box in stage_boxes if box.tied and box.learns]
    if len(tied) == 1:
        elements["ends"] = float(tied[0].local_size)
    routers = sum(box.name.endswith(".router.weight") for box in stage_boxes)
    elements["stage"] = sync.ROUTER_LOADS * program.batch.model.experts * routers
    if program.batch.scales:
        for group, name in sync.FP8_SCALES.items():
            multiplied = [box for box in stage_boxes if box.group == group and box.parameter.multiplied_in_fp8]
            scales = sum(box.shape[0] if box.expert else 1 for box in multiplied)
            elements[name] = scales * scalar(program.batch.gathers_fp8_weights(group))
    averages = plan.average_every > 0 and data.step % plan.average_every == 0
    own = float(sum(box.local_size for box in stage_boxes if not box.parameter.frozen))
    return [*sync.small_sums(program.batch, elements), *sync.parameter_average(program.batch, own, float(averages))]
