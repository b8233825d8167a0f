"""A recipe of another framework judged as `lint` judges a plan: what is illegal, what does not fit, and what is slow, with seconds.

`interop.recipes` reads the recipe and finds the first two. Where the shape of the model, the number of GPUs and the hardware are known, the rules of
`lint` for legal plans follow. A pattern is reported as slow only if its fix saves a tenth of the step, and is not a larger batch, which
changes the training.
"""

from __future__ import annotations

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.interop.recipes import RecipeVerdict, check
from meshwright.interop.shapes import catalog_cluster
from meshwright.planner.advice.alternatives import PlanTrials, step
from meshwright.planner.advice.lint.check import check as check_plan
from meshwright.planner.advice.lint.finding import Finding, Seen, finding
from meshwright.units import Json

SLOW = 0.10  # share of the step that the fix saves


def judge(row: Json) -> RecipeVerdict:
    """The verdict on one recipe, with the patterns that make it slow."""
    verdict = check(row)
    for pattern in slow_patterns(verdict):
        verdict.slow = True
        verdict.findings.append(pattern.as_dict())
    return verdict


def slow_patterns(verdict: RecipeVerdict) -> list[Finding]:
    """The findings of `lint` whose fix saves a tenth of the step, where a GPU is stated: most fixes take memory."""
    reading = verdict.reading
    if reading is None or not verdict.legal or verdict.fits is False or not reading.gpus or not reading.shape.complete:
        return []
    entry = catalog_cluster(reading.hardware)
    if not entry or not reading.facts.get("seq"):
        return []
    try:
        cluster = catalog.load("clusters", entry).with_gpus(reading.gpus)
        config = Config(reading.shape.model, cluster, reading.plan, reading.workload, reading.stack)
        trial = PlanTrials(config)
        now = trial.of(config.plan)
        if now is None:
            return []
        wide = wide_reduction(Seen(config, now, trial))
        findings = [*check_plan(config, now), *([wide] if wide else [])]
    except MeshwrightError:
        return []
    return [f for f in findings if _saves(f) >= SLOW and not f.fix.startswith("--set workload.")]


def wide_reduction(seen: Seen) -> Finding | None:
    """017: gradients are reduced in fp32, which sends twice the bytes. Only of recipes: a plan states the dtype on purpose."""
    ranks = seen.plan.dp * seen.plan.cp
    if ranks == 1 or seen.plan.comm_dtype or seen.plan.grad_dtype != "fp32":
        return None
    best = seen.trial.of(seen.plan.but(grad_dtype="bf16"))
    if best is None or step(best) >= seen.step:
        return None
    what = f"gradients of {ranks} ranks are reduced in fp32, bf16 sends half the bytes"
    return finding(seen, "MW-LINT-017", "gradients reduced in fp32", what, seen.step - step(best), best)


def _saves(finding: Finding) -> float:
    """The share of the step that the fix saves."""
    if not (finding.saves_s and finding.cost_s and finding.share):
        return 0.0
    return finding.saves_s * finding.share / finding.cost_s
