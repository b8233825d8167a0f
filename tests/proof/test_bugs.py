"""The comparison catches every bug of the corpus, and what it names first is where the bug is."""

from dataclasses import replace
from functools import cache

import bugs
import bugs_axes
import layouts
import pytest

import ranks
from meshwright.describe.plan import Plan
from meshwright.verify.compare import compare

SILENCE_S = 100.0


def home_of(bug):
    return "bugs" if hasattr(bugs, bug.name) else "bugs_axes"


def layout_of(bug, prepare=""):
    return layouts.Layout(bug.model, Plan(**bug.plan), prepare, bug.router)


@cache
def one_device():
    """References of all the corpus at once."""
    wanted = list(dict.fromkeys(layout_of(bug).reference for bug in bugs.CORPUS))
    traces = ranks.run(1, layouts.train_all, [layout.job() for layout in wanted], silence=SILENCE_S)[0]
    return dict(zip(wanted, traces, strict=True))


def agreement(bug):
    job = replace(layout_of(bug, f"{home_of(bug)}:{bug.name}").job(), watch=False)
    options = {"silence": SILENCE_S, "group_timeout": SILENCE_S / 2}
    by_rank = ranks.run(job.plan.world, layouts.train_all, [job], **options)
    return compare(one_device()[layout_of(bug).reference], [rank[0] for rank in by_rank])


def title(bug):
    return f"{bug.name}-{Plan(**bug.plan).title()}"


@pytest.mark.parametrize("bug", bugs.CORPUS, ids=title)
def test_a_historical_bug_is_caught_where_it_is(bug):
    found = agreement(bug).breaks
    assert found, "the comparison found nothing"
    first = found[0]
    assert (first.what, first.step) == (bug.what, bug.step), str(first)
    assert bug.tensor in first.name, str(first)
    if bug.ratio:
        assert first.ratio == pytest.approx(bug.ratio, rel=1e-6)


def test_there_are_enough_and_each_is_taught():
    names = {bug.name for bug in bugs.CORPUS}
    assert len(names) >= 25
    written = {name for home in (bugs, bugs_axes) for name, f in vars(home).items()
               if callable(f) and getattr(f, "__module__", "") == home.__name__}  # fmt: skip
    assert {name for name in written if name[0].islower()} == names
