"""An emulated cluster as a page and as JSON: its shape, the rates and round trips asked and achieved, and what to know."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.comm.emulate.carry import NOTED_BELOW, megabits, notes
from meshwright.comm.emulate.emulation import Emulation
from meshwright.comm.emulate.measure import LinkMeasurement
from meshwright.comm.emulate.topology import Topology, address
from meshwright.units import counted, format_seconds
from meshwright.view.tables import facts, filled, heading

PATTERNS = {
    "alone": "node 0 to node 1, alone",
    "ring": "every node to the next at once",
    "across": "every node across switches at once",
}


def page(emulation: Emulation, found: LinkMeasurement | None) -> RenderableType:
    t = emulation.topology
    shape = f"{counted(t.nodes, 'node')} × {counted(t.ranks_per_node, 'rank')}"
    parts: list[RenderableType] = [heading(f"emulation {emulation.name}", shape), facts(shape_rows(emulation))]
    if found is not None:
        parts.append(filled(("traffic", ">asked", ">achieved", ">slowest", ">share"), rate_rows(found)))
    parts += [Text(f"  {note}", "dim") for note in notes(emulation, found)]
    return Group(*parts)


def shape_rows(emulation: Emulation) -> list[tuple[str, object]]:
    t = emulation.topology
    uplinks = f"{t.switches} switches of {t.nodes_per_switch} nodes, uplinks of {megabits(t.uplink)}"
    made = {"kernel": "by the kernel (tbf, netem)", "process": "by a switch process"}[emulation.links]
    return [
        ("between nodes", f"{megabits(t.rate)} each way, {format_seconds(t.delay)} one way, {made}"),
        ("oversubscription", f"{t.oversubscription:g}: {uplinks}" if t.oversubscription > 1 else ""),
        ("addresses", f"{address(0)} to {address(t.nodes - 1)}" if t.nodes > 1 else address(0)),
        ("run in it", f"meshwright emulate run{name_option(emulation.name)} -- COMMAND"),
        ("remove it", f"meshwright emulate down{name_option(emulation.name)}"),
    ]


def name_option(name: str) -> str:
    return "" if name == "default" else f" --name {name}"


def rate_rows(found: LinkMeasurement) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = [
        (
            PATTERNS[rate.pattern],
            megabits(rate.asked),
            megabits(rate.median),
            megabits(rate.slowest),
            Text(f"{rate.share:.0%}", "" if rate.share >= NOTED_BELOW else "yellow"),
        )
        for rate in found.rates
    ]
    asked, median, slowest = (
        format_seconds(seconds)
        for seconds in (found.round_trip_asked_s, found.round_trip_s, found.round_trip_slowest_s)
    )
    return [*rows, ("round trip of one byte", asked, median, slowest, "")] if found.rates else rows


def as_json(emulation: Emulation, found: LinkMeasurement | None) -> dict[str, Any]:
    """Rates in bytes/s, times in seconds."""
    t: Topology = emulation.topology
    return {
        "name": emulation.name,
        "nodes": t.nodes,
        "ranks_per_node": t.ranks_per_node,
        "rate": t.rate,
        "delay_s": t.delay,
        "oversubscription": t.oversubscription,
        "nodes_per_switch": t.nodes_per_switch,
        "uplink": t.uplink if t.oversubscription > 1 else None,
        "links": emulation.links,
        "addresses": [address(node) for node in range(t.nodes)],
        "measured": None if found is None else found.as_dict(),
        "notes": notes(emulation, found),
    }
