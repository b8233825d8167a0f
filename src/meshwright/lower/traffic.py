"""The messages of a step by axis and collective: their number, and the total bytes of the full, unsharded buffers.

The step program is one description, read in two ways:

    arrays     over a batch of plans, for one pipeline rank of each: the first of its tensor-parallel and ZeRO groups, which holds the
               most of whatever does not divide evenly. Costs are computed from them
    integers   for any one rank, with what only a run knows: frozen parameters, real routing, the step's number (`rank.traffic_of_rank`)

Tests compare the two on that rank, and the second with what the runtime issues. A tensor-parallel layer without sequence parallelism,
for instance, has four all-reduces of T·h per micro-batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshwright.describe.schedules import SCHEDULES
from meshwright.lower.batch import Batch
from meshwright.lower.program import Array, Op, StepProgram

Key = tuple[str, str]  # axis, collective


@dataclass(frozen=True)
class Record:
    """One kind of message of one rank: `count` per step, total `bytes` of full buffers, and the operations that send it."""

    axis: str
    collective: str
    count: float
    bytes: float
    names: tuple[str, ...]


def records(ops: Iterable[tuple[str, str, str, float, float]]) -> list[Record]:
    """One record for each axis and collective of many (name, axis, collective, count, bytes)."""
    by: dict[Key, list[tuple[str, float, float]]] = {}
    for name, axis, kind, count, n in ops:
        by.setdefault((axis, kind), []).append((name, count, n))
    return [
        Record(
            axis, kind, sum(c for _, c, _ in rows), sum(n for *_, n in rows), tuple(dict.fromkeys(n for n, *_ in rows))
        )
        for (axis, kind), rows in by.items()
    ]


def boundary_messages(batch: Batch, rank: Array) -> tuple[Array, Array]:
    """Messages that a rank sends per micro-batch: activations forward, gradients backward.

    All its stages send on, except the model's last, and back, except the model's first. In a V-shaped pipeline both ends of the model
    are on rank 0 and the turn is on the last rank, which passes to itself.
    """
    first, last = (rank == 0) * 1.0, (rank == batch.pp - 1) * 1.0
    several, v_shaped = (batch.pp > 1) * 1.0, SCHEDULES.column("is_v_shaped")[batch.schedule]
    on = several * (batch.virtual - np.where(v_shaped, first + last, last))
    back = several * (batch.virtual - np.where(v_shaped, first + last, first))
    return on, back


def boundary_calls(program: StepProgram, rank: Array) -> list[tuple[Op, Array]]:
    """Return what a rank sends to other stages per micro-batch, and what it gathers: it receives gradients for what it sends on, and activations for
    what it sends back."""
    on, back = boundary_messages(program.batch, rank)
    sends = zip((op for _, op in boundary_ops(program)), (on, back), strict=False)
    return [*sends, *((op, on + back) for op in program.sync.get("boundary-gather", []))]


def boundary_ops(program: StepProgram) -> list[tuple[str, Op]]:
    return [(phase, op) for phase in ("F", "I") for op in program.sync.get(f"boundary-{phase}", [])]
