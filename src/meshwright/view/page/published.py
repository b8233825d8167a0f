"""Predictions against published training runs: those of `meshwright validate --headline`, those of this model and accelerator first.

The published figures do not depend on the plan. `plan` has the prediction of this plan in the units of the runs, to place it among them."""

from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.calibrate.runs.rows import read
from meshwright.calibrate.runs.validate import Outcome, predict_rows
from meshwright.describe.model import Model
from meshwright.units import format_seconds
from meshwright.view.page.subject import Subject


def data(subject: Subject) -> dict[str, Any]:
    """Every published run with our estimate and its band."""
    name, accelerator = subject.model.name, subject.cluster.accelerator.name
    runs = near_runs(subject.model, accelerator)
    return {"model": name, "accelerator": accelerator, "runs": runs, "plan": plan_figures(subject), "note": note(runs)}


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


def note(runs: list[dict[str, Any]]) -> str:
    mean = sum(abs(run["ratio"] - 1) for run in runs) / len(runs)
    return f"The predictions of {len(runs)} published runs are off by {mean:.0%} on average."
