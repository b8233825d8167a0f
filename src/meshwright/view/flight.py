"""Flight records in the terminal and as a page: the cause of a hang, who waits where, and what is missing."""

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.explain.flight import FlightReport, ranks_of
from meshwright.units import counted
from meshwright.view.tables import filled, heading

SHOWN = 64  # waiting ranks, and notes


def page(report: FlightReport) -> RenderableType:
    first, *further = report.summary
    style = {"none": "green", "slow": "yellow"}.get(report.kind, "bold red")
    parts: list[RenderableType] = [
        heading("flight records", counted(len(report.ranks), "rank")),
        Text(first, style),
        *(Text(sentence) for sentence in further),
    ]
    if report.waiting:
        rows = [(w.rank, w.call, ranks_of(w.waits_for), w.place) for w in report.waiting[:SHOWN]]
        parts.append(filled((">rank", "is in", "waits for", "~line"), rows))
        parts += [Text(f"and {counted(len(report.waiting) - SHOWN, 'rank')} more", "dim")] * (
            len(report.waiting) > SHOWN
        )
    hidden = len(report.notes) - SHOWN
    notes = [*report.notes[:SHOWN], *[f"and {counted(hidden, 'note')} more"] * (hidden > 0)]
    return Group(*parts, *(Text(note, "yellow") for note in notes))
