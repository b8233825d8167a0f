"""How true the predictions are: tables for the terminal, a scatter for the browser."""

from __future__ import annotations

import html
import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.calibrate.validate import NOT_FOR_TIME, STALLED, Outcome, Score
from meshwright.units import format_seconds

COLUMNS = (
    "rows",
    "refused",
    "apart",
    "bias",
    "median",
    "MAPE",
    "p90",
    "in band",
    "Spearman",
    "regret",
    "memory",
    "false alarms",
)


def percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "–"
    return f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


def cells(s: Score) -> list[str]:
    rho = "–" if s.spearman is None else f"{s.spearman:.2f}"
    return [
        str(s.rows),
        str(s.refused),
        str(s.apart),
        percent(s.bias, True),
        percent(s.median),
        percent(s.mape),
        percent(s.p90),
        percent(s.inside_band),
        rho,
        percent(s.regret),
        percent(s.memory_median),
        percent(s.false_alarms),
    ]


def table(scores: dict[str, Score], overall: dict[str, float], title: str = "source") -> Table:
    out = Table(
        title="Predicted against measured step time", title_justify="left", box=None, pad_edge=False, title_style="bold"
    )
    out.add_column(title)
    for name in COLUMNS:
        out.add_column(name, justify="right")
    for name, s in sorted(scores.items()):
        out.add_row(name, *cells(s))
    mean = Score(
        bias=overall.get("bias"),
        median=overall.get("median"),
        mape=overall.get("mape"),
        p90=overall.get("p90"),
        inside_band=overall.get("inside_band"),
        spearman=overall.get("spearman"),
        regret=overall.get("regret"),
        memory_median=overall.get("memory_median"),
        false_alarms=overall.get("false_alarms"),
    )
    out.add_row("[bold]macro average[/]", "", "", "", *[f"[bold]{c}[/]" for c in cells(mean)[3:]])
    return out


def reasons(outcomes: list[Outcome]) -> RenderableType:
    count: dict[str, int] = {}
    for o in outcomes:
        if o.refused:
            count[o.refused] = count.get(o.refused, 0) + 1
    lines = [
        Text(f"refused {n}: {why}", style="dim") for why, n in sorted(count.items(), key=lambda item: -item[1])[:12]
    ]
    return Group(*lines)


def headline(outcomes: list[Outcome]) -> Table:
    out = Table(title="Famous runs", title_justify="left", box=None, pad_edge=False, title_style="bold")
    for name, side in (
        ("run", "left"),
        ("plan", "left"),
        ("measured", "right"),
        ("predicted", "right"),
        ("band", "right"),
        ("error", "right"),
    ):
        out.add_column(name, justify=side)  # type: ignore[arg-type]
    for o in outcomes:
        if o.prediction is None or o.error is None or o.case.plan is None:
            out.add_row(o.case.row_id, o.refused, "", "", "", "refused")
            continue
        p = o.prediction
        style = "green" if abs(o.error) < 0.15 else "yellow" if abs(o.error) < 0.3 else "red"
        band = f"{format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)}"
        out.add_row(
            o.case.row_id,
            f"{o.case.plan.world} GPUs: {o.case.plan.title()}",
            format_seconds(o.case.step_time or 0),
            format_seconds(p.step_time_s),
            band,
            f"[{style}]{percent(o.error, True)}[/]",
        )
    return out


PALETTE = (
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#ff8ab7",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#1f7a8c",
    "#bc4b51",
    "#5b8e7d",
    "#f4a259",
    "#8cb369",
)
APART = "#c9ccd1"  # stalled or untwinned runs, and runs kept for memory alone: shown, not judged


def apart(o: Outcome, paired: set[str]) -> bool:
    source = o.case.row.get("file", "")
    return source in NOT_FOR_TIME or (source in paired and (o.pair_ratio or math.inf) > STALLED)


