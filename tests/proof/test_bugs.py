"""The comparison catches every bug of the corpus, and what it names first is where the bug is."""

from functools import cache

import bugs
import layouts
import pytest

import ranks
from meshwright.describe.plan import Plan
from meshwright.verify.compare import compare
from meshwright.verify.records import Job

SILENCE_S = 100.0


@cache
def one_device():
    """References of all the corpus at once."""
    keys = list(dict.fromkeys((bug.model, bug.router) for bug in bugs.CORPUS))
    jobs = [job(model, Plan(microbatch=8), router) for model, router in keys]
    return dict(zip(keys, ranks.run(1, layouts.train_all, jobs, silence=SILENCE_S)[0], strict=True))


def job(model, plan, router, prepare=""):
    return Job(layouts.MODELS[model], plan, layouts.WORKLOAD, steps=layouts.STEPS, dtypes=("fp64",), prepare=prepare,
               router=dict(router))  # fmt: skip


def agreement(bug, prepare):
    plan = Plan(**bug.plan)
    trial = job(bug.model, plan, bug.router, prepare)
    by_rank = ranks.run(plan.world, layouts.train_all, [trial], silence=SILENCE_S, group_timeout=SILENCE_S / 2)
    return compare(one_device()[bug.model, bug.router], [rank[0] for rank in by_rank])


def title(bug):
    return f"{bug.name}-{Plan(**bug.plan).title()}"


@pytest.mark.parametrize("bug", bugs.CORPUS, ids=title)
def test_a_historical_bug_is_caught_where_it_is(bug):
    found = agreement(bug, f"bugs:{bug.name}").breaks
    assert found, "the comparison found nothing"
    first = found[0]
    assert (first.what, first.step) == (bug.what, bug.step), str(first)
    assert bug.tensor in first.name, str(first)
    if bug.ratio:
        assert first.ratio == pytest.approx(bug.ratio, rel=1e-6)


def test_there_are_enough_and_each_is_taught():
    names = {bug.name for bug in bugs.CORPUS}
    assert len(names) >= 25
    written = {name for name, f in vars(bugs).items() if callable(f) and getattr(f, "__module__", "") == "bugs"}
    assert {n for n in written if n[0].islower()} - {"_change_sent_gradient"} == names
