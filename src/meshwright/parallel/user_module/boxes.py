"""The sharding table of a user's module: the boxes of what its table of name patterns, expert parallelism and ZeRO have cut.

A parameter is cut at most three times, in this order: columns or rows over tp (`tensor.Split`), experts over ep (dimension 0), and rows or
columns over the shard axis (`fully_shard`, a DTensor). What one rank then holds is a `describe.sharding.Box`, as for our models; of a fused
weight, of which tp cuts each part separately, it is one box for each part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.describe.sharding import KV_COPIES, Box, Parameter, rule_of
from meshwright.describe.sharding.boxes import indices, place
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pieces import Piece
from meshwright.parallel.tensor.cutting import ParameterCut, Split


@dataclass
class Entry:
    """One name of the module's state: where it is, and what one device would save."""

    shape: torch.Size
    dtype: torch.dtype
    source: str  # the name it shares its values with: itself, or of a tied weight the first
    stages: tuple[int, ...]  # that hold it
    block: str = ""  # embedding, or head (all else that is not a matrix of a layer); '': a matrix of a layer


@dataclass(frozen=True)
class Cutting:
    """How one stage of the module was cut."""

    mesh: Mesh
    entries: Mapping[str, Entry]
    stage: int
    split: Split | None
    experts: set[str]  # names of parameters that are spread over ep

    def pieces(self, root: nn.Module) -> list[Piece]:
        """The pieces of the stage, in the order in which the module registers its parameters."""
        uses: dict[nn.Parameter, list[str]] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            uses.setdefault(parameter, []).append(name)
        return [self.piece(parameter, names) for parameter, names in uses.items()]

    def piece(self, parameter: nn.Parameter, names: list[str]) -> Piece:
        source = self.entries[names[0]].source
        cuts = self.split.cuts_of(source) if self.split is not None else ()
        boxes = tuple(self.boxes(parameter, source, names[0] in self.experts, cuts))
        fused: dict[str, Any] = {"fused": boxes, "fused_dim": cuts[0].dim} if len(boxes) > 1 else {}
        return Piece(boxes[0], parameter, tuple(names), **fused)

    def boxes(self, parameter: nn.Parameter, source: str, expert: bool, cuts: tuple[ParameterCut, ...]) -> list[Box]:
        """One box for each cut; one for a parameter that tp does not cut."""
        entry, mesh, local, out, begin = self.entries[source], self.mesh, tuple(parameter.shape), [], 0
        start = [mesh.index("ep") * local[0], *[0] * (len(local) - 1)] if expert else [0] * len(local)
        trained, whole = parameter.requires_grad, not isinstance(parameter, DTensor)
        for cut in cuts or (None,):
            copies, style = cut.copies if cut is not None else 1, style_of(expert, cut)
            table_row = Parameter(source, tuple(entry.shape), style, block=entry.block)
            partial = self.partial(source, copies) if trained else ""
            later = self.stage != entry.stages[0]
            box = Box(table_row, tuple(start), local, (), True, partial, trained, later_stage=later)
            index = indices(mesh.layout, mesh.rank, copies, expert)
            box = place(box, rule_of(style, False), mesh.layout, index, copies, whole)
            if cut is not None:
                box = part_of(box, cut, begin)
                begin += cut.length
            assert whole or box.zero is not None
            out.append(box)
        return out

    def partial(self, source: str, copies: int) -> str:
        """The axis over which the gradient is a partial sum."""
        if self.split is None:
            return ""
        if source in self.split.partial:
            return "tp"
        return KV_COPIES if copies > 1 and source in self.split.copied else ""


def style_of(expert: bool, cut: ParameterCut | None) -> str:
    """The style (`describe.sharding.rules`) that cuts this dimension."""
    if expert:
        return "experts-row-bias" if cut is None else "experts" if cut.dim == 1 else "experts-row"
    if cut is None:
        return "between"
    return "keys" if cut.copies > 1 else "logits" if cut.dim == 0 else "row"


def part_of(box: Box, cut: ParameterCut, begin: int) -> Box:
    """The box of one cut, of which the local tensor has `begin` rows of earlier cuts before it."""
    start, shape, zero = list(box.start), list(box.shape), box.zero
    start[cut.dim], shape[cut.dim] = cut.start, cut.length
    if zero is not None and zero.dim == cut.dim:
        first, last = (min(max(edge - begin, 0), cut.length) for edge in (zero.start, zero.stop))
        zero = replace(zero, start=first, stop=last)
    return replace(box, start=tuple(start), shape=tuple(shape), zero=zero)
