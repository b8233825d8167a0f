"""Brackets hold what a walk finds, and the estimate inside them ranks plans nearly as walking each one does."""

import numpy as np
import pytest

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan_fields import PlanArrays
from meshwright.describe.workload import Workload
from meshwright.planner.search.branch_and_bound import Incumbents, Search, SearchOutcome
from meshwright.planner.search.leaders import rank
from meshwright.planner.search.pipeline_walk import walk
from meshwright.planner.search.space import Space

PROBLEMS = [("llama3-8b", "dgx-h100", 32), ("mixtral-8x7b", "dgx-a100", 48), ("gpt3-13b", "gb200-nvl72", 40)]


def walked(model: str, cluster: str, gpus: int, count: int = 100) -> tuple[Space, PlanArrays, np.ndarray]:
    """A space, random plans of it with pipelines, costed, and their walked seconds."""
    rng = np.random.default_rng(7)
    where = Space(
        Config(
            catalog.load("models", model),
            catalog.load("clusters", cluster).with_gpus(gpus),
            workload=Workload(batch=4 * gpus, seq=2048),
            stack=catalog.load("stacks", "default"),
        )
    )

    def some(rows: PlanArrays, n: int) -> PlanArrays:
        return rows.take(np.sort(rng.permutation(len(rows))[:n]))

    rows = where.shaped(some(where.frames.take(where.frames.pp > 1), 100))
    rows = rows.take(where.microbatches(rows) <= 32)
    rows = some(where.scheduled(some(where.sharded(some(where.placed(rows), 500)), 1000)), count)
    rows = Search(where, np.inf).cost(rows)
    return where, rows, walk(where, rows)[1]


@pytest.mark.parametrize(("model", "cluster", "gpus"), PROBLEMS)
def test_the_estimate_ranks_as_walking_does(model, cluster, gpus):
    where, rows, times = walked(model, cluster, gpus)
    inside = (times >= 0.99 * rows.low) & (times <= 1.01 * rows.high)
    assert inside.mean() >= 0.94
    assert np.median(abs(rows.estimate / times - 1)) < np.median(abs(rows.closed / times - 1))
    assert len({*rows.estimate.argsort()[:20].tolist()} & {*times.argsort()[:20].tolist()}) >= 16
    # What the estimate gets wrong, walking the leaders puts right.
    best = Incumbents(np.inf)
    best.offer(rows)
    ranking = rank(where, SearchOutcome(best.found(), best, {}, set(), len(rows), len(rows)))
    assert ranking.best.time <= 1.01 * times.min()


def test_without_a_pipeline_there_is_nothing_to_bracket():
    where = Space(
        Config(
            catalog.load("models", "gpt2-xl"),
            catalog.load("clusters", "dgx-a100").with_gpus(8),
            workload=Workload(batch=16, seq=1024),
            stack=catalog.load("stacks", "default"),
        )
    )
    rows = where.scheduled(where.sharded(where.placed(where.shaped(where.frames.take(where.frames.pp == 1))))).take(
        slice(0, 50)
    )
    rows = Search(where, np.inf).cost(rows)
    for name in ("time", "closed", "high", "estimate"):
        np.testing.assert_array_equal(rows.low, rows.columns[name])
