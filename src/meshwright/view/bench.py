"""A bench in the terminal and as an HTML file: where it ran, collectives by size, transfers between ranks, the device."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.calibrate.fit import Line, fit_line
from meshwright.calibrate.nccl_tests import TOOL as NCCL_TESTS
from meshwright.calibrate.points import Bench, DevicePoint, Point, bus_factor
from meshwright.units import counted, format_bytes, format_count, format_flops, format_rate, format_seconds
from meshwright.view.page.sheet import Part, chart, grid, sheet
from meshwright.view.tables import facts, filled, heading

PAIR = "point-to-point"
MOST_SERIES = 12  # of a chart of pairs: the first ones; the JSON file has all
NOISY = 0.25  # a spread above this is coloured
CONVENTION = (
    "n is the full buffer. algbw = n/t; busbw = bytes that one rank sends / t, comparable with a link's rate "
    "(the conventions of nccl-tests). "
)
TIMES = "Times are medians; ± is half the distance of the quartiles."
LINES = "T(n) = α + n/rate, fitted to all sizes. A call of the half-size α·rate reaches half of the rate; the bus rate counts what one rank sends."
MEANS = "Times are means over the iterations of nccl-tests, out-of-place."


def page(bench: Bench) -> RenderableType:
    """All tables of a bench."""
    parts: list[RenderableType] = [header(bench)]
    collectives = [p for p in bench.points if p.operation != PAIR]
    if collectives:
        parts += [collectives_table(collectives), Text(convention(bench), "dim")]
        if lines := lines_table(collectives):
            parts += [lines, Text(LINES, "dim")]
    pairs = [p for p in bench.points if p.operation == PAIR]
    if pairs:
        parts.append(pairs_table(pairs, bench))
    if bench.device:
        parts.append(device_table(bench.device))
    if bench.skipped:
        parts.append(skipped(bench.skipped))
    return Group(*parts)


def convention(bench: Bench) -> str:
    return CONVENTION + (MEANS if bench.tool == NCCL_TESTS else TIMES)


def header(bench: Bench) -> RenderableType:
    hosts = bench.hosts
    where = ", ".join(f"{host}: {counted(len(ranks), 'rank')}" for host, ranks in list(hosts.items())[:8])
    devices = ", ".join(dict.fromkeys(info.device for info in bench.ranks))
    cores = ", ".join(str(c) for c in dict.fromkeys(info.cores for info in bench.ranks))
    rows: dict[str, object] = {
        "state": Text(f"interrupted: {bench.why}", "bold red") if bench.state == "interrupted" else "",
        "load": Text("; ".join(busy), "yellow") if (busy := bench.load()) else "",
        "hosts": where + (" …" if len(hosts) > 8 else ""),
        "device": f"{devices}; {cores} cores" if cores != "0" else devices,
        "libraries": ", ".join(f"{name} {version}" for name, version in bench.libraries.items()),
    }
    aside = f"{counted(bench.world, 'rank')} on {counted(len(hosts), 'host')}"
    return Group(heading(bench.tool.removeprefix("meshwright "), aside), facts(rows.items()))


def collectives_table(points: Iterable[Point]) -> RenderableType:
    """One row for each operation, algorithm and size; series are separated by their order."""
    rows = []
    for series in by_series(points).values():
        for k, point in enumerate(series):
            name = f"{point.operation}" + (f" ({point.algorithm})" if point.algorithm else "")
            first = (name, point.backend, len(point.ranks)) if k == 0 else ("", "", "")
            rates = map(format_rate, (point.algorithm_bandwidth, point.bus_bandwidth)) if point.bytes else ("", "")
            size = format_bytes(point.bytes) if point.bytes else ""
            rows.append((*first, size, format_seconds(point.median_s), spread(point), *rates))
    return filled(("operation", "backend", ">ranks", ">n", ">time", ">±", ">algbw", ">busbw"), rows)


def lines_table(points: Iterable[Point]) -> RenderableType | None:
    """α, rate and half-size of each collective and algorithm: the line through its sizes. None if every one was measured at one size only."""
    rows = []
    for series in by_series(points).values():
        line = line_of([p for p in series if p.bytes])
        if line is None:
            continue
        point, factor = series[0], bus_factor(series[0].operation, len(series[0].ranks))
        name = point.operation + (f" ({point.algorithm})" if point.algorithm else "")
        bus = format_rate(factor * line.bandwidth) if line.beta else ""
        rows.append((name, point.backend, len(point.ranks), *line_cells(line)[:3], bus, *line_cells(line)[3:]))
    columns = (
        "line through all sizes",
        "backend",
        ">ranks",
        ">α",
        ">rate",
        ">half-size",
        ">bus rate",
        ">residual",
        "~largest deviation",
    )
    return filled(columns, rows) if rows else None


def spread(point: Point | DevicePoint) -> Text:
    """± of a median; nothing where there was time for one sample only."""
    return Text(f"{point.spread:.0%}" if point.samples > 1 else "", "yellow" if point.spread > NOISY else "")


def by_series(points: Iterable[Point]) -> dict[tuple, list[Point]]:
    """Points that differ in size only, by size."""
    series: dict[tuple, list[Point]] = {}
    for point in sorted(points, key=lambda p: p.bytes):
        series.setdefault((*point.series, point.ranks), []).append(point)
    return dict(sorted(series.items(), key=lambda item: str(item[0][:3])))


def pairs_table(points: Sequence[Point], bench: Bench) -> RenderableType:
    """The line of each kind of pair: inside a host, between hosts, alone and at the same time."""
    host = {info.rank: info.host for info in bench.ranks}
    kinds: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        # A ring is of sendrecv_perf: its slowest transfer is between hosts if there are several.
        pair = point.ranks if len(point.ranks) == point.concurrent else point.ranks[:2]
        where = "inside a host" if len({host.get(rank) for rank in pair}) == 1 else "between hosts"
        together = f"{point.concurrent} pairs at once" if point.concurrent > 1 else "one pair at a time"
        kinds.setdefault((point.backend, f"{where}, {together}"), []).append(point)
    rows = []
    for (backend, kind), kind_points in kinds.items():
        if line := line_of(kind_points):
            rows.append((f"{PAIR} {kind}", backend, len({p.ranks for p in kind_points}), *line_cells(line)))
    return filled(("transfers", "backend", ">pairs", ">α", ">rate", ">n*", ">residual", "~largest deviation"), rows)


def line_of(points: Sequence[Point]) -> Line | None:
    """The fitted line; None with fewer than two sizes."""
    if len({p.bytes for p in points}) < 2:
        return None
    return fit_line([p.bytes for p in points], [p.median_s for p in points])


def line_cells(line: Line) -> tuple[str, ...]:
    rate = (format_rate(line.bandwidth), format_bytes(line.crossover)) if line.beta else ("", "")
    deviation = f"{line.deviation:.0%} at {format_bytes(line.deviates_at)}"
    return format_seconds(line.alpha), *rate, f"{line.residual:.0%}", deviation


DEVICE_COLUMNS = ("device", "dtype", "shape", ">time", ">±", ">rate")


def device_table(points: Sequence[DevicePoint]) -> Table:
    return filled(DEVICE_COLUMNS, [device_row(point) for point in points])


def device_row(point: DevicePoint) -> tuple[str | Text, ...]:
    rate = {"FLOP": format_flops, "byte": format_rate}.get(point.unit, lambda r: f"{format_count(r)}/s")(point.rate)
    shape = " × ".join(
        f"{name} {format_bytes(value) if name == 'bytes' else f'{value:,.0f}'}" for name, value in point.shape.items()
    )
    return point.kind, point.dtype, shape, format_seconds(point.median_s), spread(point), rate


def skipped(texts: Sequence[str], most: int = 6) -> RenderableType:
    """List what was not measured; a text that several pairs of ranks share is shown once."""
    times = Counter(texts)
    shown = [text + (f" ({count} times)" if count > 1 else "") for text, count in times.items()]
    more = f"\n… and {len(shown) - most} more" if len(shown) > most else ""
    return Text("not measured: " + "\n              ".join(shown[:most]) + more, "dim")


def html(bench: Bench) -> str:
    """A chart of time and one of bus bandwidth by message size for each operation, with quartiles and fitted lines, and the device."""
    parts: list[Part] = []
    series = by_series(point for point in bench.points if point.bytes)
    for name in dict.fromkeys(points[0].operation for points in series.values()):
        chosen = [points for points in series.values() if points[0].operation == name][:MOST_SERIES]
        for what, unit in (("time", "s"), ("bus bandwidth", "rate")):
            drawn = [curve(points, bench, what) for points in chosen]
            x, y = {"log": 2, "label": "message size", "unit": "bytes"}, {"log": 10, "label": what, "unit": unit}
            parts += chart(f"{name}: {what}", x, y, drawn)
    if bench.device:
        parts += grid(device_table(bench.device))
    devices = ", ".join(dict.fromkeys(info.device for info in bench.ranks))
    libraries = ", ".join(f"{name} {version}" for name, version in bench.libraries.items())
    state = "; ".join([f"interrupted: {bench.why}"] * (bench.state == "interrupted") + bench.load())
    title = f"bench: {counted(bench.world, 'rank')} on {counted(len(bench.hosts), 'host')}, {bench.made}"
    notes = [f"{devices}; {libraries}", state, convention(bench) + " Dashed: the fitted line T = α + n·β."]
    return sheet(title, notes, parts)


def curve(points: list[Point], bench: Bench, what: str) -> Part:
    """The points of one series with their quartiles, and its fitted line."""
    first, line = points[0], line_of(points)
    factor = bus_factor(first.operation, len(first.ranks))

    def value(size: float, seconds: float) -> float:
        return seconds if what == "time" else factor * size / seconds

    marks = []
    for p in points:
        words = f"{format_bytes(p.bytes)}: {format_seconds(p.median_s)} ({format_seconds(p.low_s)} to {format_seconds(p.high_s)})"
        rates = f"algbw {format_rate(p.algorithm_bandwidth)}, busbw {format_rate(p.bus_bandwidth)}"
        middle, low, high = (value(p.bytes, s) for s in (p.median_s, p.low_s, p.high_s))
        marks.append([p.bytes, middle, f"{words}\n{rates}", {"low": low, "high": high}])
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
