"""An estimate as tables: parts that add up to what is told of the whole, whatever the size of the model."""

import pytest

from meshwright.cost.estimate import estimate
from meshwright.describe.config import load
from meshwright.view.estimate import memory
from meshwright.view.tables import console


@pytest.mark.parametrize(
    ("plan", "unit", "limit"), [("demo-pp2-shard2", "MiB", "2,048"), ("llama3-70b-64xh100", "GiB", "79")]
)
def test_memory_is_told_in_a_unit_that_shows_its_parts(plan, unit, limit):
    c = load(f"examples/{plan}.toml")
    with (out := console()).capture() as text:
        out.print(memory(estimate(c.model, c.cluster, c.plan, c.workload, c.stack)))
    title, head, *stages = text.get().splitlines()
    assert title.split() == ["Memory", "by", "stage,", unit]
    assert head.split()[-2:] == ["of", limit]
    for stage in stages:
        *parts, total = (float(cell) for cell in stage.split()[1:-1])
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(total, abs=0.3)
