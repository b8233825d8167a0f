"""The accuracy of predictions on a table of runs: with the catalog's numbers, and with the source left out.

The published training runs that come with Meshwright: facts of public tables, each row with its source and its licence.

`published.csv.xz` has the columns of `rows`, and `licence`: the licence of the repository that a table stands in, or "facts of a
paper" where it was transcribed from one. Blank cells were not published. `benchmarks/publish_rows.py` writes the file.

Bands from the residuals of left-out sources, by what is known of the stack.

    typical             nothing: every run is predicted as if its stack were not named (`left_out.without_stacks`)
    published           another source has runs of the stack
    calibrated          five runs of the source itself were seen
    calibrated-typical  the same of runs without their stacks: numbers do not make up for unknown switches

For each, q = k · √((1 + 1/S) · mean m² + mean v²) of S sources: m is the median of ln(measured / predicted) / w of a source and v the spread of its
runs around it, with w the width of `cost.band`. So the band of an unseen source has the variance between sources and the variance within one, and a
source of a thousand runs has the weight of any other. The coverage of a source is computed with q of the other sources only; k is the smallest
factor with which, of the sources of the building half (`left_out.half_of`), the mean coverage is 90% and that of none is below 75%: the testing
half says whether that holds elsewhere. In `typical` all sources of a framework are left out together. Quantiles of all runs together do not know
that the runs of a source are off in one direction: with k for a mean of 90% they were wider, and covered the worst source less.

The file of fitted numbers (`describe/catalog/fit.toml`): the numbers of every stack of the catalog, and the bands of predictions.

A stack with published runs has the mean of its posterior; a stack without has the typical numbers. The band of a stack with fewer than five runs
is that of a typical one: so few runs do not show how far others are from them. Stacks on CPUs are measured on the
machine itself, so they have no entry.
"""

import csv
import lzma
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any

import numpy as np

from meshwright.calibrate.runs import validate
from meshwright.calibrate.runs.beside import PeerScore, peer_scores
from meshwright.calibrate.runs.left_out import (
    BUILDING,
    SEEN,
    LeftOut,
    SourceScore,
    finite_or_none,
    half_of,
    halves,
    leave_out,
    macro_scores,
    responding,
    scores,
    usable,
    without_stacks,
)
from meshwright.calibrate.runs.stack_fit import StackFit, fields_of
from meshwright.calibrate.runs.validate import Outcome, predict_rows
from meshwright.cost.band import inside_nodes, unpublished_share, width
from meshwright.describe import catalog
from meshwright.describe.files import base_of
from meshwright.describe.stack import Stack
from meshwright.errors import MeshwrightError

FAILED = "_failed"  # ending of the sources whose runs crashed or ran out of memory


@cache
def _rows() -> tuple[dict[str, str], ...]:
    data = files("meshwright.calibrate.runs").joinpath("published.csv.xz").read_bytes()
    return tuple(csv.DictReader(lzma.decompress(data).decode("utf-8").splitlines()))


def runs() -> list[dict[str, str]]:
    """The runs that finished."""
    return [dict(row) for row in _rows() if not row["file"].endswith(FAILED)]


def failed() -> list[dict[str, str]]:
    """The runs that crashed or ran out of memory."""
    return [dict(row) for row in _rows() if row["file"].endswith(FAILED)]


def licences() -> dict[str, str]:
    """The licence of each source."""
    return {row["file"].removesuffix(FAILED): row["licence"] for row in _rows()}


LEVELS = ("typical", "published", "calibrated", "calibrated-typical")
# Mean share of the runs of an unseen source inside its bands, and the share of the worst source
INSIDE, FEWEST = 0.90, 0.75
FACTORS = tuple(1.0 + 0.01 * k for k in range(401))  # k


@dataclass(frozen=True)
class Band:
    """The edges of one level, and how its bands do on left-out sources: the share of runs inside, the median half-width (every source has the
    same weight), and the mean of the medians of all sources, which a few sources with wide bands raise."""

    low: float
    high: float
    coverage: float
    half_width: float
    mean_of_medians: float
    runs: int
    by_source: dict[str, tuple[float, float]] = field(default_factory=dict)  # coverage and median half-width of each

    def inside(self, half: str) -> float:
        """The mean coverage of the sources of a half; NaN without one."""
        shares = [share for share, _ in halves(self.by_source)[half].values()]
        return float(np.mean(shares)) if shares else math.nan


def bands(left_out: LeftOut, unnamed: LeftOut | None) -> dict[str, Band]:
    """The bands of all levels with runs of at least two sources; `unnamed` are the runs without their stacks, of which the band of the typical stack
    comes."""
    runs = {level: unnamed if level.endswith("typical") else left_out for level in LEVELS}
    residuals = {level: residuals_of(part, level) for level, part in runs.items() if part is not None}
    return {level: _band(*residual) for level, residual in residuals.items() if len(set(residual[2].tolist())) > 1}


