"""Operations that run once per step: gradients are reduced, clipped, the optimizer steps, sharded parameters are gathered.

The reduction of gradients and the gathering of parameters are `gradients`', the messages of Muon `muon`'s. After the gradients come
sums that few elements need: over tp of whole vectors that saw a part of the heads or tokens and of copied KV heads, over the two ends of a
pipeline of a tied embedding, over a stage of the routers' loads, over the shards of the scales of weights that are gathered in fp8; and three
numbers: valid tokens, the squared norm of the gradients, the loss.

With local SGD (`average_every`) replicas train alone and exchange no gradients; every n-th step they all-reduce their parameters:
1/n of the bytes in the mean step.
"""

from collections.abc import Mapping

import numpy as np

from meshwright.describe.sharding import DATA_AXES
from meshwright.describe.variants import OPTIMIZERS
from meshwright.lower import muon
from meshwright.lower.batch import Batch
from meshwright.lower.footprint import fp8_weights
from meshwright.lower.gradients import batch_messages, data_parallel_ops, flat_gather
from meshwright.lower.offload import state_copies
from meshwright.lower.program import Array, Column, Op, StageBlocks, StepProgram, collective_op, present

FP8_SCALES = {"dense": "fp8-weight-scales", "expert": "fp8-expert-scales"}  # of the weights that ZeRO-3 gathers in fp8
ROUTER_LOADS = 2.0  # numbers per expert that a layer sums: copies sent to it, copies kept
UPDATE_LAUNCHES = 12.0  # kernels that an unfused optimizer launches for each parameter
NORM_LAUNCHES = 4.0  # the same of the norm of the gradients and of clipping


def step_ops(
    program: StepProgram, blocks: StageBlocks, zero_3: bool = False, sums: Mapping[str, Array] | None = None
) -> list[Op]:
    """Return the operations once per step of the ranks that hold these blocks, in order: reduce, clip, update, gather. `zero_3` adds the messages of
    ZeRO-3, which overlap with the blocks and are listed there (`gradients.unit_ops`); `sums` replaces what `summed` says of the rank."""
    b = program.batch
    elements = program.padded_elements(blocks)
    groups = ["dense", "expert"] if b.model.experts else ["dense"]
    exchanges = [
        op
        for group in groups
        if present(b.size(DATA_AXES[group].whole) > 1)
        for op in data_parallel_ops(b, group, batch_messages(program, blocks, group), zero_3)
    ]
    gathers = [op for op in exchanges if op.name == "gather-parameters"]
    reductions = [op for op in exchanges if op.name != "gather-parameters"]
    if not b.units:
        gathers += [op for group in groups for op in flat_gather(b, group, elements[group])]
    owned = sum(elements[g] / np.where(b.zero >= 1, b.size(DATA_AXES[g].shard), 1.0) for g in groups)
    by_muon = sum(after for _, after in muon.updated_elements(program, blocks).values())
    ops = [
        *reductions,
        *small_sums(b, summed(program, blocks) if sums is None else sums),
        *muon.step_ops(program, blocks),
        *optimizer(b, owned, b.trained_tensors, by_muon),
        *gathers,
    ]
    return [op for op in (*ops, *parameter_average(b, elements["dense"])) if present(op.count)]


def summed(program: StepProgram, blocks: StageBlocks) -> dict[str, Array]:
    """Elements that a rank reduces once per step besides its gradients, by axis; `stage`: the loads of the routers; `FP8_SCALES`: scales of
    weights."""
    b, out = program.batch, dict[str, Array]()
    for block, axes in program.partial.items():
        for axis, count in axes.items():
            out[axis] = out.get(axis, 0.0) + blocks.counts[block] * count
    if present(program.tied):  # a rank with both ends, as in a V-shaped pipeline, adds its two copies locally
        out["ends"] = np.abs(blocks.counts["embedding"] - blocks.counts["head"]) * (b.pp > 1) * program.tied
    if b.scales and b.gathers_fp8:
        for group, name in FP8_SCALES.items():
            weights = sum(blocks.counts[kind] * fp8_weights(b.model, kind, group) for kind in b.model.kinds)
            each = b.model.experts / b.ep if group == "expert" else 1.0
            out[name] = weights * each * b.gathers_fp8_weights(group)
    if b.model.experts:
        out["stage"] = sum(blocks.counts[kind] for kind in b.model.expert_kinds) * ROUTER_LOADS * b.model.experts
    return out


