"""Model and plans → step program: the blocks of the model, then what happens once a step.

`step_program` is the one lowering. `estimate`, the planner, the simulator and `verify` all start from its result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower import ends, footprint, sync
from meshwright.lower.batch import Batch
from meshwright.lower.layer import LayerLowering
from meshwright.lower.moe import moe_layer
from meshwright.lower.op import Array, Op, StepProgram, present
from meshwright.lower.recompute import activation_bytes, resolve_recompute_budget

ENDS = ("embedding", "head")


def step_program(
    model: Model, plans: Plan | Sequence[Plan], workload: Workload, stack: Stack | None = None, element: float = 0.0
) -> StepProgram:
    """Lower one plan or many. Plans are taken as legal: `Plan.check` says so. An activation has the bytes of the workload's
    precision, or those of an `element` that is said."""
    plans = [plans] if isinstance(plans, Plan) else plans
    plans = [
        resolve_recompute_budget(model, plan, workload, stack) if plan.recompute == "auto" else plan for plan in plans
    ]
    return lower(Batch.of(plans, model, workload, stack or Stack()), element)


def lower(batch: Batch, element: float = 0.0) -> StepProgram:
    element = element or activation_bytes(batch.workload)
    program = StepProgram(batch, element=element)
    model = batch.model
    if model.kind == "counts":
        _counts_only(program, element)
        return program
    makers = {"embedding": ends.embedding, "dense": LayerLowering.dense, "moe": moe_layer, "head": ends.head}
    for kind, block in model.blocks.items():
        low, held = LayerLowering(batch, block, element), footprint.tensors(batch, block)
        for phase, ops in makers[kind](low).items():
            program.blocks[kind, phase] = ops
        program.saved[kind] = footprint.saved(batch, block, element)
        if kind in ("dense", "moe") and np.any(batch.recompute == 2):
            whole = sum(footprint.saved(batch, block, element, recompute=False).values())
            program.transient = np.maximum(program.transient, whole)
            program.recompute_savings[kind] = whole - sum(program.saved[kind].values())
        program.parameters[kind] = footprint.parameters(batch, held)
        loads = 2.0 * model.experts if kind == "moe" else 0.0  # sent to, and kept
        sums = {"loads": loads, **footprint.summed(batch, held)}
        program.sums[kind] = {name: count for name, count in sums.items() if present(count)}
        _add_boundary(program, kind, element)
    _add_weight_gathers(program)
    _drop_impossible(program)
    return program


def _add_weight_gathers(program: StepProgram) -> None:
    """ZeRO-3 gathers and scatters unit by unit: a layer or several, each end by itself or both that share a weight, a layer's
    experts; or all of a stage but those."""
    batch, parameters = program.batch, program.parameters
    if not np.any(batch.zero == 3):
        program.gathered = {kind: np.zeros(batch.n) for kind in parameters}
        return
    for kind, groups in parameters.items():
        counts = {**groups, **program.sums.get(kind, {})}
        if batch.model.tied and kind in ENDS:
            counts = _with_other_end(program, kind, counts)
        units = _units(program, kind, counts)
        program.gathered[kind] = np.where(batch.zero == 3, sum(units.values()) * batch.param_bytes, 0.0)
        for group, unit in units.items():
            for phase, ops in sync.sharded_weights(batch, counts, group, unit).items():
                program.blocks[kind, phase] = ops + program.blocks[kind, phase]


def _with_other_end(program: StepProgram, kind: str, counts: dict[str, Array]) -> dict[str, Array]:
    """Two ends that share a weight on one stage are one unit: the embedding's."""
    apart, (first, last) = program.batch.pp > 1, ({**program.parameters[k], **program.sums[k]} for k in ENDS)
    if kind == ENDS[1]:
        return {name: count * apart for name, count in counts.items()}
    return {name: first.get(name, 0.0) + last.get(name, 0.0) * ~apart for name in {**first, **last}}


def _units(program: StepProgram, kind: str, counts: dict[str, Array]) -> dict[str, Array]:
    """Elements of the unit of ZeRO that a block is part of. Of stages of unequal lengths the mean."""
    batch, model, parameters = program.batch, program.batch.model, program.parameters
    out = {group: sync.padded(counts, group) if batch.pads else counts[group] for group in parameters[kind]}
    if batch.wraps and model.kind != "counts":
        stages = np.where(batch.pp > 1, batch.pp * batch.virtual, 1.0)
        length = model.layers / stages
        together = 1.0 if kind in ENDS else length / np.ceil(length / batch.wrap)
        many = {block: 1.0 if block in ENDS else model.layer_count(block) for block in parameters}
        dense = {block: sync.padded({**groups, **program.sums[block]}, "dense") for block, groups in parameters.items()}
        whole = sum(many[block] * count for block, count in dense.items()) / stages
        out["dense"] = np.where(batch.one_unit, whole, out["dense"] * together)
    return out


def _add_boundary(program: StepProgram, kind: str, element: float) -> None:
    """What a stage sends on: kept apart from the blocks, since a stage sends once however many layers it has."""
    if kind != "dense":
        return
    batch = program.batch
    n = batch.tokens * batch.model.hidden * element / batch.seq_split
    on = (batch.pp > 1) * 1.0
    for phase in ("F", "I"):
        program.sync[f"boundary-{phase}"] = [
            Op("activations" if phase == "F" else "gradients", "pipeline", "p2p", on, collective="send", axis="pp",
               message_bytes=n, stream="comm:pp")
        ]  # fmt: skip


def _counts_only(program: StepProgram, element: float) -> None:
    """A model of which only totals are known: one product forward and two backward, of unknown shape."""
    batch = program.batch
    flops = batch.model.given_flops * batch.microbatch
    make = {"F": "forward", "I": "backward-inputs", "W": "backward-weights"}
    for phase, name in make.items():
        program.blocks["dense", phase] = [Op(name, "all", "gemm", 1.0, flops, 0.0, launches=60.0)]
    program.blocks["dense", "R"] = []
    program.saved["dense"] = {"all": batch.model.given_activations * batch.microbatch}
    program.parameters["dense"] = {
        "dense": batch.model.given_parameters * np.ones(batch.n),
        "expert": np.zeros(batch.n),
    }
    _add_weight_gathers(program)


def _drop_impossible(program: StepProgram) -> None:
    """Leave out what no plan of the batch does: a program of one plan lists just what that plan does."""
    for key, ops in program.blocks.items():
        program.blocks[key] = [op for op in ops if present(op.count)]
