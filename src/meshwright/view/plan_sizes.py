"""Days and cost over GPU counts, for `plan --days` and `plan --budget`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.planner.sizing import Sizing
from meshwright.view.plan import short, titled


def page(sizing: Sizing) -> RenderableType:
    """The answer in a sentence and the curve as a table."""
    table = titled("Days and cost over GPU counts")
    for name, side in (("GPUs", "right"), ("days", "right"), ("low", "right"), ("high", "right"), ("MFU", "right"),
                       ("GPU-hours", "right"), ("cost", "right"), ("", "left"), ("plan", "left")):  # fmt: skip
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    chosen = sizing.result.plan.world
    for one in sizing.curve:
        style = "bold" if one.gpus == chosen else "" if one.meets else "dim"
        cost = f"${one.dollars:,.0f}" if one.dollars else "no price"
        days = [f"{x:,.1f}" for x in (one.days, one.days_low, one.days_high)]
        cells = [
            f"{one.gpus:,}",
            *days,
            f"{100 * one.mfu:.1f}%",
            f"{one.gpu_hours:,.0f}",
            cost,
            "✓" if one.meets else "",
        ]
        table.add_row(*cells, short(one.plan), style=style)
    note = f"✓ within {sizing.target}; every size with its best common plan. The answer below is searched in full."
    return Group(Text(sizing.answer, "bold green"), table, Text(note, "dim"))
