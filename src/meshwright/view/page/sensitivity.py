"""Sensitivity: the throughput of this plan with one quantity 20% better or worse, the largest effect first."""

from meshwright.planner.advice.sensitivity import SHARE, Sensitivity, sensitivities
from meshwright.planner.search.strategies import Candidate, name_of
from meshwright.view.page.sheet import Part, panel, part, piece, view
from meshwright.view.page.subject import Subject


def data(subject: Subject) -> Part:
    """The rows of `planner.advice.sensitivity` for this plan; the complete view says which other plan would win."""
    e = subject.estimate
    time, peak = e.prediction.step_time_s, float(e.cost.peak_memory[0])
    mine = Candidate(e.plan, name_of(e.plan), e.walked.time, time, peak, 0, 0.0)
    rivals: list[Candidate] = []
    if not subject.is_provisional and subject.shared.feasible:
        ranking = subject.result.ranking
        rivals = [c for c in [*ranking.leaders, *ranking.strategies.values()] if c.time >= mine.time]
    rows = sensitivities(subject.shared.space, mine, rivals)
    most = 1.5 * max(0.02, *(abs(value) for one in rows for value in (one.less, one.more) if value is not None))
    notes = [[one.what, one.note] for one in rows if one.note]
    x = {"label": "change of tokens per second", "unit": "percent", "from": -most, "to": most}
    both = [bar(one, word, value) for one in rows for word, value in (("less", one.less), ("more", one.more))]
    return view(panel("Throughput", note(rows)), part("bars", rows=both, tall=19, x=x), part("terms", pairs=notes))


def bar(row: Sensitivity, word: str, value: float | None) -> Part:
    """The change with less of a quantity, hatched, or with more of it."""
    out: Part = {"label": row.what if word == "less" else "", "parts": []}
    if value is None:
        return out | {"text": f"{word}: not possible", "tone": "quiet"}
    changes = [f"{side} {SHARE:.0%}: {x:+.1%}" for side, x in (("less", row.less), ("more", row.more)) if x is not None]
    words = f"{row.what}, {', '.join(changes)} throughput{'; ' + row.note if row.note else ''}"
    name, look = (f"{SHARE:.0%} {word}: slower", "tp") if value < 0 else (f"{SHARE:.0%} {word}: faster", "compute")
    shown = piece(abs(value), look, words, name=name, **({"pattern": "hatch"} if word == "less" else {}))
    return out | {"text": f"{value:+.1%}".replace("-", "−"), "start": min(0.0, value), "parts": [shown]}


def note(rows: list[Sensitivity]) -> str:
    first = rows[0]
    if first.swing < 0.01:
        return "No single quantity changes the throughput by more than 1%."
    return f"{first.what} matters most: 20% more or less of it changes the throughput by up to {first.swing:.0%}."
