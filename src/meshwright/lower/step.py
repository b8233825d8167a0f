"""Model and plans → step program: the blocks of the model, then what happens once a step.

`step_program` is the one lowering. `estimate`, the planner, the simulator and `verify` all start from its result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.describe.anatomy import Block
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower import ends, holds, sync
from meshwright.lower.batch import Batch
from meshwright.lower.fit import activation_bytes, settle
from meshwright.lower.layer import LayerLowering
from meshwright.lower.moe import moe_layer
from meshwright.lower.op import Array, Op, StepProgram, present


def step_program(
    model: Model, plans: Plan | Sequence[Plan], workload: Workload, stack: Stack | None = None, element: float = 0.0
) -> StepProgram:
    """Lower one plan or many. Plans are taken as legal: `Plan.check` says so. An activation has the bytes of the workload's
    precision, or those of an `element` that is said."""
    plans = [plans] if isinstance(plans, Plan) else plans
    plans = [settle(model, plan, workload, stack) if plan.recompute == "auto" else plan for plan in plans]
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
        low = LayerLowering(batch, block, element)
        for phase, ops in makers[kind](low).items():
            program.blocks[kind, phase] = ops
        program.saved[kind] = holds.saved(batch, block, element)
        if kind in ("dense", "moe") and np.any(batch.recompute == 2):
            whole = sum(holds.saved(batch, block, element, recompute=False).values())
            program.transient = np.maximum(program.transient, whole)
            program.unsaved[kind] = whole - sum(program.saved[kind].values())
        program.parameters[kind] = holds.parameters(batch, block)
        program.sums[kind] = _sums(batch, block)
        _add_weight_gathers(program, kind)
        _add_boundary(program, kind, element)
    _drop_impossible(program)
    return program


def _sums(batch: Batch, block: Block) -> dict[str, Array]:
    """What of a block is summed once a step beside its gradients; nothing that no plan of the batch has."""
    loads = 2.0 * batch.model.experts if block.kind == "moe" else 0.0  # sent to, and kept
    out: dict[str, Array] = {"untrained": holds.untrained(block), "loads": loads, **holds.partial(batch, block)}
    if batch.compresses:
        out |= {f"{group}_matrices": count for group, count in holds.matrices(block).items()}
    return {name: count for name, count in out.items() if present(count)}


def _add_weight_gathers(program: StepProgram, kind: str) -> None:
    batch = program.batch
    if not np.any(batch.zero == 3):
        program.gathered[kind] = np.zeros(batch.n)
        return
    program.gathered[kind] = np.where(batch.zero == 3, sum(program.parameters[kind].values()) * batch.param_bytes, 0.0)
    together = batch.wrap if batch.wraps and kind in ("dense", "moe") else 1.0
    if batch.wraps:
        program.gathered[kind] = program.gathered[kind] * together
    for group, elements in program.parameters[kind].items():
        still = program.sums.get(kind, {}).get("untrained", 0.0) if group == "dense" else 0.0
        matrices = program.sums.get(kind, {}).get(f"{group}_matrices", 1.0)
        for phase, ops in sync.sharded_weights(batch, elements, group, still, together, matrices).items():
            program.blocks[kind, phase] = ops + program.blocks[kind, phase]


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
    _add_weight_gathers(program, "dense")


def _drop_impossible(program: StepProgram) -> None:
    """Leave out what no plan of the batch does: a program of one plan lists just what that plan does."""
    for key, ops in program.blocks.items():
        program.blocks[key] = [op for op in ops if present(op.count)]
