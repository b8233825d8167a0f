"""Sizes of the axes and positions of their groups, for one plan (integers) and for a batch of plans (arrays).

`plan` below is anything with the degrees replicate, shard, tp, cp, pp, ep and etp, as integers or arrays. Besides these base axes:

    dp           replicate and shard together
    dp_cp        ranks over which gradients are summed: context-parallel ranks hold the same weights and see other tokens
    shard_cp     ranks over which ZeRO shards, for the same reason
    stage        ranks of one pipeline stage; experts re-factorise them in order: expert_tp fastest, then ep, then expert_dp
    expert_shard the part of expert_dp inside one shard_cp group; 1 where the copies of an expert are not equally many in each
    ends         the first and the last rank of a pipeline

With the first axis of an order fastest, neighbours on an axis are `stride` ranks apart, and a group has

    min(size, max(1, ⌊unit / stride⌋))

members in a unit of consecutive devices. This counts exactly where strides and units divide each other, as they do for nodes of 2ⁿ devices and
degrees of 2ᵐ; otherwise it is the number in a unit that starts with the group, rounded down.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Number = Any  # an int, or an array of numbers

BASE = ("tp", "cp", "pp", "shard", "replicate")
DERIVED = (
    "dp",
    "dp_cp",
    "shard_cp",
    "expert_tp",
    "ep",
    "expert_dp",
    "expert_shard",
    "expert_replicate",
    "stage",
    "world",
)


def base_axes(order: Sequence[str]) -> tuple[str, ...]:
    """Base axes, fastest first; dp is shard, then replicate."""
    return tuple(axis for name in order for axis in (("shard", "replicate") if name == "dp" else (name,)))


def strides(plan: Any, order: Sequence[str]) -> dict[str, Number]:
    """Distance between neighbouring ranks on every base axis."""
    out, stride = {}, 1
    for axis in base_axes(order):
        out[axis] = stride
        stride = stride * getattr(plan, axis)
    return out


def axis_size(plan: Any, axis: str) -> Number:
    """Ranks in one group of an axis."""
    dp = plan.replicate * plan.shard
    expert_ranks = plan.etp * plan.ep
    match axis:
        case "dp":
            return dp
        case "dp_cp":
            return dp * plan.cp
        case "shard_cp":
            return plan.shard * plan.cp
        case "stage":
            return plan.tp * plan.cp * dp
        case "world":
            return plan.tp * plan.cp * plan.pp * dp
        case "expert_tp":
            return plan.etp
        case "expert_dp":
            return plan.tp * plan.cp * dp / expert_ranks
        case "expert_shard":
            shards = plan.shard * plan.cp
            copies = plan.tp * shards / expert_ranks
            return np.where((shards > 1) & (copies == np.floor(copies)), np.maximum(copies, 1.0), 1.0)
        case "expert_replicate":
            return axis_size(plan, "expert_dp") / axis_size(plan, "expert_shard")
        case "ends":
            return np.minimum(plan.pp, 2)
        case "ep" | "tp" | "cp" | "pp" | "shard" | "replicate":
            return getattr(plan, axis)
    raise KeyError(axis)


def members_in_unit(
    plan: Any, stride: dict[str, Number], axis: str, unit: float, cached: Callable[[str], Number] | None = None
) -> Number:
    """Count the members of one group of the axis inside `unit` consecutive devices; `cached` returns the count of another axis."""

    def of(other: str) -> Number:
        return cached(other) if cached else members_in_unit(plan, stride, other, unit)

    match axis:
        case "dp":
            return of("shard") * of("replicate")
        case "dp_cp":
            return of("dp") * of("cp")
        case "shard_cp":
            return of("shard") * of("cp")
        case "stage":
            return of("tp") * of("dp_cp")
        case "expert_tp":
            return np.minimum(plan.etp, of("stage"))
        case "ep":
            return np.minimum(plan.ep, np.maximum(1.0, np.floor(of("stage") / plan.etp)))
        case "expert_dp" | "expert_shard":
            copies = np.floor(of("stage") / (plan.etp * plan.ep))
            return np.minimum(axis_size(plan, axis), np.maximum(1.0, copies))
        case "expert_replicate":
            return np.maximum(1.0, of("expert_dp") / axis_size(plan, "expert_shard"))
        case "ends":
            return np.where((plan.pp - 1) * stride["pp"] < unit, axis_size(plan, "ends"), 1)
        case "world":
            return np.minimum(axis_size(plan, "world"), unit)
    return np.minimum(getattr(plan, axis), np.maximum(1.0, np.floor(unit / stride[axis])))