def page(outcomes: list[Outcome], scores: dict[str, Score], overall: dict[str, float]) -> str:
    """A self-contained page: a log-log scatter of measured against predicted, and the table."""
    paired = {o.case.row.get("file", "") for o in outcomes if o.pair_ratio is not None}
    judged = {o.case.row_id for o in outcomes if not apart(o, paired)}
    points = [
        (o.case.row.get("file", ""), o.case.row_id, o.case.step_time, o.prediction.step_time_s)
        for o in outcomes
        if o.prediction and o.case.step_time
    ]
    low = min((min(m, p) for _, _, m, p in points if m), default=0.01)
    high = max((max(m, p) for _, _, m, p in points if m), default=1.0)
    a, b = math.floor(math.log10(low)), math.ceil(math.log10(high))
    size, pad = 620, 60

    def place(value: float) -> float:
        return pad + (math.log10(value) - a) / (b - a) * (size - 2 * pad)

    sources = sorted({s for s, *_ in points})
    colour = {s: PALETTE[i % len(PALETTE)] for i, s in enumerate(sources)}
    dots = "".join(
        f'<circle cx="{place(m):.1f}" cy="{size - place(p):.1f}" r="3" fill="{colour[s] if i in judged else APART}" fill-opacity=".55">'
        f"<title>{html.escape(i)}: "
        f"measured {format_seconds(m)}, predicted {format_seconds(p)}</title></circle>"
        for s, i, m, p in points
    )
    grid = "".join(
        f'<line x1="{place(10.0**k)}" y1="{pad}" x2="{place(10.0**k)}" y2="{size - pad}" class="g"/><line x1="{pad}" y1="{size - place(10.0**k)}" '
        f'x2="{size - pad}" y2="{size - place(10.0**k)}" class="g"/><text x="{place(10.0**k)}" y="{size - pad + 18}" text-anchor="middle">'
        f'{format_seconds(10.0**k)}</text><text x="{pad - 8}" y="{size - place(10.0**k) + 4}" text-anchor="end">{format_seconds(10.0**k)}</text>'
        for k in range(a, b + 1)
    )
    diagonal = f'<line x1="{pad}" y1="{size - pad}" x2="{size - pad}" y2="{pad}" stroke="#222" stroke-dasharray="4 3"/>'
    key = "".join(
        f'<div><span style="background:{colour[s]}"></span>{html.escape(s)}: median {percent(scores[s].median)}</div>'
        for s in sources
        if s in scores
    )
    head = "".join(f"<th>{c}</th>" for c in ("source", *COLUMNS))
    body = "".join(
        f"<tr><td>{html.escape(n)}</td>" + "".join(f"<td>{c}</td>" for c in cells(s)) + "</tr>"
        for n, s in sorted(scores.items())
    )
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Meshwright: predicted against measured</title><style>
body{{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1100px;color:#1a1a1a;padding:0 1rem}}
.row{{display:flex;gap:2rem;flex-wrap:wrap;align-items:flex-start}}svg text{{font-size:11px;fill:#555}}.g{{stroke:#e6e6e6}}
table{{border-collapse:collapse;margin-top:1.5rem;font-variant-numeric:tabular-nums}}
td,th{{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #eee}}
td:first-child,th:first-child{{text-align:left}}.key span{{display:inline-block;width:.8em;height:.8em;margin-right:.5em;border-radius:50%}}</style>
<h1>Predicted against measured</h1><p>Each dot is one published run: step time measured (across) and predicted (up).
The dashed line is a perfect prediction; grey dots are shown, not judged.
Macro-averaged median error {percent(overall.get("median"))}.</p><div class="row"><svg width="{size}" height="{size}" viewBox="0 0 {size} {size}">
{grid}{diagonal}{dots}<text x="{size / 2}" y="{size - 12}" text-anchor="middle">measured</text>
<text x="16" y="{size / 2}" text-anchor="middle" transform="rotate(-90 16 {size / 2})">predicted</text></svg><div class="key">{key}</div></div>
<table><tr>{head}</tr>{body}</table></html>"""
