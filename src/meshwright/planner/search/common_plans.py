"""The best of the common plans, in under a second: for `estimate` without a plan, and for curves over GPU counts.

The whole space has every schedule, axis order, kind of context parallelism and hybrid sharding; searching it takes seconds. Most of the gain
is in the degrees, the ZeRO stage, experts, micro-batch and recompute. So here

    schedule   1F1B or interleaved          order      the stack's
    sharding   over all data-parallel ranks cp kind    ring
    sp         always with tp, where the sequence divides

and everything else is searched as in `branch_and_bound`. On the catalog's models the result is within about 5% of the full search.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.describe.cluster import Cluster
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.choices import Choices, free
from meshwright.planner.search.leaders import solve
from meshwright.planner.search.space import Space

HEADROOM = 0.05  # share of the memory left free


def common_choices(base: Plan, model: Model, cluster: Cluster, workload: Workload, stack: Stack) -> Choices:
    """The choices of a search restricted to common plans."""
    every = free(base)
    words: dict[str, tuple[Any, ...]] = {
        "schedule": ("1f1b", "interleaved"),
        "order": (tuple(stack.order),),
        "cp_kind": ("ring",),
    }
    if model.kind == "transformer" and workload.seq % cluster.node_size == 0:
        words["sp"] = (True,)
    return replace(every, words={**every.words, **words}, hybrid=False)


def best_common_plan(
    model: Model, cluster: Cluster, workload: Workload, stack: Stack, base: Plan | None = None
) -> tuple[Candidate | None, int]:
    """The best common plan that leaves 5% of the memory free, and how many plans it is the best of; None: none fits."""
    base = base or Plan(grad_dtype=stack.gradient_dtype)
    choices = common_choices(base, model, cluster, workload, stack)
    space = Space(model, cluster, workload, stack, choices, base)
    if not len(space.frames):
        return None, 0
    found, ranking = solve(space, HEADROOM)
    return (ranking.best if ranking else None), found.legal
