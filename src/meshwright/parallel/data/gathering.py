"""The units of `fully_shard`: which layers are gathered together, how early, and how many bytes at most.

    layers       number of layers in a unit: more layers mean fewer, larger messages and more memory; 0: the whole module
                 is one unit
    forward,     units prefetched while one computes, so that their messages are hidden behind its products: u units of w
    backward     bytes hold (1 + u)·w at once. Default: torch's choice, one in backward, none in forward (there the host
                 runs ahead of the device anyway); 0: no prefetch
    limit        bytes of gathered weights at once: fewer units are prefetched where they would not fit
    reshard      whether to free a unit after its forward and gather it again in backward
    dtypes       of gathered parameters and products, of the reduction, and of floating-point buffers

`describe.sharding.shard_dim` says which dimension of a parameter is cut. Gradients are summed, not averaged: divide the
loss by the global number of tokens.
"""

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

Unit = list[nn.Module]  # modules that are gathered together, in the order they run


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
    gathering: Gathering | None = None,
    ignored: set[nn.Parameter] | None = None,
) -> list[Unit]:
    """Shard a module's parameters over a mesh of ranks: `layers`, in the order they run, in units, and all other parameters
    as one unit."""
    gathering = gathering or Gathering()
    return shard_units(module, grouped(layers, gathering.layers), mesh, gathering, ignored)


def grouped(layers: Sequence[nn.Module], count: int) -> list[Unit]:
    return [list(layers[i : i + count]) for i in range(0, len(layers), count)] if count else []


def shard_units(
    module: nn.Module,
    units: list[Unit],
    mesh: DeviceMesh,
    gathering: Gathering,
    ignored: set[nn.Parameter] | None = None,
) -> list[Unit]:
    policy = MixedPrecisionPolicy(param_dtype=gathering.param_dtype, reduce_dtype=gathering.reduce_dtype)
    ranks = mesh.size(mesh.ndim - 1)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": gathering.reshard,
        "mp_policy": policy,
        "shard_placement_fn": lambda p: Shard(shard_dim(p.shape, ranks)),
    }
    if ignored:
        options["ignored_params"] = ignored
    check_no_shared_weights(module, units)
    sizes = [size_of(unit, gathering.param_dtype) for unit in units]
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], **options)
    fully_shard(module, **options)
    if gathering.buffer_dtype is not None:
        cast(module, None, gathering.buffer_dtype)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(
                True
            )  # else torch uses PREMUL_SUM for the factor 1, which gloo lacks
    gather_ahead(units, sizes, gathering)
    return units


def check_no_shared_weights(module: nn.Module, units: list[Unit]) -> None:
    """Raise for a weight shared by two units: torch would shard it twice, and the two copies would diverge."""
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
                    why="Each unit would shard and update its own copy",
                    fix="leave both modules out of `layers`: everything outside `layers` is one unit",
                )


def size_of(unit: Unit, dtype: torch.dtype | None) -> int:
    parameters = {p for part in unit for p in part.parameters()}
    return sum(p.numel() * (dtype or p.dtype).itemsize for p in parameters)


def gather_ahead(units: list[Unit], sizes: list[int], gathering: Gathering) -> None:
    largest = max(sizes, default=0)
    if largest > gathering.limit:
        raise MeshwrightError(
            "MW-ZERO-001",
            f"a unit has {format_bytes(largest)}, more than the limit of {format_bytes(gathering.limit)}",
            why="A unit is gathered as a whole",
            fix="put fewer layers into a unit",
        )
    limited = gathering.limit < float("inf")
    forward = gathering.forward if gathering.forward is not None or not limited else 0
    backward = gathering.backward if gathering.backward is not None or not limited else 1
    for i, unit in enumerate(units):
        first: Any = unit[0]
        if forward is not None:
            first.set_modules_to_forward_prefetch([units[k][0] for k in fitting(sizes, i, 1, forward, gathering.limit)])
        if backward is not None:  # a unit that prefetches itself, which is gathered already, prefetches nothing
            chosen = fitting(sizes, i, -1, backward, gathering.limit) or [i]
            first.set_modules_to_backward_prefetch([units[k][0] for k in chosen])


def fitting(sizes: list[int], at: int, step: int, most: int, limit: float) -> list[int]:
    """The next units, at most `most`, that fit into the limit together with the running one."""
    out, room = [], limit - sizes[at]
    for k in range(1, most + 1):
        i = at + step * k
        if not 0 <= i < len(sizes) or sizes[i] > room:
            break
        out.append(i)
        room -= sizes[i]
    return out
