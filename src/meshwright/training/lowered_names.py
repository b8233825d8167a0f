"""Find the operation of the step program that an issued collective is, so that measured and predicted steps use the same names and parts.

A rank knows of a collective its group, its kind and its bytes. The step program lists the operations of the plan with the same three.
The best match has the same ranks and kind, then the same bytes, then the same axis, then the nearest bytes (routing decides
how many tokens an expert gets), then the same phase (forward or backward).
"""

from __future__ import annotations

from functools import cache, cached_property
from math import log
from typing import NamedTuple

import numpy as np

from meshwright.cost.phase import AXIS_OF
from meshwright.describe.config import Config
from meshwright.describe.layout import Layout
from meshwright.lower import sync
from meshwright.lower.op import Op
from meshwright.lower.stages import rank_blocks
from meshwright.lower.step import step_program
from meshwright.lower.traffic import boundary_ops
from meshwright.training.records import CommEvent

AXES = {**AXIS_OF, "shard": "dp", "dp": "dp"}  # group of the mesh → axis under which its time is reported
WITHOUT_LAYOUT = {"kv_copies": "tp", "ends": "pp"}  # groups that are parts of another axis's groups
ONCE = "once"  # phase of the operations that run once per step


class Identified(NamedTuple):
    """What a collective is: `part` is that of `Prediction.exposed_s`, `phase` the one of the step program."""

    name: str
    part: str
    axis: str
    phase: str
    collective: str


class LoweredNames:
    """The operations of a configuration by rank."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.layout = Layout(config.plan, config.plan.order or config.stack.order)
        self.identify = cache(self._identify)
        self.members = cache(self._members)
        self._of_stage = cache(self._operations)

    @cached_property
    def program(self):  # type: ignore[no-untyped-def]
        c = self.config
        return step_program(c.model, c.plan, c.workload, c.stack)

    def _operations(self, stage: int) -> list[tuple[str, Op]]:
        """(phase, operation) of everything that the ranks of a pipeline stage send."""
        held = rank_blocks(self.program.batch, np.full(1, float(stage)))
        found = [(phase, op) for (_, phase), ops in self.program.blocks.items() for op in ops]
        found += [(ONCE, op) for op in sync.step_ops(self.program, held)]
        return [(phase, op) for phase, op in (*found, *boundary_ops(self.program)) if op.axis]

    def stage(self, rank: int) -> int:
        return self.layout.coordinates(rank)["pp"]

    def _members(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks of a group of the mesh; only this rank for a group that is not one of the mesh."""
        axis = WITHOUT_LAYOUT.get(axis, axis)
        return tuple(self.layout.group_of(axis, rank)) if axis else (rank,)

    def spans_stages(self, axis: str, rank: int) -> bool:
        """Whether a group has ranks of several pipeline stages: waiting for one another there is part of the bubble."""
        return len({self.stage(member) for member in self.members(axis, rank)}) > 1

    def of_event(self, rank: int, event: CommEvent, phase: str = "") -> Identified:
        kind = "send" if event.operation == "receive" else event.operation
        return self.identify(rank, event.axis, kind, event.bytes, phase)

    def _identify(self, rank: int, axis: str, kind: str, size: int, phase: str) -> Identified:
        reported = AXES.get(axis, "other")
        ranks = self.members(axis, rank)
        found = [
            (not_equal, AXIS_OF[op.axis] != reported, distance, bool(phase) and at not in phase, at, op)
            for at, op in self._of_stage(self.stage(rank))
            if op.collective == kind and self.members(op.axis, rank) == ranks
            for distance in [abs(log((number(op.message_bytes) + 1) / (size + 1)))]
            for not_equal in [distance > 1e-6]
        ]
        if not found:
            return Identified(kind, reported, reported, ONCE, kind)
        *_, at, op = min(found, key=lambda row: row[:4])
        own = AXIS_OF[op.axis]
        return Identified(op.name, "optimizer" if op.part == "optimizer" else own, own, at, op.collective)


def number(value: object) -> float:
    """The number of a program of one plan."""
    return float(np.broadcast_to(value, 1)[0])  # type: ignore[call-overload]
