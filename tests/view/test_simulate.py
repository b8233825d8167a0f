"""The simulated step: spans of a stream do not overlap, operations fill their actions, and the trace has the trace-event format."""

import itertools
import json
from collections import defaultdict

import pytest

from meshwright.cli import main
from meshwright.cost.walked import walk_step
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.predict.estimate import estimate
from meshwright.view.simulate import closing_spans, spans
from meshwright.view.trace import trace_events

PLAN_FILE = "examples/llama3-70b-64xh100.toml"
PLANS = [
    Plan(tp=8, sp=True, pp=4, shard=2, zero=1),
    Plan(tp=8, pp=4, virtual=2, schedule="interleaved", replicate=2),
    Plan(shard=64, zero=3),
    Plan(tp=4, pp=4, virtual=2, schedule="zbv", shard=4, zero=1),
]


def simulated(plan, stack="default", detail=""):
    model, cluster = catalog.load("models", "llama3-8b"), catalog.load("clusters", "dgx-h100").with_gpus(plan.world)
    e = estimate(Config(model, cluster, plan, Workload(batch=128, seq=2048), catalog.load("stacks", stack)))
    walked = walk_step(e.cost, plan)
    return e, walked, spans(e, walked, detail)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.title())
@pytest.mark.parametrize("stack", ["default", "maxtext"])
def test_streams_never_overlap_and_end_with_the_step(plan, stack):
    _, walked, drawn = simulated(plan, stack)
    by_stream = defaultdict(list)
    for s in drawn:
        by_stream[s.rank, s.stream].append((s.start, s.start + s.duration))
    for times in by_stream.values():
        times.sort()
        assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(times))
    assert max(end for times in by_stream.values() for _, end in times) == pytest.approx(walked.time, rel=1e-9)


def test_every_action_is_drawn_once_and_contains_its_operations():
    _, walked, drawn = simulated(PLANS[0])
    actions = [s for s in drawn if s.stream == "schedule"]
    assert len(actions) == len(walked.walk.program)
    first = min((s for s in actions if s.rank == 0), key=lambda s: s.start)
    inside = [
        s for s in drawn if s.rank == 0 and s.stream == "compute" and s.start < first.start + first.duration - 1e-12
    ]
    assert inside
    assert max(s.start + s.duration for s in inside) <= first.start + first.duration + 1e-9


def test_detail_changes_only_the_number_of_spans():
    counts = [len(simulated(PLANS[0], detail=d)[2]) for d in ("operations", "layers", "actions")]
    assert counts[0] > counts[1] > counts[2]


def test_closing_parts_follow_the_schedule():
    _, walked, _ = simulated(PLANS[0])
    assert all(s.start >= walked.walk.makespan for s in closing_spans(walked))


def test_the_trace_is_in_the_trace_event_format():
    _, _, drawn = simulated(PLANS[1])
    events = trace_events(drawn)["traceEvents"]
    for event in events:
        assert event["ph"] in {"X", "M", "s", "f", "C"}
        if event["ph"] == "X":
            assert isinstance(event["pid"], int)
            assert isinstance(event["tid"], int)
            assert event["dur"] >= 0
            assert event["ts"] >= 0


def test_the_plan_is_given_as_to_estimate(capsys):
    """As the first argument, or with --plan."""
    printed = []
    for words in ((PLAN_FILE,), ("--plan", PLAN_FILE)):
        with pytest.raises(SystemExit, match="0"):
            main(["simulate", *words, "--json"])
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1]
