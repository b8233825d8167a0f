"""`recompute = "auto"` without a budget: the smallest number of recomputed layers with which the plan fits in device memory.

    states + gradients + (1 + slack) · (activations(c) + gathered + working) + context  ≤  0.95 · memory

with c recomputed layers per stage. The memory model is that of `estimate`, so the resulting plan fits there too. While a layer is
recomputed, all its tensors are in memory, so c = 1 may need more than c = 0; every further layer saves memory. A `recompute_budget`
limits only the saved activations, takes precedence, and is resolved by `lower.recompute`.
"""

from bisect import bisect_left

from meshwright.cost.memory import rank_peaks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.result import USABLE_MEMORY
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.lower.recompute import resolve_recompute_budget
from meshwright.lower.step import step_program
from meshwright.units import format_bytes


def resolve_recompute(model: Model, plan: Plan, workload: Workload, stack: Stack, device_memory: float) -> Plan:
    """The plan with `recompute=auto` replaced by the fewest recomputed layers that fit devices of this much memory."""
    if plan.recompute != "auto" or plan.recompute_budget:
        return resolve_recompute_budget(model, plan, workload, stack)
    none = plan.but(recompute="none")
    if peak(model, none, workload, stack) <= USABLE_MEMORY * device_memory:
        return none

    def recomputing(count: int) -> Plan:
        return plan.but(recompute="full", recompute_layers=count)

    counts = range(1, max(plan.stage_layers(model.layers)) + 1)  # empty for a model without layers
    fewest = bisect_left(
        counts, True, key=lambda c: peak(model, recomputing(c), workload, stack) <= USABLE_MEMORY * device_memory
    )
    if fewest == len(counts):
        least = peak(model, recomputing(counts[-1]) if counts else none, workload, stack)
        raise MeshwrightError(
            "MW-PAR-003",
            f"{format_bytes(least)} per device with every layer recomputed, more than "
            f"{format_bytes(USABLE_MEMORY * device_memory)}",
            why=f"recompute=auto uses at most {USABLE_MEMORY:.0%} of a device's {format_bytes(device_memory)}",
            valid=["smaller micro-batches", "more ranks for the states"],
            fix=f"--set plan.{'microbatch=1' if plan.microbatch > 1 else 'recompute=full'}",
        )
    return recomputing(counts[fewest])


def peak(model: Model, plan: Plan, workload: Workload, stack: Stack) -> float:
    """Peak bytes on the fullest rank."""
    return float(rank_peaks(step_program(model, plan, workload, stack, every_rank=True)).max())
