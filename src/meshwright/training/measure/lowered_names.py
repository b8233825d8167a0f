"""Find the operation of the step program that an issued collective is, so that measured and predicted steps use the same names and parts.

A rank knows of a collective its group, its kind and its bytes. The step program lists the operations of the plan with the same three. The
best matches have the same ranks and kind, then the same bytes, then the same axis, then the nearest bytes (routing decides how many
tokens an expert gets). Several operations may match equally, as the sums after attention and after the feed-forward layer; in a
traced step the block and the order within it decide between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from math import log
from typing import NamedTuple

import numpy as np

from meshwright.cost.phase import AXIS_OF
from meshwright.describe.config import Config
from meshwright.describe.layout import Layout
from meshwright.lower import sync
from meshwright.lower.op import Op, StepProgram, scalar
from meshwright.lower.stages import rank_blocks
from meshwright.lower.step import step_program
from meshwright.lower.traffic import boundary_ops
from meshwright.training.records import CommEvent

AXES = {**AXIS_OF, "shard": "dp", "dp": "dp"}  # group of the mesh → axis under which its time is reported
WITHOUT_LAYOUT = {"kv_copies": "tp", "ends": "pp"}  # groups that are parts of another axis's groups
ONCE = "once"  # phase of the operations that run once per step
PHASES_OF = {"F": "F", "B": "RIW", "I": "RISG", "W": "W"}  # phases of the step program in an action


class Lowered(NamedTuple):
    """An operation of the step program; `part` is that of `Prediction.exposed_s`."""

    name: str
    part: str
    axis: str
    collective: str
    block: str = ""
    phase: str = ONCE
    section: str = ""  # of the block: attention, ffn, …


class LoweredNames:
    """The operations of a configuration by rank."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.layout = Layout(config.plan, config.plan.order or config.stack.order)
        self.members = cache(self._members)
        self._matches = cache(self._find)
        self._of_stage = cache(self._operations)

    @cached_property
    def program(self) -> StepProgram:
        c = self.config
        return step_program(c.model, c.plan, c.workload, c.stack)

    def stage(self, rank: int) -> int:
        return self.layout.coordinates(rank)["pp"]

    def _members(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks of a group of the mesh; only this rank for a group that is not one of the mesh."""
        axis = WITHOUT_LAYOUT.get(axis, axis)
        return tuple(self.layout.group_of(axis, rank)) if axis else (rank,)

    def spans_stages(self, axis: str, rank: int) -> bool:
        """Whether a group has ranks of several pipeline stages: waiting for one another there is part of the bubble."""
        return len({self.stage(member) for member in self.members(axis, rank)}) > 1

    def matches(self, rank: int, event: CommEvent) -> list[Lowered]:
        """The operations that match a collective or message equally well; at least one."""
        kind = "send" if event.operation == "receive" else event.operation
        return self._matches(rank, event.axis, kind, event.bytes)

    def _operations(self, stage: int) -> list[tuple[str, str, Op]]:
        """(block, phase, operation) of everything that the ranks of a pipeline stage send."""
        held = rank_blocks(self.program.batch, np.full(1, float(stage)))
        found = [(*key, op) for key, ops in self.program.blocks.items() for op in ops]
        found += [("", ONCE, op) for op in sync.step_ops(self.program, held)]
        found += [("", phase, op) for phase, op in boundary_ops(self.program)]
        return [row for row in found if row[2].axis and scalar(row[2].count) > 0]

    def _find(self, rank: int, axis: str, kind: str, size: int) -> list[Lowered]:
        reported, ranks = AXES.get(axis, "other"), self.members(axis, rank)
        found = []
        for block, phase, op in self._of_stage(self.stage(rank)):
            if op.collective == kind and self.members(op.axis, rank) == ranks:
                distance = round(abs(log((scalar(op.message_bytes) + 1) / (size + 1))), 6)
                own = AXIS_OF[op.axis]
                part = "optimizer" if op.part == "optimizer" else own
                lowered = Lowered(op.name, part, own, kind, block, phase, op.part)
                found.append(((distance > 0, own != reported, distance), lowered))
        best = min((key for key, _ in found), default=None)
        return [lowered for key, lowered in found if key == best] or [Lowered(kind, reported, reported, kind)]


def narrowed(matches: Sequence[Lowered], action: str, block: str) -> list[Lowered]:
    """Of equal matches those of a kind of action and a block, in the order in which they run: backward visits the sections of a
    block in reverse, and recomputes before it."""
    phases = PHASES_OF.get(action, ONCE)
    inside = [m for m in matches if m.phase in phases and m.block == block] or [m for m in matches if m.phase in phases]
    if action == "F" or not inside:
        return inside or list(matches)
    order = list(dict.fromkeys(m.section for m in inside))
    return sorted(inside, key=lambda m: (m.phase != "R", -order.index(m.section), phases.index(m.phase)))
