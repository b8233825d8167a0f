"""A page of the terminal as one HTML element for a notebook, without scripts and without network.

Panels become sections, tables become tables, styled text becomes spans. Anything else (a timeline) is drawn as in the terminal, in a <pre>.
"""

from html import escape
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME as THEME
from rich.text import Text

from meshwright.view.tables import PIPED_WIDTH

STYLE = """
.mw { font: 13px/1.45 system-ui, "Segoe UI", Roboto, sans-serif; max-width: 1120px; }
.mw section { border: 1px solid #8888; border-radius: 10px; padding: 10px 16px; margin: 0 0 12px; overflow-x: auto; }
.mw h3 { font-size: 13px; margin: 12px 0 4px; font-weight: 650; } .mw section > h3 { margin-top: 0; }
.mw table { border-collapse: collapse; font-variant-numeric: tabular-nums; background: none; color: inherit; font-size: 13px; margin: 0; }
.mw th { font-weight: 600; border-bottom: 1px solid #8888; } .mw caption { caption-side: bottom; text-align: left; opacity: .7; }
.mw td, .mw th { padding: 2px 14px 2px 0; vertical-align: top; text-align: left; background: none; }
.mw td.n, .mw th.n { text-align: right; white-space: nowrap; }
.mw pre { font-size: 12px; line-height: 1.25; background: none; color: inherit; overflow-x: auto; }
"""
TERMINAL = {"width": PIPED_WIDTH, "force_terminal": True, "color_system": "truecolor", "highlight": False, "no_color": False}  # fmt: skip


def as_html(page: RenderableType) -> str:
    """One element with its style."""
    return f'<div class="mw"><style>{STYLE}</style>{element(page)}</div>'


def element(thing: RenderableType) -> str:
    match thing:
        case str() | Text():
            return f"<div>{spans(thing) or '&nbsp;'}</div>"
        case Group():
            return "".join(map(element, thing.renderables))
        case Panel():
            return f"<section><h3>{spans(thing.title or '')}</h3>{element(thing.renderable)}</section>"
        case Table():
            return table(thing)
    return drawn(thing)


def spans(words: RenderableType, style: str | Style = "") -> str:
    """Styled text as spans; a text is read as rich's markup."""
    text = words.copy() if isinstance(words, Text) else Text.from_markup(str(words))
    text.stylize_before(text.style)
    text.stylize_before(style)
    out = []
    for segment in text.render(Console(**TERMINAL)):  # type: ignore[arg-type]
        css = segment.style.get_html_style(THEME) if segment.style else ""
        inner = escape(segment.text).replace("\n", "<br/>")
        out.append(f'<span style="{css}">{inner}</span>' if css else inner)
    return "".join(out)


def table(grid: Table) -> str:
    def row(tag: str, cells: list[RenderableType]) -> str:
        inner = ""
        for column, cell in zip(grid.columns, cells, strict=True):
            side = ' class="n"' if column.justify == "right" else ""
            inner += f"<{tag}{side}>{spans(cell, column.style)}</{tag}>"
        return f"<tr>{inner}</tr>"

    names: list[RenderableType] = [column.header for column in grid.columns]
    head = f"<thead>{row('th', names)}</thead>" if grid.show_header and any(map(str, names)) else ""
    body = "".join(row("td", list(cells)) for cells in zip(*(column.cells for column in grid.columns), strict=True))
    below = f"<caption>{spans(grid.caption)}</caption>" if grid.caption else ""
    title = f"<h3>{spans(grid.title)}</h3>" if grid.title else ""
    return f"{title}<table>{below}{head}<tbody>{body}</tbody></table>"


def drawn(thing: RenderableType) -> str:
    out = Console(record=True, file=StringIO(), **TERMINAL)  # type: ignore[arg-type]
    out.print(thing)
    return f"<pre>{out.export_html(inline_styles=True, code_format='{code}')}</pre>"
