"""Apply a plan to a model, in one fixed order; each step builds on the one before.

    1  mesh       the ranks of every axis
    2  stages     this rank's pipeline stages, built on the meta device: no memory yet
    3  table      this rank's box of every parameter (`describe.sharding`)
    4  tensor     parameters become this rank's columns, rows and vocabulary: before ZeRO, which then shards what is left
    5  expert     each mixture of experts keeps the experts of this rank and sends tokens to the others
    6  context    attention gets the keys and values of the other ranks' tokens; then the weights of a quantised base become bytes
    7  fp8        the products inside layers, where the workload computes in fp8
    8  compile    layers become compiled graphs, if the run asks for it: with what is inside of them, without what follows
    9  recompute  layers, or attention's core, that backward recomputes, together with their communication
   10  offload    tensors saved for backward go to the host: of a recomputed layer its input
   11  zero       `fully_shard`, on what tensor parallelism left
   12  memory     the local shards are allocated and drawn from (seed, name), or read from files: the same under every plan
   13  gradients  buckets, or shards that torch reduces
   14  pipeline   the program of actions over the finished stages

The result, `Parallel`, has what a training step needs: run the micro-batches, complete the gradients, list the pieces.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.describe import legality
from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import TOKENS, boxes, degrees_of, even_range, parameters
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.models import DrawnWeights, Weights, build, width_of_output
from meshwright.models.dropout import sample_hashes
from meshwright.models.step_context import Targets, within
from meshwright.parallel.adapters import narrow_frozen, place_adapters, quantise_base
from meshwright.parallel.compile import Compilation, compile_stage, plan_compilation
from meshwright.parallel.data import reduction, zero
from meshwright.parallel.data.fp8_gather import Fp8Weights
from meshwright.parallel.data.local_sgd import LocalSgd
from meshwright.parallel.expert import balance
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics import fp8
from meshwright.parallel.numerics.precision import at_least_single, masters_of
from meshwright.parallel.pieces import initialise, materialise, pieces_of
from meshwright.parallel.pipeline import Loss, Pipeline, Stage, check_split_products
from meshwright.parallel.recompute import memory_of
from meshwright.parallel.sharded import Sharded
from meshwright.parallel.stages import (
    can_fuse_loss,
    choose_attention_kernel,
    choose_loss,
    choose_products,
    frozen_in,
    program_of,
    shard_stage,
    stages_of,
    wrap_layers,
)
from meshwright.predict.prediction import resolve_recompute
from meshwright.programs.pipelines.program import PipelineProgram


@dataclass(kw_only=True)
class Parallel(Sharded):
    """A model under a plan, on this rank."""

    model: Model
    loss: Loss
    pipeline: Pipeline | None = None
    position_ids: Tensor | None = None  # of this rank's tokens in the sequence; None: it has the whole sequence
    tokens: Tensor | float = 1.0  # global number of valid tokens of the step: every loss is divided by it
    step: int = -1  # the current one; -1 before the first
    samples_B: Tensor | None = None  # a hash of each of this rank's samples in this step: dropout draws from it
    documents_BS: Tensor | None = None  # the document of each token of these samples; None: attention is not limited
    targets: Tensor | None = None  # of the batch that runs
    fuses_loss: bool = False  # the head of the last stage returns the loss instead of logits
    compilation: Compilation = field(default_factory=Compilation)  # what is compiled, and what is not
    gathered_weights: Fp8Weights | None = None  # that ZeRO-3 gathers in fp8

    @property
    def whole_tensors(self) -> dict[str, tuple[int, ...]]:
        return {p.name: p.shape for p in parameters(self.model, range(self.model.layers)) if not p.frozen}

    @property
    def description(self) -> dict[str, Any]:
        return self.model.as_dict()

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run all micro-batches of this rank's share of the batch. Returns this rank's part of the loss; zero where the
        loss is computed on another pipeline stage."""
        self.quantise_weights()
        total, self.targets = torch.zeros((), dtype=torch.float64, device=self.mesh.device), targets
        if self.pipeline is not None:
            part = self.pipeline.run(inputs, targets)
            return total if part is None else total + part
        (module,) = self.stages.values()
        chunks = list(zip(inputs.split(self.plan.microbatch), targets.split(self.plan.microbatch), strict=True))
        for i, (x, y) in enumerate(chunks):
            for gradients in self.reductions:
                gradients.begin(last=i == len(chunks) - 1)
            with self.microbatch_scope(i):
                output = module(x)
            loss = self.scaled_loss(output, y)
            loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """This rank's part of the loss, summed over valid tokens: forward only, without dropout. Zero where the loss is computed
        on another pipeline stage."""
        self.documents_BS, self.targets, self.tokens = documents_BS, targets, 1.0
        self.quantise_weights()
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for module in self.stages.values():
            module.eval()
        if self.pipeline is not None:
            part = self.pipeline.evaluate(inputs, targets, self.scaled_loss)
            total = total if part is None else total + part
        else:
            (module,) = self.stages.values()
            size = self.plan.microbatch
            for i, (x, y) in enumerate(zip(inputs.split(size), targets.split(size), strict=True)):
                with self.microbatch_scope(i):
                    total += self.scaled_loss(module(x), y)
        for module in self.stages.values():
            module.train()
        zero.reshard(self.stages.values())
        return total

    def begin_step(self, step: int, samples: Sequence[int], documents_BS: Tensor | None = None) -> None:
        """Set the inputs of dropout and attention masks: the samples of this step, and the documents of their tokens."""
        self.step, self.samples_B = step, sample_hashes(self.seed, step, samples, torch.device(self.mesh.device))
        self.documents_BS = documents_BS

    def quantise_weights(self) -> None:
        """Bring the weights of fp8 products to fp8, where that is done once per step."""
        fp8.quantise_weights(self.stages.values())
        if self.gathered_weights is not None:
            self.gathered_weights.refresh()

    def microbatch_scope(self, microbatch: int) -> AbstractContextManager[Any]:
        """A context in which dropout draws for the samples of this micro-batch, and attention stays in their documents."""
        rows = slice(microbatch * self.plan.microbatch, (microbatch + 1) * self.plan.microbatch)
        targets = None
        if self.fuses_loss and self.targets is not None:
            targets = Targets(self.targets[rows], torch.as_tensor(1.0 / self.tokens, device=self.mesh.device))
        samples_B, documents_BS = (x if x is None else x[rows] for x in (self.samples_B, self.documents_BS))
        return within(samples_B=samples_B, documents_BS=documents_BS, targets=targets)

    def scaled_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output if self.fuses_loss else self.loss(output, target) / self.tokens

    def expert_loads(self) -> balance.Loads | None:
        """After backward: the step's load of every layer with experts."""
        return balance.loads(self.stages.values(), self.mesh) if self.model.experts else None

    def balance_experts(self, loads: balance.Loads | None, updated: bool = True) -> dict[str, float]:
        """After the update: move balancing biases by the step's load, unless the update was skipped. Returns the metrics of the load."""
        masters = self.masters.pieces if self.masters is not None else ()
        return {} if loads is None else balance.balance(loads, self.pieces if updated else [], self.mesh, masters)

    def set_tokens(self, tokens: Tensor, scale: float) -> None:
        """Set the global number of valid tokens of the step, which may be 0, and the loss scale."""
        self.tokens = tokens.to(at_least_single(self.dtype)).clamp(min=1.0) / scale
        self.set_scale(scale)
        if self.model.experts:
            balance.scale_losses(self.stages.values(), scale)

    def abort_step(self) -> None:
        """Reset buffers and messages after a step that raised."""
        sharded = any(isinstance(part, zero.ShardedGradients) for part in reduction.reductions_in(self.reductions))
        if self.pipeline is not None or sharded:
            raise MeshwrightError(
                "MW-PAR-006",
                "a step after one that failed",
                why="Transfers of a pipeline or of ZeRO that are in flight cannot be cancelled: gradients would be wrong",
                fix="apply the plan again, and load the last checkpoint",
            )
        self.zero_gradients()
        balance.reset_load(self.stages.values())


