"""What to change first: the changes of the plan that save most, and the findings of `lint`, each with the changes of inputs that apply it."""

from typing import Any

from meshwright.describe.legality.choices import shown
from meshwright.describe.plan import Plan
from meshwright.describe.result import values_of
from meshwright.planner.advice.changes import Change, first_changes
from meshwright.planner.advice.lint.check import check
from meshwright.planner.advice.lint.finding import Finding
from meshwright.units import Json
from meshwright.view.page.subject import Subject


def data(subject: Subject) -> Json:
    """The best changes first, then the findings, the costliest first; `set` has the plan's fields that change."""
    e = subject.estimate
    changes = first_changes(subject.config)
    first = [
        {"title": c.title, "set": changed, "follows": ", ".join(f"{k} = {shown(v)}" for k, v in followers(c, changed))}
        | values_of(c, "saves_s", "memory_gib", "fix")
        for c in changes
        for changed in [fields_changed(e.plan, c.plan)]
    ]
    found = [{**f.as_dict(), "set": inputs_of(e.plan, f)} for f in check(subject.config, e, changes)]
    offered = [change["set"] for change in first]
    findings = [finding for finding in found if not finding["set"] or finding["set"] not in offered]
    return {"first": first, "findings": findings, "step_time_s": e.prediction.step_time_s}


def followers(change: Change, changed: Json) -> list[tuple[str, Any]]:
    """The fields that change with the chosen ones, to keep the plan legal."""
    fields = ((path.removeprefix("plan."), value) for path, value in changed.items())
    return [(name, value) for name, value in fields if name not in dict(change.fields)]


def inputs_of(plan: Plan, finding: Finding) -> Json:
    """The inputs that apply the fix of a finding: fields of the plan, or a larger batch."""
    batch = finding.fix.partition("--set workload.batch=")[2]
    return {"workload.batch": int(batch)} if batch.isdecimal() else fields_changed(plan, finding.fixed)


def fields_changed(old: Plan, new: Plan | None) -> Json:
    """The inputs that turn one plan into another; {} where there is none."""
    before, after = old.model_dump(), (new or old).model_dump()
    return {f"plan.{k}": list(v) if isinstance(v, tuple) else v for k, v in after.items() if before[k] != v}
