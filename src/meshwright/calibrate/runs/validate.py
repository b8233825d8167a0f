"""The accuracy of predictions: predict every published run and score the errors by source.

    error      predicted / measured − 1, of step time
    bias       the median signed error: above 0, predictions are too slow
    MAPE       mean of |error|; the median and the 90th percentile are reported too
    Spearman   rank correlation of predicted and measured within a group (same source, model, GPUs, batch and stack)
    regret     slowdown of the configuration that is predicted to be the fastest of a group, against the measured fastest
    memory     error of peak memory
    false alarms   share of finished runs that are predicted not to fit; recall: share of failed runs predicted not to fit

Figures are macro-averaged over sources, so that a source with a thousand rows has the same weight as one with twenty.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.calibrate.runs.outcomes import Outcome, problem_of

STALLED = 1.3  # two runs of one configuration whose times differ by more than this factor: one of them stalled
NOT_FOR_TIME = ("megatron_lm_golden_values",)  # sources scored for memory only


@dataclass
class Score:
    """Figures of one source or group."""

    rows: int = 0
    refused: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    bias: float | None = None
    mape: float | None = None
    median: float | None = None
    p90: float | None = None
    inside_band: float | None = None
    spearman: float | None = None
    regret: float | None = None
    memory_median: float | None = None
    false_alarms: float | None = None
    not_scored: int = 0

    def as_dict(self) -> dict[str, Any]:
        return self.__dict__.copy()


def score(outcomes: list[Outcome]) -> Score:
    """Compute the errors of a set of rows. Rows without a step time, and those of `not_scored`, are counted but their step time is not scored."""
    s = Score(rows=len(outcomes))
    repeated = {o.case.row.get("file", "") for o in outcomes if o.pair_ratio is not None}
    usable = []
    for o in outcomes:
        if o.refused:
            s.refused += 1
            s.reasons[o.refused] = s.reasons.get(o.refused, 0) + 1
        elif o.error is None or not_scored(o, repeated):
            s.not_scored += 1
        else:
            usable.append(o)
    if usable:
        errors = np.array([o.error for o in usable])
        size = np.abs(errors)
        s.bias, s.mape = float(np.median(errors)), float(size.mean())
        s.median, s.p90 = float(np.median(size)), float(np.quantile(size, 0.9))
        inside = [
            o.prediction.step_time_low_s <= o.case.step_time <= o.prediction.step_time_high_s  # type: ignore[union-attr, operator]
            for o in usable
        ]
        s.inside_band = float(np.mean(inside))
        s.spearman, s.regret = ranking(usable, np.array([o.prediction.step_time_s for o in usable if o.prediction]))
    memory = [abs(o.memory_error) for o in outcomes if o.memory_error is not None]
    if memory:
        s.memory_median = float(np.median(memory))
    finished = [o.prediction.fits for o in outcomes if o.prediction and o.case.step_time and not stalled(o, repeated)]
    if finished:
        s.false_alarms = 1 - float(np.mean(finished))
    return s


def stalled(o: Outcome, repeated: set[str]) -> bool:
    """Whether a row of a source in `repeated` has no repetition that agrees with it."""
    return o.case.row.get("file", "") in repeated and (o.pair_ratio or math.inf) > STALLED


def not_scored(o: Outcome, repeated: set[str]) -> bool:
    """Whether the step time of a run is shown but not scored: its source is for memory only, or in a source that repeats its runs none agrees with
    it, so that it may have stalled."""
    return o.case.row.get("file", "") in NOT_FOR_TIME or stalled(o, repeated)


def recall(failed: list[Outcome]) -> float | None:
    """Share of failed runs that are predicted not to fit; None if there are no failed runs."""
    predicted = [not o.prediction.fits for o in failed if o.prediction is not None]
    return float(np.mean(predicted)) if predicted else None


def group_key(o: Outcome) -> tuple[Any, ...]:
    """The problem of a run in its source. A planner chooses between the plans of one problem, not between stacks or numbers of heads."""
    return o.source, *problem_of(o.case)


@dataclass(frozen=True)
class Configuration:
    """One plan of a problem: its first run, its predicted seconds, and the median of its measured ones."""

    run: Outcome
    predicted: float
    measured: float


@dataclass(frozen=True)
class Choice:
    """The plans of one problem, the predicted fastest first."""

    plans: tuple[Configuration, ...]

    @property
    def chosen(self) -> Configuration:
        return self.plans[0]

    @property
    def fastest(self) -> Configuration:
        return min(self.plans, key=lambda c: c.measured)

    @property
    def regret(self) -> float:
        return self.chosen.measured / self.fastest.measured - 1


def choices(outcomes: list[Outcome], predicted: np.ndarray) -> list[Choice]:
    """The choice between the plans of every problem with at least three. Repeated runs of one plan count once, by their median."""
    groups: dict[tuple, dict[tuple, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for o, seconds in zip(outcomes, predicted, strict=True):
        configuration = float(f"{seconds:.9g}"), o.case.plan.title()  # type: ignore[union-attr]
        groups[group_key(o)][configuration].append(o)
    return [
        Choice(tuple(sorted((_configuration(runs, key[0]) for key, runs in group.items()), key=lambda c: c.predicted)))
        for group in groups.values()
        if len(group) >= 3
    ]


def _configuration(runs: list[Outcome], predicted: float) -> Configuration:
    return Configuration(runs[0], predicted, float(np.median([o.case.step_time for o in runs])))


def ranking(outcomes: list[Outcome], predicted: np.ndarray) -> tuple[float | None, float | None]:
    """Mean Spearman and mean regret of the predicted seconds over problems."""
    found, rhos = choices(outcomes, predicted), []
    for choice in found:
        seconds = np.array([(c.predicted, c.measured) for c in choice.plans]).T
        ranks = [np.argsort(np.argsort(x)).astype(float) for x in seconds]
        if ranks[0].std() and ranks[1].std():
            rhos.append(float(np.corrcoef(ranks[0], ranks[1])[0, 1]))
    regrets = [choice.regret for choice in found]
    return (float(np.mean(rhos)) if rhos else None), (float(np.mean(regrets)) if regrets else None)


def off_the_line(outcomes: list[Outcome]) -> np.ndarray:
    """How far runs are from the straight line through two runs that differ from them in the number of layers only, as a share of their time.

    The step time of a plan is linear in its layers, so these distances are the noise of the measurements: some percent between runs on a
    cluster. Where they are a millionth, the times were not measured as whole steps but added up from the times of single layers."""
    groups: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for o in outcomes:
        model, plan, row = o.case.model, o.case.plan, o.case.row
        if model is None or plan is None or plan.layers_per_stage:
            continue
        shape = model.model_dump_json(exclude={"name", "layers"}, exclude_defaults=True)
        key = (o.source, shape, row["gpus"], row["global_batch"], row["seq_len"], o.case.stack.name, plan.title())
        groups[key][model.layers] = o.case.step_time or math.nan
    found = []
    for times in groups.values():
        layers = sorted(times)
        for low, middle, high in zip(layers, layers[1:], layers[2:], strict=False):
            on_line = np.interp(middle, [low, high], [times[low], times[high]])
            found.append(abs(on_line / times[middle] - 1))
    return np.array(found)


def macro(scores: dict[str, Score]) -> dict[str, float]:
    """Compute the mean of each figure over the sources that have it; sources in `NOT_FOR_TIME` count for memory only."""
    out = {}
    for name in ("bias", "mape", "median", "p90", "inside_band", "spearman", "regret", "memory_median", "false_alarms"):
        values = [
            getattr(s, name)
            for source, s in scores.items()
            if getattr(s, name) is not None and (source not in NOT_FOR_TIME or name == "memory_median")
        ]
        if values:
            out[name] = float(np.mean(values))
    return out


def by(outcomes: list[Outcome], columns: list[str]) -> dict[str, list[Outcome]]:
    """Group outcomes by the values of these columns."""
    names = {"source": "file"}
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes:
        groups[" · ".join(o.case.row.get(names.get(c, c), "") or "?" for c in columns)].append(o)
    return dict(groups)
