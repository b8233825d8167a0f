"""Traces checked against the trace-event format: required fields of each phase, and errors that Perfetto does not draw."""

import json

import pytest

from meshwright.programs.pipelines import build, walk
from meshwright.view.pipelines import pipeline_trace
from meshwright.view.trace import Flow, TraceCounter, TraceSpan, trace_events, write_trace
from trace_format import problems


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_the_trace_of_a_pipeline_is_valid(name):
    walked = walk(build(name, 3, 6), p2p=0.25, hidden=0.5)
    trace = pipeline_trace(walked, seconds_per_unit=1e-3)
    assert problems(json.loads(json.dumps(trace))) == []
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(walked.program)
    assert {e["pid"] for e in spans} == {0, 1, 2}
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(walked.makespan * 1e3)
    assert max(e["args"]["count"] for e in trace["traceEvents"] if e["ph"] == "C") == walked.peak_in_flight.max()
    assert trace["otherData"]["bubble_fraction"] == walked.bubble_fraction


def test_arrows_follow_activations_and_gradients():
    trace = pipeline_trace(walk(build("1f1b", 2, 3)))
    arrows = [(e["name"], e["pid"]) for e in trace["traceEvents"] if e["ph"] == "s"]
    assert sorted(arrows) == [("activation", 0)] * 3 + [("gradient", 1)] * 3


def test_streams_ranks_and_units():
    spans = [
        TraceSpan(1, "compute", "matmul", 0.5, 0.25, args={"flops": 3}),
        TraceSpan(1, "comm:dp", "all-reduce", 0.5, 0.5),
    ]
    trace = trace_events(
        spans,
        flows=[Flow("wait", (1, "compute", 0.6), (1, "comm:dp", 0.7))],
        counters=[TraceCounter(1, "memory", 0.0, {"bytes": 5.0})],
        rank_names={1: "rank 1, node 0"},
        streams=["host", "compute"],
        about={"plan": "tp=2"},
    )
    assert problems(trace) == []
    by_name = {e["name"]: e for e in trace["traceEvents"]}
    assert by_name["matmul"]["ts"] == 500_000.0
    assert by_name["matmul"]["dur"] == 250_000.0
    assert by_name["matmul"]["args"] == {"flops": 3}
    assert (by_name["matmul"]["tid"], by_name["all-reduce"]["tid"]) == (1, 2)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {(1, 1): "compute", (1, 2): "comm:dp"}
    assert by_name["process_name"]["args"]["name"] == "rank 1, node 0"


def test_the_validator_finds_broken_traces():
    span = {"name": "a", "cat": "c", "ph": "X", "ts": 0, "dur": 10, "pid": 0, "tid": 0}
    assert problems({"traceEvents": [span, {**span, "ts": 5}]})
    assert problems({"traceEvents": [{**span, "ts": -1}]})
    assert problems({"traceEvents": [{k: v for k, v in span.items() if k != "dur"}]})
    assert problems({"traceEvents": [span, {"name": "w", "cat": "t", "ph": "s", "ts": 1, "pid": 0, "tid": 0, "id": 1}]})
    assert not problems({"traceEvents": [span, {**span, "ts": 2, "dur": 3}]})


def test_written_to_a_file(tmp_path):
    path = write_trace(pipeline_trace(walk(build("gpipe", 2, 2))), tmp_path / "step.json")
    assert problems(json.loads(path.read_text())) == []
