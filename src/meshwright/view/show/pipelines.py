"""`meshwright show SCHEDULE`: draw one or more pipeline schedules on equal stages.

The forward, backward of inputs and backward of weights of a rank take 1 each. With V stages per rank
each stage takes 1/V of that, so that schedules of different V do the same work and their lengths are comparable.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.describe.result import values_of
from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines import SCHEDULES, Durations, Walked, build, name_of, walk
from meshwright.view import tables
from meshwright.view.pipelines import messages, pipeline_trace, show_pipelines

CLASSICS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


def show(
    topic: str,
    *,
    stages: int = 4,
    microbatches: int = 8,
    virtual: int | None = None,
    compare: str | None = None,
    html: str | Path | None = None,
    trace: str | Path | None = None,
    json_out: bool = False,
    console: Console | None = None,
) -> None:
    """Draw `topic` (and the schedules in `compare`) on `stages` ranks."""
    console = console or tables.console()
    several = [walked_for(name, stages, microbatches, virtual) for name in names(topic, compare)]
    if json_out:
        console.file.write(json.dumps(data(several), allow_nan=False) + "\n")
    else:
        show_pipelines(several, console)
    for path in _write_files(several, html, trace):
        if not json_out:
            console.print(f"written to {path}", style="dim", soft_wrap=True)


def walked_for(schedule: str, ranks: int, microbatches: int, virtual: int | None = None) -> Walked:
    """Simulate a schedule on equal stages; a `virtual` that it does not support is replaced by its default."""
    name = name_of(schedule)
    rule = SCHEDULES[name]
    count = virtual if virtual is not None and (rule.most_virtual > 2 or virtual == rule.virtual) else rule.virtual
    stage_times = Durations.of(ranks * count, *(3 * [1 / count]))
    options: dict[str, Any] = {"durations": stage_times} if name == "auto" else {}
    return walk(build(name, ranks, microbatches, count, **options), stage_times)


def names(topic: str, compare: str | None) -> list[str]:
    """Return the schedules to draw: the topic and those in `compare`; --compare without names means the classics."""
    schedules = [name_of(word.strip()) for word in (compare or "").split(",") if word.strip()]
    first = name_of(topic)
    if compare is not None and not schedules:
        schedules = list(CLASSICS)
    return list(dict.fromkeys(schedules if first in schedules else [first, *schedules]))


def data(several: Sequence[Walked]) -> dict[str, Any] | list[dict[str, Any]]:
    """Return what `--json` prints: one timeline, or a list of those that are compared."""
    rows = [_as_json(walked) for walked in several]
    return rows[0] if len(rows) == 1 else rows


def _as_json(walked: Walked) -> dict[str, Any]:
    p = walked.program
    actions = [
        [
            {"action": str(p.action(i)), "start": float(walked.start[i]), "end": float(walked.end[i])}
            for i in range(int(p.first[rank]), int(p.first[rank + 1]))
        ]
        for rank in range(p.ranks)
    ]
    return {
        "schedule": p.schedule,
        "about": SCHEDULES[p.schedule].about if p.schedule in SCHEDULES else "",
        **values_of(p, "ranks", "stages", "microbatches", "virtual"),
        **values_of(walked, "makespan", "longest_span", "bubble_fraction", "bubble_overhead"),
        "bubble_fraction_by_rank": walked.bubble_fraction_by_rank.tolist(),
        "busy": walked.busy.tolist(),
        "peak_in_flight": walked.peak_in_flight.tolist(),
        "peak_memory": walked.peak_memory.tolist(),
        "messages": messages(walked),
        "actions": actions,
    }


def _write_files(several: Sequence[Walked], html: str | Path | None, trace: str | Path | None) -> list[Path]:
    paths = []
    if html:
        from meshwright.describe.files import write_text
        from meshwright.view.page.timeline import schedules_html

        paths.append(write_text(html, schedules_html(several)))
    if trace:
        from meshwright.view.trace import write_trace

        if len(several) > 1:
            raise MeshwrightError("MW-PIPE-008", "a trace holds one schedule", fix="--trace without --compare")
        paths.append(write_trace(pipeline_trace(several[0], seconds_per_unit=1e-3), trace))
    return paths
