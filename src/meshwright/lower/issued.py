"""What one rank issues in one step, collective by collective and to the byte.

The step program (`step`) tells a batch of plans what a pipeline rank does; its closed forms have the mean where ranks differ, and
so many bytes where a stack cuts them into messages. `issued` follows one rank instead: its stages by the pipeline's own program,
layer by layer, its share of each parameter (`describe.sharding`), its messages one by one (`gradients`). Beside the step program's it has

    frozen parameters  no sums of their gradients, and nothing of a backward that does not reach so far (`flow`)
    averages           of replicas that train alone, in the step that has one
    small sums         of this rank's own rows of what is partial over tp or lives at both ends of a pipeline

What neither model, plan nor workload knows is *given*: which parameters a user does not train, the number of the step, how many
copies of tokens the routers really sent, how many values a threshold let pass. Without it routing is even and values normal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import Box, boxes
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower import sync
from meshwright.lower.flow import Flow
from meshwright.lower.gradients import DataParallel, Sent
from meshwright.lower.op import Op, StepProgram
from meshwright.lower.recompute import resolve_recompute_budget
from meshwright.lower.step import step_program
from meshwright.lower.traffic import Record, boundary_ops, recorded
from meshwright.programs.pipelines import SCHEDULES
from meshwright.programs.pipelines.program import PipelineProgram

OURS = Stack(shared_scales=True)  # what `parallel` does
JOURNEYS = {
    "dispatch": "sent",
    "dispatch-grad": "received",
    "combine": "received",
    "combine-grad": "sent",
    "expert-gather": "fullest",
    "expert-scatter": "fullest",
}
ROWS = "fp8-expert-rows"  # scales of the rows that `down` reads


class Routed(NamedTuple):
    """Rows of one layer's tokens in one micro-batch: sent by this rank, received by it, those of its whole expert_tp group, and of
    the fullest rank of that."""

    sent: int
    received: int
    rows: int
    fullest: int


@dataclass(frozen=True)
class Given:
    """What a step's data and its user decide."""

    step: int = 0  # counted from 1; 0: one in which replicas average
    frozen: frozenset[str] = frozenset()
    routed: Mapping[int, Sequence[Routed]] | None = None  # by layer, one a micro-batch
    told: Sequence[Sequence[int]] | None = None  # by compressed message, one a reduction


@dataclass(frozen=True)
class Stage:
    """One of a rank's stages, and of how many micro-batches its backward is split."""

    index: int
    layers: range
    split: int


def issued(
    model: Model,
    plan: Plan,
    workload: Workload,
    rank: int,
    order: tuple[str, ...] = ("tp", "cp", "pp", "dp"),
    given: Given | None = None,
    stack: Stack | None = None,
    element: float = 0.0,
) -> list[Record]:
    """Everything this rank of the plan issues in the step; activations of `element` bytes, unsaid those of the workload."""
    given, plan = given or Given(), resolve_recompute_budget(model, plan, workload, stack)
    layout, m = Layout(plan, order), plan.microbatches(workload)
    program = step_program(model, plan, workload, stack or OURS, element)
    pipeline = SCHEDULES[plan.schedule](plan.pp, m, plan.virtual) if plan.pp > 1 else None
    at = layout.coordinates(rank)["pp"]
    stages = stages_of(model, plan, pipeline, at)
    held = [boxes(model, plan, layout, rank, stage.layers, given.frozen) for stage in stages]
    found = [
        sent
        for stage, mine in zip(stages, held, strict=True)
        for sent in in_blocks(program, plan, stage, mine, m, given)
    ]
    found += boundaries(program, pipeline, at, m)
    data = DataParallel(model, plan, layout, m)
    told = iter(given.told) if given.told is not None else None
    for stage, mine in zip(stages, held, strict=True):
        found += [(name, axis, kind, 1.0, n) for name, axis, kind, n in data.messages(stage.layers, mine, told)]
    every = [box for mine in held for box in mine]
    found += [(name, axis, kind, 1.0, n) for name, axis, kind, n in small_sums(program, data, every, given)]
    return recorded(
        (name, axis, kind, count, n) for name, axis, kind, count, n in found if present(program, axis) and count
    )


def present(program: StepProgram, axis: str) -> bool:
    return number(program.batch.size(axis)) > 1


def number(value: object) -> float:
    return float(np.broadcast_to(value, 1)[0])  # type: ignore[call-overload]


def stages_of(model: Model, plan: Plan, pipeline: PipelineProgram | None, at: int) -> list[Stage]:
    """Those a pipeline rank footprint."""
    if pipeline is None:
        return [Stage(0, range(model.layers), 0)]
    out, start = [], 0
    split = [a.stage for a in pipeline.actions(at) if a.kind == "I"]
    for index, count in enumerate(plan.stage_layers(model.layers)):
        if pipeline.rank_of[index] == at:
            out.append(Stage(index, range(start, start + count), split.count(index) if index else 0))
        start += count
    return out


