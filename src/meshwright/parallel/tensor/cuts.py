"""Which part of a parameter a tensor-parallel rank holds: one range of a dimension, or several of a fused one.

Many models compute queries, keys and values, or gate and up, in one product, whose weight is theirs stacked:

    [ q | k | v ]  cut in two halves:         [ q, half of k ] and [ half of k, v ]        no rank can attend
    each part cut separately:                 [ q₀ | k₀ | v₀ ] and [ q₁ | k₁ | v₁ ]        each has some heads

The table gives the parts, "column:1,1" in proportion, or "heads:32,8,8" in heads, which are never cut: where there are
fewer heads than ranks, neighbours hold copies, as with "keys". Parts that alternate head by head (GPT-NeoX's
q₀k₀v₀q₁k₁v₁…, Falcon's groups) are whole heads one after the other: plain "column" cuts them correctly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from meshwright.describe.sharding import even_range
from meshwright.errors import MeshwrightError
from meshwright.parallel import exchange


@dataclass(frozen=True)
class Cut:
    """This rank's range of one dimension of a parameter, which `copies` neighbours hold."""

    dim: int
    start: int
    length: int
    full: int
    copies: int = 1


def fused_cuts(name: str, dim: int, full: int, kind: str, parts: str, ranks: int, rank: int) -> tuple[Cut, ...]:
    """This rank's ranges of a dimension that holds several `parts`, such as "32,8,8"."""
    counts = [int(word) for word in parts.split(",") if word.isdecimal() and int(word)]
    if len(counts) != parts.count(",") + 1 or full % sum(counts):
        raise MeshwrightError(
            "MW-TP-005",
            f"'{name}' has {full} columns, which '{kind}:{parts}' does not divide",
            why="The parts are whole numbers, in proportion or in heads, whose sum divides the columns",
            valid=["column:1,1", "heads:32,8,8"],
        )
    width, cuts, begin = full // sum(counts), [], 0
    for count in counts:
        units = count if kind == "heads" else count * width  # heads or columns, none of which is cut
        if units % ranks and (kind != "heads" or ranks % units or count == max(counts)):
            raise MeshwrightError(
                "MW-TP-002",
                f"a part of {units} {'heads' if kind == 'heads' else 'columns'} of '{name}' does "
                f"not divide over tp={ranks}",
                why="Each rank holds whole heads or columns",
            )
        copies = max(1, ranks // units)
        start, stop = even_range(count * width, ranks // copies, rank // copies)
        cuts.append(Cut(dim, begin + start, stop - start, full, copies))
        begin += count * width
    return tuple(cuts)


def parts_of(cuts: tuple[Cut, ...], local: torch.Tensor) -> list[torch.Tensor]:
    """Views of a rank's part, one for each cut."""
    return list(local.split([cut.length for cut in cuts], dim=cuts[0].dim))


def cut_out(cuts: tuple[Cut, ...], full: torch.Tensor) -> torch.Tensor:
    """A rank's part of a full tensor."""
    return torch.cat([full.narrow(cut.dim, cut.start, cut.length) for cut in cuts], dim=cuts[0].dim)


@dataclass
class Split:
    """The result of `split`: the cuts by parameter name, and the parameters whose gradient is a partial sum, over tp
    (`partial`) or over the ranks that hold the same KV head (`copied`)."""

    group: ProcessGroup
    sequence: bool = False
    form: str = "megatron"
    head: int = 0
    copies: ProcessGroup | None = None
    sequence_dim: int = 1  # of activations: 1 in [B, S, H], 0 where a module takes [S, B, H]
    cuts: dict[str, Cut] = field(default_factory=dict)
    fused: dict[str, tuple[Cut, ...]] = field(default_factory=dict)  # of parameters that hold several parts
    partial: set[str] = field(default_factory=set)
    copied: set[str] = field(default_factory=set)
    made: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)  # a weight shared by two modules stays shared
    configs: list[Any] = field(default_factory=list)  # copied configs of modules that read their counts from one

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The input of column-split products: gathered along the sequence where that is divided."""
        return (
            exchange.gather_in(x, self.group, self.sequence_dim) if self.sequence else exchange.copy_in(x, self.group)
        )

    def leave(self, partial_sum: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, of which each keeps its share of the sequence where that is divided. `partial_sum` must be a
        fresh tensor: it may be summed in place."""
        if self.sequence:
            return exchange.scatter_out(partial_sum, self.group, self.sequence_dim)
        return exchange.reduce_out(partial_sum, self.group)

    def sum_gradients(self, module: nn.Module) -> None:
        """Complete the gradients that are partial sums; call it after the backward of a step's last micro-batch."""
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        copied = [
            part
            for n in gradients
            if n in self.copied
            for cut, part in zip(self.cuts_of(n), self.parts(n, gradients[n]), strict=True)
            if cut.copies > 1
        ]
        partial = [gradients[n] for n in gradients if n in self.partial]
        for tensors, group in ((partial, self.group), (copied, self.copies)):
            if tensors and group is not None:
                exchange.sum_together(tensors, group)

    def norm(self, module: nn.Module) -> torch.Tensor:
        """The norm of the whole model's gradient: each rank counts its own part, and one rank of several that hold copies."""
        squares = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)
        for name, parameter in module.named_parameters():
            copies = [cut.copies for cut in self.cuts_of(name)] or [self.group.size()]
            for local, count in (
                zip(self.parts(name, parameter.grad), copies, strict=True) if parameter.grad is not None else ()
            ):
                if self.group.rank() % count == 0:
                    squares += local.double().square().sum()
        return exchange.all_reduce(squares, self.group).sqrt()

    def cuts_of(self, name: str) -> tuple[Cut, ...]:
        """One cut, several of a fused parameter, none of a whole one."""
        return self.fused.get(name) or ((self.cuts[name],) if name in self.cuts else ())

    def parts(self, name: str, local: torch.Tensor) -> list[torch.Tensor]:
        cuts = self.cuts_of(name)
        return parts_of(cuts, local) if cuts else [local]

    @torch.no_grad()
    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The full tensor, on every rank, of which `part` is this rank's part: a parameter, its gradient or a moment."""
        cuts = self.cuts_of(name)
        if not cuts:
            return part.detach().clone()
        full = part.new_zeros([cuts[0].full if dim == cuts[0].dim else n for dim, n in enumerate(part.shape)])
        for cut, local in zip(cuts, parts_of(cuts, part), strict=True):
            if self.group.rank() % cut.copies == 0:
                full.narrow(cut.dim, cut.start, cut.length).copy_(local)
        return exchange.all_reduce(full, self.group)
