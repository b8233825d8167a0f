"""ZeRO 1 to 3: `fully_shard` on a stage of one of our models, and when torch may reduce its gradients.

    zero 1   optimizer states are sharded: gradients are reduce-scattered and parameters gathered once per step
    zero 2   gradients are sharded too, where the plan reduces after every micro-batch; else as zero 1
    zero 3   parameters are sharded too: gathered layer by layer in forward, again in backward, freed in between

A unit of `fully_shard` is `plan.wrap` layers, and one for each end of the model (`gathering`).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.describe.plan import Plan
from meshwright.describe.sharding import DATA_AXES
from meshwright.models.moe import routed_experts
from meshwright.parallel.data.gathering import Gathering, Unit, grouped, shard_units
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics.compress.base import CompressedScatter, unit_parameters
from meshwright.parallel.numerics.compress.compressors import compressor_of
from meshwright.parallel.numerics.precision import DTYPES, narrow


def units(module: nn.Module, layers: int = 1) -> list[Unit]:
    """The units of a stage in the order they run: `layers` layers each, and one for each end; the two ends are one unit
    where they share a weight. With 0 layers a unit, the whole module is the only unit (the list is empty)."""
    children = list(module.children())
    ends = [child for child in children if not isinstance(child, nn.ModuleDict)]
    owners = [{id(p) for p in end.parameters()} for end in ends]
    shared = len(ends) == 2 and bool(owners[0] & owners[1])
    out = [ends] if shared else []
    for child in children if layers else ():
        if isinstance(child, nn.ModuleDict):
            out += grouped(list(child.values()), layers)
        elif not shared:
            out.append([child])
    return out if layers else []


def shard(module: nn.Module, mesh: Mesh, plan: Plan, dtype: torch.dtype, whole: Collection[str] = ()) -> None:
    """Apply `fully_shard` to a stage of one of our models, still on the meta device; parameters named in `whole` are not sharded."""
    kept = {module.get_parameter(name) for name in whole}
    shard_parts(module, units(module, plan.wrap), routed_experts(module), mesh, plan, dtype, kept)


def shard_parts(
    module: nn.Module,
    parts: list[Unit],
    experts: Sequence[nn.Module],
    mesh: Mesh,
    plan: Plan,
    dtype: torch.dtype,
    whole: Collection[nn.Parameter] = (),
) -> None:
    """Apply `fully_shard` to a module in units; `experts` have other data-parallel ranks than the other modules, and are sharded over those.
    `whole` are parameters that stay as they are.

    A pipeline stage is gathered once per step, before its first action, and freed after its last, for any value of
    `reshard`: if it were freed between forward and a *split* backward, torch would silently lose the gradients of W
    actions.
    """
    frees = plan.zero == 3 and plan.reshard and plan.pp == 1
    reduced = plan.grad_dtype if plan.wire != "none" else plan.reduce_dtype  # a compressor does its own rounding
    gathering = Gathering(
        forward=bool(plan.prefetch),
        backward=plan.prefetch is True,
        reshard=frees,
        param_dtype=dtype if narrow(dtype) else None,
        reduce_dtype=DTYPES.get(reduced) if narrow(dtype) else None,
    )
    # One number cannot be divided: each rank has it, and its gradient is all-reduced.
    ignored = {p for p in module.parameters() if p.ndim == 0} | set(whole)
    for part in experts:
        if mesh.expert_sharding is None:
            ignored |= set(part.parameters())
        else:
            shard_units(part, [], mesh.expert_sharding, gathering, ignored & set(part.parameters()))
    shard_units(module, parts, mesh.sharding(), gathering, ignored)


class Gradients:
    """What a reduction need not do: all four methods are called around the backward of every step."""

    def begin(self, last: bool) -> None:
        """Before each micro-batch; gradients are complete after the backward of the `last` one."""

    def start(self) -> None:
        """After the last backward: send what has not been sent."""

    def finish(self) -> None:
        """Before the update: wait until all gradients of the step are summed."""

    def zero(self) -> None:
        """After the update, or after a step that was aborted."""


class ShardedGradients(Gradients):
    """Gradients of one module under `fully_shard`: torch starts the reduction from its hooks, or from the pipeline runtime, and waits at the
    end of backward; this decides when."""

    def __init__(self, module: FSDPModule, plan: Plan, scatters: list[CompressedScatter]) -> None:
        self.module, self.plan, self.scatters = module, plan, scatters

    def begin(self, last: bool) -> None:
        plan = self.plan
        frees_each = plan.zero == 3 and plan.reshard
        self.module.set_reshard_after_backward(frees_each or last)
        self.module.set_requires_gradient_sync(plan.reduces_each or last)

    def zero(self) -> None:
        """Drop gradients, and parameters that were gathered after backward (by an evaluation before the update): they
        are out of date now."""
        reshard([self.module])  # type: ignore[list-item]
        for p in self.module.parameters():  # type: ignore[attr-defined]
            if isinstance(p, DTensor):
                p.grad = None


ZeroUnit = tuple[Sequence[Any], str]  # modules that are gathered together, and the axis over which they are sharded


def units_of_model(module: nn.Module, plan: Plan) -> list[ZeroUnit]:
    """The units of a stage of one of our models."""
    return zero_units(module, units(module, plan.wrap), routed_experts(module))


def zero_units(module: nn.Module, parts: list[Unit], experts: Sequence[nn.Module]) -> list[ZeroUnit]:
    """The units of a sharded module: its parts, what is left of the module itself, and experts that are sharded over their own ranks."""
    dense, expert = (DATA_AXES[group].shard for group in ("dense", "expert"))
    return [
        *((unit, dense) for unit in [*parts, [module]]),
        *(([part], expert) for part in experts if isinstance(part, FSDPModule)),
    ]


def compress_scatters(
    units: list[ZeroUnit], mesh: Mesh, plan: Plan, exact: set[nn.Parameter]
) -> list[CompressedScatter]:
    """Make every unit of a sharded module send its gradients compressed, where the plan asks for it. The gradients of
    `exact` parameters are not compressed."""
    if plan.wire == "none":
        return []
    out = []
    for parts, axis in units:
        parameters = list(dict.fromkeys(p for part in parts for p in unit_parameters(part) if isinstance(p, DTensor)))
        compressor = compressor_of(plan)
        if parameters and compressor is not None:
            out.append(CompressedScatter(compressor, parameters, axis, mesh.size(axis), exact))
            parts[0].set_custom_reduce_scatter(out[-1])
    return out


def reshard(modules: Iterable[nn.Module]) -> None:
    """Free gathered parameters, which torch keeps after a forward without a backward: the next step gathers them as always."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
