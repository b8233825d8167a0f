"""The planner's result as an HTML element for a notebook: no scripts, no network. `plan --html` writes `view.page.bundle` instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from meshwright.cost.estimate import Estimate
from meshwright.cost.predict import COMMUNICATION
from meshwright.describe.result import Prediction
from meshwright.planner.advice import explain as why
from meshwright.planner.result import Result
from meshwright.units import format_count, format_seconds
from meshwright.view import goodput
from meshwright.view.estimate import shown_stages, uncalibrated
from meshwright.view.plan import scaling_words, searched, short, training_words

STYLE = """
.mw { --panel: #fff; --line: #dbe1ea; --text: #1c2430; --soft: #66748a; --good: #1d7f4f; --bad: #b3372f; --compute: #2f7fb8; --comm: #a24bb0;
  --wait: #c98a16; --once: #4d9a57; color: var(--text); font: 14px/1.45 system-ui, "Segoe UI", Roboto, sans-serif; max-width: 1120px; }
@media (prefers-color-scheme: dark) { .mw { --panel: #171e29; --line: #2c3848; --text: #e6ebf2; --soft: #8c9bb0; --good: #56c98c; --bad: #ef7d74;
  --compute: #58a6e0; --comm: #cb82d8; --wait: #e5b04d; --once: #7cc486; } }
.mw section { background: var(--panel); border: 1px solid var(--line); border-radius: 12px; padding: 14px 18px; margin: 0 0 14px; overflow-x: auto; }
.mw h2 { font-size: 19px; margin: 0 0 4px; font-weight: 650; } .mw h3 { font-size: 14px; margin: 0 0 8px; font-weight: 650; }
.mw .soft { color: var(--soft); } .mw .title { color: var(--good); font-weight: 650; font-size: 16px; margin: 8px 0; }
.mw .cards { display: flex; flex-wrap: wrap; gap: 26px; margin: 10px 0 4px; } .mw .cards b { display: block; font-size: 22px; font-weight: 650; }
.mw table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; background: none; color: inherit; font-size: 13px; }
.mw th { text-align: left; color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line); padding: 3px 12px 3px 0; background: none; }
.mw td { padding: 3px 12px 3px 0; vertical-align: top; text-align: left; background: none; }
.mw td.n, .mw th.n { text-align: right; white-space: nowrap; }
.mw .bar { display: flex; height: 22px; border-radius: 5px; overflow: hidden; background: var(--line); } .mw .bar i { display: block; height: 100%; }
.mw .bar + .bar { margin-top: 4px; } .mw td .bar { min-width: 90px; height: 14px; } .mw .key span { white-space: nowrap; margin-right: 14px; }
.mw .key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
.mw .bad { color: var(--bad); } .mw svg text { fill: var(--soft); font-size: 12px; }
.mw .two { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; } @media (max-width: 800px) { .mw .two { grid-template-columns: 1fr; } }
"""
PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "working", "slack", "context")
SHADES = ("#2f7fb8", "#5b9bc9", "#8ab9db", "#a24bb0", "#c98a16", "#4d9a57", "#9aa7b8", "#6d7b8f")


def fragment(r: Result) -> str:
    """Return the result as one HTML element with its style, for a notebook."""
    parts = [
        head(r),
        leaders(r),
        step(r.prediction),
        memory(r.prediction),
        reasons(r),
        near_misses(r),
        strategies(r),
        '<div class="two">',
        front(r),
        sensitivities(r),
        "</div>",
    ]
    return element(*parts)


def section(title: str, *inner: str) -> str:
    return f"<section><h3>{escape(title)}</h3>{''.join(inner)}</section>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of HTML cells; a column whose name starts with > is right-aligned."""
    right = [c.startswith(">") for c in columns]
    top = "".join(
        f"<th{' class=n' if n else ''}>{escape(c.lstrip('>'))}</th>" for c, n in zip(columns, right, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=n' if n else ''}>{cell}</td>" for cell, n in zip(row, right, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def head(r: Result) -> str:
    low, high = r.explanation.memory_band
    below = f"<div class=soft>{escape(searched(r))}</div><div class=soft>{escape(r.choice)}</div>"
    return predicted(r.estimate, f"; {low:.0f} to {high:.0f} in published runs", below)


def element(*sections: str) -> str:
    """One HTML element with its style."""
    return f'<div class="mw"><style>{STYLE}</style>{"".join(sections)}</div>'


def cards(*rows: tuple[str, str, str]) -> str:
    """Large numbers: (name, value, aside) each."""
    shown = "".join(
        f"<div><span class=soft>{escape(name)}</span><b>{escape(value)}</b><span class=soft>{escape(aside)}</span></div>"
        for name, value, aside in rows
    )
    return f"<div class=cards>{shown}</div>"


def predicted(e: Estimate, memory_aside: str = "", below: str = "") -> str:
    """The head of a page: the model, the devices, the plan, and the four main numbers."""
    p = e.prediction
    band = f"{format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)}"
    shown = cards(
        ("step", format_seconds(p.step_time_s), band),
        ("MFU", f"{100 * (p.mfu or 0):.1f}%", p.mfu_denominator),
        ("memory", f"{p.memory_gib:.1f} GiB", f"of {p.memory_limit_gib:.1f}{memory_aside}"),
        (f"{e.model.unit}/s", format_count(p.tokens_per_s or 0), f"batch {e.workload.batch:,}"),
    )
    where = f"{e.model.name} ({format_count(e.model.total)}) on {e.plan.world:,} × {e.cluster.accelerator.name}"
    how = f"{e.cluster.name}, stack {e.stack.name}, {e.model.describe_batch(e.workload)}, {e.workload.precision}"
    warning = "".join(f"<div class=bad>{escape(line.plain)}</div>" for line in uncalibrated(e))
    return (
        f"<section><h2>{escape(where)}</h2><div class=soft>{escape(how)}</div><div class=title>{escape(e.plan.title())}</div>"
        f"{shown}{warning}{below}</section>"
    )


def leaders(r: Result) -> str:
    best = r.prediction.step_time_s
    rows = [
        (
            str(k),
            escape(short(c.plan)),
            escape(c.strategy),
            format_seconds(p.step_time_s, 4),
            f"{100 * (p.step_time_s / best - 1):+.1f}%",
            f"{100 * (p.mfu or 0):.1f}%",
            f"{p.memory_gib:.1f}",
        )
        for k, (c, p) in enumerate(r.leaders, 1)
    ]
    return section("Leaders, by simulated step", table([">", "plan", "strategy", ">step", ">", ">MFU", ">GiB"], rows))


def colour(part: str) -> str:
    kinds = {
        **dict.fromkeys(COMMUNICATION.values(), "comm"),
        why.NAMES["bubble"]: "wait",
        "waiting for the host": "wait",
        "compute slowed by overlap": "wait",
        "optimizer": "once",
        "step overhead": "once",
    }
    return f"var(--{kinds.get(part, 'compute')})"


def bar(pieces: Iterable[tuple[str, float, str]], whole: float) -> str:
    """Return a bar of named parts (name, size, colour) of the total `whole`."""
    inner = "".join(
        f'<i style="width:{100 * size / whole:.3f}%;background:{shade}" title="{escape(name)} {100 * size / whole:.1f}%"></i>'
        for name, size, shade in pieces
        if size > 0
    )
    return f"<div class=bar>{inner}</div>"


def step(p: Prediction) -> str:
    parts = sorted(why.grouped(p).items(), key=lambda item: -item[1])
    key = "".join(
        f'<span><i style="background:{colour(name)}"></i>{escape(name)} {format_seconds(s)} ({100 * s / p.step_time_s:.1f}%)</span> '
        for name, s in parts
        if s >= 0.001 * p.step_time_s
    )
    return section(
        "Where the step goes",
        bar([(n, s, colour(n)) for n, s in parts], p.step_time_s),
        f'<p class="key soft">{key}</p>',
    )


def memory(p: Prediction) -> str:
    stages, limit = p.memory_by_stage, p.memory_limit_gib
    parts = [part for part in PARTS if any(s.get(part, 0) >= 0.005 for s in stages)]
    whole = max(limit, *(sum(s.values()) for s in stages))
    rows = []
    for k in shown_stages(len(stages)):
        name = f"stage {k}: " if len(stages) > 1 else ""
        rows.append(
            f"<div class=soft>{name}{sum(stages[k].values()):.1f} of {limit:.1f} GiB</div>"
            + bar([(part, stages[k].get(part, 0.0), SHADES[PARTS.index(part)]) for part in parts], whole)
        )
    key = "".join(f'<span><i style="background:{SHADES[PARTS.index(part)]}"></i>{part}</span> ' for part in parts)
    return section("Memory per GPU", *rows, f'<p class="key soft">{key}</p>')


def reasons(r: Result) -> str:
    x = r.explanation
    rows = [
        ("bound by", x.bound),
        *x.reasons.items(),
        ("memory", why.memory_words(r.prediction)),
        ("scaling", scaling_words(r)),
        ("critical batch", x.critical),
    ]
    rows += [("training", training_words(r))] if x.training else []
    rows += list(goodput.rows(r))
    rows += [("constants", x.calibrated), *(("assumed", item) for item in x.assumed)]
    return section("Why", table(["", ""], [(f"<span class=soft>{escape(a)}</span>", escape(b)) for a, b in rows if b]))


def near_misses(r: Result) -> str:
    if not r.near_misses:
        return ""
    rows = [
        (escape(m.what), f"{m.given:,}", f"{m.offered:,}", f"{100 * m.gain:+.1f}%", escape(m.setting), escape(m.note))
        for m in r.near_misses
    ]
    return section("Near misses: another size is faster", table(["", ">given", ">better", ">gain", "type", ""], rows))


def strategies(r: Result) -> str:
    if not r.why_not:
        return ""
    rows = []
    for w in r.why_not:
        slower = (
            f"{'' if w.proved else '≤ '}{100 * w.slower:+.1f}%" if w.fits else "<span class=bad>does not fit</span>"
        )
        rows.append((escape(w.strategy), f"<span class=soft>{escape(short(w.plan))}</span>", slower, escape(w.words)))
    return section("Why not …", table(["strategy", "its best", ">", "what it costs"], rows))


def front(r: Result) -> str:
    """Return a plot of step time over free memory: one point per plan, joined by a step line."""
    points = [
        (100 * (1 - c.memory / r.space.cluster.accelerator.memory), c.time, short(c.plan)) for c in r.ranking.front
    ]
    width, height, left, base = 520, 220, 64, 180
    low, high = min(t for _, t, _ in points), max(t for _, t, _ in points)
    most = max(10.0, *(h for h, _, _ in points))

    def place(h: float, t: float) -> tuple[float, float]:
        return left + (width - left - 20) * h / most, base - 140 * (t - low) / ((high - low) or 1)

    marks = [place(h, t) for h, t, _ in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in marks)
    names = [escape(f"{t:.4g} s, {h:.0f}% free: {name}") for h, t, name in points]
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="var(--compute)"><title>{name}</title></circle>'
        for (x, y), name in zip(marks, names, strict=True)
    )
    labels = (
        f'<text x="4" y="{base - 136}">{format_seconds(high)}</text><text x="4" y="{base + 4}">{format_seconds(low)}</text>'
        if high > low
        else ""
    )
    labels += "".join(
        f'<text x="{place(h, low)[0]:.0f}" y="{base + 24}" text-anchor="middle">{h:g}%</text>'
        for h in range(0, int(most) + 1, 10)
    )
    svg = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="step time by free memory">'
        f'<line x1="{left}" x2="{width - 20}" y1="{base + 8}" y2="{base + 8}" stroke="var(--line)"/>'
        f'<polyline points="{line}" fill="none" stroke="var(--compute)" stroke-opacity=".4" stroke-width="2"/>{dots}{labels}</svg>'
    )
    return section("Step time by free memory", svg)


def sensitivities(r: Result) -> str:
    rows = r.explanation.sensitivities
    most = max(row.swing for row in rows) or 1.0

    def cell(x: float | None) -> str:
        return "–" if x is None else f"{100 * x:+.1f}%"

    body = [
        (
            escape(row.what),
            cell(row.less),
            cell(row.more),
            bar([(row.what, row.swing, "var(--compute)")], most),
            f"<span class=soft>{escape(row.note)}</span>",
        )
        for row in rows
    ]
    return section(
        "What to change first: throughput with 20% less and 20% more", table(["", ">−20%", ">+20%", "", ""], body)
    )
