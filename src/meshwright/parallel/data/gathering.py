"""The units of `fully_shard`: the layers that are gathered together, and what torch does with each unit.

    forward,     whether a unit is gathered while the one before it computes: torch's choice, one ahead in backward (in forward the host runs
    backward     ahead of the device anyway), or none
    reshard      whether to free a unit after its forward and gather it again in backward
    dtypes       of gathered parameters and products, and of the reduction

`describe.sharding.shard_dim` says which dimension of a parameter is cut. Gradients are summed, not averaged: divide the
loss by the global number of tokens.

Private name of torch, before 2.12: the `nn` of `torch.distributed.fsdp._fully_shard._fsdp_param` (`shards_of_integers`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.torch_version import TorchVersion

from meshwright.describe.sharding import shard_dim
from meshwright.errors import MeshwrightError

Unit = list[nn.Module]  # modules that are gathered together, in the order they run


@dataclass(frozen=True)
class Gathering:
    forward: bool = True
    backward: bool = True
    reshard: bool = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


def grouped(layers: Sequence[nn.Module], count: int) -> list[Unit]:
    return [list(layers[i : i + count]) for i in range(0, len(layers), count)] if count else []


def shard_units(
    module: nn.Module,
    units: list[Unit],
    mesh: DeviceMesh,
    gathering: Gathering,
    ignored: set[nn.Parameter] | None = None,
) -> None:
    """Shard a module's parameters over a mesh of ranks: those of each unit together, and all other parameters as one unit."""
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
    with shards_of_integers():
        for unit in units:
            fully_shard(unit if len(unit) > 1 else unit[0], **options)
        fully_shard(module, **options)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # Else torch uses PREMUL_SUM for the factor 1, which gloo lacks
            part.set_force_sum_reduction_for_comms(True)
    for first in [unit[0] for unit in units]:
        if not gathering.forward:
            first.set_modules_to_forward_prefetch([])  # type: ignore[operator]
        if not gathering.backward:  # a unit that prefetches itself, which is gathered already, prefetches nothing
            first.set_modules_to_backward_prefetch([first])  # type: ignore[operator]


@contextmanager
def shards_of_integers() -> Iterator[None]:
    """Inside the `with` block torch shards the bytes of a quantised base. Before 2.12 it first makes every shard a parameter that needs a gradient,
    which integers cannot, and then sets whether it needs one."""
    if torch.__version__ >= TorchVersion("2.12"):
        yield
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    _fsdp_param.nn = SimpleNamespace(**vars(nn) | {"Parameter": parameter})  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param.nn = nn


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
