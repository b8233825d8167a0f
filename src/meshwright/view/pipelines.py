"""A walked pipeline to look at: a timeline in the terminal, a table of several, a trace for Perfetto.

One row a rank, time to the right, one cell an action with its micro-batch in it. Colour is the kind (F, B, I, W), the tint
which of the rank's stages, and even and odd micro-batches differ a little so that neighbours do not melt into each
other; dots are bubbles. The scale is the largest at which the whole step fits the width: a cell that is too narrow for its
number goes without, and when cells get narrower than a character, half blocks show two moments in one.
Without colour (a pipe, NO_COLOR) the kind's letter stands in the cell instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from meshwright.programs.pipelines import KINDS, RULES, Walked
from meshwright.programs.pipelines.check import needs_and_order
from meshwright.programs.pipelines.program import KIND_NAMES, F
from meshwright.programs.pipelines.walk import held_changes
from meshwright.view.trace import Counter, Flow, Span, trace_events

COLOURS = {"F": (59, 120, 224), "B": (22, 148, 96), "I": (20, 165, 165), "W": (235, 160, 45)}
TINT, ODD = 0.42, 0.12  # toward white for a rank's last stage; toward black for odd micro-batches
HELD = "in flight"
MOST_FLOWS = 20_000  # arrows in a trace beyond this only slow the viewer


def colour(kind: str, chunk: int = 0, virtual: int = 1, microbatch: int = 0) -> tuple[int, int, int]:
    """The colour of an action."""
    rgb = np.array(COLOURS[kind], float)
    rgb += (255 - rgb) * TINT * chunk / max(virtual - 1, 1)
    rgb *= 1 - ODD * (microbatch % 2)
    return tuple(int(round(c)) for c in rgb)  # type: ignore[return-value]


def timeline(walked: Walked, width: int = 100, *, coloured: bool = True) -> Group:
    """The drawing with its legend and summary, at most `width` columns wide."""
    drawn = drawing(walked, best_scale([walked], width), coloured)
    return Group(*drawn, legend([walked], coloured), *summary(walked))


def drawing(walked: Walked, scale: float, coloured: bool = True) -> list[Text]:
    """Headline, one row a rank, time axis."""
    rows = [_row(walked, rank, scale, coloured) for rank in range(walked.program.ranks)]
    return [_headline(walked, scale), *rows, _axis(walked, scale)]


def title(walked: Walked) -> str:
    p = walked.program
    stages = f"{p.virtual} stages a rank" if p.virtual > 1 else "1 stage a rank"
    return f"{p.schedule}: {_count(p.ranks, 'rank')}, {_count(p.microbatches, 'micro-batch', 'es')}, {stages}"


def best_scale(several: Sequence[Walked], width: int) -> float:
    """Columns for a unit of time: as wide as fits, but no wider than numbers and a little air need."""
    room = max(20, width - _label_width(several) - _tail_width(several))
    longest = max(w.makespan for w in several) or 1.0
    digits = max(len(str(w.program.microbatches - 1)) for w in several)
    shortest = min(float((w.end - w.start)[w.end > w.start].min(initial=longest)) for w in several)
    wanted = (digits + 2) / shortest
    scale = min(room / longest, wanted)
    columns = scale * shortest
    if columns < 1:
        return scale
    return float(np.floor(columns)) / shortest


def summary(walked: Walked) -> list[Text]:
    """What the step costs, in words: the two bubbles by their own names, and memory."""
    peak, least = (float(f(walked.peak_memory)) for f in (np.max, np.min))
    what = "micro-batch" if peak == 1 else "micro-batches"
    others = "on every rank" if peak == least else f"on the fullest rank, {least:g} on the emptiest"
    lines = [
        Text.assemble("bubble fraction ", (f"{walked.bubble_fraction:.1%}", "bold"), " of the step, bubble overhead ",
                      (f"{walked.bubble_overhead:.1%}", "bold"), " of the work"),
        Text.assemble("makespan ", (f"{walked.makespan:g}", "bold"), " · in flight ", (f"{peak:g}", "bold"),
                      f" {what} {others}"),
    ]  # fmt: skip
    if walked.longest_span < walked.makespan * (1 - 1e-9):
        inside = 1 - float(walked.busy.max()) / walked.longest_span
        lines.append(
            Text.assemble(
                "without a barrier between steps: one every ", (f"{walked.longest_span:g}", "bold"), ", ",
                (f"{inside:.1%}", "bold"), " of it idle", style="dim",
            )
        )  # fmt: skip
    return lines


def comparison(several: Sequence[Walked]) -> Table:
    """One row a schedule: time, both bubbles, memory, messages."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("schedule", style="bold")
    for heading in ("stages a rank", "makespan", "bubble fraction", "bubble overhead", "no barrier", "in flight",
                    "messages"):  # fmt: skip
        table.add_column(heading, justify="right")
    best = min(w.makespan for w in several)
    for w in several:
        style = "green" if w.makespan <= best * (1 + 1e-9) else ""
        table.add_row(
            w.program.schedule, str(w.program.virtual), Text(f"{w.makespan:g}", style), f"{w.bubble_fraction:.1%}",
            f"{w.bubble_overhead:.1%}", f"{w.longest_span:g}", f"{w.peak_memory.max():g}", f"{messages(w):g}",
        )  # fmt: skip
    return table


def messages(walked: Walked) -> float:
    """Transfers that the busiest rank sends in a step."""
    p = walked.program
    apart = p.rank_of[1:] != p.rank_of[:-1]
    sent = np.bincount(p.rank_of[:-1][apart], minlength=p.ranks) + np.bincount(p.rank_of[1:][apart], minlength=p.ranks)
    return float(sent.max() * p.microbatches)


