"""020: one change of the plan that surely saves a tenth of the step. It follows from the costs of `advice.changes`, with no rule for each case.

What counts is what the costs are sure of:

    room        5% of the memory stays free
    doubt       the saving is larger than the doubt about the difference of two plans (`cost.band.indistinguishable`)
    host time   counts only where the micro-batch grows: it surely has fewer kernels then, other changes may only move them
    axes        a change that moves ranks from one axis to another must save a fifth: it divides the model in another way
"""

from collections.abc import Collection, Sequence

from meshwright.cost.band import indistinguishable
from meshwright.planner.advice.alternatives import USABLE_MEMORY, exposed, fits, step
from meshwright.planner.advice.changes import Change
from meshwright.planner.advice.explain import difference, itemised
from meshwright.planner.advice.lint.finding import Finding, Seen, finding
from meshwright.predict.estimate import Estimate

CODE = "MW-LINT-020"
SLOW, SLOW_AXES = 0.10, 0.20  # shares of the step
DEGREES = ("tp", "cp", "pp", "ep", "etp", "dp")


def faster_value(seen: Seen, changes: Sequence[Change], without: Collection[str] = ()) -> Finding | None:
    """The first of some changes that surely saves much; those of fields in `without` are passed over."""
    for change in changes:
        names = [name for name, _ in change.fields]
        if set(names) & set(without) or change.saved < SLOW * seen.step:
            continue
        better = seen.trial.of(change.plan)
        if better is None or not fits(better, USABLE_MEMORY) or not surely_slower(seen.now, better):
            continue
        parts = difference(better.prediction, seen.now.prediction)
        what = f"with {change.title}: {itemised(parts, seen.step)}"
        return finding(seen, CODE, "another value is faster", what, seen.step - step(better), better)
    return None


def surely_slower(now: Estimate, better: Estimate) -> bool:
    """Whether a plan takes so much longer than another that both the costs and their doubt call it slow."""
    saved = step(now) - step(better)
    if better.plan.microbatch <= now.plan.microbatch:
        saved -= max(0.0, exposed(now, "host") - exposed(better, "host"))
    moves = any(getattr(now.plan, axis) != getattr(better.plan, axis) for axis in DEGREES)
    least = SLOW_AXES if moves else SLOW
    return saved >= least * step(now) and not indistinguishable(now.prediction.exposed_s, better.prediction.exposed_s)
