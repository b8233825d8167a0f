"""Collectives in the terminal and as figures: steps by rank, values step by step, comparison of algorithms.

Steps: one row per step, one column per rank. `→ 1` is a send to rank 1, `← 3` a receive from rank 3, `+` an addition of
the received data. Values: the data on every rank before and after each step. Changed values are coloured; `·` is a
missing chunk. With more than sixteen ranks, or if the table is too wide, each step is one line.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from meshwright.describe.result import values_of
from meshwright.programs.collectives import OPERATIONS, Program, Walk, check
from meshwright.programs.collectives.arrays import Slots, loaded, states
from meshwright.programs.collectives.comparison import Comparison
from meshwright.programs.collectives.formulas import text as formula
from meshwright.programs.collectives.lists import Instruction, instructions
from meshwright.units import Json, counted, format_bytes, format_decimal_bytes, format_seconds
from meshwright.view.tables import FittedTable, facts, heading, table

MOST_COLUMNS, MOST_STEPS, MOST_DRAWN = 16, 200, 32
NOTE = "n is the full buffer; simulated on the cluster's links with the catalog's constants, uncalibrated"
LEGEND = "→ 1  3: sends chunk 3 to rank 1     ← 3  2: receives chunk 2 from rank 3     ← 3 + 2: receives and adds it\n"
SIGN = {"send": ("→", "cyan"), "receive": ("←", "green"), "reduce": ("←", "yellow"), "copy": ("⟳", "magenta")}


class Charge(NamedTuple):
    """The price of the program in the cost model: the library that runs it, its simulated time, and the time of the call."""

    library: str
    walked: float
    seconds: float


def page(
    program: Program, walked: Walk | None = None, on: str = "", width: int = 120, charge: Charge | None = None
) -> Group:
    """Return the steps of a program, by rank if that fits the width, and a summary."""
    title = f"{program.algorithm} {program.operation}"
    check(program)
    body = by_rank(program, walked) if program.ranks <= MOST_COLUMNS else None
    legend = LEGEND
    if body is None or wide(body) > width:
        body, legend = by_step(program, walked), ""
    return Group(
        heading(title, shape(program)),
        Text(OPERATIONS[program.operation], "dim"),
        body,
        Text(legend, "dim"),
        summary(program, walked, on, charge),
    )


def by_rank(program: Program, walked: Walk | None) -> Table:
    """Return a table with one row per step and one column per rank."""
    by_endpoint = [
        {step: list(group) for step, group in groupby(instructions(program, rank), key=lambda i: i.step)}
        for rank in range(program.endpoints)
    ]
    names = [f"rank {rank}" for rank in range(program.ranks)] + [f"switch {k}" for k in range(len(program.switches))]
    grid = table(">step", *names, *([">done"] if walked else []))
    adds = np.zeros(program.steps + 1, dtype=bool)
    adds[program.moves.step[program.moves.reduce]] = True
    for step in range(min(program.steps, MOST_STEPS)):
        cells = [cell(steps.get(step, []), program.ranks) for steps in by_endpoint]
        done = [Text(format_seconds(float(walked.step_end[step])), "dim")] if walked else []
        grid.add_row(Text(str(step), "dim"), *cells, *done, end_section=bool(adds[step] and not adds[step + 1]))
    if program.steps > MOST_STEPS:
        grid.add_row("…", f"{program.steps - MOST_STEPS} more steps")
    return grid


def wide(grid: Table) -> int:
    """Return the width in characters that a table needs."""
    return grid.__rich_measure__(Console(), Console(width=10_000).options).maximum


def cell(listed: Sequence[Instruction], ranks: int) -> Text:
    """Return the instructions of a rank or switch in a step, one line per message; switches are named s0, s1, …"""
    lines = []
    for (kind, peer), group in groupby(listed, key=lambda i: (i.kind, i.peer)):
        sign, style = SIGN[kind]
        chunks = runs([c for i in group for c in range(i.chunk, i.chunk + i.width)])
        name, plus = f"{sign} {peer if peer < ranks else f's{peer - ranks}'}", " +" if kind == "reduce" else "  "
        lines.append(Text.assemble((name, style), (plus, f"bold {style}"), f" {chunks}"))
    return Text("\n").join(lines)


def by_step(program: Program, walked: Walk | None) -> Table:
    """Return a table with one line per step: number of messages, elements, and the first message as an example."""
    moves = program.moves
    bounds = np.searchsorted(moves.step, np.arange(program.steps + 1))
    grid = table(">step", ">messages", ">elements", "such as", *([">done"] if walked else []))
    for step in range(min(program.steps, MOST_STEPS)):
        low, high = int(bounds[step]), int(bounds[step + 1])
        if low == high:
            continue
        pair = moves.source[low:high].astype(np.int64) * program.endpoints + moves.target[low:high]
        first = [k for k in range(low, high) if pair[k - low] == pair[0]]
        chunks = [int(moves.chunk[k]) + w for k in first for w in range(moves.width[k])]
        word = "adds" if moves.reduce[low] else "stores"
        example = f"{moves.source[low]} → {moves.target[low]}, which {word} {'chunk' if len(chunks) == 1 else 'chunks'} {runs(chunks)}"
        done = [format_seconds(float(walked.step_end[step]))] if walked else []
        elements = f"{int(program.moved[low:high].sum()):,}"
        grid.add_row(str(step), str(len(np.unique(pair))), elements, Text(example, "dim"), *done)
    if program.steps > MOST_STEPS:
        grid.add_row("…", "", "", f"{program.steps - MOST_STEPS} more steps")
    return grid


def summary(program: Program, walked: Walk | None, on: str, charge: Charge | None = None) -> Table:
    """Return the formula, the traffic and the time of a program as a table."""
    sent = np.bincount(program.moves.source, weights=program.moved, minlength=program.endpoints)[: program.ranks]
    most = float(sent.max(initial=0.0))
    share = f" = {most / program.elements:.4g}·n" if program.elements else ""
    rows: list[tuple[str, object]] = [
        ("proved", "every rank ends with the required data, each contribution exactly once; no deadlock"),
        (
            "steps",
            f"{counted(program.steps, 'step')}, {counted(len(program.moves.step), 'move')}; the busiest rank sends {most:,.0f} elements{share}",
        ),
        ("formula", f"{formula(program.operation, program.algorithm)}   if no link is shared; n: the full buffer"),
    ]
    if walked:
        if charge:
            extra = f"{format_seconds(charge.seconds - charge.walked)} for the call and its chunks"
            links = f"{format_seconds(charge.walked)} on the links at the rates of {charge.library}"
            rows.append(("time", f"{format_seconds(charge.seconds)} {on}: as in `meshwright estimate`"))
            rows.append(("", f"{links} + {extra}"))
        else:
            rows.append(("time", f"{format_seconds(walked.makespan)} {on}"))
        port, size = max(walked.bytes_by_port.items(), key=lambda item: item[1], default=((), 0.0))
        if port:
            rows.append(("busiest port", f"{' '.join(str(word) for word in port)}: {format_decimal_bytes(size)}"))
        if charge is None:
            note = "simulated with the catalog's α, β, γ, uncalibrated; omit --algorithm for the library's choice"
            rows.append(("", Text(note, "dim")))
    return facts(rows)


def values_page(program: Program, inputs: Sequence[Any]) -> Group:
    """Return a table of the values on every rank before and after each step."""
    slots = loaded(program, inputs)
    frames: list[tuple[str, Slots, dict[tuple[int, int], bool]]] = [("before", dict(slots), {})]
    frames += [(f"step {k}", dict(slots), written) for k, written in enumerate(states(program, slots))]
    width = max((len(number(x)) for _, frame, _ in frames for data in frame.values() for x in data), default=1)
    grid = table("", *(f"rank {rank}" for rank in range(program.ranks)))
    for name, frame, written in frames:
        grid.add_row(Text(name, "dim"), *slot_cells(program, frame, written, width))
    ends = np.zeros(program.endpoints * program.chunks, dtype=bool)
    ends[program.ends] = True
    required = {s: v for s, v in slots.items() if ends[s[0] * program.chunks + s[1]]}
    grid.add_section()
    grid.add_row(Text("result", "bold"), *slot_cells(program, required, {}, width))
    return Group(
        heading(f"{program.algorithm} {program.operation}", shape(program)),
        Text(OPERATIONS[program.operation], "dim"),
        grid,
        Text.assemble(("added", "bold yellow"), "   ", ("received", "bold green"), ("   · missing", "dim")),
    )


def slot_cells(program: Program, slots: Slots, written: dict[tuple[int, int], bool], width: int) -> Iterator[Text]:
    """Yield the chunks of each rank in order, new values coloured; an all-to-all shows only existing chunks."""
    for rank in range(program.ranks):
        text = Text()
        for chunk in range(program.chunks):
            data, adds = slots.get((rank, chunk)), written.get((rank, chunk))
            if data is None and program.operation != "all-to-all":
                text.append(("·".rjust(width) + " ") * int(program.sizes[chunk]), "dim")
            if program.operation == "barrier":
                style = "bold green" if adds is not None else "dim" if data is None else ""
                text.append("✓ " if data is not None else "· ", style)
            style = "" if adds is None else "bold yellow" if adds else "bold green"
            for x in [] if data is None else data:
                text.append(number(x).rjust(width), style)
                text.append(" ")
        yield text


def number(x: Any) -> str:
    return f"{x:g}"


def comparison_page(comparison: Comparison) -> Group:
    """Return the times by size and algorithm, the fastest marked, and the crossovers."""
    names = list(comparison.times)
    rows: list[list[object]] = []
    for k, (size, best) in enumerate(zip(comparison.sizes, comparison.best, strict=True)):
        row = [Text(format_seconds(comparison.times[name][k]), "bold green" if name == best else "") for name in names]
        rows.append([format_bytes(size), *row])
    grid = FittedTable([">size", *(f">{name}" for name in names)], rows)
    aside = f"{comparison.ranks} ranks on {comparison.cluster}"
    title = heading(f"{comparison.operation}: algorithms by message size", aside)
    return Group(title, grid, leads(comparison), Text(NOTE, "dim"))


def leads(comparison: Comparison) -> Table:
    """Return the fastest algorithm for each range of sizes."""
    rows: list[tuple[str, object]] = []
    low = ""
    leader = comparison.best[0]
    for change in [*comparison.crossovers, None]:
        high = format_bytes(change.size) if change else ""
        span = (
            f"{low} to {high}" if low and high else f"up to {high}" if high else f"from {low} on" if low else "always"
        )
        rows.append((span, Text(leader, "bold green")))
        if change:
            low, leader = high, change.after
    return facts(rows)


def as_dict(program: Program, walked: Walk | None = None, charge: Charge | None = None) -> Json:
    """Return a program as JSON data: chunks, contract, moves, and the walk if given."""
    names = ("step", "source", "target", "chunk", "width", "reduce")
    moves = [dict(zip(names, row, strict=True)) for row in zip(*(c.tolist() for c in program.moves[:6]), strict=True)]
    data: Json = {
        **values_of(program, "operation", "algorithm", "ranks", "elements", "root"),
        "groups": [list(group) for group in program.groups],
        "chunk_sizes": program.sizes.tolist(),
        "starts": slots_of(program, program.starts),
        "ends": slots_of(program, program.ends),
        "steps": program.steps,
        "moves": moves,
        "formula": formula(program.operation, program.algorithm),
        "switches": [list(switch) for switch in program.switches],
    }
    if charge:
        data |= {"library": charge.library, "time_s": charge.seconds}
    if walked:
        sent = walked.messages
        columns = (sent.step, sent.source, sent.target, sent.bytes, walked.start, walked.end)
        keys = ("step", "source", "target", "bytes", "start_s", "end_s")
        data["walk"] = {
            "time_s": walked.makespan,
            "step_end_s": walked.step_end.tolist(),
            "sent_bytes": walked.sent.tolist(),
            "bytes_by_port": {" ".join(map(str, port)): size for port, size in walked.bytes_by_port.items()},
            "messages": [dict(zip(keys, row, strict=True)) for row in zip(*(c.tolist() for c in columns), strict=True)],
        }
    return data


def slots_of(program: Program, slots: Any) -> list[list[int]]:
    """Return the chunks of each rank."""
    rank, chunk = slots // max(1, program.chunks), slots % max(1, program.chunks)
    return [chunk[rank == r].tolist() for r in range(program.ranks)]


def runs(chunks: list[int]) -> str:
    """Return the ranges of consecutive chunks: `0–3,7` for 0, 1, 2, 3, 7."""
    chunks = sorted(chunks)
    spans: list[list[int]] = []
    for c in chunks:
        if spans and c == spans[-1][1] + 1:
            spans[-1][1] = c
        else:
            spans.append([c, c])
    words = [f"{a}" if a == b else f"{a}–{b}" for a, b in spans]
    return ",".join(words if len(words) <= 4 else [*words[:3], "…"])


def shape(program: Program) -> str:
    return f"{counted(program.ranks, 'rank')}, {counted(program.elements, 'element')} in {counted(program.chunks, 'chunk')}"
