"""Micro-batches of whatever a module takes: a tensor, or tuples, lists and dictionaries of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same structure with each tensor changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(change, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(change, value) for value in tree)
    return tree


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(found.append, tree)
    yield from found


def call(module: nn.Module, inputs: Any) -> Any:
    """A dictionary is passed by name, a tuple or list by position."""
    if isinstance(inputs, dict):
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

    def cut(tensor: torch.Tensor, start: int) -> torch.Tensor:
        along = next((d for d in (dim, 0) if tensor.ndim > d and tensor.shape[d] == rows), None)
        return tensor if along is None or rows == size else tensor.narrow(along, start, size)

    return [
        (map_tensors(lambda t: cut(t, s), inputs), map_tensors(lambda t: cut(t, s), targets))  # noqa: B023
        for s in range(0, rows, size)
    ]
