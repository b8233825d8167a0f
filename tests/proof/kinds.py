"""The layouts of the matrix in the daily run: as few as cover every kind of layout; the others are in `make soak`.

A layout's *features* are what its plan and model turn on, one value for each family: `{"data": "zero3", "tensor": "sp",
"model": "gpt"}`. Its *kinds* are each feature combined with each other family: ZeRO-3 with tensor parallelism, sp with data parallelism,
gpt with either. Two layouts of the same kinds prove the same thing twice. `covering` repeatedly takes the layout
with the most new kinds for its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import inexact

from meshwright.describe.plan import Plan

UNSET = Plan()
OPTIONS = (
    *("layers_per_stage", "expert_tp", "recompute", "recompute_every", "recompute_layers", "reshard", "reduce", "wrap"),
    *("prefetch", "average_every", "order", "overlap", "offload", "wire", "master", "grad_dtype"),
)
COST = {1: 1, 2: 2, 4: 4, 8: 12}  # by ranks, on two cores


def features(layout: Any) -> dict[str, Any]:
    """The features of a layout, by family."""
    plan: Plan = layout.plan
    found: dict[str, Any] = {"model": layout.model}
    if plan.replicate > 1 or plan.zero:
        found["data"] = "hsdp" if plan.replicate > 1 and plan.shard > 1 else f"zero{plan.zero}"
    if plan.tp > 1:
        found["tensor"] = (plan.sp, plan.tp_form)
    if plan.cp > 1:
        found["context"] = plan.cp_kind
    if plan.pp > 1:
        found["pipeline"] = (plan.schedule, plan.virtual)
    if plan.ep > 1:
        found["expert"] = "ep"
    for option in OPTIONS:
        if getattr(plan, option) != getattr(UNSET, option):
            found[option] = getattr(plan, option)
    if layout.prepare:
        found["prepare"] = layout.prepare
    if layout.precision == "fp8" or layout.dtype != "fp64":
        found["precision"] = layout.precision
    return found | {f"router {name}": value for name, value in layout.router}


def kinds(layout: Any) -> set[tuple[Any, ...]]:
    """Each feature on its own, and combined with each other family."""
    found = features(layout)
    alone = set(found.items())
    return alone | {(family, value, other) for family, value in alone for other in found if other != family}


def exact_kinds(layout: Any) -> set[tuple[Any, ...]]:
    """As `kinds`, but models are combined only with axes, not with every option. An axis of more than two ranks is a kind too, and so
    are all axes together."""
    axes = {"data", "tensor", "context", "pipeline", "expert"}
    paired = {kind for kind in kinds(layout) if len(kind) == 2 or kind[0] != "model" or kind[2] in axes}
    longer = {(axis, "above 2") for axis in ("tp", "cp", "pp", "replicate", "shard") if getattr(layout.plan, axis) > 2}
    return paired | longer | ({("all axes",)} if axes <= features(layout).keys() else set())


def lossy_kinds(layout: Any) -> set[tuple[Any, ...]]:
    """Each loss (a class of compressor, a precision) combined with each family and each form of data parallelism, whose sums it
    changes; and each feature combined with any loss. Models do not matter."""
    found = {family: value for family, value in features(layout).items() if family != "model"}
    if "wire" in found:
        found["wire"] = next(i for i, names in enumerate(inexact.SAME_CLASS) if found["wire"] in names)
    losses = found.keys() & {"wire", "precision"}
    combined = {(loss, found[loss], other) for loss in losses for other in found if other != loss}
    combined |= {(loss, found[loss], "data", found.get("data")) for loss in losses}
    return combined | set(found.items()) | {(family, value, "lost") for family, value in found.items()}


def covering(layouts: Sequence[Any], kinds_of: Callable[[Any], set[tuple[Any, ...]]]) -> list[Any]:
    """Layouts, in their order, that together cover every kind of all layouts."""
    shown = {layout: kinds_of(layout) for layout in layouts}
    missing: set[tuple[Any, ...]] = set().union(*shown.values())
    chosen: set[Any] = set()
    while missing:
        best = max(layouts, key=lambda layout: len(shown[layout] & missing) / COST[layout.plan.world])
        chosen.add(best)
        missing -= shown[best]
    return [layout for layout in layouts if layout in chosen]
