"""A user's module before it is divided: what is done to it and found out about it (steps 2 to 4 of `parallelize`).

Batch normalisation over the samples of all data-parallel ranks, as one device would have it.

    mean = Σ x / n        variance = Σ (x − mean)² / n        sums over all ranks, n their samples × positions

Two passes: Σx² − n·mean² would cancel. Backward sums the gradients of the two sums over the ranks in turn. torch's own `SyncBatchNorm` runs on
GPUs only, and over a group that is no part of a plan. Ranks with batches of different length count for what they have.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.parallel import exchange
from meshwright.parallel.data.zero import reshard
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.precision import DTYPES, at_least_single, cast
from meshwright.parallel.tensor.tables import Table
from meshwright.parallel.user_module.batches import prepared
from meshwright.parallel.user_module.boxes import Entry
from meshwright.parallel.user_module.checks import check_sharded, check_stages, evaluated
from meshwright.parallel.user_module.dataflow import Routes, Stages, routes
from meshwright.parallel.user_module.forward_trace import Port
from meshwright.parallel.user_module.samples import Trial, check_samples
from meshwright.parallel.user_module.stages import Recorded, find_layers, record
from meshwright.programs.pipelines import build


def synchronise(module: nn.Module, group: ProcessGroup) -> list[nn.Module]:
    """Make the batch normalisations of a module use the statistics of all ranks of a group; returns them. A class with a forward of its own stays."""
    ours = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    parts = [part for part in module.modules() if isinstance(part, _BatchNorm) and type(part).forward in ours]
    for part in parts:
        part.forward = partial(_synchronised, part, group)  # type: ignore[method-assign]
    return list(parts)


def uses_batch(part: Any) -> bool:
    """Whether a batch normalisation takes the statistics of the batch, not the running ones."""
    return part.training or part.running_mean is None


def _synchronised(part: Any, group: ProcessGroup, x: Tensor) -> Tensor:
    """The forward of a batch normalisation over a group."""

    def total(x: Tensor) -> Tensor:
        return exchange.copy_in(exchange.reduce_out(x, group), group)

    if not uses_batch(part):
        statistics = part.running_mean, part.running_var, part.weight, part.bias
        return nn.functional.batch_norm(x, *statistics, False, 0.0, part.eps)
    part._check_input_dim(x)
    wide = x.to(at_least_single(x.dtype))
    dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
    count = exchange.all_reduce(wide.new_tensor([wide.numel() / wide.shape[1]]), group)
    mean = total(wide.sum(dims)) / count
    centred = wide - mean.view(shape)
    variance = total(centred.square().sum(dims)) / count
    out = centred * (variance + part.eps).rsqrt().view(shape)
    if part.weight is not None:
        out = out * part.weight.view(shape) + part.bias.view(shape)
    if part.training and part.running_mean is not None:
        update_running(part, mean.detach(), variance.detach() * (count / (count - 1)))
    return out.to(x.dtype)


@torch.no_grad()
def update_running(part: Any, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics towards those of the batch, as torch does; without a momentum they are the mean of all batches."""
    part.num_batches_tracked.add_(1)
    share = part.momentum if part.momentum is not None else 1.0 / float(part.num_batches_tracked)
    part.running_mean.lerp_(mean.to(part.running_mean.dtype), share)
    part.running_var.lerp_(variance.to(part.running_var.dtype), share)


def find_routes(
    module: nn.Module, seen: Recorded, spans: list[range], entries: dict[str, Entry], example: Any, check: bool
) -> Routes:
    """What crosses between the stages. Raise where they would not compute what one device does: by the dataflow, and by numbers."""
    holders = {name: entries[name].stages for name, _ in module.named_parameters(remove_duplicate=False)}
    crossing = routes(seen.trace, Stages(spans, seen.names, seen.before, holders))
    if check:
        check_stages(module, seen, spans, crossing, example)
    return crossing


def check_boundaries(crossing: Routes, seen: Recorded, spans: list[range], plan: Plan) -> None:
    """Raise for a plan that sends one tensor only, where stages read more than the output of the layer before."""
    splits = build(plan.schedule, plan.pp, plan.pp, plan.virtual).splits_backward
    for span, ports in zip(spans[1:], crossing.boundaries[1:], strict=True):
        beside = [port.unit for port in ports if port != Port(seen.names[span[0] - 1], 0, 0)]
        read = f"'{(beside or [ports[0].unit])[0]}' is read by later pipeline stages, and plan."
        if beside and plan.sp and plan.tp > 1:
            why = "Which tensors beside the output of a layer have a sequence to divide is not known"
            raise MeshwrightError("MW-OWN-007", f"{read}sp=true", why=why, fix="plan.sp=false")
        if len(ports) > 1 and splits:
            why = "torch cannot split the backward of a stage with several inputs"
            what = f"{read}schedule={plan.schedule}"
            raise MeshwrightError("MW-OWN-007", what, why=why, fix="plan.schedule=1f1b")


