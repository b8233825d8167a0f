"""What a step sends, collective by collective: the program's side of what `verify` counts at run time.

One record for every axis and collective of one pipeline rank of one plan: how often a step issues it, and the bytes of the full, unsharded
buffers in all. A tensor-parallel layer without sequence parallelism, for instance, has four all-reduces of T·h a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.lower import sync
from meshwright.lower.holds import elements
from meshwright.lower.op import Op, StepProgram
from meshwright.lower.stages import holding


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
    held = holding(b, np.array([float(rank)]))
    found: dict[tuple[str, str], list[tuple[str, float, float]]] = {}

    def add(op: Op, times: float) -> None:
        count = times * float(np.broadcast_to(op.count, 1)[0])
        if count:
            n = float(np.broadcast_to(op.message_bytes, 1)[0])
            found.setdefault((op.axis, op.collective), []).append((op.name, count, count * n))

    for (block, _), ops in program.blocks.items():
        for op in ops:
            if op.axis:
                add(op, m * float(held.counts[block][0]))
    counts = elements(program, held)
    for op in sync.step_ops(b, counts):
        if op.axis:
            add(op, 1.0)
    first, last = rank == 0, rank == int(b.pp[0]) - 1
    for name, op in boundary_ops(program):
        # A rank sends activations on from all its stages but the model's last, gradients back from all but its first.
        stages = float(b.virtual[0]) - float(last if name == "F" else first)
        add(op, m * stages)
    return [Record(axis, kind, sum(c for _, c, _ in rows), sum(x for *_, x in rows), tuple(dict.fromkeys(n for n, *_ in rows)))
            for (axis, kind), rows in found.items()]  # fmt: skip


def boundary_ops(program: StepProgram) -> list[tuple[str, Op]]:
    return [(phase, op) for phase in ("F", "I") for op in program.sync.get(f"boundary-{phase}", [])]
