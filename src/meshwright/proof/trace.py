"""Train the small model of a proof on one rank and record every loss, norm, gradient and parameter of every step.

The step is that of `train`. Gradients are recorded after reduction and before clipping, parameters after the update. An `Observer` counts
collectives and memory of the last step; it slows the step but does not change it. The first step is not representative (it
allocates optimizer states and connects pipeline stages), so a proof of one step runs a second one for the observer.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from meshwright.describe.layout import Layout
from meshwright.describe.plan import Plan
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import Workload
from meshwright.models.initialise import UnsetWeights
from meshwright.models.step_context import current
from meshwright.parallel.apply import Parallel, apply
from meshwright.parallel.compile import graph_counts
from meshwright.parallel.context.sequence import is_zigzag, runs_of
from meshwright.parallel.numerics.precision import DTYPES, at_least_single
from meshwright.parallel.pieces import Piece
from meshwright.proof.emulation.fp8_products import emulate_fp8
from meshwright.proof.emulation.lossy_sum import Emulated, lossy_sums
from meshwright.proof.emulation.per_rank import copy_heads
from meshwright.proof.emulation.update import role_of
from meshwright.proof.interruption import Reads, interrupt, samples_of, train_resumed
from meshwright.proof.oracle.step import Oracle, lacks_oracle, wrong_rates, wrong_weights
from meshwright.proof.records import Activations, Job, PieceTrace, Trace, Update
from meshwright.proof.traffic import compare_traffic, predicted_memory
from meshwright.training.data.samples import RandomSamples
from meshwright.training.hooks import Hook, StepRecord
from meshwright.training.launch.rank import RankContext, function_of
from meshwright.training.loop import Trainer
from meshwright.training.measure.observe import Observer
from meshwright.training.worker import AHEAD

NARROW = ("bf16", "fp16")
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SENSITIVE = {
    *("exp", "log", "logsumexp", "log_softmax", "softmax", "rsqrt", "sqrt", "pow", "cos", "sin"),
    *("norm", "linalg_vector_norm", "foreach_norm", "mean", "var", "cumsum"),
}
LOSS_SCALE = 2.0**10  # of fp16: the gradients of a small model overflow at the scale that large ones start with


def record(context: RankContext, job: Job) -> dict[str, Trace]:
    """Run on every rank: one trace for each dtype."""
    if job.prepare:
        function_of(job.prepare)()
    return {dtype: record_one(context, job, dtype) for dtype in job.dtypes}


def record_one(context: RankContext, job: Job, dtype: str) -> Trace:
    if job.emulated is not None and job.emulated.average_every:
        return record_replicas(context, job, dtype, job.emulated)
    phases = job.phases if dtype == job.dtypes[0] else None
    starts = phases is not None and phases.start is not None
    trainer, trace = begin(context, job, dtype, UnsetWeights() if starts else None)
    parallel = trainer.parallel
    if job.emulated is not None:
        trainer.indices = in_flight_together(job.emulated, job.workload)
        scaled = job.workload.precision == "fp8" and job.emulated.dp > 1
        if job.emulated.lossy or scaled:  # each rank compresses, or scales, the gradient of its tokens
            layout = Layout(job.emulated, job.order)
            emulated = Emulated(parallel, layout, job.summed.get(dtype, []), job.backwards)
            parallel.reductions = [emulated]  # type: ignore[list-item]
    if job.perturbed:
        perturb(parallel)
    if job.updates and dtype == job.dtypes[-1]:
        UpdateRecorder(trainer, trace)
    if job.oracle and dtype == "fp64":
        repeat_by_formulas(trainer, trace, job)
    if job.plan.lossy:
        trace.summed = lossy_sums(parallel)
    trainer.skip_steps |= set(job.skipped)
    if job.activations_of >= 0:
        trainer.hooks.append(ActivationRecorder(trace, job))
    phases = phases if parallel.compilation.mode == "off" else None
    if phases is not None:
        interrupt(trainer, trace, job, phases)
    watch = job.watch and dtype == job.dtypes[-1]
    narrow = NarrowOperations() if dtype in NARROW and parallel.compilation.mode == "off" else nullcontext()
    with narrow:
        list(trainer.until(max(job.steps - watch, 1)))
    trace.narrow = sorted(narrow.seen) if isinstance(narrow, NarrowOperations) else []
    trace.tied = next((r.tied for r in parallel.reductions if isinstance(r, Emulated)), trace.tied)
    if phases is not None:
        trainer.loader.close()
    if phases is not None and phases.resumes:
        second, trace.resumed = begin(context, job, dtype, UnsetWeights())
        train_resumed(second, trace.resumed, job, phases)
        second.loader.close()
    if watch:
        if job.steps == 1:
            trainer.hooks.clear()
        with Observer(trainer) as observer:
            trainer.train_step()
        trace.observed = observer.observed()
        trace.traffic = compare_traffic(parallel, trace.observed)
        trace.predicted_bytes = predicted_memory(parallel)
    trace.compiled = parallel.compilation.mode
    if trace.compiled != "off":
        trace.graphs, trace.graph_breaks = graph_counts()
    return trace


@torch.no_grad()
def perturb(parallel: Parallel) -> None:
    """Move every weight by one unit in its last place, up and down in turn."""
    for piece in parallel.pieces:
        if piece.packing is not None:
            continue
        signs = 1.0 - 2.0 * (torch.arange(piece.local.numel(), device=piece.local.device) % 2)
        piece.local.mul_(1 + signs.view_as(piece.local).to(piece.local) * torch.finfo(piece.local.dtype).eps)
    for source, master in parallel.masters.pairs if parallel.masters else ():
        master.local.copy_(source.local)


class NarrowOperations(TorchDispatchMode):
    """Notes which operations give 16-bit results that should be wide: sums of many terms and functions that enlarge rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if name in SENSITIVE and isinstance(output, torch.Tensor) and output.dtype in (torch.bfloat16, torch.float16):
            self.seen.add(name)
        return output


