"""The best next changes of a plan: the findings of `lint`, each with its cost, its fix and the changes of inputs that apply it."""

from meshwright.planner.advice.lint.check import check
from meshwright.units import Json
from meshwright.view.page.subject import Subject


def data(subject: Subject) -> Json:
    """Findings, the costliest first; `set` has the plan's fields that the fix changes."""
    e = subject.estimate
    out = []
    for f in check(subject.config, e):
        changed = {}
        if f.fixed is not None:
            old, new = e.plan.model_dump(), f.fixed.model_dump()
            changed = {f"plan.{k}": list(v) if isinstance(v, tuple) else v for k, v in new.items() if old[k] != v}
        out.append({**f.as_dict(), "set": changed})
    return {"findings": out, "step_time_s": e.prediction.step_time_s}
