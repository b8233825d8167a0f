"""Join the steps of a program that need not wait for each other, for ranks of one host.

In a pairwise reduce-scatter rank r sends shard r+1 in step 0, shard r+2 in step 1, and so on. All these sends read the input: only a network
profits from one partner at a time. Between ranks of one host a rank can send everything, then receive everything in the same order, and
wait for its peers once instead of P − 1 times. Where ranks share cores, each wait costs a switch to another process.

    4 ranks, rank 0 of a direct all-reduce          joined
    step 0    send shard 1    add into shard 0      step 0    send shards 1, 2, 3    add into shard 0, three times
    step 1    send shard 2    add into shard 0
    step 2    send shard 3    add into shard 0
    step 3    send shard 0    store shards 1–3      step 1    send shard 0           store shards 1–3

A step joins those before it if

    no rank sends what it has received in them,
    no two ranks have a message in both (only their order distinguishes messages between two ranks), and
    no rank copies anything inside its memory in one of them (a step's copies are done before its receives).
"""

from __future__ import annotations

from itertools import groupby

from meshwright.programs.collectives.program import Program


def merged_steps(program: Program) -> dict[int, int]:
    """The number that each step has after the joining; the same on all ranks."""
    numbers: dict[int, int] = {}
    number, pairs = -1, set[tuple[int, int]]()  # (source, target) of the messages of the joined steps
    written: set[tuple[int, int]] = set()  # (rank, chunk)
    columns = [column.tolist() for column in program.moves]
    for step, rows in groupby(zip(*columns, strict=True), key=lambda row: row[0]):
        read, writes, now = set(), set(), set()
        for _, source, target, chunk, width, _, into in rows:
            read |= {(source, chunk + k) for k in range(width)}
            writes |= {(target, into + k) for k in range(width)}
            now.add((source, target))
        copies = any(source == target for source, target in now | pairs)
        if number < 0 or copies or read & written or now & pairs:
            number, written, pairs = number + 1, set(), set()
        written |= writes
        pairs |= now
        numbers[step] = number
    return numbers
