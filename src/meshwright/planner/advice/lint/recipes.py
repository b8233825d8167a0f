"""A recipe of another framework judged as `lint` judges a plan: what is illegal, what does not fit, and what is slow, with seconds.

`interop.recipes` reads the recipe and finds the first two. Where the shape of the model, the number of GPUs and the hardware are known, the rules of
`lint` for legal plans follow. A pattern is reported as slow only if its fix saves a tenth of the step, more than the doubt about the difference of
two plans, and is not a larger batch, which changes the training.
"""

import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.cost.band import indistinguishable
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.result import USABLE_MEMORY
from meshwright.errors import MeshwrightError
from meshwright.host import end_with_parent, usable_processes
from meshwright.interop.keys import Facts
from meshwright.interop.recipes import RecipeVerdict, check
from meshwright.interop.shapes import catalog_cluster
from meshwright.planner.advice.alternatives import PlanTrials, step
from meshwright.planner.advice.lint.check import check as check_plan
from meshwright.planner.advice.lint.finding import Finding, Seen, finding
from meshwright.predict.estimate import Estimate
from meshwright.units import Json

LEAST_RECIPES = 20  # for which starting another process pays
SLOW = 0.10  # share of the step that the fix saves
# Patterns that settings exclude. A larger micro-batch saves host time, which CUDA graphs do not need,
# and a micro-batch of packed samples is one sequence. DeepEP and HybridEP send a token to a node once, which the cost of the exchange does not have.
MICROBATCH = ("MW-LINT-005",)
EXCLUDED = {"cuda_graphs": MICROBATCH, "packed_seq": MICROBATCH, "dispatcher": ("MW-LINT-009",)}
FIELDS = {"cuda_graphs": ("microbatch",), "packed_seq": ("microbatch",), "dispatcher": ("ep", "expert_tp")}


def judge_all(recipes: Sequence[Json]) -> Iterator[RecipeVerdict]:
    """The verdicts on many recipes in their order, without their readings, computed on all cores."""
    processes = min(usable_processes(), len(recipes) // LEAST_RECIPES)
    if processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(judge, recipes)
        return
    yield judge(recipes[0])  # fills the catalog's caches, which the processes share
    gc.freeze()  # what is imported stays: each collection would go over it
    with multiprocessing.get_context("fork").Pool(processes, end_with_parent) as pool:
        yield from pool.imap(_judge_alone, recipes[1:])
    gc.unfreeze()


def _judge_alone(row: Json) -> RecipeVerdict:
    """A verdict that can be sent to another process."""
    return replace(judge(row), reading=None)


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
    if not entry or not reading.facts.get("seq") or reading.facts.get("offloads_modules"):  # a plan offloads layers
        return []
    try:
        cluster = catalog.load("clusters", entry).with_gpus(reading.gpus)
        config = Config(reading.shape.model, cluster, reading.plan, reading.workload, reading.stack)
        trial = PlanTrials(config)
        now = trial.of(config.plan)
        if now is None:
            return []
        seen = Seen(config, now, trial)
        findings = [
            *check_plan(
                config,
                now,
                without={name for fact, names in FIELDS.items() if reading.facts.get(fact) for name in names},
            ),
            *(rule(seen) for rule in (wide_reduction, needless_offload, wide_products)),
        ]
        known = [f for f in findings if f and f.code not in _not_judged(reading.facts)]
        return [f for f in known if _is_slow(f, now, trial)]
    except MeshwrightError:
        return []


def _not_judged(facts: Facts) -> set[str]:
    """The codes of patterns that say nothing about settings with these facts."""
    return {code for fact, codes in EXCLUDED.items() if facts.get(fact) for code in codes}


def _is_slow(finding: Finding, now: Estimate, trial: PlanTrials) -> bool:
    """Whether the fix surely saves a tenth of the step without another batch."""
    if _saves(finding) < SLOW or finding.fix.startswith("--set workload.batch"):
        return False
    fixed = trial.of(finding.fixed) if finding.fixed else None
    return fixed is None or not indistinguishable(now.prediction.exposed_s, fixed.prediction.exposed_s)


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


def needless_offload(seen: Seen) -> Finding | None:
    """018: states or activations are in host memory although the device has room for them. Only of recipes, as 017."""
    if seen.plan.offload == "none":
        return None
    best = seen.trial.of(seen.plan.but(offload="none", offload_layers=0))
    if best is None or step(best) >= seen.step:
        return None
    peak, limit = best.prediction.memory_gib, best.prediction.memory_limit_gib
    if peak is None or limit is None or peak > USABLE_MEMORY * limit:
        return None
    memory = f"{peak:.1f} of {limit:.1f} GiB"
    what = f"{seen.plan.offload} in host memory though the device needs {memory} with them"
    return finding(seen, "MW-LINT-018", "offload without need", what, seen.step - step(best), best)


def wide_products(seen: Seen) -> Finding | None:
    """019: products in fp32 on a device with tensor cores for bf16. Only of recipes, as 017: frameworks default to fp32."""
    config = seen.config
    if config.workload.precision != "fp32" or not config.cluster.accelerator.peak.get("bf16"):
        return None
    workload, plan = config.workload.but(precision="bf16"), seen.plan.but(param_dtype="bf16", master=True)
    best = seen.trial.with_changes(plan, workload=workload)
    if best is None or step(best) >= seen.step:
        return None
    saved = seen.step - step(best)
    what = "weights and products are in fp32: bf16 is not set"
    return finding(
        seen, "MW-LINT-019", "training in fp32", what, saved, words="--set workload.precision=bf16", saves=saved
    )


def _saves(finding: Finding) -> float:
    """The share of the step that the fix saves."""
    if not (finding.saves_s and finding.cost_s and finding.share):
        return 0.0
    return finding.saves_s * finding.share / finding.cost_s
