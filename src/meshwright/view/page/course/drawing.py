"""The figures of the course: each follows from the values of its controls, by the functions that the commands use.

A figure is a function `f(subject, values)` with its controls. It returns `draw`, the name of a drawing in `figures.js`, the `data` of that drawing,
`stats` (name, value, detail) and a `note`. A control is a slider over a list of values, a choice, or a text.
"""

from collections.abc import Callable, Sequence
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


def lines(series: Sequence[Json], x: Json, y: Json, marks: Sequence[Json] = (), label: str = "") -> Json:
    """The data of a chart of curves: series {name, points: [[x, y, formula?]], colour, dash, only}; axes {label, unit, log}."""
    coloured = [{"colour": COLOURS[i % len(COLOURS)], **one} for i, one in enumerate(series)]
    return {"draw": "lines", "data": {"series": coloured, "x": x, "y": y, "marks": list(marks), "label": label}}


def bars(rows: Sequence[Json], x: Json, label: str = "", limit: Json | None = None) -> Json:
    """The data of horizontal bars: rows {label, parts: [{name, value, colour, formula}], text}."""
    return {"draw": "bars", "data": {"rows": list(rows), "x": x, "label": label, "limit": limit}}


def stat(name: str, value: str, detail: str = "") -> Json:
    return {"name": name, "value": value, "detail": detail}


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.:')}."
