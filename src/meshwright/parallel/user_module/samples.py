"""A batch against its two halves: does the module treat samples independently?

Data-parallel ranks and micro-batches see a part of the batch each. They train the same model as one device only where the output for a sample
does not depend on the other samples, and the loss of a batch is the mean (or the sum) of the losses of its parts. Batch normalisation, a
contrastive loss and a mean over the tokens that are not padding break this; so may any module, hence no list of classes: the batch runs whole and
in halves, and outputs, buffers that forward changes, and gradients are compared. The first module that differs is named.

Random numbers are no difference: the halves are given the numbers that the whole batch drew (`Draws`). Batch normalisation that is synchronised
over the ranks (`whole.synchronise`) is exact, and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import MeshwrightError
from meshwright.parallel.numerics.precision import narrow
from meshwright.parallel.user_module.batches import (
    Part,
    call,
    cut,
    differ,
    map_tensors,
    sample_dim,
    samples_in,
    tensors_in,
    undisturbed,
    without_zeros,
)
from meshwright.parallel.user_module.checks import FORWARD_ERRORS, any_rank

ONE_MICROBATCH = "plan.microbatch = the samples of a rank, or nn.GroupNorm, or eval() on the normalisations"
TOKENS = 'a loss that is a sum, with reduction="sum" and step(…, count=tokens), if it is a mean over tokens that are not padding, or a sum'
SAMPLES = 'reduction="mean" if the loss is a mean'
UNEVEN = "micro-batches have different numbers of targets that are not -100, and the loss is not known to be a mean over these or over samples"
OWN_LOSS = 'loss=…, a sum of the losses of the tokens, with reduction="sum" and step(…, count=tokens); or check=False'
IGNORED = -100  # torch's default `ignore_index`
ONE_PART = "replicate=1, shard=1 and one micro-batch per step"


class Draws(TorchDispatchMode):
    """Remembers the random numbers of a whole batch, or gives a part of the batch its share of them."""

    def __init__(self, whole: Draws | None = None, part: Part | None = None) -> None:
        super().__init__()
        self.whole, self.part = whole, part
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or "randperm" in str(func):
            return output
        numbers = output[-1] if isinstance(output, tuple) else output  # of `native_dropout` the mask
        self.drawn.append(numbers.detach().clone())
        if self.whole is not None and self.part is not None and len(self.drawn) <= len(self.whole.drawn):
            drawn = self.whole.drawn[len(self.drawn) - 1]
            along = batch_dim_of(drawn, numbers, self.part)
            if along is not None or drawn.shape == numbers.shape:
                numbers.copy_(drawn if along is None else self.part.narrow(drawn, along))
                if isinstance(output, tuple):
                    output[0].copy_(args[0] * numbers / (1 - args[1]))
        return output


def batch_dim_of(whole: Tensor, half: Tensor, part: Part) -> int | None:
    """The dimension of a tensor that has a number of elements per sample; None where it does not depend on the number of samples."""
    if whole.ndim != half.ndim:
        return None
    other = [d for d in range(whole.ndim) if whole.shape[d] != half.shape[d]]
    return (
        other[0] if len(other) == 1 and whole.shape[other[0]] * part.size == half.shape[other[0]] * part.rows else None
    )


def two_samples(inputs: Any, dim: int) -> Any:
    """A batch of one sample with another one, made of it: whole numbers in another order, other numbers of half the size."""

    def another(tensor: Tensor) -> Tensor:
        if tensor.ndim <= dim or tensor.shape[dim] != 1:
            return tensor
        second = tensor * 0.5 if tensor.is_floating_point() else tensor.roll(1, -1)
        return torch.cat([tensor, second], dim)

    return map_tensors(another, inputs)


def kinks(dtype: torch.dtype) -> float:
    """The relative error of a gradient that rounding may cause: where it moves an activation over the kink of a ReLU, a whole term comes or goes."""
    return float(torch.finfo(dtype).eps ** 0.25)


@dataclass
class Ran:
    """Outputs of a module for a batch, or for a half of it."""

    outputs: list[Tensor]
    buffers: list[Tensor]
    gradients: list[Tensor]
    error: str = ""


class Trial:
    """A batch and its halves through one module, under the same random numbers."""

    def __init__(self, module: nn.Module, inputs: Any, dim: int, mean: bool, synchronised: Iterable[nn.Module]) -> None:
        self.module, self.mean, self.synchronised = module, mean, list(synchronised)
        self.inputs = two_samples(inputs, dim) if samples_in(inputs, dim) == 1 else inputs
        rows = samples_in(self.inputs, dim)
        self.parts = [Part(0, rows, rows), Part(0, rows // 2, rows), Part(rows // 2, rows - rows // 2, rows)]
        self.dim = dim
        self.names = [n for n, p in module.named_parameters() if p.requires_grad]
        # 16 bits: forward is compared, gradients are too coarse
        self.narrow = any(narrow(p.dtype) for p in module.parameters())

    def run(self, gradients: bool = False, watch: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[Ran]:
        """The whole batch, then each half."""
        out: list[Ran] = []
        draws = Draws()
        for part in self.parts:
            with undisturbed(self.module), without_zeros(self.module), sdpa_kernel(SDPBackend.MATH), watch():
                for norm in self.synchronised:  # they are one over all ranks: here each sample is normalised alone
                    norm.forward = lambda x: nn.functional.layer_norm(x, x.shape[1:])
                try:
                    with torch.set_grad_enabled(gradients), Draws(draws, part) if out else draws:
                        outputs = list(tensors_in(call(self.module, cut(self.inputs, part, self.dim))))
                except FORWARD_ERRORS as error:
                    if not out:  # the module itself is wrong
                        raise
                    out.append(Ran([], [], [], f"{type(error).__name__}: {error}"))
                    continue
                whole = out[0].outputs if out else outputs
                slopes = self.gradients(whole, outputs, part) if gradients and len(whole) == len(outputs) else []
                buffers = [b.detach().clone() for b in self.module.buffers()]
            out.append(Ran([t.detach() for t in outputs], buffers, slopes))
        return out

    def weight(self, whole: Tensor, part: Tensor, samples: Part) -> float:
        """Weight of a tensor without samples (a loss): its share of a mean, or one in a sum. A constant is its own mean."""
        return samples.size / samples.rows if self.mean or not differ(whole.detach(), part.detach()) else 1.0

    def gradients(self, whole: list[Tensor], outputs: list[Tensor], part: Part) -> list[Tensor]:
        """Of the sum of the outputs with fixed factors: equal outputs may have different gradients."""
        factors = []
        for first, output in zip(whole, outputs, strict=True):
            fixed = torch.arange(first.numel(), device=first.device).cos().to(first.dtype).view_as(first)
            along = batch_dim_of(first, output, part)
            same = first.shape == output.shape and part.size < part.rows
            if same:
                fixed = fixed * self.weight(first, output, part)
            elif along is not None:
                fixed = part.narrow(fixed, along)
            factors.append(fixed)
        pairs = [(t, f) for t, f in zip(outputs, factors, strict=True) if t.requires_grad and t.shape == f.shape]
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if not pairs or not parameters:
            return []
        tensors, weights = zip(*pairs, strict=True)
        return list(torch.autograd.grad(tensors, parameters, weights, allow_unused=True, materialize_grads=True))

    def joined(self, whole: Tensor, halves: list[Tensor]) -> Tensor | None:
        """The whole according to the halves: one after the other, or for tensors without samples their mean or sum. None where neither fits."""
        parts = list(zip(halves, self.parts[1:], strict=True))
        if all(half.shape == whole.shape for half in halves):
            if not whole.is_floating_point():
                return next((half for half in halves if differ(whole, half)), whole)
            return sum(half * self.weight(whole, half, part) for half, part in parts)  # type: ignore[return-value]
        alongs = {batch_dim_of(whole, half, part) for half, part in parts}
        along = alongs.pop()
        return None if alongs or along is None else torch.cat(halves, along)

    def differs(self, whole: list[Tensor], halves: list[list[Tensor]]) -> bool:
        if any(len(half) != len(whole) for half in halves):
            return True
        pairs = [(t, self.joined(t, [half[i] for half in halves])) for i, t in enumerate(whole)]
        return any(together is None or differ(t, together) for t, together in pairs)

    def problem(self, gradients: bool) -> str:
        """Name the difference between the batch and its halves; '' if there is none."""
        whole, *halves = self.run(gradients and not self.narrow)
        if error := next((half.error for half in halves if half.error), ""):
            return f"error {error}"
        if self.differs(whole.outputs, [half.outputs for half in halves]):
            return "output"
        names = [n for n, _ in self.module.named_buffers()]
        for name, value, *others in zip(names, whole.buffers, *(half.buffers for half in halves), strict=True):
            if any(differ(value, other) for other in others):
                return f"buffer {name}"
        norms = [float(g.norm()) for g in whole.gradients]
        of_halves = zip(*(half.gradients for half in halves), strict=False)
        for name, norm, value, parts in zip(self.names, norms, whole.gradients, of_halves, strict=False):
            difference = float((value - torch.stack(parts).sum(0)).norm())
            if difference > kinks(value.dtype) * max(norm, max(norms) / 100):
                return f"gradient {name}"
        return ""

    @torch.no_grad()
    def accumulating(self) -> str:
        """A buffer that each forward changes, such as a counter: several micro-batches change it several times. '' if there is none."""
        exact = {id(buffer) for norm in self.synchronised for buffer in norm.buffers()}
        named = [(name, buffer) for name, buffer in self.module.named_buffers() if id(buffer) not in exact]
        after: list[list[Tensor]] = []
        with undisturbed(self.module):
            for _ in range(2 if named else 0):
                call(self.module, self.inputs)
                after.append([buffer.clone() for _, buffer in named])
        return next((name for (name, _), *values in zip(named, *after, strict=True) if differ(*values)), "")

    @torch.no_grad()
    def first_module(self) -> str:
        """The first module whose output differs; '' if none but the whole one does."""
        calls: list[list[tuple[str, list[Tensor]]]] = []

        def note(name: str) -> Callable[..., None]:
            return lambda part, args, output: calls[-1].append((name, [t.detach().clone() for t in tensors_in(output)]))

        @contextmanager
        def watch() -> Iterator[None]:
            calls.append([])
            hooks = [part.register_forward_hook(note(name)) for name, part in self.module.named_modules() if name]
            yield
            for hook in hooks:
                hook.remove()

        self.run(watch=watch)
        whole, *halves = calls
        for (name, outputs), *others in zip(whole, *halves, strict=False):
            if self.differs(outputs, [other for _, other in others]):
                return name
        return ""


def check_samples(trial: Trial, device: str, gradients: bool) -> str:
    """Raise if the batch of a trial gives something else than its halves, on any rank. Returns a buffer that several micro-batches would spoil."""
    problem = trial.problem(gradients)
    if not any_rank(bool(problem), device):
        return trial.accumulating()
    kind, _, name = problem.partition(" ")
    module = trial.first_module()
    what = {
        "": "another rank found that the module does not treat the samples of a batch independently",
        "output": f"the output of '{module}' for a batch is not that of its two halves"
        if module
        else f"the output of {type(trial.module).__name__} for a batch is not the {'mean' if trial.mean else 'sum'} of its two halves",
        "error": f"the module does not run on half of a batch: {name}",
        "buffer": f"forward sets the buffer '{name}' to another value for a batch than for its halves",
        "gradient": f"the gradient of '{name}' for a batch is not that of its two halves",
    }[kind]
    raise depends_on_the_batch(what)


def depends_on_the_batch(what: str, fix: str = "") -> MeshwrightError:
    return MeshwrightError(
        "MW-OWN-008",
        what,
        why="Each data-parallel rank and micro-batch sees a part of the batch, and would train another model than one device",
        fix=fix or f"{ONE_PART}; or check=False to train it on parts of the batch",
    )


@dataclass
class LossCheck:
    """The check of a loss function in a step: on one micro-batch, or on two of one sample. `problem` is raised at the end of the step, on all
    ranks at once."""

    size: int  # samples of a micro-batch
    dim: int
    mean: bool
    first: tuple[Any, Any] | None = None
    problem: MeshwrightError | None = None
    done: bool = False

    def add(self, loss: Callable[[Any, Any], Tensor], output: Any, targets: Any) -> None:
        if self.done:
            return
        pair, rows = map_tensors(Tensor.detach, (output, targets)), self.size
        if rows == 1 and self.first is None:
            self.first = pair
            return
        if self.first is not None:
            others, rows = tensors_in(self.first), 2
            pair = map_tensors(lambda t: join_samples(next(others), t, self.dim), pair)
        self.done, self.problem = True, check_loss(loss, pair[0], pair[1], rows, self.dim, self.mean)


def join_samples(first: Tensor, second: Tensor, dim: int) -> Tensor:
    return torch.cat([first, second], dim if first.ndim > dim else 0) if first.ndim else first


def check_loss(
    loss: Callable[[Any, Any], Tensor], output: Any, targets: Any, rows: int, dim: int, mean: bool
) -> MeshwrightError | None:
    """An error if the loss of a batch is neither the mean (or the sum) of the losses of its halves, weighted by their samples, nor that weighted by
    their valid targets."""
    tensors = [t for t in tensors_in((output, targets)) if t.ndim]
    if rows < 2 or any(t.shape[min(dim, t.ndim - 1)] != rows and t.shape[0] % rows for t in tensors):
        return None  # not one part per sample

    def samples(tensor: Tensor, part: Part) -> Tensor:
        return part.narrow(tensor, sample_dim(tensor, rows, dim) or 0) if tensor.ndim else tensor

    parts = [Part(0, rows, rows), Part(0, rows // 2, rows), Part(rows // 2, rows - rows // 2, rows)]
    values: list[Tensor] = []
    valid: list[int] = []
    draws = Draws()
    with torch.no_grad(), torch.random.fork_rng():
        for part in parts:
            with draws if not values else Draws(draws, part):
                trees = [map_tensors(lambda t: samples(t, part), tree) for tree in (output, targets)]  # noqa: B023
                values.append(loss(*trees).detach().reshape(()))
                valid.append(valid_targets(loss, trees[1])[0])
    whole, *halves = values
    by_samples = weighted(halves, [p.size / rows for p in parts[1:]] if mean else [1.0, 1.0])
    if not differ(whole, by_samples):
        return None
    if mean and valid[0] and not differ(whole, weighted(halves, [n / valid[0] for n in valid[1:]])):
        return None
    kind = "mean" if mean else "sum"
    return depends_on_the_batch(
        f"the loss of a batch, {float(whole):.6g}, is not the {kind} of the losses of its halves, {float(by_samples):.6g}",
        f"{TOKENS if mean else SAMPLES}; {ONE_PART} if it compares samples; or check=False to train it on parts of the batch",
    )


def weighted(values: list[Tensor], weights: list[float]) -> Tensor:
    """The sum of values with these weights; a value of weight 0 may be NaN, as the mean of no targets is."""
    return torch.stack([v * w for v, w in zip(values, weights, strict=True) if w]).sum()


# Targets without a loss: a mean over the others weighs micro-batches by them, not by samples.


def ignored_by(loss: Any) -> int:
    """The target that has no loss: of `nn.CrossEntropyLoss` its own, otherwise torch's default."""
    return int(getattr(loss, "ignore_index", IGNORED))


