"""What a micro-batch carries past the signatures of modules: one frozen object, in one variable of this module.

    with within(samples_B=sample_hashes(seed, step, range(8), device), documents_BS=documents_BS):
        model(x)

The head finds its targets here, attention its documents and dropout its samples. A recomputed layer runs in the context of its first forward
(`parallel.recompute`), so it finds the same values.

Why it is not an argument of every `forward`: that was tried, and is as fast, eager and compiled. It adds the argument to 14 methods of
our models, to the attention of every plug-in and to all that wraps a layer; and hooks on saved tensors (the last four values) also act inside
a user's own modules, whose signatures are theirs, so a second way would remain.

Why it is a plain variable: a compiled graph can read it. The tensors become inputs of the graph, and a flag selects the graph; dynamo refuses
`ContextVar.get`. One model runs at a time in a process: while autograd's threads recompute a layer, the thread that called `backward` waits.
A test sees that no second variable of this kind appears.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor


class Targets(NamedTuple):
    target_BS: Tensor
    factor: Tensor  # multiplied with the sum of the tokens' losses


@dataclass(frozen=True)
class StepContext:
    """The values that hold for the code that runs now; the defaults are those of a plain call of a model."""

    samples_B: Tensor | None = None  # a hash of each sample, from which dropout draws (`dropout.sample_hashes`)
    documents_BS: Tensor | None = None  # attention stays within documents; None: it sees whole sequences
    targets: Targets | None = None  # a head computes the loss against these; None: it returns logits
    recomputing: bool = False  # a recomputed forward runs
    keeps_gathered: bool = False  # gathered tensors are saved whole: a recomputed forward needs no second gather
    saved_as_share: int = -1  # the address of the gathered tensor of which only this rank's share is saved for backward
    saving: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # the enclosing hooks on saved tensors


_current = StepContext()


def current() -> StepContext:
    return _current


@contextlib.contextmanager
def within(context: StepContext | None = None, /, **values: Any) -> Iterator[None]:
    """Inside this context some values of `context`, by default the current one, are replaced."""
    global _current
    before = _current
    _current = replace(context or before, **values)
    try:
        yield
    finally:
        _current = before
