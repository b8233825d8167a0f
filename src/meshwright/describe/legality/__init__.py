"""One predicate decides whether a plan is legal: a table of rules, for one plan (integers) or a batch of plans (arrays).

    legal(Case.of(plan, model, workload, cluster, stack))     True or False; an array of them for a batch
    check(plan, model, workload, cluster, stack)              raise the first broken rule as a MeshwrightError

A rule has an error code, a condition that works on integers and arrays alike, and a function that explains it: the arithmetic, the
valid values, and changes that could mend it. Only a change after which **every** rule holds is offered as the fix.

A rule needs some of model, workload, cluster, stack; it applies where these are given. Two more needs say what runs the plan: `trainer`
(what `meshwright train` and `verify` can run at all) and `dtypes` (the dtypes in which `train` can run it). Readers: `Plan`, the planner's
space, alternatives and sensitivity, `lint`, `verify`, `train`.
"""

from __future__ import annotations

from meshwright.describe.cluster import Cluster
from meshwright.describe.legality.case import Case, Flag
from meshwright.describe.legality.fixes import offered
from meshwright.describe.legality.rules import rules_for
from meshwright.describe.model import Model
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError

__all__ = ["Case", "check", "legal", "problem"]


def legal(case: Case) -> Flag:
    """Whether no rule is broken: one value for one plan, an array for a batch."""
    broken: Flag = False
    for rule in rules_for(case.given):
        broken = broken | rule.broken(case)
    return broken == False  # noqa: E712  an array or a Python bool


def problem(case: Case) -> MeshwrightError | None:
    """The first broken rule of one plan as an error, with a fix that is legal; None where the plan is legal."""
    for rule in rules_for(case.given):
        if rule.broken(case):
            found = rule.explain(case)
            fix = offered(case, found.fixes, legal)
            return MeshwrightError(rule.code, found.what, why=found.why, valid=found.valid, fix=fix)
    return None


def check(
    plan: PlanFields,
    model: Model | None = None,
    workload: Workload | None = None,
    cluster: Cluster | None = None,
    stack: Stack | None = None,
    trainer: bool = False,
    dtypes: bool = False,
) -> None:
    """Raise the first rule that the plan breaks here."""
    error = problem(Case.of(plan, model, workload, cluster, stack, trainer, dtypes))
    if error is not None:
        raise error
