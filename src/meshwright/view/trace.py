"""Timelines for Perfetto and chrome://tracing, in the trace-event format.

A trace is one JSON object, {"traceEvents": [...]}; each event has a phase `ph`, and here

    X   a span: name, category, start `ts` and length `dur` in microseconds, `pid` a rank, `tid` a stream of that rank
    M   the name or the sort position of a process (rank) or thread (stream)
    s f the two ends of an arrow from one span to another (same `id`); the end binds to the span that encloses it
    C   the value of a counter from this time on

Spans of one stream must not overlap unless one lies inside the other, so each stream is a separate thread. The format does
not depend on the content: a pipeline, a training step and a collective all produce `Span`s in seconds.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.describe.files import write_text
from meshwright.describe.result import values_of
from meshwright.units import Json

MICROSECONDS = 1e6


@dataclass(frozen=True)
class TraceSpan:
    """An interval on a stream of a rank, in seconds."""

    rank: int
    stream: str
    name: str
    start: float
    duration: float
    category: str = "compute"
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Flow:
    """An arrow between two (rank, stream, time) points: a transfer or a dependency."""

    name: str
    source: tuple[int, str, float]
    target: tuple[int, str, float]


@dataclass(frozen=True)
class TraceCounter:
    """Values of a rank from this time until the next counter, drawn as a filled curve."""

    rank: int
    name: str
    time: float
    values: Mapping[str, float]


def trace_events(
    spans: Sequence[TraceSpan],
    *,
    flows: Iterable[Flow] = (),
    counters: Iterable[TraceCounter] = (),
    rank_names: Mapping[int, str] | None = None,
    streams: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
) -> Json:
    """The trace as a dictionary ready for JSON. `streams` sets the order from the top; streams that are not listed follow."""
    counters = list(counters)
    order = {name: i for i, name in enumerate(dict.fromkeys([*streams, *(s.stream for s in spans)]))}
    used = sorted({(s.rank, order[s.stream]) for s in spans})
    names = list(order)
    events: list[Json] = []
    for rank in sorted({s.rank for s in spans} | {c.rank for c in counters}):
        title = (rank_names or {}).get(rank, f"rank {rank}")
        events += [_meta("process_name", rank, 0, name=title), _meta("process_sort_index", rank, 0, sort_index=rank)]
    for rank, stream in used:
        events += [
            _meta("thread_name", rank, stream, name=names[stream]),
            _meta("thread_sort_index", rank, stream, sort_index=stream),
        ]
    for s in spans:
        times = {"ts": _us(s.start), "dur": _us(s.duration)}
        place = {"pid": s.rank, "tid": order[s.stream], "args": dict(s.args)}
        events.append({"name": s.name, "cat": s.category or "span", "ph": "X", **times, **place})
    for number, flow in enumerate(flows):
        for phase, end in (("s", flow.source), ("f", flow.target)):
            where = {"ts": _us(end[2]), "pid": end[0], "tid": order[end[1]]}
            events.append({"name": flow.name, "cat": "transfer", "ph": phase, "id": number, **where})
            if phase == "f":
                events[-1]["bp"] = "e"
    for c in counters:
        events.append({"name": c.name, "ph": "C", "ts": _us(c.time), "pid": c.rank, "tid": 0, "args": dict(c.values)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}


def write_trace(trace: Mapping[str, Any], path: str | Path) -> Path:
    """Write a trace; open it at ui.perfetto.dev or chrome://tracing."""
    return write_text(path, json.dumps(trace, separators=(",", ":"), allow_nan=False))


def _us(seconds: float) -> float:
    return round(float(seconds) * MICROSECONDS, 3)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> Json:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


VERSION = 1
SPAN_KEYS = ("rank", "stream", "name", "start_s", "duration_s", "category", "args")
STREAMS = ("schedule", "compute", "comm:tp", "comm:cp", "comm:ep", "comm:pp", "comm:dp", "host")


def as_json(step: int, measured: Sequence[TraceSpan], simulated: Sequence[TraceSpan]) -> Json:
    """The content of `timeline.json`."""
    sides = {"measured": measured, "simulated": simulated}
    return {"version": VERSION, "step": step, **{name: list(map(span_as_json, side)) for name, side in sides.items()}}


def span_as_json(span: TraceSpan) -> Json:
    return {
        **values_of(span, "rank", "stream", "name"),
        "start_s": round(span.start, 9),
        "duration_s": round(span.duration, 9),
        "category": span.category,
        "args": dict(span.args),
    }


def span_of_json(fields: Json) -> TraceSpan:
    return TraceSpan(*(fields[name] for name in SPAN_KEYS))


def both_steps(timeline: Json | None, about: Json | None = None) -> Json:
    """One trace of a `timeline.json`: the measured ranks first and the simulated ones below, on one time axis."""
    timeline = timeline or {}
    measured, simulated = ([span_of_json(s) for s in timeline.get(side, ())] for side in ("measured", "simulated"))
    count = 1 + max((s.rank for s in measured), default=-1)
    names = {s.rank: f"measured: rank {s.rank}" for s in measured}
    names |= {count + s.rank: f"simulated: rank {s.rank}" for s in simulated}
    below = [replace(s, rank=count + s.rank) for s in simulated]
    return trace_events([*measured, *below], rank_names=names, streams=STREAMS, about=about)
