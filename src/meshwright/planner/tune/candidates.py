"""The plans that `tune` chooses from: the user's own, the best of each strategy, then the fastest of every other shape."""

from collections.abc import Callable
from typing import Any

from meshwright.describe import legality
from meshwright.describe.config import Asked, Config
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.interop.files import configure
from meshwright.interop.keys import Framework
from meshwright.interop.write import is_runnable
from meshwright.planner import api
from meshwright.planner.question import read
from meshwright.planner.search.branch_and_bound import Progress

LIMITS = ("fix", "most", "least", "without")
DEGREES = {"plan.tp", "plan.pp", "plan.cp", "plan.ep", "plan.shard", "plan.replicate"}


def candidates(
    source: Any, cluster: Any, target: Framework | None, count: int, progress: Progress | None, **question: Any
) -> tuple[Config, list[Plan]]:
    """The configuration of a question, and at most `count` plans that its runner can run."""
    result = api.plan(source, cluster, framework=target or "", progress=progress, **question)
    config, ranking = result.config, result.ranking
    runs = runner(config, target)
    offered = [c.plan for c in (ranking.best, *ranking.strategies.values(), *ranking.leaders)]
    found: list[Plan] = []
    own = user_plan(source, cluster, question, config)
    for plan in ([own] if own else []) + offered:
        if len(found) < count and plan not in found and runs(plan):
            found.append(plan)
    if not found:
        why = None if target else legality.not_trained(offered[0], config.model, config.workload, config.stack)
        raise MeshwrightError(
            "MW-TUNE-005",
            f"no plan of {config.model.name} on {config.cluster.world} GPUs can be run by {target.title if target else 'our trainer'}",
            why=f"{len(offered)} plans were predicted, none of them can be run{f'. The first: {why.what}' if why else ''}",
            fix=(why.fix if why else "") or "meshwright plan MODEL --for FRAMEWORK shows what can be run",
        )
    return config, found


def configuration(source: Any, cluster: Any, target: Framework | None, **question: Any) -> Config:
    """The configuration of a question, without a search."""
    return read(source, cluster, framework=target or "", **question).config


def runner(config: Config, target: Framework | None) -> Callable[[Plan], bool]:
    """Whether what runs the plans can run one."""
    if target:
        return lambda plan: is_runnable(config, target, plan)
    return lambda plan: legality.not_trained(plan, config.model, config.workload, config.stack) is None


def user_plan(source: Any, cluster: Any, question: Any, config: Config) -> Plan | None:
    """The plan of the user's file, if it has one that is legal in the configuration of the question. None if the question limits the search,
    since the plan may lie outside of the limits."""
    if any(question.get(name) for name in LIMITS):
        return None
    asked = {name: value for name, value in question.items() if name in Asked.__annotations__ and value}
    try:
        stated = configure(source, cluster, **asked)
        return config.but(plan=stated.plan).check().plan if DEGREES & set(stated.origins) else None
    except MeshwrightError:
        return None
