"""The page of `explain`: what to change first, where the steps of each rank went, and which products are slow.

With `--html`, and for dropped files, the view `traced`: a strip per rank with the prediction under it, and the waterfall from predicted to measured.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.describe.result import GIB
from meshwright.errors import MeshwrightError
from meshwright.explain.attribution import COMPUTE, KINDS, Part, StepAttribution
from meshwright.explain.beside import TraceBesidePlan
from meshwright.explain.explanation import TraceExplanation
from meshwright.explain.intervals import Intervals
from meshwright.explain.memory_snapshot import MemoryReport
from meshwright.units import Json, counted, format_seconds, format_value
from meshwright.view.memory_snapshot import predicted_gib
from meshwright.view.page.bundle import written_view
from meshwright.view.page.sheet import panel, part, piece, row, stats, table, text, view
from meshwright.view.tables import Columns, FittedTable, filled, listed

MOST_RANKS = 8
MOST_PRODUCTS = 6
BINS = 1200  # of a strip: each shows the part that has most of its time
LOOKS = {"loss": "compute: loss", "optimizer": "compute: optimizer", "products": "compute: products", "attention": "compute: attention",
         "elementwise and norms": "compute: other", "copies": "compute: copies", "bubble": "bubble", "host": "host"}  # fmt: skip


def page(e: TraceExplanation, beside: TraceBesidePlan | MeshwrightError) -> RenderableType:
    ranks = e.run.ranks
    steps = len(next(iter(e.steps.values())))
    first = ranks[0].found
    about = f"{len(ranks)} of {e.run.world} ranks" if len(ranks) < e.run.world else counted(len(ranks), "rank")
    recognised = f"{counted(steps, 'step')}, {counted(first.microbatches, 'micro-batch')}"
    layers = f", {len(first.layers)} layers" if first.layers else ""
    title = Text(f"step {format_seconds(e.step_s)}", "bold") + Text(
        f"  {about}, {recognised}{layers}; {e.attributed:.1%} of the time attributed", "not bold"
    )
    phases = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in first.phases.items() if seconds)
    by_layer = sorted(first.layer_seconds.values())
    each = (
        f"; forward of a layer {format_seconds(by_layer[0])} to {format_seconds(by_layer[-1])}" if any(by_layer) else ""
    )
    about_phases = Text(f"rank {ranks[0].rank}: {phases}{each}", "dim")
    return Group(
        title,
        about_phases,
        causes(e),
        parts(e),
        *late(e),
        *products(e),
        *compared(beside),
        *(Text(f"note: {note}", "yellow") for note in e.notes),
    )


def causes(e: TraceExplanation) -> RenderableType:
    if not e.causes:
        return Text("no cause of lost time above 1% of the step: compute fills it", "green")
    columns: Columns = {
        ">": lambda c: e.causes.index(c) + 1,
        "!cause": lambda c: Text(c.cause, "bold"),
        ">per step": lambda c: format_seconds(c.seconds),
        ">share": lambda c: f"{c.seconds / e.step_s:.0%}",
        "evidence, and what to change": lambda c: f"{c.evidence}\n→ {c.fix}",
    }
    return listed(e.causes, columns, "What to change first")


def parts(e: TraceExplanation) -> RenderableType:
    """Rows of parts, columns of ranks: the mean step."""
    ranks = chosen_ranks(e)
    rows: list[tuple[str | Text, ...]] = []
    for kind, name in ordered(one for of_rank in e.parts.values() for one in of_rank):
        values = [e.parts[rank].get((kind, name), 0.0) for rank in ranks]
        rows.append((f"{kind}: {name}", *(f"{format_seconds(s)} {s / e.step_s:4.0%}" if s else "" for s in values)))
    rows.append(("step", *(format_seconds(sum(e.parts[rank].values())) for rank in ranks)))
    hidden = dict.fromkeys(axis for steps in e.steps.values() for s in steps for axis in s.hidden)
    for axis in hidden:
        mean = [sum(s.hidden.get(axis, 0) for s in e.steps[rank]) / 1e9 / len(e.steps[rank]) for rank in ranks]
        rows.append((Text(f"hidden: {axis}", "dim"), *(Text(format_seconds(s), "dim") for s in mean)))
    columns = ("!part of the mean step", *(f">rank {rank}" for rank in ranks))
    return Group(Text("Where the step went", "bold"), FittedTable(columns, rows))


def chosen_ranks(e: TraceExplanation) -> list[int]:
    """Some ranks in order; of many those that are late, and the first ones."""
    ranks = sorted(e.parts)
    if len(ranks) <= MOST_RANKS:
        return ranks
    late = [x.rank for x in e.run.late][: MOST_RANKS // 2]
    return sorted(dict.fromkeys([*late, *ranks][:MOST_RANKS]))


def ordered(found: Iterable[Part]) -> list[Part]:
    return sorted(
        set(found), key=lambda part: (KINDS.index(part[0]), part[0] == COMPUTE and part[1] == "other", part[1])
    )


def late(e: TraceExplanation) -> list[RenderableType]:
    if not e.run.late:
        return []
    columns: Columns = {
        ">rank": lambda x: x.rank,
        ">last at": lambda x: f"{x.share:.0%}",
        ">behind the others": lambda x: format_seconds(x.late_s),
        "how often": lambda x: "in every step" if x.constant else "at times",
    }
    return [listed(e.run.late[:MOST_RANKS], columns, "Who arrives last at collectives")]


def products(e: TraceExplanation) -> list[RenderableType]:
    """The products of one rank with most time."""
    rank = next((rank for rank in sorted(e.products) if e.products[rank]), None)
    if rank is None:
        return []
    columns: Columns = {
        "product": lambda p: p.shape,
        "dtype": lambda p: p.dtype,
        ">times": lambda p: p.count,
        ">all of them": lambda p: format_seconds(p.seconds),
        ">TFLOP/s": lambda p: f"{p.flops / p.seconds / 1e12:.3g}",
        ">of the usual rate": lambda p: f"{p.usual_s / p.seconds:.0%}",
    }
    return [listed(e.products[rank][:MOST_PRODUCTS], columns, f"Matrix products of rank {rank}")]


def compared(beside: TraceBesidePlan | MeshwrightError) -> list[RenderableType]:
    """The prediction beside the trace, the largest differences, and what `plan` would change."""
    if isinstance(beside, MeshwrightError):
        return [Text(f"no prediction beside it: {beside.what}", "dim")]
    p = beside.estimate.prediction
    band = f"{format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)}"
    about = f"predicted {format_seconds(p.step_time_s)} ({band}), measured {format_seconds(beside.explanation.step_s)}; rank {beside.rank}"
    plan = f"plan {beside.source}: {beside.config.plan.title()}; stack {beside.config.stack.name} on {beside.config.cluster.accelerator.name}"
    out: list[RenderableType] = [listed(beside.rows, BESIDE, "Beside the prediction"), Text(about), Text(plan, "dim")]
    out.append(listed(beside.largest, {**BESIDE, "reason": lambda row: row.reason}, "The largest differences"))
    if beside.changes:
        rows = [(c.title, format_seconds(c.saved), c.fix) for c in beside.changes]
        out.append(filled(("change of the plan", ">saves per step", "~with"), rows, title="What `plan` would change"))
    return out


BESIDE: Columns = {
    "part": lambda row: row.name,
    ">predicted": lambda row: format_seconds(row.predicted_s),
    ">measured": lambda row: format_seconds(row.measured_s),
    ">difference": lambda row: f"{'+' if row.difference_s >= 0 else '−'}{format_seconds(abs(row.difference_s))}",
}


def as_dict(e: TraceExplanation, beside: TraceBesidePlan | MeshwrightError) -> Json:
    if isinstance(beside, MeshwrightError):
        return e.as_dict() | {"prediction": None, "no_prediction": beside.as_dict()}
    return e.as_dict() | {"prediction": beside.as_dict()}


def html(e: TraceExplanation, beside: TraceBesidePlan | MeshwrightError, memory: Sequence[MemoryReport] = ()) -> str:
    return written_view("traced", "Traced steps", data(e, beside, memory))


def data(e: TraceExplanation, beside: TraceBesidePlan | MeshwrightError, memory: Sequence[MemoryReport] = ()) -> Json:
    """The view's data: one step of each shown rank as pieces of [start, length, part], the prediction, and the fullest of the memory snapshots."""
    ranks = chosen_ranks(e)
    step = middle_step(e.steps[ranks[0]])
    parts = sorted({part for rank in ranks for s in e.steps[rank] for part in s.pieces})
    shown = [(rank, next((s for s in e.steps[rank] if s.step == step), e.steps[rank][0])) for rank in ranks]
    found = None if isinstance(beside, MeshwrightError) else beside
    return {
        "step": step,
        "names": [": ".join(part) for part in parts],
        "ranks": [{"rank": rank, "pieces": pieces(s, parts)} for rank, s in shown],
        "predicted": found and predicted_strip(found),
        "note": f"No prediction beside it: {beside.what}." if isinstance(beside, MeshwrightError) else STRIPS,
        **view(numbers(e, found, memory), *causes_panel(e), *memory_panel(memory, found)),
        "after": differences(found) if found else [],
    }


