"""The accuracy of predictions: predict every published run and score the errors by source.

    error      predicted / measured − 1, of step time
    bias       the median signed error: above 0, predictions are too slow
    MAPE       mean of |error|; the median and the 90th percentile are reported too
    Spearman   rank correlation of predicted and measured within a group (same source, model, GPUs, batch and stack)
    regret     slowdown of the configuration that is predicted to be the fastest of a group, against the measured fastest
    memory     error of peak memory
    false alarms   share of finished runs that are predicted not to fit; recall: share of failed runs predicted not to fit

Figures are macro-averaged over sources, so that a source with a thousand rows has the same weight as one with twenty.

Predictions of published runs. Runs of one model, cluster and stack are lowered and costed together, as one batch of plans; they may differ in
their global batch, and in the number of GPUs where it changes no link's rate.

A row that does not publish its recompute is predicted with what its framework does unless it is told otherwise (`Stack.usual_recompute`); where
frameworks differ from recipe to recipe, with the least that fits (none, selective, a quarter, half, three quarters of the
layers, all); if even that does not fit, without any, so that a wrong memory prediction does not change the predicted time.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.calibrate.runs.rows import PublishedRun, apply_readings, case, number
from meshwright.calibrate.runs.stack_fit import grid, varied_stack
from meshwright.cost.memory import rank_peaks
from meshwright.cost.step import step_cost
from meshwright.describe.plan import Plan
from meshwright.describe.result import Prediction
from meshwright.lower.step import step_program
from meshwright.predict.prediction import prediction

SHARES = (0.25, 0.5, 0.75)  # of the layers of a stage that a partial recompute may recompute


@dataclass
class Outcome:
    """One published run and its prediction, or the reason why it cannot be predicted."""

    case: PublishedRun
    prediction: Prediction | None = None
    refused: str = ""
    plan: Plan | None = None  # with the recompute that was assumed
    times: np.ndarray | None = field(default=None, repr=False)  # seconds at the points of `response.grid`

    @property
    def source(self) -> str:
        return self.case.row.get("file", "")

    @property
    def error(self) -> float | None:
        """Signed relative error of step time."""
        if self.prediction is None or not self.case.step_time:
            return None
        return self.prediction.step_time_s / self.case.step_time - 1

    @property
    def memory_error(self) -> float | None:
        """Signed relative error of peak memory, of the quantity and the pipeline stage that the source reports. None if the recompute is not
        published: it is assumed by what fits, so the memory is not predicted. Nor is it where the number of GPUs is unknown and ZeRO
        shards over them."""
        p, c = self.prediction, self.case
        if p is None or not c.memory or not c.row.get("recompute_mode"):
            return None
        if c.row.get("zero") != "0" and not c.row.get("gpus"):
            return None
        notes = c.row.get("notes", "")
        return p.memory_as(memory_quantity(notes), memory_stage(notes)) / c.memory - 1

    @property
    def pair_ratio(self) -> float | None:
        return number(self.case.row.get("pair_ratio"))

    def as_dict(self) -> dict[str, Any]:
        p = self.prediction
        out: dict[str, Any] = {
            "row_id": self.case.row_id,
            "assumed": self.case.assumed,
            "refused": self.refused or None,
        }
        keys = ("step_time_s", "step_time_low_s", "step_time_high_s", "memory_gib", "fits")
        return out | {k: getattr(p, k) if p else None for k in keys}


def memory_quantity(notes: str) -> str:
    """Return which of the three quantities a source reports: what nvidia-smi shows, torch's peak of live tensors, or what its allocator reserves."""
    if re.search(r"nvidia-smi", notes):
        return "used"
    return "allocated" if re.search(r"allocated|max_memory_|activations_gib", notes) else "reserved"


def memory_stage(notes: str) -> int | None:
    """The pipeline stage whose memory a source reports: the first (0) or the last (−1); None if it does not say, hence the fullest."""
    if re.search(r"last PP stage", notes):
        return -1
    return 0 if re.search(r"first pipeline stage", notes) else None


def predict_rows(
    rows: Iterable[dict[str, str]],
    progress: Callable[[], None] | None = None,
    respond: Callable[[PublishedRun], bool] | None = None,
) -> list[Outcome]:
    """Predict every row; `respond` chooses the runs whose step times are also computed at the points of `response.grid`."""
    out = [Outcome(c, refused=c.refused) for c in (apply_readings(case(row)) for row in rows)]
    problems: dict[Any, list[Outcome]] = {}
    for o in out:
        if not o.refused:
            problems.setdefault(costed_together(o.case), []).append(o)
        elif progress:
            progress()
    for together in problems.values():
        _predict(together, [o for o in together if respond and respond(o.case)])
        for _ in together if progress else ():
            progress()  # type: ignore[misc]
    return out


def problem_of(c: PublishedRun) -> tuple[Any, ...]:
    """Return the key of runs that differ in their plans only."""
    return *costed_together(c), c.workload.batch, c.cluster.world


def costed_together(c: PublishedRun) -> tuple[Any, ...]:
    """Return the key of runs that can be costed in one batch. A model is compared without its name, which differs between spellings."""
    model = c.model.model_dump_json(exclude={"name"}, exclude_defaults=True)
    workload = c.workload.model_dump_json(exclude={"batch"}, exclude_defaults=True)
    rates = tuple(c.cluster.device_bandwidth(k) for k in range(len(c.cluster.levels)))
    return model, workload, c.cluster.name, rates, c.stack.model_dump_json(exclude_defaults=True)


