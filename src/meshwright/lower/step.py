"""Model and plans → step program: the operations of each block of the model, its pipeline ranks, and the end of the step.

`step_program` is the only lowering. `estimate`, the planner, the simulator and `verify` all start from its result, and read nothing else.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower import ends, footprint, frozen, gradients, muon, offload
from meshwright.lower.attention_dropout import working_bytes
from meshwright.lower.batch import Batch
from meshwright.lower.layer import LayerLowering
from meshwright.lower.layer_kinds import layer
from meshwright.lower.pipeline_ranks import add_ranks
from meshwright.lower.program import DATA_PARALLEL, ENDS, Array, Load, Op, StepProgram, collective_op, present
from meshwright.lower.recompute import activation_bytes, resolve_recompute_budget
from meshwright.lower.stages import average_blocks


def step_program(
    model: Model,
    plans: Plan | Sequence[Plan],
    workload: Workload,
    stack: Stack | None = None,
    element: float = 0.0,
    every_rank: bool = False,
    stages: bool = False,
    workloads: Sequence[Workload] = (),
) -> StepProgram:
    """The step program of one plan or many, which must be legal (`Plan.check`), as `lower` makes it. `workloads` as in `Batch.of`."""
    plans = [plans] if isinstance(plans, Plan) else plans
    plans = [
        resolve_recompute_budget(model, plan, workload, stack) if plan.recompute == "auto" else plan for plan in plans
    ]
    return lower(Batch.of(plans, model, workload, stack or Stack(), workloads), element, every_rank, stages)


def lower(batch: Batch, element: float = 0.0, every_rank: bool = False, stages: bool = False) -> StepProgram:
    """The step program of a batch of plans. An activation has `element` bytes, by default those of the workload's precision. It has the pipeline
    ranks that can be the slowest or the fullest (or `every_rank`), and the blocks of the `stages` if the pipeline is to be walked."""
    return add_ranks(lower_blocks(batch, element), every_rank, stages)


def lower_blocks(batch: Batch, element: float = 0.0) -> StepProgram:
    """A step program without its ranks: the operations of each block in one micro-batch, what it saves, and what data parallelism moves of it."""
    element = element or activation_bytes(batch.workload)
    program = StepProgram(batch, element, mean=average_blocks(batch))
    model = batch.model
    if model.kind == "counts":
        _counts_only(program)
        return program
    makers = {"embedding": ends.embedding, "head": ends.head, "mtp": ends.multi_token_prediction}
    messages: dict[Any, Array] = {}
    for kind, block in model.blocks.items():
        low, tensors = LayerLowering(batch, block, element, messages), footprint.tensors(batch, block)
        for phase, ops in makers.get(kind, layer)(low).items():
            program.blocks[kind, phase] = ops
        program.saved[kind] = footprint.saved(batch, block, element)
        if batch.stack.torch_pipeline and present(batch.splits):
            program.output_gradients[kind] = footprint.output_gradients(batch, block, element)
        if kind in model.kinds and present(batch.reruns_layers):
            whole = sum(footprint.saved(batch, block, element, recompute=False).values())
            program.transient = np.maximum(program.transient, whole)
            program.recompute_savings[kind] = whole - sum(program.saved[kind].values())
        program.parameters[kind] = footprint.parameters(batch, tensors)
        program.loads[kind] = footprint.loads(batch, tensors)
        if model.adapter.on:
            program.frozen[kind] = footprint.frozen(batch, tensors)
            program.unpacked[kind] = footprint.unpacked(batch, block, element)
            program.blocks[kind, "E"] = frozen.after_first_trained(model, kind, program.blocks[kind, "I"])
            read = footprint.saved(batch, frozen.saving_after_first(model, block), element)
            program.unsaved[kind] = sum(program.saved[kind].values()) - sum(read.values())
        program.partial[kind] = footprint.partial_sums(batch, tensors)
        if muon.is_used(batch):
            program.matrices[kind] = muon.shares(batch, kind)
        if present(batch.sends_factors):
            groups = {group: [t for t in tensors if t.group == group] for group in DATA_PARALLEL}
            program.compressed[kind] = {group: footprint.compressed(batch, mine) for group, mine in groups.items()}
    _add_boundary(program, element)
    program.tile = working_bytes(batch)
    if (model.tied or model.mtp_layers) and present(batch.pp > 1):
        copy = footprint.tensors(batch, model.blocks["head"])[-1]
        program.tied = footprint.own_elements(batch, copy) if copy.learns else 0.0
    _add_weight_gathers(program)
    offload.add_activation_copies(program)
    _drop_impossible(program)
    return program


def _add_weight_gathers(program: StepProgram) -> None:
    """ZeRO-3 gathers and reduces unit by unit: one layer or several, each end separately or both if they share a weight, a layer's
    experts; or all of a stage but those."""
    batch = program.batch
    if not present(batch.zero == 3):
        program.gathered = {kind: np.zeros(batch.n) for kind in program.loads}
        return
    loads = {kind: _with_other_end(program, kind) for kind in program.loads}
    for kind, groups in loads.items():
        program.gathered[kind] = np.zeros(batch.n)
        for group, load in groups.items():
            share = _share_of_unit(program, kind, load) if group == "dense" and batch.wraps else None
            unit = load if share is None else Load(*(x / np.where(share > 0, share, 1.0) for x in load))
            size, on = gradients.gathered_weights(batch, group, unit), (batch.zero == 3) & batch.sharded(group)
            program.gathered[kind] = program.gathered[kind] + np.where(on, size, 0.0)
            program.unit_elements[kind] = program.unit_elements.get(kind, 0.0) + np.where(on, unit.updated, 0.0)
            for phase, ops in gradients.unit_ops(batch, group, unit, 1.0 if share is None else share).items():
                program.blocks[kind, phase] = ops + program.blocks[kind, phase]
                if phase == "I" and (kind, "E") in program.blocks:
                    program.blocks[kind, "E"] = ops + program.blocks[kind, "E"]


def _with_other_end(program: StepProgram, kind: str) -> dict[str, Load]:
    """Two ends that share a weight on one stage are one unit: the embedding's."""
    loads, (first, last) = program.loads, ENDS
    if not program.batch.model.tied or kind not in ENDS:
        return loads[kind]
    has_pipeline = program.batch.pp > 1
    if kind == last:
        return {group: gradients.combined([(has_pipeline, load)]) for group, load in loads[kind].items()}
    return {g: gradients.combined([(1.0, load), (~has_pipeline, loads[last][g])]) for g, load in loads[first].items()}


