"""The steps of `parallelize` that are taken stage by stage: split, spread experts, release other stages' layers, recompute, shard, reduce; then
the pipeline over the finished stages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.describe.sharding import KV_COPIES
from meshwright.parallel.data.gathering import grouped
from meshwright.parallel.data.offload import offload_activations
from meshwright.parallel.data.reduction import Reduction, make_reduction
from meshwright.parallel.data.zero import shard_parts, zero_units
from meshwright.parallel.expert.dispatch import spread_stacked
from meshwright.parallel.pieces import Piece
from meshwright.parallel.pipeline import Pipeline, Stage
from meshwright.parallel.recompute import recompute
from meshwright.parallel.tensor.cutting import Split
from meshwright.parallel.tensor.split import matches, split
from meshwright.parallel.user_module.boxes import Cutting
from meshwright.parallel.user_module.stages import StageModule, copy_structure
from meshwright.parallel.user_module.whole import WholeModule
from meshwright.programs.pipelines import build as build_program


@dataclass
class Build(WholeModule):
    """Takes steps 5 to 10 for each stage of this rank, and collects what they make."""

    stages: dict[int, nn.Module] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    kv_copies: int = 1  # ranks that hold the same KV head
    used: set[nn.Parameter] = field(default_factory=set)

    def divide(self) -> None:
        for stage in [i for i in range(self.count) if self.ranks[i] == self.mesh.index("pp")]:
            self.add_stage(stage, self.module if self.count == 1 else copy_structure(self.module))

    def add_stage(self, stage: int, root: nn.Module) -> None:
        plan, mesh, dtype = self.plan, self.mesh, self.dtype or torch.float32
        done = self.split(root)
        names, experts = self.spread(root)
        own: nn.Module = root
        layers = list(root.get_submodule(self.path).children()) if self.path or self.spans[0] else []
        if self.seen is not None:
            assert self.routes is not None
            own = StageModule(root, self.seen, self.spans, stage, self.routes)
            own.expected = list(self.boundary(stage + 1)) if own.sends else []
            layers = own.layers
            self.separate(root)
            experts = [part for part in experts if any(True for _ in part.parameters())]
        if plan.recompute == "full":
            recompute(layers, plan.recompute_every, plan.recompute_layers or None)
        if plan.offloads_activations:
            offload_activations(layers, plan.offload_layers)
        units = grouped(layers, plan.wrap)
        if mesh.sharded:
            shard_parts(own, units, experts, mesh, plan, dtype)
        pieces = Cutting(mesh, self.entries, stage, done, names).pieces(root)
        self.reductions.append(make_reduction(own, mesh, plan, dtype, pieces, zero_units(own, units, experts)))
        self.stages[stage] = own
        self.pieces += pieces

    def split(self, root: nn.Module) -> Split | None:
        group, mesh, plan = self.mesh.group("tp"), self.mesh, self.plan
        if group is None:
            return None
        options: dict[str, Any] = {"copies": mesh.group(KV_COPIES), "sequence_dim": 1 - self.batch_dim}
        done = split(root, self.rows, group, plan.sp, form=plan.tp_form, strict=False, **options)
        if done.copies is not None:
            mesh.set_copies(done.copies)
            self.kv_copies = done.copies.size()
        return done

    def separate(self, root: nn.Module) -> None:
        """A parameter that two stages of this rank hold becomes two: each is sharded and reduced with its stage."""
        copies = {p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in root.parameters() if p in self.used}
        for part in root.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                setattr(part, name, copies.get(parameter, parameter))
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

    def pipeline(self) -> Callable[[list[tuple[Any, Any]]], Tensor]:
        """A function that runs micro-batches through all stages and returns this rank's part of the loss."""
        plan, mesh, made, seen = self.plan, self.mesh, dict[int, Pipeline](), self.seen
        assert seen is not None
        chunks: list[tuple[Any, Any]] = []

        @contextmanager
        def given(number: int) -> Iterator[None]:
            """Give every stage of this rank the inputs and targets of a micro-batch."""
            stages: list[Any] = list(self.stages.values())
            for stage in stages:
                stage.inputs, stage.targets = chunks[number]
            try:
                yield
            finally:
                for stage in stages:
                    stage.inputs = stage.targets = None

        def run(batch: list[tuple[Any, Any]]) -> Tensor:
            seen.check_inputs(batch[0][0])
            chunks[:] = batch
            if len(batch) not in made:
                program = build_program(plan.schedule, plan.pp, len(batch), plan.virtual)
                stages = [
                    Stage(own, i, plan.stages, mesh, reduction, self.boundary(i), self.boundary(i + 1))
                    for (i, own), reduction in zip(self.stages.items(), self.reductions, strict=True)
                ]
                made[len(batch)] = Pipeline(program, stages, mesh, lambda output, target: output, given)
            numbers = torch.arange(len(batch), device=mesh.device)
            loss = made[len(batch)].run(numbers, numbers)
            return torch.zeros((), dtype=torch.float64, device=mesh.device) if loss is None else loss

        return run

    def boundary(self, stage: int) -> tuple[Tensor, ...]:
        """What enters a stage, on the meta device: the number of a micro-batch, activations, or at the end the loss."""
        assert self.seen is not None
        assert self.routes is not None
        if stage == 0:
            return (torch.empty(1, dtype=torch.long, device="meta"),)
        if stage == len(self.spans):
            return (torch.empty((), dtype=torch.float64, device="meta", requires_grad=True),)
        return tuple(self.local(self.seen.tensor(port)) for port in self.routes.boundaries[stage])

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor between stages, in the dtype of forward."""
        shape, floating = list(tensor.shape), tensor.is_floating_point()
        if self.plan.sp and self.plan.tp > 1:
            shape[1 - self.batch_dim] //= self.plan.tp
        dtype = self.dtype if floating and self.dtype is not None else tensor.dtype
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=floating)
