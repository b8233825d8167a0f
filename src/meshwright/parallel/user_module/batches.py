"""Micro-batches of whatever a module takes: a tensor, or tuples, lists and dictionaries of tensors."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.pieces import local_tensor


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same structure with each tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        same = copy.copy(tree)  # a dictionary of the same class: Hugging Face's outputs and batches are
        for key, value in tree.items():
            same[key] = map_tensors(change, value)  # type: ignore[index]
        return same
    if isinstance(tree, tuple | list):
        values = [map_tensors(change, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed: Any = copy.copy(tree)
        for key, value in vars(tree).items():
            object.__setattr__(changed, key, map_tensors(change, value))
        return changed
    return tree


def leaves_in(tree: Any) -> Iterator[Any]:
    """What a structure holds that is no tuple, list, dictionary or dataclass."""
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = vars(tree).values()
    elif not isinstance(tree, tuple | list):
        yield tree
        return
    for value in tree:
        yield from leaves_in(value)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves_in(tree) if isinstance(leaf, Tensor))


def call(module: nn.Module, inputs: Any) -> Any:
    """A dictionary is passed by name, a tuple or list by position."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


def samples_in(inputs: Any, dim: int) -> int:
    """The length of the batch: of dimension `dim` of the first tensor."""
    first = next(tensors_in(inputs), None)
    if first is None or first.ndim <= dim:
        raise MeshwrightError(
            "MW-OWN-003",
            "the inputs hold no tensor with a batch dimension",
            why=f"Dimension {dim} of the first tensor counts the samples",
            valid=["step(tensor)", 'step({"input_ids": ids, "labels": ids})'],
        )
    return first.shape[dim]


def microbatches(inputs: Any, targets: Any, size: int, dim: int) -> list[tuple[Any, Any]]:
    """Pairs of inputs and targets of `size` samples. A tensor that is not as long as the batch (a mask for all samples) goes to each."""
    rows = samples_in(inputs, dim)
    if rows % size:
        raise MeshwrightError(
            "MW-OWN-003",
            f"a batch of {rows} samples does not divide into micro-batches of {size}",
            why="Micro-batches have equal length",
            fix=f"plan.microbatch={next(d for d in range(size, 0, -1) if rows % d == 0)}",
        )

    return [tuple(cut((inputs, targets), Part(s, size, rows), dim)) for s in range(0, rows, size)]


@dataclasses.dataclass(frozen=True)
class Part:
    """Some samples of a batch."""

    start: int
    size: int
    rows: int  # samples of the whole batch

    def narrow(self, tensor: Tensor, dim: int) -> Tensor:
        """These samples' range of a dimension that is a multiple of the batch (tokens of all samples, one sample after the other)."""
        length = tensor.shape[dim] // self.rows
        return tensor if self.size == self.rows else tensor.narrow(dim, self.start * length, self.size * length)


def sample_dim(tensor: Tensor, rows: int, dim: int) -> int | None:
    """The dimension of a tensor that is as long as the batch: the batch dimension, or the first. None: it stays whole."""
    return next((d for d in (dim, 0) if tensor.ndim > d and tensor.shape[d] == rows), None)


def cut(tree: Any, part: Part, dim: int) -> Any:
    """These samples of inputs and targets. A tensor that is not as long as the batch (a mask for all samples) stays whole."""

    def narrow(tensor: Tensor) -> Tensor:
        along = sample_dim(tensor, part.rows, dim)
        return tensor if along is None else part.narrow(tensor, along)

    return map_tensors(narrow, tree)


def prepared(inputs: Any, dtype: torch.dtype | None, device: Any) -> Any:
    """Floating-point inputs in the dtype of forward, on this rank's device."""

    def change(tensor: Tensor) -> Tensor:
        floating = dtype is not None and tensor.is_floating_point()
        return tensor.to(device=device, dtype=dtype if floating else tensor.dtype)

    return map_tensors(change, inputs)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """A trial run: buffers, attributes of modules and random numbers are restored afterwards. All ranks draw the same random numbers."""
    buffers = [(b, b.clone()) for b in module.buffers()]
    attributes = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
    devices = {p.device for p in module.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(0)
        try:
            yield
        finally:
            for part, values, own_buffers in attributes:
                vars(part).clear()
                vars(part).update(values)
                part._buffers.update(own_buffers)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


@contextmanager
def without_zeros(module: nn.Module) -> Iterator[None]:
    """Other values for parameters that are all zero: a weight that starts at zero hides what it multiplies."""
    hidden = [local_tensor(p.detach()) for p in module.parameters() if p.numel() and not bool(local_tensor(p).any())]
    for parameter in hidden:
        parameter.copy_(torch.linspace(0.5, 1.0, parameter.numel(), device=parameter.device).view_as(parameter))
    try:
        yield
    finally:
        for parameter in hidden:
            parameter.zero_()


def rounding(dtype: torch.dtype) -> float:
    """The relative difference that rounding may cause: half of the digits of a dtype. Parts of a float64 module may compute in float32."""
    return max(float(torch.finfo(dtype).eps ** 0.5), 1e-6)


def differ(a: Tensor, b: Tensor, least: float = 0.0) -> bool:
    """Whether two tensors differ by more than rounding, relative to the largest element (or `least`). Two NaN are equal."""
    if a.shape != b.shape:
        return True
    if not a.numel():
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return not torch.equal(a, b)
    bound = rounding(a.real.dtype) * max(float(a.nan_to_num().abs().max()), least)
    return not torch.allclose(a, b, rtol=0.0, atol=bound, equal_nan=True)
