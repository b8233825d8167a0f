"""Training runs as one HTML page: for each run its proof if it has one, its loss, and predicted and measured values.

A run folder contains `plan.toml`, `prediction.json`, `measurement.json`, `difference.json`; of a complete run
`communication.json` and `timeline.json`; after `verify --out`, `proof.json`. The page is self-contained and labels every number as
predicted or measured.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.describe.config import load
from meshwright.describe.run_folder import PLAN, read_json
from meshwright.errors import MeshwrightError
from meshwright.units import format_bytes, format_count, format_decimal_bytes, format_seconds
from meshwright.view.timeline import VERSION, both_steps

NEEDED = ("prediction", "measurement", "difference")
OPTIONAL = ("proof", "communication", "timeline")
TITLE = "Training runs: predicted and measured"
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
    """The content of a run folder. `plan` is the title of the plan that was trained."""

    name: str
    plan: str
    prediction: dict[str, Any]
    measurement: dict[str, Any]
    difference: list[dict[str, Any]]
    proof: dict[str, Any] | None = None
    communication: dict[str, Any] | None = None
    timeline: dict[str, Any] | None = None


def read_run(folder: str | Path) -> Run:
    """Read a run folder; an error names the file that is missing or broken."""
    folder = Path(folder)
    if not folder.is_dir():
        raise MeshwrightError(
            "MW-REP-001",
            f"the run folder {str(folder)!r} does not exist",
            fix="meshwright train PLAN.toml --out FOLDER",
        )
    found = {name: value for name in (*NEEDED, *OPTIONAL) if (value := read_part(folder, name)) is not None}
    run = Run(folder.name, plan_title(folder), **found)
    try:
        card(run)  # so that a missing key is reported with the name of its folder
        both_steps(run.timeline)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MeshwrightError(
            "MW-REP-002", f"a file of {folder.name} lacks a value that `train` writes", why=repr(error)[:100]
        ) from None
    return run


def read_part(folder: Path, name: str) -> Any:
    """One JSON file of a run folder; None if it is optional and missing."""
    path = folder / f"{name}.json"
    if not path.is_file():
        if name in NEEDED:
            raise MeshwrightError("MW-REP-001", f"{folder.name} lacks {path.name}", why="`train` writes it")
        return None
    value = read_json(path)
    if not isinstance(value, list if name == "difference" else dict):
        raise MeshwrightError("MW-REP-002", f"{path.name} of {folder.name} is not a file that `train` writes")
    found = value.get("version") if isinstance(value, dict) else None
    if name in ("communication", "timeline") and found != VERSION:
        why = f"This release reads version {VERSION}"
        raise MeshwrightError("MW-REP-002", f"{path.name} of {folder.name} has version {found}", why=why)
    return value


def trace_of(runs: list[Run]) -> dict[str, Any]:
    """The trace of the measured and the simulated step of one run."""
    if len(runs) != 1 or runs[0].timeline is None:
        what = f"{len(runs)} runs" if len(runs) != 1 else f"{runs[0].name}, which lacks timeline.json"
        raise MeshwrightError(
            "MW-REP-003",
            f"--trace of {what}",
            why="A trace shows one complete run: `train` writes its timeline at the end",
            fix="meshwright report RUN --trace FILE",
        )
    return both_steps(runs[0].timeline, {"plan": runs[0].plan})


def plan_title(folder: Path) -> str:
    """The plan that was trained. The proof has another one: `verify` trains a small copy."""
    try:
        return load(folder / PLAN).plan.title()
    except MeshwrightError:
        return ""


def page(runs: list[Run], title: str = "") -> str:
    """Return the full page."""
    title = html.escape(title or TITLE)
    proved = sum(bool(run.proof and run.proof.get("passed")) for run in runs)
    count = f"{len(runs)} run{'s' * (len(runs) != 1)}, {proved} proved to train the same model as one device"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Meshwright: {title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><p class='lead'>{count}. Each was predicted before it ran, then trained on local processes.</p>"
        f"{''.join(card(run) for run in runs)}</html>"
    )


def card(run: Run) -> str:
    """The part of the page about one run."""
    m = run.measurement
    notes = "".join(
        f"<p class='dim'>{html.escape(str(note))}</p>" for note in m.get("assumed", []) if "interrupted" in str(note)
    )
    return (
        f'<div class="card"><h2>{html.escape(run.plan or run.name)} <span class="dim">{html.escape(run.name)}</span></h2>'
        f'{proof_line(run.proof)}{notes}<div class="row">{comparison(run.difference)}{loss_curve(m.get("loss", []), m.get("validation_loss", []))}'
        f"{parts_chart(run.communication, m) or breakdown(run.prediction.get('exposed_s', {}))}</div></div>"
    )


def proof_line(proof: dict[str, Any] | None) -> str:
    """The verdict of the proof, and the small copy that it is about."""
    if not proof:
        return "<p class='dim'>not verified</p>"
    plans = [str(copy.get("plan", "")) for copy in proof.get("copies", [proof])]
    several = "a small copy" if len(plans) == 1 else f"{len(plans)} small copies"
    copy = f"<br><span class='dim'>trained to prove it: {several}, {html.escape('; '.join(plans))}</span>"
    if proof.get("passed"):
        words = ", ".join(
            f"{dtype} gradients within {e['gradient']:.1e}" for dtype, e in proof.get("errors", {}).items()
        )
        verdict = f"<span class='good'>✓ proved</span> over {proof.get('steps')} steps on {proof.get('ranks')} ranks"
        return f"<p>{verdict}: {html.escape(words)}{copy}</p>"
    first = proof.get("first_break")
    words = (
        f"{first['what']} {first['name']} of step {first['step']} on rank {first['rank']} differs; axis {first['axis']}"
        if first
        else "the collectives it issues differ from the step program"
    )
    return f"<p><span class='bad'>✗ not proved</span>: {html.escape(words)}{copy}</p>"


def format_value(unit: str, value: float) -> str:
    forms = {
        "s": format_seconds,
        "bytes": format_decimal_bytes,
        "GiB": lambda x: format_bytes(x * 2**30),
        "tokens/s": lambda x: format_count(x) + "/s",
        "%": lambda x: f"{x:.2f}%",
    }
    return forms.get(unit, lambda x: f"{x:g}")(value)


def comparison(rows: list[dict[str, Any]]) -> str:
    """The table of predicted and measured values."""
    body = ""
    for row in rows:
        error, unit = row.get("error"), row["unit"]
        style = "dim" if error is None else "good" if abs(error) < 0.25 else "bad"
        text = "–" if error is None else f"{100 * error:+.0f}%"
        body += (
            f"<tr><td>{html.escape(str(row['what']))}</td><td>{format_value(unit, row['predicted'])}</td>"
            f'<td>{format_value(unit, row["measured"])}</td><td class="{style}">{text}</td></tr>'
        )
    return f"<table><tr><th></th><th>predicted</th><th>measured</th><th>error</th></tr>{body}</table>"


def loss_curve(
    values: list[float | None], validation: list[list[Any]] | None = None, width: int = 300, height: int = 150
) -> str:
    """The loss by step as a line, and the validation loss as points; what is NaN or infinite is left out."""
    finite = {i: v for i, v in enumerate(values) if v is not None}
    evaluated = {int(i): float(v) for i, v in validation or [] if v is not None and 0 <= i < len(values)}
    if len(finite) < 2:
        return ""
    low, high = (pick([*finite.values(), *evaluated.values()]) for pick in (min, max))
    span = (high - low) or 1.0

    def place(i: int, v: float) -> tuple[str, str]:
        return f"{36 + (width - 44) * i / (len(values) - 1):.1f}", f"{10 + (height - 34) * (high - v) / span:.1f}"

    points = " ".join(",".join(place(i, v)) for i, v in finite.items())
    circles = "".join(
        '<circle cx="{}" cy="{}" r="3" fill="var(--b)"><title>{}</title></circle>'.format(
            *place(i, v), f"validation loss {v:.4f} after step {i}"
        )
        for i, v in evaluated.items()
    )
    words = f"loss over {len(values)} steps"
    words += f"; validation {list(evaluated.values())[-1]:.3f} (points)" if evaluated else ""
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="loss by step"><polyline points="{points}" fill="none" stroke="var(--a)" '
        f'stroke-width="2"/>{circles}<text x="2" y="14">{high:.2f}</text><text x="2" y="{height - 22}">{low:.2f}</text>'
        f'<text x="36" y="{height - 4}">{words}</text></svg>'
    )


def parts_chart(communication: dict[str, Any] | None, measurement: dict[str, Any], width: int = 430) -> str:
    """The step of the busiest rank by part, predicted and measured; pale: communication that ran behind compute."""
    measured, hidden = measurement.get("exposed_s"), measurement.get("hidden_s", {})
    if not communication or not measured:
        return ""
    predicted = communication["predicted_exposed_s"]
    names = [part for part in dict.fromkeys((*predicted, *measured)) if predicted.get(part) or measured.get(part)]
    longest = max(max(predicted.get(n, 0.0), measured.get(n, 0.0) + hidden.get(n, 0.0)) for n in names) or 1.0
    unit, out = (width - 190) / longest, ""
    for i, name in enumerate(names):
        top = 4 + 34 * i
        out += f'<text x="0" y="{top + 15}">{html.escape(name)}</text>'
        rows = [("--b", predicted.get(name, 0.0), 0.0), ("--a", measured.get(name, 0.0), hidden.get(name, 0.0))]
        for row, (color, seconds, behind) in enumerate(rows):
            y, long = top + 14 * row, max(1.0, unit * seconds)
            out += f'<rect x="72" y="{y}" width="{long:.1f}" height="11" rx="2" fill="var({color})"/>'
            words = format_seconds(seconds)
            if behind:
                out += (
                    f'<rect x="{72 + long:.1f}" y="{y}" width="{max(1.0, unit * behind):.1f}" height="11" rx="2" '
                    f'fill="var({color})" opacity=".3"/>'
                )
                words += f" + {format_seconds(behind)} hidden"
            out += f'<text x="{78 + long + unit * behind:.1f}" y="{y + 10}">{words}</text>'
    height = 34 * len(names) + 24
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="step of the busiest rank by part, predicted and '
        f'measured">{out}<rect x="0" y="{height - 15}" width="10" height="10" fill="var(--b)"/>'
        f'<text x="14" y="{height - 6}">predicted</text><rect x="80" y="{height - 15}" width="10" height="10" '
        f'fill="var(--a)"/><text x="94" y="{height - 6}">measured: step of the busiest rank by part</text></svg>'
    )


def breakdown(parts: dict[str, float], width: int = 300) -> str:
    """The parts of the predicted step of the busiest rank, longest first."""
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
        f'<svg width="{width}" height="{height}" role="img" aria-label="predicted step of the busiest rank by part">{bars}'
        f'<text x="0" y="{height - 4}">predicted step of the busiest rank by part</text></svg>'
    )