def valid_targets(loss: Any, targets: Any) -> tuple[int, int]:
    """How many of the targets that are whole numbers have a loss, and how many there are."""
    classes = [t for t in tensors_in(targets) if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)]
    return sum(int((t != ignored_by(loss)).sum()) for t in classes), sum(t.numel() for t in classes)


def fixed_numbers(tensor: Tensor, most: float, dtype: torch.dtype) -> Tensor:
    """Another tensor of this shape on the host, with numbers from 0 to `most` that may be scores or probabilities."""
    if not tensor.is_floating_point():
        return tensor.detach().cpu()
    return (torch.arange(1.0, tensor.numel() + 1, dtype=dtype).sin().square() * most).view(tensor.shape)


@torch.no_grad()
def mean_over(loss: Callable[[Any, Any], Tensor], output: Any, targets: Any, dim: int) -> str:
    """What a loss is a mean over: "samples", "targets" that are valid, or "" if neither fits.

    A micro-batch of this shape is joined with one in which only the first target of each sample is valid. Outputs are fixed numbers, targets class 0,
    all on the host: it shows the loss, not the data, because every rank must come to the same answer.
    """
    classes = map_tensors(lambda t: t.cpu() if t.is_floating_point() else torch.zeros_like(t, device="cpu"), targets)

    def mask(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            return tensor
        masked = torch.full_like(tensor, ignored_by(loss))
        if tensor.ndim > 1:
            masked[..., 0] = 0
        return masked

    def joined(tree: Any, other: Any) -> Any:
        others = tensors_in(other)
        return map_tensors(lambda t: join_samples(t, next(others), dim), tree)

    masked = map_tensors(mask, classes)
    counts = [valid_targets(loss, tree)[0] for tree in (classes, masked)]
    for dtype in (torch.float64, torch.float32):
        first, second = (map_tensors(lambda t: fixed_numbers(t, most, dtype), output) for most in (1.0, 0.5))  # noqa: B023
        try:
            values = [loss(first, classes).reshape(()), loss(second, masked).reshape(())]
            both = loss(joined(first, second), joined(classes, masked)).reshape(())
            break
        except FORWARD_ERRORS:  # of weights in float32, say
            continue
    else:
        return ""
    by_targets = weighted(values, [n / sum(counts) for n in counts])
    by_samples = weighted([v if n else torch.zeros_like(v) for v, n in zip(values, counts, strict=True)], [0.5, 0.5])
    return "samples" if not differ(both, by_samples) else "targets" if not differ(both, by_targets) else ""
