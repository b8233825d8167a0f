"""An estimate as tables: the parts add up to the total for every size of model."""

import re
from dataclasses import replace

import pytest

from meshwright.describe.config import load
from meshwright.predict.estimate import estimate
from meshwright.view.estimate import memory, traffic
from meshwright.view.tables import console


@pytest.mark.parametrize(
    ("plan", "unit", "limit"), [("demo-pp2-shard2", "MiB", "2,048"), ("llama3-70b-64xh100", "GiB", "79")]
)
def test_memory_is_printed_in_a_unit_that_shows_its_parts(plan, unit, limit):
    c = load(f"examples/{plan}.toml")
    with (out := console()).capture() as text:
        out.print(memory(estimate(c)))
    title, head, *stages = text.get().splitlines()
    assert title.split() == ["Memory", "by", "stage,", unit]
    assert head.split()[-2:] == ["of", limit]
    for stage in stages:
        *parts, total = (float(cell) for cell in stage.split()[1:-1])
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(total, abs=0.3)


@pytest.mark.parametrize(("exposed_s", "shown"), [(2.0, "2 s"), (0.0, "hidden")])
def test_communication_without_exposed_time_is_shown_as_hidden(exposed_s, shown):
    c = load("examples/llama3-70b-64xh100.toml")
    e = estimate(c)
    exposed = e.prediction.exposed_s | {"tp": exposed_s}
    e = replace(e, prediction=replace(e.prediction, exposed_s=exposed))
    with (out := console()).capture() as text:
        out.print(traffic(e))
    rows = {line.split()[0]: line for line in text.get().splitlines()[2:]}
    assert rows["tp"].endswith(shown)
    assert rows["pp"].endswith("in bubble")
    assert "0 ns" not in text.get()


def test_legends_are_readable_without_colour():
    """Each kind of time has a different fill character, in the bars and in the legend."""
    from meshwright.view.estimate import COLOURS, FILL, legend

    assert len(set(FILL.values())) == len(FILL) == len(COLOURS)
    plain = re.sub(r"\[.*?\]", "", legend())
    assert all(f"{2 * fill} {kind}" in plain for kind, fill in FILL.items())
