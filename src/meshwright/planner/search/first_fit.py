"""The first plan of a ladder from simple to complex that fits.

    DDP → ZeRO-1 → ZeRO-3 → tensor parallel in the node → + pipeline between nodes, each without and with recompute

The usual advice for a first plan, as code: a plan that runs, not the fastest one.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cost.step import step_cost
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan, divisors
from meshwright.errors import MeshwrightError
from meshwright.lower.step import step_program


def ladder(model: Model, cluster: Cluster) -> Iterator[Plan]:
    """Rungs from simple to complex, for this many devices."""
    world, node = cluster.world, min(cluster.node_size, cluster.world)
    for recompute in ("none", "full"):
        yield Plan(replicate=world, recompute=recompute)
        if world > 1:
            yield Plan(shard=world, zero=1, recompute=recompute)
            yield Plan(shard=world, zero=3, recompute=recompute)
    if model.kind != "transformer":
        return
    for tp in [d for d in divisors(node) if d > 1]:
        for pp in [d for d in divisors(world // tp) if d <= model.layers] if world % tp == 0 else []:
            for recompute in ("none", "full"):
                dp = world // (tp * pp)
                shared = {"shard": dp, "zero": 1} if dp > 1 else {}
                experts = max((e for e in divisors(dp) if model.experts and model.experts % e == 0), default=1)
                yield Plan(tp=tp, sp=True, pp=pp, recompute=recompute, ep=experts, **shared)


def first_that_fits(config: Config) -> Plan:
    """The simplest legal rung that fits in memory, or the one that comes closest."""
    model, cluster, workload, stack = config.model, config.cluster, config.workload, config.stack
    closest, least = None, float("inf")
    reasons = None
    for plan in ladder(model, cluster):
        try:
            plan.check(model, workload, cluster, stack)
        except MeshwrightError as error:
            reasons = reasons or error
            continue
        peak = float(step_cost(step_program(model, plan, workload, stack), cluster).peak_memory[0])
        if peak <= cluster.accelerator.memory:
            return plan
        if peak < least:
            closest, least = plan, peak
    if closest is None:
        assert reasons is not None
        raise reasons
    return closest