# Blocks


Counted = tuple[str, str, str, float, float]  # name, axis, collective, how many, bytes in all


def in_blocks(
    program: StepProgram, plan: Plan, stage: Stage, held: list[Box], m: int, given: Given
) -> Iterator[Counted]:
    """Of every block of a stage what the step program says, in each micro-batch."""
    model, again = program.batch.model, set(plan.recomputed_layers(stage.layers))
    blocks = [("embedding", -1)] * (stage.layers.start == 0)
    blocks += [(model.layer_kinds[layer], layer) for layer in stage.layers]
    blocks += [("head", -1)] * (stage.layers.stop == model.layers)
    flow = Flow.of(model, stage.layers, held, later=stage.index > 0)
    for block, layer in blocks:
        remade = layer in again or (plan.recompute == "selective" and layer >= 0)
        for phase, op in program.ops(block):
            if not op.axis or op.part in ("dense", "expert") or (phase == "R" and not remade):
                continue
            times = number(op.count) * rounds(op, phase, block, layer, stage, flow, layer in again, m)
            n = times * number(op.message_bytes)
            if times and given.routed is not None and data_decides(op, model):
                n = routed_bytes(program, op, given.routed[layer])
            yield op.name, op.axis, op.collective, times, n


def rounds(op: Op, phase: str, block: str, layer: int, stage: Stage, flow: Flow, again: bool, m: int) -> float:
    """In how many micro-batches, or how often in them, an operation happens."""
    if phase == "F":
        return m
    if phase == "R":
        return m * flow.reaches(layer, block)
    often = stage.split if phase == "S" else m
    if op.name == "fp8-gradients":
        return often * flow.products(layer)
    if op.name.endswith("-in-again"):
        if again:  # gathered once to make the layer again, and kept
            return m * flow.reaches(layer, block) if phase == "W" else 0
        return often * flow.region(op.name.removesuffix("-in-again"), layer)
    return m * flow.happens(op.name, layer, block)


def data_decides(op: Op, model: Model) -> bool:
    """Whether routing moves the bytes of an operation. Where nothing is dropped, a rank sends t·k copies whoever gets them."""
    name = op.name.removesuffix("-again")
    return name == ROWS or (name in JOURNEYS and (JOURNEYS[name] != "sent" or model.router.compares))


def routed_bytes(program: StepProgram, op: Op, journeys: Sequence[Routed]) -> float:
    """Of all micro-batches: an all-to-all of the rows that leave, a gather or a scatter padded to the fullest rank."""
    batch, name = program.batch, op.name.removesuffix("-again")
    if name == ROWS:
        return 4.0 * sum(journey.rows + batch.model.experts / number(batch.ep) for journey in journeys)
    kind = JOURNEYS[name]
    ranks = number(batch.etp) if kind == "fullest" else 1.0
    return sum(getattr(journey, kind) for journey in journeys) * ranks * batch.model.hidden * program.element


def boundaries(program: StepProgram, pipeline: PipelineProgram | None, at: int, m: int) -> Iterator[Counted]:
    """Activations on, gradients back, wherever the next stage is another rank's."""
    if pipeline is None:
        return
    rank_of = pipeline.rank_of.tolist()
    pairs = [(a, b) for a, b in pairwise(rank_of) if a != b]
    for (_, op), messages in zip(boundary_ops(program), ([a for a, _ in pairs], [b for _, b in pairs]), strict=True):
        count = float(m * messages.count(at))
        yield op.name, op.axis, op.collective, count, count * number(op.message_bytes)


# Once a step


def small_sums(program: StepProgram, data: DataParallel, held: list[Box], given: Given) -> Iterator[Sent]:
    """After the gradients: what is partial, what two stages share, loads, three numbers, and where replicas average all."""
    plan, model = data.plan, data.model

    def width(box: Box) -> int:
        return data.kept_bytes if box.zero else data.gradient_bytes

    tied = [s for s in held if s.tied]
    groups = {axis: [s for s in held if s.partial == axis] for axis in ("tp", "kv_copies", "expert_tp")}
    groups["ends"] = tied if len(tied) == 1 else []
    for axis, summed in groups.items():
        if summed:
            yield (
                "sum-tied" if axis == "ends" else "sum-partial",
                axis,
                "all_reduce",
                sum(s.local_size * width(s) for s in summed),
            )
    routers = sum(s.name.endswith(".router.weight") for s in held)
    for op in sync.small_sums(program.batch, {"loads": 2.0 * model.experts * routers}):
        yield op.name, op.axis, op.collective, number(op.message_bytes)
    if plan.average_every and given.step % plan.average_every == 0:
        yield "average-parameters", "replicate", "all_reduce", (sum(s.local_size for s in held) + 1) * data.kept_bytes
