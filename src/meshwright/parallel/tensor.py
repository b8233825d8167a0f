"""Tensor parallelism: Megatron's column and row splits, with four all-reduces a layer and no more.

A pair of products Y = σ(X A), Z = Y B is divided by giving each of the P ranks a block of A's columns and of B's rows:

    Z = Σ_p σ(X A_p) B_p        one all-reduce forward (of Z), one backward (of X's gradient)

Attention is the same pair, with whole heads as the blocks. The bias of B is added **after** the sum: added on every
rank before it, it would count P times. A bias of A is split with A's columns.

Sequence parallelism shards what stands between the pairs (norms, residuals) along the sequence: the all-reduce
becomes a reduce-scatter after a pair and an all-gather before the next, the same bytes. The gathered input is *not*
kept for backward: only this rank's share is, and the gradient of the weights gathers it again, as saved-tensor hooks
ask for it.

Compared with splitting each product by itself (DTensor's default), which also sums the gradients of q, k and v apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.errors import MeshwrightError
from meshwright.parallel import exchange
from meshwright.parallel.regather import gather_again
from meshwright.parallel.tables import Table
from meshwright.parallel.vocabulary import embed

SEQUENCE = 1  # dimension of the sequence in [B, S, H]
HOLD_NOTHING = {"region", "gathered"}  # styles of a module as a whole, that say nothing of its parameters


@dataclass(frozen=True)
class Cut:
    """This rank's range of one dimension of a parameter."""

    dim: int
    start: int
    full: int


@dataclass
class Split:
    """What `split` did: the cuts by parameter name, and the whole parameters whose gradient is a partial sum over tp."""

    group: ProcessGroup
    sequence: bool
    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    made: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)  # a weight shared by two modules stays shared


def boundaries(full: int, parts: int, index: int) -> tuple[int, int]:
    """The range of the `index`-th of `parts`, as even as can be: the first `full mod parts` are one longer."""
    base, extra = divmod(full, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def matches(name: str, pattern: str) -> bool:
    """Part by part of the dotted name."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def split(module: nn.Module, table: Table, group: ProcessGroup, sequence: bool) -> Split:
    """Divide a module on the meta device in place, as its table says."""
    done = Split(group, sequence)
    for name, part in list(module.named_modules()):
        styles = [style for pattern, style in table if matches(name, pattern)]
        holds = [n for n, _ in part.named_parameters(recurse=False)]
        if holds and not set(styles) - HOLD_NOTHING:
            raise MeshwrightError("MW-TP-001", f"'{name}' holds {', '.join(holds)} and no pattern of the table matches it",
                                  why="Every parameter must be said to be split or whole",
                                  valid=sorted({pattern for pattern, _ in table}))  # fmt: skip
        for style in styles:
            STYLES[style](done, name, part)
    return done


def _cut(done: Split, owner: Any, prefix: str, name: str, dim: int, even: bool = True) -> tuple[int, int]:
    """Replace a parameter by this rank's range of dimension `dim`."""
    parameter = getattr(owner, name)
    full = parameter.shape[dim]
    if even and full % done.group.size():
        raise MeshwrightError("MW-TP-002", f"dimension {dim} of '{prefix}.{name}', {full}, does not divide over "
                              f"tp={done.group.size()}", why="Each rank holds whole heads or columns")  # fmt: skip
    start, stop = boundaries(full, done.group.size(), done.group.rank())
    if parameter not in done.made:
        part = torch.empty_like(parameter.narrow(dim, start, stop - start))
        done.made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    setattr(owner, name, done.made[parameter])
    done.cuts[f"{prefix}.{name}"] = Cut(dim, start, full)
    return start, stop


def _partial(done: Split, name: str, part: Any) -> None:
    done.partial.update(f"{name}.{n}" for n, p in part.named_parameters(recurse=False) if p.requires_grad)


def _region(done: Split, name: str, part: Any) -> None:
    forward, group = part.forward, done.group
    if not done.sequence:
        part.forward = lambda x: forward(exchange.copy_in(x, group))
        return

    def gathered(x: torch.Tensor) -> torch.Tensor:
        whole = exchange.gather_in(x, group, SEQUENCE)
        with gather_again(whole, x, group):
            return forward(whole)

    part.forward = gathered


def _column(done: Split, name: str, part: Any) -> None:
    # The vocabulary may be cut unevenly: only the loss looks across its ranks, and it knows where each begins.
    even = not name.startswith("head.")
    _cut(done, part, name, "weight", 0, even)
    if part.bias is not None:
        _cut(done, part, name, "bias", 0, even)


def _row(done: Split, name: str, part: Any) -> None:
    _cut(done, part, name, "weight", 1)
    group, sequence = done.group, done.sequence
    if sequence and part.bias is not None:
        done.partial.add(f"{name}.bias")

    def forward(x: torch.Tensor) -> torch.Tensor:
        partial_sum = F.linear(x, part.weight)
        y = exchange.scatter_out(partial_sum, group, SEQUENCE) if sequence else exchange.reduce_out(partial_sum, group)
        return y if part.bias is None else y + part.bias

    part.forward = forward


def _vocabulary(done: Split, name: str, part: Any) -> None:
    start, _ = _cut(done, part, name, "weight", 0, even=False)
    group, sequence = done.group, done.sequence

    def forward(ids: torch.Tensor) -> torch.Tensor:
        own = embed(ids, part.weight, start)
        return exchange.scatter_out(own, group, SEQUENCE) if sequence else exchange.reduce_out(own, group)

    part.forward = forward


def _between(done: Split, name: str, part: Any) -> None:
    if done.sequence:
        _partial(done, name, part)


def _inside(done: Split, name: str, part: Any) -> None:
    _partial(done, name, part)


def _positions(done: Split, name: str, part: Any) -> None:
    if done.sequence:
        _partial(done, name, part)
        forward, group = part.forward, done.group
        part.forward = lambda n: forward(n).chunk(group.size())[group.rank()]


def _gathered(done: Split, name: str, part: Any) -> None:
    """The next layer's input gradients are partial sums over the ranks, hence the reduce-scatter backward; after the
    last layer every rank computes the same loss, and its own slice of that gradient is all there is to it."""
    forward, group = part.forward, done.group
    leave = exchange.join if part.last else exchange.gather_in
    part.forward = lambda x: leave(forward(x), group, x.ndim - 1)


STYLES: dict[str, Callable[[Split, str, Any], None]] = {
    "region": _region, "column": _column, "row": _row, "vocabulary": _vocabulary, "between": _between,
    "inside": _inside, "positions": _positions, "gathered": _gathered, "experts": lambda done, name, part: None,
}  # fmt: skip
