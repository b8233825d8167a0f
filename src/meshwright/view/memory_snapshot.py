"""A memory snapshot in the terminal: what the device held at its peak, by category and line, beside the prediction."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.describe.result import GIB, Prediction
from meshwright.explain.memory_snapshot import MemoryReport
from meshwright.units import format_bytes
from meshwright.view.tables import filled, heading

SHOWN = 12  # lines
PREDICTED = {"working": ("working", "gathered")}  # parts of a prediction that one category holds


def page(reports: Sequence[MemoryReport], prediction: Prediction | None = None) -> RenderableType:
    return Group(*(part for report in reports for part in parts(report, prediction)))


def predicted_gib(report: MemoryReport, prediction: Prediction) -> dict[str, float]:
    """The prediction of the fullest stage by category of a report, in GiB."""
    fullest = prediction.memory_by_stage[prediction.fullest_stage]
    return {name: sum(fullest.get(part, 0.0) for part in PREDICTED.get(name, (name,))) for name in report.by_category}


def parts(report: MemoryReport, prediction: Prediction | None) -> list[RenderableType]:
    title = {"peak": "peak", "out of memory": "when memory ran out", "snapshot": "when the snapshot was written"}[
        report.moment
    ]
    about = f"{title}: {format_bytes(report.allocated)} allocated of {format_bytes(report.reserved)} reserved"
    out: list[RenderableType] = [heading(f"device {report.device}", about)]
    if report.asked:
        free, largest = format_bytes(report.reserved - report.allocated), format_bytes(report.largest_free)
        why = f"{free} were reserved and free, at the end in blocks of up to {largest}"
        out.append(Text(f"{format_bytes(report.asked)} could not be allocated; {why}", "bold red"))
    beside_it = predicted_gib(report, prediction) if prediction else {}
    columns = ("category", ">bytes", ">of reserved") + ((">predicted",) if prediction else ())
    rows = []
    for name, size in report.by_category.items():
        predicted = beside_it.get(name, 0.0) * GIB
        beside = (format_bytes(predicted) if predicted else "",) if prediction else ()
        rows.append((name, format_bytes(size), f"{size / max(report.reserved, 1):.0%}", *beside))
    out.append(filled(columns, rows))
    lines = [(p.category, format_bytes(p.bytes), p.blocks, p.place) for p in report.places[:SHOWN] if p.place]
    if lines:
        out.append(filled(("category", ">bytes", ">blocks", "~allocated at"), lines))
    return out + [Text(note, "yellow") for note in report.notes]