def apply(
    model: Model,
    plan: Plan,
    workload: Workload,
    rank: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scatter: bool = False,
    weights: Weights | None = None,
    order: tuple[str, ...] = ("tp", "cp", "pp", "dp"),
    compile: str = "off",
) -> Parallel:
    """Build the model under the plan on this rank of an initialised process group. Its initial `weights` are drawn from the seed by
    default. `compile`: see `parallel.compile`."""
    plan, program = resolve_plan(model, plan, workload, device)
    mesh, degrees = Mesh(Layout(plan, order), rank, device), degrees_of(model, plan)
    copies = mesh.add_copies(degrees.kv_copies)
    compilation = plan_compilation(compile, device, plan, model, program, mesh.sharded)
    fuses_loss = can_fuse_loss(model, mesh, program)
    parallel = Parallel(
        model=model,
        plan=plan,
        workload=workload,
        mesh=mesh,
        loss=choose_loss(model, mesh, compilation),
        dtype=dtype,
        seed=seed,
        width=model.hidden,
        degrees=degrees,
        fuses_loss=fuses_loss,
        compilation=compilation,
    )
    # Under ZeRO the shards are the masters: they are kept in at least float32, and torch narrows what it gathers.
    kept = at_least_single(dtype) if mesh.sharded and plan.master else dtype
    if plan.zero == 3 and plan.gather_dtype == "fp8" and mesh.sharded:
        parallel.gathered_weights = Fp8Weights(mesh, dtype)
    for i, layers in stages_of(model, plan, program, mesh).items():
        module = parallel.stages[i] = build(model, layers).to(kept)
        if model.adapter.on:
            narrow_frozen(module, dtype)
        table = boxes(model, plan, mesh.layout, rank, layers, frozen_in(module))
        parallel.position_ids = shard_stage(module, table, model, plan, workload, mesh, copies)
        packings = quantise_base(module, table, model)
        place_adapters(module, table, mesh, plan)
        choose_products(module, device, dtype, program, fuses_loss)
        compile_stage(module, compilation, (workload.seq // plan.cp, dtype, torch.device(device)))
        wrap_layers(module, plan)
        if mesh.sharded:
            whole = {box.name for box in table if box.parameter.frozen and plan.zero < 3}
            zero.shard(module, mesh, plan, dtype, whole)
        materialise(module, device)
        if parallel.gathered_weights is not None:
            parallel.gathered_weights.add(module)
        own, units = pieces_of(module, table, packings), zero.units_of_model(module, plan)
        parallel.reductions.append(reduction.make_reduction(module, mesh, plan, dtype, own, units))
        parallel.pieces += own
    if model.tied and program is not None:  # creating the groups is a collective of all ranks
        parallel.tied = [(TOKENS, mesh.ends if program.rank_of[0] != program.rank_of[-1] else None)]
    set_weights(parallel, weights or DrawnWeights(model, seed, scatter))
    if program is not None:
        parallel.pipeline = make_pipeline(parallel, program, dtype)
    choose_attention_kernel(model, plan, workload, dtype, device)
    return parallel


def set_weights(parallel: Parallel, weights: Weights) -> None:
    """Give all pieces their first weights. Each is read once: masters get the numbers themselves, and the parameters their rounding."""
    plan = parallel.plan
    masters = parallel.masters = masters_of(parallel.pieces, plan)
    initialise(parallel.updated, weights)
    if masters is not None:
        masters.give_parameters()
        masters.moved_bytes = 0  # it counts the copies of training steps
    if plan.average_every:
        trained = [piece for piece in parallel.updated if not piece.frozen]
        parallel.local = LocalSgd(parallel.mesh, plan.average_every, trained, masters, parallel.reductions)


def resolve_plan(model: Model, plan: Plan, workload: Workload, device: str) -> tuple[Plan, PipelineProgram | None]:
    """Raise if the plan cannot be trained. Returns it with the recompute that fits the device, and its pipeline program."""
    legality.check(plan, model, workload, trainer=True)
    fit_device = plan.recompute == "auto" and not plan.recompute_budget
    plan = resolve_recompute(model, plan, workload, Stack(), memory_of(device) if fit_device else 0.0)
    program = program_of(plan, workload)
    if program is not None and workload.precision == "fp8":
        check_split_products(plan, program)
    return plan, program


def make_pipeline(parallel: Parallel, program: PipelineProgram, dtype: torch.dtype) -> Pipeline:
    """The pipeline over the finished stages, given the shapes between them."""
    model, plan, mesh = parallel.model, parallel.plan, parallel.mesh
    seq, tp = parallel.workload.seq // plan.cp, mesh.size("tp")

    def activations(*shape: int) -> Tensor:
        return torch.empty(plan.microbatch, *shape, dtype=dtype, device="meta", requires_grad=True)

    if model.kind == "mlp":
        between = last = activations(model.hidden)
        first = between.detach()
    else:
        between = activations(seq // tp if plan.sp else seq, model.hidden)
        first = torch.empty(plan.microbatch, seq, dtype=torch.long, device="meta")
        start, stop = even_range(width_of_output(model), tp, mesh.index("tp"))
        last = activations(seq, stop - start)
        if parallel.fuses_loss:
            last = torch.empty((), dtype=at_least_single(dtype), device="meta", requires_grad=True)
    edges = [first, *[between] * (program.stages - 1), last]
    stages = [
        Stage(module, i, program.stages, mesh, gradients, edges[i], edges[i + 1])
        for (i, module), gradients in zip(parallel.stages.items(), parallel.reductions, strict=True)
    ]
    return Pipeline(program, stages, mesh, parallel.scaled_loss, parallel.microbatch_scope)
