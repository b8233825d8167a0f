"""Charts and tables that belong to no plan, as one HTML file in the frame of the page: `bench --html`, `validate --html`, `explain --html` of
flight records and memory snapshots.

A part is a chart (series of points on logarithmic axes), quantiles of ratios by group, or a table or a line of the terminal. `views/sheet.js` draws
them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshwright.calibrate.points import Bench, Point, bus_factor
from meshwright.calibrate.runs.accuracy import Accuracy
from meshwright.calibrate.runs.left_out import LeftOut
from meshwright.calibrate.runs.validate import Outcome, by, macro, score
from meshwright.cost.band import shares
from meshwright.units import format_bytes, format_rate, format_seconds
from meshwright.view import validate
from meshwright.view.bench import PAIR, by_series, convention, counted, device_table, line_of
from meshwright.view.page.bundle import written_view

MOST_SERIES = 12  # of a chart of pairs: the first ones; the JSON file has all
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
TONES = {"red": "bad", "yellow": "warn", "green": "good", "dim": "quiet", "bold": "strong"}
Part = dict[str, Any]


def sheet(title: str, notes: Sequence[str], parts: Iterable[Part]) -> str:
    data = {"title": title, "notes": [note for note in notes if note], "parts": list(parts)}
    return written_view("sheet", title, data)


def chart(title: str, note: str, x: tuple[str, str], y: tuple[str, str], series: list[Part]) -> Part:
    """A chart; an axis is its label and its unit, a name in `format.js`."""
    axes = {name: {"label": label, "unit": unit} for name, (label, unit) in (("x", x), ("y", y))}
    return {"title": title, "note": note, **axes, "series": series}


def grid(table: Table) -> Part:
    """A table of the terminal as data."""
    columns = [{"name": str(column.header), "right": column.justify == "right"} for column in table.columns]
    rows = [[plain(cell) for cell in cells] for cells in zip(*(column.cells for column in table.columns), strict=True)]
    return {"title": str(table.title or ""), "columns": columns, "rows": rows}


def parts_of(shown: RenderableType) -> list[Part]:
    """What the terminal shows as data: tables, and lines with the tone of their first styled words."""
    match shown:
        case Group():
            return [part for inner in shown.renderables for part in parts_of(inner)]
        case Panel():
            return [{"line": plain(shown.title or ""), "tone": "strong"}, *parts_of(shown.renderable)]
        case Table():
            return [grid(shown)]
    words = shown if isinstance(shown, Text) else Text.from_markup(str(shown))
    return [{"line": words.plain, "tone": tone_of(words)}] if words.plain.strip() else []


def tone_of(words: Text) -> str:
    styles = " ".join([str(words.style), *(str(span.style) for span in words.spans[:1])])
    return next((tone for colour, tone in TONES.items() if colour in styles), "")


def plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


# A bench: time and bus bandwidth by message size for each operation, with the fitted lines, and the device.


def bench_sheet(bench: Bench) -> str:
    """The measured points of a bench with their quartiles and fitted lines."""
    parts = []
    series = by_series(point for point in bench.points if point.bytes)
    for name in dict.fromkeys(points[0].operation for points in series.values()):
        chosen = [points for points in series.values() if points[0].operation == name][:MOST_SERIES]
        for what, unit in (("time", "s"), ("bus bandwidth", "rate")):
            drawn = [bench_series(points, bench, what) for points in chosen]
            parts.append(chart(f"{name}: {what}", "", ("message size", "bytes"), (what, unit), drawn))
    if bench.device:
        parts.append(grid(device_table(bench.device)))
    devices = ", ".join(dict.fromkeys(info.device for info in bench.ranks))
    libraries = ", ".join(f"{name} {version}" for name, version in bench.libraries.items())
    state = "; ".join([f"interrupted: {bench.why}"] * (bench.state == "interrupted") + bench.load())
    title = f"bench: {counted(bench.world, 'rank')} on {counted(len(bench.hosts), 'host')}, {bench.made}"
    notes = [f"{devices}; {libraries}", state, convention(bench) + " Dashed: the fitted line T = α + n·β."]
    return sheet(title, notes, parts)


def bench_series(points: list[Point], bench: Bench, what: str) -> Part:
    """The points of one series with their quartiles, and its fitted line."""
    first, line = points[0], line_of(points)
    factor = bus_factor(first.operation, len(first.ranks))

    def value(size: float, seconds: float) -> float:
        return seconds if what == "time" else factor * size / seconds

    marks = []
    for p in points:
        words = f"{format_bytes(p.bytes)}: {format_seconds(p.median_s)} ({format_seconds(p.low_s)} to {format_seconds(p.high_s)})"
        rates = f"algbw {format_rate(p.algorithm_bandwidth)}, busbw {format_rate(p.bus_bandwidth)}"
        marks.append([p.bytes, *(value(p.bytes, s) for s in (p.median_s, p.low_s, p.high_s)), f"{words}\n{rates}"])
    out: Part = {"name": series_name(first, bench), "points": marks}
    if line:
        sizes = np.geomspace(points[0].bytes, points[-1].bytes, 40).tolist()
        out["line"] = [[n, value(n, line.alpha + n * line.beta)] for n in sizes if line.alpha + n * line.beta > 0]
        rate = format_rate(line.bandwidth) if line.beta else "no bytes term"
        out["name"] += f": α {format_seconds(line.alpha)}, 1/β {rate}, residual {line.residual:.0%}"
    return out


def series_name(point: Point, bench: Bench) -> str:
    """The algorithm, or the ranks where they differ within a chart."""
    name = point.algorithm or point.backend
    if point.operation == PAIR:
        pairs = [f"{a}–{b}" for a, b in zip(point.ranks[::2], point.ranks[1::2], strict=True)]
        return f"{name} {' and '.join(pairs[:4])}" + (" …" if len(pairs) > 4 else "")
    return name if len(point.ranks) == bench.world else f"{name}, {len(point.ranks)} ranks"


# Accuracy: predicted over measured step time of every run, by source, and of sources that the fit has not seen.


def accuracy_sheet(accuracy: Accuracy) -> str:
    """The tables of `meshwright validate` with a scatter of predicted over measured step time."""
    outcomes = [*accuracy.outcomes, *accuracy.headlines]
    parts = [scatter(outcomes)]
    if accuracy.left_out is not None:
        sources = accuracy.left_out.by_source(accuracy.left_out.source)
        parts.append(ratios("Predicted over measured step time, the source left out", sources))
        parts.append(ratios("The same by what the step is made of", by_part(accuracy.left_out)))
    scores = {name: score(part) for name, part in by(outcomes, ["source"]).items()}
    parts.append(grid(validate.table(scores, macro(scores))))
    if accuracy.unseen:
        parts += [
            grid(validate.unseen_table(accuracy.unseen, accuracy.unseen_overall)),
            grid(validate.bands_table(accuracy.bands)),
        ]
    if accuracy.headlines:
        parts.append(grid(validate.headline_table(accuracy.headlines)))
    return sheet("Predicted and measured step time", [], parts)


def scatter(outcomes: list[Outcome]) -> Part:
    points: dict[str, list[Any]] = {}
    for o in outcomes:
        if o.prediction and (measured := o.case.step_time):
            predicted = o.prediction.step_time_s
            words = f"{o.case.row_id}: measured {format_seconds(measured)}, predicted {format_seconds(predicted)}"
            points.setdefault(o.case.row.get("file", ""), []).append([measured, predicted, None, None, words])
    times = [x for marks in points.values() for mark in marks for x in mark[:2]] or [0.1, 1.0]
    perfect: Part = {"name": "a perfect prediction", "points": [], "line": [[t, t] for t in (min(times), max(times))]}
    series = [{"name": name, "points": marks} for name, marks in sorted(points.items())]
    return chart("Each mark is one published run", "", ("measured", "s"), ("predicted", "s"), [*series, perfect])


def ratios(title: str, groups: Mapping[str, np.ndarray]) -> Part:
    """Quantiles of predicted / measured by group; the values are their logarithms."""
    rows = [
        {"name": f"{name} ({len(values)})", "quantiles": np.exp(np.quantile(values, QUANTILES)).tolist()}
        for name, values in groups.items()
    ]
    return {"title": title, "note": "Thin: 10 to 90% of the runs; thick: 25 to 75%; mark: the median.", "ratios": rows}


def by_part(left_out: LeftOut) -> dict[str, np.ndarray]:
    """ln predicted / measured by the shares of communication, host and bubble."""
    labels = []
    for o in left_out.runs:
        communication, host, bubble = shares(o.prediction.exposed_s) if o.prediction else (0.0, 0.0, 0.0)
        share, name = max((communication, "communication"), (host, "host"), (bubble, "pipeline bubble"))
        labels.append("compute above 85%" if share < 0.15 else f"{name} {'15 to 40%' if share < 0.4 else 'above 40%'}")
    names = np.array(labels)
    return {name: left_out.source[names == name] for name in sorted(set(labels))}
