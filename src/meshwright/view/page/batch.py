"""Efficiency against the batch: MFU of this plan for other batches, and the critical batch from which data-parallel communication is hidden."""

from functools import partial

from meshwright.describe.legality import batch_unit
from meshwright.describe.result import values_of
from meshwright.planner.advice.alternatives import PlanTrials
from meshwright.predict.estimate import Estimate
from meshwright.units import Json, format_seconds
from meshwright.view.page.subject import Subject

FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
REACH = 8  # times the given batch
FEW = 6  # batches of the provisional view


def data(subject: Subject) -> Json:
    """MFU, throughput and step time by batch."""
    e = subject.estimate
    unit = batch_unit(e.plan, e.stack)
    critical = e.critical_batch
    sizes = [unit * k for k in FACTORS if unit * k <= REACH * max(e.workload.batch, critical.sequences or 0)]
    sizes = sorted({*thinned(sizes, FEW if subject.is_provisional else len(FACTORS)), e.workload.batch})
    found = [subject.shared.once(("batch", batch), partial(at_batch, e, batch)) for batch in sizes]
    rows = [row for row in found if row is not None]
    return {
        "batch": e.workload.batch,
        "unit": unit,
        "seq": e.workload.seq if e.model.unit == "tokens" else None,
        "critical": critical.sequences,
        "critical_reason": critical.reason,
        "rows": rows,
        "note": note(e, rows),
    }


def thinned(values: list[int], count: int) -> list[int]:
    """At most `count` of the values, evenly, with the first and the last."""
    if len(values) <= count:
        return values
    return [values[round(k * (len(values) - 1) / (count - 1))] for k in range(count)]


def at_batch(e: Estimate, batch: int) -> Json | None:
    """The plan with another batch; None where it is not legal."""
    other = PlanTrials(e.config).with_changes(e.plan, workload=e.workload.but(batch=batch))
    if other is None:
        return None
    p, m = other.prediction, other.plan.microbatches(other.workload)
    exposed = sum(p.exposed_s.get(part, 0.0) for part in ("dp", "bubble"))
    return {
        "batch": batch,
        "microbatches": m,
        **values_of(p, "step_time_s", "mfu", "tokens_per_s"),
        "lost_share": exposed / p.step_time_s,
        "formula": f"batch {batch:,} = micro-batch {other.plan.microbatch} × {m} × dp {other.plan.dp}: {format_seconds(p.step_time_s)} per step, "
        f"MFU {p.mfu or 0:.1%}; {exposed / p.step_time_s:.1%} of the step is bubble and exposed gradient reduction",
    }


def note(e: Estimate, rows: list[Json]) -> str:
    best = max(rows, key=lambda row: row["mfu"] or 0.0)
    now = next((row for row in rows if row["batch"] == e.workload.batch), best)
    gain = (best["mfu"] or 0.0) / (now["mfu"] or 1.0) - 1
    words = f"Critical batch: {e.critical_batch.reason}."
    return f"{words} A batch of {best['batch']:,} would raise MFU by {gain:.0%}." if gain > 0.01 else words
