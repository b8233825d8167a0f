"""The accuracy of predictions in the terminal and as an HTML file: by source, of sources left out of the fit, of well-known runs; fitted numbers."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.calibrate.runs.accuracy import Accuracy, Band
from meshwright.calibrate.runs.left_out import SEEN, LeftOut, SourceScore, half_of, halves, macro_scores
from meshwright.calibrate.runs.stack_fit import NUMBERS, StackFit, fields_of
from meshwright.calibrate.runs.validate import Outcome, Score, by, macro, score
from meshwright.cost.band import base, shares
from meshwright.describe.stack import Stack
from meshwright.units import format_seconds
from meshwright.view.page.sheet import Part, chart, grid, panel, part, parts_of, piece, sheet
from meshwright.view.tables import titled

MOST_REASONS = 12  # that are shown
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
SHARES = (("10 to 25% of the runs", "hidden"), ("25 to 50%", "compute"), ("50 to 75%", "pp"), ("75 to 90%", "hidden"))
REACH, TICKS = (0.4, 2.0), [0.5, 0.67, 0.8, 1, 1.25, 1.5, 2]  # of a chart of quantiles


def percent(value: float | None, signed: bool = False) -> str:
    """A percentage; "–" if there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


def bold(cells: list[str]) -> list[str]:
    return [f"[bold]{cell}[/]" for cell in cells]


def page(accuracy: Accuracy, columns: list[str], title: str) -> list[RenderableType]:
    """Everything that `validate` prints: the runs with the catalog's numbers, sources left out, failed runs, well-known runs."""
    parts: list[RenderableType] = []
    if accuracy.outcomes:
        scores = accuracy.sources
        if columns != ["source"]:
            scores = {n: score(p) for n, p in by(accuracy.outcomes, columns).items()}
        parts += [table(scores, accuracy.overall, title), refusals(accuracy.outcomes)]
    if accuracy.unseen:
        parts += ["", unseen_table(accuracy.unseen, accuracy.unseen_overall), "", bands_table(accuracy.bands)]
        if accuracy.unnamed is None:
            parts.append(Text("typical (a stack that is not in the catalog): with --json, --html or --markdown", "dim"))
    if accuracy.beside:
        parts += [
            "",
            titled("Mean error of step time beside other tools, on the same runs", PEER_COLUMNS, peer_rows(accuracy)),
        ]
    if "recall_failed" in accuracy.overall:
        parts += [
            "",
            f"{100 * accuracy.overall['recall_failed']:.0f}% of {len(accuracy.failed)} failed runs are predicted not to fit in memory "
            "(the failed runs include crashes for other reasons)",
        ]
    if accuracy.headlines:
        parts.append(headline_table(accuracy.headlines))
    return parts


def table(scores: dict[str, Score], overall: dict[str, float], title: str = "source") -> Table:
    """The errors of the runs of each source, and the mean over sources."""

    def cells(s: Score) -> list[str]:
        rho = "–" if s.spearman is None else f"{s.spearman:.2f}"
        errors = [percent(s.bias, True), *map(percent, (s.median, s.mape, s.p90, s.inside_band)), rho]
        return [*errors, *map(percent, (s.regret, s.memory_median, s.false_alarms))]

    counts = (">rows", ">refused", ">not scored")
    errors = (">bias", ">median", ">MAPE", ">p90", ">in band", ">Spearman", ">regret", ">memory", ">false alarms")
    rows = [[name, str(s.rows), str(s.refused), str(s.not_scored), *cells(s)] for name, s in sorted(scores.items())]
    means: dict[str, Any] = {name: value for name, value in overall.items() if name != "recall_failed"}
    rows.append(["[bold]macro average[/]", "", "", "", *bold(cells(Score(**means)))])
    return titled("Predicted and measured step time", (title, *counts, *errors), rows)


def refusals(outcomes: list[Outcome]) -> RenderableType:
    """Return why rows could not be predicted, the most frequent reasons first."""
    reasons = Counter(o.refused for o in outcomes if o.refused).most_common()
    lines = [f"refused {n}: {why}" for why, n in reasons[:MOST_REASONS]]
    if len(reasons) > MOST_REASONS:
        others = reasons[MOST_REASONS:]
        lines.append(f"refused {sum(n for _, n in others)} for {len(others)} other reasons: see --json")
    return Group(*(Text(line, style="dim") for line in lines))


