"""Predictions of runs whose source the fit has not seen: the honest accuracy of the cost model.

    source left out     the stack's numbers from other sources only; a stack that no other source uses is the typical stack
    after k rows        then k runs of the source are seen (Bayes' rule), and the others predicted; the mean over several draws
    model left out      the numbers from the runs of all other models of the source as well

Errors are |predicted / measured − 1|, macro-averaged over sources.

A choice of a switch or of a term of the cost model that looks at the errors of a source makes this source a seen one. So the sources are divided
once into two halves by a hash of their names (`half_of`): choices look at the building half, and the testing half says what they do elsewhere.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from meshwright.calibrate.runs.normal import Normal
from meshwright.calibrate.runs.rows import UNNAMED, PublishedRun, number
from meshwright.calibrate.runs.stack_fit import Leaf, Response, StackFit, doubt_of, evidence, fit, posterior
from meshwright.calibrate.runs.validate import NOT_FOR_TIME, STALLED, Outcome, predict_rows, ranking, stalled
from meshwright.describe import catalog
from meshwright.describe.files import base_of
from meshwright.errors import MeshwrightError

SEEN = (1, 2, 5)  # runs of a source that a calibration sees
DRAWS = 12
T = TypeVar("T")
MOST_UNNAMED = 120  # runs of a source that are predicted without their stack


BUILDING, TESTING = "building", "testing"


def half_of(source: str) -> str:
    """The half that a source belongs to: the parity of the first byte of the SHA-256 of its name."""
    return BUILDING if hashlib.sha256(source.encode()).digest()[0] % 2 else TESTING


def halves(by_source: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """The values of the sources of each half."""
    return {half: {name: x for name, x in by_source.items() if half_of(name) == half} for half in (BUILDING, TESTING)}


@dataclass
class LeftOut:
    """ln predicted − ln measured of every run, by what was known; the runs are those of `runs`."""

    runs: list[Outcome]
    fit: StackFit
    source: np.ndarray
    model: np.ndarray
    fitted: np.ndarray
    calibrated: np.ndarray  # ln measured − ln predicted after the most runs that a calibration sees: (runs, draws)
    named: np.ndarray  # whether another source has runs of the same stack
    after: dict[int, np.ndarray] = field(default_factory=dict)  # rows seen → mean over draws of |error| of each run

    def by_source(self, values: np.ndarray) -> dict[str, np.ndarray]:
        names = np.array([o.source for o in self.runs])
        return {name: values[names == name] for name in sorted(set(names))}


@dataclass(frozen=True)
class SourceScore:
    """The errors of one source that the fit has not seen; shares, not percent."""

    runs: int
    bias: float
    median: float
    p90: float
    after: dict[int, float]
    model: float
    regret: float | None
    stack_known: bool  # another source has runs of most of its stacks

    def as_dict(self) -> dict[str, Any]:
        return finite_or_none(asdict(self))


def scores(left_out: LeftOut) -> dict[str, SourceScore]:
    """The scores of every source."""
    sources = np.array([o.source for o in left_out.runs])
    by_source = {}
    for name in sorted(set(sources)):
        at = np.flatnonzero(sources == name)
        runs, size = [left_out.runs[k] for k in at], np.abs(np.expm1(left_out.source[at]))
        predicted = np.exp(left_out.source[at]) * np.array([o.case.step_time for o in runs])
        by_source[name] = SourceScore(
            len(at),
            float(np.median(np.expm1(left_out.source[at]))),
            float(np.median(size)),
            float(np.quantile(size, 0.9)),
            {count: median_or_nan(values[at]) for count, values in left_out.after.items()},
            float(np.median(np.abs(np.expm1(left_out.model[at])))),
            ranking(runs, predicted)[1],
            bool(left_out.named[at].mean() > 0.5),
        )
    return by_source


def finite_or_none(table: dict[Any, Any]) -> dict[Any, Any]:
    """The table with None for numbers that are NaN: JSON has no NaN."""
    return {
        key: finite_or_none(value) if isinstance(value, dict) else None if value != value else value
        for key, value in table.items()
    }


def median_or_nan(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else math.nan


def macro_scores(by_source: dict[str, SourceScore]) -> dict[str, float]:
    """The means over sources; a source with too few runs for a calibration counts in none of those columns."""

    def mean(values: Iterable[float | None]) -> float:
        known_values = [v for v in values if v is not None and math.isfinite(v)]
        return float(np.mean(known_values)) if known_values else math.nan

    parts = list(by_source.values())
    return {
        "median": mean(s.median for s in parts),
        "p90": mean(s.p90 for s in parts),
        "bias": mean(s.bias for s in parts),
        **{f"after_{count}": mean(s.after[count] for s in parts) for count in SEEN},
        "model": mean(s.model for s in parts),
        "regret": mean(s.regret for s in parts),
    }


def responding(rows: Iterable[dict[str, str]]) -> Callable[[PublishedRun], bool]:
    """Whether the response of a run of this table is needed: its step time is published and scored, and may tell of its stack. In a source that
    repeats its runs, a run without a repetition that agrees may have stalled. No number is fitted to runs with adapters: they are predicted only."""
    repeated = {row.get("file", "") for row in rows if row.get("pair_ratio")}

    def needed(c: PublishedRun) -> bool:
        source, ratio = c.row.get("file", ""), number(c.row.get("pair_ratio"))
        clean = ratio <= STALLED if ratio is not None else source not in repeated
        return bool(c.step_time) and source not in NOT_FOR_TIME and clean and not c.model.adapter.on

    return needed


def usable(outcomes: list[Outcome]) -> list[Outcome]:
    """The runs whose step time is scored and whose response is known."""
    repeated = {o.source for o in outcomes if o.pair_ratio is not None}
    return [
        o
        for o in outcomes
        if o.error is not None and o.times is not None and o.source not in NOT_FOR_TIME and not stalled(o, repeated)
    ]


def enough(outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes, if a source can be left out: two of them have usable runs."""
    sources = sorted({o.source for o in usable(outcomes)})
    if len(sources) > 1:
        return outcomes
    raise MeshwrightError(
        "MW-CALIB-005",
        f"there are runs of {len(sources)} source{'s' * (len(sources) != 1)} with a measured and a predicted step time",
        why="The numbers of a source are predicted from other sources, so a fit needs two (column `file`)",
        fix="--from-run PLAN.toml --tokens-per-s N adjusts one stack to runs of one source",
    )


