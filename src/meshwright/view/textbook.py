"""Recommendations of guides, compared with the best plan of the search."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.planner.advice.guides.textbook import Compared
from meshwright.predict.estimate import Estimate
from meshwright.units import format_seconds
from meshwright.view.tables import filled

NEAR = 1.05  # a recommendation is good if its step takes at most this multiple of the winner's


def table(compared: Sequence[Compared], winner: Estimate) -> Table:
    """Return one row per recommended plan, fastest first: the guides that recommend it, step, memory, and the loss against the winner."""
    days = winner.workload.tokens > 0
    head = ["the guides", "recommend", ">step", ">of winner", *([">extra days"] if days else []), ">GiB"]
    groups: dict[str, list[Compared]] = {}
    for c in compared:
        if c.estimate is not None:
            groups.setdefault(repr(c.recommendation.plan), []).append(c)
    ordered = sorted(groups.values(), key=lambda g: (not g[0].fits, g[0].ratio))
    title = f"Recommendations of guides; the winner takes {format_seconds(winner.prediction.step_time_s)}"
    return filled(head, [row(group, days) for group in ordered], title=title)


def row(group: list[Compared], days: bool) -> list[object]:
    c = group[0]
    plan, e = c.recommendation.plan, c.estimate
    assert plan is not None
    assert e is not None
    title = Text("the winner itself", "green") if c.same else Text(plan.title())
    lost = [f"{c.costs_days:+,.1f}"] if days else []
    memory = Text(f"{e.prediction.memory_gib:.0f}", "" if c.fits else "bold red")
    guides = ", ".join(x.recommendation.guide for x in group)
    return [guides, title, format_seconds(e.prediction.step_time_s), worth(c), *lost, memory]


def worth(c: Compared) -> Text:
    if not c.fits:
        return Text("does not fit", "bold red")
    ratio = c.ratio or 0.0
    return Text(f"{ratio:.2f}×", "green" if ratio <= NEAR else "yellow" if ratio <= 2 else "red")


def reasons(compared: Sequence[Compared], sources: bool = False) -> RenderableType:
    """Return the reason of each guide; with `sources` also the quoted text, its source, and corrections to it."""
    lines = []
    for c in compared:
        r = c.recommendation
        lines.append(Text.assemble((f"{r.guide}  ", "bold"), r.reason))
        if sources and r.wording:
            lines.append(Text.assemble(("    ", ""), f"“{r.wording}”", (f"  {r.source}", "dim")))
        if sources and r.correction:
            lines.append(Text.assemble(("    corrected: ", "yellow"), r.correction))
    return Group(*lines)
