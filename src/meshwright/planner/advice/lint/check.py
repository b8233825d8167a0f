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
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshwright.cost.walked import walk_step
from meshwright.describe import legality
from meshwright.describe.config import Config
from meshwright.describe.legality import Case
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.alternatives import PlanTrials, fits, step
from meshwright.planner.advice.lint.finding import SAVES, Finding, Seen
from meshwright.planner.advice.lint.illegal import illegal
from meshwright.planner.advice.lint.rules import BY_CODE, RULES
from meshwright.predict.estimate import Estimate
from meshwright.predict.recompute import resolve_recompute
from meshwright.units import format_seconds

MOST_ACTIONS = 100_000  # of a pipeline that is walked to justify a plan


def check(config: Config, estimate: Estimate | None = None) -> list[Finding]:
    """Return the findings of all rules: errors first, then by cost. An illegal plan has one finding: the broken rule."""
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
    rank = {"error": 0, "warning": 1, "note": 2}
    return sorted(findings, key=lambda f: (rank[f.severity], -(f.cost_s or 0.0)))


def beyond_framework(config: Config) -> list[Finding]:
    """Return the first rule of the stack's framework that the plan breaks."""
    case = Case.of(config.plan, config.model, config.workload, config.cluster, config.stack, framework=True)
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
    if f.fixed is not None:
        trial = PlanTrials(winner.config)
        fixed = trial.of(f.fixed)
        if fixed is not None and not fits(fixed):
            return f"the fix needs {fixed.prediction.memory_gib:.1f} of {fixed.prediction.memory_limit_gib:.1f} GiB"
        if fixed is not None and step(fixed) >= now:
            return f"with the fix a step takes {format_seconds(step(fixed))}, {step(fixed) / now - 1:.1%} longer"
        if fixed is not None and step(fixed) > now * (1 - SAVES):
            return f"the fix saves {format_seconds(now - step(fixed))}, {1 - step(fixed) / now:.2%} of a step"
        if fixed is not None and simulated(fixed) > simulated(winner) * (1 - SAVES):
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
    rule = BY_CODE.get(code)
    return rule is not None and rule(seen) is not None
