"""The step with other overlap than the plan's, and what is hidden of the communication of each axis."""

from meshwright.cost.step import step_cost
from meshwright.describe.result import COMMUNICATION
from meshwright.lower.step import step_program
from meshwright.planner.advice.alternatives import changed
from meshwright.units import Json
from meshwright.view.page.subject import Subject
from meshwright.view.page.waterfall import by_axis, grouped


def data(subject: Subject) -> Json:
    """The step without overlap, as planned, and with double buffering on every axis; and for each axis what is hidden now."""
    e, axes = subject.estimate, tuple(COMMUNICATION)
    now = e.plan.overlapped(e.stack, e.cluster.node_size)
    prefetch = {"prefetch": False} if e.plan.zero == 3 else {}
    ways = [
        ("no overlap", (), changed(e.plan, overlap=(), **prefetch)),
        ("this plan", now, e.plan),
        ("double buffering", axes, changed(e.plan, overlap=axes)),
    ]
    legal = [way for way in ways if way[2] and way[2].is_legal(e.model, e.workload, e.cluster, e.stack)]
    program = step_program(e.model, [plan for *_, plan in legal if plan], e.workload, e.stack, every_rank=True)
    cost = step_cost(program, e.cluster)
    rows = []
    for k, (name, overlapped, _) in enumerate(legal):
        parts = grouped({part: float(program.batch.full(seconds)[k]) for part, seconds in cost.exposed.items()})
        listed = [{"part": part, "s": s} for part, s in parts.items()]
        rows.append({"name": name, "overlaps": list(overlapped), "step_time_s": float(cost.time[k]), "parts": listed})
    return {"rows": rows, "overlaps": list(now), "axes": by_axis(e)}
