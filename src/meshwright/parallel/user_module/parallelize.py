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
`tensor.tables` lists them; for known classes it is found (`tensor.families`). Context parallelism, local SGD, compressed gradients and offload are
for our own models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from meshwright.describe.config import load_plan
from meshwright.describe.layout import Layout
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.parallel.data.zero import reshard
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.precision import DTYPES, LossScale, at_least_single, cast, masters_of
from meshwright.parallel.tensor.families import find_table, table_for
from meshwright.parallel.tensor.split import check_regions, check_rows
from meshwright.parallel.tensor.tables import Table
from meshwright.parallel.user_module.batches import prepared
from meshwright.parallel.user_module.batchnorm import synchronise
from meshwright.parallel.user_module.build import Build
from meshwright.parallel.user_module.checks import check_sharded, check_stages, evaluated
from meshwright.parallel.user_module.dataflow import Stages, check_dataflow
from meshwright.parallel.user_module.module import Entry, Loss, ParallelModule
from meshwright.parallel.user_module.samples import Trial, check_samples
from meshwright.parallel.user_module.stages import Recorded, copy_structure, find_layers, record
from meshwright.programs.pipelines import build

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
REDUCTIONS = ("mean", "sum")


def parallelize(
    module: nn.Module,
    plan: Plan | dict[str, Any] | str | Path,
    table: Sequence[tuple[str, str]] | None = None,
    *,
    optimizer: MakeOptimizer | None = None,
    loss: Loss | None = None,
    reduction: str = "mean",
    layers: str | None = None,
    example: Any = None,
    batch_first: bool | None = None,
    check: bool = True,
) -> ParallelModule:
    """A module under a plan on this rank. Every rank of the process group calls it, with a module of the same shape.

    `plan` is a `Plan`, a dictionary of its fields, or a plan file; `replicate`, `shard`, `zero`, `tp`, `sp`, `pp`, `virtual`, `schedule`, `ep`,
    `microbatch`, `recompute`, `param_dtype` and their options are used. `table` rows are (pattern of names, style). `optimizer` makes a torch
    optimizer of (name, parameter) pairs; `loss(output, targets)` is a mean over samples, or a sum with `reduction="sum"`. `layers` is the path of
    the list of layers, for a pipeline, ZeRO units and recompute; `example` one micro-batch of inputs, for a pipeline. `batch_first=False`: dimension
    0 of the inputs is the sequence, dimension 1 the batch. `check`: trial runs on `example` and in the first step raise where the plan would train
    another model than one device (`checks`, `samples`).
    """
    plan = plan if isinstance(plan, Plan) else Plan(**plan) if isinstance(plan, dict) else load_plan(plan)
    check_plan(module, plan, reduction)
    device = join_group(module, plan)
    mesh = Mesh(Layout(plan), distributed.get_rank(), device)
    path, chosen = find_layers(module, layers, needed=plan.pp > 1 or layers is not None)
    rows = rows_of(module, plan, table)
    broadcast_state(module)
    dtype = DTYPES[plan.param_dtype] if "param_dtype" in plan.model_fields_set else None
    kept = at_least_single(dtype) if dtype is not None and mesh.sharded and plan.master else dtype
    cast(module, kept)
    batch_dim = int(not (takes_batch_first(module) if batch_first is None else batch_first))
    example = prepared(example, kept, mesh.device)
    data_group = mesh.group("dp") if plan.pp == 1 else None
    synchronised = synchronise(module, data_group) if data_group is not None else []
    if plan.pp > 1 or plan.recompute == "full" or (check and example is not None):
        stop_caching(module)
    count = plan.stages if plan.pp > 1 else 1
    ranks = build(plan.schedule, plan.pp, max(plan.pp, 1), plan.virtual).rank_of if plan.pp > 1 else (0,)
    spans = divided(len(chosen), plan, count)
    seen = record(module, path, chosen, examined(example, plan)) if plan.pp > 1 else None
    entries = entries_of(module, seen, spans)
    if seen is not None:
        check_pipeline(module, seen, spans, entries, example, check)
    in_parts = check and example is not None and (plan.pp > 1 or data_group is not None)
    if in_parts:
        check_samples(Trial(module, example, batch_dim, reduction == "mean", synchronised), mesh.device, gradients=True)
    divides = check and example is not None and plan.pp == 1 and (plan.tp > 1 or mesh.sharded)
    whole_output = evaluated(module, example) if divides else None
    parallel = ParallelModule(
        plan,
        mesh,
        {},
        {},
        [],
        entries,
        tuple(ranks),
        loss,
        reduction,
        batch_dim,
        dtype,
        scale=LossScale.of(dtype or torch.float32),
        check=check,
        synchronised=synchronised,
        example_checked=in_parts,
    )
    built = Build(parallel, rows, path, seen, spans)
    for stage in [i for i in range(count) if ranks[i] == mesh.index("pp")]:
        built.add_stage(stage, module if count == 1 else copy_structure(module))
    share_between_stages(parallel)
    for stage in parallel.stages:
        built.reduce(stage)
    if seen is not None:
        parallel.run_pipeline = built.pipeline(seen)
    if whole_output is not None:
        check_sharded(whole_output, parallel.module, parallel.cast(example), mesh.device)
        reshard([parallel.module])
    make_optimizer(parallel, optimizer)
    return parallel


def check_pipeline(
    module: nn.Module, seen: Recorded, spans: list[range], entries: dict[str, Entry], example: Any, check: bool
) -> None:
    """Raise for a module of which the stages would not compute what one device does: by its dataflow, and by numbers."""
    holders = {name: entries[name].stages for name, _ in module.named_parameters(remove_duplicate=False)}
    check_dataflow(seen.trace, Stages(spans, seen.path, seen.numbers, set(seen.before), holders))
    if check:
        check_stages(module, seen, spans, example)


