"""Sensitivity: the throughput of this plan with one quantity 20% better or worse, the largest effect first."""

from meshwright.describe.result import values_of
from meshwright.planner.advice.sensitivity import SHARE, Sensitivity, sensitivities
from meshwright.planner.search.strategies import Candidate, name_of
from meshwright.units import Json
from meshwright.view.page.subject import Subject


def data(subject: Subject) -> Json:
    """The rows of `planner.advice.sensitivity` for this plan; the complete view says which other plan would win."""
    e = subject.estimate
    times = e.walked.time, e.prediction.step_time_s
    mine = Candidate(e.plan, name_of(e.plan), *times, float(e.cost.peak_memory[0]), 0, 0.0)
    rivals: list[Candidate] = []
    if not subject.is_provisional and subject.shared.feasible:
        ranking = subject.result.ranking
        rivals = [c for c in [*ranking.leaders, *ranking.strategies.values()] if c.time >= mine.time]
    rows = sensitivities(subject.shared.space, mine, rivals)
    return {"share": SHARE, "rows": [row_of(row) for row in rows], "note": note(rows)}


def row_of(row: Sensitivity) -> Json:
    sides = {"less": row.less, "more": row.more}
    changes = [f"{word} {SHARE:.0%}: {value:+.1%}" for word, value in sides.items() if value is not None]
    words = f"{row.what}, {', '.join(changes) or 'cannot change'} throughput"
    formula = f"{words}{'; ' + row.note if row.note else ''}"
    return {**values_of(row, "what", "less", "more", "note"), "formula": formula}


def note(rows: list[Sensitivity]) -> str:
    first = rows[0]
    if first.swing < 0.01:
        return "No single quantity changes the throughput by more than 1%."
    return f"{first.what} matters most: 20% more or less of it changes the throughput by up to {first.swing:.0%}."
