"""The accuracy of predictions as terminal tables: one row per source, and one row per well-known run."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.calibrate.runs.accuracy import Accuracy
from meshwright.calibrate.runs.validate import Outcome, Score, by, score
from meshwright.units import format_seconds
from meshwright.view import left_out
from meshwright.view.left_out import percent

COLUMNS = (
    *("rows", "refused", "not scored", "bias", "median", "MAPE", "p90", "in band"),
    *("Spearman", "regret", "memory", "false alarms"),
)
MOST_REASONS = 12  # that are shown
HEADLINE_COLUMNS = ("run", "plan", "measured", "predicted", "band", "error")


def cells(s: Score) -> list[str]:
    """The figures of one source as text, in the order of `COLUMNS`."""
    rho = "–" if s.spearman is None else f"{s.spearman:.2f}"
    shares = (s.median, s.mape, s.p90, s.inside_band)
    counts = [str(s.rows), str(s.refused), str(s.not_scored)]
    return [
        *counts,
        percent(s.bias, True),
        *map(percent, shares),
        rho,
        *map(percent, (s.regret, s.memory_median, s.false_alarms)),
    ]


def page(found: Accuracy, columns: list[str], title: str) -> list[RenderableType]:
    """Everything that `validate` prints: the runs with the catalog's numbers, sources left out, failed runs, well-known runs."""
    parts: list[RenderableType] = []
    if found.outcomes:
        scores = (
            found.sources if columns == ["source"] else {n: score(p) for n, p in by(found.outcomes, columns).items()}
        )
        parts += [table(scores, found.overall, title), refusals(found.outcomes)]
    if found.unseen:
        parts += ["", left_out.table(found.unseen, found.unseen_overall), "", left_out.bands_table(found.bands)]
        if found.unnamed is None:
            parts.append(Text("typical (a stack that is not in the catalog): with --json, --html or --markdown", "dim"))
    if "recall_failed" in found.overall:
        parts += [
            "",
            f"{100 * found.overall['recall_failed']:.0f}% of {len(found.failed)} failed runs are predicted not to fit in memory "
            "(the failed runs include crashes for other reasons)",
        ]
    if found.headlines:
        parts.append(headline_table(found.headlines))
    return parts


def table(scores: dict[str, Score], overall: dict[str, float], title: str = "source") -> Table:
    out = Table(
        title="Predicted and measured step time", title_justify="left", box=None, pad_edge=False, title_style="bold"
    )
    out.add_column(title)
    for name in COLUMNS:
        out.add_column(name, justify="right")
    for name, s in sorted(scores.items()):
        out.add_row(name, *cells(s))
    means: dict[str, Any] = {name: value for name, value in overall.items() if name != "recall_failed"}
    out.add_row("[bold]macro average[/]", "", "", "", *[f"[bold]{c}[/]" for c in cells(Score(**means))[3:]])
    return out


def refusals(outcomes: list[Outcome]) -> RenderableType:
    """Return why rows could not be predicted, the most frequent reasons first."""
    count: dict[str, int] = {}
    for o in outcomes:
        if o.refused:
            count[o.refused] = count.get(o.refused, 0) + 1
    reasons = sorted(count.items(), key=lambda item: -item[1])
    lines = [f"refused {n}: {why}" for why, n in reasons[:MOST_REASONS]]
    if len(reasons) > MOST_REASONS:
        others = reasons[MOST_REASONS:]
        lines.append(f"refused {sum(n for _, n in others)} for {len(others)} other reasons: see --json")
    return Group(*(Text(line, style="dim") for line in lines))


def headline_cells(o: Outcome) -> list[str]:
    """One well-known run as text, in the order of `HEADLINE_COLUMNS`."""
    p = o.prediction
    if p is None or o.error is None or o.case.plan is None:
        return [o.case.row_id, o.refused, "", "", "", "refused"]
    return [
        o.case.row_id,
        f"{o.case.plan.world} GPUs: {o.case.plan.title()}",
        format_seconds(o.case.step_time or 0),
        format_seconds(p.step_time_s),
        f"{format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)}",
        percent(o.error, True),
    ]


def headline_table(outcomes: list[Outcome]) -> Table:
    out = Table(title="Well-known runs", title_justify="left", box=None, pad_edge=False, title_style="bold")
    for i, name in enumerate(HEADLINE_COLUMNS):
        out.add_column(name, justify="left" if i < 2 else "right")
    for o in outcomes:
        error = abs(o.error) if o.error is not None else None
        style = "" if error is None else "green" if error < 0.15 else "yellow" if error < 0.3 else "red"
        *left, last = headline_cells(o)
        out.add_row(*left, Text(last, style))
    return out
