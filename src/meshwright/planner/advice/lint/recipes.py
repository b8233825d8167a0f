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
from meshwright.planner.advice.lint.check import check as check_plan
from meshwright.planner.advice.lint.finding import Finding
from meshwright.units import Json

SLOW = 0.10  # share of the step that the fix saves


def judge(row: Json) -> RecipeVerdict:
    """The verdict on one recipe, with the patterns that make it slow."""
    verdict = check(row)
    for finding in slow_patterns(verdict):
        verdict.slow = True
        verdict.findings.append(finding.as_dict())
    return verdict


def slow_patterns(verdict: RecipeVerdict) -> list[Finding]:
    reading = verdict.reading
    if reading is None or not verdict.legal or verdict.fits is False or not reading.gpus or not reading.shape.complete:
        return []
    entry = catalog_cluster(reading.hardware)
    if not entry or "seq" not in reading.facts:
        return []
    try:
        cluster = catalog.load("clusters", entry).with_gpus(reading.gpus)
        config = Config(reading.shape.model, cluster, reading.plan, reading.workload, reading.stack)
        findings = check_plan(config)
    except MeshwrightError:
        return []
    return [f for f in findings if _saves(f) >= SLOW and not f.fix.startswith("--set workload.")]


def _saves(finding: Finding) -> float:
    """The share of the step that the fix saves."""
    if not (finding.saves_s and finding.cost_s and finding.share):
        return 0.0
    return finding.saves_s * finding.share / finding.cost_s
