"""Predictions against published training runs: the case studies of the planner, those of this model first, with the error of each source."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.planner.cases import studies
from meshwright.units import format_count
from meshwright.view.page.subject import Subject

COMPARED = ("step_s", "tokens_per_s_per_gpu", "mfu", "hfu", "days", "gpu_hours")  # figures that depend on the step time


def data(subject: Subject) -> dict[str, Any]:
    """Every published figure with our estimate and its band."""
    name = subject.model.name
    rows = [{**row, "this_model": row["model"] == name} for row in all_rows()]
    rows.sort(key=lambda row: not row["this_model"])
    mine = [row for row in rows if row["this_model"]]
    sources = by_source(rows)
    return {"model": name, "rows": rows, "sources": sources, "matches": len(mine), "note": note(name, mine, sources)}


@cache
def all_rows() -> tuple[dict[str, Any], ...]:
    """The figures of all cases. They do not depend on what the page shows, so they are computed once."""
    out = []
    for name in studies.CASES:
        found = studies.evaluate(name)
        for row in found.rows:
            if row.what not in COMPARED:
                continue
            ours, theirs = (format_count(x) if x >= 1000 else f"{x:.3g}" for x in (row.ours, row.published))
            out.append(
                {
                    "case": name,
                    "title": found.case.title,
                    "model": found.case.config.model.name,
                    "by": found.case.by,
                    "what": row.what,
                    "unit": row.unit,
                    "published": row.published,
                    "ours": row.ours,
                    "low": row.low,
                    "high": row.high,
                    "ratio": row.ratio,
                    "within": row.within,
                    "source": row.source,
                    "formula": f"{found.case.title}: predicted {ours} / published {theirs} {row.unit} = {row.ratio:.2f}; "
                    f"{'inside' if row.within else 'outside'} the band. Source: {row.source}",
                }
            )
    return tuple(out)


def by_source(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean absolute error of every source."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["source"], []).append(row["ratio"] - 1)
    return [
        {
            "source": source,
            "figures": len(found),
            "error": sum(map(abs, found)) / len(found),
            "bias": sum(found) / len(found),
        }
        for source, found in errors.items()
    ]


def note(name: str, mine: list[dict[str, Any]], sources: list[dict[str, Any]]) -> str:
    mean = sum(row["error"] for row in sources) / len(sources)
    if not mine:
        return f"No run of {name} is published with its plan; over {len(sources)} sources the predictions are off by {mean:.0%} on average."
    error = sum(abs(row["ratio"] - 1) for row in mine) / len(mine)
    return f"{len(mine)} published figures of {name}: predictions are off by {error:.0%} on average ({mean:.0%} over all sources)."
