"""Terminal tables in one style: no frames, bold headers, numbers right-aligned, secondary text dim.

The first character of a column name sets its alignment: `"name"` left, `">rate"` right, `"!name"` left and not
wrapped, `"~source"` dim and wrapped.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 120
Columns = dict[str, Callable[[Any], object]]  # the name of each column, and the cell that it shows of an item


def console(stderr: bool = False) -> Console:
    """The console for standard output, or standard error. If it is not a terminal, the width is fixed: files and tests are the same
    everywhere."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(highlight=False, stderr=stderr, width=None if stream.isatty() else PIPED_WIDTH)


def as_text(thing: RenderableType) -> str:
    """A page as plain text, as wide as in a file."""
    out = Console(highlight=False, width=PIPED_WIDTH, no_color=True)
    with out.capture() as captured:
        out.print(thing)
    return captured.get().rstrip()


def show(*things: RenderableType, stderr: bool = False) -> None:
    out = console(stderr)
    for thing in things:
        out.print(thing)


def present(page: RenderableType, value: Any, as_json: bool) -> None:
    """Print a result: its page, or its data with `--json`."""
    show_json(value) if as_json else show(page)


def show_json(value: Any) -> None:
    """Print one JSON document; NaN and infinity raise, since JSON has no such numbers."""
    print(json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False))


def table(*columns: str, title: str = "", **options: Any) -> Table:
    """An empty table; the module docstring describes column names."""
    options = {"box": box.SIMPLE_HEAD, "title": title or None, **options}
    out = Table(title_justify="left", title_style="bold", pad_edge=False, **options)
    for name in columns:
        add_column(out, name)
    return out


def add_column(out: Table, name: str) -> None:
    match name[:1]:
        case ">":
            out.add_column(name[1:], justify="right", no_wrap=True)
        case "!":
            out.add_column(name[1:], no_wrap=True)
        case "~":
            out.add_column(name[1:], style="dim", overflow="fold")
        case _:
            out.add_column(name, overflow="fold")


def titled(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], caption: str = "") -> Table:
    """A table without lines below its title. Cells are `Text`, or texts in rich's markup."""
    options = {"caption": caption or None, "caption_justify": "left"}
    out = table(*columns, title=title, box=None, show_edge=False, **options)
    for row in rows:
        out.add_row(*row)
    return out


def filled(columns: Iterable[str], rows: Iterable[Iterable[object]], title: str = "") -> Table:
    """A table with its rows. `Text` cells keep their style; other cells are converted to plain text."""
    out = table(*columns, title=title)
    for row in rows:
        out.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return out


def listed(items: Iterable[Any], columns: Columns, title: str = "") -> Table:
    """A table with a row for each item: of each column its cell."""
    return filled(columns, ([cell(item) for cell in columns.values()] for item in items), title)


class FittedTable:
    """A table that is divided into several, one below the other, where its columns do not fit into the width. Each repeats the first column."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self.columns, self.rows = columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        start = 1
        while start < len(self.columns):
            end = start + 1
            while end < len(self.columns) and self._width(console, start, end + 1) <= options.max_width:
                end += 1
            yield self._part(start, end)
            start = end

    def _part(self, start: int, end: int) -> Table:
        """The table of the first column and some of the others."""
        return filled([self.columns[0], *self.columns[start:end]], [[row[0], *row[start:end]] for row in self.rows])

    def _width(self, console: Console, start: int, end: int) -> int:
        return console.measure(self._part(start, end), options=console.options.update(max_width=10_000)).maximum


def facts(rows: Iterable[tuple[str, object]]) -> Table:
    """A list of names and values; empty values are left out."""
    out = Table.grid(padding=(0, 2))
    out.add_column(style="dim", no_wrap=True)
    out.add_column(overflow="fold")
    for name, value in rows:
        if value not in ("", None):
            out.add_row(name, value if isinstance(value, Text) else Text(str(value)))
    return out


def heading(text: str, aside: str = "") -> Text:
    return Text.assemble((text, "bold cyan"), ("  " + aside if aside else "", "dim"))


BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 32


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Blocks, each the mean of an equal run of values; × marks NaN and infinity."""
    if not values or width < 1:
        return ""
    edges = (
        [round(i * len(values) / width) for i in range(width + 1)] if len(values) > width else range(len(values) + 1)
    )
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, list(edges)[1:], strict=False)]
    finite = [m for m in means if isfinite(m)] or [0.0]
    low, span = min(finite), max(finite) - min(finite)
    span = (
        span if span > 1e-9 * max(map(abs, finite)) else 1.0
    )  # the mean of equal numbers may differ in its last digit
    return "".join(BLOCKS[round((m - low) / span * (len(BLOCKS) - 1))] if isfinite(m) else "×" for m in means)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a Markdown page; columns whose name begins with `>` are right-aligned."""
    rules = ["---:" if name.startswith(">") else "---" for name in columns]
    lines = ([name.removeprefix(">") for name in columns], rules, *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
