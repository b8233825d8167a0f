"""Efficiency against the batch: MFU of this plan for other batches, and the critical batch from which data-parallel communication is hidden."""

from functools import partial

from meshwright.describe.legality import batch_unit
from meshwright.planner.advice.alternatives import PlanTrials
from meshwright.predict.estimate import Estimate
from meshwright.units import format_seconds
from meshwright.view.page.sheet import Part, panel, part, stats, view
from meshwright.view.page.subject import Subject

FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
REACH = 8  # times the given batch
FEW = 6  # batches of the provisional view
LOST = "share lost to bubble and exposed gradients"


def data(subject: Subject) -> Part:
    """MFU and the lost share by batch, with the critical batch."""
    e, batch, critical = subject.estimate, subject.estimate.workload.batch, subject.estimate.critical_batch
    unit, enough = batch_unit(e.plan, e.stack), critical.sequences or 0
    sizes = [unit * k for k in FACTORS if unit * k <= REACH * max(batch, enough)]
    sizes = thinned(sizes, FEW if subject.is_provisional else len(sizes))
    found = {size: subject.shared.once(("batch", size), partial(at_batch, e, size)) for size in sorted({*sizes, batch})}
    rows = {size: row for size, row in found.items() if row}
    mfu, lost, formula = rows.get(batch, (0.0, 0.0, ""))
    words, each = note(e, rows), f"sequences of {e.workload.seq:,} tokens" if e.model.unit == "tokens" else "samples"
    tone = {"detail": "samples", "tone": "warn" if batch < enough else ""} if enough else {}
    return view(
        stats(("This batch", batch, "whole", {"detail": each}),
              ("MFU", mfu, "share", {"formula": formula, "detail": f"{lost:.1%} bubble and gradients"}),
              ("Critical batch", enough or "none", "whole", {"formula": critical.reason, **tone})),
        panel("MFU by batch", words),
        part("curves", label=words, height=320, x={"log": 2, "label": "batch, samples", "unit": "whole"},
             y={"from": 0, "label": "MFU and share of the step", "unit": "percent"},
             marks=[{"at": enough, "words": f"critical batch {enough:,}", "colour": "bad"}] * bool(enough)
                   + [{"at": batch, "words": f"this batch {batch:,}"}],
             series=[{"name": "MFU", "points": [[size, y, tip] for size, (y, _, tip) in rows.items()], "colour": "compute"},
                     {"name": LOST, "points": [[size, y, tip] for size, (_, y, tip) in rows.items()], "colour": "tp", "dash": "5 4"}]),
    )  # fmt: skip


def thinned(values: list[int], count: int) -> list[int]:
    """At most `count` of the values, evenly, with the first and the last."""
    if len(values) <= count:
        return values
    return [values[round(k * (len(values) - 1) / (count - 1))] for k in range(count)]


def at_batch(e: Estimate, batch: int) -> tuple[float, float, str] | None:
    """MFU, the share of bubble and exposed gradients, and both in words, of the plan with another batch; None where it is not legal."""
    other = PlanTrials(e.config).with_changes(e.plan, workload=e.workload.but(batch=batch))
    if other is None:
        return None
    p, m = other.prediction, other.plan.microbatches(other.workload)
    lost = sum(p.exposed_s.get(part, 0.0) for part in ("dp", "bubble")) / p.step_time_s
    size = f"batch {batch:,} = micro-batch {other.plan.microbatch} × {m} × dp {other.plan.dp}"
    share = f"{lost:.1%} of the step is bubble and exposed gradient reduction"
    return p.mfu or 0.0, lost, f"{size}: {format_seconds(p.step_time_s)} per step, MFU {p.mfu or 0:.1%}; {share}"


def note(e: Estimate, rows: dict[int, tuple[float, float, str]]) -> str:
    best = max(rows, key=lambda size: rows[size][0])
    gain = rows[best][0] / (rows.get(e.workload.batch, rows[best])[0] or 1.0) - 1
    words = f"Critical batch: {e.critical_batch.reason}."
    return f"{words} A batch of {best:,} would raise MFU by {gain:.0%}." if gain > 0.01 else words
