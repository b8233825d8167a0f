"""One predicate decides whether a plan is legal: a table of rules, for one plan (integers) or a batch of plans (arrays).

    legal(Case(plan, model, workload, cluster, stack))     True or False; an array of them for a batch
    check(plan, model, workload, cluster, stack)              raise the first broken rule as a MeshwrightError

A rule has an error code and a generator: of a condition that works on integers and on arrays, then of its explanation: the arithmetic, the
valid values, and changes that could mend it. Only a change after which **every** rule holds is offered as the fix.

A rule needs some of model, workload, cluster, stack; it applies where these are given. Three more needs say what runs the plan: `trainer`
(what `meshwright train` and `verify` can run at all), `dtypes` (the dtypes in which `train` can run it) and `framework` (what the framework of
the stack can run). Readers: `Plan`, the planner's space, alternatives and sensitivity, `lint`, `verify`, `train`.
"""

from functools import cache

from meshwright.describe.cluster import Cluster
from meshwright.describe.legality import model_rules, plan_rules, run_rules, stack_rules, trainer_rules
from meshwright.describe.legality.case import RULES, Case, Flag, LegalityRule, legal_fix
from meshwright.describe.legality.plan_rules import device_has_precision
from meshwright.describe.legality.run_rules import round_size
from meshwright.describe.model import Model
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError

# All rules, in the order in which a plan's problems are reported: those of a file in the order in which it defines them.

ALL_RULES: tuple[LegalityRule, ...] = tuple(
    rule
    for module in (plan_rules, model_rules, run_rules, stack_rules, trainer_rules)
    for rule in RULES
    if rule.read.__module__ == module.__name__
)


@cache
def rules_for(known: frozenset[str]) -> tuple[LegalityRule, ...]:
    """The rules that apply where these things are known."""
    return tuple(rule for rule in ALL_RULES if set(rule.needs) <= known)


__all__ = ["Case", "batch_unit", "check", "lacking_precision", "lacking_range", "legal", "problem"]


def legal(case: Case) -> Flag:
    """Whether no rule is broken: one value for one plan, an array for a batch."""
    broken: Flag = False
    one = case.is_one_plan
    for rule in rules_for(case.given):
        broken = broken | rule.broken(case)
        if one and broken:
            return False  # no other rule can make the plan legal
    return broken == False  # noqa: E712  an array or a Python bool


def problem(case: Case) -> MeshwrightError | None:
    """Return the first broken rule of a plan as an error with a legal fix; None if the plan is legal."""
    broken = next((rule for rule in rules_for(case.given) if rule.broken(case)), None)
    return _error(broken, case) if broken else None


def _error(rule: LegalityRule, case: Case) -> MeshwrightError:
    problem_found = rule.explain(case)
    fix = legal_fix(case, problem_found.fixes, legal)
    return MeshwrightError(rule.code, problem_found.what, why=problem_found.why, valid=problem_found.valid, fix=fix)


def lacking_precision(workload: Workload, cluster: Cluster) -> MeshwrightError | None:
    """Return the error if the accelerator cannot compute in the workload's precision, whatever the plan."""
    case = Case(PlanFields(replicate=cluster.world), None, workload.but(batch=cluster.world), cluster)
    return _error(device_has_precision, case) if device_has_precision.broken(case) else None


def batch_unit(plan: PlanFields, stack: Stack) -> int:
    """Smallest step by which the batch of a plan can grow: the sequences of one micro-batch, or of one round of them."""
    case = Case(plan, stack=stack)
    return int(case.unit * round_size(case))


def not_trained(plan: PlanFields, model: Model, workload: Workload, stack: Stack) -> MeshwrightError | None:
    """Return why our trainer cannot run a plan; None if it can, or if the stack is another framework's."""
    if stack.can.framework:
        return None
    return problem(Case(plan, model, workload, None, stack, trainer=True, dtypes=True))


def check(
    plan: PlanFields,
    model: Model | None = None,
    workload: Workload | None = None,
    cluster: Cluster | None = None,
    stack: Stack | None = None,
    trainer: bool = False,
    dtypes: bool = False,
    framework: bool = False,
) -> None:
    """Raise the first rule that the plan breaks here."""
    error = problem(Case(plan, model, workload, cluster, stack, trainer, dtypes, framework))
    if error is not None:
        raise error
