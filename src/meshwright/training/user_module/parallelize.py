"""Put a plan on a user's own module, in one fixed order.

    1  mesh        the ranks of every axis; the process group, if `torchrun` started the ranks and none exists yet
    2  broadcast   rank 0's parameters and buffers to all
    3  precision   parameters in the plan's dtype, where the plan sets one
    4  example     with a pipeline: one micro-batch run on the whole module shows the shapes between stages, and what each stage reads
    5  tensor      parameters become this rank's columns and rows, as the table says
    6  expert      stacked experts become this rank's
    7  stages      what other pipeline stages hold is released
    8  recompute   layers that backward computes again
    9  zero        `fully_shard`, a unit per layer
   10  gradients   buckets, or shards that torch reduces; then the optimizer

Data parallelism and ZeRO work on every module. Tensor and sequence parallelism need a sharding table: rows (pattern of names, style), as
`tensor.tables` lists them; for known classes it is found. Context parallelism, local SGD and fp8 need to know what the
module computes: they are for our own models.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from meshwright.describe.config import load_plan
from meshwright.describe.layout import Layout
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import Degrees
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.precision import LossScale, masters_of
from meshwright.parallel.tensor.split import check_regions, check_rows
from meshwright.parallel.tensor.tables import Table, find_table, table_for
from meshwright.parallel.user_module.boxes import Entry
from meshwright.parallel.user_module.build import Build
from meshwright.parallel.user_module.forward_trace import on_meta
from meshwright.training.optimizer.make import make_optimizer
from meshwright.training.user_module.loss import Loss
from meshwright.training.user_module.module import ParallelModule
from meshwright.units import Json

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
REDUCTIONS = ("mean", "sum")
KINDS: dict[type, Any] = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam"}


def parallelize(
    module: nn.Module,
    plan: Plan | Json | str | Path,
    table: Sequence[tuple[str, str]] | None = None,
    *,
    optimizer: MakeOptimizer | str | Json | None = None,
    loss: Loss | None = None,
    reduction: str = "mean",
    layers: str | None = None,
    example: Any = None,
    batch_first: bool | None = None,
    check: bool = True,
) -> ParallelModule:
    """A module under a plan on this rank. Every rank of the process group calls it, with a module of the same shape.

    `plan` is a `Plan`, a dictionary of its fields, or a plan file. `table` rows are (pattern of names, style). `optimizer` makes a torch
    optimizer of (name, parameter) pairs, or names one of ours: "adamw", or {"kind": "muon", "learning_rate": 1e-3} with the fields of the
    section [optimizer]. `loss(output, targets)` is a mean over samples, or a sum with `reduction="sum"`. `layers` is the path of
    the list of layers, for a pipeline, ZeRO units and recompute; `example` one micro-batch of inputs, for a pipeline. `batch_first=False`: dimension
    0 of the inputs is the sequence, dimension 1 the batch. `check`: trial runs on `example` and in the first step raise where the plan would train
    another model than one device (`checks`, `samples`).
    """
    plan = plan if isinstance(plan, Plan) else Plan(**plan) if isinstance(plan, dict) else load_plan(plan)
    check_plan(module, plan, reduction)
    device = join_group(module, plan)
    mesh = Mesh(Layout(plan), distributed.get_rank(), device)
    batch_dim = int(not (takes_batch_first(module) if batch_first is None else batch_first))
    build = Build(module, plan, mesh, example, batch_dim, reduction == "mean", check)
    build.prepare(layers, rows_of(module, plan, table))
    build.divide()
    parallel = ParallelModule(
        plan=plan,
        workload=Workload(),
        mesh=mesh,
        stages=build.stages,
        pieces=build.pieces,
        reductions=build.reductions,
        dtype=build.dtype or next((p.local.dtype for p in build.pieces), torch.float32),
        degrees=Degrees(plan.tp, plan.ep, plan.etp, build.kv_copies, plan.sp),
        tied=tied_weights(build.entries, build.ranks, mesh),
        masters=masters_of(build.pieces, plan) if build.pieces else None,
        entries=build.entries,
        loss=loss,
        reduction=reduction,
        batch_dim=batch_dim,
        input_dtype=build.dtype,
        scale=LossScale.of(build.dtype or torch.float32),
        check=check,
        synchronised=build.synchronised,
        example=on_meta(example) if example is not None else None,
        example_checked=build.in_parts,
        accumulating=build.accumulating,
    )
    if build.seen is not None:
        for stage in parallel.stages.values():
            stage.finish = parallel.weighted_loss  # type: ignore[assignment]
        parallel.run_pipeline = build.pipeline()
    build.check_sharded(parallel.module)
    set_optimizer(parallel, optimizer)
    return parallel


def check_plan(module: nn.Module, plan: Plan, reduction: str) -> None:
    """Raise for what a plan cannot do on a module we did not write."""
    attention = "Which part of a layer is attention, and what it saves, is not known"
    refused = {
        "cp": (plan.cp > 1, "The module's attention, which is not known, would have to exchange keys and values"),
        "average_every": (
            plan.average_every > 0,
            "Local SGD counts tokens, and what a sample has of them is not known",
        ),
        "recompute": (plan.recompute in ("selective", "auto"), attention),
        "expert_tp": (plan.etp != plan.tp, "Experts are split over the same ranks as the other layers"),
        "param_dtype": (plan.param_dtype == "fp8", "Which products of the module may be computed in fp8 is not known"),
        "gather_dtype": (plan.gather_dtype == "fp8", "Which weights are multiplied in fp8 is not known"),
    }
    for name, (bad, why) in refused.items():
        if bad:
            what, fix = f"plan.{name}={getattr(plan, name)}", f"plan.{name}={Plan.model_fields[name].default}"
            raise MeshwrightError("MW-OWN-001", f"{what} on a module of your own", why=why, fix=fix)
    if reduction not in REDUCTIONS:
        raise MeshwrightError("MW-OWN-001", f"reduction={reduction!r}", valid=REDUCTIONS)
    if any(p.is_meta for p in module.parameters()):
        raise MeshwrightError(
            "MW-OWN-001",
            f"{type(module).__name__} is on the meta device",
            why="Each rank keeps its part of the weights that the module has",
            fix="build it on the CPU, the same on every rank or on rank 0: its values are broadcast",
        )


def join_group(module: nn.Module, plan: Plan) -> str:
    """Create the process group if none exists; returns the device of the module."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if not distributed.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            distributed.init_process_group(backend)
        elif plan.world == 1:
            distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
        else:
            raise MeshwrightError(
                "MW-OWN-006",
                f"a plan for {plan.world} ranks, and no process group",
                why="parallelize runs in every rank",
                fix=f"torchrun --nproc-per-node {plan.world} script.py",
            )
    return str(device)


