"""`ParallelModule`: a user's module under a plan, on this rank.

    model = mw.parallelize(module, plan, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    loss = model.step(inputs, targets)          # backward, clip_norm, update

or, step by step: `backward` runs all micro-batches and completes the gradients, `clip_norm` returns their global norm, `update` lets the
optimizer take its step and zeroes the gradients. `save` and `resume` write and read sharded checkpoints, on this plan or another.

The loss of a step is the mean over the samples of all data-parallel ranks: each micro-batch's loss, a mean, is weighted by its samples, so that
ranks may have batches of different length. A mean over the targets that are not -100 (torch's `ignore_index`) is found by a trial when micro-batches
first have different numbers of them, and weighted by these. With `reduction="sum"` the loss is a sum (over tokens, say) and is divided by the `count`
of all ranks: exact for every kind of padding.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from meshwright.describe.optimizer import Optimizer
from meshwright.errors import MeshwrightError
from meshwright.models.initialise import box_of
from meshwright.parallel.data.zero import reshard
from meshwright.parallel.numerics.precision import LossScale, at_least_single, unscale
from meshwright.parallel.pieces import Piece
from meshwright.parallel.sharded import Sharded
from meshwright.parallel.user_module.batches import call, microbatches, prepared, samples_in, tensors_in
from meshwright.parallel.user_module.boxes import Entry
from meshwright.parallel.user_module.checks import check_cut, check_replicas, cuts_explained
from meshwright.parallel.user_module.samples import (
    ONE_MICROBATCH,
    ONE_PART,
    OWN_LOSS,
    TOKENS,
    UNEVEN,
    LossCheck,
    Trial,
    check_samples,
    depends_on_the_batch,
    mean_over,
    valid_targets,
)
from meshwright.parallel.user_module.whole import uses_batch
from meshwright.training.checkpoint.load import resume
from meshwright.training.checkpoint.save import checkpoint_group, run_description, save
from meshwright.training.checkpoint.state import state_of
from meshwright.training.optimizer.average import WeightAverage
from meshwright.training.optimizer.norm import clip, counted_squares
from meshwright.training.optimizer.schedule import set_learning_rate, share_at
from meshwright.training.user_module.loss import Loss, loss_value
from meshwright.units import Json


@dataclass
class Progress:
    """What a checkpoint saves (`checkpoint.state.SavableTrainer`)."""

    parallel: Sharded
    optimizer: Any
    scale: LossScale
    step: int
    average: WeightAverage | None = None
    skip_steps: set[int] = field(default_factory=set)


@dataclass(kw_only=True)
class ParallelModule(Sharded):
    """A user's module under a plan, on this rank."""

    entries: dict[str, Entry]  # by name of the module's state
    loss: Loss | None
    reduction: str
    batch_dim: int
    input_dtype: torch.dtype | None  # of forward and backward; None: as the module was
    settings: Optimizer | None = None  # of one of our optimizers: it has a schedule of the learning rate
    optimizer: torch.optim.Optimizer | None = None
    run_pipeline: Callable[[list[tuple[Any, Any]]], Tensor] | None = None
    check: bool = True  # whether steps are checked against one device
    synchronised: list[nn.Module] = field(default_factory=list)  # batch normalisations over all data-parallel ranks
    example: Any = None  # inputs of one micro-batch, on the meta device
    example_checked: bool = False  # a batch against its halves, when it was built
    accumulating: str = ""  # a buffer that each forward changes
    scale: LossScale = field(default_factory=LossScale)
    steps: int = 0  # updates so far
    batches: int = 0  # calls of `backward` so far
    weight: float = 1.0  # what the loss of a micro-batch is multiplied by
    # In a step whose micro-batches have different numbers of valid targets: what one of these is worth
    target_weight: float = 0.0
    padded: bool = False  # the step has targets without a loss
    over: str = ""  # what the loss is a mean over, once it matters: "samples" or "targets"
    loss_check: LossCheck | None = None
    loss_problem: MeshwrightError | None = None
    used: set[Tensor] = field(default_factory=set)  # parameters with a gradient in this step
    unused: set[str] = field(default_factory=set)  # parameters without one on any rank

    @property
    def module(self) -> nn.Module:
        """This rank's part of the module; of several stages the first."""
        return next(iter(self.stages.values()))

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of the batch among `data_ranks`, for example for a `DistributedSampler`."""
        return self.mesh.index("dp")

    @property
    def data_ranks(self) -> int:
        return self.mesh.size("dp")

    # A step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, for evaluation; with a pipeline no rank has all of it."""
        if self.run_pipeline is not None:
            raise MeshwrightError(
                "MW-OWN-004",
                "a module under a pipeline is called",
                why="Each rank has some of the layers: backward() and step() run micro-batches through all of them",
                fix="gather it with state_dict() and evaluate on one device",
            )
        return self.module(*args, **kwargs)

    def step(
        self, inputs: Any, targets: Any = None, *, count: float | None = None, clip: float | None = None
    ) -> Tensor:
        """One training step on this rank's share of the batch; returns the loss over all ranks."""
        loss = self.backward(inputs, targets, count=count)
        norm = self.clip_norm(clip)
        self.update(norm)
        return loss

    def backward(self, inputs: Any, targets: Any = None, *, count: float | None = None) -> Tensor:
        """Forward and backward of every micro-batch; gradients are complete and averaged afterwards. Returns the loss over all ranks.

        `inputs` are this rank's share of the batch: a tensor, a tuple (passed by position) or a dictionary (by name). Without a `loss` the
        module returns its own, as a tensor or in an attribute `loss`. Ranks of one tp or pp group are given the same share.
        """
        samples = samples_in(inputs, self.batch_dim)
        explicit = "microbatch" in self.plan.model_fields_set or self.run_pipeline is not None
        size = self.plan.microbatch if explicit else samples
        if self.example is not None and size < samples:
            check_cut(inputs, self.example, samples, self.batch_dim)
        chunks = microbatches(prepared(inputs, self.input_dtype, self.mesh.device), targets, size, self.batch_dim)
        with cuts_explained(inputs, samples) if len(chunks) > 1 else nullcontext():
            self.check_batch(chunks, size)
            self.set_scale(self.scale.value)
            self.weigh(chunks, size, samples if count is None else count)
            loss = self.run(chunks) if self.run_pipeline is None else self.run_pipeline(chunks)
        uses = self.uses()
        self.finish_gradients()
        problem = self.loss_problem or (self.loss_check.problem if self.loss_check is not None else None)
        if self.first_checked and self.mesh.size("tp") > 1:
            problem = check_replicas(self.pieces, self.mesh) or problem
        self.batches, self.loss_check = self.batches + 1, None
        counted = float(loss) if self.mesh.index("tp") == 0 else 0.0
        total_loss, problems, *ranks_using = self.summed([counted, float(problem is not None), *uses], "world")
        if problems:
            raise problem or depends_on_the_batch("another rank's part of the batch has another loss than its halves")
        self.note_unused(ranks_using)
        return total_loss / self.scale.value

    def weigh(self, chunks: list[tuple[Any, Any]], size: int, count: float) -> None:
        """Set what a micro-batch weighs in the step; and a target, if micro-batches, on all ranks, have different numbers of them per sample."""
        mean, targets = self.reduction == "mean", [(0, 0)]
        if mean and self.check:
            targets = [valid_targets(self.loss, goal if self.loss is not None else given) for given, goal in chunks]
        valid = [n for n, _ in targets]
        numbers = [count, size * len(chunks), sum(valid), sum(n * n / size for n in valid), sum(n for _, n in targets)]
        count, samples, total, squares, elements = self.summed([float(n) for n in numbers], "dp").tolist()
        self.weight = (size / samples if mean else 1.0 / (count or 1.0)) * self.scale.value
        uneven = squares * samples > total**2 * (1 + 1e-9)  # by Cauchy and Schwarz equal if all have the same number
        self.target_weight = self.scale.value / total if uneven else 0.0
        self.padded = elements > total
        if uneven and self.padded and self.loss is None:
            raise depends_on_the_batch(UNEVEN, OWN_LOSS)

    def run(self, chunks: list[tuple[Any, Any]]) -> Tensor:
        """Forward and backward of all micro-batches, without a pipeline."""
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for i, (inputs, targets) in enumerate(chunks):
            for reduction in self.reductions:
                reduction.begin(last=i == len(chunks) - 1)
            part = self.weighted_loss(call(self.module, inputs), targets)
            part.backward()
            loss += part.detach()
        return loss

    def weighted_loss(self, output: Any, targets: Any) -> Tensor:
        value, weight = loss_value(self.loss, output, targets), self.weight
        if self.loss is None:
            return value * weight
        if self.target_weight:
            self.over = self.over or mean_over(self.loss, output, targets, self.batch_dim)
            if self.padded and not self.over:
                self.loss_problem = depends_on_the_batch(UNEVEN, f"{TOKENS}; {ONE_PART}")
        if self.target_weight and self.over == "targets":
            valid = valid_targets(self.loss, targets)[0]
            weight = valid * self.target_weight
            if not valid:  # a mean over nothing is NaN, and so are its gradients
                value = torch.stack([t.sum() * 0.0 for t in tensors_in(output) if t.requires_grad]).sum()
        if self.loss_check is not None:
            self.loss_check.add(self.loss, output, targets)
        return value * weight

    def summed(self, values: list[float], axis: str) -> Tensor:
        return self.all_reduce(torch.tensor(values, dtype=torch.float64, device=self.mesh.device), axis)

    def clip_norm(self, most: float | None = None) -> Tensor:
        """The norm of the whole model's gradient, each element counted once; gradients are scaled down to `most` where it is larger."""
        norm = self.all_reduce(counted_squares(self.pieces).to(self.mesh.device), "world").sqrt() / self.scale.value
        unscale(self.pieces, self.scale.value)
        if most is not None:
            clip(self.pieces, norm, most, self.optimizer)
        return norm

    def update(self, norm: Tensor | None = None) -> None:
        """Let the optimizer take its step, and zero the gradients. Under fp16 a step of infinite `norm` is skipped."""
        if self.optimizer is None:
            raise MeshwrightError(
                "MW-OWN-004",
                "there is no optimizer to take a step",
                fix="parallelize(…, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))",
            )
        if norm is None or self.scale.accept(norm):
            if self.settings is not None:
                rate = self.settings.learning_rate * share_at(self.settings, self.steps)
                set_learning_rate(self.optimizer, rate)
            with self.updating():
                idle = [p.parameter for p in self.updated if p.name in self.unused]
                gradients = [p.grad for p in idle]
                for parameter in idle:
                    parameter.grad = None
                self.optimizer.step()
                for parameter, gradient in zip(idle, gradients, strict=True):
                    parameter.grad = gradient
        self.steps += 1
        self.used.clear()
        self.zero_gradients()

    # What the first step checks, and which parameters a step uses

    def check_batch(self, chunks: list[tuple[Any, Any]], size: int) -> None:
        """Raise where parts of a batch give something else than the whole; in the first step, by running a part and its halves."""
        if len(chunks) > 1 and any(uses_batch(part) for part in self.synchronised):
            raise depends_on_the_batch("batch normalisation with several micro-batches in a step", ONE_MICROBATCH)
        if self.check and (len(chunks) > 1 or self.data_ranks > 1):
            self.check_parts(chunks, size)
        if self.accumulating and (len(chunks) > 1 or self.plan.recompute == "full"):
            times = f"{len(chunks)} micro-batches" if len(chunks) > 1 else "forward and its repetition (recompute=full)"
            raise depends_on_the_batch(f"forward changes the buffer '{self.accumulating}', once for each of {times}")

    @property
    def first_checked(self) -> bool:
        return self.check and self.batches == 0

    def check_parts(self, chunks: list[tuple[Any, Any]], size: int) -> None:
        """The module in the first step; the loss in the steps 1, 2, 4, 8 and so on, because padding may begin late."""
        mean, number = self.reduction == "mean", self.batches + 1
        if self.loss is not None and number & (number - 1) == 0:
            self.loss_check = LossCheck(size, self.batch_dim, mean)
        if self.first_checked and self.run_pipeline is None and not self.example_checked:
            trial = Trial(self.module, chunks[0][0], self.batch_dim, mean, self.synchronised)
            self.accumulating = check_samples(trial, self.mesh.device, gradients=not self.mesh.sharded)
            reshard([self.module])

    def uses(self) -> list[float]:
        """By name of the state, whether the parameter has a gradient on this rank. A split backward writes gradients without calling hooks."""
        users = {
            p.name
            for p in self.pieces
            if (g := p.parameter.grad) is not None
            and (isinstance(g, DTensor) or p.parameter in self.used or bool(g.any()))
        }
        return [float(name in users) for name in self.entries]

    def note_unused(self, ranks_using: list[Tensor]) -> None:
        """Remember the parameters that no rank used: as on one device, the optimizer leaves them alone (weight decay would change them). Raise where
        data-parallel ranks used different ones under ZeRO: torch then sums gradients of different parameters."""
        counts = dict(zip(self.entries, (int(n) for n in ranks_using), strict=True))
        self.unused = {name for name, count in counts.items() if not count}
        for p in self.pieces:
            count, ranks = counts[p.name], self.mesh.size("world") // self.plan.pp
            if isinstance(p.parameter, DTensor) and len(self.entries[p.name].stages) == 1 and 0 < count < ranks:
                raise MeshwrightError(
                    "MW-OWN-010",
                    f"'{p.name}' has a gradient on {count} of {ranks} ranks",
                    why="Under ZeRO all ranks reduce the gradients of the same parameters: these would be summed with others",
                    fix="zero=0 (replicate instead of shard), or use the parameter on every rank (add 0 * its sum to the loss)",
                )

    # The state

    @property
    def whole_tensors(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry.shape) for name, entry in self.entries.items() if entry.source == name}

    @property
    def description(self) -> Json:
        root = getattr(self.module, "root", self.module)
        return {"module": type(root).__name__, "optimizer": type(self.optimizer).__name__}

    def buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """The buffers of the state, and whether this rank is the first that holds them."""
        first = not any(self.mesh.index(axis) for axis in ("dp", "tp"))
        for stage, module in self.stages.items():
            for name, buffer in getattr(module, "root", module).named_buffers():
                entry = self.entries.get(name)
                if entry is not None and entry.source == name:
                    yield name, buffer, first and stage == entry.stages[-1]  # which runs all code between layers

    def save(self, folder: str | Path) -> Path:
        """Save weights, buffers, optimizer states and residuals of compression under `folder`, each rank its part. All ranks call it."""
        training = Progress(self, self.optimizer, self.scale, self.steps)
        return save(Path(folder), state_of(training), run_description(training), self._checkpoint_group)[0]

    def resume(self, folder: str | Path) -> bool:
        """Continue from a checkpoint, or from the last good one of a folder, written on this plan or another. False: there is none."""
        training = Progress(self, self.optimizer, self.scale, self.steps)
        resumed = resume(training, Path(folder), self._checkpoint_group)
        self.steps = training.step
        return resumed is not None

    @cached_property
    def _checkpoint_group(self) -> distributed.ProcessGroup | None:
        """The group over which the ranks agree on checkpoints, made once: each group of gloo keeps its connections and threads."""
        return checkpoint_group()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """The full state of the module on every rank, as one device would save it; 16-bit parameters as their fp32 copies. All ranks call it."""
        parts = [(p, p.local) for p in self.updated]
        buffers = [(name, (0,) * buffer.ndim, buffer) for name, buffer, first in self.buffers() if first]
        return self._gathered(parts, buffers, set(self.entries))

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """The full gradient of every parameter, on every rank; all ranks call it after `backward`."""
        parts = [(p, p.gradient) for p in self.pieces if p.parameter.requires_grad]
        return self._gathered(parts, [], set(self.entries) - self.unused)

    def _gathered(
        self, parts: list[tuple[Piece, Tensor]], buffers: list[tuple[str, tuple[int, ...], Tensor]], names: set[str]
    ) -> dict[str, Tensor]:
        """The full tensors of the boxes that all ranks hold."""
        views = [(p.name, box, view) for p, local in parts for box, view in p.views(local)]
        counted = [*buffers, *((name, box.local_start, view) for name, box, view in views if box.first_copy)]
        out: dict[str, Tensor] = {}
        for name, entry in self.entries.items():
            if entry.source != name:
                out |= {name: out[entry.source]} if entry.source in out else {}
            elif name in names:
                wide = at_least_single(entry.dtype) if entry.dtype.is_floating_point else entry.dtype
                sent = torch.uint8 if wide == torch.bool else wide
                full = torch.zeros(entry.shape, dtype=sent, device=self.mesh.device)
                for _, start, view in (part for part in counted if part[0] == name):
                    box_of(full, start, view.shape).copy_(view)
                out[name] = self.all_reduce(full, "world").to("cpu", wide)
        return out

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of a full state, such as `state_dict` returns or one device saved."""
        missing, unexpected = sorted(set(self.entries) - set(state)), sorted(set(state) - set(self.entries))
        wrong = [n for n, e in self.entries.items() if n in state and state[n].shape != e.shape]
        if missing or unexpected or wrong:
            what = f"no '{missing[0]}'" if missing else f"an unknown '{unexpected[0]}'" if unexpected else ""
            raise MeshwrightError(
                "MW-OWN-005",
                f"the state has {what or f'{wrong[0]!r} of {tuple(state[wrong[0]].shape)}, not {tuple(self.entries[wrong[0]].shape)}'}",
                why="A state has every parameter and buffer of the module, whole",
            )
        for piece in self.updated:
            for box, view in piece.views(piece.local):
                view.copy_(box_of(state[piece.name], box.local_start, view.shape))
        if self.masters is not None:
            self.masters.give_parameters()
        reshard(self.stages.values())
        for name, buffer, _ in self.buffers():
            buffer.copy_(state[name])