@torch.no_grad()
def broadcast_state(module: nn.Module) -> None:
    """Broadcast the values of rank 0: replicas that start with different values would stay different."""
    if distributed.get_world_size() > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            value = tensor.detach().contiguous()
            distributed.broadcast(value, src=0)
            tensor.copy_(value)


def stop_caching(module: nn.Module) -> None:
    """Hugging Face's models keep keys and values for generation: what runs twice would append them twice."""
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


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


def entries_of(module: nn.Module, path: str, seen: Recorded | None, spans: list[range]) -> dict[str, Entry]:
    """Every name of the module's state, and the stages that hold it; tied weights have several names for one value."""
    values = module.state_dict(keep_vars=True)
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    inside = f"{path}." if path else ""
    names: dict[int, list[str]] = {}
    for name, value in values.items():
        names.setdefault(id(value), []).append(name)
    out = {}
    for name, value in values.items():
        tied = names[id(value)]
        stages = {stage for other in tied for stage in stages_of(other, seen, spans)}
        matrix = value.ndim in (2, 3) and name.startswith(inside)
        block = "embedding" if id(value) in tables else "" if matrix else "head"
        out[name] = Entry(value.shape, value.dtype, tied[0], tuple(sorted(stages)), block)
    return out


def stages_of(name: str, seen: Recorded | None, spans: list[range]) -> list[int]:
    """The stages that hold a name: its layer's, the first, the last, or all."""
    if seen is None:
        return [0]
    layer = next((i for i, unit in enumerate(seen.names) if name.startswith(f"{unit}.")), None)
    if layer is not None:
        return [stage for stage, span in enumerate(spans) if layer in span]
    under = [other for other in (*seen.before, *seen.after) if name.startswith(f"{other}.")]
    if under:
        return [0] if under[0] in seen.before else [len(spans) - 1]
    return list(range(len(spans)))


@dataclass
class WholeModule:
    """The module before it is divided: what is done to it and found out about it (steps 2 to 4), then `build` divides it."""

    module: nn.Module
    plan: Plan
    mesh: Mesh
    example: Any
    batch_dim: int
    mean: bool
    check: bool
    seen: Recorded | None = field(init=False, default=None)  # with a pipeline
    routes: Routes | None = field(init=False, default=None)

    def prepare(self, layers: str | None, rows: Table) -> None:
        """Steps 2 to 4, with the trial runs of the whole module."""
        module, plan, mesh, staged = self.module, self.plan, self.mesh, self.plan.pp > 1
        self.rows = rows
        self.path, chosen = find_layers(module, layers, needed=staged or layers is not None)
        broadcast_state(module)
        self.dtype = kept_dtype = DTYPES[plan.param_dtype] if "param_dtype" in plan.model_fields_set else None
        if kept_dtype is not None and mesh.sharded and plan.master:
            kept_dtype = at_least_single(kept_dtype)
        cast(module, kept_dtype)
        example = self.example = prepared(self.example, kept_dtype, mesh.device)
        examined = self.check and example is not None
        data_group = None if staged else mesh.group("dp")
        self.synchronised = synchronise(module, data_group) if data_group is not None else []
        if staged or plan.recompute == "full" or examined:
            stop_caching(module)
        self.count = plan.stages if staged else 1
        self.spans, self.ranks = divided(len(chosen), plan, self.count), [0]
        if staged and example is None:
            raise MeshwrightError(
                "MW-OWN-002",
                f"pp={plan.pp} without an example",
                why="Stages must know the shape of what they pass on before the first step",
                fix="parallelize(…, example=inputs of one micro-batch)",
            )
        if staged:
            self.ranks = build(plan.schedule, plan.pp, plan.pp, plan.virtual).rank_of.tolist()
            self.seen = record(module, self.path, chosen, example)
        self.entries = entries_of(module, self.path, self.seen, self.spans)
        if self.seen is not None:
            self.routes = find_routes(module, self.seen, self.spans, self.entries, example, self.check)
            check_boundaries(self.routes, self.seen, self.spans, plan)
        self.accumulating = ""
        self.in_parts = examined and (staged or data_group is not None)
        if self.in_parts:
            trial = Trial(module, example, self.batch_dim, self.mean, self.synchronised)
            self.accumulating = check_samples(trial, mesh.device, gradients=True)
        divides = examined and not staged and (plan.tp > 1 or mesh.sharded)
        self.output = evaluated(module, example) if divides else None

    def check_sharded(self, divided: nn.Module) -> None:
        """Raise if the forward of the divided module is not that of the whole one."""
        if self.output is not None:
            check_sharded(self.output, divided, prepared(self.example, self.dtype, self.mesh.device), self.mesh.device)
            reshard([divided])
