"""Train a user's module on one device with plain torch, or under a plan on a rank, and record losses, norms, gradients, parameters and buffers.

The module is trained in float64. Both sides start from the same weights (`make` is called under one seed) and take the same batches, AdamW with
weight decay, and clipping. What would hide a bug or a comparison is changed on both sides:

    constants    a parameter whose elements are all equal (a bias at zero, a norm at one) gets small random values
    dropout      off: masks are drawn per rank. Other random numbers in `forward` are refused
    float32      a part that computes in float32 whatever its inputs are (some norms and losses do) rounds differently on ranks: the bound is then
                 the rounding error of one device in float32
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.overrides import TorchFunctionMode

from meshwright.describe.optimizer import Optimizer
from meshwright.errors import MeshwrightError
from meshwright.parallel.user_module.batches import call, map_tensors, microbatches, samples_in, tensors_in
from meshwright.proof.records import PieceTrace, Trace
from meshwright.proof.trace import as_array
from meshwright.proof.user_module.code import load, one_sentence
from meshwright.proof.user_module.job import FACTORY, ModuleJob, Reference
from meshwright.training.launch.rank import RankContext
from meshwright.training.machine import available_memory
from meshwright.training.user_module.loss import loss_value
from meshwright.training.user_module.module import ParallelModule
from meshwright.training.user_module.parallelize import parallelize, takes_batch_first
from meshwright.units import format_bytes

CLIP = 1.0
make_optimizer = partial(torch.optim.AdamW, lr=Optimizer().learning_rate)
NOISE = 0.05  # standard deviation of what is added to a constant parameter


@dataclass
class Setting:
    """The user's module, batch and loss, imported on this rank, in one dtype."""

    job: ModuleJob
    device: str
    dtype: torch.dtype
    make: Callable[[], nn.Module]
    example: Any
    loss: Callable[[Any, Any], torch.Tensor] | None

    @classmethod
    def of(cls, job: ModuleJob, device: str, dtype: torch.dtype = torch.float64) -> Setting:
        torch.set_default_dtype(dtype)  # what `forward` creates without a dtype
        make, example, loss = load(job.make), load(job.example), load(job.loss)
        if not callable(make):
            raise MeshwrightError("MW-VERIFY-004", f"{job.name} is {kind(make)}, not a function", fix=FACTORY)
        if loss is not None and not callable(loss):
            raise MeshwrightError("MW-VERIFY-004", f"loss is {kind(loss)}, not a function", fix=LOSS)
        if example is None:
            raise MeshwrightError("MW-VERIFY-004", "there is no example", why=BATCH, fix=EXAMPLE)
        return cls(job, device, dtype, make, example, loss.to(device) if isinstance(loss, nn.Module) else loss)

    def module(self) -> nn.Module:
        """A new module with the weights of the seed, without dropout, and without constant parameters."""
        self.seed(self.job.seed)
        with one_sentence(f"{self.job.name}()", "MW-VERIFY-004", fix=FACTORY):
            module = self.make()
        if not isinstance(module, nn.Module):
            raise MeshwrightError(
                "MW-VERIFY-004", f"{self.job.name}() returns {kind(module)}, not an nn.Module", fix=FACTORY
            )
        if not any(p.requires_grad for p in module.parameters()):
            raise MeshwrightError("MW-VERIFY-004", f"{self.job.name}() returns a module without trainable parameters")
        module = module.to(device=self.device, dtype=self.dtype).train()
        for part in module.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.eval()
            elif isinstance(getattr(part, "dropout", None), float):  # of nn.MultiheadAttention, nn.LSTM
                part.dropout = 0.0  # type: ignore[assignment]
        generator = torch.Generator().manual_seed(self.job.seed)
        with torch.no_grad():
            for p in module.parameters():
                if p.requires_grad and p.numel() and bool((p == p.flatten()[0]).all()):
                    noise = torch.randn(p.shape, generator=generator, dtype=torch.float64) * NOISE
                    p.add_(noise.to(p))
        return module

    def seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def batch(self, step: int) -> tuple[Any, Any]:
        """The inputs and targets of a global batch."""
        value = self.example
        if callable(value):
            self.seed(self.job.seed + step)
            with one_sentence("example(seed)", "MW-VERIFY-004", fix=EXAMPLE):
                value = value(self.job.seed + step)
        inputs, targets = value, None
        if self.loss is not None:
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise MeshwrightError(
                    "MW-VERIFY-004",
                    f"example is {kind(value)}, and there is a loss",
                    why="loss(output, targets) needs a pair (inputs, targets)",
                    fix=EXAMPLE,
                )
            inputs, targets = value
        if next(tensors_in(inputs), None) is None:
            raise MeshwrightError("MW-VERIFY-004", f"example is {kind(value)}, without a tensor", fix=EXAMPLE)
        return self.cast(inputs), self.cast(targets)

    def cast(self, tree: Any) -> Any:
        return map_tensors(lambda t: t.to(self.device, self.dtype if t.is_floating_point() else t.dtype), tree)

    def loss_of(self, module: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        """The loss of one device over a batch."""
        output = call(module, inputs)
        with one_sentence("loss(output, targets)", "MW-VERIFY-004", fix=LOSS):
            value = loss_value(self.loss, output, targets)
        rows = samples_in(inputs, self.batch_dim(module)) if self.job.reduction == "sum" else 1
        return value / rows

    def batch_dim(self, module: nn.Module) -> int:
        return int(not (takes_batch_first(module) if self.job.batch_first is None else self.job.batch_first))


LOSS = "def loss(output, targets): return a mean over the samples"
BATCH = "Both sides train on batches of your data"
EXAMPLE = "example = (inputs, targets), or def example(seed): return inputs, targets; without a loss the inputs alone"


def kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def record_one_device(context: RankContext, job: ModuleJob) -> Reference:
    """The reference: check what the user gave, then train it with plain torch."""
    setting = Setting.of(job, context.device)
    notes, narrow = examine(setting)
    context.send("checked")
    out = Reference(train_alone(setting, context), notes)
    if narrow:
        with one_sentence("the module on one device, in float32", "MW-VERIFY-005", why=f"It {notes[0]}"):
            out.single = train_alone(Setting.of(job, context.device, torch.float32), context)
    return out


def train_alone(setting: Setting, context: RankContext) -> Trace:
    module = setting.module()
    optimizer = make_optimizer(module.named_parameters())
    recorder = Recorder(context, "fp64" if setting.dtype == torch.float64 else "fp32", setting.job.steps, module)
    for step in range(setting.job.steps):
        loss = setting.loss_of(module, *setting.batch(step))
        loss.backward()
        gradients = {n: p.grad.detach() for n, p in module.named_parameters() if p.grad is not None}
        recorder.add_gradients(gradients)
        norm = nn.utils.get_total_norm(list(gradients.values()))
        nn.utils.clip_grads_with_norm_(module.parameters(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        recorder.add_step(float(loss.detach()), float(norm), module.state_dict())
    return recorder.trace


def record_under_plan(context: RankContext, job: ModuleJob) -> Trace:
    """The module under the plan, on this rank. Tensors that equal those of rank 0 bit by bit are not sent to the parent."""
    setting = Setting.of(job, context.device)
    module = setting.module()
    dim, first = setting.batch_dim(module), setting.batch(0)
    rows, plan = samples_in(first[0], dim), job.plan
    explicit = "microbatch" in plan.model_fields_set or plan.pp > 1
    size = plan.microbatch if explicit else max(1, rows // plan.dp)
    if rows % (plan.dp * size):
        raise MeshwrightError(
            "MW-VERIFY-004",
            f"the example has {rows} samples, for {plan.dp} data-parallel ranks with micro-batches of {size}",
            why="The example is the batch of all ranks together, and each rank takes an equal share",
            fix=f"an example of {plan.dp * size * -(-rows // (plan.dp * size))} samples",
        )
    recorder = Recorder(context, "fp64", job.steps, module)
    with one_sentence(f"the module under {plan.title()}", "MW-VERIFY-006", why="One device runs it"):
        parallel = parallelize(
            module,
            plan,
            load(job.table),
            optimizer=make_optimizer,
            loss=setting.loss,
            reduction=job.reduction,
            layers=job.layers,
            example=microbatches(*first, size, dim)[0][0],
            batch_first=job.batch_first,
            check=job.check,
        )
        recorder.trace.coordinates = parallel.mesh.coordinates
        for step in range(job.steps):
            inputs, targets = microbatches(*setting.batch(step), rows // plan.dp, dim)[parallel.data_rank]
            train_step(parallel, inputs, targets, recorder)
    return recorder.without_copies()


def train_step(parallel: ParallelModule, inputs: Any, targets: Any, recorder: Recorder) -> None:
    loss = parallel.backward(inputs, targets)
    recorder.add_gradients(parallel.gradients())
    norm = parallel.clip_norm(CLIP)
    parallel.update(norm)
    recorder.add_step(float(loss), float(norm), parallel.state_dict())


class Recorder:
    """Fills the trace of one side. Parameters have the names of `named_parameters`, then come the floating-point buffers of the state."""

    def __init__(self, context: RankContext, dtype: str, steps: int, module: nn.Module) -> None:
        self.context = context
        parameters = {name: p.shape for name, p in module.named_parameters()}
        state = module.state_dict()
        buffers = [n for n, b in module.named_buffers() if n in state and b.is_floating_point()]
        self.shapes = parameters | {name: state[name].shape for name in buffers}
        # Two copies, on one device and on rank 0, of two values per step and of the first one.
        needed = 2.0 * 8 * (2 * steps + 1) * sum(shape.numel() for shape in self.shapes.values())
        if needed > available_memory():
            raise MeshwrightError(
                "MW-VERIFY-005",
                f"the records of {steps} steps need {format_bytes(needed)}, more than this machine has",
                why="Every gradient and parameter of every step is compared, in float64",
                fix="a smaller configuration in make(), with the same kinds of layers, or --steps 2",
            )
        pieces = [PieceTrace(n, (0,) * len(shape), initial=as_array(state[n])) for n, shape in self.shapes.items()]
        self.trace = Trace(context.rank, dtype, pieces=pieces)

    def add_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        for piece in self.trace.pieces:
            gradient = gradients.get(piece.name)
            shape = tuple(self.shapes[piece.name])
            piece.gradients.append(np.zeros(shape) if gradient is None else as_array(gradient))

    def add_step(self, loss: float, norm: float, state: dict[str, torch.Tensor]) -> None:
        self.trace.losses.append(loss)
        self.trace.norms.append(norm)
        for piece in self.trace.pieces:
            piece.parameters.append(as_array(state[piece.name]))
        self.context.send(f"step {len(self.trace.losses)}")

    def without_copies(self) -> Trace:
        """The trace without the tensors that rank 0 has too: their difference from one device is that of rank 0."""
        digests = torch.tensor(
            [
                int.from_bytes(
                    blake2b(b"".join(a.tobytes() for a in (*p.gradients, *p.parameters)), digest_size=7).digest(), "big"
                )
                for p in self.trace.pieces
            ]
        )
        digests = digests.to(self.context.device)
        of_first = digests.clone()
        distributed.broadcast(of_first, src=0)
        if self.context.rank:
            same = (digests == of_first).tolist()
            self.trace.pieces = [p for p, equal in zip(self.trace.pieces, same, strict=True) if not equal]
        return self.trace


def examine(setting: Setting) -> tuple[list[str], bool]:
    """Raise for a module that cannot be compared; returns notes, and whether a part of it computes in less than float64."""
    module, other = setting.module(), setting.module()
    for (name, a), b in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        if a.shape != b.shape or not torch.equal(a, b):
            raise MeshwrightError(
                "MW-VERIFY-005",
                f"{setting.job.name}() returns other weights when it is called again: '{name}'",
                why="Both sides must start from the same weights; torch, numpy and random are seeded before the call",
            )
    inputs, targets = setting.batch(0)
    narrow: dict[str, str] = {}
    outputs = []
    for i, copy in enumerate((module, other)):
        setting.seed(setting.job.seed + 1 + i)
        with (
            one_sentence(
                "the module on one device, in float64",
                "MW-VERIFY-005",
                why="The comparison is in float64",
                fix="a module that runs after .double(), with an example that it takes",
            ),
            named_calls(copy) as (stack, results),
            NarrowFloats(stack, narrow),
        ):
            loss = setting.loss_of(copy, inputs, targets)
            loss.backward()
        outputs.append([*results, ("the loss", loss.detach())])
    for (name, a), (_, b) in zip(*outputs, strict=False):
        if not torch.equal(a, b):
            raise MeshwrightError(
                "MW-VERIFY-005",
                f"forward draws random numbers: the output of {name} differs from call to call",
                why="Ranks would draw other numbers than one device",
                fix="no dropout and no noise in the module that make() returns",
            )
    if not narrow:
        return [], False
    names = list(narrow)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"computes in {narrow[names[0]]} inside {names[0]}{more}: compared within the rounding of float32"], True


@contextmanager
def named_calls(module: nn.Module) -> Iterator[tuple[list[str], list[tuple[str, torch.Tensor]]]]:
    """The names of the modules that are running, innermost last, and the first tensor that each call returns."""
    stack: list[str] = []
    results: list[tuple[str, torch.Tensor]] = []

    def enter(name: str, *_: Any) -> None:
        stack.append(name or type(module).__name__)

    def leave(name: str, part: nn.Module, args: tuple, output: Any) -> None:
        stack.pop()
        results.extend((name or type(module).__name__, t.detach().clone()) for t in list(tensors_in(output))[:1])

    hooks = [part.register_forward_pre_hook(partial(enter, name)) for name, part in module.named_modules()]
    hooks += [part.register_forward_hook(partial(leave, name)) for name, part in module.named_modules()]
    try:
        yield stack, results
    finally:
        for hook in hooks:
            hook.remove()


class NarrowFloats(TorchFunctionMode):
    """Notes where float64 becomes a narrower floating-point type, by the module that is running."""

    def __init__(self, stack: list[str], narrow: dict[str, str]) -> None:
        super().__init__()
        self.stack, self.narrow = stack, narrow

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        narrower = isinstance(output, torch.Tensor) and output.is_floating_point() and output.dtype != torch.float64
        if narrower and any(t.dtype == torch.float64 for t in tensors_in([list(args), kwargs])):
            self.narrow.setdefault(
                self.stack[-1] if self.stack else "the loss", str(output.dtype).removeprefix("torch.")
            )
        return output
