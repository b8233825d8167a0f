"""Muon in the step program: products that make matrices orthogonal, the messages that bring matrices together, and moments.

`describe.sharding.boxes` says which rank computes which matrix. A rank sends its boxes there over the ZeRO axis and then over the
tensor-parallel axis, and gets boxes of the updates back. Of M elements in boxes before ZeRO, P ranks on the ZeRO axis and T on the other:

    all-to-all, ZeRO axis     there  M/P                    back  what the rank's row of T ranks owns: M/P, at least the largest box
    all-to-all, tp axis       there  the same               back  what the rank owns: M/P, at least the largest matrix
    products                  5·(4s²l + 2s³) FLOPs for each matrix of s × l that the rank owns (s the shorter side)

With more ranks than matrices some ranks own none, and the one with the largest matrix decides: that is the bound max(total / ranks, largest)
of the batch evaluation. `exchanges_of_rank` follows the real assignment.

The update runs in rounds of at most `ROUND` elements on a rank. With R rounds each of these messages becomes R messages of 1/R of its length,
and those of a round overlap with the products of others: all but the first there and the last back, d rounds at each end (`turns_ahead`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from meshwright.describe.sharding import (
    DATA_AXES,
    KV_COPIES,
    RULES,
    Box,
    Degrees,
    Matrix,
    Parameter,
    block_parameters,
    local_shape,
    matrices,
    newton_schulz_flops,
    padding,
    shard_dim,
)
from meshwright.describe.sharding.boxes import NEWTON_SCHULZ_STEPS, TENSOR_AXES
from meshwright.describe.variants import OPTIMIZERS
from meshwright.lower.batch import Batch
from meshwright.lower.footprint import degrees
from meshwright.lower.program import (
    EXCHANGE,
    NARROW,
    ORTHOGONALISE,
    Array,
    MatrixShare,
    Op,
    StageBlocks,
    StepProgram,
    collective_op,
    present,
)

PASSES = 4.0 * NEWTON_SCHULZ_STEPS  # over a matrix in device memory: each step reads it three times and writes it once
LAUNCHES = 6.0 * NEWTON_SCHULZ_STEPS  # kernels for one matrix or stack: three products and three sums in each step


def is_used(b: Batch) -> bool:
    return OPTIMIZERS[b.workload.optimizer].by_matrix and b.model.kind != "counts"


def wire_bytes(b: Batch) -> Array:
    """Bytes of an element in transit: bf16 in 16-bit runs."""
    return np.where(b.param_bytes < 4, 2.0, b.param_bytes)


def shares(b: Batch, block: str) -> list[MatrixShare]:
    """The matrices of one such block that Muon updates."""
    return [share_of(b, p) for p in block_parameters(b.model, b.model.blocks[block]) if p.role == "matrix" and p.learns]


def share_of(b: Batch, p: Parameter) -> MatrixShare:
    rule = RULES[p.style]
    shard, tensor = DATA_AXES[rule.group].shard, TENSOR_AXES[rule.group]
    shape, parts, first = local_shape(p.style, p.shape, degrees(b)), b.size(shard), len(p.shape) - 2
    size = math.prod(shape) * np.ones(b.n)
    by_zero = b.sharded(rule.group) & (shard_dim(shape, parts) >= first)
    copies = b.size(KV_COPIES) if rule.partial == KV_COPIES else 1.0
    is_cut = any(axis == tensor and dim >= first for dim, axis in rule.cuts)
    by_tensor = is_cut & (b.size(tensor) / copies > 1)
    own = np.where(b.sharded(rule.group), (size + padding(shape, parts)) / parts, size)
    # ZeRO that cuts between experts leaves each rank some of them, whole
    local = np.where(by_zero, 1.0, own / np.maximum(size, 1.0))
    experts = (shape[0] if first else 1.0) * local
    return MatrixShare(
        rule.group,
        size,
        size * local,
        own,
        experts * math.prod(p.shape[-2:]),
        experts * newton_schulz_flops(*p.shape[-2:]),
        by_zero,
        by_tensor,
        np.where(by_zero, parts, 1.0) * np.where(by_tensor, b.size(tensor), 1.0),
        copies,
    )


def updated_elements(program: StepProgram, blocks: StageBlocks) -> dict[str, tuple[Array, Array]]:
    """Elements that Muon updates, with one moment instead of two, by group: before ZeRO, and after it on the fullest rank."""
    out: dict[str, tuple[Array, Array]] = {}
    for block, block_matrices in program.matrices.items():
        for m in block_matrices:
            before, after = out.get(m.group, (0.0, 0.0))
            out[m.group] = before + blocks.counts[block] * m.size, after + blocks.counts[block] * m.own
    return out


def step_ops(program: StepProgram, blocks: StageBlocks) -> list[Op]:
    """Return Muon's operations once per step on the ranks that hold these blocks, besides the update of each element."""
    if not program.matrices:
        return []
    b, ops = program.batch, []
    counted = [(blocks.counts[block], m) for block, several in program.matrices.items() for m in several]
    for group, (_, shard, _) in DATA_AXES.items():
        here = [(count, m) for count, m in counted if m.group == group]
        if not here:
            continue
        rows = [(count, m, np.where(m.by_zero, b.size(shard), 1.0)) for count, m in here]  # ranks that share a place
        sent = sum((count * m.by_zero * m.own for count, m in here), np.zeros(b.n))
        crossing = busiest((count * m.by_tensor, m.box, ranks) for count, m, ranks in rows)
        wholes = busiest((count * m.by_tensor, m.whole * m.copies, m.owners) for count, m in here)
        returned = busiest((count * m.by_zero, m.box, ranks) for count, m, ranks in rows)
        flops, elements = (
            busiest((count, getattr(m, name), m.owners) for count, m in here) for name in ("flops", "whole")
        )
        stacks = sum((np.ceil(count / m.owners / m.together) for count, m in here), np.zeros(b.n))
        by_zero, by_tensor = ([(count * getattr(m, cut), m) for count, m in here] for cut in ("by_zero", "by_tensor"))
        ops += [
            exchange(b, shard, sent, returned, number_of_rounds(by_zero), sent > 0),
            exchange(b, TENSOR_AXES[group], crossing, wholes, number_of_rounds(by_tensor), wholes > 0),
            products(b, flops, elements, stacks, number_of_rounds(here)),
        ]
    return [op for op in ops if present(op.count)]


