"""The timelines of one or more simulated pipelines as one self-contained HTML page.

The page contains the timelines as data and draws them (`templates/pipelines.html`): one lane per rank, activations in
flight as a curve under each lane, all schedules at one time scale. Pointing at a cell highlights its micro-batch on all
stages; the cursor shows the time and the activations that each rank holds.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.describe.files import write_text
from meshwright.programs.pipelines import KINDS, RULES, Walked
from meshwright.programs.pipelines.program import KIND_NAMES
from meshwright.view.pipelines import COLOURS, ODD, TINT, messages, unit_of


def pipelines_html(several: Sequence[Walked], heading: str = "", seconds: bool = False) -> str:
    """The page; `seconds`: the times are in seconds, not in units of the schedule."""
    heading = heading or _heading(several)
    unit = unit_of(several, seconds)
    data = {
        "heading": heading,
        "unit": unit._asdict(),
        "kinds": {k: {"name": KIND_NAMES[k], "rgb": COLOURS[k]} for k in KINDS},
        "tint": TINT,
        "odd": ODD,
        "panels": [panel(walked) for walked in several],
    }
    template = resources.files("meshwright.view").joinpath("templates/pipelines.html").read_text(encoding="utf-8")
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return template.replace("__TITLE__", html.escape(heading)).replace("__DATA__", packed)


def write_pipelines_html(several: Sequence[Walked], path: str | Path, heading: str = "", seconds: bool = False) -> Path:
    return write_text(path, pipelines_html(several, heading, seconds))


def panel(walked: Walked) -> dict[str, Any]:
    """One timeline as plain data: the keys that `--json` prints, and the actions by rank."""
    p = walked.program
    lanes = []
    for rank in range(p.ranks):
        own = slice(int(p.first[rank]), int(p.first[rank + 1]))
        lanes.append(
            {
                "kind": "".join(KINDS[k] for k in p.kind[own].tolist()),
                "stage": p.stage[own].tolist(),
                "microbatch": p.microbatch[own].tolist(),
                "start": _short(walked.start[own]),
                "end": _short(walked.end[own]),
            }
        )
    return {**described(walked), "rank_of": p.rank_of.tolist(), "chunk_of": p.chunk_of.tolist(), "lanes": lanes}


def described(walked: Walked) -> dict[str, Any]:
    """What `meshwright show SCHEDULE --json` prints about a timeline, without its actions."""
    p = walked.program
    return {
        "schedule": p.schedule,
        "about": RULES[p.schedule].about if p.schedule in RULES else "",
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


def _short(times: np.ndarray) -> list[float]:
    """Nine significant digits are enough for any zoom and keep the page small."""
    return [float(f"{t:.9g}") for t in times.tolist()]
