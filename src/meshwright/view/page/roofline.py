"""The communication roofline: what one device can send through each level of links, and what this plan's collectives reach of it.

A call that sends s bytes through a level in t seconds reaches s/t. The ceiling of a level is the bandwidth of one device there; for small messages
the latency is the limit: s/(α + s·β) is half the ceiling at s* = α/β. Each collective is compared with the level that its group crosses.
The second figure is the roofline of the whole step (`cost.roofline`): FLOPs per byte sent through a level, and the share of the peak it allows.
"""

from typing import Any

from meshwright.calibrate.points import bus_factor
from meshwright.cost.link import crossover, message_time
from meshwright.cost.step import Message
from meshwright.describe.result import values_of
from meshwright.predict.estimate import Estimate
from meshwright.units import format_decimal_bytes, format_flops, format_rate, format_seconds
from meshwright.view.page.subject import Subject

SIZES = [10.0 ** (k / 4) for k in range(4, 43)]  # bytes of the curves: 10 B to 30 GB


def data(subject: Subject) -> dict[str, Any]:
    """Levels with their curves, the plan's collectives as points, measured points, and the roofline of the step."""
    e = subject.estimate
    roof, levels = e.roofline, [level(e, k) for k in range(len(e.cluster.levels))]
    step = {"level": roof.level, "regime": roof.regime, "advice": list(roof.advice)}
    return {
        "levels": levels,
        "points": [point(e, m) for m in e.messages],
        "measured": measured(e),
        "calibrated": e.cluster.source,
        "step": step | {"ceilings": [ceiling(c.as_dict(), e) for c in roof.ceilings]},
        "note": note(e),
    }


def level(e: Estimate, k: int) -> dict[str, Any]:
    """A level: its ceiling, its latency and the curve between them."""
    link, bandwidth = e.cluster.levels[k].link, e.cluster.device_bandwidth(k)
    alpha, least = link.library_hop, crossover(link.library_hop, 1 / bandwidth)
    return {
        "name": e.cluster.levels[k].name,
        "bandwidth": bandwidth,
        "crossover_bytes": least,
        "curve": [[n, n / message_time(n, alpha, 1 / bandwidth)] for n in SIZES],
        "formula": f"{e.cluster.levels[k].name}: ceiling {format_rate(bandwidth)} per device; s* = α·B = {format_seconds(alpha)} × "
        f"{format_rate(bandwidth)} = {format_decimal_bytes(least)}: smaller messages are bound by latency",
    }


def point(e: Estimate, m: Message) -> dict[str, Any]:
    """One collective: what it sends through its level, how fast, and its share of the ceiling."""
    ceiling, step = e.cluster.device_bandwidth(m.level), m.count * m.seconds
    sizes = {
        "buffer_bytes": m.size,
        "sent_bytes": m.sent,
        "step_seconds": step,
        "rate": m.rate,
        "share": m.rate / ceiling,
    }
    words = (
        f"{m.name} ({m.axis}): {m.operation} of {format_decimal_bytes(m.size)} over {m.ranks} ranks, {m.algorithm}\n"
        f"{format_decimal_bytes(m.sent)} through {e.cluster.levels[m.level].name} / {format_seconds(m.seconds)} = {format_rate(m.rate)}, "
        f"{m.rate / ceiling:.0%} of {format_rate(ceiling)}\n{m.count:,.0f} calls per step = {format_seconds(step)}"
    )
    return values_of(m, "name", "axis", "operation", "algorithm", "ranks", "level") | sizes | {"formula": words}


def measured(e: Estimate) -> list[dict[str, Any]]:
    """Bench points that the calibration of the cluster keeps, by bus bandwidth."""
    out = []
    for p in e.cluster.measured:
        sent = bus_factor(p.operation, p.ranks) * p.bytes
        words = f"measured: {p.operation} of {format_decimal_bytes(p.bytes)} over {p.ranks} ranks in {format_seconds(p.seconds)}"
        level, rate = e.cluster.level_between(0, min(p.ranks, e.cluster.world) - 1), sent / p.seconds
        row = {**values_of(p, "operation", "ranks"), "level": level, "sent_bytes": sent, "rate": rate}
        out.append(row | {"formula": f"{words}: {format_decimal_bytes(sent)} sent by a rank = {format_rate(rate)}"})
    return out


def ceiling(c: dict[str, Any], e: Estimate) -> dict[str, Any]:
    peak = e.cluster.accelerator.peak_for(e.workload.precision)
    if not c["bytes"]:
        return {**c, "formula": f"{c['level']}: no traffic"}
    return {
        **c,
        "formula": f"{c['level']}: CCR = FLOPs per device / bytes sent = {c['ccr']:,.0f}; ridge = {format_flops(peak)} / "
        f"{format_rate(c['bandwidth'])} = {c['ridge']:,.0f}; allows min(1, {c['ccr']:,.0f} / {c['ridge']:,.0f}) = {c['efficiency']:.0%} of the peak",
    }


def note(e: Estimate) -> str:
    if not e.messages:
        return "This plan has one GPU: nothing is sent."
    longest = e.messages[0]
    where = e.cluster.levels[longest.level].name
    return (
        f"{longest.operation} of {longest.name} takes longest: {format_seconds(longest.count * longest.seconds)} per step through {where}, at "
        f"{longest.rate / e.cluster.device_bandwidth(longest.level):.0%} of its ceiling."
    )
