"""A simulated pipeline in the terminal: a timeline, a table that compares several, a trace for Perfetto.

One row per rank, time to the right, one cell per action with the number of its micro-batch. The colour is the kind (F,
B, I, W), the tint is the stage of the rank, and odd micro-batches are slightly darker to separate neighbours; dots are
bubbles. The scale is the largest at which the whole step fits the width. A cell that is too narrow has no number; below
one character per cell, half blocks show two moments in one character. Without colour (a pipe, NO_COLOR) each cell shows
the letter of its kind.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console, Group
from rich.text import Text

from meshwright.describe.result import values_of
from meshwright.programs.pipelines import KINDS, SCHEDULES, Walked
from meshwright.programs.pipelines.check import needs_and_order
from meshwright.programs.pipelines.program import KIND_NAMES, F
from meshwright.programs.pipelines.walk import held_changes
from meshwright.units import Json, counted
from meshwright.view import tables
from meshwright.view.trace import Flow, TraceCounter, TraceSpan, trace_events

COLOURS = {"F": (59, 120, 224), "B": (22, 148, 96), "I": (20, 165, 165), "W": (235, 160, 45)}
TINT, ODD = 0.42, 0.12  # shift to white for the last stage of a rank; shift to black for odd micro-batches
HELD = "in flight"
COMPARED = (
    "schedule", ">V", ">makespan", ">bubble fraction", ">bubble overhead", ">no barrier", ">in flight", ">messages",
)  # fmt: skip
FOOTNOTE = (
    "V: stages per rank. no barrier: time per step if no rank waits for another in the optimizer. "
    "in flight: micro-batches on the rank with the most. messages: sent by the busiest rank."
)
MOST_FLOWS = 20_000  # more arrows in a trace slow the viewer down


def colour(kind: str, chunk: int = 0, virtual: int = 1, microbatch: int = 0) -> tuple[int, int, int]:
    """The colour of an action."""
    rgb = np.array(COLOURS[kind], float)
    rgb += (255 - rgb) * TINT * chunk / max(virtual - 1, 1)
    rgb *= 1 - ODD * (microbatch % 2)
    return tuple(round(float(c)) for c in rgb)  # type: ignore[return-value]


class Unit(NamedTuple):
    """A unit of time: its name, and its size in the unit of the simulation."""

    name: str = ""
    size: float = 1.0

    def format(self, time: float) -> str:
        return f"{time / self.size:.4g} {self.name}".rstrip() if self.name else f"{time:.6g}"


def unit_of(walked: Walked) -> Unit:
    """For times in seconds the largest unit in which the step is at least 1."""
    sizes = [Unit("s", 1.0), Unit("ms", 1e-3), Unit("µs", 1e-6)]
    return next((u for u in sizes if walked.makespan >= u.size), sizes[-1])


def timeline(walked: Walked, width: int = 100, *, coloured: bool = True, seconds: bool = False) -> Group:
    """The drawing with its legend and summary, at most `width` columns wide; `seconds`: the times are in seconds."""
    unit = unit_of(walked) if seconds else Unit()
    drawn = drawing(walked, best_scale([walked], width), coloured, unit)
    return Group(*drawn, legend([walked], coloured, width), *summary(walked, unit))


def drawing(walked: Walked, scale: float, coloured: bool, unit: Unit) -> list[Text]:
    """Headline, one row per rank, time axis."""
    rows = [_row(walked, rank, scale, coloured) for rank in range(walked.program.ranks)]
    return [_headline(walked, scale), *rows, _axis(walked, scale, unit)]


def title(walked: Walked) -> str:
    p = walked.program
    sizes = counted(p.ranks, "rank"), counted(p.microbatches, "micro-batch"), counted(p.virtual, "stage")
    return f"{p.schedule}: {', '.join(sizes)} per rank"


def best_scale(several: Sequence[Walked], width: int) -> float:
    """Columns per unit of time: as wide as fits, but no wider than the numbers need."""
    room = max(20, width - _label_width(several) - _tail_width(several))
    longest = max(w.makespan for w in several) or 1.0
    digits = max(len(str(w.program.microbatches - 1)) for w in several)
    lengths = np.concatenate([(w.end - w.start)[w.end > w.start] for w in several])
    shortest = float(lengths.min(initial=longest))
    scale = min(room / longest, (digits + 2) / shortest)
    even = np.allclose(lengths / shortest, np.round(lengths / shortest), rtol=1e-6)
    if even and scale * shortest >= 1:
        return float(np.floor(scale * shortest)) / shortest  # cells of the same length get the same width
    return scale


def summary(walked: Walked, unit: Unit) -> list[Text]:
    """The makespan, bubble fraction, bubble overhead and memory of the step as text."""
    peak, least = (float(f(walked.peak_memory)) for f in (np.max, np.min))
    what = "micro-batch" if peak == 1 else "micro-batches"
    where = "on every rank" if peak == least else f"on the rank with the most, {least:g} on the rank with the fewest"
    fraction, overhead = (f"{x:.1%}" for x in (walked.bubble_fraction, walked.bubble_overhead))
    makespan = unit.format(walked.makespan)
    lines = [
        Text.assemble(
            "bubble fraction ", (fraction, "bold"), " of the step, bubble overhead ", (overhead, "bold"), " of the work"
        ),
        Text.assemble("makespan ", (makespan, "bold"), " · in flight ", (f"{peak:g}", "bold"), f" {what} {where}"),
    ]
    if walked.longest_span < walked.makespan * (1 - 1e-9):
        inside = 1 - float(walked.busy.max()) / walked.longest_span
        span, idle = (unit.format(walked.longest_span), "bold"), (f"{inside:.1%}", "bold")
        words = ("without a barrier between steps: one step every ", span, ", ", idle, " of it idle")
        lines.append(Text.assemble(*words, style="dim"))
    return lines


def comparison(several: Sequence[Walked], unit: Unit) -> tables.FittedTable:
    """One row per schedule: time, bubble fraction and overhead, memory, messages; the shortest step is green."""
    best = min(w.makespan for w in several)
    rows = []
    for w in several:
        step = Text(unit.format(w.makespan), "green" if w.makespan <= best * (1 + 1e-9) else "")
        bubble = (f"{x:.1%}" for x in (w.bubble_fraction, w.bubble_overhead))
        counts = (f"{x:g}" for x in (w.peak_memory.max(), messages(w)))
        name = Text(w.program.schedule, "bold"), w.program.virtual
        rows.append([*name, step, *bubble, unit.format(w.longest_span), *counts])
    return tables.FittedTable(COMPARED, rows)


def messages(walked: Walked) -> float:
    """Messages that the busiest rank sends per step."""
    p = walked.program
    crosses = p.rank_of[1:] != p.rank_of[:-1]
    ends = np.concatenate([p.rank_of[:-1][crosses], p.rank_of[1:][crosses]])
    sent = np.bincount(ends, minlength=p.ranks)
    return float(sent.max() * p.microbatches)


def explained_timeline(walked: Walked, console: Console, seconds: bool = False) -> Group:
    """One timeline, as wide as the console, and the rule of its schedule."""
    coloured = console.color_system is not None and not console.no_color
    about = SCHEDULES.get(walked.program.schedule)
    rule = Text(about.about, "dim") if about else Text("")
    return Group(timeline(walked, min(console.width, 200), coloured=coloured, seconds=seconds), rule)


def show_pipelines(several: Sequence[Walked], console: Console) -> None:
    """Draw one timeline, or several at one scale with a table that compares them."""
    coloured = console.color_system is not None and not console.no_color
    width = min(console.width, 200)
    if len(several) == 1:
        console.print(explained_timeline(several[0], console))
        return
    scale, unit = best_scale(several, width), Unit()
    for walked in several:
        console.print(Group(*drawing(walked, scale, coloured, unit), ""))
    console.print(Group(legend(several, coloured, width), comparison(several, unit), Text(FOOTNOTE, "dim")))


def legend(several: Sequence[Walked], coloured: bool = True, width: int = 100) -> Text:
    """The kinds of actions that occur, each with its letter, its colour and its name."""
    present = [k for i, k in enumerate(KINDS) if any((w.program.kind == i).any() for w in several)]
    virtual = max(w.program.virtual for w in several)
    entries = [_entry(f"{k} {KIND_NAMES[k]}", _style(colour(k)) if coloured else None) for k in present]
    if coloured and virtual > 1:
        entries.append(_entry("lighter: later stage", _style(colour("F", virtual - 1, virtual))))
    entries.append(Text("· bubble", "dim"))
    indent = " " * _label_width(several)
    text, at = Text(indent), len(indent)
    for entry in entries:
        if at + len(entry) > width and at > len(indent):
            text.append("\n" + indent)
            at = len(indent)
        text.append_text(entry).append("  ")
        at += len(entry) + 2
    return text


def pipeline_trace(walked: Walked, seconds_per_unit: float = 1.0) -> Json:
    """The trace of a simulation: a compute stream per rank, arrows for transfers, a counter of activations in flight."""
    p, u = walked.program, seconds_per_unit
    needs, _ = needs_and_order(p)
    actions = [p.action(i) for i in range(len(p))]
    rank, start, end = p.rank.tolist(), (walked.start * u).tolist(), (walked.end * u).tolist()
    spans = []
    for a, r, s, e in zip(actions, rank, start, end, strict=True):
        kind = KIND_NAMES[a.kind]
        args = {"stage": a.stage, "micro-batch": a.microbatch, "kind": kind}
        spans.append(TraceSpan(r, "compute", f"{a.kind}{a.microbatch}", s, e - s, kind, args))
    crossing = [i for i in np.flatnonzero(needs >= 0).tolist() if rank[needs[i]] != rank[i]]
    flows = []
    for i in crossing[:MOST_FLOWS]:
        source, target = ((rank[k], "compute", start[k]) for k in (int(needs[i]), i))
        flows.append(Flow("activation" if p.kind[i] == F else "gradient", source, target))
    counters = [
        TraceCounter(r, "activations in flight", float(t) * u, {"count": int(level)})
        for r in range(p.ranks)
        for t, level in zip(*held_changes(walked, r), strict=True)
    ]
    about = {
        **values_of(p, "schedule", "ranks", "stages", "microbatches"),
        "bubble_fraction": walked.bubble_fraction,
        "bubble_overhead": walked.bubble_overhead,
    }
    return trace_events(spans, flows=flows, counters=counters, streams=["compute"], about=about)


def _style(background: tuple[int, int, int]) -> str:
    bright = 0.299 * background[0] + 0.587 * background[1] + 0.114 * background[2] > 140
    return f"{'rgb(20,20,30)' if bright else 'rgb(255,255,255)'} on {rgb(background)}"


def rgb(shade: tuple[int, int, int]) -> str:
    return f"rgb({shade[0]},{shade[1]},{shade[2]})"


def _line() -> Text:
    """A line of the drawing: cut at the width, never wrapped."""
    return Text(no_wrap=True, overflow="crop")


def _entry(words: str, style: str | None) -> Text:
    return Text.assemble(("  ", style), " ", words) if style else Text(words)


def _headline(walked: Walked, scale: float) -> Text:
    """The title of the drawing, and the header of the column to the right of the rows."""
    right = _label_width([walked]) + max(1, round(walked.makespan * scale)) + _tail_width([walked])
    text = _line().append(title(walked), "bold")
    return text.append(HELD.rjust(right - len(text)), "dim") if right - len(text) > len(HELD) + 2 else text


def _label_width(several: Sequence[Walked]) -> int:
    return 6 + max(len(str(w.program.ranks - 1)) for w in several)


def _tail_width(several: Sequence[Walked]) -> int:
    return 2 + max(len(f"{peak:g}") for w in several for peak in w.peak_memory.tolist())


def _row(walked: Walked, rank: int, scale: float, coloured: bool) -> Text:
    p = walked.program
    text = _line().append(f"rank {rank}".ljust(_label_width([walked])), "dim")
    own = slice(int(p.first[rank]), int(p.first[rank + 1]))
    columns = max(1, round(walked.makespan * scale))
    took = (walked.end - walked.start)[own]
    if float(took[took > 0].min(initial=np.inf)) * scale < 1 - 1e-9:
        text.append_text(_half_blocks(walked, own, columns) if coloured else _letters(walked, own, columns))
    else:
        text.append_text(_cells(walked, own, columns, scale, coloured))
    return text.append(f"  {walked.peak_memory[rank]:g}", "dim")


def _cells(walked: Walked, own: slice, columns: int, scale: float, coloured: bool) -> Text:
    """The row in whole characters: each action from its rounded start to its rounded end."""
    p, chunk, text, at = walked.program, walked.program.chunk_of, Text(), 0
    for i in range(own.start, own.stop):
        a = p.action(i)
        left, right = round(float(walked.start[i]) * scale), round(float(walked.end[i]) * scale)
        left = max(left, at)
        if right <= left:
            continue
        text.append("·" * (left - at), "dim")
        text.append(
            _inside(a.kind, a.microbatch, right - left, coloured),
            _style(colour(a.kind, int(chunk[a.stage]), p.virtual, a.microbatch)) if coloured else "",
        )
        at = right
    return text.append("·" * max(0, columns - at), "dim")


def _inside(kind: str, microbatch: int, width: int, coloured: bool) -> str:
    number = str(microbatch)
    if coloured:
        return number.center(width) if len(number) <= width else " " * width
    return (kind + number).ljust(width, "-") if len(number) < width else (kind * width)


def _sampled(walked: Walked, own: slice, count: int) -> list[int]:
    """The action that runs at each of `count` evenly spaced moments; −1: none."""
    moments = (np.arange(count) + 0.5) * walked.makespan / count
    at = np.searchsorted(walked.start[own], moments, side="right") - 1
    busy = (at >= 0) & (walked.end[own][np.maximum(at, 0)] > moments)
    return np.where(busy, at + own.start, -1).tolist()


def _letters(walked: Walked, own: slice, columns: int) -> Text:
    kinds = walked.program.kind
    return Text("".join("·" if i < 0 else KINDS[kinds[i]] for i in _sampled(walked, own, columns)))


def _half_blocks(walked: Walked, own: slice, columns: int) -> Text:
    """Two moments per character: the left half is the foreground of ▌, the right half its background."""
    p, chunk, text = walked.program, walked.program.chunk_of, Text()
    shades = [
        None if i < 0 else colour(KINDS[p.kind[i]], int(chunk[p.stage[i]]), p.virtual)
        for i in _sampled(walked, own, 2 * columns)
    ]
    for left, right in zip(shades[::2], shades[1::2], strict=True):
        if left:
            text.append("▌", f"{rgb(left)} on {rgb(right)}" if right else rgb(left))
        else:
            text.append("▐" if right else "·", rgb(right) if right else "dim")
    return text


def _axis(walked: Walked, scale: float, unit: Unit) -> Text:
    """A ruler with a number at most every ten columns."""
    columns, length, scale = max(1, round(walked.makespan * scale)), walked.makespan / unit.size, scale * unit.size
    steps = [m * 10**e for e in range(-6, 10) for m in (1, 2, 5)]
    step = next((s for s in steps if s * scale >= 10), length)
    line = [" "] * columns
    for k in range(int(length / step + 1e-9) + 1):
        place, mark = round(k * step * scale), f"{k * step:g}" + (f" {unit.name}" if k == 0 and unit.name else "")
        if place + len(mark) <= len(line):
            line[place : place + len(mark)] = mark
    return _line().append(" " * _label_width([walked]) + "".join(line), "dim")
