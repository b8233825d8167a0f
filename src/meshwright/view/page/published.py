"""Predictions against published training runs, with the error of each source: the case studies of the planner, those of this model first,
and the well-known runs of `meshwright validate --headline`, those of this model and accelerator first.

The published figures do not depend on the plan. `plan` has the prediction of this plan in the units of the runs, to place it among them."""

from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.calibrate.runs.rows import read
from meshwright.calibrate.runs.validate import Outcome, predict_rows
from meshwright.describe.model import Model
from meshwright.describe.result import values_of
from meshwright.planner.cases import studies
from meshwright.units import format_count, format_seconds
from meshwright.view.page.subject import Subject

COMPARED = ("step_s", "tokens_per_s_per_gpu", "mfu", "hfu", "days", "gpu_hours")  # figures that depend on the step time


def data(subject: Subject) -> dict[str, Any]:
    """Every published figure with our estimate and its band."""
    name = subject.model.name
    rows = [{**row, "this_model": row["model"] == name} for row in all_rows()]
    rows.sort(key=lambda row: not row["this_model"])
    mine = [row for row in rows if row["this_model"]]
    runs = near_runs(subject.model, subject.cluster.accelerator.name)
    sources = by_source([*rows, *runs])
    return {
        "model": name,
        "accelerator": subject.cluster.accelerator.name,
        "rows": rows,
        "runs": runs,
        "plan": plan_figures(subject),
        "sources": sources,
        "matches": len(mine),
        "note": note(name, mine, sources),
    }


def plan_figures(subject: Subject) -> dict[str, Any]:
    """Return the prediction for this plan per GPU, in the quantities of published runs."""
    p = subject.estimate.prediction
    return {
        "title": subject.plan.title(),
        "step_time_s": p.step_time_s,
        "low_s": p.step_time_low_s,
        "high_s": p.step_time_high_s,
        "unit": subject.model.unit,
        "tokens_per_s_per_gpu": (p.tokens_per_s or 0.0) / subject.plan.world,
    }


def near_runs(model: Model, accelerator: str) -> list[dict[str, Any]]:
    """The well-known runs: first those of this model on this accelerator, then of this accelerator, then of this model, then the others."""
    names = {(True, True): "model and GPU", (False, True): "GPU", (True, False): "model"}
    likes = (names.get((run["shape"] == shape(model), run["accelerator"] == accelerator), "") for run in all_runs())
    out = [{**run, "like": like} for run, like in zip(all_runs(), likes, strict=True)]
    return sorted(out, key=lambda run: [*names.values(), ""].index(run["like"]))


def shape(model: Model) -> list[int]:
    """Models of one shape are the same model here: sources write their names in different ways."""
    return [model.layers, model.hidden, model.experts]


@cache
def all_runs() -> tuple[dict[str, Any], ...]:
    """The runs of `headline.csv` that can be predicted, each with its measurement. They do not depend on what the page shows."""
    path = files("meshwright.calibrate.runs").joinpath("headline.csv")
    return tuple(run_row(o) for o in predict_rows(read(str(path))) if o.error is not None)


def run_row(o: Outcome) -> dict[str, Any]:
    c, p, measured = o.case, o.prediction, o.case.step_time
    assert p
    assert measured
    ratio = p.step_time_s / measured
    times = f"predicted {format_seconds(p.step_time_s)} / measured {format_seconds(measured)} = {ratio:.2f}"
    return {
        "run": c.row_id,
        "model": c.model.name,
        "shape": shape(c.model),
        "accelerator": c.cluster.accelerator.name,
        "gpus": c.cluster.world,
        "plan": c.plan.title(),
        "measured_s": measured,
        "predicted_s": p.step_time_s,
        "low_s": p.step_time_low_s,
        "high_s": p.step_time_high_s,
        "tokens_per_s_per_gpu": c.workload.tokens_per_step / measured / c.cluster.world,
        "ratio": ratio,
        "within": p.step_time_low_s <= measured <= p.step_time_high_s,
        "source": c.row["source"],
        "formula": f"{c.row_id}: {times}; assumed: {', '.join(c.assumed) or 'nothing'}. Source: {c.row['source']}",
    }


@cache
def all_rows() -> tuple[dict[str, Any], ...]:
    """The figures of all cases. They do not depend on what the page shows, so they are computed once."""
    out = []
    for name in studies.CASES:
        study = studies.evaluate(name)
        for row in study.rows:
            if row.what not in COMPARED:
                continue
            ours, theirs = (format_count(x) if x >= 1000 else f"{x:.3g}" for x in (row.ours, row.published))
            out.append(
                {
                    "case": name,
                    "title": study.case.title,
                    "model": study.case.config.model.name,
                    "by": study.case.by,
                    **values_of(row, "what", "unit", "published", "ours", "low", "high", "ratio", "within", "source"),
                    "formula": f"{study.case.title}: predicted {ours} / published {theirs} {row.unit} = {row.ratio:.2f}; "
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
            "figures": len(some),
            "error": sum(map(abs, some)) / len(some),
            "bias": sum(some) / len(some),
        }
        for source, some in errors.items()
    ]


def note(name: str, mine: list[dict[str, Any]], sources: list[dict[str, Any]]) -> str:
    mean = sum(row["error"] for row in sources) / len(sources)
    if not mine:
        over = f"over {len(sources)} sources the predictions are off by {mean:.0%} on average"
        return f"No case study is of {name}; {over}."
    error = sum(abs(row["ratio"] - 1) for row in mine) / len(mine)
    return f"{len(mine)} published figures of {name}: predictions are off by {error:.0%} on average ({mean:.0%} over all sources)."