def rows_of(module: nn.Module, plan: Plan, table: Sequence[tuple[str, str]] | None) -> Table:
    """The table for tensor and expert parallelism, checked against the module."""
    if table is not None:
        check_rows(module, tuple(table))
    if plan.tp == 1 and plan.ep == 1:
        return ()
    rows = tuple(table) if table is not None else table_for(module) if plan.tp > 1 else find_table(module) or ()
    check_rows(module, rows)
    if plan.tp > 1:
        check_regions(module, rows)
    if plan.ep > 1 and not any(style == "experts" for _, style in rows):
        raise MeshwrightError(
            "MW-EP-002",
            f"ep={plan.ep}, and no row of the table is 'experts'",
            why="Expert parallelism spreads the modules that hold stacked experts",
            fix='table=[("layers.*.mlp.experts", "experts"), …], or plan.ep=1',
        )
    return rows


def takes_batch_first(module: nn.Module) -> bool:
    return all(part.batch_first for part in module.modules() if isinstance(part, nn.MultiheadAttention))


def tied_weights(
    entries: dict[str, Entry], ranks: Sequence[int], mesh: Mesh
) -> list[tuple[str, distributed.ProcessGroup | None]]:
    """Parameters that several stages hold, with the group over which they sum their gradients. All ranks make all groups."""
    groups: dict[tuple[int, ...], distributed.ProcessGroup | None] = {}
    out = []
    for name, entry in entries.items():
        if entry.source != name or len(entry.stages) < 2:
            continue
        holders = tuple(sorted({ranks[stage] for stage in entry.stages}))
        if len(holders) > 1 and holders not in groups:
            rows = mesh.layout.groups("pp").tolist()
            groups[holders] = mesh.new_groups([[row[r] for r in holders] for row in rows])
        out.append((name, groups.get(holders)))
    return out


