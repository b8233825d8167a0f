"""The figures of the course: each follows from the values of its controls, by the functions that the commands use.

A figure is a function `f(subject, values)` with its controls. It returns `draw`, the name of a drawing in `figures.js`, the `data` of that drawing,
`stats` (name, value, detail) and a `note`. A control is a slider over a list of values, a choice, or a text.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.units import Json
from meshwright.view.page.subject import Subject

Values = dict[str, Any]
COLOURS = ("compute", "tp", "optimizer", "ep", "cp", "dp")


class Control(NamedTuple):
    """What a person can set: one of `values` (none: any text), in a unit of `format.js`; `kind` is slider, choice or text."""

    name: str
    label: str
    value: Any
    values: Sequence[Any] = ()
    unit: str = "number"
    kind: str = "slider"


class Figure(NamedTuple):
    draw: Callable[[Subject, Values], Json]
    controls: tuple[Control, ...]


Draw = Callable[[Subject, Values], Json]


def registered(figures: dict[str, Figure]) -> Callable[..., Callable[[Draw], Draw]]:
    """A decorator that adds a figure with its controls to `figures`."""

    def figure(name: str, *controls: Control) -> Callable[[Draw], Draw]:
        def add(draw: Draw) -> Draw:
            figures[name] = Figure(draw, controls)
            return draw

        return add

    return figure


def drawn(name: str, found: Figure, subject: Subject, given: Values) -> Json:
    """The figure with the given values; those not given are the defaults. A value that a control does not have raises."""
    at = subject.with_options(given)
    values = {c.name: at.option(c.name, c.value, c.values or None) for c in found.controls}
    out = {"stats": [], "note": "", **found.draw(subject, values)}
    choices = out.pop("choices", {})  # of controls whose values depend on another one
    controls = [
        {**c._asdict(), "value": values[c.name], "values": list(choices.get(c.name, c.values))} for c in found.controls
    ]
    return {"name": name, "controls": controls, **out}


def lines(series: Sequence[Json], x: Json, y: Json, marks: Sequence[Json] = (), label: str = "", **more: Any) -> Json:
    """A chart of curves, with the figure's `stats` and `note`."""
    coloured = [{"colour": COLOURS[i % len(COLOURS)], **one} for i, one in enumerate(series)]
    return {"draw": "lines", "data": {"series": coloured, "x": x, "y": y, "marks": list(marks), "label": label}, **more}


def curve(name: str, points: Mapping[Any, float] | Iterable[Sequence[Any]], **look: Any) -> Json:
    """A curve of `lines` through points [x, y, formula?], or through the values by x; `look` is its colour, dash or width."""
    return {
        "name": name,
        "points": [list(p) for p in (points.items() if isinstance(points, Mapping) else points)],
        **look,
    }


def marker(name: str, *points: Sequence[Any], **look: Any) -> Json:
    """Single points of `lines`."""
    return curve(name, points, only=True, **look)


def axis(
    label: str,
    unit: str = "",
    log: int = 0,
    low: float | None = None,
    high: float | None = None,
    ticks: Sequence[float] = (),
) -> Json:
    """An axis: its label, its unit (a name in `format.js`), the base of its logarithm, its ends and its ticks."""
    given: Json = {"unit": unit or None, "log": log or None, "from": low, "to": high, "ticks": list(ticks) or None}
    return {"label": label} | {name: value for name, value in given.items() if value is not None}


def mark(at: float, words: str, colour: str = "quiet", **more: Any) -> Json:
    """A vertical line of `lines` with words."""
    return {"at": at, "words": words, "colour": colour, **more}


def bars(rows: Sequence[Json], x: Json, limit: tuple[float, str] | None = None, **more: Any) -> Json:
    """Horizontal bars, with the figure's `stats` and `note`; `limit` is a dashed line with words."""
    line = {"at": limit[0], "words": limit[1]} if limit else None
    return {"draw": "bars", "data": {"rows": list(rows), "x": x, "label": "", "limit": line}, **more}


def bar(label: str, text: str, *parts: Json, **more: Any) -> Json:
    return {"label": label, "parts": list(parts), "text": text, **more}


def part(name: str, value: float, colour: str, formula: str, **more: Any) -> Json:
    """One piece of a bar."""
    return {"name": name, "value": value, "colour": colour, "formula": formula, **more}


def spans(found: Json, compute: str, communication: str, *names: str, **more: Any) -> Json:
    """Two timelines under each other (`view.show.overlap.pair`), drawn in the colours of compute and communication."""
    return {
        "draw": "spans",
        "data": {**found, "compute": compute, "communication": communication, "names": list(names)},
        **more,
    }


def stat(name: str, value: str, detail: str = "") -> Json:
    return {"name": name, "value": value, "detail": detail}


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.:')}."
