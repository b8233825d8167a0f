"""ZeRO-1 for plain parameters and any torch optimizer: each rank keeps the optimizer's state of its share, and updates that.

    gradients    averaged over the ranks by a reduce-scatter: each rank gets those of its share
    update       the optimizer, on the share
    parameters   all-gathered: the same bytes as an all-reduce of the gradients

All parameters of one dtype are in one flat buffer, padded to P equal shares; `parameter.data` is a view into it. A share may
end inside a parameter, so the optimizer sees one-dimensional slices: right for those that update element by element (SGD, Adam,
AdamW, RMSprop). One that looks at whole matrices (Muon, Adafactor) takes `whole=True`: shares then end between parameters,
gradients are all-reduced and parameters broadcast, 3/2 of the bytes.

For a loop of your own, on every rank of `group`, which all start from the same parameters:

    optimizer = ShardedOptimizer(model.parameters(), partial(torch.optim.AdamW, lr=1e-3), group)
    loss.backward()                     # of this rank's batch, its mean
    optimizer.clip_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup

from meshwright.parallel import exchange


class _Flat:
    """Parameters of one dtype in one buffer, and this rank's share of it."""

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup, whole: bool) -> None:
        self.parameters, self.group, self.whole = parameters, group, whole
        ranks = group.size()
        self.starts = [0, *accumulate(p.numel() for p in parameters)]
        total = self.starts[-1]
        share = -(-total // ranks)
        self.edges = [
            min(i * share, total) if not whole else self.nearest(i * total // ranks) for i in range(ranks)
        ] + [total]
        self.values = parameters[0].new_empty(total if whole else share * ranks)
        self.gradients = torch.zeros_like(self.values)
        self.share = slice(self.edges[group.rank()], self.edges[group.rank() + 1])
        with torch.no_grad():
            self.values[total:] = 0
            for p, start in zip(parameters, self.starts, strict=False):
                view = self.values[start : start + p.numel()].view_as(p)
                p.data = view.copy_(p)
        self.slices = {
            p: part for p, start in zip(parameters, self.starts, strict=False) if (part := self.slice_of(p, start))
        }

    def nearest(self, edge: int) -> int:
        return self.starts[bisect_left(self.starts, edge)]

    def slice_of(self, parameter: nn.Parameter, start: int) -> tuple[nn.Parameter, int, int] | None:
        """Return this rank's slice of a parameter, and its offset in the buffer."""
        a, b = max(start, self.share.start), min(start + parameter.numel(), self.share.stop)
        if a >= b:
            return None
        view = self.values[a:b].detach()
        return nn.Parameter(view.view_as(parameter) if self.whole else view), a, b

    def reduce(self, average: bool) -> None:
        """Sum or average the gradients, and set the gradient of each slice."""
        for p, start in zip(self.parameters, self.starts, strict=False):
            place = self.gradients[start : start + p.numel()].view_as(p)
            place.zero_() if p.grad is None else place.copy_(p.grad)
        if self.whole:
            distributed.all_reduce(self.gradients, group=self.group)
            shard_gradient = self.gradients[self.share]
        else:
            shard_gradient = exchange.reduce_scatter(self.gradients, self.group, 0)
        if average:
            shard_gradient.div_(self.group.size())
        for part, a, b in self.slices.values():
            part.grad = shard_gradient[a - self.share.start : b - self.share.start].view_as(part)

    def gather(self) -> None:
        if not self.whole:
            size = len(self.values) // self.group.size()
            own = self.values[self.group.rank() * size :][:size]
            self.values.copy_(exchange.all_gather(own, self.group, 0))
            return
        for rank in range(self.group.size()):
            part = self.values[self.edges[rank] : self.edges[rank + 1]]
            if len(part):
                distributed.broadcast(part, group=self.group, group_src=rank)


class ShardedOptimizer:
    """An optimizer whose state is divided over the ranks of a group.

    `parameters` are parameters, or torch's groups of them ({"params": […], "weight_decay": 0.1}); `make` makes the optimizer of this rank's slices.
    `average=False`: gradients are summed. `optimizer` is the torch optimizer inside, for a learning-rate scheduler.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        group: ProcessGroup | None = None,
        *,
        average: bool = True,
        whole: bool = False,
    ) -> None:
        group = group or distributed.group.WORLD
        assert group is not None
        self.group, self.average, self.reduced = group, average, False
        given = list(parameters)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        trained = [p for each in groups for p in each["params"] if p.requires_grad]
        self.flats = [
            _Flat([p for p in trained if p.dtype == dtype], group, whole)
            for dtype in sorted({p.dtype for p in trained}, key=str)
        ]
        slices = {p: part for flat in self.flats for p, (part, _, _) in flat.slices.items()}
        own = [{**each, "params": [slices[p] for p in each["params"] if p in slices]} for each in groups]
        empty = nn.Parameter(torch.zeros(0, 0))  # torch refuses an optimizer of nothing
        self.optimizer = make([each for each in own if each["params"]] or [{"params": [empty]}])

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients of this step; `clip_norm` and `step` call it if it was not called."""
        if not self.reduced:
            for flat in self.flats:
                flat.reduce(self.average)
        self.reduced = True

    @torch.no_grad()
    def clip_norm(self, most: float | None = None) -> torch.Tensor:
        """Return the norm of the averaged gradient; scale the gradient down to `most` if its norm is larger."""
        self.reduce()
        gradients = [part.grad for flat in self.flats for part, _, _ in flat.slices.values() if part.grad is not None]
        device = self.flats[0].values.device if self.flats else None
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in gradients:
            squares += gradient.double().square().sum()
        norm = exchange.all_reduce(squares, self.group).sqrt()
        if most is not None and float(norm) > most:
            for gradient in gradients:
                gradient.mul_(most / (float(norm) + 1e-6))
        return norm

    @torch.no_grad()
    def step(self) -> None:
        self.reduce()
        self.optimizer.step()
        for flat in self.flats:
            flat.gather()
        self.reduced = False

    def zero_grad(self) -> None:
        self.reduced = False
        for flat in self.flats:
            for p in flat.parameters:
                p.grad = None
