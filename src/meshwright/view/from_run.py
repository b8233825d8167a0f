"""A stack adjusted to measured runs, in the terminal: each run before and after, and the numbers that moved."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.calibrate.runs.from_run import ENOUGH, FAR, Adjusted
from meshwright.describe.result import GIB
from meshwright.units import format_seconds
from meshwright.view.tables import filled, heading

FIELDS = {
    "launch": "host time of an operator",
    "products": "rate of matrix products over the benchmarked rate",
    "attention_rate": "rate of attention over the benchmarked rate",
    "elementwise": "time of memory-bound operations over one pass per kernel",
    "network": "rate of collectives over the benchmarked rate",
    "hides": "share of compute that hides communication",
    "allocator_slack": "share of live memory that the allocator holds in fragments",
}


def page(result: Adjusted) -> RenderableType:
    parts = [heading(result.after.name, result.after.source), runs_table(result), Text(), numbers(result)]
    return Group(*parts, *(Text(note) for note in notes(result)))


def notes(result: Adjusted) -> list[str]:
    """Return notes on the measurements, and on the band of later predictions."""
    after, found = result.after, []
    for run in result.runs:
        if run.memory:
            old, new = result.memory_of(run)
            found.append(
                f"{run.name}: memory {run.memory / GIB:.1f} GiB measured, {old:.1f} predicted before, {new:.1f} after (only fragments are adjusted)"
            )
    if result.far_off:
        names = ", ".join(dict.fromkeys(result.far_off))
        found.append(
            f"{names}: measured and predicted differ by more than a factor of {FAR:g}, so the run moves little and is not counted. "
            "Check that --tokens-per-s is of all devices together, and that the plan file is what ran"
        )
    if after.measured_runs < ENOUGH:
        found.append(
            f"predictions keep the band of a {after.evidence} stack until {ENOUGH} runs are measured (so far: {after.measured_runs}); "
            "add runs with --stack FILE of this one"
        )
    return found


def runs_table(result: Adjusted) -> RenderableType:
    rows = []
    for run, old, new in zip(result.runs, result.predicted_before, result.predicted_after, strict=True):
        cells = [f"{format_seconds(x)} ({100 * (x / run.step_time - 1):+.1f}%)" for x in (old, new)]
        rows.append((run.name, format_seconds(run.step_time), *cells))
    return filled(("run", ">measured", ">predicted before", ">predicted after"), rows)


def numbers(result: Adjusted) -> RenderableType:
    rows = []
    for name, text in FIELDS.items():
        old, new = (getattr(stack, name) for stack in (result.before, result.after))
        shown = [format_seconds(x) if name == "launch" else f"{x:.3g}" for x in (old, new)]
        rows.append((name, *shown, text))
    return filled(("number", ">before", ">after", "~meaning"), rows)
