"""The anti-pattern that makes a plan illegal, with the cost of the usual workaround.

**Indivisible heads.** Frameworks that allow it pad: 52 heads over 8 ranks become 56, and every rank computes heads that are thrown
away. The cost is the padded step beyond the fastest legal degree's.

**Batch arithmetic.** batch = micro-batch × accumulation × dp. A batch of 64 on 128 ranks is half a sequence per rank: in the round that
is not full, batch / padded batch of the ranks work and the others wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.describe.config import Config
from meshwright.describe.legality import batch_unit
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan, divisors
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.alternatives import (
    PlanTrials,
    changed,
    data_parallel,
    microbatches,
    moves,
    rebatched,
    settings,
    step,
)
from meshwright.planner.advice.lint.finding import Finding
from meshwright.predict.estimate import Estimate

HEADS, BATCH = ("MW-PLAN-004",), ("MW-PLAN-011", "MW-PLAN-012")


def illegal(config: Config, trial: PlanTrials, error: MeshwrightError) -> Finding:
    """The pattern behind an illegal plan; an error without a pattern is re-raised."""
    if error.code in HEADS:
        return indivisible_heads(config, trial, error)
    if error.code in BATCH:
        return batch_arithmetic(config, trial, error)
    raise error


def indivisible_heads(config: Config, trial: PlanTrials, error: MeshwrightError) -> Finding:
    plan = config.plan
    fixed = trial.fastest(other_degrees(plan, config))
    model = padded(config.model, plan.tp)
    worst = trial.with_changes(plan, model=model)
    what = f"{error.what}: padded to {model.heads} heads, {1 - config.model.heads / model.heads:.1%} of attention is thrown away"
    return illegal_finding(
        "MW-LINT-011",
        "indivisible heads",
        what,
        plan,
        fixed,
        worst,
        error,
        step(worst) - step(fixed) if worst and fixed else None,
    )


def batch_arithmetic(config: Config, trial: PlanTrials, error: MeshwrightError) -> Finding:
    plan, workload = config.plan, config.workload
    unit = batch_unit(plan, config.stack)
    whole = -(-workload.batch // unit) * unit
    smaller = [p for p in microbatches(plan, workload) if p is not None and p.microbatch < plan.microbatch]
    fixed = trial.fastest([*smaller, *moves(plan, "dp", workload, config.stack, ("tp", "pp", "cp"))])
    worst = trial.with_changes(plan, workload=workload.but(batch=whole))
    idle = 1 - workload.batch / whole
    what = f"{error.what}: of a step for {whole}, {idle:.0%} is idle or repeated"
    return illegal_finding(
        "MW-LINT-012", "batch arithmetic", what, plan, fixed, worst, error, idle * step(worst) if worst else None
    )


def illegal_finding(
    code: str,
    name: str,
    what: str,
    plan: Plan,
    fixed: Estimate | None,
    worst: Estimate | None,
    error: MeshwrightError,
    cost: float | None,
) -> Finding:
    share = cost / step(worst) if cost is not None and worst else None
    if fixed is None:
        return Finding(code, name, "error", what, cost, share, error.fix)
    saves = step(worst) - step(fixed) if worst else None
    return Finding(code, name, "error", what, cost, share, settings(plan, fixed.plan), saves, fixed.plan)


def other_degrees(plan: Plan, config: Config) -> Iterator[Plan | None]:
    """Every tensor-parallel degree with data parallelism over all other devices."""
    room = config.cluster.world // (plan.cp * plan.pp)
    for tp in divisors(room):
        changes = {"tp": tp, **data_parallel(plan, room // tp)}
        yield rebatched(changed(plan, **changes, sp=plan.sp and tp > 1), config.workload, config.stack)


def padded(model: Model, tp: int) -> Model:
    """The model with heads, KV heads and FFN rounded up to multiples of tp, as a padding framework runs it."""

    def up(n: int) -> int:
        return -(-n // tp) * tp

    groups = model.kv_groups
    kv = groups if groups % tp == 0 or tp % groups == 0 else up(groups)
    heads = up(kv * (model.heads // groups))
    changes = {"heads": heads, "kv_heads": heads if groups == model.heads else kv, "head_dim": model.head_width}
    return (
        model.but(**changes, ffn=up(model.ffn)) if model.kind == "transformer" else model.but(hidden=up(model.hidden))
    )