def small_sums(b: Batch, elements: Mapping[str, Array]) -> list[Op]:
    """Return the reductions that follow those of gradients: `elements` of one rank by axis, and three scalars."""
    ops = []

    def reduce(name: str, axis: str, n: Array, part: str = "closing", where: Column | bool = True) -> None:
        on = (b.size(axis) > 1) & (np.asarray(n) > 0) & where
        if present(on):
            ops.append(collective_op(name, part, "all_reduce", axis, on * 1.0, n))

    for axis in ("tp", "kv_copies", "expert_tp", "ends"):
        if axis in elements:
            group = DATA_AXES["expert" if axis == "expert_tp" else "dense"]
            # A shard's gradient is as wide as the shard, which is its own master.
            wide = np.where((b.zero >= 1) & (b.size(group.shard) > 1), b.kept_bytes, b.grad_bytes)
            reduce("sum-tied" if axis == "ends" else "sum-partial", axis, elements[axis] * wide)
    for family, split in (("dense", "tp"), ("expert", "expert_tp")):
        for axis in (DATA_AXES[family].shard, split):
            reduce(FP8_SCALES[family], axis, elements.get(FP8_SCALES[family], 0.0) * 4.0, "optimizer")
    reduce("sum-loads", "stage", elements.get("stage", 0.0) * 8.0)
    reduce("worst-load", "pp", 32.0 * bool(b.model.experts), "optimizer")
    together = np.equal(b.average_every, 0)
    reduce("count-tokens", "dp_cp", 8.0, "optimizer", together)
    reduce("norm-and-loss", "world", 16.0, "optimizer", together)
    for axis in () if together.all() else ("tp", "pp"):  # with local SGD each replica has a separate norm
        reduce("norm-and-loss", axis, 16.0, "optimizer", ~together)
    return ops


def parameter_average(b: Batch, elements: Array, often: Array | None = None) -> list[Op]:
    """Local SGD: every n-th step replicas average their parameters (masters where there are any), weighted by their tokens: one number
    more. The mean step has 1/n of it; `often` says it of one step."""
    if not present(b.average_every):
        return []
    count = (b.average_every > 0) / np.maximum(b.average_every, 1.0) if often is None else often
    n = (elements + 1) * b.kept_bytes
    return [collective_op("average-parameters", "dense", "all_reduce", "replicate", count, n)]


def optimizer(b: Batch, elements: Array, tensors: Array, by_muon: Array = 0.0) -> list[Op]:
    """The update: memory-bound over the states this rank owns. Unfused, each of `tensors` launches a dozen kernels. `by_muon`: the elements
    that Muon updates, which have one moment."""
    launches = np.ceil(tensors / 100) + 1 if "optimizer" in b.stack.fused else UPDATE_LAUNCHES * tensors
    ops = [Op("update", "optimizer", "memory", 1.0, bytes=update_bytes(b, elements, by_muon), launches=launches)]
    if b.workload.clip:
        read = elements * b.grad_bytes * 2
        launches = np.ceil(tensors / 50) + 4 if "optimizer" in b.stack.fused else NORM_LAUNCHES * tensors
        ops.append(Op("norm", "optimizer", "memory", 1.0, bytes=read, launches=launches))
    return [*ops, *state_copies(b, elements)]


def update_bytes(b: Batch, elements: Array, by_muon: Array = 0.0) -> Array:
    """Bytes that the update of `elements` reads and writes: gradients, moments, masters, parameters, and their moving average."""
    masters = np.where(b.kept_bytes > b.param_bytes, 8.0, 0.0)  # read and written, where parameters are narrower
    touched = b.grad_bytes + 2 * b.workload.state_copies * b.state_bytes + masters + 2 * b.param_bytes
    total = elements * touched
    kind = OPTIMIZERS[b.workload.optimizer]
    if kind.by_matrix:
        total = total + (elements - by_muon) * 2 * (len(kind.states) - kind.moments) * b.state_bytes
    if b.workload.ema:
        total = total + elements * 2 * b.average_bytes
    return total * (1 if "optimizer" in b.stack.fused else 2.5)
