"""Compression of gradients is lossy: it is searched only where it is allowed, offered with its gain otherwise, and its bounds hold."""

import numpy as np
import pytest

from meshwright import planner
from meshwright.describe import legality
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.search import bounds
from meshwright.planner.search.branch_and_bound import Search, search
from meshwright.planner.search.choices import read
from meshwright.planner.search.leaders import compressions, solve
from meshwright.planner.search.space import join
from meshwright.predict.estimate import estimate
from planner.spaces import DENSE, MOE, space
from ranks import soak

FEW = ["reorder", "cp", "hsdp"]  # fewer plans, to cost every one
SLOW = {"gpus": 16, "batch": 64, "seq": 1024}  # nodes on 100 Gb/s Ethernet


@pytest.mark.parametrize(
    ("model", "stack", "name"),
    [(MOE, "default", "int8"), (DENSE, "megatron-core", "bf16"), *soak([(DENSE, "default", "int8")])],
)
def test_the_search_finds_what_costing_every_compressed_plan_finds(model, stack, name):
    where = space(model, 4, 8, stack=stack, without=FEW)
    there = where.with_base(Plan(compression=name))
    one = Search(there, np.inf)
    rows = join([one.cost(part) for part in there.plans(8192)])
    limit = float(np.quantile(rows.memory, 0.5))
    fitting = rows.take(rows.memory <= limit)
    enough = 1.05 * float(fitting.high.min())
    found = Search(there, limit).run_below(bounds.reused(there, search(where).frames, enough), enough, 10**9)
    assert found.rows.time.min() == pytest.approx(fitting.time.min(), rel=1e-12)
    assert Search(there, limit).run().rows.time.min() == pytest.approx(fitting.time.min(), rel=1e-12)


def test_it_is_searched_only_where_it_is_allowed():
    plain = space(DENSE, 4, 8, without=FEW)
    allowed = space(DENSE, 4, 8, without=FEW, allow=["compression=int8,powersgd"])
    assert compressions(plain) == []
    assert compressions(allowed) == ["int8", "powersgd"]
    assert compressions(allowed.with_base(Plan(compression="int8"))) == ["none", "powersgd"]
    assert all(c.plan.compression == "none" for c in solve(plain)[1].leaders)
    with pytest.raises(MeshwrightError, match=r"MW-PLANNER-002.*--allow compression=powersgd"):
        read(allow=["compression=powersdg"])


def test_on_slow_links_it_is_offered_and_wins_where_allowed():
    asked = planner.plan("gpt2-xl", "ethernet-cluster", **SLOW, without=["pp", "tp", "cp"])
    assert asked.plan.wire == "none"
    offer = asked.explanation.reasons["compression"]
    assert "lossy" in offer
    assert all(name in offer for name in ("bf16 -", "int8 -", "--allow compression=bf16"))
    taken = planner.plan(
        "gpt2-xl", "ethernet-cluster", **SLOW, without=["pp", "tp", "cp"], allow={"compression": "int8"}
    )
    assert taken.plan.compression == "int8"
    assert taken.prediction.step_time_s < 0.98 * asked.prediction.step_time_s
    assert "lossy" in taken.explanation.reasons["compression"]
    s = taken.space
    legality.check(taken.plan, s.model, s.workload, s.cluster, s.stack, trainer=True, dtypes=True)
    e = estimate(s.config.but(plan=taken.plan))
    assert e.prediction.memory_gib <= 0.95 * e.prediction.memory_limit_gib


def test_it_is_not_offered_where_communication_is_hidden_or_the_stack_cannot():
    fast = planner.plan("llama3-8b", "dgx-h100", gpus=8, batch=256, seq=4096)
    assert "compression" not in fast.explanation.reasons
    unable = planner.plan("gpt2-xl", "ethernet-cluster", **SLOW, without=["pp", "tp", "cp"], stack="nanotron")
    assert "compression" not in unable.explanation.reasons