def busiest(parts: Iterable[tuple[Array, Array, Array]]) -> Array:
    """Work of the busiest rank if (count, amount, ranks) are divided as evenly as possible: max(total / ranks, largest)."""
    total: Array = 0.0
    largest: Array = 0.0
    for count, amount, ranks in parts:
        total = total + count * amount / ranks
        largest = np.maximum(largest, np.where(np.asarray(count) > 0, amount, 0.0))
    return np.maximum(total, largest)


def number_of_rounds(parts: Iterable[tuple[Array, MatrixShare]]) -> Array:
    """Number of rounds in which the owners update (count, matrices): each has as many as fit together, at least one."""
    return np.maximum(np.ceil(sum(count / m.owners / m.together for count, m in parts)), 1.0)


def exchange(b: Batch, axis: str, sent: Array, returned: Array, rounds: Array, on: Array = True) -> Op:
    """Two all-to-alls over an axis in each round, there and back, of the mean length."""
    n = (sent + returned) / 2 / rounds * wire_bytes(b)
    count = 2.0 * rounds * on * (b.size(axis) > 1)
    return collective_op(EXCHANGE, "optimizer", "all_to_all", axis, count, n)


def products(b: Batch, flops: Array, elements: Array, stacks: Array, rounds: Array) -> Op:
    """The orthogonalisation of a rank's matrices, once for each round; those of equal shape are one stack."""
    dtype = "bf16" if b.workload.precision in NARROW else b.workload.precision
    count, moved = (np.asarray(flops) > 0) * rounds, PASSES * elements / rounds * wire_bytes(b)
    launches = LAUNCHES * stacks / rounds
    return Op(ORTHOGONALISE, "optimizer", "gemm", count, flops / rounds, moved, dtype=dtype, launches=launches)


def buffer_bytes(program: StepProgram, blocks: StageBlocks) -> Array:
    """Bytes of the buffers of the update: what a rank sends and receives in a round, there of one and back of another, and the matrices of
    two rounds, before and after a step of the iteration."""
    out = np.zeros(program.batch.n)
    for op in step_ops(program, blocks):
        if op.axis:
            out = out + 2 * op.message_bytes * np.minimum(op.count, 4) / 2
        else:
            out = out + 2 * op.bytes / PASSES * np.minimum(op.count, 2)
    return out


def exchanges_of_rank(b: Batch, rank_boxes: Sequence[Box], d: Degrees, index: Mapping[str, int]) -> Iterator[Op]:
    """The all-to-alls of one rank, which holds these boxes at these places on the axes, with the real owners of the matrices."""
    rank_matrices = matrices(rank_boxes, d) if is_used(b) else []
    for group, (_, shard, _) in DATA_AXES.items():
        own = [m for m in rank_matrices if m.box.group == group]
        tensor = TENSOR_AXES[group]
        row = [m for m in own if m.cut_over(shard) is None or m.owner_on(shard) == index[shard]]
        by_zero = [m for m in own if m.cut_over(shard)]
        if by_zero:
            returned = sum(m.box.size for m in by_zero if m in row)
            rounds = len({m.round for m in by_zero})
            yield exchange(b, shard, float(sum(m.box.local_size for m in by_zero)), float(returned), rounds)
        rounds = len({m.round for m in own if m.cut_over(tensor)})
        if rounds:
            crossing = [m for m in row if m.cut_over(tensor)]
            sent = sum(m.box.size if m.cut_over(shard) else m.box.local_size for m in crossing)
            mine = [m for m in crossing if m.owner_on(tensor) == index[tensor]]
            yield exchange(b, tensor, float(sent), float(sum(returned_size(m, tensor) for m in mine)), rounds)


def returned_size(m: Matrix, axis: str) -> int:
    """Elements that the owner of a matrix returns over an axis: the whole matrix (of a stack those of the rank's experts), and what several
    ranks hold, such as a KV head, for each of them."""
    cut = m.cut_over(axis)
    assert cut is not None
    local = sum(stop - start for start, stop in cut.ranges)
    return math.prod(m.box.local_shape[:-2]) * math.prod(m.box.full_shape[-2:]) // cut.length * local
