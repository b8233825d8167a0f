"""The accuracy of predictions as one self-contained page: a log-log scatter of predicted over measured step time, then
tables.

Each source has a letter and a colour, so that the plot can be read without colour.
"""

from __future__ import annotations

import html
import math
import string
from collections.abc import Iterable, Sequence

from meshwright.calibrate.runs.accuracy import Accuracy
from meshwright.calibrate.runs.validate import Outcome, by, macro, not_scored, score
from meshwright.units import format_seconds
from meshwright.view.accuracy_figures import figures
from meshwright.view.validate import COLUMNS, HEADLINE_COLUMNS, cells, headline_cells, percent

PALETTE = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#1f7a8c", "#bc4b51",
    "#5b8e7d", "#f4a259", "#8cb369",
)  # fmt: skip
NOT_SCORED = "#c9ccd1"
SIZE, MARGIN = 620, 60
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1100px;color:#1a1a1a;padding:0 1rem}
.row{display:flex;gap:2rem;flex-wrap:wrap;align-items:flex-start}svg text{font-size:11px;fill:#555}.g{stroke:#e6e6e6}
table{border-collapse:collapse;margin-top:1.5rem;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #eee}td:first-child,th:first-child{text-align:left}
.key span{display:inline-block;width:1.4em;margin-right:.5em;border-radius:3px;text-align:center;font-weight:600}
"""


def page(found: Accuracy) -> str:
    """The page about published runs, about the well-known ones, or about both."""
    headlines = found.headlines
    shown = [*found.outcomes, *headlines]
    scores = {name: score(part) for name, part in by(shown, ["source"]).items()}
    overall = macro(scores)
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(sorted(scores))}
    letters = {name: string.ascii_uppercase[i % 26] for i, name in enumerate(sorted(scores))}
    key = "".join(
        f'<div><span style="background:{colours[name]}">{letters[name]}</span>{html.escape(name)}: '
        f"median error {percent(s.median)}</div>"
        for name, s in sorted(scores.items())
    )
    tables = rows_of(("source", *COLUMNS), ([name, *cells(s)] for name, s in sorted(scores.items())))
    if headlines:
        tables += f"<h2>Well-known runs</h2>{rows_of(HEADLINE_COLUMNS, map(headline_cells, headlines))}"
    tables += figures(found)
    title = "Predicted and measured step time"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Meshwright: {title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><p>Each letter is one published run: measured step time (horizontal) and predicted step time "
        "(vertical). The dashed line is a perfect prediction. Grey runs are shown but not scored. Macro-averaged median "
        f'error {percent(overall.get("median"))}.</p><div class="row">{scatter(shown, colours, letters)}'
        f'<div class="key">{key}</div></div>{tables}</html>'
    )


def rows_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of plain text cells."""
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def scatter(outcomes: list[Outcome], colours: dict[str, str], letters: dict[str, str]) -> str:
    """The plot as SVG, both axes logarithmic over the same decades."""
    points = [(o, o.case.step_time, o.prediction.step_time_s) for o in outcomes if o.prediction and o.case.step_time]
    low = min((min(m, p) for _, m, p in points), default=0.01)
    high = max((max(m, p) for _, m, p in points), default=1.0)
    first = math.floor(math.log10(low))
    last = max(math.ceil(math.log10(high)), first + 1)

    def offset(value: float) -> float:
        return MARGIN + (math.log10(value) - first) / (last - first) * (SIZE - 2 * MARGIN)

    grid = ""
    for decade in (10.0**k for k in range(first, last + 1)):
        x, y, text = offset(decade), SIZE - offset(decade), format_seconds(decade)
        grid += f'<line x1="{x}" y1="{MARGIN}" x2="{x}" y2="{SIZE - MARGIN}" class="g"/>'
        grid += f'<line x1="{MARGIN}" y1="{y}" x2="{SIZE - MARGIN}" y2="{y}" class="g"/>'
        grid += f'<text x="{x}" y="{SIZE - MARGIN + 18}" text-anchor="middle">{text}</text>'
        grid += f'<text x="{MARGIN - 8}" y="{y + 4}" text-anchor="end">{text}</text>'
    twins = {o.case.row.get("file", "") for o in outcomes if o.pair_ratio is not None}
    marks = ""
    for o, measured, predicted in points:
        source = o.case.row.get("file", "")
        fill = NOT_SCORED if not_scored(o, twins) else colours.get(source, NOT_SCORED)
        marks += (
            f'<text x="{offset(measured):.1f}" y="{SIZE - offset(predicted) + 4:.1f}" text-anchor="middle" '
            f'style="fill:{fill};font-weight:600">{letters.get(source, "?")}<title>{html.escape(o.case.row_id)}: '
            f"measured {format_seconds(measured)}, predicted {format_seconds(predicted)}</title></text>"
        )
    end = SIZE - MARGIN
    return (
        f'<svg width="{SIZE}" height="{SIZE}" viewBox="0 0 {SIZE} {SIZE}" role="img" aria-label="predicted over measured step time">'
        f'{grid}<line x1="{MARGIN}" y1="{end}" x2="{end}" y2="{MARGIN}" stroke="#222" stroke-dasharray="4 3"/>{marks}'
        f'<text x="{SIZE / 2}" y="{SIZE - 12}" text-anchor="middle">measured</text><text x="16" y="{SIZE / 2}" '
        f'text-anchor="middle" transform="rotate(-90 16 {SIZE / 2})">predicted</text></svg>'
    )
