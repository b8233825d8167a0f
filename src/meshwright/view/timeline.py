"""The timelines of a run: a measured step and the simulated one, as a file of the run folder and as one trace.

`timeline.json` in a run folder holds both steps:

    {"version": 1, "step": 19, "measured": [span, …], "simulated": [span, …]}
    span: {"rank": 0, "stream": "comm:dp", "name": "reduce gradients", "start_s": 0.012, "duration_s": 0.003, "category": "dp", "args": {…}}

Ranks of the simulated step are pipeline ranks, ranks of the measured one are all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.view.trace import Span, trace_events

VERSION = 1
STREAMS = ("schedule", "compute", "comm:tp", "comm:cp", "comm:ep", "comm:pp", "comm:dp", "host")


def as_json(step: int, measured: Sequence[Span], simulated: Sequence[Span]) -> dict[str, Any]:
    """The content of `timeline.json`."""
    return {
        "version": VERSION,
        "step": step,
        "measured": [span_as_json(s) for s in measured],
        "simulated": [span_as_json(s) for s in simulated],
    }


def span_as_json(span: Span) -> dict[str, Any]:
    return {
        "rank": span.rank,
        "stream": span.stream,
        "name": span.name,
        "start_s": round(span.start, 9),
        "duration_s": round(span.duration, 9),
        "category": span.category,
        "args": dict(span.args),
    }


def span_of_json(fields: dict[str, Any]) -> Span:
    return Span(
        fields["rank"],
        fields["stream"],
        fields["name"],
        fields["start_s"],
        fields["duration_s"],
        fields["category"],
        fields["args"],
    )


def both_steps(timeline: dict[str, Any] | None, about: dict[str, Any] | None = None) -> dict[str, Any]:
    """One trace of a `timeline.json`: the measured ranks first and the simulated ones below, on one time axis."""
    timeline = timeline or {}
    measured, simulated = ([span_of_json(s) for s in timeline.get(side, ())] for side in ("measured", "simulated"))
    count = 1 + max((s.rank for s in measured), default=-1)
    names = {s.rank: f"measured: rank {s.rank}" for s in measured}
    names |= {count + s.rank: f"simulated: rank {s.rank}" for s in simulated}
    below = [replace(s, rank=count + s.rank) for s in simulated]
    return trace_events([*measured, *below], rank_names=names, streams=STREAMS, about=about)