def _share_of_unit(program: StepProgram, kind: str, load: Load) -> Array:
    """Share of a block in its ZeRO unit of several layers, or in its stage; taken in the longest stage, which bounds the step."""
    batch, model = program.batch, program.batch.model
    stages, longest = batch.stages, batch.longest_stage()
    units = 1.0 if kind not in model.kinds else np.ceil(longest / batch.wrap) / longest
    layers = [(model.layer_count(block) / stages, block) for block in model.kinds]
    ends = [(1.0 / stages, end) for end in ENDS if end in program.loads]
    stage = gradients.combined((count, program.loads[block]["dense"]) for count, block in (*layers, *ends)).held
    return np.where(batch.one_unit, load.held / stage, units)


def _add_boundary(program: StepProgram, element: float) -> None:
    """Add the messages between stages. They belong to no block: a stage sends once, for any number of layers."""
    batch = program.batch
    n = batch.tokens * batch.model.residual_width * element / batch.seq_split
    on = (batch.pp > 1) * 1.0
    parts = np.where(batch.sp, 1.0, batch.tp) if batch.stack.sends_parts else 1.0
    for phase, name in (("F", "activations"), ("I", "gradients")):
        program.sync[f"boundary-{phase}"] = [collective_op(name, "pipeline", "send", "pp", on, n / parts, "comm:pp")]
    if batch.stack.sends_parts:
        split = on * (parts > 1)
        gather = Op("parts", "pipeline", "collective", split, collective="all_gather", axis="tp", message_bytes=n)
        program.sync["boundary-gather"] = [gather]


def _counts_only(program: StepProgram) -> None:
    """Lower a model of which only totals are known: one product forward and two backward, of unknown shape."""
    batch = program.batch
    model, saved = batch.model, sum(batch.model.activations(1).values())
    flops = sum(model.flops(1).values()) * batch.microbatch
    make = {"F": "forward", "I": "backward-inputs", "W": "backward-weights"}
    for phase, name in make.items():
        program.blocks["dense", phase] = [Op(name, "all", "gemm", 1.0, flops, 0.0, launches=60.0)]
    program.blocks["dense", "R"] = []
    program.saved["dense"] = {"all": saved * batch.microbatch}
    if present(
        batch.reruns_layers
    ):  # of a residual network: blocks keep their inputs, and one at a time is computed again
        o, reruns = model.resnet, batch.reruns_layers * 1.0
        inputs = sum(2 * block[0].d_in * block[0].size ** 2 for block in o.blocks)
        program.saved["dense"] = {
            "all": np.where(batch.reruns_layers, o.saved_by_ends + inputs, saved) * batch.microbatch
        }
        program.transient = reruns * max(map(o.saved, o.blocks)) * batch.microbatch
        again = Op("forward-again", "all", "gemm", reruns, o.block_flops * batch.microbatch, 0.0, launches=60.0)
        program.blocks["dense", "R"] = [again]
    n = model.total * np.ones(batch.n)
    program.parameters["dense"] = {"dense": n, "expert": np.zeros(batch.n)}
    program.loads["dense"] = {"dense": Load(held=n, sent=n, first=n), "expert": Load()}
    _add_weight_gathers(program)
    offload.add_activation_copies(program)


def _drop_impossible(program: StepProgram) -> None:
    """Remove operations that no plan of the batch runs."""
    for key, ops in program.blocks.items():
        program.blocks[key] = [op for op in ops if present(op.count)]