def show_pipelines(several: Sequence[Walked], console: Console) -> None:
    """Draw one, or several under one another at one scale with a table below."""
    coloured = console.color_system is not None and not console.no_color
    width = min(console.width, 200)
    if len(several) == 1:
        console.print(timeline(several[0], width, coloured=coloured))
        about = RULES.get(several[0].program.schedule)
        console.print(Text(about.about, "dim") if about else "")
        return
    scale = best_scale(several, width)
    for walked in several:
        console.print(Group(*drawing(walked, scale, coloured), ""))
    console.print(Group(legend(several, coloured), "", comparison(several)))


def legend(several: Sequence[Walked], coloured: bool = True) -> Text:
    """The kinds that occur, by colour."""
    present = [k for i, k in enumerate(KINDS) if any((w.program.kind == i).any() for w in several)]
    virtual = max(w.program.virtual for w in several)
    text = Text(" " * _label_width(several))
    for kind in present:
        if coloured:
            text.append("  ", _style(colour(kind)))
            text.append(" ")
        text.append(f"{kind} {KIND_NAMES[kind]}  ")
    if coloured and virtual > 1:
        text.append("  ", _style(colour("F", virtual - 1, virtual)))
        text.append(" lighter: later stage  ")
    return text.append("· bubble", "dim")


def pipeline_trace(walked: Walked, seconds_per_unit: float = 1.0) -> dict[str, Any]:
    """The trace of a walk: one compute stream a rank, arrows for transfers, a counter of activations in flight."""
    p, u = walked.program, seconds_per_unit
    needs, _ = needs_and_order(p)
    actions = [p.action(i) for i in range(len(p))]
    rank, start, end = p.rank.tolist(), (walked.start * u).tolist(), (walked.end * u).tolist()
    spans = [
        Span(r, "compute", f"{a.kind}{a.microbatch}", s, e - s, KIND_NAMES[a.kind],
             {"stage": a.stage, "micro-batch": a.microbatch, "kind": KIND_NAMES[a.kind]})
        for a, r, s, e in zip(actions, rank, start, end, strict=True)
    ]  # fmt: skip
    crossing = [i for i in np.flatnonzero(needs >= 0).tolist() if rank[needs[i]] != rank[i]]
    flows = [
        Flow("activation" if p.kind[i] == F else "gradient", (rank[n], "compute", start[n]), (rank[i], "compute", start[i]))
        for i, n in ((i, int(needs[i])) for i in crossing[:MOST_FLOWS])
    ]
    counters = [
        Counter(r, "activations in flight", float(t) * u, {"count": int(level)})
        for r in range(p.ranks)
        for t, level in zip(*held_changes(walked, r), strict=True)
    ]
    about = {"schedule": p.schedule, "ranks": p.ranks, "stages": p.stages, "microbatches": p.microbatches,
             "bubble_fraction": walked.bubble_fraction, "bubble_overhead": walked.bubble_overhead}  # fmt: skip
    return trace_events(spans, flows=flows, counters=counters, streams=["compute"], about=about)


def _count(n: int, word: str, plural: str = "s") -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}{plural}"


def _style(background: tuple[int, int, int]) -> str:
    bright = 0.299 * background[0] + 0.587 * background[1] + 0.114 * background[2] > 140
    ink = "rgb(20,20,30)" if bright else "rgb(255,255,255)"
    return f"{ink} on rgb({background[0]},{background[1]},{background[2]})"


def _line() -> Text:
    """A line of the drawing: cut at the width, never wrapped."""
    return Text(no_wrap=True, overflow="crop")


def _headline(walked: Walked, scale: float) -> Text:
    """The title, and over the column to the right of the rows what it counts."""
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
    """Whole characters: each action from its rounded start to its rounded end."""
    p, chunk, text, at = walked.program, walked.program.chunk_of, Text(), 0
    for i in range(own.start, own.stop):
        a = p.action(i)
        left, right = round(float(walked.start[i]) * scale), round(float(walked.end[i]) * scale)
        left = max(left, at)
        if right <= left:
            continue
        text.append("·" * (left - at), "dim")
        text.append(_inside(a.kind, a.microbatch, right - left, coloured),
                    _style(colour(a.kind, int(chunk[a.stage]), p.virtual, a.microbatch)) if coloured else "")  # fmt: skip
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
    """Two moments a character: the left half is the foreground of ▌, the right half its background."""
    p, chunk, text = walked.program, walked.program.chunk_of, Text()
    shades = [
        None if i < 0 else colour(KINDS[p.kind[i]], int(chunk[p.stage[i]]), p.virtual)
        for i in _sampled(walked, own, 2 * columns)
    ]
    for left, right in zip(shades[::2], shades[1::2], strict=True):
        if left is None and right is None:
            text.append("·", "dim")
        elif left is None:
            text.append("▐", f"rgb({right[0]},{right[1]},{right[2]})" if right else "")
        else:
            ground = f" on rgb({right[0]},{right[1]},{right[2]})" if right else ""
            text.append("▌", f"rgb({left[0]},{left[1]},{left[2]})" + ground)
    return text


def _axis(walked: Walked, scale: float) -> Text:
    """A ruler with a number at most every ten columns."""
    columns = max(1, round(walked.makespan * scale))
    steps = [m * 10**e for e in range(-6, 10) for m in (1, 2, 5)]
    step = next((s for s in steps if s * scale >= 10), walked.makespan)
    line = [" "] * columns
    for k in range(int(walked.makespan / step + 1e-9) + 1):
        place, mark = round(k * step * scale), f"{k * step:g}"
        if place + len(mark) <= len(line):
            line[place : place + len(mark)] = mark
    return _line().append(" " * _label_width([walked]) + "".join(line), "dim")