STRIPS = "The prediction is below, its parts one after the other. Where many short pieces meet, the longest is drawn."


def numbers(e: TraceExplanation, beside: TraceBesidePlan | None, memory: Sequence[MemoryReport]) -> Json:
    """The measured and the predicted step, how much of the time is attributed, and the memory at the peak."""
    found = [r.found.trace.peak_bytes for r in e.run.ranks if r.found.trace.peak_bytes]
    peak, shown = max([report.reserved for report in memory] or found, default=None), []
    held: Any = "not in the trace" if peak is None else peak / GIB
    if beside:
        p = beside.estimate.prediction
        band = f"{format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)}"
        tone = "warn" if e.step_s > p.step_time_high_s else ""
        shown = [("Predicted step", p.step_time_s, "s", {"detail": band, "tone": tone})]
    words = f"{format_value(beside.estimate.prediction.memory_gib or 0.0, 'GiB')} predicted" if beside else ""
    return stats(
        ("Measured step", e.step_s, "s", {"detail": "mean, slowest rank"}),
        *shown,
        ("Attributed", e.attributed, "share", {"detail": "of the traced time"}),
        *([("Memory at the peak", held, "gib", {"detail": words})] if beside or peak else []),
    )


def causes_panel(e: TraceExplanation) -> list[Json]:
    """The causes of lost time with the seconds that each costs."""
    none = "No cause of lost time above 1% of the step: compute fills it."
    out = [
        panel(
            "What to change first",
            "Causes of lost time, with the seconds of a step that each costs." if e.causes else none,
        )
    ]
    if e.notes:
        out.append(text(". ".join(e.notes)))
    rows = [row(c.cause, c.seconds, c.evidence, c.fix) for c in e.causes]
    return [*out, table("", ("cause", "per step|s", "evidence", "change"), rows)] if rows else out