def begin(context: RankContext, job: Job, dtype: str, weights: UnsetWeights | None = None) -> tuple[Trainer, Trace]:
    """A trainer, and the trace that records its steps."""
    reads: Reads = {}
    ahead = AHEAD if job.phases is not None and job.phases.trains_on_data and not job.reference else 0
    # A checkpoint of adapters does not contain their frozen base: it is drawn again.
    parallel = build_parallel(context, job, dtype, None if job.model.adapter.on else weights)
    trainer = Trainer(parallel, samples_of(job, reads), job.optimizer, ahead)
    trace = recorded(trainer, context.rank, dtype)
    trace.reads = reads
    return trainer, trace


def build_parallel(context: RankContext, job: Job, dtype: str, weights: UnsetWeights | None = None) -> Parallel:
    """The plan on the model; a reference emulates fp8 products with separate code."""
    emulates = job.reference and job.workload.precision == "fp8"
    parallel = apply(
        job.model,
        job.plan,
        job.workload.but(precision="fp32", scaling="tensor") if emulates else job.workload,
        context.rank,
        device=context.device,
        dtype=DTYPES[dtype],
        seed=job.seed,
        scatter=True,
        weights=weights,
        order=job.order,
        compile=job.compile,
    )
    if emulates:
        parallel.workload = job.workload
        for module in parallel.stages.values():
            emulate_fp8(module, job.workload.scaling)
    copy_heads(parallel.stages.values(), job.kv_copies)
    return parallel


def recorded(trainer: Trainer, rank: int, dtype: str) -> Trace:
    """Return a trace that a hook of the trainer fills in the following steps."""
    parallel = trainer.parallel
    if trainer.scale.dynamic:
        trainer.scale.value = LOSS_SCALE
    kind, pieces = OPTIMIZERS[parallel.workload.optimizer], []
    for piece in parallel.pieces:
        role = role_of(piece.name, len(piece.full_shape))
        traced = PieceTrace(piece.name, piece.start, role=role, orthogonal=kind.by_matrix and role == "matrix")
        traced.epsilon = trainer.settings.epsilon if kind.divides and not traced.orthogonal else 0.0
        traced.initial, traced.partial = as_array(piece.numbers), piece.box.partial
        pieces.append(traced)
    trace = Trace(rank, dtype, parallel.mesh.coordinates, pieces=pieces)
    trainer.hooks.append(TraceRecorder(trace))
    return trace


def repeat_by_formulas(trainer: Trainer, trace: Trace, job: Job) -> None:
    """Compare the learning rates of the run, and let plain formulas repeat the following steps."""
    trace.plug_in = lacks_oracle(job.model, job.workload)
    if trace.plug_in:
        return
    oracle = Oracle(job.model, job.workload, job.optimizer, job.seed, job.plan.microbatch, job.activations_of)
    trainer.hooks.append(oracle)
    trace.oracle, trace.wrong_rates = oracle.trace, list(wrong_rates(trainer, job.schedule))
    trace.wrong_weights = list(wrong_weights(trace.pieces, job.model))


