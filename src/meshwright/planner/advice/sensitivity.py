"""What to change first: the throughput of the winner with one quantity 20% better or worse, and its scaling.

Each row re-costs the winner under a cluster, stack or batch that differs in one number by ±20%, and checks whether another leader would then
win. The largest change is what to buy or tune first; a row without change needs no attention.

Scaling. **Weak**: the same work per device on the fewest devices on which this plan's shape fits; T(few) / T(all), 100% is perfect. **Strong**: twice
the data-parallel ranks on the same batch; twice as fast is perfect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.step import step_cost
from meshwright.describe.base import MOST, MOST_DEVICES
from meshwright.describe.cluster import Cluster
from meshwright.describe.legality import batch_unit
from meshwright.describe.plan import Plan, divisors
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.lower.step import step_program
from meshwright.planner.search.space import Space
from meshwright.planner.search.strategies import Candidate

SHARE = 0.2
MOST_RIVALS = 12
CLEARLY = 0.01  # share of the step by which another plan must be faster to be named


@dataclass(frozen=True)
class Sensitivity:
    """Change of the winner's throughput (a share) with 20% less and 20% more of a quantity; None: not possible."""

    what: str
    less: float | None
    more: float | None
    note: str = ""  # another plan that would win

    @property
    def swing(self) -> float:
        return max(abs(x) for x in (self.less, self.more, 0.0) if x is not None)


@dataclass(frozen=True)
class Scaling:
    """Weak scaling from the fewest devices on which the plan fits; strong scaling to twice the devices."""

    fewest: int
    weak: float | None
    doubled: float | None  # times as fast


def links(cluster: Cluster, change: Callable[[int, dict[str, float]], dict[str, float]]) -> Cluster:
    """Change the links of a cluster: `change` gets the index of a level and the fields of its link."""
    levels = []
    for k, level in enumerate(cluster.levels):
        numbers = {"bandwidth": level.link.bandwidth, "alpha": level.link.alpha, "hop": level.link.hop}
        levels.append(level.model_copy(update={"link": level.link.model_copy(update=change(k, numbers))}))
    # A copy would keep the cached properties of the old cluster.
    return Cluster(**{**{name: getattr(cluster, name) for name in type(cluster).model_fields}, "levels": tuple(levels)})


def device(cluster: Cluster, **update: object) -> Cluster:
    return cluster.model_copy(update={"accelerator": cluster.accelerator.model_copy(update=update)})


def changed(space: Space, what: str, by: float) -> tuple[Cluster, Stack, Workload]:
    """The problem with one quantity `by` times as large."""
    c, s, w = space.cluster, space.stack, space.workload
    match what:
        case "bandwidth in the node":
            c = links(c, lambda k, n: {"bandwidth": n["bandwidth"] * (by if k == 0 else 1)})
        case "bandwidth between nodes":
            c = links(c, lambda k, n: {"bandwidth": n["bandwidth"] * (by if k > 0 else 1)})
        case "latency of links":
            c = links(c, lambda _, n: {"alpha": n["alpha"] * by, "hop": n["hop"] * by})
        case "GPU rate":
            c = device(c, peak={dtype: rate * by for dtype, rate in c.accelerator.peak.items()})
        case "memory bandwidth":
            c = device(c, memory_bandwidth=c.accelerator.memory_bandwidth * by)
        case "host time":
            s = s.model_copy(update={"launch": s.launch * by, "collective_launch": s.collective_launch * by})
    return c, s, w


def sensitivities(space: Space, best: Candidate, rivals: Sequence[Candidate]) -> list[Sensitivity]:
    """Return the sensitivity to each quantity, the largest swing first."""
    what = ["GPU rate", "memory bandwidth", "bandwidth in the node", "latency of links", "host time"]
    if space.cluster.world > space.cluster.node_size:
        what.insert(3, "bandwidth between nodes")
    rows = [_one(space, best, rivals[:MOST_RIVALS], name) for name in what]
    rows.append(_batch(space, best))
    return sorted(rows, key=lambda row: -row.swing)


def _one(space: Space, best: Candidate, rivals: Sequence[Candidate], what: str) -> Sensitivity:
    plans = [best.plan, *(c.plan for c in rivals if c.plan != best.plan)]
    walked = np.array([1.0, *(c.time / c.closed for c in rivals if c.plan != best.plan)])
    walked[0] = best.time / best.closed
    changes, notes = [], []
    for by, word in ((1 - SHARE, "less"), (1 + SHARE, "more")):
        cluster, stack, workload = changed(space, what, by)
        times = walked * step_cost(step_program(space.model, plans, workload, stack), cluster).time
        changes.append(best.time / float(times[0]) - 1)
        if times.min() < times[0] * (1 - CLEARLY):
            notes.append(f"with 20% {word}: {plans[int(times.argmin())].title()}")
    return Sensitivity(what, changes[0], changes[1], "; ".join(notes))


def _batch(space: Space, best: Candidate) -> Sensitivity:
    """The nearest batches to ±20% that the plan divides; throughput in samples, since the step itself grows."""
    plan, batch = best.plan, space.workload.batch
    unit = batch_unit(plan, space.stack)
    changes: list[float | None] = []
    used = []
    for by in (1 - SHARE, 1 + SHARE):
        other = round(batch * by / unit) * unit
        if other in (0, batch):
            other = batch + (unit if by > 1 else -unit)
        time = timed(space, plan, space.workload.but(batch=other)) if 0 < other <= MOST else None
        used.append(f"{other:,}")
        changes.append(None if time is None else (other / time) / (batch / best.closed) - 1)
    return Sensitivity("batch", changes[0], changes[1], f"batches of {used[0]} and {used[1]}")


def timed(space: Space, plan: Plan, workload: Workload | None = None, cluster: Cluster | None = None) -> float | None:
    """Seconds of a plan by the closed forms; None where it is not legal or does not fit."""
    cluster, workload = cluster or space.cluster, workload or space.workload
    if not plan.is_legal(space.model, workload, cluster, space.stack):
        return None
    cost = step_cost(step_program(space.model, plan, workload, space.stack), cluster)
    return float(cost.time[0]) if float(cost.peak_memory[0]) <= cluster.accelerator.memory else None


def resized(plan: Plan, dp: int) -> Plan | None:
    """Move the plan to another number of data-parallel ranks, with the same number of shards if possible."""
    shard = plan.shard if plan.replicate > 1 and dp % plan.shard == 0 else dp if plan.shard > 1 else 1
    keeps = plan.zero if shard * plan.cp > 1 else 0
    try:
        return plan.but(replicate=dp // shard, shard=shard, zero=keeps)
    except MeshwrightError:
        return None


def scaling(space: Space, best: Candidate) -> Scaling:
    plan, cluster, workload = best.plan, space.cluster, space.workload
    rest = plan.world // plan.dp
    fewest, weak = plan.world, None
    for dp in divisors(plan.dp)[:-1]:
        small = resized(plan, dp)
        share = workload.but(batch=workload.batch * dp // plan.dp)
        time = timed(space, small, share, cluster.with_gpus(rest * dp)) if small else None
        if time is not None:
            fewest, weak = rest * dp, time / best.closed
            break
    twice = resized(plan, 2 * plan.dp)
    reaches = len(cluster.levels) > 1 and 2 * plan.world <= MOST_DEVICES
    time = timed(space, twice, workload, cluster.with_gpus(2 * plan.world)) if twice and reaches else None
    return Scaling(fewest, weak, best.closed / time if time else None)
