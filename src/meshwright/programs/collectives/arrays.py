"""Run a program on numpy arrays: a minimal interpreter for tests against numpy and for `show --values`.

A rank's input is the concatenation of the chunks it starts with, in chunk order. Its output is the concatenation of the
chunks it ends with. An all-reduce therefore reads the full buffer from each rank and returns the full buffer to each
rank. An all-gather reads one shard per rank. An all-to-all reads P blocks, one for each rank, and returns P blocks, one
from each rank. The conventions are those of `torch.distributed`.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.programs.collectives.program import Array, Program

Slots = dict[tuple[int, int], Array]  # (rank, chunk) → numbers


def run_on_arrays(program: Program, inputs: Sequence[Any]) -> list[Array]:
    """Return the output of each rank, given the input of each rank."""
    slots = loaded(program, inputs)
    for _ in states(program, slots):
        pass
    outputs = []
    for rank in range(program.ranks):
        chunks = [slots[rank, chunk] for chunk in chunks_of(program, program.ends, rank)]
        outputs.append(np.concatenate(chunks) if chunks else np.zeros(0))
    return outputs


def loaded(program: Program, inputs: Sequence[Any]) -> Slots:
    """Return the content of the slots before the first step."""
    slots: Slots = {}
    for rank in range(program.ranks):
        chunks = chunks_of(program, program.starts, rank)
        edges = np.cumsum([program.sizes[chunk] for chunk in chunks], dtype=np.int64)
        data = np.asarray(inputs[rank] if len(chunks) else [])
        if len(chunks) and data.shape != (edges[-1],):
            wanted = f"rank {rank} of {program.name} starts with {edges[-1]} elements"
            raise MeshwrightError("MW-PROG-021", f"{wanted}, not with shape {data.shape}")
        pieces = np.split(data, edges[:-1]) if len(chunks) else []
        slots |= {(rank, chunk): piece.copy() for chunk, piece in zip(chunks, pieces, strict=True)}
    return slots


def states(program: Program, slots: Slots) -> Iterator[dict[tuple[int, int], bool]]:
    """Run the program on `slots`, in place. After each step, yield the slots that were written: slot → whether it was added to."""
    bounds = np.searchsorted(program.moves.step, np.arange(program.steps + 1))
    columns = [column.tolist() for column in program.moves]
    for low, high in pairwise(bounds.tolist()):
        posted = []
        for _, source, target, chunk, width, adds in zip(*(c[low:high] for c in columns), strict=True):
            posted += [(target, chunk + k, adds, slots[source, chunk + k].copy()) for k in range(width)]
        arrived: set[tuple[int, int]] = set()  # a switch adds only the messages of the current step
        for target, chunk, adds, data in posted:
            fresh = target >= program.ranks and (target, chunk) not in arrived
            slots[target, chunk] = slots[target, chunk] + data if adds and not fresh else data
            arrived.add((target, chunk))
        yield {(target, chunk): adds for target, chunk, adds, _ in posted}


def chunks_of(program: Program, slots: Array, rank: int) -> list[int]:
    """Return the chunks of `rank` that occur in `slots`, in ascending order."""
    low, high = np.searchsorted(slots, [rank * program.chunks, (rank + 1) * program.chunks])
    return (slots[low:high] - rank * program.chunks).tolist()
