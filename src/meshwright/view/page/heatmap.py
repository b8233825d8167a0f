"""The tp × pp heat map: the fastest plan of every pair of degrees, and the reason where there is none.

The map is that of `planner.search.cells`; the complete one also takes in the leaders of the full search, so that its fastest cell holds the
plan that `meshwright plan` prints.
"""

from meshwright.planner.search.cells import MEMORY, Cell
from meshwright.planner.search.strategies import Candidate
from meshwright.predict.prediction import samples_per_step
from meshwright.units import Json, format_bytes, format_seconds
from meshwright.view.page.subject import Subject

# The words of an infeasible cell, by the code of the rule it breaks.
LABELS = {
    MEMORY: "memory", "GPUs": "GPUs", "constraint": "fixed", "MW-PLAN-004": "heads", "MW-PLAN-005": "GPUs", "MW-PLAN-006": "layers",
    "MW-PLAN-008": "batch", "MW-PLAN-009": "batch",
}  # fmt: skip


def data(subject: Subject) -> Json:
    """The cells of the map, with the cell of this plan and of the fastest plan."""
    cells = subject.shared.map.first if subject.is_provisional else subject.shared.map.complete
    if not subject.is_provisional and subject.shared.feasible:
        cells = with_leaders(cells, subject.result.ranking.leaders)
    fitting = [cell for cell in cells if cell.fits and cell.best is not None]
    best = min(fitting, key=lambda cell: cell.best.time if cell.best else 0.0, default=None)
    tokens = samples_per_step(subject.config)
    return {
        "tp": sorted({cell.tp for cell in cells}),
        "pp": sorted({cell.pp for cell in cells}),
        "unit": subject.model.unit,
        "cells": [as_dict(cell, best, tokens, subject.model.unit) for cell in cells],
        "mine": {"tp": subject.plan.tp, "pp": subject.plan.pp},
        "best": {"tp": best.tp, "pp": best.pp} if best else None,
        "reasons": sorted({label(cell) for cell in cells if not cell.fits}),
        "note": note(best, cells) + (" First plans; the search goes on." if subject.is_provisional else ""),
    }


def with_leaders(cells: list[Cell], leaders: list[Candidate]) -> list[Cell]:
    """The map with the plans of the full search where they are faster than the common plan of their cell."""
    fastest: dict[tuple[int, int], Candidate] = {}
    for one in sorted(leaders, key=lambda c: c.time):
        fastest.setdefault((one.plan.tp, one.plan.pp), one)
    return [better(cell, fastest.get((cell.tp, cell.pp))) for cell in cells]


def better(cell: Cell, other: Candidate | None) -> Cell:
    if other is None or (cell.fits and cell.best is not None and cell.best.time <= other.time):
        return cell
    return Cell(cell.tp, cell.pp, other, True)


def as_dict(cell: Cell, best: Cell | None, tokens: float, unit: str) -> Json:
    out: Json = {"tp": cell.tp, "pp": cell.pp, "fits": cell.fits, "label": label(cell), "reason": cell.reason}
    if (one := cell.best) is None:
        return out | {"plan": None, "step_time_s": None, "tokens_per_s": None, "formula": cell.reason}
    words = cell.reason
    if cell.fits and best is not None and best.best is not None:
        rate = f"{tokens:,.0f} {unit} / {format_seconds(one.time)} = {tokens / one.time:,.0f} {unit}/s"
        words = f"{rate}; {one.time / best.best.time:.2f}× the fastest step"
    words = f"tp {cell.tp} × pp {cell.pp}: {one.plan.title()}\n{words}\n{format_bytes(one.memory)} on the fullest GPU"
    return out | {
        "plan": one.plan.as_dict(),
        "step_time_s": one.time,
        "tokens_per_s": tokens / one.time,
        "formula": words,
    }


def label(cell: Cell) -> str:
    """One word for a cell: empty where a plan fits."""
    return "" if cell.fits else LABELS.get(cell.code, "illegal")


def note(best: Cell | None, cells: list[Cell]) -> str:
    if best is None or best.best is None:
        return "No pair of degrees has a plan that fits."
    count = sum(cell.fits for cell in cells)
    return f"Fastest: tp {best.tp}, pp {best.pp}, {format_seconds(best.best.time)} per step. {count} of {len(cells)} pairs have a plan that fits."