def check_plan(module: nn.Module, plan: Plan, reduction: str) -> None:
    """Raise for what a plan cannot do on a module we did not write."""
    refused = {
        "cp": (plan.cp > 1, "The module's attention would have to exchange keys and values"),
        "average_every": (plan.average_every > 0, "Local SGD is for our own models"),
        "compression": (
            plan.wire != "none",
            "Compressed gradients are for our own models; torch's DDP takes `ddp_hook`",
        ),
        "offload": (plan.offload != "none", "`parallel.data.offload` moves the activations of your layers"),
        "recompute": (
            plan.recompute in ("selective", "auto"),
            "Which part of a layer is attention, and what it saves, is not known",
        ),
        "reduce": (plan.reduce == "microbatch" and not plan.zero, "Without ZeRO gradients are reduced once a step"),
        "expert_tp": (plan.etp != plan.tp, "Experts are split over the same ranks as the other layers"),
        "param_dtype": (plan.param_dtype == "fp8", "fp8 products are for our own models"),
        "gather_dtype": (
            plan.gather_dtype == "fp8",
            "fp8 products, and gathers of their weights, are for our own models",
        ),
    }
    for name, (bad, why) in refused.items():
        if bad:
            value = plan.comm_dtype if name == "compression" and plan.compression == "none" else getattr(plan, name)
            default = Plan.model_fields[name].default
            raise MeshwrightError(
                "MW-OWN-001", f"plan.{name}={value} on a module of your own", why=why, fix=f"plan.{name}={default}"
            )
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


@torch.no_grad()
def broadcast_state(module: nn.Module) -> None:
    """Broadcast the values of rank 0: replicas that start with different values would stay different."""
    if distributed.get_world_size() > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            value = tensor.detach().contiguous()
            distributed.broadcast(value, src=0)
            tensor.copy_(value)


def takes_batch_first(module: nn.Module) -> bool:
    return all(part.batch_first for part in module.modules() if isinstance(part, nn.MultiheadAttention))


def stop_caching(module: nn.Module) -> None:
    """Hugging Face's models keep keys and values for generation: what runs twice would append them twice."""
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def examined(example: Any, plan: Plan) -> Any:
    if example is None:
        raise MeshwrightError(
            "MW-OWN-002",
            f"pp={plan.pp} without an example",
            why="Stages must know the shape of what they pass on before the first step",
            fix="parallelize(…, example=inputs of one micro-batch)",
        )
    return example


def divided(layers: int, plan: Plan, count: int) -> list[range]:
    """The layers of each stage."""
    if count == 1:
        return [range(layers)]
    counts = plan.stage_layers(layers)
    if sum(counts) != layers or min(counts) < 1:
        raise MeshwrightError(
            "MW-OWN-002",
            f"{layers} layers in stages of {list(counts)}",
            why="Each stage has at least one layer, and all are used",
        )
    starts = [sum(counts[:i]) for i in range(count)]
    return [range(start, start + n) for start, n in zip(starts, counts, strict=True)]


def entries_of(module: nn.Module, seen: Recorded | None, spans: list[range]) -> dict[str, Entry]:
    """Every name of the module's state, and the stages that hold it; tied weights have several names for one value."""
    values = module.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, value in values.items():
        names.setdefault(id(value), []).append(name)
    out = {}
    for name, value in values.items():
        tied = names[id(value)]
        stages = {stage for other in tied for stage in stages_of(other, seen, spans)}
        out[name] = Entry(value.shape, value.dtype, tied[0], tuple(sorted(stages)))
    return out


def stages_of(name: str, seen: Recorded | None, spans: list[range]) -> list[int]:
    """The stages that hold a name: its layer's, the first, the last, or all."""
    if seen is None:
        return [0]
    inside = f"{seen.path}." if seen.path else ""
    if name.startswith(inside) and name.removeprefix(inside).split(".")[0] in seen.numbers:
        layer = seen.numbers.index(name.removeprefix(inside).split(".")[0])
        return [stage for stage, span in enumerate(spans) if layer in span]
    under = [other for other in (*seen.before, *seen.after) if name.startswith(f"{other}.")]
    if under:
        return [0] if under[0] in seen.before else [len(spans) - 1]
    return list(range(len(spans)))


def share_between_stages(parallel: ParallelModule) -> None:
    """Groups over which stages sum the gradient of a parameter that several of them hold. All ranks make all groups."""
    mesh, groups = parallel.mesh, {}
    for name, entry in parallel.entries.items():
        if entry.source != name or len(entry.stages) < 2:
            continue
        ranks = tuple(sorted({parallel.rank_of[stage] for stage in entry.stages}))
        if len(ranks) > 1 and ranks not in groups:
            rows = mesh.layout.groups("pp").tolist()
            groups[ranks] = mesh.new_groups([[row[r] for r in ranks] for row in rows])
        parallel.shared.append((name, groups.get(ranks)))


def make_optimizer(parallel: ParallelModule, make: MakeOptimizer | None) -> None:
    """The optimizer works on the parameters, or on wide copies of 16-bit ones; shards of ZeRO are wide themselves."""
    parallel.masters = masters_of(parallel.all_holdings, parallel.plan)  # type: ignore[arg-type]
    named: dict[str, nn.Parameter] = {}
    for holding, updated in parallel.named_updated():
        if holding.parameter.requires_grad and not isinstance(holding.parameter, DTensor):
            holding.parameter.register_post_accumulate_grad_hook(parallel.used.add)
        if updated.requires_grad:
            named[holding.name if holding.name not in named else f"{holding.name} ({len(named)})"] = updated
    if make is not None:
        parallel.optimizer = make(list(named.items()))
