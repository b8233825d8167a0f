"""The nearest legal plan after the model, the cluster or the workload changed.

A person who picks another model, or moves the number of GPUs, expects the plan to follow: the data-parallel degree takes the devices that are left
(`fixes.completed`); where that is not enough, tensor, context and pipeline degrees move to other values, the nearest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

from meshwright.describe.legality.case import Case, Flag
from meshwright.describe.legality.fixes import completed, divisors

MOST_TRIED = 240
MOST_DEGREE = 64  # of tensor and pipeline parallelism, if the plan has no larger one
PLAIN = {"plan.virtual": 1, "plan.schedule": "1f1b", "plan.layers_per_stage": ()}  # a pipeline without special needs


def mended(case: Case, legal: Callable[[Case], Flag]) -> dict[str, Any] | None:
    """Return the changes that make the plan legal here: {} if it is legal, None if no such change was found."""
    if bool(legal(case)):
        return {}
    for settings in islice(_candidates(case), MOST_TRIED):
        trial = completed(case, settings)
        if bool(legal(case.with_settings(trial))):
            changed = {
                path: value
                for path, value in trial.items()
                if path == "plan.layers_per_stage" or case.setting(path) != value
            }
            if not case.stage_entries:
                changed.pop("plan.layers_per_stage", None)
            return changed
    return None


def _candidates(case: Case) -> Iterator[dict[str, Any]]:
    """Settings to try: the plan as it is, then other degrees, the smallest total change first; at each, also the plain pipeline."""
    world = case.cluster.world if "cluster" in case.given else case.world
    cut = [d for d in divisors(world) if d <= MOST_DEGREE or d in (case.tp, case.pp, case.cp)]
    degrees = [(tp, pp, cp) for tp, pp, cp in product(cut, cut, {1, int(case.cp)}) if world % (tp * pp * cp) == 0]
    for tp, pp, cp in sorted(degrees, key=lambda d: _distance(case, *d)):
        chosen: dict[str, Any] = {"plan.tp": tp, "plan.pp": pp, "plan.cp": cp}
        if tp == 1:
            chosen["plan.sp"] = False
        if pp > 1:
            yield chosen
        yield chosen | PLAIN
        if case.expert_tp or case.ep > 1:
            yield chosen | PLAIN | {"plan.ep": 1, "plan.expert_tp": 0}


def _distance(case: Case, tp: int, pp: int, cp: int) -> tuple[float, int]:
    moved = (abs(math.log2(new / old)) for new, old in ((tp, case.tp), (pp, case.pp), (cp, case.cp)))
    return sum(moved), tp * pp * cp
