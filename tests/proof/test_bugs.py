"""The comparison finds every bug of the corpus, and the first difference is at the place of the bug."""

from dataclasses import replace
from functools import cache

import bugs
import bugs_axes
import bugs_lossy
import layouts
import pytest

import ranks
from meshwright.describe.plan import Plan
from meshwright.proof import prove as proof
from meshwright.proof.compare import compare

HOMES = (bugs, bugs_axes, bugs_lossy)


def home_of(bug):
    return next(home.__name__ for home in HOMES if hasattr(home, bug.name))


def layout_of(bug, prepare=""):
    return layouts.Layout(bug.model, Plan(**bug.plan), prepare, bug.router)


@cache
def one_device():
    """References of the corpus, except bugs whose ranks must first report their lossy sums."""
    wanted = list(dict.fromkeys(layout_of(bug).reference for bug in bugs.CORPUS if not Plan(**bug.plan).lossy))
    traces = ranks.run(1, layouts.train_all, [layout.job() for layout in wanted])[0]
    return dict(zip(wanted, traces, strict=True))


def agreement(bug):
    job = replace(layout_of(bug, f"{home_of(bug)}:{bug.name}").job(), watch=False)
    traces = [rank[0] for rank in ranks.run(job.plan.world, layouts.train_all, [job])]
    if job.plan.lossy:
        one = proof.one_device(job, [{"fp64": trace} for trace in traces])
        return compare(ranks.run(1, layouts.train_all, [one])[0][0], traces)
    return compare(one_device()[layout_of(bug).reference], traces)


def title(bug):
    return f"{bug.name}-{Plan(**bug.plan).title()}"


FIRST = list(
    {bug.name: bug for bug in reversed(bugs.CORPUS)}.values()
)  # each bug in one layout every day, in others in the soak
OTHERS = [(bug,) for bug in bugs.CORPUS if bug not in FIRST]


@pytest.mark.parametrize("bug", [*FIRST, *ranks.soak(OTHERS)], ids=title)
def test_a_historical_bug_is_caught_where_it_is(bug):
    found = agreement(bug).breaks
    assert found, "the comparison found nothing"
    first = found[0]
    assert (first.what, first.step) == (bug.what, bug.step), str(first)
    assert bug.tensor in first.name, str(first)
    if bug.ratio:
        assert first.ratio == pytest.approx(bug.ratio, rel=1e-6)


def test_the_corpus_is_complete_and_every_bug_is_tried():
    names = {bug.name for bug in bugs.CORPUS}
    assert len(names) >= 25
    written = {
        name
        for home in HOMES
        for name, f in vars(home).items()
        if callable(f) and getattr(f, "__module__", "") == home.__name__
    }
    assert {name for name in written if name[0].islower()} == names