class TraceRecorder(Hook):
    """Records the gradients before clipping and the parameters after the update of every step."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def after_gradients(self, trainer: Trainer) -> None:
        for piece, kept in zip(trainer.parallel.pieces, self.trace.pieces, strict=True):
            kept.gradients.append(as_array(piece.gradient) / trainer.scale.value)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self.trace.losses.append(record.loss)
        self.trace.norms.append(record.gradient_norm)
        for piece, kept in zip(trainer.parallel.pieces, self.trace.pieces, strict=True):
            kept.parameters.append(as_array(piece.numbers))


class ActivationRecorder(Hook):
    """Records one step: the batch, the output of every module, the loss of each micro-batch, and on one device the gradients of each sample."""

    def __init__(self, trace: Trace, job: Job) -> None:
        self.trace, self.job, self.handles = trace, job, list[RemovableHandle]()
        self.by_sample = job.reference and job.plan.microbatch == 1
        self.begun: dict[nn.Module, int] = {}  # micro-batches by stage
        self.now: list[int] = []  # the rows of the batch that a stage computes
        self.rows: dict[tuple[int, ...], list[int]] = {}  # by the hashes of their samples
        self.sums: list[list[np.ndarray]] = []  # the gradients of all pieces before each sample, and at the end

    def before_step(self, trainer: Trainer) -> None:
        if trainer.step != self.job.activations_of:
            return
        parallel, size = trainer.parallel, trainer.parallel.plan.microbatch
        noted = self.trace.activations = Activations(self.job.workload.seq, positions_of(parallel))
        first = parallel.mesh.index("dp") * len(trainer.indices)
        # Samples and positions follow from a rank's place: those that it claims may be the bug.
        true = list(trainer.indices if self.job.reference else range(first, first + len(trainer.indices)))

        def hashes() -> tuple[int, ...]:
            return () if (samples_B := current().samples_B) is None else tuple(samples_B.tolist())

        def samples() -> list[int]:
            later = current().recomputing and parallel.pipeline is not None  # other micro-batches ran since its forward
            return [true[row] for row in (self.rows.get(hashes(), []) if later else self.now)]

        def begin(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            at = self.begun[module] = self.begun.get(module, -1) + 1
            self.now = list(range(len(true))[at * size : (at + 1) * size])
            self.rows.setdefault(hashes(), self.now)
            if self.by_sample:
                self.sums.append([as_array(piece.gradient) for piece in parallel.pieces])
            if parallel.targets is not None:
                noted.note("targets", samples(), parallel.targets[self.now])
            if module is parallel.stages.get(0):
                noted.note("inputs", samples(), inputs[0].detach())

        def end(name: str, output: Any) -> None:
            if isinstance(output, torch.Tensor) and name:
                noted.note(name, samples(), output, current().recomputing)
            elif isinstance(output, torch.Tensor) and output.ndim == 0:  # a head that computes the loss
                noted.losses[tuple(samples())] = float(output.detach())

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            value, at = plain(output, target), len(noted.losses) * size
            noted.losses[tuple(true[at : at + len(target)])] = float((value / parallel.tokens).detach())
            return value

        for module in parallel.stages.values():
            self.handles.append(module.register_forward_pre_hook(begin))
            for name, part in module.named_modules():
                if not isinstance(part, nn.Identity):
                    self.handles.append(part.register_forward_hook(lambda m, x, y, name=name: end(name, y)))
        plain = self.plain_loss = parallel.loss
        parallel.loss = loss

    def after_gradients(self, trainer: Trainer) -> None:
        if trainer.step != self.job.activations_of:
            return
        for handle in self.handles:
            handle.remove()
        trainer.parallel.loss = self.plain_loss
        if self.trace.activations is None or not self.sums:
            return
        self.sums.append([as_array(piece.gradient) for piece in trainer.parallel.pieces])
        for i, piece in enumerate(trainer.parallel.pieces):
            parts = [after[i] - before[i] for before, after in pairwise(self.sums)]
            self.trace.activations.by_sample[piece.name] = dict(zip(trainer.indices, parts, strict=True))


def positions_of(parallel: Parallel) -> list[int] | None:
    """The positions of a context-parallel rank's tokens; None: the whole sequence."""
    seq, ranks, index = parallel.workload.seq, parallel.mesh.size("cp"), parallel.mesh.index("cp")
    zigzag = ranks > 1 and is_zigzag(parallel.model, parallel.plan.cp_kind, seq, ranks)
    return [position for run in runs_of(seq, ranks, zigzag)[index] for position in run] if ranks > 1 else None


