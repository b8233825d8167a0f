"""The load of each expert, as measured or as the imbalance gives it, and what a more or less even load would change."""

from meshwright.describe.shape_parts import skewed_loads
from meshwright.planner.advice.alternatives import SizedPlan, costs
from meshwright.units import Json
from meshwright.view.page.choices import IMBALANCES
from meshwright.view.page.subject import Subject


def data(subject: Subject) -> Json:
    """Loads over their mean, largest first; and the step, the memory and the dropped copies by imbalance."""
    e = subject.estimate
    model, work, ep = e.model, e.workload, e.plan.ep
    if not model.experts or model.router.choice == "expert":
        return {"loads": [], "rows": [], "ep": ep, "top_k": 0, "capacity": 0.0, "measured": False}
    now = work.imbalance
    if work.loads:
        now = float(max(model.router.busiest(1.0, work.loads, ep)))
    values = sorted({*IMBALANCES, now})
    trials = [SizedPlan(e.plan, work.but(imbalance=max(1.0, value), loads=()), e.cluster, model) for value in values]
    shapes = [work.loads if work.loads and value == now else skewed_loads(model.experts, ep, value) for value in values]
    rows = [
        {"imbalance": value, "now": value == now, "step_time_s": seconds, "memory_gib": gib,
         "dropped_share": model.router.dropped(loads)}
        for value, loads, seconds, gib in zip(values, shapes, *(x.tolist() for x in costs(e.config, trials)), strict=True)
    ]  # fmt: skip
    loads = shapes[values.index(now)]
    mean = sum(loads) / len(loads) or 1.0
    return {
        "loads": sorted((load / mean for load in loads), reverse=True),
        "rows": rows,
        "ep": ep,
        "top_k": model.top_k,
        "capacity": model.router.capacity,
        "measured": bool(work.loads),
    }