def set_optimizer(parallel: ParallelModule, optimizer: MakeOptimizer | str | Json | None) -> None:
    """The optimizer works on the local parameters, or on wide copies of 16-bit ones; shards of ZeRO are wide themselves."""
    for piece in parallel.pieces:
        if piece.parameter.requires_grad and not isinstance(piece.parameter, DTensor):
            piece.parameter.register_post_accumulate_grad_hook(parallel.used.add)
    if optimizer is None:
        return
    if isinstance(optimizer, str | dict):
        chosen = {"kind": optimizer} if isinstance(optimizer, str) else dict(optimizer)
        kind = chosen.pop("kind", "adamw")
        parallel.workload, parallel.settings = Workload(optimizer=kind), Optimizer(**chosen)
        check_settings(parallel)
        parallel.optimizer = make_optimizer(parallel, parallel.settings)
        return
    named: dict[str, nn.Parameter] = {}
    for piece in parallel.updated:
        if piece.parameter.requires_grad:
            named[piece.name if piece.name not in named else f"{piece.name} ({len(named)})"] = piece.parameter
    check_parts(parallel, optimizer)
    parallel.optimizer = optimizer(list(named.items()) or [("", nn.Parameter(torch.zeros(0)))])  # torch refuses none
    kind = KINDS.get(type(parallel.optimizer), "sgd")
    parallel.workload = Workload(optimizer=kind)  # which states a checkpoint must have; of other classes none


def check_parts(parallel: ParallelModule, optimizer: MakeOptimizer) -> None:
    """Raise if a rank that holds a part of the parameters would update them otherwise than one device."""
    plan, cut = parallel.plan, any(p.local.shape != p.full_shape for p in parallel.updated)
    for what, apart in (("rows of one tensor", cut), ("tensors", plan.pp > 1)):
        if apart and updates_differ(optimizer, cut=what != "tensors"):
            name = getattr(optimizer, "func", optimizer)
            raise MeshwrightError(
                "MW-OWN-011",
                f"{getattr(name, '__name__', name)} cannot update the parameters of this plan",
                why=f"It updates {what} together otherwise than apart, and the ranks of {plan} hold parts",
                fix="an optimizer that updates each element by itself (or our 'muon'), or a plan of replicas alone",
            )


def updates_differ(optimizer: MakeOptimizer, cut: bool) -> bool:
    """Let two ranks update half of the values each, and one device all of them: the rows of one matrix if `cut`, otherwise two matrices."""
    values = torch.linspace(-1.0, 1.5, 48, dtype=torch.float64).reshape(8, 6)
    halves = values.split(4)

    def updated(*parts: Tensor) -> Tensor:
        parameters = [nn.Parameter(part.clone()) for part in parts]
        made = optimizer([(f"trial.{i}.weight", p) for i, p in enumerate(parameters)])
        for step in (1, 2):
            for parameter in parameters:
                parameter.grad = torch.sin(step * 7 * parameter.detach())
            made.step()
        return torch.cat([p.detach() for p in parameters])

    try:
        whole, apart = updated(*((values,) if cut else halves)), torch.cat(list(map(updated, halves)))
    except Exception:  # an optimizer for the names or shapes of this module only: nothing is known of it
        return False
    return not torch.allclose(whole, apart, rtol=1e-9, atol=0.0)


def check_settings(parallel: ParallelModule) -> None:
    """Raise for settings of our optimizers that need to know more of the module."""
    settings = parallel.settings
    assert settings is not None
    fused = next((p.name for p in parallel.pieces if p.fused or any(n > 1 for n in p.box.start[2:])), "")
    loop = "The loop is yours: step(…, clip=1.0) clips"
    refused = {
        "scale_with_width": (settings.scale_with_width, "The width of the module is not known"),
        "scale_with_batch": (settings.scale_with_batch, "The batch is not known before the first step"),
        **{name: (name in settings.model_fields_set, loop) for name in ("clip", "on_nan", "most_skips")},
        "ema": (settings.ema, "A moving average of the weights is kept by the trainer of our own models"),
    }
    for name, (bad, why) in refused.items():
        if bad:
            what = f"optimizer {name}={getattr(settings, name)} on a module of your own"
            raise MeshwrightError("MW-OWN-001", what, why=why)
    if fused and OPTIMIZERS[kind := parallel.workload.optimizer].by_matrix:
        why = f"It updates whole matrices, and tp={parallel.plan.tp} cuts '{fused}' in several parts"
        raise MeshwrightError("MW-OWN-001", f"optimizer kind={kind} on a module of your own", why=why)
