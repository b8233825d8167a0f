"""Put a plan on a model, in the one fixed order, each step needing what the one before left.

    1  mesh       the ranks of every axis
    2  stages     this rank's pipeline stages, built on the meta device: no memory yet
    3  tensor     parameters become this rank's columns, rows and vocabulary: before sharding, which then sees less
    4  expert     each mixture of experts keeps the experts of this rank, and learns where the others are
    5  context    attention learns where the rest of the sequence is
    6  fp8        the products inside layers, where the workload computes in fp8
    7  recompute  layers, or attention's core, that backward makes again, their communication with them
    8  offload    what layers save for backward goes to the host: of a recomputed one its input
    9  zero       `fully_shard`, on what tensor parallelism left
   10  memory     the local shards are allocated and drawn from (seed, name): the same weights under every plan
   11  gradients  buckets, or shards that torch reduces
   12  pipeline   the program of actions over the finished stages

What comes out, `Parallel`, is what a training step needs: run the micro-batches, finish the gradients, and tell the
pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import distributed, nn

from meshwright.cost.recompute import resolve_recompute
from meshwright.describe import legality
from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.models import build, loss_function, width_of_output
from meshwright.models.dropout import Moment, drawing
from meshwright.parallel import exchange
from meshwright.parallel.context import sequence as context
from meshwright.parallel.data import offload, zero
from meshwright.parallel.data.local_sgd import LocalSgd
from meshwright.parallel.expert import dispatch as expert
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics import fp8, fp8_grouped
from meshwright.parallel.numerics.precision import Masters, at_least_single, masters_of
from meshwright.parallel.pieces import Piece, initialise, materialise, pieces_of
from meshwright.parallel.pipeline import Loss, Pipeline, Stage, check_split_products
from meshwright.parallel.recompute import memory_of, recompute_plan
from meshwright.parallel.tensor import split as tensor
from meshwright.parallel.tensor import vocabulary
from meshwright.parallel.tensor.tables import table_of
from meshwright.programs.pipelines import SCHEDULES
from meshwright.programs.pipelines.program import PipelineProgram


@dataclass
class Parallel:
    """A model under a plan, on this rank."""

    model: Model
    plan: Plan
    workload: Workload
    mesh: Mesh
    stages: dict[int, nn.Module]
    splits: dict[int, tensor.Split | None]
    pieces: list[Piece]
    reductions: list[zero.Reduction]
    loss: Loss
    pipeline: Pipeline | None = None
    places: torch.Tensor | None = None  # where this rank's tokens stand in the sequence; None: it has all of them
    tokens: torch.Tensor | float = 1.0  # global number of valid tokens of the step: every loss is divided by it
    scale: float = 1.0  # what every loss is multiplied by
    dtype: torch.dtype = torch.float32  # of forward and backward
    seed: int = 0
    moment: Moment | None = None  # the step, and this rank's samples of its global batch
    masters: Masters | None = None  # what the optimizer updates in the place of the pieces
    local: LocalSgd | None = None  # replicas that train alone between averages

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """All micro-batches of this rank's share of the batch. Returns its part of the loss; zero where it has none."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.pipeline is not None:
            part = self.pipeline.run(inputs, targets)
            return total if part is None else total + part
        (module,) = self.stages.values()
        chunks = list(zip(inputs.split(self.plan.microbatch), targets.split(self.plan.microbatch), strict=True))
        for i, (x, y) in enumerate(chunks):
            for reduction in self.reductions:
                reduction.begin(last=i == len(chunks) - 1)
            with self.drawing(i):
                output = module(x)
            loss = self.scaled_loss(output, y)
            loss.backward()
            total += loss.detach()
        return total

    def groups(self, axis: str) -> list[distributed.ProcessGroup]:
        """Over which a number is summed that all ranks of an axis must know; one after the other."""
        if self.local is not None:
            return self.local.groups(axis)
        group = self.mesh.group(axis)
        return [] if group is None else [group]

    def begin_step(self, step: int, samples: Sequence[int]) -> None:
        self.moment = Moment(self.seed, step, samples)

    def drawing(self, microbatch: int) -> AbstractContextManager[None]:
        """Forward of a micro-batch drops what is to be dropped of its own samples."""
        if self.moment is None:
            return nullcontext()
        start = microbatch * self.plan.microbatch
        return drawing(replace(self.moment, samples=self.moment.samples[start : start + self.plan.microbatch]))

    def scaled_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(output, target) / self.tokens

    def finish_gradients(self) -> None:
        """Wait for the sums over dp·cp, then sum over tp what is partial there, then the two copies of a tied
        embedding."""
        for reduction in self.reductions:
            reduction.finish()
        self._sum_partial("tp")
        self._sum_partial("kv_copies")
        self._sum_partial("expert_tp")
        self._sum_tied()

    def _sum_partial(self, axis: str) -> None:
        group = self.mesh.group(axis)
        gradients = [p.gradient for p in self.pieces if p.partial == axis]
        if group is not None and gradients:
            exchange.sum_together(gradients, group)

    def _sum_tied(self) -> None:
        ends = [p.gradient for p in self.pieces if p.tied]
        if len(ends) == 2:  # a V-shaped pipeline has its first and its last stage on one rank
            ends[0].add_(ends[1])
            ends[1].copy_(ends[0])
        elif ends and self.mesh.ends is not None:
            distributed.all_reduce(ends[0], group=self.mesh.ends)

    def balance_experts(self) -> dict[str, float]:
        """After the update: move balancing biases by the step's load. Returns how even the load was."""
        masters = self.masters.pieces if self.masters is not None else ()
        return expert.balance(self.stages.values(), self.pieces, self.mesh, masters) if self.model.experts else {}

    def set_tokens(self, tokens: torch.Tensor, scale: float) -> None:
        """The step's global number of valid tokens, of which there may be none, and what every loss is multiplied by."""
        self.tokens = tokens.clamp(min=1.0) / scale
        if scale != self.scale:
            for compressor in zero.compressors_of(self.reductions):
                compressor.feedback.rescale(scale / self.scale)
            self.scale = scale
        if self.model.experts:
            expert.scale_losses(self.stages.values(), scale)

    def give_up(self) -> None:
        """Forget what a step left behind that did not come to its end."""
        if self.pipeline is not None or any(isinstance(part, zero.Shards) for part in zero.parts_of(self.reductions)):
            raise MeshwrightError(
                "MW-PAR-006",
                "a step after one that failed",
                why="What a pipeline or ZeRO has under way cannot be taken back: gradients would be wrong",
                fix="apply the plan anew, and load the last checkpoint",
            )
        self.zero_gradients()
        expert.forget(self.stages.values())

    def zero_gradients(self) -> None:
        for reduction in self.reductions:
            reduction.zero()


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
    order: tuple[str, ...] = ("tp", "cp", "pp", "dp"),
) -> Parallel:
    """The model under the plan on this rank of an initialised process group."""
    legality.check(plan, model, workload, trainer=True)
    unsaid = plan.recompute == "auto" and not plan.recompute_budget
    plan = resolve_recompute(model, plan, workload, Stack(), memory_of(device) if unsaid else 0.0)
    mesh = Mesh(Layout(plan, order), rank, device)
    program = program_of(plan, workload)
    if program is not None and workload.precision == "fp8":
        check_split_products(plan, program)
    # Shards are their own masters: under ZeRO they are kept wide, and torch narrows what it gathers.
    kept = at_least_single(dtype) if mesh.sharded and plan.master else dtype
    stages = {i: build(model, layers).to(kept) for i, layers in stages_of(model, plan, program, mesh).items()}

    group, ring = mesh.group("tp"), mesh.group("cp")
    copies = mesh.add_copies(plan.tp // model.kv_groups) if model.kind == "transformer" else None
    places: torch.Tensor | None = None
    splits: dict[int, tensor.Split | None] = dict.fromkeys(stages)
    parted: dict[int, expert.Parted | None] = dict.fromkeys(stages)
    for i, module in stages.items():
        if group is not None:
            splits[i] = tensor.split(
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
            parted[i] = expert.spread(module, mesh, plan, model, plan.microbatches(workload))
        if model.attention_dropout and model.kind == "transformer":
            context.in_tiles(module)
        if ring is not None:
            places = context.put_on(module, model, ring, plan.cp_kind, workload.seq)
        if workload.precision == "fp8":
            fp8.put_on(module.layers.values(), [g for g in (group, ring) if g is not None])  # type: ignore[operator]
            fp8_grouped.put_on([module], mesh.group("expert_tp") if model.experts else None)
        recompute_plan(module, plan)
        if plan.offload in ("activations", "both"):
            offload.put_on(module.layers.values())  # type: ignore[operator]
        if mesh.sharded:
            zero.shard(module, mesh, plan, dtype)
        materialise(module, device)

    pieces = [piece for i, module in stages.items() for piece in pieces_of(module, mesh, splits[i], model, parted[i])]
    initialise(pieces, model, seed, scatter)
    alike = {p.parameter for p in pieces if group is not None and p.full_shape == p.parameter.shape}
    alike -= {p for module in stages.values() for part in expert.experts_of(module) for p in part.parameters()}
    exact = alike | {p.parameter for p in pieces if p.partial}
    reductions = [
        zero.reduction(module, mesh, plan, dtype, exact & set(module.parameters())) for module in stages.values()
    ]
    if model.tied and program is not None and program.rank_of[0] != program.rank_of[-1]:
        mesh.ends  # noqa: B018  every rank takes part in making these groups
    parallel = Parallel(
        model,
        plan,
        workload,
        mesh,
        stages,
        splits,
        pieces,
        reductions,
        choose_loss(model, mesh),
        places=places,
        dtype=dtype,
        masters=masters_of(pieces, plan),
        seed=seed,
    )
    if parallel.masters is not None:
        initialise(parallel.masters.pieces, model, seed, scatter)  # from the same numbers, not from their rounding
    if plan.average_every:
        LocalSgd(parallel)
    if program is not None:
        parallel.pipeline = make_pipeline(parallel, program, dtype)
    return parallel


def program_of(plan: Plan, workload: Workload) -> PipelineProgram | None:
    if plan.pp == 1:
        return None
    return SCHEDULES[plan.schedule](plan.pp, plan.microbatches(workload), plan.virtual)


def stages_of(model: Model, plan: Plan, program: PipelineProgram | None, mesh: Mesh) -> dict[int, range]:
    """The layers of each stage this rank holds, by stage."""
    if program is None:
        return {0: range(model.layers)}
    out, start = {}, 0
    for stage, count in enumerate(plan.stage_layers(model.layers)):
        if program.rank_of[stage] == mesh.index("pp"):
            out[stage] = range(start, start + count)
        start += count
    return out


def choose_loss(model: Model, mesh: Mesh) -> Loss:
    group = mesh.group("tp")
    if group is None or model.kind == "mlp":
        return loss_function(model)
    start, _ = tensor.boundaries(model.padded_vocab, group.size(), group.rank())
    return lambda logits, target: vocabulary.cross_entropy(logits, target, start, group)


def make_pipeline(parallel: Parallel, program: PipelineProgram, dtype: torch.dtype) -> Pipeline:
    model, plan, mesh = parallel.model, parallel.plan, parallel.mesh
    rows, seq = plan.microbatch, parallel.workload.seq // plan.cp
    tp = mesh.size("tp")
    if model.kind == "mlp":
        between = torch.empty(rows, model.hidden, dtype=dtype, device="meta", requires_grad=True)
        ends = (between.detach(), between)
    else:
        share = seq // tp if plan.sp else seq
        between = torch.empty(rows, share, model.hidden, dtype=dtype, device="meta", requires_grad=True)
        start, stop = tensor.boundaries(width_of_output(model), tp, mesh.index("tp"))
        logits = torch.empty(rows, seq, stop - start, dtype=dtype, device="meta", requires_grad=True)
        ends = (torch.empty(rows, seq, dtype=torch.long, device="meta"), logits)
    stages = []
    for (i, module), reduction in zip(parallel.stages.items(), parallel.reductions, strict=True):
        inputs = ends[0] if i == 0 else between
        outputs = ends[1] if i == program.stages - 1 else between
        stages.append(Stage(module, i, program.stages, mesh, reduction, inputs, outputs))
    return Pipeline(program, stages, mesh, parallel.scaled_loss, parallel.drawing)
