"""Figures of accuracy as SVG: residuals of left-out sources by source and by part of the step, and the coverage of the bands.

Each row of a residual figure is one group: a bar from the 10th to the 90th percentile of predicted / measured, a thick bar from the 25th to
the 75th, a mark at the median. The vertical line is a perfect prediction; the shaded region is ±10%.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.calibrate.runs.accuracy import INSIDE, Accuracy
from meshwright.calibrate.runs.left_out import LeftOut
from meshwright.cost.band import shares

WIDTH, ROW, LEFT, TOP, RIGHT = 760, 24, 250, 44, 60
LOW, HIGH = 0.4, 2.0  # limits of predicted / measured
MARKS = (0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
BLUE, DEEP, GREY = "#9db4e8", "#2f4fa8", "#777"


def figures(found: Accuracy) -> str:
    """All figures as HTML; empty if no source was left out."""
    left_out = found.left_out
    if left_out is None:
        return ""
    sources = left_out.by_source(left_out.source)
    parts = by_part(left_out)
    return (
        "<h2>Predicted over measured step time, the source left out</h2>"
        + residuals(sources)
        + "<h2>The same by what the step is made of</h2>"
        + residuals(parts)
        + "<h2>Share of runs inside the 90% band, by what is known of the stack</h2>"
        + coverage({f"{level} ({b.runs} runs)": (b.coverage, b.half_width) for level, b in found.bands.items()})
    )


def by_part(left_out: LeftOut) -> dict[str, np.ndarray]:
    """ln predicted / measured by the shares of communication, host and bubble."""
    labels = []
    for o in left_out.runs:
        communication, host, bubble = shares(o.prediction.exposed_s) if o.prediction else (0.0, 0.0, 0.0)
        named = ((communication, "communication"), (host, "host"), (bubble, "pipeline bubble"))
        share, name = max(named)
        labels.append("compute above 85%" if share < 0.15 else f"{name} {'15 to 40%' if share < 0.4 else 'above 40%'}")
    names = np.array(labels)
    return {name: left_out.source[names == name] for name in sorted(set(labels))}


def position(ratio: float) -> float:
    """The horizontal position of predicted / measured, on a logarithmic axis."""
    share = (math.log(min(max(ratio, LOW), HIGH)) - math.log(LOW)) / (math.log(HIGH) - math.log(LOW))
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def residuals(groups: Mapping[str, np.ndarray]) -> str:
    height = TOP + ROW * len(groups) + 24
    x = [position(edge) for edge in (0.9, 1.1)]
    out = [
        f'<rect x="{x[0]:.1f}" y="{TOP - 8}" width="{x[1] - x[0]:.1f}" height="{ROW * len(groups) + 8}" fill="#eef6ee"/>'
    ]
    for mark in MARKS:
        out.append(line(position(mark), TOP - 8, position(mark), height - 24, "#222" if mark == 1 else "#e3e3e3"))
        out.append(text(position(mark), TOP - 14, f"{mark:g}", "middle"))
    for k, (name, values) in enumerate(groups.items()):
        y = TOP + ROW * k + ROW / 2
        low, first, middle, third, high = (math.exp(q) for q in np.quantile(values, (0.1, 0.25, 0.5, 0.75, 0.9)))
        out.append(text(LEFT - 12, y + 4, f"{name} ({len(values)})", "end"))
        out.append(line(position(low), y, position(high), y, BLUE, 3))
        out.append(line(position(first), y, position(third), y, BLUE, 10))
        out.append(line(position(middle), y - 8, position(middle), y + 8, DEEP, 3))
        error = float(np.median(np.abs(np.expm1(values))))
        out.append(text(WIDTH - 6, y + 4, f"{100 * error:.0f}%", "end"))
    out.append(text(WIDTH - 6, TOP - 30, "median error", "end"))
    out.append(text(position(0.63), height - 6, "← predicted too fast", "middle"))
    out.append(text(position(1.5), height - 6, "predicted too slow →", "middle"))
    return svg(out, height, "predicted over measured step time of left-out sources")


def coverage(levels: Mapping[str, Sequence[float]]) -> str:
    height = TOP + ROW * len(levels) + 12
    scale = WIDTH - LEFT - RIGHT - 150
    goal = LEFT + INSIDE * scale
    out = []
    for k, (name, (inside, half)) in enumerate(levels.items()):
        y = TOP + ROW * k
        out.append(text(LEFT - 12, y + 16, name, "end"))
        out.append(f'<rect x="{LEFT}" y="{y + 4}" width="{inside * scale:.1f}" height="{ROW - 8}" fill="{BLUE}"/>')
        out.append(text(LEFT + scale + 10, y + 16, f"{100 * inside:.0f}% inside, ±{100 * half:.0f}%", "start"))
    out.append(line(goal, TOP - 6, goal, height - 10, DEEP, 2))
    out.append(text(goal, TOP - 12, "goal 90%", "middle"))
    return svg(out, height, "share of runs inside the band")


def line(x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}" stroke-width="{width:g}"/>'
    )


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{GREY}">{html.escape(words)}</text>'


def svg(parts: Sequence[str], height: float, label: str) -> str:
    head = f'<svg width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">'
    return head + "".join(parts) + "</svg>"
