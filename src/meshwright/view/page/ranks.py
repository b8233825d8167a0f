"""The grid of ranks: where every rank sits on the axes of the plan, and the groups of a chosen rank with the level that each spans."""

from typing import Any

from meshwright.describe.layout import Layout
from meshwright.view.page.subject import Subject

AXES = ("tp", "cp", "pp", "dp", "ep")
MOST_DRAWN = 2048  # ranks; of a larger world the first ones are drawn


def data(subject: Subject) -> dict[str, Any]:
    """For each axis the group number of every rank."""
    plan, cluster = subject.plan, subject.cluster
    layout = Layout(plan, tuple(subject.stack.order))
    drawn = min(plan.world, MOST_DRAWN)
    axes = [axis for axis in AXES if layout.size(axis) > 1]
    out = []
    for axis in axes:
        groups = layout.groups(axis)
        number = [0] * plan.world
        for index, members in enumerate(groups.tolist()):
            for rank in members:
                number[rank] = index
        level = cluster.levels[layout.level(axis, cluster)].name
        first = groups[0].tolist()
        step = first[1] - first[0]
        members_of = f"{', '.join(map(str, first[:6]))}{', …' if len(first) > 6 else ''}"
        words = f"{axis}: {len(groups):,} groups of {layout.size(axis)} ranks, {step} apart: {members_of}"
        row = {"axis": axis, "size": layout.size(axis), "groups": len(groups), "level": level}
        out.append(row | {"group_of": number[:drawn], "formula": f"{words}; they span {level} links"})
    return {
        "world": plan.world,
        "drawn": drawn,
        "node_size": cluster.node_size,
        "order": list(layout.axes),
        "sizes": {axis: getattr(plan, axis) for axis in layout.axes},
        "axes": out,
        "note": note(plan.world, drawn, out),
    }


def note(world: int, drawn: int, axes: list[dict[str, Any]]) -> str:
    if not axes:
        return "One rank: no groups."
    inside = [one["axis"] for one in axes if one["level"] == axes[0]["level"]]
    words = f"{world:,} ranks; choose one to see its groups. Groups on {axes[0]['level']} links: {', '.join(inside)}."
    return words if drawn == world else f"{words} The first {drawn:,} ranks are drawn."
