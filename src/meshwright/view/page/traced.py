"""The page of `explain --html`: a strip per rank with the prediction under it, the waterfall from predicted to measured, and what to change first."""

from collections.abc import Sequence

import numpy as np

from meshwright.describe.result import GIB
from meshwright.errors import MeshwrightError
from meshwright.explain.attribution import Part, StepAttribution
from meshwright.explain.beside import TraceBesidePlan
from meshwright.explain.explanation import TraceExplanation
from meshwright.explain.intervals import Intervals
from meshwright.explain.memory_snapshot import MemoryReport
from meshwright.units import Json
from meshwright.view.memory_snapshot import predicted_gib
from meshwright.view.page.bundle import written_view
from meshwright.view.traces import chosen_ranks

BINS = 1200  # of a strip: each shows the part that has most of its time
LOOKS = {"loss": "compute: loss", "optimizer": "compute: optimizer", "products": "compute: products", "attention": "compute: attention",
         "elementwise and norms": "compute: other", "copies": "compute: copies", "bubble": "bubble", "host": "host"}  # fmt: skip


def document(
    e: TraceExplanation, beside: TraceBesidePlan | MeshwrightError, memory: Sequence[MemoryReport] = ()
) -> str:
    return written_view("traced", "Traced steps", data(e, beside, memory))


def data(e: TraceExplanation, beside: TraceBesidePlan | MeshwrightError, memory: Sequence[MemoryReport] = ()) -> Json:
    """The view's data: one step of each shown rank as pieces of [start, length, part], the prediction, and the fullest of the memory snapshots."""
    ranks = chosen_ranks(e)
    step = middle_step(e.steps[ranks[0]])
    parts = sorted({part for rank in ranks for s in e.steps[rank] for part in s.pieces})
    shown = [(rank, next((s for s in e.steps[rank] if s.step == step), e.steps[rank][0])) for rank in ranks]
    peaks = [report.reserved for report in memory] or [
        r.found.trace.peak_bytes for r in e.run.ranks if r.found.trace.peak_bytes
    ]
    return {
        "step": step,
        "step_time_s": e.step_s,
        "attributed": e.attributed,
        "memory_gib": max(peaks) / GIB if peaks else None,
        **memory_rows(max(memory, key=lambda report: report.reserved, default=None), beside),
        "parts": [": ".join(part) for part in parts],
        "ranks": [{"rank": rank, "pieces": pieces(s, parts)} for rank, s in shown],
        "causes": [cause.as_dict() for cause in e.causes],
        "notes": e.notes,
        "predicted": None if isinstance(beside, MeshwrightError) else predicted(beside),
        "no_prediction": f"No prediction beside it: {beside.what}." if isinstance(beside, MeshwrightError) else "",
    }


def memory_rows(report: MemoryReport | None, beside: TraceBesidePlan | MeshwrightError) -> Json:
    """The categories of a snapshot beside their prediction, and what else it says."""
    if report is None:
        return {"memory": [], "memory_note": ""}
    expected = {} if isinstance(beside, MeshwrightError) else predicted_gib(report, beside.estimate.prediction)
    rows = [
        {"category": name, "gib": size / GIB, "predicted_gib": expected.get(name, 0.0)}
        for name, size in report.by_category.items()
    ]
    return {"memory": rows, "memory_note": ". ".join((f"Device {report.device}, {report.moment}", *report.notes))}


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


def predicted(beside: TraceBesidePlan) -> Json:
    """The prediction: its parts one after the other, and the differences."""
    p, strip, names, at = beside.estimate.prediction, [], list[str](), 0.0
    for row in beside.rows:
        if row.predicted_s > 0:
            strip.append([at, row.predicted_s, len(names)])
            names.append(LOOKS.get(row.name, row.name.replace("exposed ", "communication: ")))
            at += row.predicted_s
    return {
        "step_time_s": p.step_time_s,
        "low_s": p.step_time_low_s,
        "high_s": p.step_time_high_s,
        "memory_gib": p.memory_gib,
        "rank": beside.rank,
        "plan": f"Plan {beside.source}: {beside.config.plan.title()}; stack {beside.config.stack.name} on {beside.config.cluster.accelerator.name}.",
        "parts": names,
        "pieces": strip,
        "rows": [row.as_dict() for row in beside.rows],
        "largest": [row.as_dict() for row in beside.largest],
    }
