"""Predictions against published training runs: those of `meshwright validate --headline`, those of this model and accelerator first.

The published figures do not depend on the plan; its own prediction per GPU stands above them."""

from functools import cache
from importlib.resources import files

from meshwright.calibrate.runs.rows import read
from meshwright.calibrate.runs.validate import Outcome, predict_rows
from meshwright.describe.model import Model
from meshwright.units import format_count, format_seconds
from meshwright.view.page.sheet import Part, panel, row, stats, table, view
from meshwright.view.page.subject import Subject

LIKE = {(True, True): "model and GPU", (False, True): "GPU", (True, False): "model", (False, False): ""}
COLUMNS = "run, shares, GPUs|whole, GPU, measured|s, predicted|s, band, error|change, tokens/s per GPU|count, source"
NEAR = "{} of them share the model or the GPU ({}, {}) and come first."
WORDS = "Measured step times of published runs, and what we predict for them. The predictions of {} published runs are off by {:.0%} on average. {}"


def data(subject: Subject) -> Part:
    """Every published run with our estimate and its band, and the prediction for this plan per GPU."""
    p, runs, of = (
        subject.estimate.prediction,
        near_runs(subject),
        (subject.model.name, subject.cluster.accelerator.name),
    )
    near, mean = sum(like != "" for _, like in runs), sum(abs(o.error or 0) for o, _ in runs) / len(runs)
    like = (NEAR if near else "None of them is of {1} or on {2}.").format(near, *of)
    rate = f"{format_count((p.tokens_per_s or 0.0) / subject.plan.world)} {subject.model.unit}/s per GPU"
    step, low, high = map(format_seconds, (p.step_time_s, p.step_time_low_s, p.step_time_high_s))
    return view(
        panel("Well-known runs and this plan", WORDS.format(len(runs), mean, like)),
        stats(("This plan", rate, "", {"detail": f"predicted: step {step}, {low} to {high}", "formula": subject.plan.title()})),
        table("Step time of well-known runs, measured and predicted", COLUMNS, (run_row(*run) for run in runs)),
    )  # fmt: skip


def near_runs(subject: Subject) -> list[tuple[Outcome, str]]:
    """The well-known runs, and what each shares with this one: first those of this model on this accelerator, then of one of both."""
    mine = shape(subject.model), subject.cluster.accelerator
    likes = [LIKE[shape(o.case.model) == mine[0], o.case.cluster.accelerator.name == mine[1].name] for o in all_runs()]
    return sorted(zip(all_runs(), likes, strict=True), key=lambda run: [*LIKE.values()].index(run[1]))


def shape(model: Model) -> list[int]:
    """Models of one shape are the same model here: sources write their names in different ways."""
    return [model.layers, model.hidden, model.experts]


@cache
def all_runs() -> tuple[Outcome, ...]:
    """The runs of `headline.csv` that can be predicted, each with its measurement. They do not depend on what the page shows."""
    path = files("meshwright.calibrate.runs").joinpath("headline.csv")
    return tuple(o for o in predict_rows(read(str(path))) if o.error is not None)


def run_row(o: Outcome, like: str) -> Part:
    """The row of a run; `like`: what it shares with the plan."""
    c, p = o.case, o.prediction
    assert p
    assert c.step_time
    band = f"{format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)}"
    missed = "" if p.step_time_low_s <= c.step_time <= p.step_time_high_s else " (missed)"
    where = c.cluster.world, c.cluster.accelerator.name
    rate = c.workload.tokens_per_step / c.step_time / c.cluster.world
    predicted = [p.step_time_s, described(o)]
    return row([c.row_id, c.plan.title()], like or "–", *where, c.step_time, predicted, band + missed, o.error, rate, c.row["source"],
               chosen=like != "")  # fmt: skip


def described(o: Outcome) -> str:
    """A prediction and its measurement in words, with what was assumed and where the run was published."""
    c, p = o.case, o.prediction
    assert p
    assert c.step_time
    times = f"predicted {format_seconds(p.step_time_s)} / measured {format_seconds(c.step_time)} = {p.step_time_s / c.step_time:.2f}"
    return f"{c.row_id}: {times}; assumed: {', '.join(c.assumed) or 'nothing'}. Source: {c.row['source']}"
