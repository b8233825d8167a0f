"""The pipeline stages of this rank: their layers, and the strategies that change layers from the inside.

`apply` calls these functions in its fixed order."""

from torch import Tensor, distributed, nn

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import Box
from meshwright.describe.workload import Workload
from meshwright.parallel.context import sequence as context
from meshwright.parallel.data import offload
from meshwright.parallel.expert.dispatch import place_experts
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics import fp8, fp8_grouped, fp8_rows
from meshwright.parallel.pieces import cut_to_boxes
from meshwright.parallel.recompute import recompute_plan
from meshwright.parallel.tensor import split as tensor
from meshwright.parallel.tensor.tables import table_of
from meshwright.programs.pipelines import build
from meshwright.programs.pipelines.program import PipelineProgram


def program_of(plan: Plan, workload: Workload) -> PipelineProgram | None:
    if plan.pp == 1:
        return None
    return build(plan.schedule, plan.pp, plan.microbatches(workload), plan.virtual)


def stages_of(model: Model, plan: Plan, program: PipelineProgram | None, mesh: Mesh) -> dict[int, range]:
    """The layers of each pipeline stage of this rank, by stage."""
    if program is None:
        return {0: range(model.layers)}
    out, start = {}, 0
    for stage, count in enumerate(plan.stage_layers(model.layers)):
        if program.rank_of[stage] == mesh.index("pp"):
            out[stage] = range(start, start + count)
        start += count
    return out


def shard_stage(
    module: nn.Module,
    table: list[Box],
    model: Model,
    plan: Plan,
    workload: Workload,
    mesh: Mesh,
    copies: distributed.ProcessGroup | None,
) -> Tensor | None:
    """Apply the strategies that change layers from the inside to a stage on the meta device. Returns the positions of this
    rank's tokens under context parallelism."""
    group, ring = mesh.group("tp"), mesh.group("cp")
    layers: list[nn.Module] = list(module.layers.values())  # type: ignore[operator]
    position_ids = None
    if group is not None:
        tensor.split(
            module,
            table_of(model),
            group,
            plan.sp,
            form=plan.tp_form,
            head=model.head_width,
            copies=copies,
            strict=False,
        )
    if model.experts:
        cut_to_boxes(module, [box for box in table if box.expert])
        place_experts(module, mesh, plan, model, plan.microbatches(workload))
    if (model.attention_dropout or model.sinks or model.attention_softcap) and model.kind == "transformer":
        context.use_tiled_attention(module)
    if ring is not None:
        overlaps = plan.overlap is None or "cp" in plan.overlap
        position_ids = context.shard_sequence(module, model, ring, plan.cp_kind, workload.seq, overlaps)
    if workload.precision == "fp8":
        if workload.scaling == "row":
            fp8_rows.enable_fp8(layers)
        else:
            fp8.enable_fp8(layers, [g for g in (group, ring) if g is not None], keeps=not mesh.sharded)
        fp8_grouped.enable_fp8([module], mesh.group("expert_tp") if model.experts else None)
    return position_ids


def wrap_layers(module: nn.Module, plan: Plan) -> None:
    """Put the hooks of recompute and offload around the layers of a stage."""
    recompute_plan(module, plan)
    if plan.offload in ("activations", "both"):
        offload.offload_activations(module.layers.values())  # type: ignore[operator]


def frozen_in(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in module.named_parameters() if not parameter.requires_grad)
