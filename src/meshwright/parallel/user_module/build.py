"""The steps of `parallelize` that are taken stage by stage: split, spread experts, release other stages' layers, recompute, shard, reduce; then
the pipeline over the finished stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.parallel.data.buckets import Buckets
from meshwright.parallel.data.gathering import grouped
from meshwright.parallel.data.reduction import CombinedReduction, LocalGradients
from meshwright.parallel.data.zero import ShardedGradients, shard_parts
from meshwright.parallel.expert.stacked import spread_stacked
from meshwright.parallel.numerics.precision import DTYPES, narrow
from meshwright.parallel.pipeline import Pipeline, Stage
from meshwright.parallel.recompute import recompute
from meshwright.parallel.tensor.split import matches, split
from meshwright.parallel.tensor.tables import Table
from meshwright.parallel.user_module.holdings import LocalParameter
from meshwright.parallel.user_module.module import ParallelModule
from meshwright.parallel.user_module.stages import Recorded, StageModule
from meshwright.programs.pipelines import build as build_program


class Build:
    """The steps that are taken stage by stage."""

    def __init__(
        self, parallel: ParallelModule, rows: Table, path: str, seen: Recorded | None, layers: list[range]
    ) -> None:
        self.parallel, self.rows, self.path, self.seen, self.layers = parallel, rows, path, seen, layers
        self.plan, self.mesh = parallel.plan, parallel.mesh
        self.experts: dict[int, list[nn.Module]] = {}
        self.used: set[nn.Parameter] = set()

    def add_stage(self, stage: int, root: nn.Module) -> None:
        """Steps 5 to 9 for one stage."""
        plan, mesh, parallel = self.plan, self.mesh, self.parallel
        group, done = mesh.group("tp"), None
        if group is not None:
            done = split(
                root, self.rows, group, plan.sp, form=plan.tp_form, strict=False, sequence_dim=1 - parallel.batch_dim
            )
        spread, self.experts[stage] = self.spread(root)
        own: nn.Module = root
        layers = list(root.get_submodule(self.path).children()) if self.path or self.layers[0] else []
        if self.seen is not None:
            own = StageModule(root, self.seen, self.layers[stage], self.layers[-1][-1] + 1, parallel.weighted_loss)
            layers = own.layers
            self.separate(root)
            self.experts[stage] = [part for part in self.experts[stage] if any(True for _ in part.parameters())]
        if plan.recompute == "full":
            recompute(layers, plan.recompute_every, plan.recompute_layers or None)
        if mesh.sharded:
            shard_parts(
                own, grouped(layers, plan.wrap), self.experts[stage], mesh, plan, parallel.dtype or torch.float32
            )
        parallel.stages[stage] = own
        entries = parallel.entries
        parallel.holdings[stage] = [
            LocalParameter(entries[name].source, p, mesh, done, name in spread, stage == entries[name].stages[0])
            for name, p in root.named_parameters()
        ]

    def separate(self, root: nn.Module) -> None:
        """A parameter that two stages of this rank hold becomes two: each is sharded and reduced with its stage."""
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for part in root.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                if parameter in self.used:
                    copy = copies.setdefault(
                        parameter, nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    )
                    setattr(part, name, copy)
        self.used.update(root.parameters())

    def spread(self, root: nn.Module) -> tuple[set[str], list[nn.Module]]:
        """Experts over ep: the names of their parameters, and the modules."""
        if self.plan.ep == 1:
            return set(), []
        group = self.mesh.add("ep")
        self.mesh.add("expert_dp")
        names: set[str] = set()
        parts = []
        for name, part in root.named_modules():
            if any(style == "experts" and matches(name, pattern) for pattern, style in self.rows):
                names.update(spread_stacked(name, part, group) if group is not None else ())
                parts.append(part)
        return names, parts

    def reduce(self, stage: int) -> None:
        """Step 10: how the gradients of a stage are summed over data-parallel ranks."""
        parallel, plan, mesh, own = self.parallel, self.plan, self.mesh, self.parallel.stages[stage]
        wide = DTYPES[plan.grad_dtype] if parallel.dtype is not None and narrow(parallel.dtype) else None
        plain = [h for h in parallel.holdings[stage] if not isinstance(h.parameter, DTensor)]
        parts: list[Any] = [ShardedGradients(own, plan, [])] if isinstance(own, FSDPModule) else []
        for expert in (False, True):
            for dtype in sorted({h.parameter.dtype for h in plain if h.expert == expert}, key=str):
                only = {h.parameter for h in plain if h.expert == expert and h.parameter.dtype == dtype}
                group = mesh.group("expert_dp" if expert else "dp")
                overlap = plan.overlap is None or "dp" in plan.overlap
                parts.append(
                    LocalGradients(only, wide)
                    if group is None
                    else Buckets(own, group, plan.bucket, overlap=overlap, dtype=wide, only=only)
                )
        parallel.reductions.append(parts[0] if len(parts) == 1 else CombinedReduction(parts))

    def pipeline(self, seen: Recorded) -> Callable[[list[tuple[Any, Any]]], torch.Tensor]:
        """A function that runs micro-batches through all stages and returns this rank's part of the loss."""
        parallel, plan, mesh = self.parallel, self.plan, self.mesh
        made: dict[int, Pipeline] = {}
        chunks: list[tuple[Any, Any]] = []

        def around(i: int) -> AbstractContextManager[None]:
            return Fed(parallel.stages.values(), *chunks[i])

        def run(batch: list[tuple[Any, Any]]) -> torch.Tensor:
            chunks[:] = batch
            if len(batch) not in made:
                program = build_program(plan.schedule, plan.pp, len(batch), plan.virtual)
                stages = [
                    Stage(own, i, plan.stages, mesh, reduction, self.boundary(seen, i), self.boundary(seen, i + 1))
                    for (i, own), reduction in zip(parallel.stages.items(), parallel.reductions, strict=True)
                ]
                made[len(batch)] = Pipeline(program, stages, mesh, lambda output, target: output, around)
            numbers = torch.arange(len(batch), device=mesh.device)
            loss = made[len(batch)].run(numbers, numbers)
            return torch.zeros((), dtype=torch.float64, device=mesh.device) if loss is None else loss

        return run

    def boundary(self, seen: Recorded, stage: int) -> torch.Tensor:
        """The input of a stage, on the meta device: the number of a micro-batch, activations, or at the end the loss."""
        if stage == 0:
            return torch.empty(1, dtype=torch.long, device="meta")
        dtype = self.parallel.dtype
        if stage == len(self.layers):
            return torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
        x = seen.inputs[self.layers[stage][0]]
        shape = list(x.shape)
        if self.plan.sp and self.plan.tp > 1:
            shape[1 - self.parallel.batch_dim] //= self.plan.tp
        return torch.empty(shape, dtype=dtype or x.dtype, device="meta", requires_grad=True)


class Fed(AbstractContextManager[None]):
    """Gives every stage of this rank the inputs and targets of a micro-batch."""

    def __init__(self, stages: Any, inputs: Any, targets: Any) -> None:
        self.stages, self.given = list(stages), (inputs, targets)

    def __enter__(self) -> None:
        for stage in self.stages:
            stage.inputs, stage.targets = self.given

    def __exit__(self, *error: object) -> None:
        for stage in self.stages:
            stage.inputs = stage.targets = None