def leaves_of(runs: list[Outcome], frameworks: Mapping[str, str] | None = None) -> list[Leaf]:
    """The runs of each family of stacks in each source. Stacks of one family share their numbers, so their runs in one source do too. `frameworks`
    of the sources are left out whole."""
    known = frameworks or {}
    groups: dict[tuple[str, str], list[int]] = {}
    for k, o in enumerate(runs):
        groups.setdefault((o.source, family_of(o.case.stack.name, o.source)), []).append(k)
    return [
        Leaf(source, family, np.array(ks), runs[ks[0]].case.stack.obsolete, known.get(source, ""))
        for (source, family), ks in groups.items()
    ]


def family_of(stack: str, source: str) -> str:
    """The stack whose numbers a stack shares: the one that it extends. An unknown stack shares them with no other."""
    if stack not in catalog.names("stacks") or stack == "default":
        return f"unknown stack of {source}"
    return base_of("stacks", stack)


def frameworks_of(runs: list[Outcome]) -> dict[str, str]:
    """The framework of most runs of each source: the name of their stack's framework before its first hyphen, which releases and forks share
    (Megatron-LM, Megatron-Core, Megatron-DeepSpeed)."""
    names: dict[str, Counter[str]] = {}
    for o in runs:
        stack = o.case.stack
        framework = stack.can.framework or base_of("stacks", stack.name)
        names.setdefault(o.source, Counter())[framework.split("-")[0]] += 1
    return {source: count.most_common(1)[0][0] for source, count in names.items()}


