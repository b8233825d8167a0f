"""The choices of a plan field: the value alone, the value with what must change, or the reason why not."""

import random
from typing import Any

import pytest

from meshwright.describe import catalog
from meshwright.describe.legality import ALL_RULES, Case, legal
from meshwright.describe.legality import case as repairs
from meshwright.describe.legality.case import mended
from meshwright.describe.legality.choices import Choice, choices
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.workload import Workload

MODEL = catalog.load("models", "llama3-70b")
MIXTURE = catalog.load("models", "mixtral-8x7b")
STACK = catalog.load("stacks", "default")
CLUSTER = catalog.load("clusters", "dgx-h100").with_gpus(64)
WORKLOAD = Workload(batch=128, seq=4096)
BASE: dict[str, Any] = {"tp": 8, "sp": True, "pp": 2, "shard": 4, "zero": 1}


def offered(plan: dict[str, Any], field: str, model: Any = MODEL) -> dict[Any, Choice]:
    case = Case(PlanFields(**plan), model, WORKLOAD, CLUSTER, STACK)
    return {choice.value: choice for choice in choices(case, legal)[field]}


@pytest.mark.parametrize(
    ("field", "value", "changes"),
    [
        ("tp", 8, {}),
        ("tp", 4, {"shard": 8}),  # the data-parallel degree takes what tensor parallelism leaves
        ("pp", 4, {"shard": 2}),
        ("pp", 1, {"shard": 8}),
        ("shard", 2, {"replicate": 2}),
        ("replicate", 4, {"shard": 1}),
        ("zero", 3, {}),
        ("zero", 0, {"replicate": 4, "shard": 1}),
        ("schedule", "interleaved", {"virtual": 2}),
        ("virtual", 2, {"schedule": "interleaved"}),
        ("microbatch", 4, {}),
    ],
)
def test_a_choice_names_what_changes_with_it(field: str, value: Any, changes: dict[str, Any]) -> None:
    choice = offered(BASE, field)[value]
    assert choice.legal
    assert (choice.changes or {}) == changes
    assert all(name in choice.reason for name in changes)


def test_zero_shards_what_was_replicated() -> None:
    choice = offered({"tp": 8, "replicate": 8}, "zero")[3]
    assert choice.legal
    assert Plan(tp=8, zero=3, **({"replicate": 8} | (choice.changes or {}))).world == 64


def test_an_illegal_choice_says_why() -> None:
    choice = offered({"shard": 64, "zero": 1}, "pp", catalog.load("models", "llama3-8b"))[64]
    assert not choice.legal
    assert "64 stages for 32 layers" in choice.reason
    assert not choice.changes


def test_every_legal_choice_is_a_legal_plan() -> None:
    """Applied with its changes, it breaks no rule and has the cluster's size."""
    for plan in (BASE, {"tp": 2, "shard": 32, "zero": 3}, {"tp": 3, "replicate": 5}):
        case = Case(PlanFields(**plan), MODEL, WORKLOAD, CLUSTER, STACK)
        for field, values in choices(case, legal).items():
            assert plan.get(field, getattr(PlanFields(), field)) in [choice.value for choice in values]
            for choice in (one for one in values if one.legal):
                done = PlanFields(**{**plan, field: choice.value, **(choice.changes or {})})
                assert bool(legal(Case(done, MODEL, WORKLOAD, CLUSTER, STACK))), (plan, field, choice)
                assert done.world == 64


def test_without_a_size_of_the_cluster_degrees_are_free() -> None:
    case = Case(PlanFields(**BASE), MODEL, WORKLOAD, None, STACK)
    found = {choice.value: choice for choice in choices(case, legal)["tp"]}
    assert found[4].legal
    assert not found[4].changes


def random_case(rng: random.Random) -> Case:
    """A plan with fields drawn at random: often illegal."""
    plan = PlanFields(
        tp=rng.choice((1, 2, 3, 8)), pp=rng.choice((1, 2, 4)), cp=rng.choice((1, 2)), shard=rng.choice((1, 4, 8)),
        replicate=rng.choice((1, 2)), ep=rng.choice((1, 2, 8)), microbatch=rng.choice((1, 2, 3)), sp=rng.random() < 0.5,
        zero=rng.choice((0, 1, 3)), schedule=rng.choice(("1f1b", "interleaved")), virtual=rng.choice((1, 2)),
    )  # fmt: skip
    model = rng.choice((MODEL, MIXTURE))
    return Case(plan, model, WORKLOAD.but(batch=rng.choice((6, 64, 128))), CLUSTER, STACK)


def all_rules_hold(case: Case) -> bool:
    """Every rule, one after the other; `legal` ends at the first broken one."""
    broken = [bool(rule.broken(case)) for rule in ALL_RULES if set(rule.needs) <= case.given]
    return True not in broken


def completed_step_by_step(case: Case, settings: dict[str, Any]) -> dict[str, Any]:
    """`completed` with a new case for every repair, whether or not the last one changed something."""
    out = dict(settings)
    for repair in (repairs._data_parallel, repairs._sequence, repairs._experts, repairs._microbatch):
        out |= repair(case.with_settings(out))
    return out


def test_choices_are_those_of_all_rules_and_all_repairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices and the nearest legal plan stay the same where no rule and no repair is left out."""
    rng = random.Random(16)
    cases = [Case(PlanFields(**BASE), MODEL, WORKLOAD, CLUSTER, STACK), *(random_case(rng) for _ in range(6))]
    assert {bool(legal(case)) for case in cases} == {True, False}
    assert [legal(case) for case in cases] == [all_rules_hold(case) for case in cases]
    found = [(choices(case, legal), mended(case, legal)) for case in cases]
    for module in ("choices", "case"):
        monkeypatch.setattr(f"meshwright.describe.legality.{module}.completed", completed_step_by_step)

    def slow_legal(case: Case) -> Any:
        return all_rules_hold(case) if case.is_one_plan else legal(case)

    assert found == [(choices(case, slow_legal), mended(case, slow_legal)) for case in cases]


def test_given_names_what_the_case_is_checked_against() -> None:
    plan = PlanFields(**BASE)
    assert Case(plan).given == frozenset()
    assert Case(plan, MODEL, None, CLUSTER).given == {"model", "cluster"}
    assert Case(plan, workload=WORKLOAD, stack=STACK, trainer=True).given == {"workload", "stack", "trainer"}
    assert Case(plan, dtypes=True).with_settings({"plan.tp": 1}).given == {"dtypes"}
