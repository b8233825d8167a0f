"""The load of each expert, as measured or as the imbalance gives it, and what a more or less even load would change."""

from meshwright.describe.shape_parts import skewed_loads
from meshwright.planner.advice.alternatives import SizedPlan, costs
from meshwright.view.page.choices import IMBALANCES
from meshwright.view.page.sheet import Part, panel, part, row, table, text, view
from meshwright.view.page.subject import Subject


def data(subject: Subject) -> Part:
    """Loads over their mean, largest first; and the step, the memory and the dropped copies by imbalance."""
    e = subject.estimate
    model, work, ep, capacity = e.model, e.workload, e.plan.ep, e.model.router.capacity
    if not model.experts or model.router.choice == "expert":
        return view(text("No tokens choose experts in this model: there is no load to balance.", "empty"))
    now = float(max(model.router.busiest(1.0, work.loads, ep))) if work.loads else work.imbalance
    values = sorted({*IMBALANCES, now})
    trials = [SizedPlan(e.plan, work.but(imbalance=max(1.0, value), loads=()), e.cluster, model) for value in values]
    shapes = [work.loads if work.loads and value == now else skewed_loads(model.experts, ep, value) for value in values]
    rows = [
        row(value, seconds, gib, model.router.dropped(loads), chosen=value == now,
            name=f"imbalance {value:g}", use={"workload.imbalance": value, "workload.loads": None})
        for value, loads, seconds, gib in zip(values, shapes, *(x.tolist() for x in costs(e.config, trials)), strict=True)
    ]  # fmt: skip
    found = sorted(shapes[values.index(now)], reverse=True)
    loads = [load / (sum(found) / len(found) or 1.0) for load in found]
    assumed = "Assumed: the load falls as a power of an expert’s place, and the first experts share a rank."
    note = f"{len(loads)} experts of which a token chooses {model.top_k}; {ep} expert-parallel ranks. {'As measured.' if work.loads else assumed}"
    limits = {"mean": 1.0} | ({f"capacity {capacity:g}": capacity} if capacity else {})
    return view(
        panel("Tokens of each expert over the mean", note, beside=True),
        part("curves", label=f"Load of experts over the mean, from {loads[0]:.3g} to {loads[-1]:.3g}", height=240, inset=0,
             x={"from": 0, "to": len(loads), "label": "experts, the most loaded first"},
             y={"from": 0, "to": 1.1 * max(loads[0], capacity), "label": "load over the mean"},
             series=[{"points": [[k, load] for k, load in enumerate([*loads, loads[-1]])], "colour": "ep", "area": 0.75, "steps": True,
                      "only": True, "dots": False}],
             marks=[{"at": at, "words": words, "flat": True, "colour": "bad" if words != "mean" else "quiet"} for words, at in limits.items()]),
        panel("What the load changes", "Imbalance is the load of the busiest rank over the mean.", beside=True),
        table("", "imbalance|number, step|s, memory|gib, dropped copies|share", rows, name="Step, memory and dropped copies by imbalance"),
    )  # fmt: skip
