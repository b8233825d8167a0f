"""Predictions of published runs. Runs of one model, cluster and stack are lowered and costed together, as one batch of plans; they may differ in
their global batch, and in the number of GPUs where it changes no link's rate.

A row that does not publish its recompute is predicted with the least that fits (none, selective, a quarter, half, three quarters of the
layers, all); if even that does not fit, without any, so that a wrong memory prediction does not change the predicted time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.calibrate.runs.readings import apply_readings
from meshwright.calibrate.runs.response import grid, varied_stack
from meshwright.calibrate.runs.rows import Case, case, number
from meshwright.cost.memory import memory
from meshwright.cost.predict import prediction
from meshwright.cost.step import step_cost
from meshwright.describe.plan import Plan
from meshwright.describe.result import Prediction
from meshwright.describe.workload import Workload
from meshwright.lower.stages import bounding_ranks
from meshwright.lower.step import step_program

SHARES = (0.25, 0.5, 0.75)  # of the layers of a stage that a partial recompute may recompute


@dataclass
class Outcome:
    """One published run and its prediction, or the reason why it cannot be predicted."""

    case: Case
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
    """Which of the three quantities a source reports: what nvidia-smi shows, torch's peak of live tensors, or what its allocator reserves."""
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
    respond: Callable[[Case], bool] | None = None,
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


def problem_of(c: Case) -> tuple[Any, ...]:
    """What runs share that differ in their plans only."""
    assert c.cluster is not None
    assert c.workload is not None
    return *costed_together(c), c.workload.batch, c.cluster.world


def costed_together(c: Case) -> tuple[Any, ...]:
    """What the runs of one batch of plans share. A model is compared without its name, which differs between spellings."""
    assert c.model is not None
    assert c.cluster is not None
    assert c.workload is not None
    model = c.model.model_dump_json(exclude={"name"}, exclude_defaults=True)
    workload = c.workload.model_dump_json(exclude={"batch"}, exclude_defaults=True)
    rates = tuple(c.cluster.device_bandwidth(k) for k in range(len(c.cluster.levels)))
    return model, workload, c.cluster.name, rates, c.stack.name, c.stack.attention, c.stack.fused


def _varied_workload(runs: list[Outcome]) -> Workload:
    """The workload of a batch of plans, one of each run, with an array over the batch in the place of the global batch."""
    workloads = [o.case.workload for o in runs if o.case.workload is not None]
    return workloads[0].model_copy(update={"batch": np.array([float(w.batch) for w in workloads])})


def _predict(together: list[Outcome], responding: list[Outcome]) -> None:
    """Set the predictions of runs of one problem, and the step times of some of them at the points of the grid. All are costed as one batch,
    first every run with the numbers of its stack, then the points of each responding run."""
    first = together[0].case
    assert first.model is not None
    assert first.cluster is not None
    unknown = [o for o in together if not o.case.row.get("recompute_mode")]
    least = dict(zip(map(id, unknown), _least_that_fits(unknown), strict=True))
    for o in together:
        assert o.case.plan is not None
        o.plan = least.get(id(o)) or o.case.plan
    points = grid()
    varied, stack = together, first.stack
    if responding:
        varied = together + [o for o in responding for _ in points]
        stack = varied_stack(first.stack, len(together), np.tile(points, (len(responding), 1)))
    plans = [o.plan for o in varied if o.plan is not None]
    cost = step_cost(step_program(first.model, plans, _varied_workload(varied), stack), first.cluster)
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
        assert c.model is not None
        assert c.cluster is not None
        assert c.workload is not None
        o.prediction = prediction(cost, c.model, c.cluster, plans[at], c.workload, c.stack, c.assumed, at)


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
    assert first.model is not None
    assert first.cluster is not None
    choices = [_recompute_choices(o.case.plan, first.model.layers) for o in runs if o.case.plan is not None]
    plans = [plan for some in choices for plan in some]
    workload = _varied_workload([o for o, some in zip(runs, choices, strict=True) for _ in some])
    program = step_program(first.model, plans, workload, first.stack)
    ranks = bounding_ranks(program.batch)
    peak = np.maximum.reduce([np.broadcast_to(sum(memory(program, h).values()), len(plans)) for h in ranks])
    fits = iter((peak <= first.cluster.accelerator.memory).tolist())
    return [next((plan for plan, fit in [(plan, next(fits)) for plan in some] if fit), None) for some in choices]
