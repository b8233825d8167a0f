"""A calibration in the terminal: levels with a verdict, factors of the collectives, algorithms and where they cross, notes."""

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.calibrate.calibration import GROUPS, Calibration
from meshwright.calibrate.runs.from_run import ENOUGH, FAR, Adjusted
from meshwright.calibrate.verdict import NORMAL, NetworkVerdict
from meshwright.describe.result import GIB
from meshwright.describe.stack import Stack
from meshwright.explain.calibration import TraceCalibration
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
        line = level.line
        bent = Text(
            f"{line.deviation:.0%} at {format_bytes(line.deviates_at)}", "yellow" if line.deviation > BENT else ""
        )
        fitted = format_seconds(line.alpha), format_rate(line.bandwidth), f"{line.residual:.0%}", bent
        units = f"{len(level.units)} × {len(level.units[0])}"
        rows.append((level.name, units, level.pairs, *fitted, expectation(verdict), Text(str(verdict), style)))
    columns = ("level", ">units", ">pairs", ">α", ">rate", ">residual", ">deviation", "~expected", "verdict")
    return filled(columns, rows)


def expectation(verdict: NetworkVerdict) -> str:
    if not verdict.expected:
        return ""
    return f"{verdict.expected} {format_rate(verdict.expected_rate)}, {format_seconds(verdict.expected_latency)}"


def causes(result: Calibration) -> list[RenderableType]:
    return [Text(f"{v.level}: {cause}", "yellow") for v in result.verdicts for cause in v.causes]


def factors(result: Calibration) -> RenderableType:
    """Tabulate the library's collectives against the formula with the α and β of pairs."""
    rows = []
    for f in (one for one in result.factors if not one.refused):
        times, worst = (
            (f"{x:.2f}×" for x in (f.factors.latency, f.factors.bytes)),
            f"{f.worst:.0%} at {format_bytes(f.worst_at)}",
        )
        rows.append((f.operation, GROUPS[f.across], *times, f.points, f"{f.residual:.0%}", worst))
    columns = ("collective", "group", ">latency", ">bytes", ">points", ">residual", "~largest error of the cost model")
    return filled(columns, rows, title="factors on the formulas")


def algorithms(result: Calibration) -> RenderableType:
    """The line of every algorithm that was measured by name, and the α and rate of one message in it."""
    rows = []
    for one in result.series:
        if one.algorithm:
            rate = format_rate(one.line.bandwidth) if one.line.beta else ""
            message = format_seconds(one.alpha) if one.alpha else "", format_rate(one.rate) if one.rate else ""
            start = format_seconds(one.line.alpha)
            rows.append((one.operation, one.name, len(one.ranks), start, rate, *message, f"{one.line.residual:.0%}"))
    columns = ("operation", "algorithm", ">ranks", ">start", ">n/t", ">α per message", ">rate per rank", ">residual")
    return filled(columns, rows)


def notes(result: Calibration) -> RenderableType:
    return Text("\n".join(f"· {note}" for note in result.notes), "dim")


FIELDS = {
    "launch": "host time of an operator",
    "products": "rate of matrix products over the benchmarked rate",
    "attention_rate": "rate of attention over the benchmarked rate",
    "elementwise": "time of memory-bound operations over one pass per kernel",
    "network": "rate of collectives between nodes over the benchmarked rate",
    "hides": "share of compute that hides communication",
    "allocator_slack": "share of live memory that the allocator holds in fragments",
}


def adjusted_page(result: Adjusted) -> RenderableType:
    parts = [
        heading(result.after.name, result.after.source),
        runs_table(result),
        Text(),
        numbers(result.before, result.after),
    ]
    return Group(*parts, *(Text(note) for note in adjusted_notes(result)))


def adjusted_notes(result: Adjusted) -> list[str]:
    """Return notes on the measurements, and on the band of later predictions."""
    after, notes = result.after, []
    for run in result.runs:
        if run.memory:
            old, new = result.memory_of(run)
            notes.append(
                f"{run.name}: memory {run.memory / GIB:.1f} GiB measured, {old:.1f} predicted before, {new:.1f} after (only fragments are adjusted)"
            )
    if result.far_off:
        names = ", ".join(dict.fromkeys(result.far_off))
        notes.append(
            f"{names}: measured and predicted differ by more than a factor of {FAR:g}, so the run moves little and is not counted. "
            "Check that --tokens-per-s is of all devices together, and that the plan file is what ran"
        )
    if after.measured_runs < ENOUGH:
        notes.append(
            f"predictions keep the band of a {after.evidence} stack until {ENOUGH} runs are measured (so far: {after.measured_runs}); "
            "add runs with --stack FILE of this one"
        )
    return notes


def runs_table(result: Adjusted) -> RenderableType:
    rows = []
    for run, old, new in zip(result.runs, result.predicted_before, result.predicted_after, strict=True):
        cells = [f"{format_seconds(x)} ({100 * (x / run.step_time - 1):+.1f}%)" for x in (old, new)]
        rows.append((run.name, format_seconds(run.step_time), *cells))
    return filled(("run", ">measured", ">predicted before", ">predicted after"), rows)


def traced_page(before: Stack, result: TraceCalibration) -> RenderableType:
    """A calibration by a trace: the parts of its step as measured and predicted, the numbers and the collectives."""
    step, *predicted = result.step_s
    rows: list[tuple[str, ...]] = [
        (part, format_seconds(seconds), format_seconds(result.before[part]), format_seconds(result.after[part]))
        for part, seconds in result.measured.items()
    ]
    rows.append(("step", format_seconds(step), *map(format_seconds, predicted)))
    links = [
        (f.operation, GROUPS[f.across], f"{f.factors.latency:.2f}×", f"{f.factors.bytes:.2f}×", f.points)
        for f in result.links
    ]
    parts = [
        heading(result.stack.name, result.stack.source),
        filled(("part", ">measured", ">predicted before", ">after"), rows),
        numbers(before, result.stack),
    ]
    if links:
        parts.append(filled(("collective", "", ">latency", ">bytes", ">sizes"), links))
    return Group(*parts, *(Text(note, "yellow") for note in result.notes))


def numbers(before: Stack, after: Stack) -> RenderableType:
    rows = []
    for name, text in FIELDS.items():
        old, new = (getattr(stack, name) for stack in (before, after))
        shown = [format_seconds(x) if name == "launch" else f"{x:.3g}" for x in (old, new)]
        rows.append((name, *shown, text))
    return filled(("number", ">before", ">after", "~meaning"), rows)
