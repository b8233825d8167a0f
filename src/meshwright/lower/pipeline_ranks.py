"""The pipeline ranks of a step program: what each evaluated rank holds, sends and keeps, and the operations that end the step.

A batch of plans is evaluated on the few ranks that can be the slowest or the fullest of each plan, a single plan on all of them
(`stages.bounding_ranks`). A rank is a `RankProgram`: everything about it that cost, memory and the views read. The end of the step is that
of the rank with the most elements, which finishes last.
"""

import numpy as np

from meshwright.lower import muon, sync
from meshwright.lower.compression_memory import compression_buffers
from meshwright.lower.gradients import batch_messages, fp8_saving
from meshwright.lower.program import AFTER_LAYERS, DATA_PARALLEL, Array, RankProgram, StageBlocks, StepProgram, present
from meshwright.lower.stages import bounding_ranks, in_flight, rank_blocks, stage_blocks
from meshwright.lower.traffic import boundary_calls


def add_ranks(program: StepProgram, every_rank: bool, stages: bool) -> StepProgram:
    """Complete a program of blocks with its ranks, its stages where they are asked for, and the operations that close the step."""
    program.ranks, program.every_rank = pipeline_ranks(program, every_rank), every_rank
    program.closing = sync.step_ops(program, fullest_rank(program), sums=largest_sums(program.ranks, program.batch.n))
    program.stages = every_stage(program) if stages else []
    for rank in program.ranks if stages and program.batch.n == 1 else ():
        rank.closing = sync.step_ops(program, rank)
    return program


def pipeline_ranks(program: StepProgram, every_rank: bool = False) -> list[RankProgram]:
    """The ranks that can be the slowest or the fullest of each plan, from the first to the last; or all ranks."""
    return [rank_program(program, blocks) for blocks in bounding_ranks(program.batch, every_rank)]


def every_stage(program: StepProgram) -> list[StageBlocks]:
    """The blocks of each stage; none where a plan has fewer stages."""
    b = program.batch
    count = b.pp * b.virtual
    return [
        stage_blocks(b, np.where(stage < count, float(stage), -1.0), stage % b.pp) for stage in range(int(count.max()))
    ]


def rank_program(program: StepProgram, blocks: StageBlocks) -> RankProgram:
    """What follows from the blocks of a rank: its elements, sends, and the bytes that it keeps and buffers."""
    b = program.batch
    one, flying = saved_bytes(program, blocks), in_flight(b, blocks.rank)
    rank = RankProgram(
        **vars(blocks),
        elements=program.elements(blocks),
        padded=program.padded_elements(blocks),
        frozen=program.frozen_bytes(blocks),
        by_muon=muon.updated_elements(program, blocks),
        sums=sync.summed(program, blocks),
        sends=boundary_calls(program, blocks.rank),
        in_flight=flying,
        kept=kept_bytes(program, blocks, one, flying),
    )
    if present(b.zero == 3):
        rank.gathered = all_gathered(program, rank)
    if b.compresses:
        groups = DATA_PARALLEL if b.model.experts else DATA_PARALLEL[:1]
        buffers = [compression_buffers(b, group, batch_messages(program, blocks, group)) for group in groups]
        rank.compression = sum(total for total, _ in buffers), np.maximum.reduce([b.full(one) for _, one in buffers])
    if program.matrices:
        rank.matrix_buffers = muon.buffer_bytes(program, blocks)
    return rank


def saved_bytes(program: StepProgram, blocks: StageBlocks) -> Array:
    """Bytes that the layers of a rank save for the backward of one micro-batch."""
    one = np.zeros(program.batch.n)
    for block, parts in program.saved.items():
        if block not in AFTER_LAYERS:
            one = one + blocks.times(block, "W") * sum(parts.values())
            one = one - blocks.times(block, "E") * program.unsaved.get(block, 0.0)
    if blocks.recomputed is not None:  # the layers that are not recomputed save everything
        for block, saving in program.recompute_savings.items():
            one = one + (blocks.times(block, "W") - blocks.times(block, "R")) * saving
    return one


def kept_bytes(program: StepProgram, blocks: StageBlocks, one: Array, flying: Array) -> Array:
    """Bytes that the layers of a rank hold at its peak: those of `one` micro-batch for each that is in flight. A split backward keeps gradients
    between its halves too; offloaded activations leave those of the other layers, at least of two: the running and the transferred one."""
    b = program.batch
    if b.stack.torch_pipeline and present(
        b.splits
    ):  # the first half recomputes layers, the second needs their tensors again
        gradients = sum(
            blocks.counts[block] * (bytes_ + np.where(b.reruns_layers, program.recompute_savings.get(block, 0.0), 0.0))
            for block, bytes_ in program.output_gradients.items()
        )
        flying = in_flight(b, blocks.rank, gradients / np.maximum(one, 1.0))
    two_layers = one * 2 / np.maximum(sum(blocks.counts.values()), 1)
    left = np.maximum((1 - b.offloaded_share) * one * flying, np.minimum(one, two_layers))
    return np.where(b.offload_activations, left, one * flying)


def all_gathered(program: StepProgram, rank: RankProgram) -> Array:
    """Bytes of all weights of a rank that ZeRO-3 gathers, without those that fp8 saves."""
    b = program.batch
    whole: Array = 0.0
    for group, n in rank.elements.items():
        whole = whole + np.where(b.sharded(group), n * b.param_bytes + rank.frozen[group], 0.0)
    for block, groups in program.loads.items() if b.gathers_fp8 else ():
        for group, load in groups.items():
            whole = whole - rank.counts[block] * fp8_saving(b, group, load)
    return whole


def fullest_rank(program: StepProgram) -> StageBlocks:
    """The rank of each plan with the most elements to reduce and update."""
    b, ranks = program.batch, program.ranks
    if len(ranks) == 1:
        return ranks[0]
    sizes = np.stack([b.full(sum(rank.padded.values())) for rank in ranks])
    numbers = np.stack([b.full(rank.rank) for rank in ranks])
    return rank_blocks(b, np.take_along_axis(numbers, sizes.argmax(axis=0)[None, :], 0)[0])


def largest_sums(ranks: list[RankProgram], n: int) -> dict[str, Array]:
    """Elements reduced after the data-parallel reduction, on the rank that has the most. The gradient norm, and so the update of every
    rank, waits for all of these reductions."""
    return {axis: np.maximum.reduce([np.broadcast_to(rank.sums[axis], n) for rank in ranks]) for axis in ranks[0].sums}
