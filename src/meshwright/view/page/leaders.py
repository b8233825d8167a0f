"""The best plans that `meshwright plan` finds, why the winner leads, and the present plan compared with it."""

from meshwright.planner.advice.reasons import reasons
from meshwright.planner.result import PlanComparison
from meshwright.units import format_seconds
from meshwright.view.page.sheet import Part, grid, panel, part, row, stats, table, view
from meshwright.view.page.subject import Subject
from meshwright.view.plan import compared, verdict

COLUMNS = "plan, step|s, against best|change, MFU|share, memory|gib, bound by"


def data(subject: Subject) -> Part:
    """Leaders with their predictions, other strategies with why they are slower, reasons for the winner, and the present plan.

    The provisional answer leaves out the reasons and the other strategies: they take a fifth of its time, and the complete search may find
    another winner.
    """
    result, explained = subject.result, not subject.is_provisional
    (winner, best), mine = result.leaders[0], result.compare(subject.plan)
    costed = f"{result.found.costed:,} costed in {format_seconds(result.seconds)}"
    rows = []
    for c, p in result.leaders:
        slower = p.step_time_s / best.step_time_s - 1
        cells = (p.step_time_s, "best" if abs(slower) < 5e-4 else slower, p.mfu, p.memory_gib, p.bound_by)
        rows.append(row(c.plan.title(), *cells, chosen=c.plan == subject.plan, use={"plan": c.plan.as_dict()}))
    shown = [
        stats(("Step of the best plan", best.step_time_s, "s", {"detail": f"simulated; MFU {best.mfu or 0:.1%}", "tone": "good"}),
              ("Legal plans", result.searched, "whole", {"detail": costed if explained else "common plans first; the complete search runs"}),
              present(mine)),
        panel("Leaders", f"Chosen: {result.chosen_from}. {result.choice}".strip()),
        table("The winner and the fastest plans of other shapes", COLUMNS, rows),
    ]  # fmt: skip
    if explained and (why := [[field, words] for field, words in reasons(result.estimate).items() if words]):
        note = "Each choice against the plan without it."
        shown += [panel("Why the winner leads", note, beside=True), part("terms", pairs=why)]
    if mine.user and mine.fields:
        words = f"{verdict(mine, result.headroom)}."
        shown += [panel("The present plan against the winner", words, beside=True), *grid(compared(mine, ""))[1:]]
    if explained and result.why_not:
        rows = [row(w.strategy, w.plan.title(), w.slower if w.fits else "does not fit", w.words, use={"plan": w.plan.as_dict()})
                for w in result.why_not]  # fmt: skip
        note = "The best plan of each strategy, and what makes it slower."
        shown += [
            panel("Why not another strategy", note),
            table("Other strategies", "strategy, best plan of it, slower by|share, why", rows),
        ]
    return {"searched": result.searched, "step_time_s": best.step_time_s, "plan": winner.plan.as_dict(), **view(*shown)}


def present(mine: PlanComparison) -> tuple[str, float | str, str, Part]:
    """How the present plan compares: the value and the details of its number."""
    if mine.user is None:
        return "Present plan", "not legal", "", {"detail": mine.refused, "tone": "bad"}
    step, slower = format_seconds(mine.user.prediction.step_time_s), mine.slower
    if slower < 5e-4:
        return "Present plan", "is the best", "", {"detail": step, "tone": "good"}
    return "Present plan", slower, "change", {"detail": f"{step}, simulated", "tone": "warn" if slower > 0.1 else ""}
