"""Three lines to a plan:

from meshwright import planner
result = planner.plan("llama3-70b", "dgx-h100", nodes=8)
result                                # in a notebook or a terminal; result.plan is the winner, result.to_toml() a plan file
"""

import time
from dataclasses import replace
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.interop.write import check_runnable
from meshwright.planner import goodput
from meshwright.planner.advice.infeasible import no_plan, none_fits
from meshwright.planner.question import Question, read
from meshwright.planner.result import Result
from meshwright.planner.search.branch_and_bound import Progress
from meshwright.planner.search.common_plans import common_choices
from meshwright.planner.search.leaders import solve
from meshwright.units import parse_rate


def plan(
    model: Any,
    cluster: Any = "",
    *,
    mtbf: str | float = "",
    checkpoint: str | float = "",
    restart: str | float = "",
    sites: int = 0,
    line: str | float = "",
    top: int = 10,
    common: bool = False,
    robust: bool = False,
    progress: Progress | None = None,
    **question: Any,
) -> Result:
    """The fastest plan that fits, with the reasons. Names, tables, objects or files for model, cluster and stack.

    `nodes`, `gpus`, `batch`, `seq`, `tokens`, `stack` and `set` describe the training (`question.read` has their types);
    `fix={"tp": 8}`, `most={"pp": 4}`, `least`, `without=["zero3"]`, `allow` constrain the search; `headroom="10%"` is memory to leave free.
    `framework="torchtitan"`: only plans that the framework runs and its settings can state, with its stack unless `stack` is given.
    `mtbf="3h"`, `checkpoint="60s"`, `restart="5min"` add the time lost to failures; `sites=2, line="100Gb/s"` the cost of several such clusters.
    `robust`: take the plan with the best worst case (the lowest upper edge of its band) instead of the fastest.
    `common`: search the common plans only, for a first answer in less than a second (`search.common_plans`).
    """
    request = read(model, cluster, **question)
    if common:
        space = request.space()
        request = replace(request, choices=common_choices(space.choices, space))
    world = request.config.cluster.world
    failures = goodput.read_reliability(world, mtbf, checkpoint, restart) if mtbf or checkpoint or restart else None
    between = line_rate(sites, line)
    result = run(request, top, progress)
    if robust:
        result = with_best_worst_case(result)
    return replace(result, reliability=failures, line=between, sites=sites)


def run(question: Question, top: int = 10, progress: Progress | None = None) -> Result:
    """Search the plans of a question; raise an error with the nearest answer where no plan is legal or none fits."""
    start = time.perf_counter()
    space = question.space()
    if not len(space.frames):
        raise no_plan(space)
    outcome, ranking = solve(space, question.headroom, progress)
    if ranking is None and question.framework:  # raise why the framework cannot be told the best plan, if one fits
        check_runnable(run(replace(question, framework=None)).config, question.framework)
    if ranking is None:
        raise none_fits(space, outcome, question.headroom) if outcome.misfits else no_plan(space)
    return Result(
        config=question.config.but(plan=ranking.best.plan),
        space=space,
        found=outcome,
        ranking=ranking,
        headroom=question.headroom,
        seconds=time.perf_counter() - start,
        top=max(1, top),
    )


def with_best_worst_case(result: Result) -> Result:
    """Make the leader with the best worst case (the lowest upper edge of its band) the winner."""
    best = result.robust[0]
    leaders = [best, *(c for c in result.ranking.leaders if c is not best)]
    ranking = replace(result.ranking, best=best, leaders=leaders)
    return replace(result, config=result.config.but(plan=best.plan), ranking=ranking, worst_case=True)


def line_rate(sites: int, line: str | float) -> float:
    """Bytes/s of the line between sites; 0: one site."""
    if not sites and not line:
        return 0.0
    if sites < 2 or not line:
        what = f"{sites} sites over a line of {str(line)[:20] or 'no bandwidth'}"
        why = "Several sites need a line between them, and a line needs several sites"
        raise MeshwrightError("MW-GOOD-002", what, why=why, fix="--sites 2 --line 100Gb/s")
    return parse_rate(line)