def _predict(together: list[Outcome], responding: list[Outcome]) -> None:
    """Set the predictions of runs of one problem, and the step times of some of them at the points of the grid. All are costed as one batch,
    first every run with the numbers of its stack, then the points of each responding run."""
    first = together[0].case
    unknown = [o for o in together if not (o.case.row.get("recompute_mode") or first.stack.usual_recompute)]
    least = dict(zip(map(id, unknown), _least_that_fits(unknown), strict=True))
    for o in together:
        o.plan = least.get(id(o)) or o.case.plan
    points = grid()
    varied, stack = together, first.stack
    if responding:
        varied = together + [o for o in responding for _ in points]
        stack = varied_stack(first.stack, len(together), np.tile(points, (len(responding), 1)))
    plans = [o.plan for o in varied if o.plan is not None]
    cost = step_cost(
        step_program(first.model, plans, first.workload, stack, workloads=[o.case.workload for o in varied]),
        first.cluster,
    )
    times = np.broadcast_to(cost.time, len(varied))[len(together) :].reshape(-1, len(points))
    for o, row in zip(responding, times, strict=True):
        o.times = row
    for at, o in enumerate(together):
        c = o.case
        if id(o) in least:
            used = least[id(o)]
            text = str("full" if used is None else used.recompute)
            text += f" of {used.recompute_layers} layers per stage" if used and used.recompute_layers else ""
            c.assumed = [a if not a.startswith("recompute") else f"recompute: {text}" for a in c.assumed]
        o.prediction = prediction(cost, c.config.but(plan=plans[at], assumed=tuple(c.assumed)), at)


def _recompute_choices(plan: Plan, layers: int) -> list[Plan]:
    """The plan with each recompute, the cheapest first."""
    longest = max(plan.stage_layers(layers))
    counts = sorted({max(1, round(share * longest)) for share in SHARES} - {longest})
    partly = [plan.but(recompute="full", recompute_layers=count) for count in counts]
    return [plan.but(recompute="none"), plan.but(recompute="selective"), *partly, plan.but(recompute="full")]


def _least_that_fits(runs: list[Outcome]) -> list[Plan | None]:
    """Each run's plan with the cheapest recompute with which it fits; None if none does."""
    if not runs:
        return []
    first = runs[0].case
    choices = [_recompute_choices(o.case.plan, first.model.layers) for o in runs]
    plans = [plan for some in choices for plan in some]
    workloads = [o.case.workload for o, some in zip(runs, choices, strict=True) for _ in some]
    peak = rank_peaks(step_program(first.model, plans, first.workload, first.stack, workloads=workloads)).max(axis=0)
    fits = iter((peak <= first.cluster.accelerator.memory).tolist())
    return [next((plan for plan, fit in [(plan, next(fits)) for plan in some] if fit), None) for some in choices]


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
class PlannerChoice:
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


def choices(outcomes: list[Outcome], predicted: np.ndarray) -> list[PlannerChoice]:
    """The choice between the plans of every problem with at least three. Repeated runs of one plan count once, by their median."""
    groups: dict[tuple, dict[tuple, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for o, seconds in zip(outcomes, predicted, strict=True):
        configuration = float(f"{seconds:.9g}"), o.case.plan.title()
        groups[group_key(o)][configuration].append(o)
    plans = [
        [
            Configuration(runs[0], key[0], float(np.median([o.case.step_time for o in runs])))
            for key, runs in group.items()
        ]
        for group in groups.values()
    ]
    return [PlannerChoice(tuple(sorted(some, key=lambda c: c.predicted))) for some in plans if len(some) >= 3]


def ranking(outcomes: list[Outcome], predicted: np.ndarray) -> tuple[float | None, float | None]:
    """Mean Spearman and mean regret of the predicted seconds over problems."""
    groups, rhos = choices(outcomes, predicted), []
    for choice in groups:
        seconds = np.array([(c.predicted, c.measured) for c in choice.plans]).T
        ranks = [np.argsort(np.argsort(x)).astype(float) for x in seconds]
        if ranks[0].std() and ranks[1].std():
            rhos.append(float(np.corrcoef(ranks[0], ranks[1])[0, 1]))
    regrets = [choice.regret for choice in groups]
    return (float(np.mean(rhos)) if rhos else None), (float(np.mean(regrets)) if regrets else None)


def off_the_line(outcomes: list[Outcome]) -> np.ndarray:
    """Return how far runs are from the straight line through two runs that differ from them in the number of layers only, as a share of their time.

    The step time of a plan is linear in its layers, so these distances are the noise of the measurements: some percent between runs on a
    cluster. Where they are a millionth, the times were not measured as whole steps but added up from the times of single layers."""
    groups: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for o in outcomes:
        if o.refused or o.case.plan.layers_per_stage:
            continue
        model, plan, row = o.case.model, o.case.plan, o.case.row
        shape = model.model_dump_json(exclude={"name", "layers"}, exclude_defaults=True)
        key = (o.source, shape, row["gpus"], row["global_batch"], row["seq_len"], o.case.stack.name, plan.title())
        groups[key][model.layers] = o.case.step_time or math.nan
    errors = []
    for times in groups.values():
        layers = sorted(times)
        for low, middle, high in zip(layers, layers[1:], layers[2:], strict=False):
            on_line = np.interp(middle, [low, high], [times[low], times[high]])
            errors.append(abs(on_line / times[middle] - 1))
    return np.array(errors)


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
