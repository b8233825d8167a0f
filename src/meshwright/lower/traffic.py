"""What a step sends, collective by collective, as the step program says it of a pipeline rank: the closed form.

One record for every axis and collective of one pipeline rank of one plan: how often a step issues it, and the bytes of the full, unsharded
buffers in all. A tensor-parallel layer without sequence parallelism, for instance, has four all-reduces of T·h a micro-batch.

This is what costs are made of, of thousands of plans at once; `issued` follows one rank to the byte, and a test holds the two
together, bytes and messages, over all strategies. What is left between them, by design:

    bytes      ranks of one stage have the mean of what cannot be shared evenly: a vocabulary, rows of a shard, routing; compressed
               messages are all as long as the mean one; everything is trained; replicas average 1/n in every step
    messages   PowerSGD's buckets end between tensors, and those of vectors alone are one sum; ZeRO-3 units of several layers are
               the mean over stages; where some layers are made again, fp8 scales of a split backward are of the others
    schedule   `auto` is taken for ZB-H2: what it finds is not known before
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshwright.lower import sync
from meshwright.lower.batch import Batch
from meshwright.lower.footprint import reduced
from meshwright.lower.op import Array, Op, StepProgram
from meshwright.lower.stages import V_SHAPED, rank_blocks


@dataclass(frozen=True)
class Record:
    """One kind of message of one rank: `count` a step, `bytes` of full buffers in all, by operation name in `names`."""

    axis: str
    collective: str
    count: float
    bytes: float
    names: tuple[str, ...]


def traffic(program: StepProgram, rank: int = 0) -> list[Record]:
    """Everything one pipeline rank of one plan issues in a step."""
    b = program.batch
    m = max(1.0, float(b.microbatches[0]))
    held = rank_blocks(b, np.array([float(rank)]))
    found: list[tuple[str, str, str, float, float]] = []

    def add(op: Op, times: float) -> None:
        count = times * float(np.broadcast_to(op.count, 1)[0])
        if count:
            n = float(np.broadcast_to(op.message_bytes, 1)[0])
            found.append((op.name, op.axis, op.collective, count, count * n))

    for key, ops in program.blocks.items():
        for op in ops:
            if op.axis:
                add(op, m * float(held.times(*key)[0]))
    for op in sync.step_ops(b, reduced(program, held)):
        if op.axis:
            add(op, 1.0)
    for (_, op), messages in zip(boundary_ops(program), boundary_messages(b, held.rank), strict=False):
        add(op, m * float(messages[0]))
    return recorded(found)


def recorded(found: Iterable[tuple[str, str, str, float, float]]) -> list[Record]:
    """One record an axis and collective of many (name, axis, collective, count, bytes)."""
    by: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for name, axis, kind, count, n in found:
        by.setdefault((axis, kind), []).append((name, count, n))
    return [
        Record(
            axis, kind, sum(c for _, c, _ in rows), sum(x for *_, x in rows), tuple(dict.fromkeys(n for n, *_ in rows))
        )
        for (axis, kind), rows in by.items()
    ]


def boundary_messages(batch: Batch, rank: Array) -> tuple[Array, Array]:
    """Messages a rank sends per micro-batch: activations on, gradients back.

    All its stages send on but the model's last, and back but the model's first. In a V the two ends of the model are on rank 0
    and the turn is on the last rank, which passes to itself.
    """
    first, last = (rank == 0) * 1.0, (rank == batch.pp - 1) * 1.0
    several, v_shaped = (batch.pp > 1) * 1.0, np.isin(batch.schedule, V_SHAPED)
    on = several * (batch.virtual - np.where(v_shaped, first + last, last))
    back = several * (batch.virtual - np.where(v_shaped, first + last, first))
    return on, back


def boundary_ops(program: StepProgram) -> list[tuple[str, Op]]:
    return [(phase, op) for phase in ("F", "I") for op in program.sync.get(f"boundary-{phase}", [])]
