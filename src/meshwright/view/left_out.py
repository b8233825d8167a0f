"""Errors on sources that the fit has not seen, and the fitted numbers of stacks, as terminal tables."""

from __future__ import annotations

import math

import numpy as np
from rich.table import Table

from meshwright.calibrate.runs.accuracy import Band
from meshwright.calibrate.runs.left_out import SEEN, SourceScore
from meshwright.calibrate.runs.stack_fit import NUMBERS, Fit, fields_of
from meshwright.cost.band import base
from meshwright.describe.stack import Stack
from meshwright.units import format_seconds

COLUMNS = (
    "rows",
    "stack known",
    "bias",
    "source left out",
    "p90",
    *(f"after {n}" for n in SEEN),
    "model left out",
    "regret",
)


def percent(value: float | None, signed: bool = False) -> str:
    """A percentage; "–" if there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


def cells(s: SourceScore) -> list[str]:
    """The figures of one source as text, in the order of `COLUMNS`."""
    return [
        str(s.runs),
        "yes" if s.stack_known else "no",
        percent(s.bias, True),
        percent(s.median),
        percent(s.p90),
        *(percent(s.after[count]) for count in SEEN),
        percent(s.model),
        percent(s.regret),
    ]


def macro_cells(overall: dict[str, float]) -> list[str]:
    names = ("median", "p90", *(f"after_{count}" for count in SEEN), "model", "regret")
    return ["", "", percent(overall["bias"], True), *(percent(overall[name]) for name in names)]


def table(scores: dict[str, SourceScore], overall: dict[str, float]) -> Table:
    out = Table(
        title="Step time of sources that the fit has not seen (median error)",
        title_justify="left",
        box=None,
        pad_edge=False,
        title_style="bold",
    )
    out.add_column("source")
    for name in COLUMNS:
        out.add_column(name, justify="right")
    for name, s in scores.items():
        out.add_row(name, *cells(s))
    out.add_row("[bold]macro average[/]", *(f"[bold]{cell}[/]" for cell in macro_cells(overall)))
    return out


def bands_table(bands: dict[str, Band]) -> Table:
    """The bands by what is known of the stack."""
    out = Table(title="Bands (90%)", title_justify="left", box=None, pad_edge=False, title_style="bold")
    for k, name in enumerate(("stack", "runs", "low", "high", "inside, source left out", "median half-width")):
        out.add_column(name, justify="right" if k else "left")
    for level, b in bands.items():
        edges = [f"{100 * math.expm1(q * base(level)):+.0f}%" for q in (-b.low, b.high)]
        out.add_row(level, str(b.runs), *edges, percent(b.coverage), percent(b.half_width))
    return out


def stacks_table(fit: Fit) -> Table:
    """The fitted numbers of each stack, each with its standard deviation."""
    out = Table(title="Numbers of the stacks", title_justify="left", box=None, pad_edge=False, title_style="bold")
    for k, name in enumerate(("stack", "runs", *NUMBERS[:-1], "hides")):
        out.add_column(name, justify="right" if k else "left")
    names = sorted({leaf.family for leaf in fit.leaves if not leaf.family.startswith("unknown")})
    for name in [*names, "typical"]:
        found = fit.population() if name == "typical" else fit.family(name)
        count = sum(len(leaf.runs) for leaf in fit.leaves if leaf.family == name)
        out.add_row(name, str(count) if count else "", *number_cells(found.mean, np.sqrt(np.diag(found.covariance))))
    return out


def number_cells(x: np.ndarray, spread: np.ndarray) -> list[str]:
    """Values with relative standard deviations."""
    fields = fields_of(x, Stack())
    launch = format_seconds(float(fields["launch"]))
    rates = ("products", "attention_rate", "elementwise", "network")
    relative = [f"{float(fields[name]):.2f} ±{100 * s:.0f}%" for name, s in zip(rates, spread[1:5], strict=True)]
    return [f"{launch} ±{100 * spread[0]:.0f}%", *relative, f"{float(fields['hides']):.2f}"]
