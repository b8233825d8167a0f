"""The page of `explain`: what is in the traces, and where their steps went."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.explain.trace import RankTrace
from meshwright.units import Json
from meshwright.view.tables import filled


def page(traces: Sequence[RankTrace]) -> RenderableType:
    rows = [(str(t.rank), t.file, f"{len(t.events):,}") for t in traces]
    notes = [Text(f"rank {t.rank}: {note}", "yellow") for t in traces for note in t.notes]
    return Group(filled((">rank", "file", ">events"), rows), *notes)


def as_dict(traces: Sequence[RankTrace]) -> Json:
    return {
        "traces": [
            {"rank": t.rank, "world": t.world, "file": t.file, "events": len(t.events), "notes": list(t.notes)}
            for t in traces
        ]
    }
