"""Days and cost over GPU counts, for `plan --days` and `plan --budget`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.planner.sizing import Sizing
from meshwright.view.plan import short
from meshwright.view.tables import titled


def page(sizing: Sizing) -> RenderableType:
    """Return the recommended size in one sentence and the table of sizes."""
    columns = (">GPUs", ">days", ">low", ">high", ">MFU", ">GPU-hours", ">cost", "", "plan")
    table = titled("Days and cost over GPU counts", columns, [])
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
    note = (
        f"✓ within {sizing.target}; each size with its best common plan. The recommended size below has a full search."
    )
    return Group(Text(sizing.answer, "bold green"), table, Text(note, "dim"))
