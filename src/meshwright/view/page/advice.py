"""What to change first: the changes of the plan that save most, and the findings of `lint`, each with the changes of inputs that apply it."""

from meshwright.describe.plan import Plan
from meshwright.describe.result import values_of
from meshwright.planner.advice.changes import first_changes
from meshwright.planner.advice.lint.check import check
from meshwright.units import Json
from meshwright.view.page.subject import Subject


def data(subject: Subject) -> Json:
    """The best changes first, then the findings, the costliest first; `set` has the plan's fields that change."""
    e = subject.estimate
    changes = first_changes(subject.config)
    first = [
        {"title": c.title, "set": fields_changed(e.plan, c.plan), **values_of(c, "saves_s", "memory_gib", "fix")}
        for c in changes
    ]
    findings = [{**f.as_dict(), "set": fields_changed(e.plan, f.fixed)} for f in check(subject.config, e, changes)]
    return {"first": first, "findings": findings, "step_time_s": e.prediction.step_time_s}


def fields_changed(old: Plan, new: Plan | None) -> Json:
    """The inputs that turn one plan into another; {} where there is none."""
    before, after = old.model_dump(), (new or old).model_dump()
    return {f"plan.{k}": list(v) if isinstance(v, tuple) else v for k, v in after.items() if before[k] != v}
