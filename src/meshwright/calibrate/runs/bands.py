"""Bands from the residuals of left-out sources, by what is known of the stack.

    typical             nothing: every run is predicted as if its stack were not named (`left_out.without_stacks`)
    published           another source has runs of the stack
    calibrated          five runs of the source itself were seen
    calibrated-typical  the same of runs without their stacks: numbers do not make up for unknown switches

For each, the 5% and 95% quantiles of ln(measured / predicted) / w, with w the width of `cost.band`. Sources have equal weight. The coverage
of a source is computed with quantiles from the other sources only, so it is that of an unseen source; the quantiles are scaled until it is 90%.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.calibrate.runs.left_out import LeftOut
from meshwright.calibrate.runs.outcomes import Outcome
from meshwright.cost.band import inside_nodes, width

LEVELS = ("typical", "published", "calibrated", "calibrated-typical")
INSIDE = 0.90
FACTORS = tuple(0.8 + 0.01 * k for k in range(81))  # factors on the quantiles


@dataclass(frozen=True)
class Band:
    """The quantiles of one level, and how its bands do on left-out sources: the share of runs inside, the median half-width (every source has the
    same weight), and the mean of the medians of all sources, which a few sources with wide bands raise."""

    low: float
    high: float
    coverage: float
    half_width: float
    mean_of_medians: float
    runs: int
    by_source: dict[str, tuple[float, float]] = field(default_factory=dict)  # coverage and median half-width of each


def bands(left_out: LeftOut, unnamed: LeftOut | None) -> dict[str, Band]:
    """The bands of all levels with runs of at least two sources; `unnamed` are the runs without their stacks, of which the band of the typical stack
    comes."""
    runs = {level: unnamed if level.endswith("typical") else left_out for level in LEVELS}
    residuals = {level: residuals_of(part, level) for level, part in runs.items() if part is not None}
    return {level: _band(*found) for level, found in residuals.items() if len(set(found[2].tolist())) > 1}


def half_width_without(left_out: LeftOut, level: str) -> dict[str, float]:
    """The median half-width of a level if one source did not exist, by source."""
    scaled, widths, sources, runs = residuals_of(left_out, level)
    names = sorted(set(sources.tolist()))
    parts = {name: sources != name for name in names if len(names) > 2}
    return {name: _band(scaled[kept], widths[kept], sources[kept], runs).half_width for name, kept in parts.items()}


def residuals_of(left_out: LeftOut, level: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Of the predictions with what a level knows: ln(measured / predicted) / w, w, the source, and the number of runs."""
    runs = left_out.runs
    if level.startswith("calibrated"):  # every draw is a calibration
        run, draw = np.nonzero(np.isfinite(left_out.calibrated))
        residual = left_out.calibrated[run, draw]
    else:
        run = np.flatnonzero(left_out.named) if level == "published" else np.arange(len(runs))
        residual = -left_out.source[run]
    width_of = {k: run_width(runs[k], level) for k in set(run.tolist())}
    widths = np.array([width_of[k] for k in run.tolist()])
    return residual / widths, widths, np.array([o.source for o in runs])[run], len(width_of)


def run_width(o: Outcome, level: str) -> float:
    """The width of the band of a run, if this is known of its stack."""
    assert o.prediction is not None
    assert o.plan is not None
    c = o.case
    assert c.cluster is not None
    inside = inside_nodes(o.plan, c.stack, c.cluster)
    return width(o.prediction.exposed_s, inside, level, c.cluster.accelerator.efficiency.doubt)


def _band(scaled: np.ndarray, widths: np.ndarray, sources: np.ndarray, runs: int) -> Band:
    """Quantiles of few sources miss the tails of another one. So they are scaled by the smallest factor with which left-out sources are covered."""
    low, high = edges(scaled, sources)
    held_out = [_held_out(scaled, sources, name) for name in sorted(set(sources))]
    covered = [(factor, _coverage(held_out, factor)) for factor in FACTORS]
    factor, coverage = next((pair for pair in covered if pair[1] >= INSIDE), covered[-1])
    low, high = factor * low, factor * high
    half = (np.exp(high * widths) - np.exp(-low * widths)) / 2
    by_source = {
        name: (_coverage([part], factor), float(np.median(half[sources == name])))
        for name, part in zip(sorted(set(sources)), held_out, strict=True)
    }
    return Band(low, high, coverage, *_middle(half, sources), runs, by_source)


def _middle(half: np.ndarray, sources: np.ndarray) -> tuple[float, float]:
    """The median of half-widths, in which every source has the same weight, and the mean of the medians of the sources."""
    return float(quantiles(half, sources, [0.5])[0]), macro_median(half, sources)


def _held_out(scaled: np.ndarray, sources: np.ndarray, name: str) -> tuple[np.ndarray, float, float]:
    """The residuals of one source, and the quantiles of the others."""
    others = sources != name
    low, high = edges(scaled[others], sources[others])
    return scaled[~others], low, high


def _coverage(held_out: list[tuple[np.ndarray, float, float]], factor: float) -> float:
    """Mean over sources of the share of runs inside the scaled quantiles of the other sources."""
    inside = [np.mean((part >= -factor * low) & (part <= factor * high)) for part, low, high in held_out]
    return float(np.mean(inside))


def edges(scaled: np.ndarray, sources: np.ndarray) -> tuple[float, float]:
    """−5% and 95% quantiles, in which every source has the same weight."""
    low, high = quantiles(scaled, sources, [(1 - INSIDE) / 2, (1 + INSIDE) / 2])
    return max(float(-low), 0.02), max(float(high), 0.02)


def quantiles(values: np.ndarray, sources: np.ndarray, at: list[float]) -> np.ndarray:
    """Quantiles of the values of all runs, in which every source has the same weight."""
    names, count = np.unique(sources, return_counts=True)
    weight = 1 / count[np.searchsorted(names, sources)]
    order = np.argsort(values)
    share = (np.cumsum(weight[order]) - weight[order] / 2) / weight.sum()
    return np.interp(at, share, values[order])


def macro_median(values: np.ndarray, sources: np.ndarray) -> float:
    return float(np.mean([np.median(values[sources == name]) for name in sorted(set(sources))]))
