"""Recompute to a budget: the fewest layers of each stage to recompute so that the activations fit.

A rank saves S bytes per layer for every micro-batch in flight, or T·h bytes for a layer that it recomputes; while it recomputes a
layer it holds that layer's S once more. With n layers in its stages, c of them recomputed, and F micro-batches in flight,

    F · ((n − c)·S + c·T·h) + S·[c > 0]  ≤  budget          for the smallest c

Where layers are of several kinds, the largest one counts for all, so that the budget holds for any choice of layers. All ranks recompute
the same number of layers per stage: as many as the fullest rank needs.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.describe.accelerator import DTYPE_BYTES
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.lower import footprint
from meshwright.lower.batch import Batch
from meshwright.lower.stages import in_flight, stages_of_rank
from meshwright.units import format_bytes

# Activations are kept in 16 bits when the arithmetic is narrower than that.
ACTIVATION_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0}


def activation_bytes(workload: Workload) -> float:
    return ACTIVATION_BYTES.get(workload.precision, DTYPE_BYTES["bf16"])


@dataclass(frozen=True)
class Fit:
    """Number of layers of a stage to recompute, their total, and the bytes that the fullest rank then saves."""

    layers: int
    of: int
    bytes: float


def layers_to_recompute(model: Model, plan: Plan, workload: Workload, budget: float, stack: Stack | None = None) -> Fit:
    """The fewest layers of a stage to recompute so that the layers of every rank save no more than `budget` bytes."""
    plain = plan.but(recompute="none", recompute_every=1, recompute_layers=0, recompute_budget=0.0)
    batch = Batch.of([plain, plain.but(recompute="full")], model, workload, stack or Stack())
    kinds = [model.blocks[kind] for kind in model.kinds]
    saved = [sum(footprint.saved(batch, block, activation_bytes(workload)).values()) for block in kinds]
    whole, checkpoint = np.max([np.broadcast_to(size, 2) for size in saved], axis=0).tolist()
    lengths = plan.stage_layers(model.layers)
    ranks = [[lengths[s] for s in stages_of_rank(plan, rank)] for rank in range(plan.pp)]
    flying = [float(np.broadcast_to(in_flight(batch, np.full(2, float(r))), 2)[0]) for r in range(plan.pp)]
    for count in range(max(lengths) + 1):
        recomputed = [sum(min(count, n) for n in stages) for stages in ranks]
        sizes = [
            f * ((sum(stages) - c) * whole + c * checkpoint)
            for f, stages, c in zip(flying, ranks, recomputed, strict=True)
        ]
        fit = Fit(count, max(lengths), max(sizes) + (whole if count else 0.0))
        if fit.bytes <= budget:
            return fit
    raise MeshwrightError(
        "MW-PAR-003",
        f"{format_bytes(fit.bytes)} of activations with every layer recomputed, more than the "
        f"budget of {format_bytes(budget)}",
        fix="--set plan.microbatch=1",
    )


def resolve_recompute_budget(model: Model, plan: Plan, workload: Workload, stack: Stack | None = None) -> Plan:
    """The plan with `recompute=auto` replaced by the layers that its budget asks to recompute."""
    if plan.recompute != "auto":
        return plan
    if not plan.recompute_budget:
        what = "recompute=auto needs recompute_budget here"
        why = "Without a budget the layers are chosen to fit a device's memory, and no device is known"
        raise MeshwrightError("MW-PAR-004", what, why=why, fix="--set plan.recompute_budget=20GiB")
    count = layers_to_recompute(model, plan, workload, plan.recompute_budget, stack).layers
    return plan.but(recompute="full" if count else "none", recompute_layers=count, recompute_budget=0.0)
