"""The instructions of one rank of a program, as a person reads them.

>>> for line in instructions(build("all-reduce", "ring", 2, 4), rank=0): print(line)
step 0: send chunk 1 to rank 1
step 0: reduce chunk 0 from rank 1
step 1: send chunk 0 to rank 1
step 1: receive chunk 1 from rank 1
"""

from typing import NamedTuple

import numpy as np

from meshwright.programs.collectives.program import Program, take


class Instruction(NamedTuple):
    """One instruction of a rank in a step."""

    step: int
    kind: str
    peer: int
    chunk: int
    width: int = 1

    def __str__(self) -> str:
        chunks = f"chunk {self.chunk}" if self.width == 1 else f"chunks {self.chunk} to {self.chunk + self.width - 1}"
        return f"step {self.step}: {self.kind} {chunks} {'to' if self.kind == 'send' else 'from'} rank {self.peer}"


def instructions(program: Program, rank: int) -> list[Instruction]:
    """Return the instructions of one rank in order; within a step, sends come before receives."""
    table = take(program.moves, np.flatnonzero((program.moves.source == rank) | (program.moves.target == rank)))
    steps = []
    for step, source, target, chunk, width, adds in zip(*(c.tolist() for c in table), strict=True):
        if source == rank:
            steps.append(Instruction(step, "send", target, chunk, width))
        else:
            steps.append(Instruction(step, "reduce" if adds else "receive", source, chunk, width))
    return sorted(steps, key=lambda i: (i.step, i.kind != "send"))
