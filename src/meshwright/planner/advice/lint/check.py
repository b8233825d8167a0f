"""Anti-patterns of a plan, each with its cost in seconds and a fix.

A **rule** looks at an estimate and, where it finds its pattern, reports the cost of the pattern: the seconds it exposes (against the
same plan on a network that does not have the fault), or what its fix saves, if that is more. Its **fix** is the
fastest legal neighbour of the plan that lacks the pattern and fits in memory, as `--set` words, estimated like the plan itself;
where that neighbour is slower no fix is offered.

    error     the plan cannot run: it is illegal, or it does not fit
    warning   the fix saves at least 1% of the step, or the pattern costs at least 10% of it
    note      the pattern is there, but costs little, or no better plan is known

A cost below 0.1% of the step is not reported. A searched winner may show a pattern and still be best: `justify` adds the
reason, in figures, to each finding.

An illegal plan has one finding, with the cost of the usual workaround:

**Indivisible heads.** Frameworks that allow it pad: 52 heads over 8 ranks become 56, and every rank computes heads that are thrown
away. The cost is the padded step beyond the fastest legal degree's.

**Batch arithmetic.** batch = micro-batch × accumulation × dp. A batch of 64 on 128 ranks is half a sequence per rank: in the round that
is not full, batch / padded batch of the ranks work and the others wait for them.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from meshwright.cost.walked import walk_step
from meshwright.describe import legality
from meshwright.describe.config import Config
from meshwright.describe.legality import Case, batch_unit
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan, divisors
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.alternatives import (
    PlanTrials,
    changed,
    data_parallel,
    fits,
    microbatches,
    moves,
    rebatched,
    settings,
    step,
)
from meshwright.planner.advice.changes import Change, first_changes
from meshwright.planner.advice.lint.faster import CODE, faster_value
from meshwright.planner.advice.lint.finding import SAVES, Finding, Seen
from meshwright.planner.advice.lint.rules import BY_CODE, RULES
from meshwright.predict.estimate import Estimate
from meshwright.predict.prediction import resolve_recompute
from meshwright.units import format_seconds

MOST_ACTIONS = 100_000  # of a pipeline that is walked to justify a plan


def check(
    config: Config,
    estimate: Estimate | None = None,
    changes: Sequence[Change] | None = None,
    without: Collection[str] = (),
) -> list[Finding]:
    """Return the findings of all rules: errors first, then by cost. An illegal plan has one finding: the broken rule.

    `changes` are those of `first_changes`, which are computed if None; fields in `without` are not judged by them."""
    trial = PlanTrials(config)
    try:
        config.check()
        resolve_recompute(config.model, config.plan, config.workload, config.stack, config.cluster.accelerator.memory)
    except MeshwrightError as error:
        return [illegal(config, trial, error)]
    now = estimate or trial.of(config.plan)
    assert now is not None, "a legal plan has an estimate"
    seen = Seen(config, now, trial)
    findings = [finding for rule in RULES if (finding := rule(seen)) is not None]
    findings += beyond_framework(config)
    other = faster_value(seen, first_changes(config) if changes is None else changes, without)
    if other is not None and not any(same_gain(f, other) for f in findings):
        findings.append(other)
    rank = {"error": 0, "warning": 1, "note": 2}
    return sorted(findings, key=lambda f: (rank[f.severity], -(f.cost_s or 0.0)))


def same_gain(found: Finding, other: Finding) -> bool:
    """Whether the fix of a finding saves as much as another, to a tenth."""
    return (found.saves_s or 0.0) >= 0.9 * (other.saves_s or 0.0)


def beyond_framework(config: Config) -> list[Finding]:
    """Return the first rule of the stack's framework that the plan breaks."""
    case = Case(config.plan, config.model, config.workload, config.cluster, config.stack, framework=True)
    error = legality.problem(case) if config.stack.can.framework else None
    if error is None:
        return []
    return [Finding(error.code, "beyond the framework", "error", error.what, fix=error.fix)]


