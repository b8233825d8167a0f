"""The layouts of the matrix in the daily run: as few as cover every kind of layout; the others are in `make soak`.

A layout's *features* are what its plan and model turn on, one value for each family: `{"data": "zero3", "tensor": "sp",
"model": "gpt"}`. Its *kinds* are each feature (of an option: its name), each pair of axes, and ZeRO-3 with each other axis. Two layouts of the same
kinds prove the same thing twice. `covering` repeatedly takes the layout with the most new kinds for its cost, then drops the layouts all of whose
kinds were covered by later ones.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import inexact

from meshwright.describe.plan import Plan

UNSET = Plan()
OPTIONS = (
    *("layers_per_stage", "expert_tp", "recompute", "recompute_every", "recompute_layers", "reshard", "reduce", "wrap"),
    *(
        "prefetch",
        "average_every",
        "order",
        "overlap",
        "offload",
        "offload_layers",
        "wire",
        "master",
        "grad_dtype",
        "gather_dtype",
    ),
)
NUMBERS = ("layers_per_stage", "recompute_every", "wrap", "average_every", "order")
AXES = ("data", "tensor", "context", "pipeline", "expert", "recompute")
# Families that a lossy sum or a 16-bit step depends on.
LOSSY = ("wire", "precision", "reduce", "master", "grad_dtype")


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


def exact_kinds(layout: Any) -> set[tuple[Any, ...]]:
    """Each feature, each pair of axes, ZeRO-3 and fp8 with each other axis, an axis of more than two ranks, and all axes together; another
    optimizer than AdamW with each axis. More ranks are expensive: of layouts of four the model and the router are not in their kinds (`test_oracle`
    has every model), and of those of eight only the one with all axes is in the daily run."""
    found, plan = features(layout), layout.plan
    axes = [axis for axis in AXES if axis in found]
    if layout.optimizer != "adamw":
        return {(layout.optimizer, axis) for axis in axes if axis != "recompute"}
    if set(AXES) <= set(axes):
        return {("all axes",)}
    if plan.world > 4:
        return set()
    combined: set[tuple[Any, ...]] = set(combinations(axes, 2))
    combined |= {("zero3", axis) for axis in axes if axis != "data" and found.get("data") == "zero3"}
    combined |= {("precision", found["precision"], axis) for axis in axes if "precision" in found}
    longer = {(name, "above 2") for name in ("tp", "cp", "pp") if getattr(plan, name) > 2}
    shown = found.items() if plan.world <= 2 else [f for f in found.items() if not f[0].startswith(("model", "router"))]
    return set(map(kind_of, shown)) | combined | longer


def kind_of(feature: tuple[str, Any]) -> tuple[Any, ...]:
    """A feature that one layout shows: an option and a setting of a router by name, a schedule without its virtual stages."""
    family, value = feature
    if family == "pipeline":
        return family, value[0]
    return (family,) if family in NUMBERS or family.startswith("router ") else feature


def lossy_kinds(layout: Any) -> set[tuple[Any, ...]]:
    """The features that a loss depends on (of a compressor: its class), and compression and precision with each axis."""
    found = features(layout)
    if "wire" in found:
        found["wire"] = next(i for i, names in enumerate(inexact.SAME_CLASS) if found["wire"] in names)
    losses = [loss for loss in ("wire", "precision") if loss in found]
    pairs = {(loss, axis) for loss in losses for axis in AXES if axis in found}
    sharded = {("sharded", layout.plan.zero > 0)} if "wire" in losses and layout.dtype == "fp64" else set()
    return pairs | sharded | {(family, value) for family, value in found.items() if family in LOSSY}


def seconds(layout: Any) -> float:
    """About how many seconds of a core a layout takes, in tenths: fitted to the measured times of the daily layouts."""
    plan, job = layout.plan, layout.job()
    layers = plan.microbatches(job.workload) * job.model.layers / plan.pp
    slow = (3, job.model.experts), (2, plan.cp > 1), (2, plan.tp > 1), (2, layout.precision == "fp8"), (3, plan.lossy)
    return plan.world * (1 + (plan.zero > 0) + 0.15 * layers * (1 + sum(weight for weight, is_so in slow if is_so)))


def covering(layouts: Sequence[Any], kinds_of: Callable[[Any], set[tuple[Any, ...]]]) -> list[Any]:
    """Layouts, in their order, that together cover every kind of all layouts."""
    shown = {layout: kinds_of(layout) for layout in layouts}
    missing: set[tuple[Any, ...]] = set().union(*shown.values())
    cost = {layout: seconds(layout) for layout in layouts}
    chosen: set[Any] = set()
    while missing:
        best = max(layouts, key=lambda layout: len(shown[layout] & missing) / cost[layout])
        chosen.add(best)
        missing -= shown[best]
    times = Counter(kind for layout in chosen for kind in shown[layout])
    for layout in sorted(layouts, key=cost.__getitem__, reverse=True):
        if layout in chosen and all(times[kind] > 1 for kind in shown[layout]):
            chosen.remove(layout)
            times.subtract(shown[layout])
    return [layout for layout in layouts if layout in chosen]
