"""The best plans that `meshwright plan` finds, why the winner leads, and the present plan compared with it."""

from typing import Any

from meshwright.describe.result import values_of
from meshwright.planner.advice.reasons import reasons
from meshwright.planner.result import PlanComparison
from meshwright.view.page.subject import Subject
from meshwright.view.plan import show


def data(subject: Subject) -> dict[str, Any]:
    """Leaders with their predictions, other strategies with why they are slower, reasons for the winner, and the present plan.

    The provisional answer leaves out the reasons and the other strategies: they take a fifth of its time, and the complete search may find
    another winner.
    """
    result = subject.result
    explained = not subject.is_provisional
    return {
        "searched": result.searched,
        "costed": result.found.costed,
        "seconds": result.seconds,
        "provisional": subject.is_provisional,
        "chosen_from": result.chosen_from,
        "choice": result.choice,
        "leaders": [
            {
                "title": c.plan.title(),
                "plan": c.plan.as_dict(),
                "strategy": c.strategy,
                "step_time_s": p.step_time_s,
                "slower": p.step_time_s / result.prediction.step_time_s - 1,
                **values_of(p, "memory_gib", "memory_limit_gib", "mfu", "tokens_per_s", "bound_by"),
                "present": c.plan.as_dict() == subject.plan.as_dict(),
            }
            for c, p in result.leaders
        ],
        "reasons": [{"field": name, "why": text} for name, text in reasons(result.estimate).items() if text]
        if explained
        else [],
        "strategies": [
            {"strategy": w.strategy, "fits": w.fits, "slower": w.slower if w.fits else None, "why": w.words}
            | {"title": w.plan.title(), "plan": w.plan.as_dict()}
            for w in (result.why_not if explained else ())
        ],
        "mine": compared(result.compare(subject.plan)),
    }


def compared(mine: PlanComparison) -> dict[str, Any]:
    """The present plan against the winner."""
    out: dict[str, Any] = {"legal": mine.user is not None, "refused": mine.refused, "slower": None, "step_time_s": None}
    if mine.user is None:
        return {**out, "difference": [], "fields": []}
    return out | {
        "slower": mine.slower,
        "step_time_s": mine.user.prediction.step_time_s,
        "difference": [{"name": name, "s": s} for name, s in mine.parts],
        "fields": [{"field": k, "mine": show(a, k), "best": show(b, k)} for k, (a, b) in mine.fields.items()],
    }
