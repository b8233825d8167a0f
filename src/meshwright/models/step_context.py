"""What a micro-batch carries past the signatures of modules: one object, in one context variable.

    with within(samples=StepSamples(seed, step, range(8)), documents_BS=documents_BS):
        model(x)

Layers, tensor-parallel regions and a user's own modules are called as `module(x)`: torch's pipeline stages, `fully_shard` and hooks allow
nothing more. So the head finds its targets here, attention its documents and dropout its samples. A recomputed layer runs in a copy of
the context of its first forward (`parallel.recompute`), on whatever thread autograd calls it, so it finds the same values.

A compiled graph cannot read a context variable (dynamo refuses `ContextVar.get`), and would be compiled anew for every step if it read
the number of the step. So each part of a graph that needs a value has a method `hold`, which `parallel.compile` calls before the graph: it
reads this object and keeps tensors and flags as attributes, which the graph takes as inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class StepSamples:
    """The current step, and the samples of the global batch that are in the micro-batch."""

    seed: int
    step: int
    samples: Sequence[int]


class Targets(NamedTuple):
    target_BS: torch.Tensor
    factor: torch.Tensor  # multiplied with the sum of the tokens' losses


@dataclass(frozen=True)
class StepContext:
    """The values that hold for the code that runs now; the defaults are those of a plain call of a model."""

    samples: StepSamples | None = None  # dropout drops the elements of this step and these samples
    documents_BS: torch.Tensor | None = None  # attention stays within documents; None: it sees whole sequences
    targets: Targets | None = None  # a head computes the loss against these; None: it returns logits
    recomputing: bool = False  # a recomputed forward runs
    keeps_gathered: bool = False  # gathered tensors are saved whole: a recomputed forward needs no second gather
    saved_as_share: int = -1  # the address of the gathered tensor of which only this rank's share is saved for backward
    saving: tuple[Any, Any] | None = None  # the enclosing hooks on saved tensors: pack, unpack


_current: ContextVar[StepContext] = ContextVar("step", default=StepContext())  # noqa: B039  it is frozen


def current() -> StepContext:
    return _current.get()


@contextlib.contextmanager
def within(**values: Any) -> Iterator[None]:
    """Inside this context some values of the current one are replaced."""
    token = _current.set(replace(_current.get(), **values))
    try:
        yield
    finally:
        _current.reset(token)