def half_width_without(left_out: LeftOut, level: str) -> dict[str, float]:
    """The median half-width of a level if one source did not exist, by source."""
    scaled, widths, sources, runs = residuals_of(left_out, level)
    names = sorted(set(sources.tolist()))
    parts = {name: sources != name for name in names if len(names) > 2}
    return {
        name: _band(scaled[others], widths[others], sources[others], runs).half_width for name, others in parts.items()
    }


def residuals_of(left_out: LeftOut, level: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Of the predictions with what a level knows: ln(measured / predicted) / w, w, the source, and the number of runs."""
    runs = left_out.runs
    in_use = np.array([not o.case.stack.obsolete for o in runs])
    if level.startswith("calibrated"):  # every draw is a calibration
        run, draw = np.nonzero(np.isfinite(left_out.calibrated) & in_use[:, None])
        residual = left_out.calibrated[run, draw]
    else:
        run = np.flatnonzero(in_use & left_out.named if level == "published" else in_use)
        residual = -left_out.source[run]
    width_of = {k: run_width(runs[k], level) for k in set(run.tolist())}
    widths = np.array([width_of[k] for k in run.tolist()])
    return residual / widths, widths, np.array([o.source for o in runs])[run], len(width_of)


def run_width(o: Outcome, level: str) -> float:
    """The width of the band of a run, if this is known of its stack."""
    assert o.prediction is not None
    assert o.plan is not None
    c = o.case
    inside = inside_nodes(o.plan, c.stack, c.cluster)
    unpublished = unpublished_share(o.prediction.exposed_s, o.prediction.hidden_s, inside, o.plan, c.cluster)
    return width(o.prediction.exposed_s, inside, level, c.cluster.accelerator.efficiency.doubt, unpublished)


def _band(scaled: np.ndarray, widths: np.ndarray, sources: np.ndarray, runs: int) -> Band:
    """The band of one level, with the smallest factor on the spread with which left-out sources are covered."""
    names = sorted(set(sources))
    own = {name: sources == name for name in names}
    held_out = [np.abs(scaled[own[name]]) / spread(scaled[~own[name]], sources[~own[name]]) for name in names]
    tried = ((factor, [float(np.mean(part <= factor)) for part in held_out]) for factor in FACTORS)
    judges = [at for at, name in enumerate(names) if half_of(name) == BUILDING] or range(len(names))

    def covers(inside: list[float]) -> bool:
        chosen = [inside[at] for at in judges]
        return float(np.mean(chosen)) >= INSIDE and min(chosen) >= FEWEST

    enough = (pair for pair in tried if covers(pair[1]))
    factor, inside = next(enough, (FACTORS[-1], [float(np.mean(part <= FACTORS[-1])) for part in held_out]))
    edge = factor * spread(scaled, sources)
    half = np.sinh(edge * widths)
    by_source = {name: (share, float(np.median(half[own[name]]))) for name, share in zip(names, inside, strict=True)}
    median = float(quantiles(half, sources, [0.5])[0])
    return Band(edge, edge, float(np.mean(inside)), median, macro_median(half, sources), runs, by_source)


def spread(scaled: np.ndarray, sources: np.ndarray) -> float:
    """The standard deviation of a run of an unseen source: between sources, and of the runs of one (by its quantiles: stalls do not count)."""
    parts = [
        np.quantile(scaled[sources == name], [(1 - INSIDE) / 2, 0.5, (1 + INSIDE) / 2]) for name in sorted(set(sources))
    ]
    between = np.mean([middle**2 for _, middle, _ in parts]) * (1 + 1 / len(parts))
    within = np.mean([((high - low) / 2 / NormalDist().inv_cdf((1 + INSIDE) / 2)) ** 2 for low, _, high in parts])
    return max(math.sqrt(between + within), 0.01)


def quantiles(values: np.ndarray, sources: np.ndarray, at: list[float]) -> np.ndarray:
    """Quantiles of the values of all runs, in which every source has the same weight."""
    names, count = np.unique(sources, return_counts=True)
    weight = 1 / count[np.searchsorted(names, sources)]
    order = np.argsort(values)
    share = (np.cumsum(weight[order]) - weight[order] / 2) / weight.sum()
    return np.interp(at, share, values[order])


def macro_median(values: np.ndarray, sources: np.ndarray) -> float:
    return float(np.mean([np.median(values[sources == name]) for name in sorted(set(sources))]))


NOTE = "# Written by `meshwright calibrate --runs`: do not edit by hand.\n"
MEASURED = ("gloo-cpu", "meshwright")  # our trainer: its rates are those that `bench` measures, on CPUs and on GPUs


def stack_numbers(fit: StackFit) -> dict[str, dict[str, float | str]]:
    """The fitted fields of every stack of the catalog that is not measured."""
    runs = Counter[str]()
    for leaf in fit.leaves:
        runs[leaf.family] += len(leaf.runs)
    numbers: dict[str, dict[str, float | str]] = {}
    for name in catalog.names("stacks"):
        if name in MEASURED:
            continue
        base = base_of("stacks", name)
        x = (fit.family(base) if base in runs else fit.population()).mean
        evidence = "published" if runs[base] >= SEEN[-1] else "typical"
        numbers[name] = {**rounded(x, catalog.load("stacks", name)), "evidence": evidence}
    return numbers


def rounded(x: np.ndarray, stack: Stack) -> dict[str, float]:
    """The fields of the stack with these coordinates, to three digits."""
    return {name: float(f"{float(value):.3g}") for name, value in fields_of(x, stack).items()}


def to_toml(fit: StackFit, bands: dict[str, Band]) -> str:
    missing = [level for level in LEVELS if level not in bands]
    if missing:
        what = f"the runs give no band of a stack that is {' or '.join(missing)}"
        why = "published: two sources must share stacks with others; calibrated: two sources need more than five runs of one stack"
        raise MeshwrightError("MW-CALIB-005", what, why=why)
    lines = [NOTE]
    for level, band in bands.items():
        lines.append(f"[bands.{level}]\nlow = {band.low:.4f}\nhigh = {band.high:.4f}\n")
    for name, fields in stack_numbers(fit).items():
        lines.append(f'[stacks."{name}"]')
        lines += [
            f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value!r}" for key, value in fields.items()
        ]
        lines.append("")
    return "\n".join(lines)


@dataclass
class Accuracy:
    """Outcomes of the runs, of the well-known runs and of the failed ones, with their scores."""

    outcomes: list[Outcome]
    headlines: list[Outcome]
    failed: list[Outcome]
    sources: dict[str, validate.Score]
    overall: dict[str, float]
    left_out: LeftOut | None = None
    unseen: dict[str, SourceScore] = field(default_factory=dict)
    unseen_overall: dict[str, float] = field(default_factory=dict)
    bands: dict[str, Band] = field(default_factory=dict)
    unnamed: LeftOut | None = None  # of some of the runs, without their stacks
    beside: list[PeerScore] = field(default_factory=list)  # other tools on the same runs

    def as_dict(self) -> dict[str, Any]:
        return {
            "overall": self.overall,
            "sources": {name: s.as_dict() for name, s in self.sources.items()},
            "left_out": {
                "overall": finite_or_none(self.unseen_overall),
                "sources": {name: s.as_dict() for name, s in self.unseen.items()},
                "bands": {level: band.__dict__ for level, band in self.bands.items()},
            },
            "beside": [finite_or_none(asdict(score)) for score in self.beside],
            "rows": [o.as_dict() for o in (*self.outcomes, *self.headlines)],
        }


def assess(
    rows: list[dict[str, str]],
    headlines: list[dict[str, str]],
    failed: list[dict[str, str]],
    progress: Callable[[float], None] | None = None,
    unnamed: bool = True,
    beside: dict[str, dict[str, float]] | None = None,
) -> Accuracy:
    """Predict all runs and score them. Sources are left out in turn if there are at least two of them; with `unnamed` also without their stacks.
    `beside` has the seconds that other tools predict, by tool and run."""
    total, done = max(len(rows) + len(headlines) + len(failed), 1), 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done / total)

    outcomes = predict_rows(rows, advance, responding(rows))
    famous, crashed = (predict_rows(part, advance) for part in (headlines, failed))
    sources = {name: validate.score(part) for name, part in validate.by(outcomes, ["source"]).items()}
    overall = validate.macro(sources)
    recall = validate.recall(crashed)
    if recall is not None:
        overall["recall_failed"] = recall
    accuracy = Accuracy(outcomes, famous, crashed, sources, overall)
    if len({o.source for o in usable(outcomes)}) > 1:
        accuracy.left_out = leave_out(outcomes)
        accuracy.unseen = scores(accuracy.left_out)
        accuracy.unseen_overall = macro_scores(accuracy.unseen)
        accuracy.unnamed = without_stacks(accuracy.left_out.runs) if unnamed else None
        accuracy.bands = bands(accuracy.left_out, accuracy.unnamed)
    if beside:
        accuracy.beside = peer_scores(outcomes, accuracy.left_out, beside)
    return accuracy
