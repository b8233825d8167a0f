"""Each anti-pattern in a winner of the search has a reason, in figures, why the plan is still the best: forty models and clusters."""

from functools import cache

import pytest

from meshwright.describe.config import Config
from meshwright.planner.advice.lint import check as lint
from meshwright.planner.search.leaders import solve
from meshwright.planner.search.space import Space
from meshwright.predict.estimate import Estimate, estimate

CLUSTERS = {"dgx-h100": 16, "dgx-a100": 32, "ethernet-cluster": 16, "gcp-a3-high": 16, "gb200-nvl72": 72}
MODELS = {
    "llama3.2-1b": 64,
    "gpt3-6.7b": 128,
    "llama3-8b": 144,
    "qwen2.5-14b": 144,
    "mixtral-8x7b": 144,
    "deepseek-v2-lite": 144,
    "bert-large": 288,
    "llama-33b": 144,
}
PAIRS = [(model, cluster) for model in MODELS for cluster in CLUSTERS]
QUICK = ("llama3.2-1b", "gcp-a3-high")  # every day; all pairs in the soak


def question(model: str, cluster: str) -> Config:
    seq = 512 if model == "bert-large" else 4096
    return Config.from_parts(
        model, {"extends": cluster, "gpus": CLUSTERS[cluster]}, "default", {"batch": MODELS[model], "seq": seq}
    )


@cache
def leaders(model: str, cluster: str) -> list[Estimate]:
    """Estimates of the fastest plans of the search; empty if no plan fits."""
    c = question(model, cluster)
    _, ranking = solve(Space(c))
    plans = [one.plan for one in ranking.leaders[:8]] if ranking else []
    return [estimate(c.but(plan=plan)) for plan in plans]


def unexplained(model: str, cluster: str) -> list[str]:
    c, best = question(model, cluster), leaders(model, cluster)
    if not best:
        return []
    winner = Config(c.model, c.cluster, best[0].plan, c.workload, c.stack)
    findings = lint.justify(lint.check(winner, best[0]), best[0], best[1:])
    return [
        f"{best[0].plan.title()}: {f.code} {f.what}; {f.fix} saves {f.saves_s}" for f in findings if not f.still_best
    ]


def test_there_are_forty_pairs() -> None:
    assert len(PAIRS) == 40


def test_a_winner_has_a_reason_for_each_finding() -> None:
    assert unexplained(*QUICK) == []


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cluster"), PAIRS)
def test_every_winner_has_a_reason_for_each_finding(model: str, cluster: str) -> None:
    assert unexplained(model, cluster) == []


def test_a_worse_plan_has_no_such_reason() -> None:
    """A control for the tests above: a winner that is made worse on purpose has no reason."""
    c, best = question(*QUICK), leaders(*QUICK)[0]
    spoiled = best.plan.but(recompute="full")
    worse = estimate(c.but(plan=spoiled))
    findings = lint.justify(lint.check(Config(c.model, c.cluster, spoiled, c.workload, c.stack), worse), worse, [best])
    assert {f.code for f in findings if not f.still_best} >= {"MW-LINT-014"}
