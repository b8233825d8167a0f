"""The planner searches only what the framework of a stack can run."""

import pytest

from meshwright.describe import catalog, legality
from meshwright.describe.config import Config
from meshwright.describe.legality import Case
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.planner.advice.lint.check import check
from meshwright.planner.question import ANY_FRAMEWORK, OWN_TRAINER, read, runs_in
from meshwright.planner.search.space import Space

DENSE = Model(hidden=64, layers=6, heads=8, kv_heads=2, ffn=128, vocab=256)
MOE = DENSE.but(experts=4, top_k=2, expert_ffn=64)


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_every_plan_of_the_space_can_run(name: str, model: Model) -> None:
    stack = catalog.load("stacks", FRAMEWORKS[name].stack)
    cluster, workload = catalog.load("clusters", "dgx-h100").with_gpus(8), Workload(batch=16, seq=64)
    space = Space(Config(model, cluster, workload=workload, stack=stack))
    seen = 0
    for rows in space.plans():
        for i in range(0, len(rows), max(1, len(rows) // 40)):
            plan = space.plan(rows, i)
            problem = legality.problem(Case(plan, model, workload, cluster, stack, framework=True))
            assert problem is None, f"{plan.title()}: {problem}"
            seen += 1
        if seen > 200:
            break
    assert seen


def test_a_constraint_that_the_framework_cannot_meet_names_it() -> None:
    question = read("llama3-8b", "dgx-h100", nodes=1, stack="megatron-core", fix=["schedule=dualpipev"])
    with pytest.raises(MeshwrightError) as caught:
        question.space()
    assert caught.value.code == "MW-PLANNER-003"
    assert "Megatron-Core" in caught.value.what


def test_the_plan_is_for_the_stack_that_is_named() -> None:
    assert runs_in(read("llama3-8b", "dgx-h100", nodes=1).config) == ANY_FRAMEWORK
    assert runs_in(read("llama3-8b", "dgx-h100", nodes=1, stack="meshwright").config) == OWN_TRAINER
    assert runs_in(read("llama3-8b", "dgx-h100", nodes=1, stack="torchtitan").config) == "torchtitan"
    assert runs_in(read("llama3-8b", "dgx-h100", nodes=1, stack="maxtext").config) == "maxtext"
    narrow = read("llama3-8b", "dgx-h100", nodes=1, stack="meshwright", set=["workload.precision=mxfp8"])
    assert "modelled only" in runs_in(narrow.config)


def test_deepspeed_splits_layers_or_sequences() -> None:
    stack = catalog.load("stacks", "deepspeed")
    plan = Plan(shard=4, tp=2, cp=2, cp_kind="ulysses", zero=3)
    problem = legality.problem(Case(plan, DENSE, Workload(batch=16, seq=64), None, stack, framework=True))
    assert problem is not None
    assert problem.what == "DeepSpeed does not run tp=2 together with cp=2"
    for fix in ({"tp": 1}, {"cp": 1}):
        assert (
            legality.problem(Case(plan.but(**fix), DENSE, Workload(batch=16, seq=64), None, stack, framework=True))
            is None
        )


def test_accelerate_shards_where_layers_are_split() -> None:
    stack = catalog.load("stacks", "accelerate")
    problem = legality.problem(
        Case(Plan(replicate=4, tp=2), DENSE, Workload(batch=16, seq=64), None, stack, framework=True)
    )
    assert problem is not None
    assert problem.what == "accelerate does not run ZeRO-0 with tensor or expert parallelism"


def test_the_default_stack_has_no_limits() -> None:
    assert not catalog.load("stacks", "default").can.framework


def test_lint_reports_what_the_framework_cannot_run() -> None:
    config = Config.from_parts(
        "llama3-8b",
        {"extends": "dgx-h100", "gpus": 8},
        "megatron-core",
        {"batch": 64},
        {"pp": 8, "virtual": 2, "schedule": "zbv"},
    )
    found = [f for f in check(config) if f.code == "MW-PLAN-023"]
    assert len(found) == 1
    assert "Megatron-Core does not run the schedule zbv" in found[0].what


@pytest.mark.parametrize("name", [n for n in catalog.names("stacks") if catalog.load("stacks", n).can.framework])
def test_limits_have_a_source(name: str) -> None:
    assert len(catalog.load("stacks", name).can.source) > 20