def justify(findings: Iterable[Finding], winner: Estimate, alternatives: Sequence[Estimate] = ()) -> list[Finding]:
    """Fill `still_best`: the reason why a plan with a finding is still the best.

    `alternatives` are other plans for the same work (the search's leaders, say): the fastest of them that does not show the
    pattern is the reason if the fix of the rule is not.
    """
    return [replace(f, still_best=reason(f, winner, alternatives)) for f in findings]


def reason(f: Finding, winner: Estimate, alternatives: Sequence[Estimate]) -> str:
    now = step(winner)
    if f.severity == "error":
        return ""
    if fixed := PlanTrials(winner.config).of(f.fixed):
        if not fits(fixed):
            return f"the fix needs {fixed.prediction.memory_gib:.1f} of {fixed.prediction.memory_limit_gib:.1f} GiB"
        if step(fixed) >= now:
            return f"with the fix a step takes {format_seconds(step(fixed))}, {step(fixed) / now - 1:.1%} longer"
        if step(fixed) > now * (1 - SAVES):
            return f"the fix saves {format_seconds(now - step(fixed))}, {1 - step(fixed) / now:.2%} of a step"
        if simulated(fixed) > simulated(winner) * (1 - SAVES):
            walked = f"{format_seconds(simulated(fixed))} against {format_seconds(simulated(winner))}"
            return f"by the closed forms the fix is faster; with its pipeline simulated it takes {walked}"
    without = [e for e in alternatives if fits(e) and not shows(f.code, e)]
    if without:
        best = min(without, key=step)
        if step(best) >= now:
            return f"the fastest of {len(without)} plans without it ({best.plan.title()}) takes {step(best) / now - 1:.1%} longer"
    if f.fix.startswith("--set workload."):
        return "the batch was given: every neighbour with this batch is slower or does not fit"
    if not f.fix:
        return "no legal neighbour without it fits and is faster"
    return ""


def simulated(e: Estimate) -> float:
    """Return the seconds of a step with its pipeline simulated; by closed form without a pipeline, or if the walk would be too long."""
    actions = 3 * e.plan.stages * e.plan.microbatches(e.workload)
    return walk_step(e.cost, e.plan).time if e.plan.pp > 1 and actions <= MOST_ACTIONS else step(e)


def shows(code: str, e: Estimate) -> bool:
    """Whether an estimated plan shows the pattern of a code."""
    seen = Seen(e.config, e, PlanTrials(e.config))
    if code == CODE:
        return faster_value(seen, first_changes(e.config)) is not None
    rule = BY_CODE.get(code)
    return rule is not None and rule(seen) is not None


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
    cost = step(worst) - step(fixed) if worst and fixed else None
    pattern = Finding("MW-LINT-011", "indivisible heads", "error", what, cost, fix=error.fix)
    return with_costs(pattern, plan, fixed, worst)


def batch_arithmetic(config: Config, trial: PlanTrials, error: MeshwrightError) -> Finding:
    plan, workload = config.plan, config.workload
    unit = batch_unit(plan, config.stack)
    whole = -(-workload.batch // unit) * unit
    smaller = [p for p in microbatches(plan, workload) if p is not None and p.microbatch < plan.microbatch]
    fixed = trial.fastest([*smaller, *moves(plan, "dp", workload, config.stack, ("tp", "pp", "cp"))])
    worst = trial.with_changes(plan, workload=workload.but(batch=whole))
    idle = 1 - workload.batch / whole
    what = f"{error.what}: of a step for {whole}, {idle:.0%} is idle or repeated"
    cost = idle * step(worst) if worst else None
    pattern = Finding("MW-LINT-012", "batch arithmetic", "error", what, cost, fix=error.fix)
    return with_costs(pattern, plan, fixed, worst)


def with_costs(pattern: Finding, plan: Plan, fixed: Estimate | None, worst: Estimate | None) -> Finding:
    """A finding with its share of the step of the workaround (`worst`), and with the fastest legal plan as its fix."""
    if pattern.cost_s is not None and worst:
        pattern = replace(pattern, share=pattern.cost_s / step(worst))
    if fixed is None:
        return pattern
    saves = step(worst) - step(fixed) if worst else None
    return replace(pattern, fix=settings(plan, fixed.plan), saves_s=saves, fixed=fixed.plan)


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