def memory_panel(memory: Sequence[MemoryReport], beside: TraceBesidePlan | None) -> list[Json]:
    """The categories of the fullest snapshot beside their prediction, and what else it says."""
    report = max(memory, key=lambda one: one.reserved, default=None)
    if report is None:
        return []
    expected = predicted_gib(report, beside.estimate.prediction) if beside else {}
    rows = [
        row(name, size / GIB, *([expected.get(name) or ""] if beside else []))
        for name, size in report.by_category.items()
    ]
    note = ". ".join((f"Device {report.device}, {report.moment}", *report.notes))
    columns = ("category", "held|gib", *(["predicted|gib"] if beside else []))
    return [panel("Memory at the peak", note), table("", columns, rows)]


def middle_step(steps: list[StepAttribution]) -> str:
    return sorted(steps, key=lambda s: s.duration)[(len(steps) - 1) // 2].step


def pieces(step: StepAttribution, parts: list[Part]) -> list[list[float]]:
    """The step in bins of equal length, equal neighbours joined: start and length in seconds, and the part."""
    edges = np.linspace(step.start, step.start + step.duration, BINS + 1)
    share = np.array([time_in(step.pieces[part], edges) if part in step.pieces else np.zeros(BINS) for part in parts])
    most = share.argmax(0)
    first = np.flatnonzero(np.concatenate([[True], most[1:] != most[:-1]]))
    last = np.concatenate([first[1:], [BINS]])
    at = (edges - step.start) / 1e9
    return [[float(at[a]), float(at[b] - at[a]), int(most[a])] for a, b in zip(first, last, strict=True)]


def time_in(times: Intervals, edges: np.ndarray) -> np.ndarray:
    """How much of a set of times lies in each bin."""
    before = np.concatenate([[0], np.cumsum(times[:, 1] - times[:, 0])])
    at = np.searchsorted(times[:, 0], edges, side="right")
    last = np.maximum(at - 1, 0)
    inside = np.where(at > 0, np.minimum(edges, times[last, 1]) - times[last, 0], 0.0)
    return np.diff(before[last] * (at > 0) + inside)


def predicted_strip(beside: TraceBesidePlan) -> Json:
    """The parts of the prediction one after the other."""
    strip, names, at = [], list[str](), 0.0
    for one in beside.rows:
        if one.predicted_s > 0:
            strip.append([at, one.predicted_s, len(names)])
            names.append(LOOKS.get(one.name, one.name.replace("exposed ", "communication: ")))
            at += one.predicted_s
    return {"names": names, "pieces": strip}


def differences(beside: TraceBesidePlan) -> list[Json]:
    """A waterfall from the predicted to the measured step, and the largest differences."""
    plan = f"Plan {beside.source}: {beside.config.plan.title()}; stack {beside.config.stack.name} on {beside.config.cluster.accelerator.name}."
    at = beside.estimate.prediction.step_time_s
    rows: list[Json] = [{"label": "predicted", "text": format_seconds(at), "parts": [piece(at, "quiet", "")]}]
    for one in beside.rows:
        change = one.measured_s - one.predicted_s
        words = f"{one.name}: {format_seconds(one.predicted_s)} predicted, {format_seconds(one.measured_s)} measured\n{one.reason}"
        shown = {"start": min(at, at + change), "text": f"{'+' if change > 0 else '−'}{format_seconds(abs(change))}"}
        rows.append({"label": one.name, **shown, "parts": [piece(abs(change), "bad" if change > 0 else "good", words)]})
        at += change
    rows.append({"label": "measured", "text": format_seconds(at), "parts": [piece(at, "compute", "")]})
    largest = [row(one.name, one.predicted_s, one.measured_s, one.reason) for one in beside.largest]
    return [
        panel(
            "From the predicted to the measured step",
            f"Rank {beside.rank}: red bars are slower than predicted, green ones faster.",
        ),
        part("bars", rows=rows, x={"label": "time within the step", "unit": "s"}),
        panel("The largest differences", plan),
        table("", ("part", "predicted|s", "measured|s", "reason"), largest),
    ]
