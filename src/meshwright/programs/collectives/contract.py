"""The contract of each operation: where its chunks start, and where each must end as the sum of its initial copies.

    operation        chunks   starts                       ends
    broadcast        any      all at the root              all on every rank
    reduce           any      all on every rank            all at the root
    scatter          P·c      all at the root              shard r at rank r: chunks r·c to r·c + c − 1
    gather           P·c      shard r at rank r            all at the root
    all-reduce       any      all on every rank            all on every rank
    all-gather       P·c      shard r at rank r            all on every rank
    reduce-scatter   P·c      all on every rank            shard r at rank r
    all-to-all       P·P      chunk i·P + j at rank i      chunk i·P + j at rank j
    point-to-point   any      all at the sender            all at one other rank
    barrier          P        chunk r (empty) at rank r    all on every rank: all ranks have arrived

If starts and ends are exchanged, a row becomes another row: reduce is the **dual** of broadcast, gather of scatter, and
reduce-scatter of all-gather. Two operations compose if the ends of the first are the starts of the second: all-reduce =
reduce-scatter + all-gather = reduce + broadcast, all-gather = gather + broadcast, reduce-scatter = reduce + scatter.
"""

import numpy as np

from meshwright.programs.collectives.program import Array, Moves, Program, split

OPERATIONS = {
    "broadcast": "one rank's buffer to all ranks",
    "reduce": "the sum of all ranks' buffers on one rank",
    "scatter": "one rank's buffer, a different shard to each rank",
    "gather": "every rank's shard to one rank",
    "all-reduce": "the sum of all ranks' buffers on all ranks",
    "all-gather": "every rank's shard to all ranks",
    "reduce-scatter": "the sum of all ranks' buffers, one shard of it on each rank",
    "all-to-all": "a different block from every rank to every rank: a transpose",
    "point-to-point": "one rank's buffer to one other rank",
    "barrier": "no rank continues before all ranks have arrived",
}
SHARDED = {"scatter", "gather", "all-gather", "reduce-scatter", "barrier"}
DUAL = {"broadcast": "reduce", "scatter": "gather", "all-gather": "reduce-scatter"}
DUAL |= {dual: operation for operation, dual in DUAL.items()}


def contract(operation: str, ranks: int, chunks: int, root: int = 0, target: int = 0) -> tuple[Array, Array]:
    """Return the slots (rank·chunks + chunk) that hold data at the start, and those required at the end, ascending."""
    everywhere = np.arange(ranks * chunks if operation not in ("all-to-all", "point-to-point") else 0, dtype=np.int64)
    at_root = root * chunks + np.arange(chunks, dtype=np.int64)
    shards = np.arange(chunks, dtype=np.int64)
    if operation in SHARDED:  # c chunks per shard: chunk r·c + j belongs to rank r
        shards = shards // (chunks // ranks) * chunks + shards
    i, j = np.divmod(shards, max(ranks, 1))
    at = {
        "broadcast": (at_root, everywhere),
        "reduce": (everywhere, at_root),
        "scatter": (at_root, shards),
        "gather": (shards, at_root),
        "all-reduce": (everywhere, everywhere),
        "all-gather": (shards, everywhere),
        "barrier": (shards, everywhere),
        "reduce-scatter": (everywhere, shards),
        "all-to-all": (i * chunks + shards, np.sort(j * chunks + shards)),
        "point-to-point": (at_root, at_root + (target - root) * chunks),
    }
    return at[operation]


def chunk_sizes(operation: str, ranks: int, elements: int, chunks: int) -> Array:
    """Return the number of elements of each chunk; an all-to-all block to rank j is as large as shard j."""
    if operation == "all-to-all":
        return np.tile(split(elements, ranks), ranks)
    if operation in SHARDED and chunks > ranks:
        return np.concatenate([split(int(shard), chunks // ranks) for shard in split(elements, ranks)])
    return split(elements, chunks)


def collective(
    operation: str,
    ranks: int,
    elements: int,
    table: Moves,
    *,
    chunks: int = 1,
    sizes: Array | None = None,
    root: int = 0,
    target: int = 0,
    groups: tuple[tuple[int, ...], ...] = (),
    switches: tuple[tuple[int, ...], ...] = (),
) -> Program:
    """Return a program of `operation` with the operation's contract; an algorithm only adds its table of moves.

    `chunks` is the number of chunks of the buffer, or, in operations with one shard per rank, of one shard.
    """
    chunks = len(sizes) if sizes is not None else ranks * chunks if operation in SHARDED else chunks
    if operation == "all-to-all":
        chunks = ranks * ranks
    sizes = chunk_sizes(operation, ranks, elements, chunks) if sizes is None else sizes
    starts, ends = contract(operation, ranks, chunks, root, target)
    return Program(operation, "", ranks, elements, sizes, starts, ends, table, root, groups, switches)
