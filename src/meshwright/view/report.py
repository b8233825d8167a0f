"""Runs as a page: for each, the proof if there is one, the loss as it fell, and predicted against measured.

A run folder holds `prediction.json`, `measurement.json`, `difference.json` and, where `verify --out` put it there, `proof.json`. The page is
self-contained and says of every number whether it was predicted or measured.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.units import format_bytes, format_count, format_decimal_bytes, format_seconds

LIMIT = 50_000_000
NEEDED = ("prediction", "measurement", "difference")
STYLE = """
:root{color-scheme:light dark;--ink:#1d2433;--dim:#687083;--line:#e3e6ec;--card:#fff;--page:#fafaf8;
--good:#16955f;--bad:#c2452d;--a:#3b78e0;--b:#efa43a}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaf0;--dim:#9aa3b5;--line:#2c3342;--card:#1a1f2a;--page:#12151c}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1080px;margin:2.5rem auto;padding:0 1.2rem}
h1{margin:0 0 .2rem}h2{margin:0 0 .6rem;font-size:1.15rem}p.lead{color:var(--dim);margin:.2rem 0 1.6rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:1.2rem 1.4rem;margin:1.2rem 0}
.row{display:flex;gap:2rem;flex-wrap:wrap;align-items:flex-start}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}.dim{color:var(--dim)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.22rem .8rem .22rem 0;text-align:right;border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left}th{color:var(--dim);font-weight:500}svg text{fill:var(--dim);font-size:11px}
"""


@dataclass(frozen=True)
class Run:
    """What a run folder holds."""

    name: str
    prediction: dict[str, Any]
    measurement: dict[str, Any]
    difference: list[dict[str, Any]]
    proof: dict[str, Any] | None = None


def read_run(folder: str | Path) -> Run:
    """A run folder; a missing or broken file is named."""
    folder = Path(folder)
    if not folder.is_dir():
        raise MeshwrightError(
            "MW-REP-001", f"there is no run folder {str(folder)!r}", fix="meshwright train PLAN.toml --out FOLDER"
        )
    found: dict[str, Any] = {}
    for name in (*NEEDED, "proof"):
        path = folder / f"{name}.json"
        if not path.is_file():
            if name in NEEDED:
                raise MeshwrightError(
                    "MW-REP-001", f"{folder.name} lacks {path.name}", why="A finished training writes it"
                )
            continue
        if path.stat().st_size > LIMIT:
            raise MeshwrightError("MW-REP-002", f"{path.name} of {folder.name} is larger than {LIMIT // 10**6} MB")
        try:
            found[name] = json.loads(path.read_text("utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise MeshwrightError(
                "MW-REP-002", f"{path.name} of {folder.name} is not JSON", why=str(error)[:100]
            ) from None
    shapes = {"prediction": dict, "measurement": dict, "difference": list, "proof": dict}
    for name, value in found.items():
        if not isinstance(value, shapes[name]):
            raise MeshwrightError("MW-REP-002", f"{name}.json of {folder.name} is not what a run writes")
    run = Run(folder.name, **found)
    try:
        card(run)  # drawn here once, so that what lacks a key is told with its folder's name
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MeshwrightError("MW-REP-002", f"{folder.name} holds what no run writes", why=repr(error)[:100]) from None
    return run


def page(runs: list[Run], title: str = "Planned, proved, trained, compared") -> str:
    """The whole page."""
    cards = "".join(card(run) for run in runs)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Meshwright: {html.escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{html.escape(title)}</h1><p class='lead'>Each plan was costed before it ran, proved against one device, trained on local "
        f"processes, and held to its prediction.</p>{cards}</html>"
    )


def card(run: Run) -> str:
    title = run.proof["plan"] if run.proof and "plan" in run.proof else run.name
    return (
        f'<div class="card"><h2>{html.escape(str(title))} <span class="dim">{html.escape(run.name)}</span></h2>{proof(run.proof)}'
        f'<div class="row">{comparison(run.difference)}{loss(run.measurement.get("loss", []))}'
        f"{breakdown(run.prediction.get('exposed_s', {}))}</div></div>"
    )


def proof(told: dict[str, Any] | None) -> str:
    if not told:
        return "<p class='dim'>not verified</p>"
    if told.get("passed"):
        words = ", ".join(
            f"{dtype} gradients within {e['gradient']:.1e}" for dtype, e in told.get("errors", {}).items()
        )
        return f"<p><span class='good'>✓ proved</span> over {told.get('steps')} steps on {told.get('ranks')} ranks: {html.escape(words)}</p>"
    first = told.get("first_break")
    words = (
        f"{first['what']} {first['name']} of step {first['step']} on rank {first['rank']} differs; axis {first['axis']}"
        if first
        else "it communicates what the step program does not say"
    )
    return f"<p><span class='bad'>✗ not proved</span>: {html.escape(words)}</p>"


def shown(unit: str, value: float) -> str:
    forms = {
        "s": format_seconds,
        "bytes": format_decimal_bytes,
        "GiB": lambda x: format_bytes(x * 2**30),
        "tokens/s": lambda x: format_count(x) + "/s",
        "%": lambda x: f"{x:.2f}%",
    }
    return forms.get(unit, lambda x: f"{x:g}")(value)


def comparison(rows: list[dict[str, Any]]) -> str:
    body = ""
    for d in rows:
        error = d.get("error")
        style = "dim" if error is None else "good" if abs(error) < 0.25 else "bad"
        text = "–" if error is None else f"{100 * error:+.0f}%"
        body += (
            f"<tr><td>{html.escape(str(d['what']))}</td><td>{shown(d['unit'], d['predicted'])}</td><td>{shown(d['unit'], d['measured'])}</td>"
            f'<td class="{style}">{text}</td></tr>'
        )
    return f"<table><tr><th></th><th>predicted</th><th>measured</th><th>error</th></tr>{body}</table>"


def loss(values: list[float | None], width: int = 300, height: int = 150) -> str:
    """The loss curve as a line, as far as it is known: a training may diverge."""
    known = {i: v for i, v in enumerate(values) if v is not None}
    if len(known) < 2:
        return ""
    low, high = min(known.values()), max(known.values())
    span = (high - low) or 1.0
    points = " ".join(
        f"{36 + (width - 44) * i / (len(values) - 1):.1f},{10 + (height - 34) * (high - v) / span:.1f}"
        for i, v in known.items()
    )
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="loss by step"><polyline points="{points}" fill="none" stroke="var(--a)" '
        f'stroke-width="2"/><text x="2" y="14">{high:.2f}</text><text x="2" y="{height - 22}">{low:.2f}</text>'
        f'<text x="36" y="{height - 4}">loss over {len(values)} steps</text></svg>'
    )


def breakdown(parts: dict[str, float], width: int = 300) -> str:
    """The predicted step by part, longest first."""
    top = sorted(parts.items(), key=lambda item: -item[1])[:7]
    if not top:
        return ""
    longest = top[0][1] or 1.0
    bars = "".join(
        f'<text x="0" y="{13 + 19 * i}">{html.escape(name)}</text><rect x="92" y="{4 + 19 * i}" width="{max(1.0, (width - 160) * s / longest):.1f}" '
        f'height="11" rx="3" fill="var(--b)"/><text x="{98 + (width - 160) * s / longest:.1f}" y="{13 + 19 * i}">{format_seconds(s)}</text>'
        for i, (name, s) in enumerate(top)
    )
    height = 19 * len(top) + 22
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="predicted step by part">{bars}'
        f'<text x="0" y="{height - 4}">predicted step by part</text></svg>'
    )
