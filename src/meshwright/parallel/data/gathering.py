"""ZeRO-3's units: what is gathered together, how early, and how much at most.

    layers       so many layers are one unit: fewer, larger messages for more memory; 0: the whole module is one
    forward,     units gathered ahead of the one at work, so that their messages hide behind its products: u units of
    backward     w bytes hold (1 + u)·w at once; unsaid: torch's own way, one ahead backward, none forward (there the
                 host runs ahead of the device by itself); 0: each waits for its own
    limit        bytes of gathered weights at once: fewer are gathered ahead where they would not fit
    reshard      free a unit after its forward and gather it again in backward, or keep it (True, False)
    dtypes       of gathered parameters and products, of the reduction, and of floating-point buffers

A parameter is cut along its first dimension, into rows; along its second where it has fewer rows than there are ranks and
that divides, as of experts: else the first ranks would hold all of it. Gradients are summed, not averaged: divide the loss
by the global number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from meshwright.describe.sharding import shard_dim
from meshwright.errors import MeshwrightError
from meshwright.parallel.numerics.precision import cast
from meshwright.units import format_bytes

Unit = list[nn.Module]  # gathered together; used in this order


@dataclass(frozen=True)
class Gathering:
    layers: int = 1
    forward: int | None = None
    backward: int | None = None
    limit: float = float("inf")
    reshard: bool = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    layers: Sequence[nn.Module] = (),
    how: Gathering | None = None,
    ignored: set[nn.Parameter] | None = None,
) -> list[Unit]:
    """Shard a module's parameters over a mesh of ranks: `layers` in units, in the order they run, the rest as one."""
    how = how or Gathering()
    return shard_units(module, grouped(layers, how.layers), mesh, how, ignored)


def grouped(layers: Sequence[nn.Module], count: int) -> list[Unit]:
    return [list(layers[i : i + count]) for i in range(0, len(layers), count)] if count else []


def shard_units(
    module: nn.Module, units: list[Unit], mesh: DeviceMesh, how: Gathering, ignored: set[nn.Parameter] | None = None
) -> list[Unit]:
    policy = MixedPrecisionPolicy(param_dtype=how.param_dtype, reduce_dtype=how.reduce_dtype)
    ranks = mesh.size(mesh.ndim - 1)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": how.reshard,
        "mp_policy": policy,
        "shard_placement_fn": lambda p: Shard(shard_dim(p.shape, ranks)),
    }
    if ignored:
        options["ignored_params"] = ignored
    check_apart(module, units)
    sizes = [size_of(unit, how.param_dtype) for unit in units]
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], **options)
    fully_shard(module, **options)
    if how.buffer_dtype is not None:
        cast(module, None, how.buffer_dtype)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # else the factor 1 would ask for PREMUL_SUM, which gloo lacks
    gather_ahead(units, sizes, how)
    return units


def check_apart(module: nn.Module, units: list[Unit]) -> None:
    """A weight that two units share torch would shard twice, and update as two."""
    inside = {part for unit in units for child in unit for part in child.modules()}
    rest = [part for part in module.modules() if part not in inside]
    seen: dict[nn.Parameter, int] = {}
    for i, unit in enumerate([*units, rest]):
        whole = i < len(units)
        for p in {p for part in unit for p in part.parameters(recurse=whole)}:
            if seen.setdefault(p, i) != i:
                name = next(name for name, other in module.named_parameters() if other is p)
                raise MeshwrightError(
                    "MW-ZERO-006",
                    f"'{name}' is shared by modules of two units",
                    why="Each would shard and update a copy of its own",
                    fix="leave both modules out of `layers`: all that is left is one unit",
                )


def size_of(unit: Unit, dtype: torch.dtype | None) -> int:
    parameters = {p for part in unit for p in part.parameters()}
    return sum(p.numel() * (dtype or p.dtype).itemsize for p in parameters)


def gather_ahead(units: list[Unit], sizes: list[int], how: Gathering) -> None:
    largest = max(sizes, default=0)
    if largest > how.limit:
        raise MeshwrightError(
            "MW-ZERO-001",
            f"a unit of {format_bytes(largest)}, more than the limit of {format_bytes(how.limit)}",
            why="A unit is gathered whole",
            fix="fewer layers a unit",
        )
    limited = how.limit < float("inf")
    ahead = how.forward if how.forward is not None or not limited else 0
    behind = how.backward if how.backward is not None or not limited else 1
    for i, unit in enumerate(units):
        first: Any = unit[0]
        if ahead is not None:
            first.set_modules_to_forward_prefetch([units[k][0] for k in fitting(sizes, i, 1, ahead, how.limit)])
        if behind is not None:  # a unit that prefetches itself, which is there already, prefetches nothing else
            chosen = fitting(sizes, i, -1, behind, how.limit) or [i]
            first.set_modules_to_backward_prefetch([units[k][0] for k in chosen])


def fitting(sizes: list[int], at: int, step: int, most: int, limit: float) -> list[int]:
    """The next units, `most` of them, that fit beside the one at work."""
    out, room = [], limit - sizes[at]
    for k in range(1, most + 1):
        i = at + step * k
        if not 0 <= i < len(sizes) or sizes[i] > room:
            break
        out.append(i)
        room -= sizes[i]
    return out
