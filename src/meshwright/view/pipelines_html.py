"""The timelines of one or more simulated pipelines as one self-contained HTML file: the timeline of the page, without a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.describe.files import write_text
from meshwright.programs.pipelines import SCHEDULES, Walked
from meshwright.view.pipelines import messages


def pipelines_html(several: Sequence[Walked], heading: str = "", seconds: bool = False) -> str:
    """The page; `seconds`: the times are in seconds, not in units of the schedule."""
    from meshwright.view.page.frame import offline_page
    from meshwright.view.page.timeline import schedules_data  # not needed for `--json`

    title = heading or _heading(several)
    view = {"title": title, "data": schedules_data(several, seconds), "compare_data": None}
    state: dict[str, Any] = {"page": {"view": "timeline", "compare": None, "options": {}}}
    return offline_page(title, {"state": state, "views": {"timeline": view}, "catalog": None}, bare=True)


def write_pipelines_html(several: Sequence[Walked], path: str | Path, heading: str = "", seconds: bool = False) -> Path:
    return write_text(path, pipelines_html(several, heading, seconds))


def described(walked: Walked) -> dict[str, Any]:
    """Return what `meshwright show SCHEDULE --json` prints about a timeline, without its actions."""
    p = walked.program
    return {
        "schedule": p.schedule,
        "about": SCHEDULES[p.schedule].about if p.schedule in SCHEDULES else "",
        "ranks": p.ranks,
        "stages": p.stages,
        "microbatches": p.microbatches,
        "virtual": p.virtual,
        "makespan": walked.makespan,
        "longest_span": walked.longest_span,
        "bubble_fraction": walked.bubble_fraction,
        "bubble_overhead": walked.bubble_overhead,
        "bubble_fraction_by_rank": walked.bubble_fraction_by_rank.tolist(),
        "busy": walked.busy.tolist(),
        "peak_in_flight": walked.peak_in_flight.tolist(),
        "peak_memory": walked.peak_memory.tolist(),
        "messages": messages(walked),
    }


def _heading(several: Sequence[Walked]) -> str:
    names = [w.program.schedule for w in several]
    p = several[0].program
    what = names[0] if len(names) == 1 else ", ".join(names[:-1]) + f" and {names[-1]}"
    return f"{what} on {p.ranks} ranks, {p.microbatches} micro-batches"