def headline_cells(o: Outcome) -> list[str]:
    """One well-known run: its name, plan, measured and predicted time, band and error."""
    p = o.prediction
    if p is None or o.error is None:
        return [o.case.row_id, o.refused, "", "", "", "refused"]
    times = o.case.step_time or 0, p.step_time_s, p.step_time_low_s, p.step_time_high_s
    measured, predicted, low, high = map(format_seconds, times)
    plan = f"{o.case.plan.world} GPUs: {o.case.plan.title()}"
    return [o.case.row_id, plan, measured, predicted, f"{low} to {high}", percent(o.error, True)]


def headline_table(outcomes: list[Outcome]) -> Table:
    """The well-known runs, each with its prediction."""
    rows: list[list[str | Text]] = []
    for o in outcomes:
        error = abs(o.error) if o.error is not None else None
        style = "" if error is None else "green" if error < 0.15 else "yellow" if error < 0.3 else "red"
        *cells, last = headline_cells(o)
        rows.append([*cells, Text(last, style)])
    return titled("Well-known runs", ("run", "plan", ">measured", ">predicted", ">band", ">error"), rows)


def unseen_table(scores: dict[str, SourceScore], overall: dict[str, float]) -> Table:
    """The errors on sources that the fit has not seen."""
    columns = ("half", ">rows", ">stack known", ">bias", ">source left out", ">p90", *(f">after {n}" for n in SEEN))
    rows = [[*unseen_cells(name, s), percent(s.regret)] for name, s in scores.items()]
    for name, means in [*half_means(scores).items(), ("macro average", overall)]:
        rows.append([f"[bold]{name}[/]", "", "", "", *bold([*unseen_means(means), percent(means["regret"])])])
    return titled(
        "Step time of sources that the fit has not seen (median error)",
        ("source", *columns, ">model left out", ">regret"),
        rows,
    )


def half_means(scores: dict[str, SourceScore]) -> dict[str, dict[str, float]]:
    """The means over the sources of each half (`left_out.half_of`)."""
    return {f"{half} half": macro_scores(part) for half, part in halves(scores).items() if part}


def unseen_cells(name: str, s: SourceScore) -> list[str]:
    """A source: its half, its runs, whether its stack is known, and the errors with the source, then with its model left out."""
    errors = [percent(x) for x in (s.median, s.p90, *(s.after[count] for count in SEEN), s.model)]
    return [name, half_of(name), str(s.runs), "yes" if s.stack_known else "no", percent(s.bias, True), *errors]


def unseen_means(overall: dict[str, float]) -> list[str]:
    """The means of these errors over the sources."""
    names = ("median", "p90", *(f"after_{count}" for count in SEEN), "model")
    return [percent(overall["bias"], True), *(percent(overall[name]) for name in names)]


PEER_COLUMNS = ("source", "tool", ">runs", ">its mean error", ">its median", ">our mean error", ">our median")


def peer_rows(accuracy: Accuracy) -> list[list[str]]:
    """Each other tool on each source, and our errors on the same runs."""
    return [
        [s.source, s.tool, str(s.runs), *map(percent, (s.mean, s.median, s.our_mean, s.our_median))]
        for s in accuracy.beside
    ]


def bands_table(bands: dict[str, Band]) -> Table:
    """The bands by what is known of the stack."""
    rows = []
    for level, b in bands.items():
        edges = [f"{100 * math.expm1(q * base(level)):+.0f}%" for q in (-b.low, b.high)]
        rows.append([level, str(b.runs), *edges, percent(b.coverage), percent(b.half_width)])
    columns = ("stack", ">runs", ">low", ">high", ">inside, source left out", ">median half-width")
    return titled("Bands (90%)", columns, rows)


def stack_rows(fit: StackFit) -> list[list[str]]:
    """The fitted numbers of each stack, each with its standard deviation."""
    names = sorted({leaf.family for leaf in fit.leaves if not leaf.family.startswith("unknown")})
    rows = []
    for name in [*names, "typical"]:
        numbers = fit.population() if name == "typical" else fit.family(name)
        count = sum(len(leaf.runs) for leaf in fit.leaves if leaf.family == name)
        rows.append([name, str(count or ""), *number_cells(numbers.mean, np.sqrt(np.diag(numbers.covariance)))])
    return rows


