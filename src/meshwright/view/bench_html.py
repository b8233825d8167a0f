"""A bench as one HTML page: a chart for each operation, with measured points, their quartiles, and the fitted lines; a table of the device."""

from __future__ import annotations

from typing import Any

from meshwright.calibrate.points import Bench, Point, bus_factor
from meshwright.units import format_bytes, format_rate, format_seconds
from meshwright.view.bench import DEVICE_COLUMNS, PAIR, by_series, convention, counted, device_row, line_of
from meshwright.view.collectives import filled_template

MOST_SERIES = 12  # of pairs: the first ones; all of them are in the JSON file


def document(bench: Bench) -> str:
    """The page."""
    series = by_series(point for point in bench.points if point.bytes)
    operations = list(dict.fromkeys(points[0].operation for points in series.values()))
    charts = [
        {"title": name, "series": [entry(points, bench) for points in series.values() if points[0].operation == name][:MOST_SERIES]}
        for name in operations
    ]  # fmt: skip
    devices = ", ".join(dict.fromkeys(info.device for info in bench.ranks))
    libraries = ", ".join(f"{name} {version}" for name, version in bench.libraries.items())
    return filled_template(
        "bench.html",
        {
            "title": f"{counted(bench.world, 'rank')} on {counted(len(bench.hosts), 'host')}, {bench.made}",
            "about": f"{devices}; {libraries}",
            "state": "; ".join([f"interrupted: {bench.why}"] * (bench.state == "interrupted") + bench.load()),
            "note": convention(bench) + " Dashed: the fitted line T = α + n·β.",
            "charts": charts,
            "device": [
                [name.lstrip(">~") for name in DEVICE_COLUMNS],
                *([str(x) for x in device_row(p)] for p in bench.device),
            ],
        },
    )


def entry(points: list[Point], bench: Bench) -> dict[str, Any]:
    """One series of a chart: its points and its line."""
    first, line = points[0], line_of(points)
    text = ""
    if line:
        rate = format_rate(line.bandwidth) if line.beta else "no bytes term"
        text = (
            f"α {format_seconds(line.alpha)}, 1/β {rate}, residual {line.residual:.0%}, "
            f"largest deviation {line.deviation:.0%} at {format_bytes(line.deviates_at)}"
        )
    keys = ("bytes", "median_s", "low_s", "high_s")
    return {
        "name": series_name(first, bench),
        "factor": bus_factor(first.operation, len(first.ranks)),
        "points": [{key: getattr(point, key) for key in keys} for point in points],
        "fit": {"alpha": line.alpha, "beta": line.beta} if line else None,
        "text": text,
    }


def series_name(point: Point, bench: Bench) -> str:
    """The algorithm, or the ranks where they differ within a chart."""
    name = f"{point.algorithm or point.backend}"
    if point.operation == PAIR:
        pairs = [f"{a}–{b}" for a, b in zip(point.ranks[::2], point.ranks[1::2], strict=True)]
        return f"{name} {' and '.join(pairs[:4])}" + (" …" if len(pairs) > 4 else "")
    return name if len(point.ranks) == bench.world else f"{name}, {len(point.ranks)} ranks"
