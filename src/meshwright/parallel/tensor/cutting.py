"""Cutting the parameters of a module: by the rule of its style, by a row for one parameter, or part by part of a fused weight.

`shard_parameters` reads `describe.sharding.rules`, for our models and for a user's module: which dimension a style cuts, whether it must
divide, and over which axis the gradient is a partial sum. Everything that is cut is recorded in the `Split`.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup

from meshwright.describe.sharding import KV_COPIES, RULES, Degrees, even_range, partial_over, rule_of
from meshwright.errors import MeshwrightError
from meshwright.parallel.tensor.cuts import Cut, Split, cut_out, fused_cuts
from meshwright.parallel.tensor.plain import is_transposed, output_dim


def shard_parameters(done: Split, name: str, part: Any, style: str, copies: int = 1) -> None:
    """Replace a module's parameters by this rank's part, by the rule of its style; `copies` neighbours hold the same KV head."""
    degrees = Degrees(done.group.size(), kv_copies=copies, sp=done.sequence, all_gather=done.form == "all-gather")
    for field_name, parameter in list(part.named_parameters(recurse=False)):
        own = f"{style}-bias" if field_name == "bias" and f"{style}-bias" in RULES else style
        rule, flipped = rule_of(own, degrees.all_gather), parameter.ndim == 2 and is_transposed(part)
        for dim, _ in rule.cuts:
            cut_parameter(done, part, name, field_name, 1 - dim if flipped else dim, rule.even, copies)
        for axis, partial in partial_over(own, degrees).items():
            if partial:
                (done.copied if axis == KV_COPIES else done.partial).add(f"{name}.{field_name}")


def cut_parameter(
    done: Split, owner: Any, prefix: str, name: str, dim: int, even: bool = True, copies: int = 1
) -> tuple[int, int]:
    """Replace a parameter by this rank's range of dimension `dim`, of which `copies` neighbours keep the same."""
    parameter = getattr(owner, name)
    full, parts = parameter.shape[dim], done.group.size() // copies
    if even and full % parts:
        raise MeshwrightError(
            "MW-TP-002",
            f"dimension {dim} of '{prefix}.{name}', {full}, does not divide over tp={done.group.size()}",
            why="Each rank holds whole heads or columns",
        )
    start, stop = even_range(full, parts, done.group.rank() // copies)
    done.cuts[f"{prefix}.{name}"] = cut = Cut(dim, start, stop - start, full, copies)
    replace_parameter(done, owner, name, (cut,))
    return start, stop


def replace_parameter(done: Split, owner: Any, name: str, cuts: tuple[Cut, ...]) -> None:
    parameter = getattr(owner, name)
    if parameter not in done.made:
        part = cut_out(cuts, parameter.detach()).clone(memory_format=torch.contiguous_format)
        done.made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    setattr(owner, name, done.made[parameter])


def cut_row(done: Split, owner: Any, prefix: str, name: str, argument: str) -> None:
    """A row for one parameter: "cut:1", or "cut:1:1,1" if dimension 1 has two parts, each cut separately."""
    dim, _, parts = argument.partition(":")
    parameter, full = getattr(owner, name), f"{prefix}.{name}"
    if not dim.isdecimal() or int(dim) >= parameter.ndim:
        raise MeshwrightError(
            "MW-TP-005",
            f"'cut:{argument}' does not fit '{full}', which has {parameter.ndim} dimensions",
            why="A cut names a dimension, and the parts in it if there are several",
            valid=["cut:0", "cut:1:1,1"],
        )
    if not parts:
        cut_parameter(done, owner, prefix, name, int(dim))
        return
    length, group = parameter.shape[int(dim)], done.group
    done.fused[full] = cuts = fused_cuts(full, int(dim), length, "column", parts, group.size(), group.rank())
    replace_parameter(done, owner, name, cuts)


def cut_fused(done: Split, name: str, part: Any, kind: str, argument: str) -> None:
    """Columns of several parts, each cut separately."""
    for field_name, dim in (("weight", output_dim(part)), ("bias", 0)):
        parameter = getattr(part, field_name)
        if parameter is None:
            continue
        full = f"{name}.{field_name}"
        cuts = fused_cuts(full, dim, parameter.shape[dim], kind, argument, done.group.size(), done.group.rank())
        done.fused[full] = cuts
        replace_parameter(done, part, field_name, cuts)
        copies = max(cut.copies for cut in cuts)
        if copies > 1:
            done.copies = done.copies or neighbours(done.group, copies)
            done.copied.add(full)
    set_width(part)


def set_width(part: Any) -> None:
    setattr(part, "nf" if is_transposed(part) else "out_features", part.weight.shape[output_dim(part)])


def divide_counts(done: Split, name: str, part: Any, kind: str, argument: str) -> None:
    """Divide attributes by which a module counts, such as its heads, by the ranks; with the prefix `config.`, in a copy of its config."""
    ranks = done.group.size()
    for path in argument.split(","):
        owner, field_name = part, path
        if path.startswith("config."):
            if not any(part.config is made for made in done.configs):
                part.config = copy(part.config)
                done.configs.append(part.config)
            owner, field_name = part.config, path.removeprefix("config.")
        count = getattr(owner, field_name, None)
        if not isinstance(count, int) or (count % ranks and ranks % count):
            raise MeshwrightError(
                "MW-TP-005",
                f"'{name}' counts {field_name} = {count!r}, which does not divide over tp={ranks}",
                why="The attribute must be an integer, and so must each rank's share",
            )
        setattr(owner, field_name, max(1, count // ranks))


def neighbours(group: ProcessGroup, count: int) -> ProcessGroup:
    """The group of `count` neighbouring ranks that this rank belongs to; created by its members if it is not the whole group."""
    if count == group.size():
        return group
    ranks, first = distributed.get_process_group_ranks(group), group.rank() // count * count
    made = distributed.new_group(ranks[first : first + count], use_local_synchronization=True)
    assert isinstance(made, ProcessGroup)
    return made