def stacks_table(fit: StackFit) -> Table:
    columns = ("stack", ">runs", *(f">{name}" for name in NUMBERS[:-1]), ">hides")
    return titled("Numbers of the stacks", columns, stack_rows(fit))


def number_cells(x: np.ndarray, spread: np.ndarray) -> list[str]:
    """Values with relative standard deviations."""
    fields = fields_of(x, Stack())
    launch = format_seconds(float(fields["launch"]))
    rates = ("products", "attention_rate", "elementwise", "network")
    relative = [f"{float(fields[name]):.2f} ±{100 * s:.0f}%" for name, s in zip(rates, spread[1:5], strict=True)]
    return [f"{launch} ±{100 * spread[0]:.0f}%", *relative, f"{float(fields['hides']):.2f}"]


def residual_groups(left_out: LeftOut) -> dict[str, list[str]]:
    """Labels of every run, by kind of label."""
    by_part, by_gpu, by_kind = [], [], []
    for o in left_out.runs:
        communication, host, bubble = shares(o.prediction.exposed_s) if o.prediction else (0.0, 0.0, 0.0)
        words = ("communication above 15% of the step", "host above 15%", "bubble above 15%")
        largest = max(zip((communication, host, bubble), words, strict=True))
        by_part.append(largest[1] if largest[0] > 0.15 else "compute")
        by_gpu.append(o.case.cluster.accelerator.name)
        by_kind.append("experts" if o.case.model.experts else "dense")
    return {"part": by_part, "GPU": by_gpu, "model": by_kind}


def html(accuracy: Accuracy) -> str:
    """A scatter of predicted over measured step time, quantiles of left-out predictions, and what the terminal shows."""
    parts = scatter([*accuracy.outcomes, *accuracy.headlines])
    if accuracy.left_out is not None:
        left, error = accuracy.left_out, accuracy.left_out.source
        labels = np.array(residual_groups(left)["part"])
        by_part = {name: error[labels == name] for name in sorted(set(labels))}
        parts += ratios("Predicted over measured step time, the source left out", left.by_source(error))
        parts += ratios("The same by what the step is made of", by_part)
    if not accuracy.outcomes:
        scores = {name: score(part) for name, part in by(accuracy.headlines, ["source"]).items()}
        parts += grid(table(scores, macro(scores)))
    return sheet(
        "Predicted and measured step time", [], [*parts, *parts_of(Group(*page(accuracy, ["source"], "source")))]
    )


def scatter(outcomes: list[Outcome]) -> list[Part]:
    points: dict[str, list[Any]] = {}
    for o in outcomes:
        if o.prediction and (measured := o.case.step_time):
            predicted = o.prediction.step_time_s
            words = f"{o.case.row_id}: measured {format_seconds(measured)}, predicted {format_seconds(predicted)}"
            points.setdefault(o.case.row.get("file", ""), []).append([measured, predicted, words])
    times = [x for marks in points.values() for mark in marks for x in mark[:2]] or [0.1, 1.0]
    perfect: Part = {"name": "a perfect prediction", "points": [], "line": [[t, t] for t in (min(times), max(times))]}
    series = [{"name": name, "points": marks} for name, marks in sorted(points.items())]
    x, y = ({"log": 10, "label": name, "unit": "s"} for name in ("measured", "predicted"))
    return chart("Each mark is one published run", x, y, [*series, perfect])


def ratios(title: str, groups: Mapping[str, np.ndarray]) -> list[Part]:
    """Quantiles of predicted / measured by group; the values are their logarithms."""
    rows = []
    for name, values in groups.items():
        low, *marks = np.clip(np.exp(np.quantile(values, QUANTILES)), *REACH).tolist()
        words = f"{name}: median {np.exp(np.median(values)):.2f}×"
        pieces = [
            piece(after - before, look, words, name=share)
            for (share, look), before, after in zip(SHARES, (low, *marks), marks, strict=False)
        ]
        rows.append(
            {
                "label": f"{name} ({len(values)})",
                "start": low,
                "text": f"{np.exp(np.median(values)):.2f}×",
                "parts": pieces,
            }
        )
    x = {
        "log": 10,
        "from": REACH[0],
        "most": REACH[1],
        "unit": "times",
        "label": "predicted / measured",
        "ticks": TICKS,
    }
    return [
        panel(title, "Quantiles of the runs; the number is their median."),
        part("bars", rows=rows, x=x, tall=22, limit={"at": 1, "words": ""}),
    ]
