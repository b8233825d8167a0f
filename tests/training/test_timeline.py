"""The measured timeline: same streams, names and categories as the simulated step, and a valid trace."""

import itertools
import json
from collections import defaultdict

import pytest

import ranks
from meshwright.describe.config import Config
from meshwright.training.hooks import RankReport
from meshwright.training.measure.timeline import both_steps
from meshwright.view import trace as file_format
from trace_format import problems

MODEL = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 32, "tied": False}
EXPERTS = {**MODEL, "experts": 4, "top_k": 2, "expert_ffn": 16}
WORKLOAD = {"batch": 4, "seq": 8, "precision": "fp32"}
FP32 = {"param_dtype": "fp32", "master": False}
PLANS = {
    "dp": (MODEL, {"replicate": 2}),
    "zero3": (MODEL, {"shard": 2, "zero": 3}),
    "tp": (MODEL, {"tp": 2}),
    "sp": (MODEL, {"tp": 2, "sp": True, "recompute": "full"}),
    "pp": (MODEL, {"pp": 2}),
    "split backward": (MODEL, {"pp": 2, "schedule": "zb-h1"}),
    "cp": (MODEL, {"cp": 2}),
    "ep": (EXPERTS, {"replicate": 2, "ep": 2}),
}
# A simulated step counts these in its optimizer, or in the waits between its actions.
MEASURED_ONLY = {"count-tokens", "norm-and-loss", "worst-load", "activations", "gradients"}


def config(model, plan):
    return Config.from_parts(model, "laptop", "gloo-cpu", WORKLOAD, {**FP32, **plan})


def traced(context, cases):
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer
    from meshwright.training.measure.profile import trace_step

    out = []
    for made in cases:
        parallel = apply(made.model, made.plan, made.workload, context.rank)
        trainer = Trainer(parallel, RandomSamples(made.model, made.workload.seq, 0))
        trainer.train(1)
        before = dict(vars(parallel))
        step = trace_step(trainer)
        assert list(vars(parallel)) == list(before)  # nothing of the tracer is left
        assert not trainer.hooks
        trainer.train(1)
        out.append(RankReport(context.rank, parallel.mesh.coordinates["pp"], 0, 0, {}, traced=(step,)))
    return out


@pytest.fixture(scope="module")
def timelines():
    """Of each plan the content of `timeline.json`."""
    cases = [config(*plan) for plan in PLANS.values()]
    reports = ranks.run(2, traced, cases)
    return dict(
        zip(
            PLANS,
            (both_steps(made, found) for made, found in zip(cases, zip(*reports, strict=True), strict=True)),
            strict=True,
        )
    )


def labels(spans):
    return {(s["stream"].partition(":")[0], s["name"], s["category"]) for s in spans}


@pytest.mark.parametrize("plan", PLANS)
def test_measured_and_simulated_events_have_the_same_names(timelines, plan):
    measured, simulated = (labels(timelines[plan][side]) for side in ("measured", "simulated"))
    assert {row for row in measured if row[1] not in MEASURED_ONLY} == simulated
    assert {"norm-and-loss"} < {name for _, name, _ in measured}


@pytest.mark.parametrize("plan", PLANS)
def test_the_trace_of_both_steps_is_valid(timelines, plan):
    found = json.loads(json.dumps(timelines[plan]))
    assert found["version"] == file_format.VERSION == 1
    assert set(found["measured"][0]) == set(found["simulated"][0])
    trace = file_format.both_steps(found)
    assert problems(trace) == []
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    stages = 2 if "pp" in PLANS[plan][1] else 1
    assert names == ["measured: rank 0", "measured: rank 1", *(f"simulated: rank {i}" for i in range(stages))]
    streams = defaultdict(list)
    for span in found["measured"]:
        streams[span["rank"], span["stream"]].append((span["start_s"], span["start_s"] + span["duration_s"]))
    for times in streams.values():
        assert min(times)[0] >= 0
        assert all(b[0] >= a[1] - 1e-7 for a, b in itertools.pairwise(sorted(times)))


def test_messages_between_stages_are_named_by_their_direction(timelines):
    received = [(s["rank"], s["name"]) for s in timelines["pp"]["measured"] if s["stream"] == "comm:pp"]
    microbatches = 4
    assert sorted(received) == [(0, "gradients")] * microbatches + [(1, "activations")] * microbatches


def test_backward_visits_the_blocks_in_reverse(timelines):
    spans = [s for s in timelines["dp"]["measured"] if s["rank"] == 0 and s["stream"] == "compute"]
    names = [s["name"] for s in sorted(spans, key=lambda s: s["start_s"])]
    assert names[:8] == ["embedding 0", "dense 1", "dense 2", "head 3", "head 0", "dense 1", "dense 2", "embedding 3"]
    assert names[-1] == "optimizer"


def test_sums_over_tp_are_named_in_the_order_they_run(timelines):
    spans = [s for s in timelines["tp"]["measured"] if s["rank"] == 0 and s["stream"] == "comm:tp"]
    names = [s["name"] for s in sorted(spans, key=lambda s: s["start_s"])]
    layer = ["attention-out", "ffn-out"]
    assert names[:7] == ["embedding-out", *layer, *layer, "loss-maximum", "loss-sums"]
    assert names[7:12] == ["head-in-grad", *["ffn-in-grad", "attention-in-grad"] * 2]


@pytest.mark.parametrize(("step_s", "timed", "traced"), [(0.1, 20, 3), (0.1, 5, 1), (12.0, 20, 2), (31.0, 20, 0)])
def test_tracing_ends_within_half_a_minute(monkeypatch, step_s, timed, traced) -> None:
    """The traced steps follow a run: a step of minutes would double its time."""
    from meshwright.training.measure import profile

    monkeypatch.setattr(profile, "trace_step", lambda trainer: "step")
    assert len(profile.trace_steps(None, timed, step_s)) == traced
