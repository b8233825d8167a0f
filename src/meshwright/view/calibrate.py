"""A calibration in the terminal: levels with a verdict, factors of the collectives, algorithms and where they cross, notes."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.calibrate.calibration import GROUPS, Calibration
from meshwright.calibrate.verdict import NORMAL, Verdict
from meshwright.units import format_bytes, format_rate, format_seconds
from meshwright.view.tables import filled, heading

BENT = 0.3  # a deviation from the line above this is coloured


def page(result: Calibration) -> RenderableType:
    parts: list[RenderableType] = [heading(result.cluster.name, result.cluster.source)]
    if result.levels:
        parts += [levels(result), *causes(result)]
    if any(not f.refused for f in result.factors):
        parts.append(factors(result))
    if any(one.algorithm for one in result.series):
        parts.append(algorithms(result))
    parts += [
        Text(f"{c.operation} on {c.ranks} ranks: from {format_bytes(c.bytes)} on {c.after} is faster than {c.before}")
        for c in result.crossovers
    ]
    parts += [
        Text(f"γ of {name}: {seconds * 1e9:.3g} ns per byte added", "dim") for name, seconds in result.gamma.items()
    ]
    return Group(*parts, notes(result))


def levels(result: Calibration) -> RenderableType:
    """One row for each level: what was measured, what was expected, and whether that is normal."""
    rows = []
    for level, verdict in zip(result.levels, result.verdicts, strict=True):
        style = "green" if verdict.normal else "bold red" if verdict.factor > NORMAL else "yellow"
        bent = Text(
            f"{level.line.deviation:.0%} at {format_bytes(level.line.deviates_at)}",
            "yellow" if level.line.deviation > BENT else "",
        )
        rows.append(
            (
                level.name,
                f"{len(level.units)} × {len(level.units[0])}",
                level.pairs,
                format_seconds(level.line.alpha),
                format_rate(level.line.bandwidth),
                f"{level.line.residual:.0%}",
                bent,
                expectation(verdict),
                Text(str(verdict), style),
            )
        )
    columns = ("level", ">units", ">pairs", ">α", ">rate", ">residual", ">deviation", "~expected", "verdict")
    return filled(columns, rows)


def expectation(verdict: Verdict) -> str:
    if not verdict.expected:
        return ""
    return f"{verdict.expected} {format_rate(verdict.expected_rate)}, {format_seconds(verdict.expected_latency)}"


def causes(result: Calibration) -> list[RenderableType]:
    return [Text(f"{v.level}: {cause}", "yellow") for v in result.verdicts for cause in v.causes]


def factors(result: Calibration) -> RenderableType:
    """Tabulate the library's collectives against the formula with the α and β of pairs."""
    rows = [
        (
            f.operation,
            GROUPS[f.across],
            f"{f.factors.latency:.2f}×",
            f"{f.factors.bytes:.2f}×",
            f.points,
            f"{f.residual:.0%}",
            f"{f.worst:.0%} at {format_bytes(f.worst_at)}",
        )
        for f in result.factors
        if not f.refused
    ]
    columns = ("collective", "group", ">latency", ">bytes", ">points", ">residual", "~largest error of the cost model")
    return filled(columns, rows, title="factors on the formulas")


def algorithms(result: Calibration) -> RenderableType:
    """The line of every algorithm that was measured by name, and the α and rate of one message in it."""
    rows = []
    for one in result.series:
        if one.algorithm:
            rows.append(
                (
                    one.operation,
                    one.name,
                    len(one.ranks),
                    format_seconds(one.line.alpha),
                    format_rate(one.line.bandwidth) if one.line.beta else "",
                    format_seconds(one.alpha) if one.alpha else "",
                    format_rate(one.rate) if one.rate else "",
                    f"{one.line.residual:.0%}",
                )
            )
    columns = ("operation", "algorithm", ">ranks", ">start", ">n/t", ">α per message", ">rate per rank", ">residual")
    return filled(columns, rows)


def notes(result: Calibration) -> RenderableType:
    return Text("\n".join(f"· {note}" for note in result.notes), "dim")
