"""What to change first: the changes of the plan that save most, and the findings of `lint`, each with the changes of inputs that apply it."""

from typing import Any

from meshwright.describe.legality.choices import shown
from meshwright.describe.plan import Plan
from meshwright.planner.advice.changes import Change, first_changes
from meshwright.planner.advice.lint.check import check
from meshwright.planner.advice.lint.finding import Finding
from meshwright.units import Json, format_seconds
from meshwright.view.page.subject import Subject


def data(subject: Subject) -> Json:
    """The best changes first, then the findings, the costliest first; `set` has the inputs that change."""
    e = subject.estimate
    changes, items = first_changes(subject.config), list[Json]()

    def share(seconds: float) -> str:
        return f"{format_seconds(abs(seconds))} ({abs(seconds) / e.prediction.step_time_s:.1%})"

    for c in changes:
        changed = fields_changed(e.plan, c.plan)
        follows = ", ".join(f"{k} = {shown(v)}" for k, v in followers(c, changed))
        effect = (
            f"saves {share(saved)}" if (saved := c.saves_s or 0.0) >= 0 else f"takes {share(saved)} longer, and fits"
        )
        words = f"{', with ' * bool(follows)}{follows}: {effect}; {c.memory_gib:.3g} GiB"
        items.append({"head": c.title, "words": words, "set": changed})
    offered = [item["set"] for item in items]
    for f in check(subject.config, e, changes):
        if (changed := inputs_of(e.plan, f)) not in offered or not changed:
            cost = f" Costs {share(f.cost_s)}." if f.cost_s else ""
            helps = changed if (f.saves_s or 0) > 0 else {}
            items.append({"head": f"{f.name[:1].upper()}{f.name[1:]}. ", "words": f"{f.what}.{cost}", "set": helps})
    return {"items": items}


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
