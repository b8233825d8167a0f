"""What a view shows, as parts that `views/sheet.js` draws one below the other: most views of plans, and the files of `bench --html`,
`validate --html` and `explain --html`.

A part has a `kind` and what that kind needs (`shapes.json`). What follows a panel is inside it; panels `beside` each other share a row. A number
has a unit: a name in `format.js`. `use` are the changes of the state that a row of a table or a point of a chart offers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshwright.view.page.bundle import written_view

TONES = {"red": "bad", "yellow": "warn", "green": "good", "dim": "quiet", "bold": "strong"}
COLOURS = ("compute", "tp", "optimizer", "ep", "cp", "pp", "dp", "second")
SHAPES = ("circle", "square", "triangle", "diamond", "cross")
Part = dict[str, Any]


def sheet(title: str, notes: Sequence[str], parts: Iterable[Part]) -> str:
    """A written file of parts that belong to no plan."""
    return written_view("sheet", title, {"title": title, **view(*(text(note) for note in notes if note), *parts)})


def view(*parts: Part | None) -> Part:
    """The data of a view; what is None is left out."""
    return {"parts": [part for part in parts if part]}


def part(kind: str, **fields: Any) -> Part:
    return {"kind": kind, **fields}


def panel(title: str, note: str = "", beside: bool = False) -> Part:
    return part("panel", title=title, note=note, beside=beside)


def text(words: str, tone: str = "sentence") -> Part:
    return part("text", words=words, tone=tone)


def stats(*numbers: tuple[str, Any, str, Part]) -> Part:
    """Numbers, each with its name, its unit, and its detail, formula and tone."""
    return part("stats", stats=[{"name": name, "value": x, "unit": unit, **more} for name, x, unit, more in numbers])


def table(caption: str, columns: str | Iterable[str], rows: Iterable[Part], **more: Any) -> Part:
    """A table; a column is its title, or `title|unit` where it has numbers. Cells are texts, numbers, or one of these with its formula."""
    named = [[*one.split("|"), ""][:2] for one in (columns.split(", ") if isinstance(columns, str) else columns)]
    return part("table", caption=caption, columns=named, rows=list(rows), **more)


def row(*cells: Any, **more: Any) -> Part:
    """A row of a table; `more` are chosen, use, and the name of what is used."""
    return {"cells": list(cells), **more}


def piece(value: float, look: str, formula: str, **more: str) -> Part:
    """A piece of a bar; its look is a colour, or a part of the step; `more` are its pattern, and its name in the legend."""
    return {"value": value, "look": look, "formula": formula, **more}


def chart(title: str, x: Part, y: Part, series: list[Part]) -> list[Part]:
    """A panel with points on logarithmic axes; a series may have a `line`, drawn where it is within the values of all points."""
    values, drawn = [p[1] for one in series for p in one["points"]], list[Part]()
    for k, one in enumerate(series):
        style = {"colour": COLOURS[k % 8], "shape": SHAPES[k // 8 % 5]} if one["points"] else {"colour": "quiet"}
        if one["points"]:
            drawn.append({"name": one["name"], "points": one["points"], "only": True, "focus": False, **style})
        if line := [p for p in one.get("line", []) if min(values) <= p[1] <= max(values)]:
            name = "" if one["points"] else one["name"]
            drawn.append({"name": name, "points": line, "dash": "5 4", "width": 1.6, "dots": False, **style})
    label = f"{title}: {len(values)} points"
    return [panel(title), part("curves", label=label, height=330, left=74, x=x, y=y, series=drawn)]


def grid(shown: Table) -> list[Part]:
    """A panel with a table of the terminal."""
    columns = [
        f"{column.header}|plain" if column.justify == "right" else str(column.header) for column in shown.columns
    ]
    cells = zip(*(column.cells for column in shown.columns), strict=True)
    return [panel(str(shown.title or "")), table("", columns, (row(*map(plain, one)) for one in cells))]


def parts_of(shown: RenderableType) -> list[Part]:
    """What the terminal shows as parts: tables, and lines with the tone of their first styled words."""
    match shown:
        case Group():
            return [part for inner in shown.renderables for part in parts_of(inner)]
        case Panel():
            return [text(plain(shown.title or ""), "strong"), *parts_of(shown.renderable)]
        case Table():
            return grid(shown)
    words = shown if isinstance(shown, Text) else Text.from_markup(str(shown))
    return [text(words.plain, tone_of(words))] if words.plain.strip() else []


def tone_of(words: Text) -> str:
    styles = " ".join([str(words.style), *(str(span.style) for span in words.spans[:1])])
    return next((tone for colour, tone in TONES.items() if colour in styles), "ink")


def plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain
