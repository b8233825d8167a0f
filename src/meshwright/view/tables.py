"""Terminal tables and lines in one manner: no frames, a bold head, numbers to the right, asides dim.

A column's name says how it stands: `"name"` left, `">rate"` right, `"~source"` dim and folded when space is short.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 120


def console() -> Console:
    """Standard output; a fixed width where it is no terminal, so that files and tests read alike."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def show(*things: RenderableType) -> None:
    out = console()
    for thing in things:
        out.print(thing)


def show_json(value: Any) -> None:
    """What a program reads: one JSON document; a number that JSON cannot say is an error, not NaN."""
    print(json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False))


def table(*columns: str, title: str = "") -> Table:
    """An empty table; see the module's words on column names."""
    out = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", pad_edge=False)
    for name in columns:
        if name.startswith(">"):
            out.add_column(name[1:], justify="right", no_wrap=True)
        elif name.startswith("~"):
            out.add_column(name[1:], style="dim", overflow="fold")
        else:
            out.add_column(name, overflow="fold")
    return out


def filled(columns: Iterable[str], rows: Iterable[Iterable[object]], title: str = "") -> Table:
    """A table with its rows; texts keep their style, the rest is printed as it is."""
    out = table(*columns, title=title)
    for row in rows:
        out.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return out


def facts(rows: Iterable[tuple[str, object]]) -> Table:
    """Names and values below each other; empty values are left out."""
    out = Table.grid(padding=(0, 2))
    out.add_column(style="dim", no_wrap=True)
    out.add_column(overflow="fold")
    for name, value in rows:
        if value not in ("", None):
            out.add_row(name, value if isinstance(value, Text) else Text(str(value)))
    return out


def heading(text: str, aside: str = "") -> Text:
    return Text.assemble((text, "bold cyan"), ("  " + aside if aside else "", "dim"))
