"""Between the stages: the bandwidth that a pipeline needs, and the best number of chunks of the gradient reduction.

bandwidth   activation bytes sent forward and backward per micro-batch / compute time of a stage       (`cost.advice`)
chunks      T(k) = k·o + t/k is smallest at k* = √(t/o): o one more call, t the reduction of all gradients
"""

from typing import Any

from meshwright.cost import advice
from meshwright.lower.program import scalar
from meshwright.predict.estimate import Estimate
from meshwright.units import format_decimal_bytes, format_rate, format_seconds
from meshwright.view.page.subject import Subject

REDUCTIONS = ("reduce-gradients",)
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def data(subject: Subject) -> dict[str, Any]:
    """Needed and available bandwidth by stage, and the curve of chunk counts."""
    e = subject.estimate
    return {"bandwidth": bandwidth(e), "chunks": chunks(e), "note": note(e)}


def bandwidth(e: Estimate) -> dict[str, Any] | None:
    """Return the bandwidth that each stage needs to its neighbour; None without a pipeline."""
    sends = e.program.sync.get("boundary-F", [])
    if e.plan.pp == 1 or not sends:
        return None
    size = scalar(sends[0].message_bytes)
    place = next((m for m in e.messages if m.axis == "pp" and m.operation == "point-to-point"), None)
    level = place.level if place else len(e.cluster.levels) - 1
    available = e.cluster.device_bandwidth(level)
    rows: list[dict[str, Any]] = []
    for stage, times in enumerate(e.walked.stages):
        seconds = scalar(times.total)
        needed = advice.minimum_stage_bandwidth(size, seconds)
        words = f"stage {stage}: 2 × {format_decimal_bytes(size)} / {format_seconds(seconds)} = {format_rate(needed)} ({needed * 8 / 1e9:.2f} Gb/s)"
        rows.append({"stage": stage, "compute_s": seconds, "needed": needed, "formula": words})
    most = max(row["needed"] for row in rows)
    link = {"message_bytes": size, "level": e.cluster.levels[level].name, "available": available}
    return {**link, "rows": rows, "most_needed": most}


def chunks(e: Estimate) -> dict[str, Any] | None:
    """The curve T(k) of the gradient reduction in k messages, and the number of messages of this plan; None without one."""
    reductions = [m for m in e.messages if m.axis == "dp" and m.name in REDUCTIONS]
    if not reductions:
        return None
    one = reductions[0]
    total = sum(m.count * m.size for m in reductions)
    start = e.cluster.collectives.call_across if one.level > 0 else e.cluster.collectives.call
    overhead = start + e.cluster.levels[one.level].link.library_hop
    exposed = max(sum(m.count * (m.seconds - overhead) for m in reductions), 0.0)
    best = advice.optimal_chunks(exposed, overhead)
    now = max(1, round(sum(m.count for m in reductions)))
    counts = sorted({*(k for k in COUNTS if k <= max(4 * best, 4 * now)), best, now})
    return {
        "total_bytes": total,
        "transfer_s": exposed,
        "overhead_s": overhead,
        "best": best,
        "now": now,
        "bucket_bytes": e.plan.bucket,
        "curve": [[k, advice.chunked_time(k, exposed, overhead)] for k in counts],
        "formula": f"k* = √(t/o) = √({format_seconds(exposed)} / {format_seconds(overhead)}) ≈ {best}: {best} messages of "
        f"{format_decimal_bytes(total / best)}; this plan sends {now} of {format_decimal_bytes(total / now)}",
    }


def note(e: Estimate) -> str:
    rate = bandwidth(e)
    if rate is None:
        return "This plan has no pipeline, so no stage waits for another."
    needed, available = rate["most_needed"], rate["available"]
    words = "enough" if available >= needed else "too little"
    return f"The busiest boundary needs {needed * 8 / 1e9:.1f} Gb/s; {rate['level']} links give a device {available * 8 / 1e9:.0f} Gb/s: {words}."
