"""Charts and tables that belong to no plan, as one HTML file in the frame of the page: `bench --html`, `validate --html`, `explain --html` of
flight records and memory snapshots.

A part is a chart (series of points on logarithmic axes), quantiles of ratios by group, or a table or a line of the terminal. `views/sheet.js` draws
them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshwright.view.page.bundle import written_view

TONES = {"red": "bad", "yellow": "warn", "green": "good", "dim": "quiet", "bold": "strong"}
Part = dict[str, Any]


def sheet(title: str, notes: Sequence[str], parts: Iterable[Part]) -> str:
    data = {"title": title, "notes": [note for note in notes if note], "parts": list(parts)}
    return written_view("sheet", title, data)


def chart(title: str, note: str, x: tuple[str, str], y: tuple[str, str], series: list[Part]) -> Part:
    """A chart; an axis is its label and its unit, a name in `format.js`."""
    axes = {name: {"label": label, "unit": unit} for name, (label, unit) in (("x", x), ("y", y))}
    return {"title": title, "note": note, **axes, "series": series}


def grid(table: Table) -> Part:
    """A table of the terminal as data."""
    columns = [{"name": str(column.header), "right": column.justify == "right"} for column in table.columns]
    rows = [[plain(cell) for cell in cells] for cells in zip(*(column.cells for column in table.columns), strict=True)]
    return {"title": str(table.title or ""), "columns": columns, "rows": rows}


def parts_of(shown: RenderableType) -> list[Part]:
    """What the terminal shows as data: tables, and lines with the tone of their first styled words."""
    match shown:
        case Group():
            return [part for inner in shown.renderables for part in parts_of(inner)]
        case Panel():
            return [{"line": plain(shown.title or ""), "tone": "strong"}, *parts_of(shown.renderable)]
        case Table():
            return [grid(shown)]
    words = shown if isinstance(shown, Text) else Text.from_markup(str(shown))
    return [{"line": words.plain, "tone": tone_of(words)}] if words.plain.strip() else []


def tone_of(words: Text) -> str:
    styles = " ".join([str(words.style), *(str(span.style) for span in words.spans[:1])])
    return next((tone for colour, tone in TONES.items() if colour in styles), "")


def plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain
