"""An emulated cluster as a page and as JSON: its shape, the rates and round trips asked and achieved, and what to know.

Can this machine carry the emulated cluster? `up` measures it, refuses what it cannot, and says what remains different.

The machine carries the traffic of all nodes at once, and the ranks' computation besides. A rate that it does not reach with
nothing else running would make every timing a statement about this machine, not about the emulated links, so it is refused with
the rate that was reached.
"""

import os
from math import floor, log10

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.comm.emulate.emulation import Emulation
from meshwright.comm.emulate.measure import LinkMeasurement, Rate
from meshwright.comm.emulate.topology import DATA_BYTES, FRAME_BYTES, Topology, address
from meshwright.describe.result import values_of
from meshwright.errors import MeshwrightError
from meshwright.host import usable_cores
from meshwright.units import Json, counted, format_seconds
from meshwright.view.tables import facts, filled, heading

REFUSED_BELOW, NOTED_BELOW = 0.7, 0.93  # shares of the asked rate that the slowest sender reaches
LATE_FACTOR, LATE_S = 1.5, 5e-4  # a round trip is late above this multiple of the asked one, plus this
NOT_FIT = 3  # exit code


def bring_up(emulation: Emulation, measured: bool = True) -> LinkMeasurement | None:
    """Make an emulation and measure it; nothing is left of it if the machine cannot carry it, or on an interruption."""
    emulation.up()
    try:
        if not measured:
            return None
        found = emulation.measure()
        check_carried(emulation, found)
        return found
    except BaseException:
        emulation.down()
        raise


def check_carried(emulation: Emulation, found: LinkMeasurement) -> None:
    """Raise if the slowest sender of a pattern is far below the asked rate."""
    slow = [rate for rate in found.rates if rate.share < REFUSED_BELOW]
    if not slow:
        return
    worst = min(slow, key=lambda rate: rate.share)
    delay = f",{emulation.topology.delay:g}s" if emulation.topology.delay else ""
    carried = emulation.topology.rate * worst.share
    raise MeshwrightError(
        "MW-EMU-012",
        f"this machine cannot carry the links: {worst.senders} senders at once reach {megabits(worst.slowest)} of "
        f"{megabits(worst.asked)} each",
        why=f"{busy()}; --no-measure makes the links without this check",
        fix=f"--between {round_down(carried * 8 / 1e6):g}Mb/s{delay}",
        exit_code=NOT_FIT,
    )


def busy() -> str:
    load = os.getloadavg()[0]
    return f"It has {usable_cores():g} cores, and {load:.1f} processes wanted one in the last minute"


def megabits(rate: float) -> str:
    """Bytes/s as Mb/s or Gb/s, the unit of network links."""
    bits = rate * 8
    value, unit = (bits / 1e9, "Gb/s") if bits >= 9.995e8 else (bits / 1e6, "Mb/s")
    return f"{value:.3g} {unit}"


def round_down(value: float) -> float:
    """To one significant digit, so that the rate we suggest is reached the next time too."""
    unit = 10.0 ** floor(log10(max(value, 1e-3)))
    return floor(value / unit) * unit


def notes(emulation: Emulation, found: LinkMeasurement | None) -> list[str]:
    """Return warnings about the timings of this emulation."""
    topology, lines = emulation.topology, []
    if topology.world > usable_cores():
        ranks = f"{topology.nodes} × {topology.ranks_per_node} = {topology.world} ranks"
        lines.append(
            f"{ranks} share {usable_cores():g} cores: computation takes longer than on {topology.nodes} machines"
        )
    if emulation.links == "process":
        lines.append("a switch process carries every frame (this needs no netem in the kernel) and uses part of a core")
    if found is None:
        return [*lines, "not measured: `meshwright emulate status --measure`"]
    slow: list[Rate] = [rate for rate in found.rates if rate.share < NOTED_BELOW]
    lines += [f"{rate.pattern}: {rate.share:.0%} of the asked rate. {busy()}" for rate in slow]
    if found.round_trip_s > LATE_FACTOR * found.round_trip_asked_s + LATE_S:
        took, asked = map(format_seconds, (found.round_trip_s, found.round_trip_asked_s))
        lines.append(f"a round trip takes {took} instead of {asked}. {busy()}")
    lines.append(f"rates are of data: headers take {1 - DATA_BYTES / FRAME_BYTES:.1%} of a full frame")
    return lines


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
    rows: list[tuple[object, ...]] = []
    for rate in found.rates:
        share = Text(f"{rate.share:.0%}", "" if rate.share >= NOTED_BELOW else "yellow")
        rows.append((PATTERNS[rate.pattern], *map(megabits, (rate.asked, rate.median, rate.slowest)), share))
    trips = map(format_seconds, (found.round_trip_asked_s, found.round_trip_s, found.round_trip_slowest_s))
    return [*rows, ("round trip of one byte", *trips, "")] if rows else []


def as_json(emulation: Emulation, found: LinkMeasurement | None) -> Json:
    """Rates in bytes/s, times in seconds."""
    t: Topology = emulation.topology
    return {
        "name": emulation.name,
        **values_of(t, "nodes", "ranks_per_node", "rate"),
        "delay_s": t.delay,
        **values_of(t, "oversubscription", "nodes_per_switch"),
        "uplink": t.uplink if t.oversubscription > 1 else None,
        "links": emulation.links,
        "addresses": [address(node) for node in range(t.nodes)],
        "measured": None if found is None else found.as_dict(),
        "notes": notes(emulation, found),
    }
