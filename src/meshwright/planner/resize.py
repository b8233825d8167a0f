"""Another plan for the same training on fewer (or more) devices: what a restart runs when a node is lost.

The training stays the same: model, global batch, sequence, dtypes, compression and learning rate are those of the given plan. The search
chooses a new layout (degrees, ZeRO, recompute, micro-batch, schedule) among the common plans that `train` can run and that fit in memory.

Not every number of devices has a legal plan: 3 ranks cannot divide a batch of 8. Then the largest smaller number that has one is used and
the other devices stay idle. Local SGD is an algorithm of its replicas: its plan keeps every degree except the number of replicas.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.question import base_plan
from meshwright.planner.search.choices import DTYPES, choices
from meshwright.planner.search.common_plans import HEADROOM, common_choices
from meshwright.planner.search.leaders import solve
from meshwright.planner.search.space import Space

NOT_FIT = 3  # exit code


def plan_for_world(config: Config, world: int) -> Config:
    """Return the configuration with a plan for as many of `world` devices as possible; unchanged if its plan has this size."""
    if config.plan.world == world:
        return config
    for count in range(world, 0, -1):
        resized = next(trainable_plans(config, count), None)
        if resized is not None:
            return resized
    raise MeshwrightError(
        "MW-PLANNER-009",
        f"no plan trains {config.model.name or 'this model'} with a batch of {config.workload.batch} on {world} devices or fewer",
        why="A smaller layout must divide the same global batch and fit in the memory of its devices",
        fix=f"start at least {config.plan.world} ranks: {config.plan.title()}",
        exit_code=NOT_FIT,
    )


def trainable_plans(config: Config, count: int) -> Iterator[Config]:
    """Configurations on exactly `count` devices that `train` can run, the best first."""
    try:
        resized = config.but(cluster=config.cluster.with_gpus(count))
    except MeshwrightError:  # the levels of the cluster do not hold this number
        return
    plans = more_replicas(config.plan, count) if config.plan.average_every else best_plans(resized)
    for plan in plans:
        candidate = resized.but(plan=plan)
        try:
            candidate.check_trainable()
        except MeshwrightError:
            continue
        yield candidate


def more_replicas(plan: Plan, count: int) -> Iterator[Plan]:
    """Set the number of replicas that fill `count` devices, if it is a whole number."""
    if count % (plan.world // plan.replicate) == 0:
        yield plan.but(replicate=count // (plan.world // plan.replicate))


def best_plans(config: Config) -> Iterator[Plan]:
    """The best common plans of a configuration's cluster that fit in memory, in the dtypes of its plan."""
    base = base_plan(config).but(**{name: getattr(config.plan, name) for name in DTYPES})
    bucket = config.plan.bucket if "plan.bucket" in config.origins else 0.0
    config = config.but(plan=base)
    every = replace(choices(base, (), tuple(config.stack.order)), offload=False)
    space = Space(config, common_choices(every, Space(config, every, bucket)), bucket)
    if not len(space.frames):
        return
    _, ranking = solve(space, HEADROOM)
    if ranking is not None:
        yield from (candidate.plan for candidate in ranking.leaders)