class UpdateRecorder(Hook):
    """Records every update: what the optimizer was given, and its result; None where a piece had none, and the master weight where there is one."""

    def __init__(self, trainer: Trainer, trace: Trace) -> None:
        self.updated, self.trace, self.parallel = trainer.parallel.updated, trace, trainer.parallel
        trainer.optimizer.register_step_pre_hook(self.before_update)
        trainer.optimizer.register_step_post_hook(self.after_update)
        trainer.hooks.append(self)

    def trained(self) -> Iterator[tuple[Piece, Piece, PieceTrace]]:
        """Each piece that is updated, the same in the model, and its record."""
        for piece, own, kept in zip(self.updated, self.parallel.pieces, self.trace.pieces, strict=True):
            if piece.parameter.requires_grad:
                yield piece, own, kept

    def before_update(self, optimizer: Any, *_: object) -> None:
        clips = getattr(optimizer, "gradient_factor", None)  # of an optimizer that clips inside its update
        for piece, own, kept in self.trained():
            dtypes = NAMES[piece.local.dtype], NAMES[own.local.dtype]
            gradient = as_array(piece.gradient if clips is None else piece.gradient * clips)
            kept.updates.append(Update(*dtypes, as_array(piece.local), gradient, np.empty(0)))

    def after_update(self, *_: object) -> None:
        for piece, _own, kept in self.trained():
            made = kept.updates[-1]
            assert made is not None
            made.after = as_array(piece.local)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        averages = trainer.average.values if trainer.average is not None else []
        trained = [kept for kept, piece in zip(self.trace.pieces, self.updated, strict=True) if not piece.frozen]
        for kept, average in zip(trained, averages, strict=False):
            kept.averages.append(as_array(average))
        for piece, kept in zip(self.updated, self.trace.pieces, strict=True):
            if len(kept.updates) <= record.step:
                kept.updates.append(None)
            elif trainer.masters is not None and (made := kept.updates[-1]) is not None:
                made.master = as_array(piece.local)


def record_replicas(context: RankContext, job: Job, dtype: str, plan: Plan) -> Trace:
    """One device emulates local SGD: a trainer for each replica, and their average every few steps."""
    share = job.workload.batch // plan.replicate
    trainers = [
        Trainer(
            build_parallel(context, job, dtype),
            RandomSamples(job.model, job.workload.seq, job.seed, job.documents),
            job.optimizer,
        )
        for _ in range(plan.replicate)
    ]
    for trainer in trainers if job.perturbed else ():
        perturb(trainer.parallel)
    traces = [recorded(trainer, i, dtype) for i, trainer in enumerate(trainers)]
    tokens = [0] * len(trainers)
    for step in range(job.steps):
        for i, trainer in enumerate(trainers):
            trainer.indices = range(i * share, (i + 1) * share)
            tokens[i] += trainer.train_step().tokens
        if (step + 1) % plan.average_every == 0:
            average(trainers, tokens)
            tokens = [0] * len(trainers)
            for trainer, trace in zip(trainers, traces, strict=True):
                for piece, kept in zip(trainer.parallel.pieces, trace.pieces, strict=True):
                    kept.parameters[-1] = as_array(piece.local)
    return Trace(context.rank, dtype, replicas=traces)


def in_flight_together(plan: Plan, workload: Workload) -> list[int]:
    """The samples of a batch in the order of micro-batches: first those of the first micro-batch of all ranks, which are routed together."""
    share, size = workload.batch // plan.dp, plan.microbatch
    return [r * share + i + k for i in range(0, share, size) for r in range(plan.dp) for k in range(size)]


@torch.no_grad()
def average(trainers: list[Trainer], tokens: list[int]) -> None:
    """Replace every parameter by its mean over replicas, weighted by tokens; with masters, average the masters and round them."""
    updated = [t.parallel.updated for t in trainers]
    for copies in zip(*updated, strict=True):
        mean = sum(piece.local * (count / sum(tokens)) for piece, count in zip(copies, tokens, strict=True))
        for piece in copies:
            piece.local.copy_(mean)
    for trainer, pieces in zip(trainers, updated, strict=True):
        for piece, master in zip(trainer.parallel.pieces, pieces, strict=True):
            if piece is not master:
                piece.local.copy_(master.local)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().to(at_least_single(tensor.dtype)).numpy().copy()