def leave_out(outcomes: list[Outcome], frameworks: Mapping[str, str] | None = None) -> LeftOut:
    """Predict each source from the others, or from those of other `frameworks`."""
    runs = usable(outcomes)
    response = Response.of(*responses(runs))
    measured = np.log([o.case.step_time or np.nan for o in runs])
    leaves = leaves_of(runs, frameworks)
    whole_fit = fit(response, measured, leaves)
    n = len(runs)
    after = {k: np.full(n, np.nan) for k in SEEN}
    source, model, fitted = (np.zeros(n) for _ in range(3))
    out = LeftOut(runs, whole_fit, source, model, fitted, np.full((n, DRAWS), np.nan), np.zeros(n, dtype=bool), after)
    random = np.random.default_rng(0)
    for leaf in leaves:
        prior = whole_fit.source(leaf)
        part, truth = response.take(leaf.runs), measured[leaf.runs]
        out.named[leaf.runs] = any(a.family == leaf.family and a.source != leaf.source for a in leaves)
        out.source[leaf.runs] = part.log_time(prior.mean) - truth
        out.fitted[leaf.runs] = part.log_time((prior * evidence(part, truth, prior)).mean) - truth
        models = np.array([shape_key(runs[k]) for k in leaf.runs])
        for name in sorted(set(models)):
            seen, unseen = models != name, models == name
            x = (prior * evidence(part.take(seen), truth[seen], prior)).mean
            out.model[leaf.runs[unseen]] = part.take(unseen).log_time(x) - truth[unseen]
        for count in SEEN:
            out.calibrated[leaf.runs] = -_after(part, truth, prior, count, random)
            out.after[count][leaf.runs] = _mean_error(out.calibrated[leaf.runs])
    return out


def without_stacks(runs: list[Outcome]) -> LeftOut:
    """The runs as if none named its stack, as for a framework that is not in the catalog: predicted with the switches of the default stack, and
    with numbers that the runs of other frameworks gave without their stacks too. Of a source with many runs every k-th; none of obsolete
    stacks."""
    by_source: dict[str, list[dict[str, str]]] = {}
    for o in runs:
        if not o.case.stack.obsolete:
            by_source.setdefault(o.source, []).append({**o.case.row, "stack": UNNAMED})
    rows = [row for part in by_source.values() for row in part[:: -(-len(part) // MOST_UNNAMED)]]
    return leave_out(predict_rows(rows, respond=responding(rows)), frameworks=frameworks_of(runs))


def responses(runs: list[Outcome]) -> tuple[list[np.ndarray], list[float]]:
    """The seconds of each run at the points of the grid, and its doubt."""
    known = [(o.times, doubt_of(o.prediction, o.case.cluster)) for o in runs if o.prediction]
    return [times for times, _ in known if times is not None], [doubt for _, doubt in known]


def _after(
    response: Response, measured: np.ndarray, prior: Normal, seen: int, random: np.random.Generator
) -> np.ndarray:
    """ln predicted − ln measured of each run (rows) in each draw of `seen` other runs (columns). NaN where the draw has the run, or where
    there are too few runs."""
    n = len(measured)
    errors = np.full((n, DRAWS), np.nan)
    for draw in range(DRAWS if n > seen else 0):
        unseen = np.ones(n, dtype=bool)
        unseen[random.choice(n, seen, replace=False)] = False
        x = posterior(response.take(~unseen), measured[~unseen], prior).mean
        errors[unseen, draw] = response.take(unseen).log_time(x) - measured[unseen]
    return errors


def _mean_error(residuals: np.ndarray) -> np.ndarray:
    """The mean over draws of |predicted / measured − 1| of each run; NaN of a run without a draw."""
    sizes, counts = np.abs(np.expm1(-residuals)), np.isfinite(residuals).sum(axis=1)
    return np.where(counts > 0, np.nansum(sizes, axis=1) / np.maximum(counts, 1), np.nan)


def shape_key(o: Outcome) -> str:
    """Return the key of a model for leaving it out: its hidden size and its layers."""
    model = o.case.model
    return f"{model.hidden}x{model.layers}x{model.experts}"
